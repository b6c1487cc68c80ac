"""Which index stands at which position of the fresh stream: passes over the data, shuffled, cut and dealt out to ranks.

A pass is what the plain loader would deliver in one epoch. Over all ranks it consists of *slots*, which are dealt out as
``DistributedSampler`` deals them: slot ``p * replicas + rank`` is position ``p`` of that rank. Slots beyond the length of the
data set are filled from the start of the pass. What stands in a slot is an *entry*: an index, or a list of them where a user's
batch sampler yields lists.

* `ShuffledOrder` is a permutation that can be entered anywhere: no list of the data set's length is ever made.
* `SequentialOrder` is the data set's own order.
* `SamplerOrder`, in ``fetching/sampler_order.py``, is that of a user's sampler.

Spreading: with echoing an index of one pass may still be live when the next pass begins. So each pass is rearranged a little:
among the indices that have not been seen for ``distance`` slots, the one that comes first in the pass's own order is taken
next. Only the first slots of a pass, its *head*, change. The end of a pass stays as it was, unless the pass is short. The head
of the next pass depends on that end alone, so it can be worked out without all earlier passes. Until echoing begins, nothing
changes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_echo.planning.hashing import mix

__all__ = ["Order", "SequentialOrder", "ShuffledOrder", "entry_key", "permute", "spread"]

Slots = npt.NDArray[np.uint64]
"""Slots of a pass, or places in the pass's own order."""

_CHUNK = 1024
_FEISTEL_ROUNDS = 4


def permute(slots: Slots, length: int, key: int) -> Slots:
    """Returns the values of a random permutation of ``range(length)`` at ``slots`` only.

    A Feistel network on the digits of a number in base ``ceil(sqrt(length))``, walked on until it falls inside the range.
    """
    columns = math.isqrt(length - 1) + 1
    rows = -(-length // columns)
    values: Slots = slots.copy()
    outside: npt.NDArray[np.bool_] = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(columns), np.uint64(rows), key)
        outside = values >= length
    return values


def _feistel(values: Slots, columns: np.uint64, rows: np.uint64, key: int) -> Slots:
    row: Slots
    column: Slots
    row, column = np.divmod(values, columns)
    for i in range(_FEISTEL_ROUNDS):
        column = (column + _hash(row, mix(key, 2 * i))) % columns
        row = (row + _hash(column, mix(key, 2 * i + 1))) % rows
    mixed: Slots = column + columns * row
    return mixed


def _hash(values: Slots, key: int) -> Slots:
    mixed: Slots = (values ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(32))) >> np.uint64(1)
    return mixed


def entry_key(entry: Any) -> Any:
    """Returns a hashable value that two entries share if they are the same index.

    Entries themselves cannot be compared: equal tensors have different hashes, and lists have none.
    """
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if isinstance(entry, list | tuple):
        return tuple(map(entry_key, entry))
    return entry if isinstance(entry, Hashable) else repr(entry)


def spread(entries: Iterable[Any], last_seen: dict[Any, int], distance: int) -> tuple[list[int], list[Any]]:
    """Rearranges the start of a pass so that no index returns within ``distance`` slots.

    Args:
        entries: The pass in its own order.
        last_seen: For the last ``distance`` slots of the pass before: how many slots before its end (>= 1) an index stood, by its
            `entry_key`.
        distance: Least number of slots between two uses of an index.

    Returns:
        places: For each slot of the head, the place of its entry in the pass's own order.
        looked_at: The entries that were looked at, in the pass's own order; as many. After them the pass goes on in its own
            order.
    """
    source, looked_at, places = iter(entries), list[Any](), list[int]()
    waiting: list[tuple[int, int]] = []  # (slot from which on the entry may stand, its place)
    ready: list[int] = []
    while len(places) < distance or ready or waiting:
        while waiting and waiting[0][0] <= len(places):
            _, place = heappop(waiting)
            heappush(ready, place)
        if ready:
            places.append(heappop(ready))
            continue
        for entry in source:
            place = len(looked_at)
            looked_at.append(entry)
            slots_ago = last_seen.get(entry_key(entry))
            free_from = 0 if slots_ago is None else distance - slots_ago
            if free_from <= len(places):
                places.append(place)
                break
            heappush(waiting, (free_from, place))
        else:
            if not waiting:
                break
            _, place = heappop(waiting)  # the sampler itself asked for it again so soon
            places.append(place)
    return places, looked_at


class Order:
    """Base of the orders: an endless stream of entries, pass after pass, as this rank sees it.

    Args:
        length: Entries of a pass over all ranks, before it is dealt out.
        pass_length: Entries of a pass on one rank, after the tail was dropped or filled.
        replicas: Number of ranks that the pass is dealt out to.
        rank: This rank.
        distance: Positions of a rank that must lie between two uses of an index while passes are spread.

    Attributes:
        position: The position that `take` goes on from.
        exact: Whether a resumed run finds the same order again.
    """

    def __init__(self, length: int, pass_length: int, replicas: int = 1, rank: int = 0, distance: int = 0) -> None:
        self.length, self.pass_length, self.replicas, self.rank = length, pass_length, replicas, rank
        self.position = 0
        self.exact = True
        self._slot_distance = min(distance * replicas + replicas - 1, pass_length * replicas) if distance else 0
        self._distances: list[tuple[int, int]] = [(0, 0)]  # (from which pass on, distance in slots)
        self._ends: list[tuple[int, int]] = []  # (before which pass, slots of a pass), where that was another number
        self._pass: Iterator[Any] = iter(())

    def begin_spreading(self) -> None:
        """Spreads the passes after the present one. A pass that begins just here follows nothing that is live."""
        _, now = self._distances[-1]
        if self._slot_distance != now:
            first = self.position // self.pass_length + 1
            self._distances = [(earlier, slots) for earlier, slots in self._distances if earlier < first]
            self._distances.append((first, self._slot_distance))

    def take(self, count: int) -> list[Any]:
        """Returns the entries of the next ``count`` positions.

        Raises:
            RuntimeError: A sampler yields fewer than its length.
        """
        taken: list[Any] = list(islice(self._pass, count))
        self.position += len(taken)
        while len(taken) < count:
            pass_number, offset = divmod(self.position, self.pass_length)
            if not offset:
                self._pass = self._begin(pass_number)
            more = list(islice(self._pass, count - len(taken)))
            if not more:
                raise RuntimeError(
                    f"the sampler yielded too few items in pass {pass_number}: its length is {self.length}. "
                    "Correct its __len__, or let its __iter__ yield that many."
                )
            self.position += len(more)
            taken += more
        return taken

    def seek(self, position: int) -> None:
        """Goes to a position of the stream."""
        raise NotImplementedError

    def state(self, position: int) -> dict[str, Any]:
        """Returns what a resumed run needs to find every position from ``position`` on: plain types, the same on all ranks."""
        del position
        ends = {"ends": [list(entry) for entry in self._ends]} if self._ends else {}
        return {"distances": [list(entry) for entry in self._distances], **ends}

    def prune(self, position: int) -> None:
        """Forgets what only positions before ``position`` need."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes over a `state`; call `seek` next."""
        self._distances = [(int(first), int(slots)) for first, slots in state["distances"]]
        self._ends = [(int(before), int(slots)) for before, slots in state.get("ends", [])]

    def _begin(self, pass_number: int) -> Iterator[Any]:
        """Begins a pass: returns its entries on this rank."""
        raise NotImplementedError

    def _distance(self, pass_number: int) -> int:
        """Returns by how many slots a pass is spread."""
        return next((slots for first, slots in reversed(self._distances) if first <= pass_number), 0) if pass_number else 0

    def _end(self, pass_number: int) -> int:
        """Returns the number of slots of a pass; it depends on the number of ranks that the run had then."""
        own = self.pass_length * self.replicas
        return next((slots for before, slots in self._ends if pass_number < before), own)

    def _reaches_tail(self, pass_number: int) -> bool:
        """Returns whether the head of a pass may reach the slots at its end that the next pass keeps away from."""
        return self._end(pass_number) < 2 * self._distance(pass_number) + self._distance(pass_number + 1)


class SequentialOrder(Order):
    """The data set's own order in every pass. An index returns after a whole pass, so it needs no ``distance``."""

    def seek(self, position: int) -> None:
        self.position = position
        self._pass = self._begin(*divmod(position, self.pass_length))

    def _begin(self, pass_number: int, offset: int = 0) -> Iterator[int]:
        for start in range(offset, self.pass_length, _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, self.pass_length), dtype=np.uint64)
            yield from self._indices(pass_number, positions * np.uint64(self.replicas) + np.uint64(self.rank))

    def _indices(self, pass_number: int, slots: Slots) -> list[int]:
        """Returns the indices in these slots of a pass; may write into ``slots``."""
        result: list[int] = (slots % np.uint64(self.length)).tolist()
        return result


class ShuffledOrder(SequentialOrder):
    """A new random permutation in every pass, a function of seed and pass (and, while echoing, of the spreading).

    Args:
        seed: Seed of the permutations.
    """

    def __init__(self, *args: int, seed: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self._seed = seed
        self._forget_head()

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._forget_head()

    def _forget_head(self) -> None:
        self._head_pass, self._head = -1, np.empty(0, dtype=np.uint64)

    def _indices(self, pass_number: int, slots: Slots) -> list[int]:
        head = self._head_of(pass_number)
        if self._reaches_tail(pass_number):
            slots %= np.uint64(self.length)
        if len(head):
            _look_up(head, slots)
        slots %= np.uint64(self.length)
        return self._permuted(pass_number, slots)

    def _permuted(self, pass_number: int, places: Slots) -> list[int]:
        """Returns the indices at these places of a pass in its own order."""
        result: list[int] = permute(places, self.length, mix(self._seed, pass_number)).tolist()
        return result

    def _head_of(self, pass_number: int) -> Slots:
        """Returns the head of a pass: for each of its first slots, the place of its entry in the pass's own order."""
        if self._head_pass != pass_number:
            first, head = pass_number, np.empty(0, dtype=np.uint64)
            while self._distance(first) and self._reaches_tail(first - 1):  # only then the head before it matters
                if self._head_pass == first - 1:
                    head = self._head
                    break
                first -= 1
            for current in range(first, pass_number + 1):
                head = self._spread(current, head) if self._distance(current) else head[:0]
            self._head_pass, self._head = pass_number, head
        return self._head

    def _spread(self, pass_number: int, head_before: Slots) -> Slots:
        """Returns the head of a pass, from the head of the pass before where that reaches its end."""
        distance, end = self._distance(pass_number), self._end(pass_number - 1)
        slots = np.arange(end - distance, end, dtype=np.uint64) % np.uint64(self.length)
        _look_up(head_before, slots)
        last_seen = {index: distance - i for i, index in enumerate(self._permuted(pass_number - 1, slots))}
        start = np.arange(min(2 * distance, self.length), dtype=np.uint64)
        places, _ = spread(self._permuted(pass_number, start), last_seen, distance)
        return np.array(places, dtype=np.uint64)


def _look_up(head: Slots, slots: Slots) -> None:
    """Replaces the slots that are in the head by the places of their entries."""
    moved = slots < len(head)
    if moved.any():
        slots[moved] = head[slots[moved]]
