"""Plan and order joined: what is asked of the workers, batch by batch, and the state of the run at any delivered batch.

`ExampleRequests` is the batch sampler of the inner ``DataLoader`` for the example-level points: one `Request` per batch.
`BatchRequests` is the one for whole batches: one `Request` per batch that is *read*, and a `Step` per batch that is
delivered. Neither ever waits for anything: ``DataLoader`` asks for a batch before it hands the last one out.

The plan runs ahead of what is delivered. Instead of undoing it, a snapshot is kept every few batches, and the state at a
delivered batch is the last snapshot before it, planned forward: arithmetic only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple, Protocol

from lightning_echo.planning.order import Order
from lightning_echo.planning.plan import EchoPlan, PlannedBatch
from lightning_echo.workers.dataset import Request

__all__ = ["BatchRequests", "BatchedOrder", "ExampleRequests", "Step"]

_SNAPSHOT_BATCHES = 64


class ItemOrder(Protocol):
    """What stands at each position of the fresh stream.

    It is an index (`Order`), the indices of a batch (`BatchedOrder`), or, where a loader is only read, nothing (`PassReader`).
    """

    @property
    def exact(self) -> bool:
        """Whether a resumed run finds the same order again."""

    def take(self, count: int) -> list[Any]:
        """Returns the items of the next ``count`` positions."""

    def seek(self, position: int) -> None:
        """Goes to a position."""

    def state(self, position: int) -> dict[str, Any]:
        """Returns what a resumed run needs from ``position`` on."""

    def prune(self, position: int) -> None:
        """Forgets what only positions before ``position`` need."""


class BatchedOrder:
    """An order of indices, cut into the batches of the plain loader: what `BatchRequests` counts positions in.

    Args:
        order: The order of the indices.
        batch_size: Indices in a full batch.
        last_batch_size: Indices in the last batch of a pass.
        batches_per_pass: Batches of a pass on this rank.
    """

    def __init__(self, order: Order, batch_size: int, last_batch_size: int, batches_per_pass: int) -> None:
        self._order, self._sizes = order, (batch_size, last_batch_size)
        self._batches = batches_per_pass
        self.position = 0

    @property
    def exact(self) -> bool:
        return self._order.exact

    def take(self, count: int) -> list[list[Any]]:
        batches = []
        for _ in range(count):
            self.position += 1
            batches.append(self._order.take(self._sizes[self.position % self._batches == 0]))
        return batches

    def seek(self, position: int) -> None:
        self.position = position
        self._order.seek(self._first(position))

    def state(self, position: int) -> dict[str, Any]:
        return self._order.state(self._first(position))

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)

    def prune(self, position: int) -> None:
        self._order.prune(self._first(position))

    def _first(self, position: int) -> int:
        number, offset = divmod(position, self._batches)
        return number * self._order.pass_length + offset * self._sizes[0]


class _Planner:
    """What both kinds of requests share: plan and order in step, snapshots, and the lock that the two threads need."""

    def __init__(self, plan: EchoPlan, order: ItemOrder, begin_spreading: Callable[[], None] | None = None) -> None:
        self.plan, self.order = plan, order
        self.delivered = plan.number  # batches handed to the training loop, at least; set by the loader
        self._lock = threading.RLock()
        self._begin_spreading = begin_spreading  # called once, where echoing begins
        self._every = max(_SNAPSHOT_BATCHES, 4 * plan.shape.buffer_size // plan.shape.batch_size)
        self._snapshots: deque[dict[str, Any]] = deque([plan.state()])
        self._calls = {item.position: item.call for item in plan.live()}  # live, but held nowhere yet
        oldest = min((first for first, _ in self._calls.values()), default=plan.position)
        order.seek(oldest)
        self._items: dict[int, Any] = dict(enumerate(order.take(plan.position - oldest), oldest))

    def change_factor(self, number: int, factor: float) -> None:
        """Lets a factor count from batch ``number`` on."""
        with self._lock:
            self.plan.change_factor(number, factor)
            for snapshot in self._snapshots:
                snapshot["pending"] = [change for change in snapshot["pending"] if change[0] < number]
                if snapshot["number"] <= number:
                    snapshot["pending"].append([number, factor])

    def state(self, delivered: int) -> dict[str, Any]:
        """Plan and order after so many batches, at least `delivered` - 1: plain types, the same on all ranks."""
        with self._lock:
            snapshot = next(state for state in reversed(self._snapshots) if state["number"] <= delivered)
            plan = EchoPlan.from_state(self.plan.shape, snapshot)
            while plan.number < delivered:
                plan.next_batch()
            return {"plan": plan.state(), "order": self.order.state(_oldest_call(plan))}

    def _next_batch(self) -> tuple[PlannedBatch, list[Any]]:
        """The next batch of the plan, and the items of its fresh positions."""
        plan = self.plan
        if plan.number % self._every == 0:
            self._take_snapshot()
        batch = plan.next_batch()
        if plan.factor > 1 and self._begin_spreading is not None:
            self._begin_spreading()
            self._begin_spreading = None  # passes stay spread: from here on, batches do not begin where passes do
        fresh = self.order.take(batch.fresh) if batch.fresh else []
        if fresh and 1 in batch.stays_live:
            self._items.update(compress(zip(batch.positions, fresh, strict=False), batch.stays_live))
        for position in batch.forget:
            self._forget(position)
        return batch, fresh

    def _forget(self, position: int) -> None:
        del self._items[position]
        self._calls.pop(position, None)

    def _take_snapshot(self) -> None:
        snapshots = self._snapshots
        if snapshots[-1]["number"] != self.plan.number:
            snapshots.append(self.plan.state())
        while len(snapshots) > 1 and snapshots[1]["number"] < self.delivered:  # `state` may be asked for one batch before
            snapshots.popleft()
        self.order.prune(_oldest_call(EchoPlan.from_state(self.plan.shape, snapshots[0])))


class ExampleRequests(_Planner):
    """The batch sampler for the example-level points.

    Args:
        plan: The plan, at the batch to begin with.
        order: The order of the indices.
        whole_calls: Whether the data set reads whole batches, so that only a whole call can be repeated.
    """

    def __init__(self, plan: EchoPlan, order: Order, *, whole_calls: bool) -> None:
        super().__init__(plan, order, order.begin_spreading)
        self._whole_calls = whole_calls
        self._call_items: dict[int, list[Any]] = {}
        if whole_calls:
            for first, count in set(self._calls.values()):
                self._call_items[first] = [self._items[position] for position in range(first, first + count)]
        self._items = {position: self._items[position] for position in self._calls}

    def __iter__(self) -> ExampleRequests:
        return self

    def __next__(self) -> Request:
        with self._lock:
            batch, indices = self._next_batch()
            items, fresh, positions, stays_live = self._items, batch.fresh, batch.positions, batch.stays_live
            if fresh == len(positions):
                return Request(batch.number, positions, fresh, indices, stays_live, batch.forget)
            echoed = positions[fresh:]
            for position, stays in zip(echoed, stays_live[fresh:], strict=True):
                indices.append(items[position] if stays else items.pop(position))
            rebuild = self._rebuild(echoed) if self._calls else ()
            return Request(batch.number, positions, fresh, indices, stays_live, batch.forget, rebuild)

    def _rebuild(self, echoed: Sequence[int]) -> tuple[tuple[int, list[Any], list[int]], ...]:
        """The calls that must be repeated because an echo of this batch is held nowhere."""
        calls = []
        for position in echoed:
            call = self._calls.pop(position, None)
            if call is not None and self._whole_calls:
                others = [other for other, its_call in self._calls.items() if its_call == call]
                for other in others:
                    del self._calls[other]
                calls.append((call[0], self._call_items.pop(call[0]), [position, *others]))
        return tuple(calls)


class Step(NamedTuple):
    """One delivered batch where whole batches are reused.

    Attributes:
        position: Stream position of the batch.
        read: Whether it is read for this step: it is fresh, or live but held nowhere.
        fresh: Whether this is its first use.
        stays_live: Whether uses are left after this one.
        size: Examples in it, -1 if only reading it tells.
        forget: Positions that are no longer live.
    """

    position: int
    read: bool
    fresh: bool
    stays_live: bool
    size: int
    forget: tuple[int, ...]


class BatchRequests(_Planner):
    """The batch sampler where whole batches are reused.

    Args:
        plan: The plan over batches, at the batch to begin with.
        order: Yields the indices of each batch, where they are known.
    """

    def __init__(self, plan: EchoPlan, order: ItemOrder) -> None:
        super().__init__(plan, order)
        self.missing = list(self._calls)  # live, but held nowhere
        self._items = {position: self._items[position] for position in self._calls}
        self._steps: deque[Step] = deque()
        self._reads: deque[Request] = deque()

    def __iter__(self) -> BatchRequests:
        return self

    def __next__(self) -> Request:
        with self._lock:
            while not self._reads:
                self._plan_step()
            return self._reads.popleft()

    def step(self) -> Step:
        """The next batch to deliver."""
        with self._lock:
            if not self._steps:
                self._plan_step()
            return self._steps.popleft()

    def put_back(self, step: Step) -> None:
        """Takes a step back that could not be carried out yet."""
        with self._lock:
            self._steps.appendleft(step)

    def _plan_step(self) -> None:
        batch, items = self._next_batch()
        position, is_fresh, stays_live = batch.positions[0], bool(batch.fresh), bool(batch.stays_live[0])
        is_read = is_fresh or self._calls.pop(position, None) is not None
        if not is_fresh:
            items = [self._items[position] if stays_live else self._items.pop(position)]
        indices = items[0]
        size = len(indices) if indices is not None else -1
        if is_read and size >= 0:
            self._reads.append(Request(position, [position], size, indices, bytes(size)))
        self._steps.append(Step(position, is_read, is_fresh, stays_live, size, batch.forget))


def _oldest_call(plan: EchoPlan) -> int:
    return min((item.call[0] for item in plan.live()), default=plan.position)
