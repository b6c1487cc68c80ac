"""Which example is used when: the echo plan, pure arithmetic without data, torch or I/O.

The fresh examples of a rank form one endless stream: position ``s`` of it is example ``s % pass_length`` of pass
``s // pass_length``. The plan says for every batch which positions are fresh in it and which live ones are used again; it
never sees an index, so that it is the same on all ranks, and ``order.py`` turns positions into indices.

* ``DataLoader`` hands batch ``k`` to worker ``k % workers``. So every worker has a `Buffer` of its own, and every echo is
  asked of the worker that holds the example.
* Uses per example by error diffusion: the ``i``-th gets ``floor(i * e) - floor((i - 1) * e)`` uses.
* Fresh examples per batch by error diffusion too: ``floor(B / e)`` or ``ceil(B / e)``. The rest is drawn uniformly without
  replacement from the live examples, so none is twice in a batch.
* The start fills half the buffer, with uses as they would be left in the middle of a run; from then on it is level.
* A new factor drops the uses beyond it, or adds to those that are left; then the buffer is filled up as at the start.
* An example is live for at most ``max_age`` positions of the stream: near that age its uses are drawn first. ``order.py``
  keeps the same index at least that far apart from one pass to the next, so that none is live twice.
* Batches are drawn by a generator seeded with seed and batch number: nothing but the buffers has to be saved.

For ``after_batching`` the same plan runs with whole batches as items: batch size 1 and one buffer.

Source: Choi et al. 2019, arXiv 1907.05550, section 2 (echo factor, shuffle buffer after echoing).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

from lightning_echo.echoing.buffer import Buffer, Live

__all__ = ["EchoPlan", "PlanShape", "PlannedBatch", "as_ratio", "smallest_buffer"]

_DENOMINATOR_LIMIT = 1_000_000
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64 finaliser), the same on every machine."""
    value = 0
    for number in numbers:
        value = (value + number + _ODD) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def as_ratio(factor: float) -> tuple[int, int]:
    """The echo factor as a fraction of integers, so that 1.1 x 10 is 11 and no rounding error adds up."""
    ratio = Fraction(factor).limit_denominator(_DENOMINATOR_LIMIT)
    return ratio.numerator, ratio.denominator


def smallest_buffer(batch_size: int, factor: float, workers: int) -> int:
    """Live examples a rank needs so that a batch can be filled: ``B - floor(B / e)`` for each worker."""
    uses, per = as_ratio(factor)
    return max(workers, 1) * (batch_size - batch_size * per // uses)


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """What stays the same while a plan runs. Sizes count items: examples, or batches for ``after_batching``.

    Attributes:
        batch_size: Items in a full batch.
        last_batch_size: Items in the last batch of a pass (equal to ``batch_size`` where they divide it).
        batches_per_pass: Batches of the plain loader in one epoch on this rank.
        workers: Worker processes, each with a buffer of its own; 0 counts as one.
        buffer_size: Most live items per rank.
        seed: Seed of the draws.
        distinct: Whether an index must not be twice in a batch; no matter for whole batches.
    """

    batch_size: int
    last_batch_size: int
    batches_per_pass: int
    workers: int
    buffer_size: int
    seed: int
    distinct: bool = True

    @property
    def pass_length(self) -> int:
        """Items that one pass holds on this rank."""
        return (self.batches_per_pass - 1) * self.batch_size + self.last_batch_size

    @property
    def buffer_in_pass(self) -> int:
        """The part of the buffer that a small pass can fill without holding an example twice."""
        if not self.distinct or self.pass_length >= self.buffer_size + self.batch_size:
            return self.buffer_size
        return max((self.pass_length - self.batch_size) // 2, 0)

    @property
    def max_age(self) -> int:
        """Positions of the fresh stream for which an example may be live (see the module's text)."""
        if not self.distinct:
            return 1 << 62
        least = self.buffer_in_pass + self.batch_size
        slack = max(self.workers, 1) * max(self.batch_size, 16)
        # In a short pass half of what there is to spare goes to the slack, half to shuffling the next pass.
        return min(self.pass_length, least + min(slack, max(self.pass_length - least, 0) // 2))

    def size_of(self, number: int) -> int:
        """Items in batch ``number``: those of the plain loader, pass after pass."""
        return self.last_batch_size if (number + 1) % self.batches_per_pass == 0 else self.batch_size


class PlannedBatch(NamedTuple):
    """One batch of the plan.

    Attributes:
        number: Position of the batch in the run, from 0.
        first_fresh: Stream position of its first fresh item.
        fresh: How many of ``positions`` are fresh; they come first.
        positions: Stream positions of the items.
        kept: One byte per item, 1 while uses are left after this one.
        forget: Positions whose remaining uses were dropped: their worker may let them go.
    """

    number: int
    first_fresh: int
    fresh: int
    positions: list[int]
    kept: bytes
    forget: tuple[int, ...]


class EchoPlan:
    """Yields `PlannedBatch` after `PlannedBatch`, without end.

    Args:
        shape: Sizes and seed.
        factor: Echo factor from the first batch on, a real number >= 1.

    Example:
        >>> shape = PlanShape(batch_size=4, last_batch_size=4, batches_per_pass=100, workers=1, buffer_size=8, seed=0)
        >>> plan = EchoPlan(shape, factor=2.0)
        >>> fresh = [plan.next_batch().fresh for _ in range(6)]  # the start fills the buffer, then half of each batch
        >>> fresh[0], fresh[2:]
        (4, [2, 2, 2, 2])
    """

    def __init__(self, shape: PlanShape, factor: float) -> None:
        self.shape = shape
        self.number = 0  # of the next batch
        self.position = 0  # of the next fresh item
        self.factor = factor
        self.pending: list[tuple[int, float]] = []
        self._buffers = [Buffer() for _ in range(max(shape.workers, 1))]
        self._random = random.Random()
        self._set_factor(factor)

    @property
    def live_count(self) -> int:
        """Items with uses left, in all workers."""
        return sum(map(len, self._buffers))

    def live(self) -> list[Live]:
        """The live items of all workers, oldest first."""
        items = [item for buffer in self._buffers for item in (*buffer.ones, *buffer.more)]
        return sorted(items, key=lambda item: item.position)

    def state(self) -> dict[str, Any]:
        """Plain types: everything that decides the batches from `number` on. Positions, never indices."""
        return {
            "number": self.number,
            "position": self.position,
            "factor": self.factor,
            "pending": [list(change) for change in self.pending],
            "buffers": [buffer.state() for buffer in self._buffers],
        }

    @classmethod
    def from_state(cls, shape: PlanShape, state: dict[str, Any]) -> EchoPlan:
        """A plan that goes on where `state` was taken."""
        plan = cls(shape, state["factor"])
        plan.number, plan.position = state["number"], state["position"]
        plan.pending = [(int(number), float(factor)) for number, factor in state["pending"]]
        plan._buffers = [Buffer.from_state(buffer) for buffer in state["buffers"]]
        return plan

    def change_factor(self, number: int, factor: float) -> None:
        """Lets ``factor`` count from batch ``number`` on, which must not be planned yet."""
        if number < self.number:
            raise ValueError(f"batch {number} is planned already, the next one is {self.number}")
        self.pending = [change for change in self.pending if change[0] < number] + [(number, factor)]

    def next_batch(self) -> PlannedBatch:
        """Plans the next batch."""
        while self.pending and self.pending[0][0] <= self.number:
            self._set_factor(self.pending.pop(0)[1])
        number, size = self.number, self.shape.size_of(self.number)
        buffer = self._buffers[number % len(self._buffers)]
        fresh = self._fresh_count(buffer, size)
        while buffer.drop_until(self.position + fresh - 1 - self.shape.max_age):
            fresh = self._fresh_count(buffer, size)
        births = self._births(buffer, size, fresh)
        echoes = self._draw(buffer, size, fresh, len(births))
        room = self._most_live - len(buffer)
        buffer.owed += sum(item.left for item in births[room:])
        births = births[:room]
        kept = bytearray(fresh)
        for item in births:
            kept[item.position - self.position] = 1
            buffer.put(item)
        buffer.births.extend(births)
        positions = [*range(self.position, self.position + fresh), *[item.position for item in echoes]]
        kept += bytes([item.left > 0 for item in echoes])
        forget, buffer.forget = tuple(buffer.forget), []
        first, self.position, self.number = self.position, self.position + fresh, number + 1
        return PlannedBatch(number, first, fresh, positions, bytes(kept), forget)

    def _set_factor(self, factor: float) -> None:
        rises, self.factor = factor > self.factor, factor
        self._uses, self._per = as_ratio(factor)
        workers = len(self._buffers)
        batch_size = self.shape.batch_size
        self._needed = batch_size - batch_size * self._per // self._uses
        self._most_live = max(self.shape.buffer_in_pass // workers, self._needed)
        spare = (self._most_live - self._needed) // 2  # below factor 2 only e - 1 of the examples are used again
        self._target = self._needed + int(spare * min(factor - 1, 1.0)) if factor > 1 else 0
        self._step = workers * -(-batch_size * self._per // self._uses)
        most_uses = -(-self._uses // self._per)
        for buffer in self._buffers:
            buffer.restrict(most_uses)
            buffer.delivered = buffer.fresh = buffer.owed = 0
            if rises:
                self._extend(buffer, most_uses)
            if len(buffer) < self._target:
                buffer.start_warming()

    def _extend(self, buffer: Buffer, most_uses: int) -> None:
        """Gives live items the uses that they would have left in the middle of a run at the new, higher factor."""
        items = sorted((*buffer.ones, *buffer.more), key=lambda item: (-item.used, item.position))
        buffer.ones, buffer.more, buffer.staggered = [], [], 0
        for item, left in zip(items, sorted(self._staggered_uses(buffer, len(items), len(items))), strict=True):
            item.left = max(item.left, min(left, most_uses - item.used))
            buffer.put(item)

    def _level(self, delivered: int) -> int:
        """Fresh items among the first ``delivered`` ones of a worker."""
        return -(-delivered * self._per // self._uses)

    def _fresh_count(self, buffer: Buffer, size: int) -> int:
        """``floor(B / e)`` or ``ceil(B / e)``: what the error diffusion asks for, as far as the buffer can do it."""
        live, least, most = len(buffer), size * self._per // self._uses, self._level(size)
        if buffer.warming:
            return max(size - live, min(size, most + self._target - live), most)
        level = min(max(self._level(buffer.delivered + size) - buffer.fresh, least), most)
        if live < size - level:
            level = most
        elif live >= size - least and 0 < self._births_due(buffer, level) > self._room(buffer, size - level):
            level = least
        if live < size - level:
            buffer.start_warming()
            return self._fresh_count(buffer, size)
        return level

    def _room(self, buffer: Buffer, echoes: int) -> int:
        """Places for new live items in a batch with ``echoes`` echoes."""
        return self._most_live - len(buffer) + min(echoes, len(buffer.ones))

    def _births_due(self, buffer: Buffer, count: int) -> int:
        """How many of the next ``count`` fresh items have uses left after the first one: below factor 2 some have none."""
        uses, per, first = self._uses, self._per, buffer.fresh
        return min(count, (first + count) * uses // per - first * uses // per - count)

    def _uses_left(self, buffer: Buffer, count: int) -> list[int]:
        """Uses after the first one of the next ``count`` fresh items."""
        uses, per, first = self._uses, self._per, buffer.fresh
        totals = [i * uses // per for i in range(first, first + count + 1)]
        return [after - before - 1 for before, after in pairwise(totals)]

    def _births(self, buffer: Buffer, size: int, fresh: int) -> list[Live]:
        """The fresh items that will be used again."""
        echoes = size - fresh
        if buffer.warming:
            missing = max(self._target - len(buffer), 0)
            regular = min(echoes * self._per // max(self._uses - self._per, 1), fresh)  # as many as the echoes use up
            left = self._uses_left(buffer, regular)
            left += self._staggered_uses(buffer, min(fresh - regular, missing), missing)
            buffer.warming = fresh - regular < missing
        else:
            left = self._uses_left(buffer, fresh)
            for i in range(min(buffer.owed, fresh)):
                left[i] += 1
                buffer.owed -= 1
            buffer.delivered += size
            buffer.fresh += fresh
        first, call = self.position + fresh - len(left), (self.position, fresh)
        return [Live(first + i, uses_left, 1, call) for i, uses_left in enumerate(left) if uses_left]

    def _staggered_uses(self, buffer: Buffer, count: int, missing: int) -> list[int]:
        """Uses left as in the middle of a run: evenly spread over what one example has after its first use."""
        total = buffer.staggered + missing
        stride = next((s for s in range(max(total * 5 // 8, 1), total) if gcd(s, total) == 1), 1)
        spread = [(i * stride % total) for i in range(buffer.staggered, buffer.staggered + count)]
        buffer.staggered += count
        above, below = self._uses - self._per, self._per * total * 2
        return [-(-(2 * i + 1) * above // below) for i in spread]

    def _draw(self, buffer: Buffer, size: int, fresh: int, births: int) -> list[Live]:
        """Draws the echoes of a batch and takes one use from each."""
        count, ones, more = size - fresh, buffer.ones, buffer.more
        if not count:
            return []
        self._random.seed(mix(self.shape.seed, self.number))
        following = self.shape.size_of(self.number + len(self._buffers))
        level = self._level(buffer.delivered + following) - buffer.fresh
        room = len(buffer) + births
        crowd = max(2 * level - following, 0)  # fresh items of the next batch beyond the places its echoes can free
        least, most = room - self._most_live + crowd, room - (following - level)  # of those with one use left
        newest = self.position + fresh - 1
        drawn = buffer.urgent(newest, self.shape.max_age, self._step, self._uses // self._per + 1)[:count]
        for item in drawn:
            buffer.remove(item)
        last_uses = sum(item.left == 1 for item in drawn)
        rand = self._random.random
        for missing in range(count - len(drawn), 0, -1):
            if not more or (ones and least - last_uses >= missing):
                from_ones = True
            elif not ones or last_uses >= most:
                from_ones = False
            else:
                from_ones = rand() * (len(ones) + len(more)) < len(ones)
            source = ones if from_ones else more
            last_uses += from_ones
            drawn.append(buffer.take(source, int(rand() * len(source))))
        for item in drawn:
            item.left -= 1
            item.used += 1
            if item.left:
                buffer.put(item)
        return drawn
