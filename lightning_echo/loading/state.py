"""What is in a checkpoint: `EchoState`, the state of an `EchoLoader`, with the parts that it consists of.

`EchoState.from_dict` checks a state as a whole, `EchoState.to_dict` writes it in plain types. Only ``echo_run.py`` makes a state
and takes one; everyone else receives the object. The classes here are the only list of the fields (``schema.py`` reads them).
A position counts fresh items (examples, or batches where whole batches are reused) on one rank from the start of the run; batches
and passes are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from lightning_echo.fetching.layout import Layout, Start
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.counts import EchoCounts
from lightning_echo.loading.schema import LEFT_OUT, ROW, EchoStateError, Least, LeftOut, plain, read, require

__all__ = [
    "STATE_VERSION",
    "BufferState",
    "Conditions",
    "EchoState",
    "EchoStateError",
    "FactorChange",
    "OrderState",
    "PlanState",
    "StreamState",
    "TrainerState",
    "is_state",
]

STATE_VERSION = 1

Size = Annotated[int, Least(1)]
FromMinusOne = Annotated[int, Least(-1)]
Integer = Annotated[int, Least(None)]


# --- parts ------------------------------------------------------------------------------------------------------------


class FactorChange(NamedTuple):
    """A factor, and the number from which on it counts: of a batch, or of a request to the workers of a stream."""

    number: int
    factor: float


class LiveItem(NamedTuple):
    """An item with uses left.

    Attributes:
        position: Its position.
        left: Uses left.
        used: Uses so far.
        call_first: Position of the first fresh item of its batch: what was read in one call.
        call_size: Fresh items of that batch.
    """

    position: int
    left: Size
    used: Size
    call_first: int
    call_size: Size


@dataclass(frozen=True, kw_only=True)
class BufferState:
    """The live items of one worker, see ``planning/buffer.py``.

    Attributes:
        live: The live items, in the order in which they are drawn from.
        uses_left: Uses left of all of them together; None: saved by an older version.
        warming: Whether the buffer is being filled.
        owed: Uses that found no place, due to later items; below 0: given too many.
        staggered: Items that this warm-up has given uses to.
        delivered: Items delivered since the share of fresh ones was last set level.
        fresh: Fresh items since then.
    """

    live: tuple[LiveItem, ...]
    uses_left: int | None = None
    warming: bool
    owed: Integer
    staggered: int
    delivered: int
    fresh: int


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """Which item is used when, see ``planning/plan.py``.

    Attributes:
        number: Number of the next batch.
        position: Position of the next fresh item.
        factor: The echo factor in force.
        pending: Changes of the factor that are to come, by the number of a batch.
        buffers: One for each worker; a single one without workers and where whole batches are reused.
    """

    number: int
    position: int
    factor: float
    pending: tuple[FactorChange, ...]
    buffers: tuple[BufferState, ...]


class Distance(NamedTuple):
    """From which pass on uses of an index are kept apart by how many slots, over all ranks."""

    first: int
    slots: int


class SamplerState(NamedTuple):
    """Number of a pass, and the state of the user's sampler (or of its generator) before it."""

    number: int
    state: Any


class PassStart(NamedTuple):
    """Number of a pass, and its first position."""

    number: int
    first: int


@dataclass(frozen=True, kw_only=True)
class OwnLoaderState:
    """The state of the user's loader.

    Attributes:
        position: The batch that it reads next.
        state: What its ``state_dict()`` returned.
    """

    position: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class OrderState:
    """Which index stands at which position. Which fields there are depends on the order.

    Attributes:
        distances: Of an order by index, see ``planning/order.py``.
        sampler: Of the order of a user's sampler: the passes that may have to be asked for again.
        passes: Of a loader without a length: the passes that may have to be read again, the last one under way.
        loader: Of a loader that saves its own state, where one is needed to read what is live.
    """

    distances: tuple[Distance, ...] | None = None
    sampler: tuple[SamplerState, ...] | None = None
    passes: tuple[PassStart, ...] | None = None
    loader: OwnLoaderState | None = None


class Pulled(NamedTuple):
    """What a worker pulled from its stream for one batch.

    Attributes:
        position: Of the first example, among those that this worker has pulled.
        wanted: Examples asked for.
        batch: Number of the batch in the worker.
        number: Number of the pass.
    """

    position: int
    wanted: int
    batch: int
    number: int


@dataclass(frozen=True, kw_only=True)
class StreamWorkerState:
    """One worker that reads a stream, see ``workers/streams.py``.

    Attributes:
        plan: Its own plan.
        ended: The last pass whose stream has ended here; -1: none.
        stream: What the stream's ``state_dict()`` returned before the oldest live example.
        stream_pass: The pass that this is of; -1: none has begun.
        pulled: What was pulled since, to be pulled again.
    """

    plan: PlanState
    ended: FromMinusOne
    stream: Any
    stream_pass: FromMinusOne
    pulled: tuple[Pulled, ...]


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Where a run over a stream stands, see ``fetching/stream_pipeline.py``. Entries of workers are in their order.

    Attributes:
        request: Number of the next request to the workers.
        pass_: Number of the pass (in the file ``pass``).
        begun: Whether the pass has had a batch.
        ended: Workers whose stream has ended in this pass.
        batches: Batches that each worker has made.
        workers: Their states; None of one that has not begun, or whose stream has no state.
        factors: Factors by the number of a request; the first one is in force.
        pending: Changes of the factor that are to come, by the number of a batch of the run.
    """

    request: int
    pass_: int
    begun: bool
    ended: tuple[int, ...]
    batches: tuple[int, ...]
    workers: tuple[StreamWorkerState | None, ...]
    factors: tuple[FactorChange, ...]
    pending: tuple[FactorChange, ...]


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where the Trainer stood, see `TrainerPlace`.

    Attributes:
        in_epoch: Batches of its epoch that it had taken.
        ended: Epochs that it had ended.
        is_over: Whether it had ended the epoch that it began last.
        in_step: Whether it had not counted the batch that it took last.
    """

    in_epoch: int
    ended: int
    is_over: bool
    in_step: bool


class Conditions(NamedTuple):
    """What must be the same for a run to go on exactly: fields of `EchoState`."""

    insertion_point: InsertionPoint
    layout: Layout
    workers: int
    buffer_size: int

    def differences(self, now: Conditions) -> str:
        """What is another one now, for people; empty if nothing is."""
        before, after = ({**each._asdict(), "insertion_point": each.insertion_point.value} for each in (self, now))
        first, then = before.pop("layout").state(), after.pop("layout").state()
        found = [f"{name}={before[name]!r} (now {after[name]!r})" for name in before if before[name] != after[name]]
        found += [f"{name}={first[name]} (now {then[name]})" for name in sorted(first) if first[name] != then[name]]
        return ", ".join(found)


# --- the whole --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EchoState:
    """The state of an `EchoLoader` after some batch: positions but never examples, the same on all ranks.

    Attributes:
        version: Of this list of fields.
        insertion_point: Where the run echoes; never ``auto``.
        layout: How a pass is cut into batches and dealt out to the ranks.
        workers: Worker processes of the loader.
        buffer_size: Most live items on a rank.
        seed: In use; None before the first batch of a run that was given none.
        factor: The echo factor last set.
        constructed_factor: The one that the loader was made with.
        largest_factor: The largest one so far: how far ahead batches may be planned depends on it.
        factor_before: The factor in force until `factor` counts.
        factor_since: Number of the first batch that `factor` counts for.
        epoch: Number of the epoch.
        epoch_batches: Its batches; -1: it is under way and ends with a pass whose length is not known.
        in_epoch: Its batches that were delivered.
        delivered: Batches delivered in the whole run.
        begin_at: Position and batch number at which the run begins where there is no plan.
        passes_over: Passes over the data that have ended. Older versions did not save it.
        counts: Examples delivered on this rank: fresh, echoed, refetched.
        plan: Which item is used when; None before the first batch, where a pass begins with nothing live, and over a stream.
        order: Which index stands at which position; there where a plan is, and where a pass begins that has no known length.
        stream: Over a stream, what plan and order are elsewhere; None, and not in the file, where there is none.
        epoch_goes_on: Of one of several loaders in an epoch: whether that goes on (None: not known). Else left out.
        trainer: Where the Trainer stood; None, and not in the file, where nobody said it.
    """

    version: int = STATE_VERSION
    insertion_point: InsertionPoint
    layout: Layout
    workers: int
    buffer_size: Size
    seed: Integer | None
    factor: float
    constructed_factor: float
    largest_factor: float
    factor_before: float
    factor_since: int
    epoch: int
    epoch_batches: FromMinusOne
    in_epoch: int
    delivered: int
    begin_at: Start
    passes_over: int = 0
    counts: Annotated[EchoCounts, ROW]
    plan: PlanState | None
    order: OrderState | None
    stream: StreamState | None = None
    epoch_goes_on: bool | LeftOut | None = LEFT_OUT
    trainer: TrainerState | None = None

    @classmethod
    def from_dict(cls, state: Any, *, by_index: bool) -> EchoState:
        """Checks a state that was read from a file, all of it.

        Args:
            state: What `to_dict` has returned, in this version or an earlier one.
            by_index: Whether the loader that loads it reads by index; else it reads batches, or a stream, pass after pass.

        Raises:
            EchoStateError: It is no state of an `EchoLoader`, one of a later version, or one that is damaged; the message names
                the field that is missing, superfluous or wrong.
        """
        if not isinstance(state, dict) or "version" not in state:
            raise EchoStateError(
                f"state must be what EchoLoader.state_dict() returned, got {type(state).__name__}: {state!r:.100}"
            )
        version = state["version"]
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise EchoStateError(f"the state is damaged: version must be an integer >= 1, got {version!r:.80}")
        if version > STATE_VERSION:
            raise EchoStateError(
                f"the state has version {version}, this lightning_echo knows up to {STATE_VERSION}: upgrade lightning_echo"
            )
        found = read(cls, state)
        _check(found, by_index=by_index)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types: what a checkpoint holds."""
        state: dict[str, Any] = plain(self)
        return state

    @staticmethod
    def parts_of(pipeline: dict[str, Any]) -> tuple[PlanState | None, OrderState | None, StreamState | None]:
        """Plan, order and stream, from what a pipeline says in plain types: see `pipeline`."""
        parts = read(_PipelineState, pipeline)
        return parts.plan, parts.order, parts.stream

    def pipeline(self) -> dict[str, Any]:
        """What a pipeline goes on from, in plain types: ``plan`` and ``order``, and ``stream`` where there is one."""
        state: dict[str, Any] = plain(_PipelineState(plan=self.plan, order=self.order, stream=self.stream))
        return state

    @property
    def conditions(self) -> Conditions:
        """What must be the same for a run to go on exactly."""
        return Conditions(self.insertion_point, self.layout, self.workers, self.buffer_size)

    @property
    def position(self) -> int:
        """Position of the next fresh item; not over a stream, whose workers count for themselves."""
        return self.begin_at.position if self.plan is None else self.plan.position

    def under(self, conditions: Conditions) -> EchoState:
        """The same, under other conditions."""
        return replace(self, **conditions._asdict())

    @property
    def pending(self) -> tuple[FactorChange, ...] | None:
        """Changes of the factor that are to come; None: no plan has begun."""
        planned = self.plan or self.stream
        return None if planned is None else planned.pending

    def with_change(self, number: int, factor: float) -> EchoState:
        """The same, where another factor counts from batch ``number`` on."""
        if self.pending is None:
            return self
        pending = (*[change for change in self.pending if change.number < number], FactorChange(number, factor))
        if self.plan is not None:
            return replace(self, plan=replace(self.plan, pending=pending))
        assert self.stream is not None
        return replace(self, stream=replace(self.stream, pending=pending))


@dataclass(frozen=True, kw_only=True)
class _PipelineState:
    """The fields of `EchoState` that a pipeline says."""

    plan: PlanState | None
    order: OrderState | None
    stream: StreamState | None = None


def is_state(state: Any) -> bool:
    """Whether something is a state of an `EchoLoader`, of whatever version, and not of another stateful loader."""
    return isinstance(state, dict) and {"version", "insertion_point", "layout"} <= state.keys()


# --- what the fields say of each other --------------------------------------------------------------------------------


def _check(state: EchoState, *, by_index: bool) -> None:
    plan, order, stream, layout = state.plan, state.order, state.stream, state.layout
    for name in ("replicas", "batch_size", "last_batch_size"):
        require(getattr(layout, name) >= 1, f"layout.{name}", "an integer >= 1", getattr(layout, name))
    require(plan is None or order is not None, "order", "there exactly where there is a plan", order)
    require(stream is None or plan is None, "stream", "None beside a plan", stream)
    begins = plan is None and stream is None  # nothing is live
    require(not begins or state.begin_at.number == state.delivered, "plan, or stream,", "there once batches were delivered", plan)
    by_batches = state.insertion_point.by_batches
    if plan is not None and order is not None:
        buffers = 1 if by_batches else max(state.workers, 1)
        require(len(plan.buffers) == buffers, "plan.buffers", f"a list of {buffers}", plan.buffers)
        _check_plan(plan, "plan", plan.number * (1 if by_batches else layout.batch_size))
        _check_order(order, plan.position, layout, by_index)
    elif order is not None:  # a pass is to begin that has no known length
        may_be = not by_index and not layout.batches_per_pass and order == OrderState(passes=order.passes)
        require(may_be, "order", "None without a plan", order)
        _check_order(order, state.begin_at.position, layout, by_index)
    if stream is not None:
        _check_stream(stream, max(state.workers, 1), layout)


def _check_order(order: OrderState, position: int, layout: Layout, by_index: bool) -> None:
    """What the order of a plan must have whose next fresh item is at a position."""
    if by_index:
        require(bool(order.distances), "order.distances", "a list with an entry", order.distances)
    elif not layout.batches_per_pass:  # a pass ends where the loader's iteration does
        passes = order.passes or ()
        require(bool(passes), "order.passes", "a list with an entry", order.passes)
        follows = all(one.number < other.number and one.first <= other.first for one, other in pairwise(passes))
        require(follows and passes[-1].first <= position, "order.passes", "passes in order, begun already", passes)


def _check_stream(stream: StreamState, workers: int, layout: Layout) -> None:
    """What is said of each worker, and of the factor in force."""
    for name in ("batches", "workers"):
        found = getattr(stream, name)
        require(len(found) == workers, f"stream.{name}", f"a list of {workers}", found)
    require(all(worker < workers for worker in stream.ended), "stream.ended", f"numbers below {workers}", stream.ended)
    for number, worker in enumerate(stream.workers):
        if worker is not None:
            path, its = f"stream.workers[{number}].plan", worker.plan
            require(len(its.buffers) == 1, f"{path}.buffers", "a list of 1", its.buffers)
            _check_plan(its, path, its.number * layout.batch_size)
            _check_pulled(worker.pulled, its, f"stream.workers[{number}].pulled")
    since = stream.factors[0].number if stream.factors else None
    require(since == stream.request, "stream.factors", "a list that begins with the request", stream.factors)


def _check_pulled(pulled: Sequence[Pulled], plan: PlanState, path: str) -> None:
    """What was pulled from a stream is to be pulled again without a gap, and all that is live is among it."""
    starts = [*[row.position for row in pulled[1:]], plan.position] if pulled else []
    follows = all(row.position <= start <= row.position + row.wanted for row, start in zip(pulled, starts, strict=True))
    live = [item.position for buffer in plan.buffers for item in buffer.live]
    holds = not live or (bool(pulled) and pulled[0].position <= min(live))
    require(follows and holds, path, "rows without a gap, from the oldest live example on", pulled)


def _check_plan(plan: PlanState, path: str, most: int) -> None:
    """What the fields of a plan say of each other; ``most`` fresh items can have been delivered in its batches."""
    require(plan.position <= most, f"{path}.position", f"at most {most}, by its number of batches", plan.position)
    for number, buffer in enumerate(plan.buffers):
        where, live, uses = f"{path}.buffers[{number}].live", buffer.live, buffer.uses_left
        require(uses is None or uses == sum(item.left for item in live), where, f"items with uses_left={uses} in all", live)
        for item in live:
            in_call = item.call_first <= item.position < item.call_first + item.call_size
            fits, found = in_call and item.position < plan.position, (item.position, item.call_first, item.call_size)
            require(fits, where, "items of positions before that of the plan, each in its call", found)
        require(len({item.position for item in live}) == len(live), where, "items of different positions", live)
