"""Which index stands at which position of the fresh stream: passes over the data, shuffled, cut and dealt out to ranks.

A pass is what the plain loader would deliver in one epoch. Over all ranks it consists of *slots*, which are dealt out as
``DistributedSampler`` deals them: slot ``p * replicas + rank`` is position ``p`` of that rank. Slots beyond the length of the
data set are filled from the start of the pass. A slot holds an *entry*: an index, or a list of indices if the user's batch
sampler yields lists.

Where a pass ends, the next one begins (`Order.take`): the live items stay live, and epochs do not matter. A pass may end within
a batch. There are three orders:

* `ShuffledOrder` is a permutation that can start at any position. No list of the data set's length is ever made.
* `SequentialOrder` is the data set's own order.
* `SamplerOrder`, in ``pipeline/requests.py``, is the order of a user's sampler.

Spreading: with echoing, an index of one pass may still be live when the next pass begins. So each pass is rearranged a little.
The next index is always the first one in the pass's own order that was not used for at least a given *distance*. Only the first
slots of a pass, its *head*, change. The end of a pass stays as it was, unless the pass is short. The head of the next pass
depends only on that end, so it can be worked out without all earlier passes. Before echoing begins, nothing changes.

An item is live on one rank only. So a pass is rearranged *lane* by lane. A shuffled order has a lane for each rank: lane ``r``
has the slots of rank ``r``, and an index stays in its lane. A rank needs only the head of its own lane, no matter how many ranks
there are. The order of a user's sampler has one lane, of all slots, because each rank reads that order whole in any case.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_echo.plan.plan import mix

Slots = npt.NDArray[np.uint64]
"""Slots of a pass, or places in the pass's own order."""

_CHUNK = 1024
_FEISTEL_ROUNDS = 4


def permute(slots: Slots, length: int, key: int) -> Slots:
    """Returns the values of a random permutation of ``range(length)`` at ``slots`` only.

    It is a Feistel network on the digits of a number in base ``ceil(sqrt(length))``, repeated until the result is in the range.
    """
    base = math.isqrt(length - 1) + 1
    columns, rows = np.uint64(base), np.uint64(-(-length // base))
    values: Slots = slots.copy()
    outside: npt.NDArray[np.bool_] = np.ones(len(values), dtype=bool)
    while outside.any():
        row: Slots
        column: Slots
        row, column = np.divmod(values[outside], columns)
        for i in range(_FEISTEL_ROUNDS):
            column = (column + _hash(row, mix(key, 2 * i))) % columns
            row = (row + _hash(column, mix(key, 2 * i + 1))) % rows
        values[outside] = column + columns * row
        outside = values >= length
    return values


def _hash(values: Slots, key: int) -> Slots:
    mixed: Slots = (values ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(32))) >> np.uint64(1)
    return mixed


def entry_key(entry: Any) -> Any:
    """Returns a hashable value that is equal for entries of one index: equal tensors have different hashes, lists have none."""
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if isinstance(entry, list | tuple):
        return tuple(map(entry_key, entry))
    return entry if isinstance(entry, Hashable) else repr(entry)


def spread(entries: Iterable[Any], last_seen: dict[Any, int], distance: int) -> tuple[list[int], list[Any]]:
    """Rearranges the start of a pass, given in its own order, so that no index returns within ``distance`` slots.

    ``last_seen``: for the indices in the last ``distance`` slots of the pass before, by their `entry_key`: how many slots before
    its end (>= 1) each one stood.

    Returns the places, in the pass's own order, of the entries in the slots of the head, and as many entries of the pass in its
    own order. After them the pass continues in its own order.
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
            _, place = heappop(waiting)  # the sampler itself gives this index again so soon
            places.append(place)
    return places, looked_at


class _Spreading(NamedTuple):
    """How a pass is spread: the positions of a lane between two uses of an index (0: not spread), and the number of lanes."""

    distance: int = 0
    lanes: int = 1


class Order:
    """Base of the orders: an endless stream of entries, pass after pass, as this rank sees it.

    Args:
        length: Number of entries of a pass over all ranks, before it is dealt out.
        pass_length: Number of entries of a pass on one rank, after the tail was dropped or filled.
        replicas: Number of ranks that the pass is dealt out to.
        distance: Number of positions of a rank that must lie between two uses of an index, while passes are spread.
        lanes: Number of ranks for which passes are spread; None: ``replicas``.

    Attributes:
        position: The next position that `take` returns.
        exact: Whether a resumed run finds the same order.
    """

    def __init__(
        self, length: int, pass_length: int, replicas: int = 1, rank: int = 0, distance: int = 0, lanes: int | None = None
    ) -> None:
        self.length, self.pass_length, self.replicas, self.rank = length, pass_length, replicas, rank
        self.position = 0
        self.exact = True
        self._spreading = self._spread_by(distance, lanes or replicas) if distance else _Spreading()
        self._distances: list[tuple[int, _Spreading]] = [(0, _Spreading())]  # from which pass on
        self._ends: list[tuple[int, int]] = []  # (before which pass, slots of a pass), where that was another number
        self._pass: Iterator[Any] = iter(())

    def begin_spreading(self) -> None:
        """Spreads the passes after the present one. A pass that begins exactly here is not spread: nothing before it is live."""
        _, now = self._distances[-1]
        if self._spreading != now:
            first = self.position // self.pass_length + 1
            self._distances = [(earlier, spreading) for earlier, spreading in self._distances if earlier < first]
            self._distances.append((first, self._spreading))

    def take(self, count: int) -> list[Any]:
        """Returns the entries of the next ``count`` positions."""
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
                    "Correct its __len__, or let its __iter__ yield that many"
                )
            self.position += len(more)
            taken += more
        return taken

    def seek(self, position: int) -> None:
        raise NotImplementedError

    def state(self, position: int) -> dict[str, Any]:
        """Returns what a resumed run needs for all positions from ``position`` on: plain types, the same on all ranks."""
        del position
        ends = {"ends": [list(entry) for entry in self._ends]} if self._ends else {}
        # For one lane it is only the distance.
        rows = [[first, *(spreading if spreading.lanes > 1 else spreading[:1])] for first, spreading in self._distances]
        return {"distances": rows, **ends}

    def prune(self, position: int) -> None:
        """Forgets what only positions before ``position`` need."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes over a `state`. Call `seek` next."""
        self._distances = [(first, _Spreading(*spreading)) for first, *spreading in state["distances"]]
        self._ends = [(int(before), int(slots)) for before, slots in state.get("ends", [])]

    def _begin(self, pass_number: int) -> Iterator[Any]:
        """Begins a pass, and returns its entries on this rank."""
        raise NotImplementedError

    def _spread_by(self, distance: int, lanes: int) -> _Spreading:
        """Returns how passes are spread for a distance > 0: in one lane, so that the distance covers the slots of all ranks."""
        return _Spreading(min(distance * lanes + lanes - 1, self.pass_length * self.replicas), 1)

    def _spreading_of(self, pass_number: int) -> _Spreading:
        found = (spreading for first, spreading in reversed(self._distances) if first <= pass_number)
        return next(found, _Spreading()) if pass_number else _Spreading()

    def _distance(self, pass_number: int) -> int:
        """Returns by how many slots of all lanes a pass is spread."""
        spreading = self._spreading_of(pass_number)
        return spreading.distance * spreading.lanes

    def _end(self, pass_number: int) -> int:
        """Returns the number of slots of a pass, which depends on the number of ranks that the run had in that pass."""
        own = self.pass_length * self.replicas
        return next((slots for before, slots in self._ends if pass_number < before), own)

    def _reaches_tail(self, pass_number: int) -> bool:
        """Returns whether the head of a pass may reach the slots at its end from which the next pass keeps its distance."""
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
        """Returns the indices in these slots of a pass. It may write into ``slots``."""
        result: list[int] = (slots % np.uint64(self.length)).tolist()
        return result


class ShuffledOrder(SequentialOrder):
    """A new random permutation in every pass, a function of seed and pass (and, while echoing, of the spreading)."""

    def __init__(self, *args: int, seed: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self._seed = seed
        self._heads: dict[tuple[int, int], tuple[int, Slots]] = {}  # (lanes, lane) -> number of a pass, and its head there

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._heads = {}

    def _spread_by(self, distance: int, lanes: int) -> _Spreading:
        return _Spreading(min(distance, self.pass_length * self.replicas // lanes), lanes)

    def _begin(self, pass_number: int, offset: int = 0) -> Iterator[int]:
        self._heads = {lane: known for lane, known in self._heads.items() if known[0] >= pass_number - 1}
        return super()._begin(pass_number, offset)

    def _indices(self, pass_number: int, slots: Slots) -> list[int]:
        distance, lanes = self._spreading_of(pass_number)
        in_heads = np.flatnonzero(slots < min(2 * distance * lanes, self.length))
        of_lanes = slots[in_heads] % np.uint64(lanes)
        for lane in np.unique(of_lanes).tolist():
            head = self._head_of(pass_number, lane)
            here = in_heads[of_lanes == lane]
            positions = slots[here] // np.uint64(lanes)
            moved = positions < len(head)
            slots[here[moved]] = head[positions[moved]] * np.uint64(lanes) + np.uint64(lane)
        slots %= np.uint64(self.length)  # now the places of the entries in the pass's own order
        result: list[int] = permute(slots, self.length, mix(self._seed, pass_number)).tolist()
        return result

    def _head_of(self, pass_number: int, lane: int) -> Slots:
        """Returns the head of a lane: for each of its first positions, the position of its entry in the lane's own order."""
        lanes = self._spreading_of(pass_number).lanes
        known, first = self._heads.get((lanes, lane)), pass_number
        if known is None or known[0] != pass_number:
            while not (known is not None and known[0] == first - 1):
                # The head follows from that of the same lane in the pass before, if that one reaches the end of its pass.
                (distance, _), (before, lanes_before) = self._spreading_of(first), self._spreading_of(first - 1)
                if not distance or not before or lanes != lanes_before or not self._reaches_tail(first - 1):
                    break
                first -= 1
            for current in range(first, pass_number + 1):
                self._heads[lanes, lane] = current, self._spread(current, lane)
        return self._heads[lanes, lane][1]

    def _spread(self, pass_number: int, lane: int) -> Slots:
        """Works out the head of a lane from the last slots of that lane in the pass before."""
        (distance, lanes), end = self._spreading_of(pass_number), self._end(pass_number - 1)
        begin = max(end - distance * lanes, 0)
        tail = np.arange(begin + (lane - begin) % lanes, end, lanes, dtype=np.uint64)
        last_seen = {index: len(tail) - i for i, index in enumerate(self._indices(pass_number - 1, tail))}
        in_lane = -(-(self.length - lane) // lanes)
        start = np.arange(min(2 * distance, max(in_lane, 0)), dtype=np.uint64) * np.uint64(lanes) + np.uint64(lane)
        places, _ = spread(permute(start, self.length, mix(self._seed, pass_number)).tolist(), last_seen, distance)
        return np.array(places, dtype=np.uint64)
