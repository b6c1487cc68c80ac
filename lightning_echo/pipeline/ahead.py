"""What comes: each request to a worker also tells what that worker is going to read next, so that it can read ahead.

torch shows a worker one request at a time. `Foreseen` runs a copy of the plan some batches ahead, the *shadow plan*, and adds the
indices that it finds to the requests. The plan itself does not change: neither its batches nor its state. If the factor changes,
the shadow begins again from the plan, and the worker is told which indices are not coming any more. A wrong hint costs a read.

A user's own sampler is never asked for an entry earlier than without reads in flight: it may decide by what has happened until
then. Its requests are read as they come. Torch's samplers are looked at up to the end of the pass: the next pass begins with a
seed, or with a state that is saved. The package's own orders (``shuffle`` True or False) are looked at as far as needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from lightning_echo.pipeline.requests import BatchRequests, ExampleRequests
from lightning_echo.pipeline.worker import Request
from lightning_echo.plan.memory import plan_from_state
from lightning_echo.plan.order import entry_key
from lightning_echo.plan.plan import Plan

_MOST_BATCHES_AHEAD = 1024  # that the shadow plan has planned: with a large factor, few of them read anything


class AheadOrder:
    """An order whose coming items can be looked at, if it ``crosses`` also beyond the end of a pass of ``pass_length`` items."""

    def __init__(self, order: Any, pass_length: int, *, crosses: bool) -> None:
        self._order, self._pass_length, self._crosses = order, pass_length, crosses
        self._ahead: deque[Any] = deque()
        self.position: int = order.position
        self.exact = order.exact
        self.changes = 0  # of items that were looked at

    def take(self, count: int) -> list[Any]:
        taken = [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]
        if len(taken) < count:
            taken += self._order.take(count - len(taken))
        self.position += count
        return taken

    def reaches(self, position: int) -> bool:
        """Returns whether `at` may be asked for a position: not for the last one of a pass, if the next pass is not to begin."""
        if self._crosses:
            return True
        in_pass: int = self.position % self._pass_length  # 0: the next pass has not begun
        return in_pass > 0 and position < self.position - in_pass + self._pass_length - 1

    def at(self, position: int) -> Any:
        """Returns the item at a position from the present one on."""
        missing = position - self.position + 1 - len(self._ahead)
        if missing > 0:
            self._ahead.extend(self._order.take(missing))
        return self._ahead[position - self.position]

    def seek(self, position: int) -> None:
        self._ahead.clear()
        self._order.seek(position)
        self.position = position

    def begin_spreading(self) -> None:
        if self._ahead and self._crosses:  # what was looked at may be of a pass that is now spread
            self.seek(self.position)
            self.changes += 1
        self._order.begin_spreading()

    def state(self, position: int) -> dict[str, Any]:
        state: dict[str, Any] = self._order.state(position)
        return state

    def prune(self, position: int) -> None:
        self._order.prune(position)

    def load(self, state: dict[str, Any]) -> None:
        self._order.load(state)


class Foreseen(Iterator[Request]):
    """The same requests, each with the indices that its worker is going to read next.

    ``window``: the largest number of items that a worker is told ahead.
    """

    def __init__(self, requests: ExampleRequests | BatchRequests, order: AheadOrder, workers: int, window: int) -> None:
        self._requests, self._order, self._window = requests, order, window
        self._coming = [_Coming() for _ in range(max(workers, 1))]
        self._count = 0  # of requests. torch sends request ``k`` to worker ``k % workers``
        self._shadow: Plan | None = None
        self._shadow_count = 0  # of requests, after the shadow plan's last batch
        self._not_held: set[int] = set()  # positions that are live after a resume, and that the shadow plan has not read again
        self._changes = 0  # of the factor, when the shadow plan was made
        self._order_changes = 0

    def __next__(self) -> Request:
        requests = self._requests
        with requests.lock:
            if self._shadow is None or self._changes != requests.changes:
                self._begin_shadow()
        request = next(requests)
        if request.number < 0:
            return request
        coming = self._coming[self._count % len(self._coming)]
        self._count += 1
        self._look_ahead(coming)
        by_batches = isinstance(requests, BatchRequests)
        coming.take_next(dict(zip(request.positions, [request.indices] if by_batches else request.indices, strict=True)))
        self._look_ahead(coming)
        if self._order_changes != self._order.changes:
            self._order_changes = self._order.changes
            for each in self._coming:
                each.tell_again()
        ahead = self._to_tell(coming)
        return request._replace(ahead=ahead, drop=self._items_of(coming.dropped()))

    def _begin_shadow(self) -> None:
        requests = self._requests
        self._shadow, self._changes = plan_from_state(requests.plan.shape, requests.plan.state()), requests.changes
        self._not_held, self._shadow_count = set(requests.to_read_again), self._count
        for coming in self._coming:
            coming.begin_again()
        for request in requests.reads:
            self._foresee(list(request.positions))

    def _foresee(self, positions: list[int]) -> None:
        self._coming[self._shadow_count % len(self._coming)].add(positions)
        self._shadow_count += 1

    def _look_ahead(self, coming: _Coming) -> None:
        """Plans until a worker's window is full."""
        shadow, by_batches = self._shadow, isinstance(self._requests, BatchRequests)
        assert shadow is not None
        while not coming.has_next or (
            len(coming.positions) < self._window and self._shadow_count < self._count + _MOST_BATCHES_AHEAD
        ):
            batch = shadow.next_batch()
            again = [position for position in batch.positions[batch.fresh :] if position in self._not_held]
            self._not_held.difference_update(again, batch.forget)
            read = [*batch.positions[: batch.fresh], *again]
            if read or not by_batches:  # a batch that is only echoed is not requested
                self._foresee(read)
            elif shadow.number > self._requests.plan.number + _MOST_BATCHES_AHEAD:
                break

    def _to_tell(self, coming: _Coming) -> tuple[Any, ...]:
        """Returns the indices in a worker's window that it was not told yet."""
        order, untold = self._order, list[Any]()
        for position in list(islice(coming.positions, coming.told, self._window)):
            if position >= order.position and not order.reaches(position):
                break
            item = self._item_at(position)
            if not coming.tell(position, item):
                untold.append(item)
        return self._items_of(untold)

    def _item_at(self, position: int) -> Any:
        if position >= self._order.position:
            return self._order.at(position)
        requests = self._requests
        if position in requests.items:
            return requests.items[position]
        return next(request.indices for request in requests.reads if position in request.positions)

    def _items_of(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(items)) if isinstance(self._requests, BatchRequests) else tuple(items)


class _Coming:
    """The positions that one worker is going to read, in their order, without those that were requested."""

    def __init__(self) -> None:
        self.positions: deque[int] = deque()
        self.told = 0  # the worker knows so many of the first ones
        self.items: dict[int, Any] = {}  # of the positions that the worker knows
        self._sizes: deque[int] = deque()  # how many positions each of the coming requests has
        self._known_before: dict[int, Any] = {}  # items that the worker was told before the shadow plan began again
        self._lost: list[Any] = []  # items that it knows, and that are not coming any more

    @property
    def has_next(self) -> bool:
        return bool(self._sizes)

    def begin_again(self) -> None:
        self.positions.clear()
        self._sizes.clear()
        self.tell_again()

    def tell_again(self) -> None:
        """Forgets what was told, but not what the worker knows."""
        self._known_before.update(self.items)
        self.items.clear()
        self.told = 0

    def add(self, positions: list[int]) -> None:
        self.positions.extend(positions)
        self._sizes.append(len(positions))

    def take_next(self, requested: dict[int, Any]) -> None:
        """Takes out the positions of the next request. ``requested`` has its items."""
        for _ in range(size := self._sizes.popleft()):
            position = self.positions.popleft()
            known = self._known_before if position in self._known_before else self.items
            if position in known:
                self._keep_if_lost(known.pop(position), requested[position])
        self.told = max(self.told - size, 0)

    def tell(self, position: int, item: Any) -> bool:
        """Notes that the worker knows the item at the next position. Returns whether it knew it before."""
        self.told += 1
        self.items[position] = item
        if position not in self._known_before:
            return False
        return self._keep_if_lost(self._known_before.pop(position), item)

    def _keep_if_lost(self, known: Any, coming: Any) -> bool:
        """Notes what the worker knows if another item is coming at that position. Returns whether it is the same."""
        is_same = known is coming or bool(entry_key(known) == entry_key(coming))
        if not is_same:
            self._lost.append(known)
        return is_same

    def dropped(self) -> list[Any]:
        """Returns the items that the worker knows and that are not coming any more."""
        dropped = [*self._lost, *self._known_before.values()]
        self._lost.clear()
        self._known_before.clear()
        return dropped
