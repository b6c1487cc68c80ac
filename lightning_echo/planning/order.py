"""Which index stands at which position of the fresh stream: passes over the data, shuffled, cut and sharded.

A pass is what the plain loader would deliver in one epoch. Its slots, over all ranks, are dealt out as
``DistributedSampler`` deals them: slot ``p * replicas + rank`` is position ``p`` of that rank, and missing slots at the end
are filled from the start.

* `ShuffledOrder` is a permutation that can be entered anywhere: no list of the data set's length is ever made.
* `SequentialOrder` is the data set's own order.

`SamplerOrder`, in ``sampler_order.py``, is that of a user's sampler; ``spreading.py`` keeps the uses of an index apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from lightning_echo.planning.hashing import mix
from lightning_echo.planning.permutation import Slots, permute
from lightning_echo.planning.spreading import spread

__all__ = ["Order", "SequentialOrder", "ShuffledOrder"]

_CHUNK = 1024


class Order:
    """Base of the orders: an endless stream of items, pass after pass, as this rank sees it.

    Args:
        length: Items of a pass over all ranks, before it is dealt out.
        pass_length: Items of a pass on one rank, after the tail was dropped or filled.
        replicas: Number of ranks that the pass is dealt out to.
        rank: This rank.
        distance: Positions of a rank that must lie between two uses of an index while passes are spread.
    """

    def __init__(self, length: int, pass_length: int, replicas: int = 1, rank: int = 0, distance: int = 0) -> None:
        self.length, self.pass_length, self.replicas, self.rank = length, pass_length, replicas, rank
        self.position = 0
        self.exact = True  # whether a resumed run finds the same order again
        self._slots = min(distance * replicas + replicas - 1, pass_length * replicas) if distance else 0
        self._distances: list[tuple[int, int]] = [(0, 0)]  # (from which pass on, distance in slots)
        self._pass: Iterator[Any] = iter(())

    def begin_spreading(self) -> None:
        """Spreads the passes after the present one. A pass that begins just here follows nothing that is live."""
        if self._slots != self._distances[-1][1]:
            first = self.position // self.pass_length + 1
            self._distances = [entry for entry in self._distances if entry[0] < first] + [(first, self._slots)]

    def take(self, count: int) -> list[Any]:
        """The items of the next ``count`` positions."""
        taken: list[Any] = list(islice(self._pass, count))
        self.position += len(taken)
        while len(taken) < count:
            number, offset = divmod(self.position, self.pass_length)
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
        return self.pass_length * self.replicas < 2 * self._distance(number) + self._distance(number + 1)


class SequentialOrder(Order):
    """The data set's own order in every pass. An index returns after a whole pass, so it needs no ``distance``."""

    def seek(self, position: int) -> None:
        self.position = position
        self._pass = self._begin(*divmod(position, self.pass_length))

    def _begin(self, number: int, offset: int = 0) -> Iterator[int]:
        for start in range(offset, self.pass_length, _CHUNK):
            stop = min(start + _CHUNK, self.pass_length)
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

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._head = (-1, self._head[1])

    def _at(self, number: int, slots: Slots) -> list[int]:
        head = self._head_of(number)
        if self._reaches_tail(number):
            slots %= np.uint64(self.length)
        moved = slots < len(head)
        if len(head) and moved.any():
            slots[moved] = head[slots[moved]]
        slots %= np.uint64(self.length)
        result: list[int] = permute(slots, self.length, mix(self._seed, number)).tolist()
        return result

    def _head_of(self, number: int) -> Slots:
        """Returns which entries of a pass stand in its rearranged first slots: their places in the pass's own order."""
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
        distance, end = self._distance(number), self.pass_length * self.replicas
        slots = np.arange(end - distance, end, dtype=np.uint64) % np.uint64(self.length)
        moved = slots < len(before)
        slots[moved] = before[slots[moved]]
        last = permute(slots, self.length, mix(self._seed, number - 1)).tolist()
        seen = {index: distance - i for i, index in enumerate(last)}
        upcoming = np.arange(min(2 * distance, self.length), dtype=np.uint64)
        places, _ = spread(permute(upcoming, self.length, mix(self._seed, number)).tolist(), seen, distance)
        return np.array(places, dtype=np.uint64)
