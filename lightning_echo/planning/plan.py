"""Which example is used when: the echo plan, pure arithmetic without data, torch or I/O.

The fresh examples of a rank form one endless stream: position ``s`` of it is example ``s % pass_length`` of pass
``s // pass_length``. The plan says for every batch which positions are fresh in it and which live ones are used again; it
never sees an index, so that it is the same on all ranks, and ``order.py`` turns positions into indices.

* ``DataLoader`` hands batch ``k`` to worker ``k % workers``. So every worker has a `Buffer` of its own, and every echo is
  asked of the worker that holds the example.
* Uses per example by error diffusion: the ``i``-th gets ``floor(i * e) - floor((i - 1) * e)`` uses.
* Fresh examples per batch by error diffusion too: ``floor(B / e)`` or ``ceil(B / e)``. The rest is drawn without
  replacement from the live examples, each with the same probability, so none is twice in a batch. Drawn one by one, the
  number of those that die would swing; strata by uses left keep it level, and a buffer hardly larger than a batch lasts.
* Where more would be live than may, or fewer than the next batch needs, single examples get up to three fewer or more; later ones
  make up for it. So the share of fresh examples, and with it the factor, holds whatever the buffer.
* The start fills the buffer to the middle between what a batch needs and what may be live, with uses left as in the middle
  of a run; from then on it is level. Below factor 2 only ``e - 1`` of the fresh examples are used again, and as many may live.
* A new factor drops the uses beyond it, or adds to those that are left; then the buffer is filled up as at the start.
* An example is live for at most ``max_age`` positions of the stream: near that age its uses are drawn first. ``order.py``
  keeps the same index at least that far apart from one pass to the next, so that none is live twice. A pass that does not hold
  the buffer cannot have that: there examples live on, and an index may be twice in a batch.
* Batches are drawn by a generator seeded with seed and batch number: nothing but the buffers has to be saved.

For ``after_batching`` and ``after_transfer`` the same plan runs with whole batches as items: batch size 1 and one buffer.

Source: Choi et al. 2019, arXiv 1907.05550, section 2 (echo factor, shuffle buffer after echoing).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

from lightning_echo.planning.buffer import Buffer, Live
from lightning_echo.planning.hashing import mix
from lightning_echo.planning.ratio import EchoRatio
from lightning_echo.planning.shape import PlanShape

__all__ = ["EchoPlan", "PlannedBatch"]


class PlannedBatch(NamedTuple):
    """One batch of the plan.

    Attributes:
        number: Position of the batch in the run, from 0.
        first_fresh: Stream position of its first fresh item.
        fresh: How many of ``positions`` are fresh; they come first.
        positions: Stream positions of the items.
        stays_live: One byte per item, 1 while uses are left after this one.
        forget: Positions whose remaining uses were dropped: their worker may let them go.
    """

    number: int
    first_fresh: int
    fresh: int
    positions: Sequence[int]
    stays_live: bytes
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
        self._seed_draws = super(random.Random, self._random).seed  # the same for integers, without looking at their type
        self._set_factor(factor)

    @property
    def live_count(self) -> int:
        """Items with uses left, in all workers."""
        return sum(map(len, self._buffers))

    def live(self) -> list[Live]:
        """The live items of all workers, oldest first."""
        return sorted(chain.from_iterable(self._buffers), key=lambda item: item.position)

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

    def wanted_fresh(self) -> int:
        """Fresh items that the next batch would have: asked first where the source may end."""
        self._apply_changes()
        return self._next_size()[2]

    def next_batch(self, missing: int = 0) -> PlannedBatch:
        """Plans the next batch.

        Args:
            missing: Fresh items of it that the source no longer has. Their echoes are left out, too: others would have to give
                them beyond the factor, and more of them at the end of each pass.
        """
        self._apply_changes()
        buffer, size, fresh = self._next_size()
        if missing:
            fresh -= missing
            paid = self._ratio.most_delivered(buffer.fresh + fresh) - buffer.delivered
            size = min(size - missing, max(paid, fresh))
        if self._ratio.most_uses == 1:  # no echoing: nothing lives on, and nothing has to be worked out
            return self._emit(buffer, size, range(self.position, self.position + size), bytes(size))
        births = self._births(buffer, size, fresh)
        share = self._next_share(buffer)
        echoes = self._draw(buffer, size - fresh, len(births), share)
        self._settle(buffer, births, echoes, share)
        for item in chain(births, echoes):
            if item.left:
                buffer.put(item)
        buffer.births.extend(births)
        positions = [*range(self.position, self.position + fresh), *[item.position for item in echoes]]
        stays_live = bytes([item.left > 0 for item in chain(births, echoes)])
        return self._emit(buffer, fresh, positions, stays_live)

    def _apply_changes(self) -> None:
        while self.pending and self.pending[0][0] <= self.number:
            self._set_factor(self.pending.pop(0)[1])

    def _next_size(self) -> tuple[Buffer, int, int]:
        """The next batch's buffer, its size, and how many fresh items it has. Lets go of what is too old by then."""
        size = self.shape.size_of(self.number)
        buffer = self._buffers[self.number % len(self._buffers)]
        if self._ratio.most_uses == 1:
            return buffer, size, size
        fresh = self._fresh_count(buffer, size)
        while buffer.drop_until(self.position + fresh - 1 - self.shape.max_age):
            fresh = self._fresh_count(buffer, size)
        return buffer, size, fresh

    def _emit(self, buffer: Buffer, fresh: int, positions: Sequence[int], stays_live: bytes) -> PlannedBatch:
        forget, buffer.forget = tuple(buffer.forget), []
        batch = PlannedBatch(self.number, self.position, fresh, positions, stays_live, forget)
        self.position, self.number = self.position + fresh, self.number + 1
        return batch

    def _set_factor(self, factor: float) -> None:
        rises, self.factor, self._ratio = factor > self.factor, factor, EchoRatio.of(factor)
        workers, batch_size = len(self._buffers), self.shape.batch_size
        needed = batch_size - self._ratio.fewest_fresh(batch_size)
        spare = max(self.shape.buffer_in_pass // workers - needed, 0)
        if factor < 2:  # only e - 1 of the examples are used again: as many live ones would be older
            spare = ceil(spare * (factor - 1))
        self._most_live, self._target = needed + spare, needed + spare // 2
        batches = max(ceil(factor / (batch_size * (factor - 1))), 1) if factor > 1 else 1  # until one must have an echo
        self._step = workers * self._ratio.most_fresh(batches * batch_size)
        for buffer in self._buffers:
            buffer.restrict(self._ratio.most_uses)
            buffer.delivered = buffer.fresh = buffer.owed = 0
            if rises:
                self._extend(buffer)
            if len(buffer) < self._target:
                buffer.start_warming()

    def _extend(self, buffer: Buffer) -> None:
        """Gives live items the uses that they would have left in the middle of a run at the new, higher factor."""
        items = sorted(buffer, key=lambda item: (-item.used, item.position))
        buffer.clear()
        for item, left in zip(items, sorted(self._ratio.staggered(0, len(items), len(items))), strict=True):
            item.left = max(item.left, min(left, self._ratio.most_uses - item.used))
            buffer.put(item)

    def _fresh_count(self, buffer: Buffer, size: int) -> int:
        """``floor(B / e)`` or ``ceil(B / e)`` as the error diffusion has it, more while the buffer is being filled."""
        live, level = len(buffer), self._level_share(buffer, size)
        if not buffer.warming and live < size - level:
            buffer.start_warming()
        if buffer.warming:
            most = self._ratio.most_fresh(size)
            return max(size - live, min(size, most + self._target - live), most)
        least, due = self._ratio.fewest_fresh(size), self._due(buffer, size)
        if due == least + 1 and live >= size - least and self._lacks_room(buffer, size, due):
            return least  # one later: then there is room
        return level

    def _due(self, buffer: Buffer, size: int) -> int:
        """Fresh items that the error diffusion asks for in the next ``size`` items of a worker."""
        return self._ratio.fresh(buffer.delivered + size) - buffer.fresh

    def _level_share(self, buffer: Buffer, size: int) -> int:
        """As many of them as a batch may have: what a batch held back comes later."""
        return min(max(self._due(buffer, size), self._ratio.fewest_fresh(size)), self._ratio.most_fresh(size))

    def _lacks_room(self, buffer: Buffer, size: int, fresh: int) -> bool:
        births = sum(left > 0 for left in self._ratio.uses_left(buffer.fresh, fresh))
        return births > self._most_live - len(buffer) + min(size - fresh, buffer.last_uses)

    def _births(self, buffer: Buffer, size: int, fresh: int) -> list[Live]:
        """The fresh items, with the uses that they have left."""
        if not fresh and not buffer.warming:
            buffer.delivered += size
            return []
        if buffer.warming:
            missing = max(self._target - len(buffer), 0)
            regular = min(self._ratio.used_up(size - fresh), fresh)
            filling = min(fresh - regular, missing)
            left = self._ratio.uses_left(buffer.fresh, regular)
            left += self._ratio.staggered(buffer.staggered, filling, buffer.staggered + missing)
            buffer.staggered += filling
            buffer.warming = fresh - regular < missing
        else:
            left = self._ratio.uses_left(buffer.fresh, fresh)
            self._make_up(buffer, left)
            buffer.delivered += size
            buffer.fresh += fresh
        left = [0] * (fresh - len(left)) + left
        call = (self.position, fresh)
        return [Live(self.position + i, uses_left, 1, call) for i, uses_left in enumerate(left)]

    def _make_up(self, buffer: Buffer, left: list[int]) -> None:
        """Gives uses that are owed, or takes back what others got too much: one per item, within floor and ceiling of e."""
        least, most = self._ratio.fewest_uses - 1, self._ratio.most_uses - 1
        for i, uses in enumerate(left):
            change = (buffer.owed > 0) - (buffer.owed < 0)
            if least <= uses + change <= most or least == most:
                left[i] += change
                buffer.owed -= change

    def _draw(self, buffer: Buffer, count: int, births: int, share: tuple[int, int]) -> list[Live]:
        """Draws the echoes of a batch and takes one use from each; ``share`` is that of the next one."""
        if not count:
            return []
        self._seed_draws(mix(self.shape.seed, self.number))
        room, (following, level) = len(buffer) + births, share
        crowd = max(2 * level - following, 0)  # fresh items of the next batch beyond the places its echoes can free
        least, most = room - self._most_live + crowd, room - (following - level)
        newest = self.position + births - 1
        drawn = buffer.urgent(newest, self.shape.max_age, self._step, self._ratio.fewest_uses + 1)[:count]
        for item in drawn:
            buffer.remove(item)
        last_uses = sum(item.left == 1 for item in drawn)
        drawn += buffer.draw(count - len(drawn), least - last_uses, most - last_uses, self._random.random)
        for item in drawn:
            item.left -= 1
            item.used += 1
        return drawn

    def _next_share(self, buffer: Buffer) -> tuple[int, int]:
        """Items of this worker's next full batch, and how many of them are to be fresh. A short one between needs less."""
        size = self.shape.batch_size
        return size, size if buffer.warming else self._level_share(buffer, size)

    def _settle(self, buffer: Buffer, births: list[Live], echoes: list[Live], share: tuple[int, int]) -> None:
        """Lets no more items live than may, and no fewer than the next batch needs; later examples make up for it."""
        staying = [item for item in chain(echoes, births) if item.left]
        count, (following, level) = len(buffer) + len(staying), share
        for _ in range(count - self._most_live):
            item = min(chain(staying, buffer.nearly_used_up()), key=lambda item: (item.left, -item.used))
            if item in staying:
                staying.remove(item)
            else:
                buffer.remove(item)
                buffer.forget.append(item.position)
            buffer.owed += item.left
            item.left = 0
        if (missing := following - level - count) > 0:
            ended = sorted((item for item in chain(births, echoes) if not item.left), key=lambda item: item.used)
            for item in ended[:missing]:
                buffer.owed -= 1
                item.left = 1
