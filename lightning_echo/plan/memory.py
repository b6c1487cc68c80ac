"""`MemoryPlan`: echoes are drawn from all items that memory holds. `make_plan` makes the plan that a shape asks for."""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.plan import Call, LiveItem, Plan, PlanShape, Reuse, mix

# ---------------------------------------------------------------------- memory plan
# Echoes are drawn from all items that are held (here the same as *live*; the other words are those of ``plan.py``). The rules:
#
# * Items leave only when memory is full, the oldest first. So the factor does not limit the uses of an item: an item that is held
#   for long is drawn more often.
# * The share of fresh items is exact: of the items that a worker delivers, ``1 / e`` are fresh, by error diffusion. Each batch
#   has ``floor(B / e)`` or ``ceil(B / e)`` fresh items, from the first batch on. The exception: if too few items are held to fill
#   a batch without a repetition, it has as many fresh items as it needs. Such batches are not counted.
# * Echoes are drawn uniformly from the items that were held before the batch, without repetition in the batch.
# * Each worker holds its share of the memory, and is asked only for what it holds.
# * An item is held for less than ``max_age`` positions, so that no index is held twice (see ``plan.py``).
#
# The draws follow from seed and batch number. For each worker, the state has two counts and the positions of its items, as the
# compressed bytes of their differences, which are almost regular.
#
# Source: experience replay (Lin 1992, Machine Learning 8); the simulation and the measurements are in docs/evidence.md.


class _Memory:
    """The items that one worker holds, oldest first (``positions`` from ``start`` on), and the counts of its batches.

    ``delivered`` counts the items since the factor changed, without batches for which too few items were held, and ``fresh`` the
    fresh ones among them.
    ``counts``: whether the next batch is counted. ``forget`` has the positions that the worker may drop, and that no batch has
    named yet.
    """

    def __init__(self) -> None:
        self.delivered = self.fresh = 0
        self.counts = True
        self.forget: list[int] = []
        self.positions = array("q")
        self.start = 0  # the items before it have left
        self._calls: deque[Call] = deque()

    def __len__(self) -> int:
        return len(self.positions) - self.start

    def __iter__(self) -> Iterator[LiveItem]:
        for call in self._calls:
            for position in range(max(call.first, self.positions[self.start]), call.first + call.size):
                yield LiveItem(position, call)

    @property
    def oldest_call(self) -> int:
        return self._calls[0].first

    def add(self, call: Call) -> None:
        if call.size:
            self.positions.extend(range(call.first, call.first + call.size))
            self._calls.append(call)

    def drop(self, count: int) -> array[int]:
        dropped = self.positions[self.start : self.start + count]
        self.start += count
        if self.start > len(self.positions) // 2 > 512:  # half of the list is empty; on average an item is moved once
            del self.positions[: self.start]
            self.start = 0
        oldest = self.positions[self.start] if len(self) else math.inf
        while self._calls and self._calls[0].first + self._calls[0].size <= oldest:
            self._calls.popleft()
        return dropped

    def drop_until(self, position: int) -> bool:
        """Drops the items up to a position. Returns whether there were any."""
        count = bisect_right(self.positions, position, self.start) - self.start
        if count:
            self.forget += self.drop(count)
        return count > 0

    def draw(self, count: int, rand: Callable[[], float]) -> list[int]:
        """Returns ``count`` places of items: 0 is the oldest. Each set of places has the same probability (Floyd's algorithm)."""
        held = len(self)
        chosen: dict[int, None] = {}  # in the order of the draws: a set has no fixed order
        for last in range(held - count, held):
            place = int(rand() * (last + 1))
            chosen[last if place in chosen else place] = None
        return list(chosen)

    def state(self) -> dict[str, Any]:
        return {"delivered": self.delivered, "fresh": self.fresh, "held": len(self), "calls": pack_calls(self._calls)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _Memory:
        memory = cls()
        memory.delivered, memory.fresh = state["delivered"], state["fresh"]
        for call in unpack_calls(state["calls"]):
            memory.add(call)
        memory.drop(len(memory) - state["held"])
        return memory


def pack_calls(calls: Iterable[Call]) -> str:
    """Returns calls as a text: for each call, the distance of its first position to that of the call before, and its size.

    >>> unpack_calls(pack_calls([Call(3, 8), Call(20, 2)]))
    [Call(first=3, size=8), Call(first=20, size=2)]
    """
    firsts, sizes = array("q"), array("q")
    before = 0
    for first, size in calls:
        firsts.append(first - before)
        sizes.append(size)
        before = first
    return base64.b85encode(zlib.compress(firsts.tobytes() + sizes.tobytes(), 9)).decode()


def unpack_calls(text: str) -> list[Call]:
    """Inverts `pack_calls`; raises ``ValueError`` for a damaged text."""
    try:
        numbers = array("q", zlib.decompress(base64.b85decode(text)))
    except zlib.error as error:
        raise ValueError(f"the calls are damaged: {error}") from error
    half, odd = divmod(len(numbers), 2)
    if odd:
        raise ValueError(f"the calls are damaged: {len(numbers)} numbers are not pairs")
    return list(map(Call, accumulate(numbers[:half]), numbers[half:]))


class MemoryPlan(Plan):
    """Draws echoes from all items that memory holds; see `Plan`.

    Example:
        >>> shape = PlanShape(batch_size=4, last_batch_size=4, batches_per_pass=100, workers=1, buffer_size=8, seed=0)
        >>> plan = MemoryPlan(shape, factor=2.0)
        >>> [plan.next_batch().fresh for _ in range(5)]
        [4, 2, 2, 2, 2]
    """

    _holder = _Memory
    _state_name = "memories"

    def _fresh_count(self, memory: _Memory, size: int) -> int:
        steady = self._steady_fresh(memory, size)
        fresh = max(steady, size - len(memory))
        memory.counts = fresh == steady
        return fresh

    def _with_echoes(self, memory: _Memory, size: int, fresh: int) -> tuple[list[int], bytes]:
        if memory.counts:
            memory.delivered, memory.fresh = memory.delivered + size, memory.fresh + fresh
        places = []
        if size > fresh:
            self._seed(mix(self.shape.seed, self.number))
            places = memory.draw(size - fresh, self._random.random)
        echoes, before = [memory.positions[memory.start + place] for place in places], len(memory)
        memory.add(Call(self.position, fresh))
        stays_live = bytearray(b"\1" * size)
        leaving = len(memory) - self._most_held
        if leaving > 0:
            drawn = {place: number for number, place in enumerate(places, fresh) if place < leaving}
            for place, position in enumerate(memory.drop(leaving)):
                if place >= before:  # a fresh item for which there is no room
                    stays_live[place - before] = 0
                elif place in drawn:
                    stays_live[drawn[place]] = 0
                else:
                    memory.forget.append(position)
        return echoes, bytes(stays_live)

    def _set_factor(self, factor: float) -> None:
        super()._set_factor(factor)
        self._most_held = self.shape.buffer_in_pass // len(self._held)
        for memory in self._held:
            memory.delivered = memory.fresh = 0
            if not self._echoes:
                memory.forget += memory.drop(len(memory))


# ---------------------------------------------------------------------- plans

_PLANS: dict[Reuse, type[Plan]] = {Reuse.each: EachPlan, Reuse.memory: MemoryPlan}


def make_plan(shape: PlanShape, factor: float) -> Plan:
    """Returns the plan that ``shape.reuse`` asks for, at its beginning."""
    return _PLANS[shape.reuse](shape, factor)


def plan_from_state(shape: PlanShape, state: dict[str, Any]) -> Plan:
    """Returns a plan that continues where its `Plan.state` was taken."""
    return _PLANS[shape.reuse].from_state(shape, state)
