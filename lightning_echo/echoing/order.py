"""Which index stands at which position of the fresh stream: passes over the data, shuffled, cut and sharded.

A pass is what the plain loader would deliver in one epoch. Its slots, over all ranks, are dealt out as
``DistributedSampler`` deals them: slot ``p * replicas + rank`` is position ``p`` of that rank, and missing slots at the end
are filled from the start.

* `ShuffledOrder` is a permutation that can be entered anywhere: no list of the data set's length is ever made.
* `SequentialOrder` is the data set's own order.
* `SamplerOrder` asks the user's sampler (or batch sampler) pass by pass, and never reads ahead of what is needed.

**Spreading.** With echoing an index of one pass may still be live when the next pass begins. So each pass is rearranged a
little: among the indices that have not been seen for ``distance`` slots, the one that comes first in its own order is taken
next. Only the first slots of a pass move, and unless it is short its end stays the same, so that a pass can be found without
those before it: what fills it up is then the start of its own order. Until echoing begins nothing moves.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from heapq import heappop, heappush
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_echo.echoing.hashing import mix
from lightning_echo.echoing.randomness import OwnRandomStates, seed_all

__all__ = ["Order", "SamplerOrder", "SequentialOrder", "ShuffledOrder", "permute", "spread"]

Slots = npt.NDArray[np.uint64]
_CHUNK = 1024
_ROUNDS = 4


def permute(slots: Slots, length: int, key: int) -> Slots:
    """A random permutation of ``range(length)``, evaluated at ``slots`` only.

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
    for i in range(_ROUNDS):
        column = (column + _hash(row, mix(key, 2 * i))) % columns
        row = (row + _hash(column, mix(key, 2 * i + 1))) % rows
    mixed: Slots = column + columns * row
    return mixed


def _hash(values: Slots, key: int) -> Slots:
    mixed: Slots = (values ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(32))) >> np.uint64(1)
    return mixed


def spread(entries: Iterable[Any], seen: dict[Any, int], distance: int) -> tuple[list[int], list[Any]]:
    """Rearranges the start of a pass so that no index returns within ``distance`` slots.

    Args:
        entries: The pass in its own order.
        seen: For the last ``distance`` slots of the pass before: index -> slots from there to the end of that pass (>= 1).
        distance: Least number of slots between two uses of an index.

    Returns:
        For each rearranged slot the rank of its entry in the pass's own order, and the entries that were looked at (as
        many). From there on the pass goes on in its own order.
    """
    source, looked_at, ranks = iter(entries), list[Any](), list[int]()
    waiting: list[tuple[int, int]] = []  # (slot from which it may stand, rank)
    ready: list[int] = []
    while len(ranks) < distance or ready or waiting:
        while waiting and waiting[0][0] <= len(ranks):
            heappush(ready, heappop(waiting)[1])
        if ready:
            ranks.append(heappop(ready))
            continue
        for entry in source:
            rank = len(looked_at)
            looked_at.append(entry)
            free_from = distance - seen[entry] if entry in seen else 0
            if free_from <= len(ranks):
                ranks.append(rank)
                break
            heappush(waiting, (free_from, rank))
        else:
            if not waiting:
                break
            ranks.append(heappop(waiting)[1])  # the sampler itself asked for it again so soon
    return ranks, looked_at


class Order:
    """Base of the orders: an endless stream of items, pass after pass, as this rank sees it.

    Args:
        length: Items of a pass over all ranks, before it is dealt out.
        kept: Items of a pass on one rank, after the tail was dropped or filled.
        replicas: Number of ranks that the pass is dealt out to.
        rank: This rank.
        distance: Positions of a rank that must lie between two uses of an index while passes are spread.
    """

    def __init__(self, length: int, kept: int, replicas: int = 1, rank: int = 0, distance: int = 0) -> None:
        self.length, self.kept, self.replicas, self.rank = length, kept, replicas, rank
        self.position = 0
        self.exact = True  # whether a resumed run finds the same order again
        self._slots = min(distance * replicas + replicas - 1, kept * replicas) if distance else 0
        self._distances: list[tuple[int, int]] = [(0, 0)]  # (from which pass on, distance in slots)
        self._pass: Iterator[Any] = iter(())

    def set_spreading(self, on: bool) -> None:
        """Whether the passes after the present one are spread. One that begins just here follows nothing that is live."""
        slots = self._slots if on else 0
        if slots != self._distances[-1][1]:
            first = self.position // self.kept + 1
            self._distances = [entry for entry in self._distances if entry[0] < first] + [(first, slots)]

    def take(self, count: int) -> list[Any]:
        """The items of the next ``count`` positions."""
        taken: list[Any] = list(islice(self._pass, count))
        self.position += len(taken)
        while len(taken) < count:
            number, offset = divmod(self.position, self.kept)
            if not offset:
                self._pass = self._begin(number)
            more = list(islice(self._pass, count - len(taken)))
            if not more:
                raise RuntimeError(
                    f"the sampler yielded too few items in pass {number}: its length is {self.length}. "
                    "Correct its __len__, or let its __iter__ yield that many."
                )
            self.position += len(more)
            taken += more
        return taken

    def seek(self, position: int) -> None:
        """Goes to a position of the stream."""
        raise NotImplementedError

    def state(self, position: int) -> dict[str, Any]:
        """What a resumed run needs to find every position from ``position`` on: plain types, the same on all ranks."""
        del position
        return {"distances": [list(entry) for entry in self._distances]}

    def prune(self, position: int) -> None:
        """Forgets what only positions before ``position`` need."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes over a `state`; call `seek` next."""
        self._distances = [(int(first), int(slots)) for first, slots in state["distances"]]

    def _begin(self, number: int) -> Iterator[Any]:
        raise NotImplementedError

    def _distance(self, number: int) -> int:
        """Slots by which pass ``number`` is spread."""
        return next((slots for first, slots in reversed(self._distances) if first <= number), 0) if number else 0

    def _reaches_tail(self, number: int) -> bool:
        """Whether the rearranged slots of a pass may reach those that the next pass keeps away from."""
        return self.kept * self.replicas < 2 * self._distance(number) + self._distance(number + 1)


class SequentialOrder(Order):
    """The data set's own order in every pass: an index returns after a whole pass, nothing has to be spread."""

    def set_spreading(self, on: bool) -> None:
        """Nothing to do."""

    def seek(self, position: int) -> None:
        self.position = position
        self._pass = self._begin(*divmod(position, self.kept))

    def _begin(self, number: int, offset: int = 0) -> Iterator[int]:
        for start in range(offset, self.kept, _CHUNK):
            stop = min(start + _CHUNK, self.kept)
            yield from self._indices(number, np.arange(start, stop, dtype=np.uint64))

    def _indices(self, number: int, positions: Slots) -> list[int]:
        return self._at(number, positions * np.uint64(self.replicas) + np.uint64(self.rank))

    def _at(self, number: int, slots: Slots) -> list[int]:
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
        self._head: tuple[int, Slots] = (-1, np.empty(0, dtype=np.uint64))

    def set_spreading(self, on: bool) -> None:
        Order.set_spreading(self, on)

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._head = (-1, self._head[1])

    def _at(self, number: int, slots: Slots) -> list[int]:
        head = self._ranks(number)
        if self._reaches_tail(number):
            slots %= np.uint64(self.length)
        moved = slots < len(head)
        if len(head) and moved.any():
            slots[moved] = head[slots[moved]]
        slots %= np.uint64(self.length)
        result: list[int] = permute(slots, self.length, mix(self._seed, number)).tolist()
        return result

    def _ranks(self, number: int) -> Slots:
        """Ranks of the entries in the rearranged first slots of a pass."""
        if self._head[0] == number:
            return self._head[1]
        first, head = number, np.empty(0, dtype=np.uint64)
        while self._distance(first) and self._reaches_tail(first - 1):
            if self._head[0] == first - 1:
                head = self._head[1]
                break
            first -= 1
        for current in range(first, number + 1):
            head = self._spread(current, head) if self._distance(current) else head[:0]
        self._head = (number, head)
        return head

    def _spread(self, number: int, before: Slots) -> Slots:
        distance, end = self._distance(number), self.kept * self.replicas
        slots = np.arange(end - distance, end, dtype=np.uint64) % np.uint64(self.length)
        moved = slots < len(before)
        slots[moved] = before[slots[moved]]
        last = permute(slots, self.length, mix(self._seed, number - 1)).tolist()
        seen = {index: distance - i for i, index in enumerate(last)}
        upcoming = np.arange(min(2 * distance, self.length), dtype=np.uint64)
        ranks, _ = spread(permute(upcoming, self.length, mix(self._seed, number)).tolist(), seen, distance)
        return np.array(ranks, dtype=np.uint64)


class SamplerOrder(Order):
    """The order of a user's sampler or batch sampler.

    A pass is asked for by ``iter(sampler)`` when its first item is needed. Before that the sampler is told the number of the
    pass (``set_epoch``), and its state is kept (``state_dict``, or that of its torch ``generator``), from which a resumed run
    asks for the same pass again. A sampler with an optional ``generator`` (torch's convention) that has none gets one that
    is seeded from seed and pass. One that has nothing of all this may draw from the global random states: it runs under
    states of its own, seeded likewise, and must not run beside the training in another thread.

    Args:
        sampler: Yields indices, or lists of them.
        seed: Seeds the generators of samplers that have none.
    """

    def __init__(self, sampler: Any, *args: int, seed: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self._sampler = sampler
        self._source = sampler  # what decides the order: a batch sampler leaves that to the sampler inside
        if hasattr(sampler, "batch_size") and hasattr(sampler, "sampler"):
            self._source = sampler.sampler
        self._stateful = all(callable(getattr(self._source, name, None)) for name in ("state_dict", "load_state_dict"))
        self._generator: Any = getattr(self._source, "generator", None)
        self._seed = seed
        self._lends = hasattr(self._source, "generator") and self._generator is None and not self._stateful
        if self._lends:
            self._lend_generator()
        self.exact = self._stateful or self._generator is not None or hasattr(self._source, "set_epoch")
        self._random_states = nullcontext() if self.exact else OwnRandomStates()
        self._states: dict[int, Any] = {}  # per pass: the sampler's state before it
        self._entries: Iterator[Any] = iter(())
        self._dealt: Iterator[Any] = iter(())
        self._tail: deque[Any] = deque(maxlen=0)

    def take(self, count: int) -> list[Any]:
        with self._random_states:
            return super().take(count)

    def seek(self, position: int) -> None:
        with self._random_states:
            self._seek(position)

    def _seek(self, position: int) -> None:
        number, offset = divmod(position, self.kept)
        first = min(self._first_needed(number), min(self._states, default=number))
        self._entries = self._dealt = iter(())
        self._tail = deque(maxlen=0)
        for current in range(first, number + 1):
            self._drain()
            self._restore(current)
            self.position = current * self.kept
            self._pass = self._begin(current)
            super().take(self.kept if current < number else offset)

    def state(self, position: int) -> dict[str, Any]:
        self.prune(position)
        return {
            **super().state(position),
            "sampler": [[number, state] for number, state in self._states.items()],
        }

    def prune(self, position: int) -> None:
        # At a pass's end the next one may not have begun: its state is found by going through this one again.
        needed = min(self._first_needed(position // self.kept), max(self._states, default=0))
        self._states = {number: state for number, state in self._states.items() if number >= needed}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._states = {int(number): value for number, value in state.get("sampler", [])}

    def _first_needed(self, number: int) -> int:
        """The pass from which on all must be gone through to find pass ``number`` as it was rearranged."""
        while self._distance(number):
            number -= 1
            if not self._reaches_tail(number):
                break
        return number

    def _lend_generator(self) -> None:
        source = copy.copy(self._source)
        source.generator = self._generator = torch.Generator()
        if self._source is self._sampler:
            self._sampler = source
        else:
            self._sampler = copy.copy(self._sampler)
            self._sampler.sampler = source
        self._source = source

    def _restore(self, number: int) -> None:
        state = self._states.get(number)
        if state is not None and self._stateful:
            self._source.load_state_dict(state)
        elif state is not None:
            self._generator.set_state(state)

    def _drain(self) -> None:
        deque(self._dealt, maxlen=0)  # what other ranks get: all must see the same end of the pass
        deque(islice(self._entries, self.length), maxlen=0)  # the dropped tail, which the plain loader draws too

    def _begin(self, number: int) -> Iterator[Any]:
        self._drain()
        for target in dict.fromkeys((self._sampler, self._source)):
            if callable(set_epoch := getattr(target, "set_epoch", None)):
                set_epoch(number)
        if self._stateful:
            self._states[number] = self._source.state_dict()
        elif self._lends:
            self._generator.manual_seed(mix(self._seed, number))
        elif self._generator is not None:
            self._states[number] = self._generator.get_state()
        elif not self.exact:
            seed_all(mix(self._seed, number))
        entries: Iterator[Any] = iter(self._sampler)
        own_start: list[Any] | None = None
        if (distance := self._distance(number)) and self._tail:
            seen = {index: len(self._tail) - i for i, index in enumerate(self._tail)}
            ranks, looked_at = spread(islice(entries, self.length), seen, distance)
            entries = chain([looked_at[rank] for rank in ranks], entries)
            own_start = None if self._reaches_tail(number) else looked_at
        self._entries, self._dealt = entries, self._deal(entries, own_start)
        return islice(self._dealt, self.rank, None, self.replicas)

    def _deal(self, entries: Iterator[Any], own_start: list[Any] | None) -> Iterator[Any]:
        """The slots of a pass: cut, or filled up from its start."""
        end, tail = self.kept * self.replicas, deque[Any](maxlen=self._slots)
        missing = max(end - self.length, 0)
        start = [] if own_start is None else own_start[:missing]
        self._tail = tail
        for entry in islice(entries, min(end, self.length)):
            if own_start is None and len(start) < missing:
                start.append(entry)
            tail.append(entry)
            yield entry
        for entry in islice(cycle(start), missing):
            tail.append(entry)
            yield entry
