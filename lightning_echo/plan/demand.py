"""Echo on demand: what a worker hands out when a batch is due, and which positions each worker is to read. Pure rules, no clock.

A batch takes the fresh examples that have arrived, and echoes for the rest. `DemandRule` is that sentence for one worker.
`Dealing` deals the positions of the fresh stream out to the workers, and books which of them were delivered.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from lightning_echo.plan.plan import mix

_DRAW_SEED = 14
_ROUNDING = 1e-9  # of the account: 10 uses at 1.1 each are 11


class Arrived(NamedTuple):
    """A fresh example that a worker has read: its position, the `entry_key` of its index, and the pass of its position."""

    position: int
    key: Hashable
    pass_number: int


class Handed(NamedTuple):
    """One batch: its fresh examples by position, the keys of its echoes, and the keys that memory no longer holds."""

    fresh: list[Arrived]
    echoes: list[Hashable]
    forget: list[Hashable]


class DemandRule:
    """Decides for one worker what a batch is made of, once the worker knows what has arrived.

    * At most as many fresh examples as the batch has places, those that arrived first.
    * Echoes are drawn uniformly from all that memory holds, by seed and batch number.
    * No index is twice in a batch. A fresh example takes the place of an older one of the same index in memory. If the batch has
      the index already, from another pass, the fresh example waits for the next batch. (A sampler may give an index twice in one
      pass. Then the plain loader's batch has it twice, and so has this one. If a pass has so few batches that a worker is always
      told of the same few indices, they may be fewer than a batch. ``may_repeat`` is for this.)
    * Each fresh example earns ``max_factor - 1`` echoes. The account of a worker holds at most that times what its memory holds.
      So a source that has died is bridged for at most ``max_factor`` uses of the memory.

    ``most_held``: the largest number of examples in the worker's memory. The oldest leave first.

    Example:
        >>> rule = DemandRule(seed=0, max_factor=2, most_held=8)
        >>> first = rule.hand_out(0, 4, [Arrived(position, position, 0) for position in range(4)])
        >>> rule.may_hand_out(4, []), rule.may_hand_out(4, [Arrived(4, 4, 0)])
        (True, True)
        >>> batch = rule.hand_out(1, 4, [Arrived(4, 4, 0)])
        >>> [fresh.position for fresh in batch.fresh], len(batch.echoes), rule.may_hand_out(4, [])
        ([4], 3, False)
    """

    def __init__(self, seed: int, max_factor: float, most_held: int) -> None:
        self._seed, self._most_held = seed, most_held
        self._places: OrderedDict[Hashable, int] = OrderedDict()  # of the held keys in ``_keys``, the oldest first
        self._keys: list[Hashable] = []  # in any order, to draw from
        self._random = random.Random()
        self.account = 0.0  # echoes that the worker may hand out
        self.max_factor = max_factor

    def set_factor(self, max_factor: float) -> None:
        """Sets ``max_factor`` from the next batch on. What was earned above the new bound lapses."""
        self.max_factor = max_factor
        self.account = min(self.account, self._most_earned(len(self._keys)))

    @property
    def keeps(self) -> bool:
        """Whether memory holds anything: with ``max_factor`` 1 there are no echoes."""
        return self.max_factor > 1 and self._most_held > 0

    def fresh_in(self, size: int, arrived: Sequence[Arrived], *, may_repeat: bool = False) -> list[Arrived]:
        """Returns the fresh examples of a batch. ``may_repeat``: an index may be twice, because no other example can arrive."""
        chosen: dict[Hashable, int] = {}
        fresh: list[Arrived] = []
        for one in arrived:
            if len(fresh) == size:
                break
            if may_repeat or chosen.setdefault(one.key, one.pass_number) == one.pass_number:
                fresh.append(one)
        return fresh

    def may_hand_out(self, size: int, arrived: Sequence[Arrived]) -> bool:
        """Returns whether a batch can be filled with echoes: from the account, and without an index twice."""
        fewest, held = size - len(arrived), len(self._keys)
        if fewest > min(held, self._earned(len(arrived), held + len(arrived)) + _ROUNDING):
            return False  # without a look at each: a worker asks after each example
        fresh = self.fresh_in(size, arrived)
        echoes = size - len(fresh)
        if not echoes:
            return True
        keys = {one.key for one in fresh}
        replaced = sum(key in self._places for key in keys)
        others = len(self._keys) - replaced
        return echoes <= others and echoes <= self._earned(len(fresh), others + len(keys)) + _ROUNDING

    def hand_out(self, number: int, size: int, arrived: Sequence[Arrived], *, may_repeat: bool = False) -> Handed:
        """Returns batch ``number``. The caller has seen to it that it can be filled."""
        fresh = sorted(self.fresh_in(size, arrived, may_repeat=may_repeat))
        for one in fresh:
            if one.key in self._places:
                self._remove(one.key)
        echoes = self.draw(number, size - len(fresh))
        forget: list[Hashable] = []
        if self.keeps:
            for one in fresh:
                if one.key in self._places:  # twice in this batch
                    self._remove(one.key)
                self._places[one.key] = len(self._keys)
                self._keys.append(one.key)
        self.account = self._earned(len(fresh), len(self._keys)) - len(echoes)
        while len(self._keys) > (self._most_held if self.keeps else 0):
            oldest = next(iter(self._places))
            self._remove(oldest)
            forget.append(oldest)
        return Handed(fresh, echoes, forget)

    def _earned(self, fresh: int, held: int) -> float:
        return min(self.account + fresh * (self.max_factor - 1), self._most_earned(held))

    def _most_earned(self, held: int) -> float:
        return (self.max_factor - 1) * min(held, self._most_held)

    def draw(self, number: int, count: int) -> list[Hashable]:
        """Returns the ``count`` echoes of batch ``number``, as memory is now: different keys.

        Each set of held keys has the same probability (Floyd's algorithm).
        """
        if not count:
            return []
        self._random.seed(mix(self._seed, _DRAW_SEED, number))
        chosen: dict[int, None] = {}  # in the order of the draws: a set has no fixed order
        for last in range(len(self._keys) - count, len(self._keys)):
            place = int(self._random.random() * (last + 1))
            chosen[last if place in chosen else place] = None
        return [self._keys[place] for place in chosen]

    def _remove(self, key: Hashable) -> None:
        place, last = self._places.pop(key), self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._places[last] = place


# ---------------------------------------------------------------------- dealing
# Positions are dealt out in *blocks*: those of the plain loader's batches. So the batches are those of the plain loader, if the
# source keeps up. Blocks go to the workers in turn. A worker that is slower than the others has a queue of them; if that is full,
# the others get its blocks.
#
# A position is *open* from the moment at which a worker is told of it until a batch with it was delivered. A worker is told of so
# many positions that it can always fill its next request with fresh examples (``window``). It is told with requests only, so with
# fewer it could wait forever.


Block: TypeAlias = Sequence[int]
"""Positions that a worker is told together. A data set that reads whole batches reads them in one call."""


class Booked(NamedTuple):
    """Which positions were delivered: all before ``frontier``, and those in ``ahead``."""

    frontier: int
    ahead: frozenset[int] = frozenset()

    @property
    def delivered(self) -> int:
        """Number of positions that were delivered."""
        return self.frontier + len(self.ahead)

    def runs(self) -> list[list[int]]:
        """Returns ``ahead`` as runs: the first position of each, and the number of positions.

        >>> Booked(3, frozenset({5, 6, 9})).runs()
        [[5, 2], [9, 1]]
        """
        runs: list[list[int]] = []
        for position in sorted(self.ahead):
            if runs and sum(runs[-1]) == position:
                runs[-1][1] += 1
            else:
                runs.append([position, 1])
        return runs

    def with_more(self, positions: Iterable[int]) -> Booked:
        """Returns what is booked after further positions were delivered. Some of them may be booked already.

        >>> Booked(3, frozenset({5})).with_more([3, 4, 8]), Booked(3, frozenset({5})).with_more([2, 5])
        (Booked(frontier=6, ahead=frozenset({8})), Booked(frontier=3, ahead=frozenset({5})))
        """
        frontier = self.frontier
        ahead = {position for position in chain(self.ahead, positions) if position >= frontier}
        while frontier in ahead:
            ahead.remove(frontier)
            frontier += 1
        return Booked(frontier, frozenset(ahead))

    @classmethod
    def of(cls, frontier: int, runs: Iterable[Sequence[int]]) -> Booked:
        """Inverts `runs`."""
        return cls(frontier, frozenset(position for first, size in runs for position in range(first, first + size)))


class EarlierRanks(NamedTuple):
    """What each rank had delivered when the run had other ranks. A slot of a pass is as in ``plan/order.py``."""

    replicas: int
    pass_length: int
    booked: tuple[Booked, ...]

    def has_delivered(self, pass_number: int, slot: int) -> bool:
        """Returns whether one of those ranks had delivered the example in a slot.

        >>> earlier = EarlierRanks(2, 4, (Booked(1), Booked(3)))
        >>> [slot for slot in range(8) if earlier.has_delivered(0, slot)]
        [0, 1, 3, 5]
        """
        position, rank = divmod(slot, self.replicas)
        if position >= self.pass_length:
            return False
        frontier, ahead = self.booked[rank]
        position += pass_number * self.pass_length
        return position < frontier or position in ahead


def _nothing(position: int) -> bool:
    return False


def delivered_before(earlier: Sequence[EarlierRanks], *, pass_length: int, replicas: int, rank: int) -> Callable[[int], bool]:
    """Returns a function that returns whether a position of this rank was delivered while the run had other ranks."""
    if not earlier:
        return _nothing

    def was_delivered(position: int) -> bool:
        number, place = divmod(position, pass_length)
        return any(each.has_delivered(number, place * replicas + rank) for each in earlier)

    return was_delivered


class Dealing:
    """Deals positions to workers, and books what was delivered.

    Args:
        booked: What was delivered before. The positions that are open below the newest of them are dealt first.
        pass_length: Positions of a pass.
        block: Positions of a block. A block ends where a pass ends.
        window: See above.
        delivered_before: Returns whether other ranks had delivered a position, see `delivered_before`. It is not dealt.

    Example:
        >>> dealing = Dealing(Booked(0), pass_length=10, block=4, workers=2, window=4)
        >>> [list(block) for worker in (0, 1, 0) for block in dealing.deal(worker)]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> dealing.book([1, 0, 2])
        >>> dealing.booked(), [list(block) for block in dealing.deal(0)]
        (Booked(frontier=3, ahead=frozenset()), [[8, 9], [14, 15, 16, 17]])
    """

    def __init__(
        self,
        booked: Booked,
        *,
        pass_length: int,
        block: int,
        workers: int,
        window: int,
        delivered_before: Callable[[int], bool] = _nothing,
    ) -> None:
        self._pass_length, self._block, self._window = pass_length, block, window
        self.frontier, self._ahead, self._delivered_before = booked.frontier, set(booked.ahead), delivered_before
        self.next = max(booked.ahead, default=booked.frontier - 1) + 1  # the next position that was never dealt
        missed = (position for position in range(booked.frontier, self.next) if not self.is_delivered(position))
        self._again: deque[Block] = deque()
        while chunk := list(islice(missed, block)):
            self._again.append(chunk)
        self._queues: list[deque[Block]] = [deque() for _ in range(max(workers, 1))]  # dealt, and not yet told
        self._open = [0] * len(self._queues)  # positions of each worker
        self._worker_of: OrderedDict[int, int] = OrderedDict()  # of open positions, in the order of telling
        self._turn = 0
        self._most_queued = window // min(block, pass_length) + 1

    def deal(self, worker: int) -> list[Block]:
        """Returns the blocks that a worker is told with its next request."""
        told = []
        while self._open[worker] < self._window:
            block = self._next_for(worker)
            self._tell(worker, block)
            told.append(block)
        return told

    def _tell(self, worker: int, block: Block) -> None:
        self._worker_of.update(dict.fromkeys(block, worker))
        self._open[worker] += len(block)

    def book(self, positions: Iterable[int]) -> None:
        """Notes that positions were delivered.

        At each moment, what was booked before this call is: a signal handler may save a state.

        Raises:
            RuntimeError: One of them is not open: a fault of this package.
        """
        for position in positions:
            worker = self._worker_of.pop(position, None)
            if worker is None:
                raise RuntimeError(f"position {position} was delivered twice, or was never dealt out: please report this")
            self._open[worker] -= 1
            self._ahead.add(position)
        while self.is_delivered(self.frontier):
            self.frontier += 1
            self._ahead.discard(self.frontier - 1)

    def is_delivered(self, position: int) -> bool:
        return position < self.frontier or position in self._ahead or self._delivered_before(position)

    def booked(self) -> Booked:
        return Booked(self.frontier, frozenset(self._ahead))

    def _next_for(self, worker: int) -> Block:
        queues = self._queues
        while not queues[worker]:
            whose = worker if len(queues[self._turn]) >= self._most_queued else self._turn
            queues[whose].append(self._next_block())
            self._turn = (self._turn + 1) % len(queues)
        return queues[worker].popleft()

    def _next_block(self) -> Block:
        if self._again:
            return self._again.popleft()
        while True:
            first, in_pass = self.next, self.next % self._pass_length
            self.next += min(self._block - in_pass % self._block, self._pass_length - in_pass)
            block: Block = range(first, self.next)
            if self._delivered_before is not _nothing:
                block = [position for position in block if not self._delivered_before(position)]
            if block:
                return block


def lead(making_seconds: float, step_seconds: float, most: int) -> int:
    """Returns how many batches before its turn a batch is due: as many as making one takes, plus one; at most ``most``.

    >>> lead(0.03, 0.02, most=6), lead(0.001, 0.02, most=6), lead(1.0, 0.0, most=6)
    (3, 2, 6)
    """
    if step_seconds * most <= making_seconds:
        return most
    return min(math.ceil(making_seconds / step_seconds) + 1, most)
