"""Plan and order together: the requests to the workers, batch by batch, and the state of the run at any delivered batch."""

from __future__ import annotations

import copy
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress, cycle, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo.cache.exchange import Rounds
from lightning_echo.data.objects import is_stateful
from lightning_echo.data.randomness import OwnRandomStates, preserved_random_states, seed_all
from lightning_echo.pipeline.worker import NOT_PLANNED, RepeatedCall, Request, add_note
from lightning_echo.plan.memory import plan_from_state
from lightning_echo.plan.order import Order, entry_key, spread
from lightning_echo.plan.plan import Plan, PlannedBatch, mix

# ---------------------------------------------------------------------- sampler order
# The sampler is iterated pass by pass, and never further than needed.

_DECIDING = ("num_replicas", "seed", "shuffle", "drop_last", "replacement")  # attributes of samplers

# These are known to draw from their generator alone.
_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def draws_by_itself(sampler: Any) -> bool:
    """Returns whether a sampler that has a generator is known not to draw from the global random states: one of torch's own.

    Another sampler may draw only a part of its numbers from its ``generator`` (torchgeo's ``RandomGeoSampler``).
    """
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) in _OF_TORCH


def origin_of(sampler: Any) -> str:
    """Returns, as text, what the order of a sampler depends on, as far as can be seen. It must be the same on all ranks."""
    inner = _deciding(sampler)
    generator = getattr(inner, "generator", None)
    if type(inner) is DistributedSampler:
        return f"DistributedSampler with seed {inner.seed}, shuffle={inner.shuffle}, drop_last={inner.drop_last}"
    if not isinstance(generator, torch.Generator):
        return type(inner).__name__
    return f"{type(inner).__name__} with random states {zlib.crc32(generator.get_state().numpy().tobytes()):08x}"


def sampler_in_words(sampler: Any) -> str:
    """Returns the class of a sampler or batch sampler, and its attributes that decide the order of a pass, the same on all ranks.

    Attributes that may change from pass to pass without harm are left out, such as weights.

    >>> sampler_in_words(RandomSampler(range(4), replacement=True)), sampler_in_words(SubsetRandomSampler([0, 2]))
    ('RandomSampler(replacement=True)', 'SubsetRandomSampler(indices: ae9e4c28)')
    """
    inner = _deciding(sampler)
    if inner is not sampler:
        return f"{type(sampler).__name__} of {sampler_in_words(inner)}"
    found = {name: vars(inner)[name] for name in _DECIDING if hasattr(inner, "__dict__") and name in vars(inner)}
    told = [f"{name}={value}" for name, value in found.items() if isinstance(value, bool | int)]
    if type(inner) is SubsetRandomSampler:
        told = [f"indices: {zlib.crc32(np.asarray(inner.indices).astype(np.int64).tobytes()):08x}"]
    return f"{type(inner).__name__}({', '.join(told)})"


def tell_pass(number: int, *samplers: Any) -> None:
    """Calls ``set_epoch`` with the number of a pass, once for each sampler that has it, as Lightning does with the epoch."""
    for sampler in {id(each): each for each in samplers}.values():
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(number)


class OtherLength(RuntimeError):
    """A pass begins that is longer or shorter than the pass before, because the length of a sampler follows ``set_epoch``."""


def check_length(found: int, expected: int, number: int) -> None:
    """Raises `OtherLength` if a pass does not have the expected length. The length is asked after ``set_epoch``."""
    if found != expected:
        raise OtherLength(
            f"pass {number} has {found} indices or batches, and {expected} were expected: the length of the sampler, loader or "
            "data set changes each time it is asked for. Let it follow set_epoch alone"
        )


class SamplerOrder(Order):
    """The order of a user's sampler or batch sampler.

    A pass begins by ``iter(sampler)``, when its first item is needed. Before that, the sampler gets the number of the pass
    (``set_epoch``), and its state is saved: by ``state_dict``, or that of its torch ``generator``. From this state a resumed run
    begins the same pass again.

    If a sampler of torch's has no generator, it gets one, seeded from the seed and the pass. Any other sampler may draw from the
    global random states. It runs under random states of its own, seeded in the same way, and must not run in a thread while the
    training runs. ``preserves``: whether each call restores the random states of the training. It must be False in a thread next
    to the training, and may be False if the caller restores them.
    """

    def __init__(self, sampler: Any, *args: int, seed: int, preserves: bool = False, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self._sampler, self._preserves = sampler, preserves
        self._inner = inner = _deciding(sampler)  # has the state and the generator
        self._is_stateful = is_stateful(inner)
        generator = getattr(inner, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._seed = seed
        is_torchs = draws_by_itself(sampler)
        self._lends_generator = is_torchs and hasattr(inner, "generator") and self._generator is None
        if self._lends_generator:  # a copy of the sampler gets it; the user's own sampler stays as it is
            self._inner = copy.copy(inner)
            self._inner.generator = self._generator = torch.Generator()
            self._sampler = self._inner
            if inner is not sampler:
                self._sampler = copy.copy(sampler)
                self._sampler.sampler = self._inner
        self._own_states = None if is_torchs else OwnRandomStates()
        hears_of_passes = hasattr(sampler, "set_epoch") or hasattr(self._inner, "set_epoch")
        self.exact = is_torchs or self._is_stateful or self._generator is not None or hears_of_passes
        # The sampler's state before each pass. It is replaced and never edited: `state` may be asked for during `take`.
        self._states: dict[int, Any] = {}
        self._entries: Iterator[Any] = iter(())  # the sampler's items in this pass
        self._dealt: Iterator[Any] = iter(())  # the slots of this pass, over all ranks
        self._tail: deque[Any] = deque(maxlen=0)  # the last slots of this pass, which the next pass keeps away from

    def take(self, count: int) -> list[Any]:
        if not count:
            return []
        with self._own_states or (preserved_random_states() if self._preserves else nullcontext()):
            return super().take(count)

    def seek(self, position: int) -> None:
        with self._own_states or preserved_random_states():  # no thread has begun yet
            number, offset = divmod(position, self.pass_length)
            first = min(self._first_needed(number), min(self._states, default=number))
            self._entries = self._dealt = iter(())
            self._tail = deque(maxlen=0)
            for current in range(first, number + 1):
                self._drain()
                state = self._states.get(current)  # of the sampler before this pass, if that was saved
                if state is not None and self._is_stateful:
                    self._inner.load_state_dict(state)
                elif state is not None and self._generator is not None:
                    self._generator.set_state(state)
                self.position = current * self.pass_length
                self._pass = self._begin(current)
            super().take(offset)

    def state(self, position: int) -> dict[str, Any]:
        return {**super().state(position), "sampler": [[number, state] for number, state in self._needed_from(position).items()]}

    def prune(self, position: int) -> None:
        self._states = self._needed_from(position)

    def _needed_from(self, position: int) -> dict[int, Any]:
        states = self._states
        # At the end of a pass, the next one may not have begun. A resumed run then goes through this pass to find its state.
        needed = min(self._first_needed(position // self.pass_length), max(states, default=0))
        return {number: state for number, state in states.items() if number >= needed}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._states = {int(number): value for number, value in state.get("sampler", [])}

    def _first_needed(self, number: int) -> int:
        """Returns the first pass that a resumed run must go through again, to get pass ``number`` with the same rearrangement."""
        while self._distance(number):
            number -= 1
            if not self._reaches_tail(number):
                break
        return number

    def _drain(self) -> None:
        deque(self._dealt, maxlen=0)  # the slots of other ranks: all ranks must see the same end of the pass
        deque(islice(self._entries, self.length), maxlen=0)  # the dropped tail, which the plain loader draws, too

    def _begin(self, number: int) -> Iterator[Any]:
        self._drain()
        tell_pass(number, self._sampler, self._inner)
        check_length(len(self._sampler), self.length, number)
        if self._own_states is not None:
            seed_all(mix(self._seed, number))
        if self._is_stateful:
            self._states = {**self._states, number: self._inner.state_dict()}
        elif self._generator is not None and self._lends_generator:
            self._generator.manual_seed(mix(self._seed, number))
        elif self._generator is not None:
            self._states = {**self._states, number: self._generator.get_state()}
        entries: Iterator[Any] = iter(self._sampler)
        own_start: list[Any] | None = None
        if (distance := self._distance(number)) and self._tail:
            seen = {entry_key(index): len(self._tail) - i for i, index in enumerate(self._tail)}
            places, looked_at = spread(islice(entries, self.length), seen, distance)
            entries = chain([looked_at[place] for place in places], entries)
            own_start = None if self._reaches_tail(number) else looked_at
        self._entries, self._dealt = entries, self._deal(number, entries, own_start)
        return islice(self._dealt, self.rank, None, self.replicas)

    def _deal(self, number: int, entries: Iterator[Any], own_start: list[Any] | None) -> Iterator[Any]:
        """Yields the slots of a pass for all ranks. Its tail is dropped, or missing slots are filled from its start.

        ``own_start`` has the first items as the sampler yields them; None: missing slots are filled with the rearranged
        ``entries``.
        """
        end, tail = self._end(number), deque[Any](maxlen=max(self._spreading.distance, self._distance(number + 1)))
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


def _deciding(sampler: Any) -> Any:
    """Returns the sampler that decides the order. For a batch sampler, it is the sampler inside it."""
    return sampler.sampler if hasattr(sampler, "batch_size") and hasattr(sampler, "sampler") else sampler


# ---------------------------------------------------------------------- requests
# `ExampleRequests` is the batch sampler of the rebuilt ``DataLoader`` if examples are echoed. It makes one `Request` for each
# batch. `BatchRequests` is the batch sampler if whole batches are echoed. It makes one `Request` for each batch that is *read*,
# and a `Step` for each batch that is *delivered*. Neither of them ever waits, because ``DataLoader`` asks for several
# batches before it returns the first one. If the order of the user raises an error while a later batch is planned, the error
# waits: that batch becomes `NOT_PLANNED`, and the error is raised in its place.
#
# The plan is ahead of the delivered batches. It is never undone. Instead, a snapshot of it is taken every few batches. The state
# at a delivered batch is computed from the last snapshot before it, by planning forward. This is arithmetic only.

_SNAPSHOT_BATCHES = 64


class ItemOrder(Protocol):
    """The item at each position of the fresh stream.

    An item is an index (`Order`), the indices of a batch (`BatchedOrder`), or None if a loader is only read (`PassReader`).
    ``exact``: whether a resumed run gets the same order.
    """

    exact: bool

    def take(self, count: int) -> list[Any]:
        """Returns the items of the next ``count`` positions."""

    def seek(self, position: int) -> None:
        """Goes to a position."""

    def state(self, position: int) -> dict[str, Any]:
        """Returns the state for resuming at ``position``, also while another thread is in `take`. It changes nothing."""

    def prune(self, position: int) -> None:
        """Forgets the parts that only positions before ``position`` need."""


class BatchedOrder:
    """An order of indices, cut into the batches of the plain loader. Positions count batches, passes those of this rank."""

    def __init__(self, order: Order, batch_size: int, last_batch_size: int, batches_per_pass: int) -> None:
        self._order, self._batches_per_pass = order, batches_per_pass
        self._batch_size, self._last_batch_size = batch_size, last_batch_size
        self.position = 0
        self.exact = order.exact

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
        number, offset = divmod(position, self._batches_per_pass)
        return number * self._order.pass_length + offset * self._batch_size


class _PlannedRequests(Iterator[Request]):
    """Plan, order and snapshots of both kinds of requests.

    One thread makes requests, and the thread of the training asks for states and sets factors. ``lock`` is for what both use. It
    is never held while the user's sampler runs, which may take long.
    """

    def __init__(self, plan: Plan, order: ItemOrder, begin_spreading: Callable[[], None] | None = None) -> None:
        self.plan, self.order = plan, order
        self.delivered = plan.number  # the training loop has got at least this number of batches; the pipeline sets it
        self.failure: Exception | None = None  # because of which no further batch can be planned
        self.lock = threading.RLock()
        self.changes = 0  # of the factor, so far
        self.reads: deque[Request] = deque()  # planned, and not yet sent to the workers
        self._begin_spreading = begin_spreading  # called once, when echoing begins
        self._batches_per_snapshot = max(_SNAPSHOT_BATCHES, 4 * plan.shape.buffer_size // plan.shape.batch_size)
        self._snapshots: deque[dict[str, Any]] = deque([plan.state()])
        # In a resumed run, live items are not held yet. These are their positions, each with the call in which it was read. Since
        # no worker holds anything, it does not matter that torch begins with worker 0, whichever buffer the next batch is from.
        self.to_read_again = {item.position: item.call for item in plan.live()}
        oldest = min((first for first, _ in self.to_read_again.values()), default=plan.position)
        order.seek(oldest)
        self.items: dict[int, Any] = dict(enumerate(order.take(plan.position - oldest), oldest))  # by position
        # (Number of a batch, position of the next fresh item before it), of those that are planned and of which one may ask.
        self._positions: deque[tuple[int, int]] = deque()

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` on."""
        with self.lock:
            self.changes += 1
            self.plan.change_factor(number, factor)
            for snapshot in self._snapshots:
                snapshot["pending"] = [change for change in snapshot["pending"] if change[0] < number]
                if snapshot["number"] <= number:
                    snapshot["pending"].append([number, factor])

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the states of plan and order after ``delivered`` batches, in plain types. They are the same on all ranks.

        ``delivered`` is at least ``self.delivered - 1``, since earlier snapshots are gone.
        """
        with self.lock:
            snapshot = next(state for state in reversed(self._snapshots) if state["number"] <= delivered)
            plan = plan_from_state(self.plan.shape, snapshot)
            while plan.number < delivered:
                plan.next_batch()
            return {"plan": plan.state(), "order": self.order.state(plan.oldest_call)}

    def position(self, delivered: int) -> int:
        """Returns the position of the plan in the `state` after ``delivered`` batches, without making one."""
        with self.lock:
            if delivered == self.plan.number:
                return self.plan.position
            return next(position for number, position in self._positions if number == delivered)

    def _next_batch(self) -> tuple[PlannedBatch, list[Any]]:
        """Returns the next batch of the plan, and the items of its fresh positions."""
        if self.failure is not None:
            raise self.failure
        with self.lock:
            batch = self._plan_next()
        try:
            fresh = self.order.take(batch.fresh) if batch.fresh else []
        except Exception as error:  # the user's sampler may raise anything
            self.failure = with_place(error)
            raise
        if fresh and 1 in batch.stays_live:
            self.items.update(compress(zip(batch.positions, fresh, strict=False), batch.stays_live))
        for position in batch.forget:
            del self.items[position]
            self.to_read_again.pop(position, None)
        return batch, fresh

    def _plan_next(self) -> PlannedBatch:
        plan = self.plan
        if plan.number % self._batches_per_snapshot == 0:
            snapshots = self._snapshots
            if snapshots[-1]["number"] != plan.number:
                snapshots.append(plan.state())
            while len(snapshots) > 1 and snapshots[1]["number"] < self.delivered:  # `state` may be asked for one batch before
                snapshots.popleft()
            self.order.prune(plan_from_state(plan.shape, snapshots[0]).oldest_call)
        positions = self._positions
        while positions and positions[0][0] < self.delivered - 1:  # as of snapshots
            positions.popleft()
        positions.append((plan.number, plan.position))
        batch = plan.next_batch()
        if plan.factor > 1 and self._begin_spreading is not None:
            self._begin_spreading()
            self._begin_spreading = None  # passes stay spread: from here on, a pass may begin within a batch
        return batch


class ExampleRequests(_PlannedRequests):
    """The batch sampler where examples are echoed."""

    def __init__(self, plan: Plan, order: Order, *, whole_calls: bool) -> None:
        super().__init__(plan, order, order.begin_spreading)
        self._whole_calls = whole_calls  # whether the data set reads whole batches, so that only a whole call can be repeated
        self._items_of_call: dict[int, list[Any]] = {}  # the items of each call to repeat, by the position of its first item
        if whole_calls:
            for first, count in set(self.to_read_again.values()):
                self._items_of_call[first] = [self.items[position] for position in range(first, first + count)]
        self.items = {position: self.items[position] for position in self.to_read_again}

    def __next__(self) -> Request:
        try:
            batch, indices = self._next_batch()
        except Exception as error:
            if self.failure is None:
                raise
            let_go_of_frames(error)
            return NOT_PLANNED
        items, fresh, positions, stays_live = self.items, batch.fresh, batch.positions, batch.stays_live
        if fresh == len(positions):
            return Request(batch.number, positions, fresh, indices, stays_live, batch.forget)
        echoed = positions[fresh:]
        for position, stays in zip(echoed, stays_live[fresh:], strict=True):
            indices.append(items[position] if stays else items.pop(position))
        rebuild: tuple[RepeatedCall, ...] = ()  # the calls of echoed examples that are not held, see `Request`
        not_held = self.to_read_again
        for position in echoed if not_held else ():
            call = not_held.pop(position, None)
            if call is not None and self._whole_calls:
                others = [other for other, its_call in not_held.items() if its_call == call]
                for other in others:
                    del not_held[other]
                rebuild += (RepeatedCall(call.first, self._items_of_call.pop(call.first), [position, *others]),)
        return Request(batch.number, positions, fresh, indices, stays_live, batch.forget, rebuild)


class Step(NamedTuple):
    """One delivered batch, if whole batches are echoed."""

    position: int  # stream position of the batch
    is_read: bool  # whether the batch is read for this step, because it is fresh, or live but not held
    is_fresh: bool  # whether this is the first use of the batch
    stays_live: bool  # whether the batch is still live after this step
    size: int  # number of examples in the batch; -1 if it is not known before the batch is read
    forget: tuple[int, ...]  # positions that are no longer live
    indices: list[Any] | None = None  # of the batch; None if they are not known


class BatchRequests(_PlannedRequests):
    """The batch sampler where whole batches are echoed, in the order of the batches."""

    def __init__(self, plan: Plan, order: ItemOrder) -> None:
        super().__init__(plan, order)
        self.not_held = list(self.to_read_again)  # positions that are live, but not held, when the run begins
        self.items = {position: self.items[position] for position in self.to_read_again}
        self._steps: deque[Step] = deque()  # planned, and not yet delivered

    def __next__(self) -> Request:
        try:
            while not self.reads:
                self._plan_step()
        except Exception as error:
            if self.failure is None:
                raise
            let_go_of_frames(error)
            return NOT_PLANNED  # whoever asks for the `step` gets the error
        return self.reads.popleft()

    def step(self) -> Step:
        if not self._steps:
            self._plan_step()
        return self._steps.popleft()

    def put_back(self, step: Step) -> None:
        self._steps.appendleft(step)

    def _plan_step(self) -> None:
        batch, items = self._next_batch()
        position, is_fresh, stays_live = batch.positions[0], bool(batch.fresh), bool(batch.stays_live[0])
        is_read = is_fresh or self.to_read_again.pop(position, None) is not None
        if not is_fresh:
            items = [self.items[position] if stays_live else self.items.pop(position)]
        indices = items[0]
        size = len(indices) if indices is not None else -1
        if is_read and size >= 0:  # the worker sees a batch of fresh examples of which none is used again; number: for its seed
            self.reads.append(Request(position, [position], size, indices, bytes(size)))
        self._steps.append(Step(position, is_read, is_fresh, stays_live, size, batch.forget, indices))


def with_place(error: Exception) -> Exception:
    """Returns an error of the user's order, which says where it was raised: it is raised again elsewhere."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    add_note(error, f"(raised in {at.name}, {at.filename}:{at.lineno})")
    return error


def let_go_of_frames(error: BaseException | None) -> None:
    """Removes the tracebacks of an error that is raised later: they hold the iterator of the epoch that has planned ahead."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


# ---------------------------------------------------------------------- rounds
# If the nodes exchange examples, the leader of a node must know which examples the other ranks read for each request. The plan is
# the same on all ranks, and counts positions. So the leader takes the slots of *all* ranks at each of its positions, keeps its
# own, and gives all of them to the exchange.


class AllRanksOrder(Order):
    """The order of one rank, taken together with those of the others. Its entries and states are those of that rank's own order.

    ``whole`` is the order of all slots, as if there were one rank, with passes spread for all ranks. If the sampler divides its
    indices among the ranks, it is a list with the order of each rank. ``taken`` has the slots of all ranks, slot after slot, for
    each call of `take`; the caller removes them.
    """

    def __init__(self, whole: Order | Sequence[Order], replicas: int, rank: int) -> None:
        self._orders = [whole] if isinstance(whole, Order) else whole
        self._own = self._orders[rank % len(self._orders)]
        self._scale = replicas // len(self._orders)  # positions of `_own` for each position of the rank
        super().__init__(self._own.length, self._own.pass_length // self._scale, replicas, rank)
        self.exact = self._own.exact
        self.taken: deque[list[Any]] = deque()

    def begin_spreading(self) -> None:
        for order in self._orders:
            order.begin_spreading()

    def take(self, count: int) -> list[Any]:
        columns = [order.take(count * self._scale) for order in self._orders]
        self.position += count
        rows = columns[0] if len(columns) == 1 else list(chain.from_iterable(zip(*columns, strict=True)))
        self.taken.append(rows)
        return rows[self.rank :: self.replicas]

    def seek(self, position: int) -> None:
        self.position = position
        for order in self._orders:
            order.seek(position * self._scale)

    def state(self, position: int) -> dict[str, Any]:
        return self._own.state(position * self._scale)

    def prune(self, position: int) -> None:
        for order in self._orders:
            order.prune(position * self._scale)

    def load(self, state: dict[str, Any]) -> None:
        for order in self._orders:
            order.load(state)


def samplers_of_ranks(sampler: DistributedSampler[Any]) -> list[Sampler[Any]]:
    """Returns a sampler for each rank, made from the ``DistributedSampler`` of one rank. The indices of a pass are made once."""
    whole = copy.copy(sampler)
    ranks, whole.num_replicas, whole.rank, whole.num_samples = sampler.num_replicas, 1, 0, sampler.total_size

    @lru_cache(maxsize=1)
    def indices_of(number: int) -> list[Any]:
        whole.set_epoch(number)
        return list(whole)

    return [_OfRank(indices_of, rank, ranks, sampler.num_samples) for rank in range(ranks)]


@dataclass(eq=False)
class _OfRank(Sampler[Any]):
    indices_of: Callable[[int], list[Any]]  # the indices of a pass, for all ranks
    rank: int
    ranks: int
    length: int
    number: int = 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices_of(self.number)[self.rank :: self.ranks])

    def __len__(self) -> int:
        return self.length


class RequestsInRounds(Iterator[Request]):
    """The batch sampler, if nodes exchange examples: the same requests, each with the number of its round.

    Examples that are read again after a resume are not exchanged: their round has no needs. ``order`` is None except on the
    leader of a node.
    """

    def __init__(self, requests: ExampleRequests | BatchRequests, rounds: Rounds, order: AllRanksOrder | None) -> None:
        self._requests, self._rounds, self._order = requests, rounds, order
        self._count = 0
        self._first_position = requests.plan.position
        if order is not None:
            order.taken.clear()  # those that were live before

    def __next__(self) -> Request:
        request = next(self._requests)
        if self._order is not None and self._rounds.exchange is not None:
            by_batches = isinstance(self._requests, BatchRequests)
            reads_fresh = request.number >= self._first_position if by_batches else bool(request.fresh)
            self._rounds.exchange.ask(self._order.taken.popleft() if reads_fresh else [])
        self._count += 1
        return request._replace(round=self._count - 1)
