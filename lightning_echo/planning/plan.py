"""Which example is used when: the plan, pure arithmetic without data, torch or I/O.

Words of this folder:

* *Item*: what is used several times: an example, or a whole batch for ``after_batching`` and ``after_transfer``.
* *Position*: the number of a fresh item. The fresh items of a rank form one endless stream: position ``s`` is item
  ``s % pass_length`` of pass ``s // pass_length``.
* *Live*: an item that was used at least once and may be used again.

A plan says for every batch which positions are fresh in it and which live items are used again. It never sees an index, so that
it is the same on all ranks. ``order.py`` turns positions into indices. There are two plans:

* `EachPlan` (``each_plan.py``): each fresh item is used ``e`` times. It is live while uses are left.
* `MemoryPlan` (``memory_plan.py``): ``1 / e`` of the items are fresh, and echoes are drawn from all items that memory holds.

``DataLoader`` gives batch ``k`` to worker ``k % workers``. Both plans promise:

* Every echo is asked of the worker that holds the item.
* No position is in a batch twice.
* The random draws of a batch are seeded with seed and batch number. So the state needs to hold no random state.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from lightning_echo.planning.buffer import Call
from lightning_echo.planning.hashing import mix
from lightning_echo.planning.ratio import EchoRatio
from lightning_echo.planning.shape import PlanShape

__all__ = ["LiveItem", "Plan", "PlannedBatch"]

P = TypeVar("P", bound="Plan")


class PlannedBatch(NamedTuple):
    """One batch of the plan.

    Attributes:
        number: Number of the batch in the run, from 0.
        first_fresh: Position of its first fresh item.
        fresh: Number of fresh ``positions``. They come first.
        positions: Positions of the items.
        stays_live: One byte per item, 1 if it is still live after this batch.
        forget: Positions of items that are no longer live: the worker may let them go.
    """

    number: int
    first_fresh: int
    fresh: int
    positions: Sequence[int]
    stays_live: bytes
    forget: tuple[int, ...]


class LiveItem(NamedTuple):
    """An item that is live.

    Attributes:
        position: Its position in the fresh stream.
        call: The call in which it was read.
    """

    position: int
    call: Call


class Plan(ABC):
    """Yields `PlannedBatch` after `PlannedBatch`, without end.

    Args:
        shape: Sizes and seed.
        factor: Echo factor from the first batch on, a real number >= 1.

    Attributes:
        number: Number of the next batch.
        position: Position of the next fresh item.
        factor: The echo factor in force.
        pending: Changes of the factor to come. Each is the number of a batch, and the factor from that batch on.
    """

    _ratio: EchoRatio

    def __init__(self, shape: PlanShape, factor: float) -> None:
        self.shape = shape
        self.number = 0
        self.position = 0
        self.factor = factor
        self.pending: list[tuple[int, float]] = []
        self._random = random.Random()
        # `Random.seed` calls this for an integer, after a look at the type. So the numbers are the same, at less cost.
        self._seed = super(random.Random, self._random).seed

    @property
    @abstractmethod
    def live_count(self) -> int:
        """Number of live items of all workers."""

    @abstractmethod
    def live(self) -> list[LiveItem]:
        """Returns the live items of all workers, oldest first."""

    @property
    @abstractmethod
    def oldest_call(self) -> int:
        """First position of the oldest call in which a live item was read. If nothing is live: the next fresh position."""

    @abstractmethod
    def wanted_fresh(self) -> int:
        """Returns how many fresh items the next batch wants. Ask before `next_batch` if the source may have fewer."""

    @abstractmethod
    def next_batch(self, missing: int = 0) -> PlannedBatch:
        """Plans the next batch.

        Args:
            missing: Number of its fresh items that the source no longer has. Their echoes are left out, too. Otherwise other
                items would be used more often than the factor says, and more of them at the end of each pass.
        """

    @abstractmethod
    def _set_factor(self, factor: float) -> None:
        """Applies a factor from the next batch on."""

    def state(self) -> dict[str, Any]:
        """Returns what decides the batches from `number` on, in plain types: positions, never indices."""
        return {
            "number": self.number,
            "position": self.position,
            "factor": self.factor,
            "pending": [list(change) for change in self.pending],
        }

    @classmethod
    def from_state(cls: type[P], shape: PlanShape, state: dict[str, Any]) -> P:
        """Returns a plan that continues where `state` was taken."""
        plan = cls(shape, state["factor"])
        plan.number, plan.position = state["number"], state["position"]
        plan.pending = [(int(number), float(factor)) for number, factor in state["pending"]]
        return plan

    def change_factor(self, number: int, factor: float) -> None:
        """Applies ``factor`` from batch ``number`` on. It replaces all changes that were to come from that batch on.

        Raises:
            ValueError: The batch is planned already.
        """
        if number < self.number:
            raise ValueError(f"batch {number} is planned already, the next one is {self.number}")
        self.pending = [(earlier, before) for earlier, before in self.pending if earlier < number] + [(number, factor)]

    def _apply_changes(self) -> None:
        while self.pending and self.pending[0][0] <= self.number:
            _, factor = self.pending.pop(0)
            self._set_factor(factor)

    def _seed_draws(self) -> None:
        """Seeds the random draws of the next batch."""
        self._seed(mix(self.shape.seed, self.number))

    def _emit(self, forget: list[int], fresh: int, positions: Sequence[int], stays_live: bytes) -> PlannedBatch:
        """Returns the next batch, and moves on to the one after it. Empties ``forget``."""
        batch = PlannedBatch(self.number, self.position, fresh, positions, stays_live, tuple(forget))
        forget.clear()
        self.position, self.number = self.position + fresh, self.number + 1
        return batch
