"""Plan and order together: the requests to the workers, batch by batch, and the state of the run at any delivered batch.

`ExampleRequests` is the batch sampler of the rebuilt ``DataLoader`` if examples are echoed. It makes one `Request` for each
batch. `BatchRequests` is the batch sampler if whole batches are echoed. It makes one `Request` for each batch that is *read*, and
beside that a `Step` for each batch that is *delivered*. Neither of them ever waits, because ``DataLoader`` asks for several
batches before it returns the first one. If the order of the user raises an error while a later batch is planned, the error waits:
that batch becomes `NOT_PLANNED`, and the error is raised in its place.

The plan is ahead of the delivered batches. It is never undone. Instead, a snapshot of it is taken every few batches. The state at
a delivered batch is computed from the last snapshot before it, by planning forward. This is arithmetic only.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple, Protocol

from lightning_echo.planning.order import Order
from lightning_echo.planning.plan import Plan, PlannedBatch
from lightning_echo.planning.plans import plan_from_state
from lightning_echo.workers.dataset import NOT_PLANNED, RepeatedCall, Request
from lightning_echo.workers.errors import add_note

__all__ = ["BatchRequests", "BatchedOrder", "ExampleRequests", "ItemOrder", "Step"]

_SNAPSHOT_BATCHES = 64


class ItemOrder(Protocol):
    """The item at each position of the fresh stream.

    An item is an index (`Order`), the indices of a batch (`BatchedOrder`), or None if a loader is only read (`PassReader`).
    """

    @property
    def exact(self) -> bool:
        """Whether a resumed run gets the same order."""

    def take(self, count: int) -> list[Any]:
        """Returns the items of the next ``count`` positions."""

    def seek(self, position: int) -> None:
        """Goes to a position."""

    def state(self, position: int) -> dict[str, Any]:
        """Returns what a resumed run needs from ``position`` on."""

    def load(self, state: dict[str, Any]) -> None:
        """Loads a `state`. The next call must be `seek`."""

    def prune(self, position: int) -> None:
        """Forgets what only positions before ``position`` need."""


class BatchedOrder:
    """An order of indices, cut into the batches of the plain loader. Its positions count batches.

    Args:
        order: The order of the indices.
        batch_size: Number of indices in a full batch.
        last_batch_size: Number of indices in the last batch of a pass.
        batches_per_pass: Number of batches in a pass on this rank.
    """

    def __init__(self, order: Order, batch_size: int, last_batch_size: int, batches_per_pass: int) -> None:
        self._order, self._batches_per_pass = order, batches_per_pass
        self._batch_size, self._last_batch_size = batch_size, last_batch_size
        self.position = 0

    @property
    def exact(self) -> bool:
        return self._order.exact

    def take(self, count: int) -> list[list[Any]]:
        batches = []
        for _ in range(count):
            self.position += 1
            ends_pass = self.position % self._batches_per_pass == 0
            batches.append(self._order.take(self._last_batch_size if ends_pass else self._batch_size))
        return batches

    def seek(self, position: int) -> None:
        self.position = position
        self._order.seek(self._first_index(position))

    def state(self, position: int) -> dict[str, Any]:
        return self._order.state(self._first_index(position))

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)

    def prune(self, position: int) -> None:
        self._order.prune(self._first_index(position))

    def _first_index(self, position: int) -> int:
        """Returns the position of a batch's first index in the order of the indices."""
        number, offset = divmod(position, self._batches_per_pass)
        return number * self._order.pass_length + offset * self._batch_size


class _PlannedRequests:
    """What both kinds of requests have in common: plan, order and snapshots, and a lock for the two threads that call them.

    Attributes:
        plan: The plan.
        order: The order.
        delivered: The training loop has got at least this number of batches. The pipeline sets it.
        failure: The error because of which no further batch can be planned; None if there is none.
    """

    def __init__(self, plan: Plan, order: ItemOrder, begin_spreading: Callable[[], None] | None = None) -> None:
        self.plan, self.order = plan, order
        self.delivered = plan.number
        self.failure: Exception | None = None
        self._lock = threading.RLock()
        self._begin_spreading = begin_spreading  # called once, when echoing begins
        self._batches_per_snapshot = max(_SNAPSHOT_BATCHES, 4 * plan.shape.buffer_size // plan.shape.batch_size)
        self._snapshots: deque[dict[str, Any]] = deque([plan.state()])
        # In a resumed run, live items are not held yet. These are their positions, each with the call in which it was read.
        self._to_read_again = {item.position: item.call for item in plan.live()}
        oldest = min((first for first, _ in self._to_read_again.values()), default=plan.position)
        order.seek(oldest)
        self._items: dict[int, Any] = dict(enumerate(order.take(plan.position - oldest), oldest))  # by position

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` on."""
        with self._lock:
            self.plan.change_factor(number, factor)
            for snapshot in self._snapshots:
                snapshot["pending"] = [change for change in snapshot["pending"] if change[0] < number]
                if snapshot["number"] <= number:
                    snapshot["pending"].append([number, factor])

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the states of plan and order after ``delivered`` batches, in plain types. They are the same on all ranks.

        Args:
            delivered: Number of batches of the run. It must be at least the attribute `delivered` less one, since earlier
                snapshots are gone.
        """
        with self._lock:
            snapshot = next(state for state in reversed(self._snapshots) if state["number"] <= delivered)
            plan = plan_from_state(self.plan.shape, snapshot)
            while plan.number < delivered:
                plan.next_batch()
            return {"plan": plan.state(), "order": self.order.state(plan.oldest_call)}

    def _next_batch(self) -> tuple[PlannedBatch, list[Any]]:
        """Returns the next batch of the plan, and the items of its fresh positions."""
        if self.failure is not None:
            raise self.failure
        plan = self.plan
        if plan.number % self._batches_per_snapshot == 0:
            self._take_snapshot()
        batch = plan.next_batch()
        if plan.factor > 1 and self._begin_spreading is not None:
            self._begin_spreading()
            self._begin_spreading = None  # passes stay spread: from here on, a pass may begin within a batch
        try:
            fresh = self.order.take(batch.fresh) if batch.fresh else []
        except Exception as error:  # the user's sampler may raise anything
            self.failure = error
            at = traceback.extract_tb(error.__traceback__)[-1]
            add_note(error, f"(raised in {at.name}, {at.filename}:{at.lineno})")
            raise
        if fresh and 1 in batch.stays_live:
            self._items.update(compress(zip(batch.positions, fresh, strict=False), batch.stays_live))
        for position in batch.forget:
            self._forget(position)
        return batch, fresh

    def _forget(self, position: int) -> None:
        del self._items[position]
        self._to_read_again.pop(position, None)

    def _take_snapshot(self) -> None:
        snapshots = self._snapshots
        if snapshots[-1]["number"] != self.plan.number:
            snapshots.append(self.plan.state())
        while len(snapshots) > 1 and snapshots[1]["number"] < self.delivered:  # `state` may be asked for one batch before
            snapshots.popleft()
        self.order.prune(plan_from_state(self.plan.shape, snapshots[0]).oldest_call)


class ExampleRequests(_PlannedRequests):
    """The batch sampler where examples are echoed.

    Args:
        plan: The plan, at the batch to begin with.
        order: The order of the indices.
        whole_calls: Whether the data set reads whole batches, so that only a whole call can be repeated.
    """

    def __init__(self, plan: Plan, order: Order, *, whole_calls: bool) -> None:
        super().__init__(plan, order, order.begin_spreading)
        self._whole_calls = whole_calls
        self._items_of_call: dict[int, list[Any]] = {}  # the items of each call to repeat, by the position of its first item
        if whole_calls:
            for first, count in set(self._to_read_again.values()):
                self._items_of_call[first] = [self._items[position] for position in range(first, first + count)]
        self._items = {position: self._items[position] for position in self._to_read_again}

    def __iter__(self) -> ExampleRequests:
        return self

    def __next__(self) -> Request:
        with self._lock:
            try:
                batch, indices = self._next_batch()
            except Exception as error:
                if self.failure is None:
                    raise
                _let_go_of_frames(error)
                return NOT_PLANNED
            items, fresh, positions, stays_live = self._items, batch.fresh, batch.positions, batch.stays_live
            if fresh == len(positions):
                return Request(batch.number, positions, fresh, indices, stays_live, batch.forget)
            echoed = positions[fresh:]
            for position, stays in zip(echoed, stays_live[fresh:], strict=True):
                indices.append(items[position] if stays else items.pop(position))
            rebuild = self._rebuild(echoed) if self._to_read_again else ()
            return Request(batch.number, positions, fresh, indices, stays_live, batch.forget, rebuild)

    def _rebuild(self, echoed: Sequence[int]) -> tuple[RepeatedCall, ...]:
        """Returns the calls to repeat, because an echoed example of this batch is not held. See `Request`."""
        calls = []
        for position in echoed:
            call = self._to_read_again.pop(position, None)
            if call is not None and self._whole_calls:
                others = [other for other, its_call in self._to_read_again.items() if its_call == call]
                for other in others:
                    del self._to_read_again[other]
                calls.append(RepeatedCall(call.first, self._items_of_call.pop(call.first), [position, *others]))
        return tuple(calls)


class Step(NamedTuple):
    """One delivered batch, if whole batches are echoed.

    Attributes:
        position: Stream position of the batch.
        is_read: Whether the batch is read for this step, because it is fresh, or live but not held.
        is_fresh: Whether this is the first use of the batch.
        stays_live: Whether the batch is still live after this step.
        size: Number of examples in the batch; -1 if it is not known before the batch is read.
        forget: Positions that are no longer live.
    """

    position: int
    is_read: bool
    is_fresh: bool
    stays_live: bool
    size: int
    forget: tuple[int, ...]


class BatchRequests(_PlannedRequests):
    """The batch sampler where whole batches are echoed.

    Args:
        plan: The plan over batches, at the batch to begin with.
        order: The order of the batches: for each batch its indices, or None if they are not known.

    Attributes:
        not_held: Positions that are live, but not held, when the run begins. They are read again.
    """

    def __init__(self, plan: Plan, order: ItemOrder) -> None:
        super().__init__(plan, order)
        self.not_held = list(self._to_read_again)
        self._items = {position: self._items[position] for position in self._to_read_again}
        self._steps: deque[Step] = deque()  # planned, and not yet delivered
        self._reads: deque[Request] = deque()  # planned, and not yet sent to the workers

    def __iter__(self) -> BatchRequests:
        return self

    def __next__(self) -> Request:
        with self._lock:
            try:
                while not self._reads:
                    self._plan_step()
            except Exception as error:
                if self.failure is None:
                    raise
                _let_go_of_frames(error)
                return NOT_PLANNED  # whoever asks for the `step` gets the error
            return self._reads.popleft()

    def step(self) -> Step:
        """Returns the next batch to deliver."""
        with self._lock:
            if not self._steps:
                self._plan_step()
            return self._steps.popleft()

    def put_back(self, step: Step) -> None:
        """Takes back a step that could not be carried out yet."""
        with self._lock:
            self._steps.appendleft(step)

    def _plan_step(self) -> None:
        batch, items = self._next_batch()
        position, is_fresh, stays_live = batch.positions[0], bool(batch.fresh), bool(batch.stays_live[0])
        is_read = is_fresh or self._to_read_again.pop(position, None) is not None
        if not is_fresh:
            items = [self._items[position] if stays_live else self._items.pop(position)]
        indices = items[0]
        size = len(indices) if indices is not None else -1
        if is_read and size >= 0:  # the worker sees a batch of fresh examples of which none is used again; number: for its seed
            self._reads.append(Request(position, [position], size, indices, bytes(size)))
        self._steps.append(Step(position, is_read, is_fresh, stays_live, size, batch.forget))


def _let_go_of_frames(error: BaseException | None) -> None:
    """Removes the tracebacks of an error that is raised later: they hold the iterator of the epoch that has planned ahead."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
