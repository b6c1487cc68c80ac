"""The contents of a checkpoint: `EchoState`, the state of an `EchoLoader`, with that of its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.journal import Written
from lightning_echo.pipeline.pipelines import Layout, Start
from lightning_echo.plan.memory import unpack_calls
from lightning_echo.plan.plan import Call, Reuse
from lightning_echo.schema import LEFT_OUT, ROW, EchoStateError, Least, LeftOut, plain, read, require

# ---------------------------------------------------------------------- pipeline state
# A checkpoint holds the plan of a pipeline and the order of its indices. For a stream, each worker has both in one. The classes
# are fields of `EchoState`, and ``schema.py`` reads them. The functions check the relations between fields.
#
# An item is an example, or a batch if whole batches are reused. A position counts the fresh items on one rank from the start of
# the run. Batches and passes are numbered from 0.

Size = Annotated[int, Least(1)]
FromMinusOne = Annotated[int, Least(-1)]
Integer = Annotated[int, Least(None)]


class FactorChange(NamedTuple):
    """A factor, and the number of the first batch to which it applies. In `StreamState.factors`: of the first request."""

    number: int
    factor: float


class LiveItem(NamedTuple):
    """An item with uses left.

    All fresh items of a batch are read in one call. ``call_first`` is the position of the first one in the call in which this
    item was fresh, ``call_size`` their number.
    """

    position: int
    left: Size
    used: Size
    call_first: int
    call_size: Size


@dataclass(frozen=True, kw_only=True)
class BufferState:
    """The live items of one worker, see ``plan/plan.py``.

    Attributes:
        live: The live items, in the order from which they are drawn.
        uses_left: Uses left of all live items together, so that a missing item is noticed.
        warming: Whether the buffer is being filled.
        owed: Uses that had no place in a batch and are given to later items. Below 0: items have got too many uses.
        staggered: Items that have been given uses since the buffer began to be filled.
        delivered: Items delivered since the error diffusion began again.
        fresh: Fresh items among those.
    """

    live: tuple[LiveItem, ...]
    uses_left: int
    warming: bool
    owed: Integer
    staggered: int
    delivered: int
    fresh: int


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """The items that one worker holds, see ``plan/memory.py``.

    ``delivered`` and ``fresh`` count since the error diffusion began again. ``calls`` are those in which the ``held`` items were
    read, compressed.
    """

    delivered: int
    fresh: int
    held: int
    calls: str

    @property
    def oldest(self) -> int:
        """Position of the oldest held item."""
        left = self.held
        for call in reversed(unpack_calls(self.calls)):
            if left <= call.size:
                return call.first + call.size - left
            left -= call.size
        raise ValueError(f"{self.held} items are held, and the calls have {self.held - left}")


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """Which item is used when, see ``plan/plan.py``. It has either buffers or memories, by the rule of reuse.

    ``number`` and ``position`` are those of the next batch and the next fresh item, ``pending`` the changes of the factor to
    come. There is one buffer or memory for each worker; a single one without workers, and if whole batches are reused.
    """

    number: int
    position: int
    factor: float
    pending: tuple[FactorChange, ...]
    buffers: tuple[BufferState, ...] | None = None
    memories: tuple[MemoryState, ...] | None = None


class Distance(NamedTuple):
    """From pass ``first`` on: how many positions of a lane two uses of an index are apart, see ``plan/order.py``."""

    first: int
    positions: int
    lanes: Annotated[int, Least(1)] = 1


class PassEnd(NamedTuple):
    """How many slots the passes before pass ``before`` had. The run had another number of ranks then."""

    before: int
    slots: Annotated[int, Least(1)]


class SamplerState(NamedTuple):
    """Number of a pass, and the state of the user's sampler (or of its generator) before that pass."""

    number: int
    state: Any


class PassStart(NamedTuple):
    """Number of a pass, and its first position."""

    number: int
    first: int


@dataclass(frozen=True, kw_only=True)
class OwnLoaderState:
    """The ``state_dict()`` of the user's loader before it reads the batch at ``position``."""

    position: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class OrderState:
    """Which index stands at which position. The kind of order decides which fields there are.

    Attributes:
        distances: For an order by index, see ``plan/order.py``.
        ends: For an order by index: where passes ended before the run continued with another number of ranks.
        sampler: For the order of a user's sampler: the passes whose order the sampler may have to give again.
        passes: For a loader without a length: the passes that may have to be read again. The last one is the present pass.
        loader: For a loader with a state of its own, if that state is needed to read the live batches again.
        phase: For a training that shares its reading: the number of batches of a pass that came before its first batch.
        share: The name under which the reading is shared. The order follows from it.
    """

    distances: tuple[Distance, ...] | None = None
    ends: tuple[PassEnd, ...] | None = None
    sampler: tuple[SamplerState, ...] | None = None
    passes: tuple[PassStart, ...] | None = None
    loader: OwnLoaderState | None = None
    phase: int | None = None
    share: str | None = None


class Pulled(NamedTuple):
    """A worker's pull of the ``wanted`` examples of one of its batches, from ``position`` on among all that it has pulled."""

    position: int
    wanted: int
    batch_number: int
    pass_number: int


@dataclass(frozen=True, kw_only=True)
class StreamWorkerState:
    """One worker that reads a stream, see ``pipeline/streams.py``.

    Attributes:
        plan: The worker's own plan; None on demand.
        ended: The last pass whose stream has ended in this worker; -1: none.
        stream: The stream's ``state_dict()`` before the oldest live example was pulled. On demand, memory is not rebuilt: before
            the first example that was not delivered.
        stream_pass: The pass to which `stream` belongs; -1: none has begun.
        pulled: The pulls since then, which must be repeated.
        number: On demand: number of the worker's next batch.
        in_pass: How many examples of its pass the worker has pulled; None if that is not known, and the run is not on demand.
    """

    plan: PlanState | None = None
    ended: FromMinusOne
    stream: Any
    stream_pass: FromMinusOne
    pulled: tuple[Pulled, ...]
    number: int | None = None
    in_pass: int | None = None


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """The place of a run over a stream, see ``pipeline/pipelines.py``. A list about workers is in their order.

    Attributes:
        request: Number of the next request to the workers.
        pass_: Number of the pass (in the file: ``pass``).
        begun: Whether the pass has had a batch.
        ended: Numbers of the workers whose stream has ended in this pass.
        batches: Number of batches that each worker has made.
        workers: State of each worker; None if it has not begun, or if its stream has no state.
        factors: Factors, each with the number of the first request to which it applies. The first factor applies now.
        pending: Changes of the factor that are still to come. Their numbers are those of batches of the run.
        on_demand: True if the run echoes on demand. `factors` and `pending` are then those of ``max_factor``.
    """

    request: int
    pass_: int
    begun: bool
    ended: tuple[int, ...]
    batches: tuple[int, ...]
    workers: tuple[StreamWorkerState | None, ...]
    factors: tuple[FactorChange, ...]
    pending: tuple[FactorChange, ...]
    on_demand: bool | None = None

    def plain_batches(self, batch_size: int, *, drop_last: bool) -> int | None:
        """Returns how many batches the plain loader makes of what the workers have pulled of their pass; None if not known."""
        batches = 0
        for worker in self.workers:
            if worker is None or worker.in_pass is None:
                return None
            batches += worker.in_pass // batch_size if drop_last else -(-worker.in_pass // batch_size)
        return batches or None


class Run(NamedTuple):
    """Neighbouring positions: the first one, and their number."""

    first: int
    size: Size


class Place(NamedTuple):
    """The place of one rank after ``number`` batches: what it had delivered, as in `DemandState`, and its `EchoCounts`."""

    number: int
    frontier: int
    ahead: tuple[Run, ...]
    fresh: int
    echoed: int

    @property
    def end(self) -> int:
        """The first position of which, and of all after it, none was delivered."""
        return sum(self.ahead[-1]) if self.ahead else self.frontier

    @property
    def delivered(self) -> int:
        """Number of positions that were delivered."""
        return self.frontier + sum(run.size for run in self.ahead)


class EarlierPlaces(NamedTuple):
    """The places of the ranks when the run went on with other ranks, and how they shared a pass."""

    replicas: Size
    pass_length: Size
    places: tuple[Place, ...]

    @property
    def passes(self) -> int:
        """The number of passes of which anything was delivered."""
        return -(-max(place.end for place in self.places) // self.pass_length)


@dataclass(frozen=True, kw_only=True)
class DemandState:
    """The place of a run that echoes on demand, see ``pipeline/demand.py``. What memory held is not saved.

    Attributes:
        number: Number of the next batch.
        frontier: All positions before this one were delivered, on the rank that saved the state.
        ahead: Those of the later positions that were delivered.
        max_factor: The bound in force; `pending` has its changes to come.
        ranks: The place of each rank, if there are several. A place of fewer than ``number`` batches is the last one that was
            known when the state was saved.
        earlier: What other ranks had delivered of passes that are not over, if the run had other ranks then.
    """

    number: int
    frontier: int
    ahead: tuple[Run, ...]
    max_factor: float
    pending: tuple[FactorChange, ...]
    ranks: tuple[Place, ...] | None = None
    earlier: tuple[EarlierPlaces, ...] | None = None

    @property
    def delivered(self) -> int:
        """Number of positions that were delivered."""
        return self.frontier + sum(run.size for run in self.ahead)

    @property
    def slowest(self) -> int:
        """The least frontier of any rank."""
        return self.frontier if self.ranks is None else min(place.frontier for place in self.ranks)

    def is_between_passes(self, pass_length: int) -> bool:
        """Returns whether a pass is about to begin, on all ranks."""
        places = self.ranks or (Place(self.number, self.frontier, self.ahead, 0, 0),)
        passes, offset = divmod(self.slowest, pass_length)
        is_even = not offset and all(place.delivered == place.end == self.slowest for place in places)
        return is_even and all(each.passes <= passes for each in self.earlier or ())


@dataclass(frozen=True, kw_only=True)
class PipelineState:
    """The state that a pipeline returns and continues from: the fields of these names in `EchoState`."""

    plan: PlanState | None
    order: OrderState | None
    stream: StreamState | None = None
    demand: DemandState | None = None


def check_order(order: OrderState, position: int, layout: Layout, by_index: bool) -> None:
    """Checks the order that belongs to a plan whose next fresh item is at ``position``."""
    if by_index and order.phase is not None:
        require(order.phase < layout.batches_per_pass, "order.phase", f"below {layout.batches_per_pass}", order.phase)
    elif by_index:
        require(bool(order.distances), "order.distances", "a list with an entry", order.distances)
    elif not layout.batches_per_pass:  # a pass ends when the loader's iteration ends
        passes = order.passes or ()
        require(bool(passes), "order.passes", "a list with an entry", order.passes)
        follows = all(one.number < other.number and one.first <= other.first for one, other in pairwise(passes))
        require(follows and passes[-1].first <= position, "order.passes", "passes in order, begun already", passes)


def check_stream(stream: StreamState, workers: int, layout: Layout, reuse: Reuse) -> None:
    """Checks the lists about workers, each worker's plan, and the factors."""
    for name in ("batches", "workers"):
        found = getattr(stream, name)
        require(len(found) == workers, f"stream.{name}", f"a list of {workers}", found)
    require(all(worker < workers for worker in stream.ended), "stream.ended", f"numbers below {workers}", stream.ended)
    for number, worker in enumerate(stream.workers):
        if worker is None:
            continue
        has_ended, of_pass = worker.ended >= stream.pass_, f"the workers that have ended pass {stream.pass_}"
        require(has_ended is (number in stream.ended), "stream.ended", of_pass, stream.ended)
        path, its = f"stream.workers[{number}].plan", worker.plan
        require((its is None) is bool(stream.on_demand), path, "None on demand, and only then", its)
        if its is None:
            made = stream.batches[number]
            require(worker.number == made, f"stream.workers[{number}].number", f"{made}, as in stream.batches", worker.number)
            require(worker.in_pass is not None, f"stream.workers[{number}].in_pass", "an integer", worker.in_pass)
            require(not worker.pulled, f"stream.workers[{number}].pulled", "empty on demand", worker.pulled)
        else:
            check_plan(its, path, its.number * layout.batch_size, 1, reuse)
            if worker.in_pass is not None:  # those that are dropped at the end of a pass have no position
                least, most = 0 if stream.pass_ else its.position, its.position + layout.batch_size - 1
                fits = least <= worker.in_pass <= most
                require(fits, f"stream.workers[{number}].in_pass", f"between {least} and {most}", worker.in_pass)
            _check_pulled(worker.pulled, its, f"stream.workers[{number}].pulled")
    since = stream.factors[0].number if stream.factors else None
    require(since == stream.request, "stream.factors", "a list that begins with the request", stream.factors)


def _check_pulled(pulled: Sequence[Pulled], plan: PlanState, path: str) -> None:
    """Checks that the pulls from a stream have no gap, and that all live examples are among them."""
    starts = [*[row.position for row in pulled[1:]], plan.position] if pulled else []
    follows = all(row.position <= start <= row.position + row.wanted for row, start in zip(pulled, starts, strict=True))
    live = [item.position for buffer in plan.buffers or () for item in buffer.live]
    live += [memory.oldest for memory in plan.memories or () if memory.held]
    holds = not live or (bool(pulled) and pulled[0].position <= min(live))
    require(follows and holds, path, "rows without a gap, from the oldest live example on", pulled)


def _check_memory(memory: MemoryState, path: str, position: int) -> None:
    """Checks the items that one worker holds. All must stand before ``position``."""
    try:
        calls = unpack_calls(memory.calls)
    except ValueError:
        calls = [Call(-1, 0)]
    ends = [call.first + call.size for call in calls]
    follows = all(call.size >= 1 and call.first >= end for call, end in zip(calls, [0, *ends], strict=False))
    require(
        follows and max(ends, default=0) <= position, f"{path}.calls", "calls in order, before the plan's position", memory.calls
    )
    newer = sum(call.size for call in calls[1:])
    fits = newer < memory.held <= newer + calls[0].size if calls else memory.held == 0
    require(fits, f"{path}.held", "the number of items of the calls, without some of the first", memory.held)


def check_plan(plan: PlanState, path: str, most: int, workers: int, reuse: Reuse) -> None:
    """Checks the fields of a plan for ``workers`` workers. Its batches cannot have held more than ``most`` fresh items."""
    held: dict[str, tuple[BufferState | MemoryState, ...] | None] = {"buffers": plan.buffers, "memories": plan.memories}
    needed = "buffers" if reuse is Reuse.each else "memories"
    for name, there in held.items():
        if name != needed:
            require(there is None, f"{path}.{name}", f"None with reuse={reuse}", there)
        else:
            fits = there is not None and len(there) == workers
            require(fits, f"{path}.{name}", f"a list of {workers} with reuse={reuse}", there)
    require(plan.position <= most, f"{path}.position", f"at most {most}, by its number of batches", plan.position)
    for number, memory in enumerate(plan.memories or ()):
        _check_memory(memory, f"{path}.memories[{number}]", plan.position)
    for number, buffer in enumerate(plan.buffers or ()):
        where, live, uses = f"{path}.buffers[{number}].live", buffer.live, buffer.uses_left
        require(uses == sum(item.left for item in live), where, f"items with uses_left={uses} in all", live)
        for item in live:
            in_call = item.call_first <= item.position < item.call_first + item.call_size
            fits, found = in_call and item.position < plan.position, (item.position, item.call_first, item.call_size)
            require(fits, where, "items of positions before that of the plan, each in its call", found)
        require(len({item.position for item in live}) == len(live), where, "items of different positions", live)


def check_demand(demand: DemandState, layout: Layout, *, by_batches: bool) -> None:
    """Checks which positions were delivered: in order, each once, and not more than the batches can have held."""
    require(not (by_batches and demand.ahead), "demand.ahead", "an empty list: batches come in their order", demand.ahead)
    most = demand.number * (1 if by_batches else layout.batch_size)
    _check_place("demand", Place(demand.number, demand.frontier, demand.ahead, 0, 0), most)
    require(demand.max_factor >= 1, "demand.max_factor", "a number >= 1", demand.max_factor)
    require(demand.ranks is None or len(demand.ranks) > 1, "demand.ranks", "a list of several, or left out", demand.ranks)
    for rank, place in enumerate(demand.ranks or ()):
        path = f"demand.ranks[{rank}]"
        require(place.number <= demand.number, f"{path} (number)", f"at most {demand.number}", place.number)
        _check_place(path, place, most)
    for number, earlier in enumerate(demand.earlier or ()):
        path = f"demand.earlier[{number}]"
        fits = len(earlier.places) == earlier.replicas
        require(fits, f"{path} (places)", f"a list of {earlier.replicas}", earlier.places)
        for rank, place in enumerate(earlier.places):
            _check_place(f"{path} (places)[{rank}]", place, None)


def _check_place(path: str, place: Place, most: int | None) -> None:
    ends = [place.frontier, *map(sum, place.ahead)]
    follows = all(run.first > end for run, end in zip(place.ahead, ends, strict=False))
    require(follows, f"{path}.ahead", "runs in order, after the frontier, and apart from each other", place.ahead)
    fits = most is None or place.delivered <= most
    require(fits, f"{path}.frontier", f"at most {most}, by its number of batches", place.delivered)


# ---------------------------------------------------------------------- state
# `EchoState.from_dict` checks a state as a whole, and `EchoState.to_dict` writes it in plain types. Only ``run.py`` makes and
# loads states. The classes here (plan, order, stream) and in ``pipeline/kinds.py`` are the only list of the fields, and
# ``schema.py`` reads that list.
#
# A checkpoint of a run with `EchoCallback` holds more: the counts of all ranks, the controller's state, reports and decisions.
# `EchoCallback.state_dict` lists them, and `EchoCallback.on_save_checkpoint` adds the logged metrics.

STATE_VERSION = 1


@dataclass(frozen=True)
class EchoCounts:
    """Examples delivered on this rank.

    Attributes:
        fresh: Number of fresh examples.
        echoed: Number of echoed examples.
        refetched: Number of examples that were read again after a resume, because they were live and no process held them. Each
            of them is an echoed example, or was read together with one.

    Example:
        >>> counts = EchoCounts(fresh=8, echoed=24)
        >>> counts.delivered, counts.factor
        (32, 4.0)
    """

    fresh: int = 0
    echoed: int = 0
    refetched: int = 0

    @property
    def delivered(self) -> int:
        """All examples delivered, fresh and echoed."""
        return self.fresh + self.echoed

    @property
    def factor(self) -> float:
        """Uses per fresh example so far; 1 before the first example."""
        return self.delivered / self.fresh if self.fresh else 1.0

    def __add__(self, other: EchoCounts) -> EchoCounts:
        return EchoCounts(self.fresh + other.fresh, self.echoed + other.echoed, self.refetched + other.refetched)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where the Trainer was when the state was saved. The fields are as in `TrainerPlace`."""

    in_epoch: int
    ended: int
    is_over: bool
    in_step: bool


class Conditions(NamedTuple):
    """Conditions that must be the same for a run to continue exactly.

    ``layout``: how a pass is cut into batches and divided among the ranks. ``buffer_size`` is that of a rank.
    """

    insertion_point: InsertionPoint
    layout: Layout
    workers: int
    buffer_size: int
    reuse: Reuse
    order_by: str | None = None

    def differences(self, now: Conditions) -> str:
        """Returns the changes, as a text for people. It is empty if nothing has changed."""
        before, after = (
            {**each._asdict(), "insertion_point": str(each.insertion_point), "reuse": str(each.reuse)} for each in (self, now)
        )
        first, then = before.pop("layout").state(), after.pop("layout").state()
        del before["order_by"]
        found = [f"{name}={before[name]!r} (now {after[name]!r})" for name in before if before[name] != after[name]]
        found += [f"{name}={first[name]} (now {then[name]})" for name in sorted(first) if first[name] != then[name]]
        return ", ".join(filter(None, (*found, self.other_order(now))))

    def other_order(self, now: Conditions) -> str:
        if None in (self.order_by, now.order_by) or self.order_by == now.order_by:
            return ""
        return f"an order by {self.order_by} (now by {now.order_by})"


@dataclass(frozen=True, kw_only=True)
class EchoState:
    """The state of an `EchoLoader` after some batch. It holds positions but never examples.

    It is the same on all ranks, except for `refetched` among the counts, and for a state of the user's own loader, sampler or
    stream. On demand, a saved state has the places of all ranks: whichever rank has saved it, each continues from its own. A
    field whose default is None is not in the file if it is None; ``reuse`` is not if it is ``each``, the paper's rule.

    Attributes:
        version: Version of this list of fields.
        insertion_point, layout, workers, buffer_size, reuse: See `Conditions`. The point is never ``auto``.
        order_by: The sampler that decides the order, in words; None if that is not known.
        seed: Seed in use; None before the first batch, if none was given.
        factor: The echo factor that was set last. It applies from batch `factor_since` on, and `factor_before` until then.
        constructed_factor: The factor with which the loader was made.
        largest_factor: The largest factor so far. It decides how far ahead batches may be planned.
        epoch_batches: Length of the present epoch in batches; -1 while that is not known, because a pass ends the epoch.
        in_epoch, delivered: Number of batches that were delivered in the present epoch, and in the whole run.
        begin_at: Position and batch number at which the run begins, if there is no plan.
        passes_over: Number of passes over the data that have ended.
        plan: Which item is used when. None before the first batch, at the start of a pass with nothing live, and for a stream.
        order: Which index stands at which position. It is there if there is a plan, and at the start of a pass whose length is
            not known.
        stream: For a stream, in place of plan and order.
        demand: For a run that echoes on demand, in place of the plan.
        journal: For a run that echoes on demand and is written down: the journal up to this state.
        epoch_goes_on: If several loaders make up an epoch: whether the epoch continues (None: not known). Otherwise left out.
        trainer: Where the Trainer was, if that is known.
        new_length: Length of a pass of the data set when the state was saved, if the data set had grown or shrunk since the
            present pass began.
        has_begun_pass: True if the present pass began in the present epoch, and only a limit of the Trainer ends an epoch.
        kept_steps: The number of steps that epochs over a stream keep: the plain loader's batches of a pass that has ended.
    """

    version: int = STATE_VERSION
    insertion_point: InsertionPoint
    layout: Layout
    workers: int
    buffer_size: Size
    reuse: Reuse
    order_by: str | None = None
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
    passes_over: int
    counts: Annotated[EchoCounts, ROW]
    plan: PlanState | None
    order: OrderState | None
    stream: StreamState | None = None
    demand: DemandState | None = None
    journal: Written | None = None
    epoch_goes_on: bool | LeftOut | None = LEFT_OUT
    trainer: TrainerState | None = None
    new_length: Size | None = None
    has_begun_pass: bool | None = None
    kept_steps: Size | None = None

    @classmethod
    def from_dict(cls, state: Any, *, by_index: bool) -> EchoState:
        """Reads a state from plain types, and checks all of it.

        ``by_index``: whether the loader that loads the state reads by index, and not batches or a stream, pass by pass. The
        `EchoStateError` names the field that is missing, superfluous or wrong.
        """
        if isinstance(state, dict) and "version" not in state and {"insertion_point", "layout"} & state.keys():
            raise EchoStateError(
                "the state is damaged: version is missing. Resume from another checkpoint, or restart without it"
            )
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
        state: dict[str, Any] = plain(self)
        return state

    @staticmethod
    def parts_of(pipeline: dict[str, Any]) -> PipelineState:
        """Reads the parts of a pipeline's state from the plain types in which it returns them, see `pipeline`."""
        return read(PipelineState, pipeline)

    def pipeline(self) -> dict[str, Any]:
        """Returns the state from which a pipeline continues, in plain types: the fields of `PipelineState`."""
        parts = PipelineState(plan=self.plan, order=self.order, stream=self.stream, demand=self.demand)
        state: dict[str, Any] = plain(parts)
        return state

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.insertion_point, self.layout, self.workers, self.buffer_size, self.reuse, self.order_by)

    @property
    def position(self) -> int:
        """Position of the next fresh item; on demand, of the first that was not delivered, on the slowest rank.

        It means nothing for a stream, whose workers count for themselves.
        """
        if self.demand is not None:
            return self.demand.slowest
        return self.begin_at.position if self.plan is None else self.plan.position

    def under(self, conditions: Conditions) -> EchoState:
        return replace(self, **conditions._asdict())

    def with_ranks(self, ranks: tuple[Place, ...]) -> EchoState:
        """Returns the same state, on demand with the places of all ranks."""
        return self if self.demand is None else replace(self, demand=replace(self.demand, ranks=ranks))

    @property
    def pending(self) -> tuple[FactorChange, ...] | None:
        """Changes of the factor that are still to come; None if no plan has begun."""
        planned = self.plan or self.stream or self.demand
        return None if planned is None else planned.pending

    def with_change(self, number: int, factor: float) -> EchoState:
        """Returns the same state, but another factor applies from batch ``number`` on."""
        if self.pending is None:
            return self
        pending = (*[change for change in self.pending if change.number < number], FactorChange(number, factor))
        if self.plan is not None:
            return replace(self, plan=replace(self.plan, pending=pending))
        if self.demand is not None:
            return replace(self, demand=replace(self.demand, pending=pending))
        assert self.stream is not None
        return replace(self, stream=replace(self.stream, pending=pending))


def is_state(state: Any) -> bool:
    """Returns whether this is a state of an `EchoLoader`. One that lacks a field is, too: it is refused where it is read."""
    return isinstance(state, dict) and len({"version", "insertion_point", "layout"} & state.keys()) >= 2


def _check(state: EchoState, *, by_index: bool) -> None:
    plan, order, stream, layout = state.plan, state.order, state.stream, state.layout
    for name in ("replicas", "batch_size", "last_batch_size"):
        require(getattr(layout, name) >= 1, f"layout.{name}", "an integer >= 1", getattr(layout, name))
    require(plan is None or order is not None, "order", "given together with a plan", order)
    require(stream is None or plan is None, "stream", "None together with a plan", stream)
    demand = state.demand
    begins = plan is None and stream is None and demand is None  # a pass begins, and nothing is live
    require(not begins or state.begin_at.number == state.delivered, "plan, or stream,", "there once batches were delivered", plan)
    by_batches = state.insertion_point.by_batches
    if plan is not None and order is not None:
        buffers = 1 if by_batches else max(state.workers, 1)
        require(plan.number == state.delivered, "delivered", f"{plan.number}, the number of the plan", state.delivered)
        check_plan(plan, "plan", plan.number * (1 if by_batches else layout.batch_size), buffers, state.reuse)
        check_order(order, plan.position, layout, by_index)
    elif demand is not None:
        require(plan is None and stream is None, "plan, or stream,", "None together with demand", plan or stream)
        require(demand.number == state.delivered, "delivered", f"{demand.number}, the number of demand", state.delivered)
        require(order is not None, "order", "given together with demand", order)
        assert order is not None
        check_demand(demand, layout, by_batches=by_batches)
        check_order(order, demand.frontier, layout, by_index)
        first, number = (order.sampler or ((0, None),))[0][0], demand.slowest // layout.items_per_pass(by_batches)
        require(first <= number, "order.sampler", f"a list from pass {number} on, or before", order.sampler)
    elif order is not None:  # a pass begins whose length is not known
        may_be = not by_index and not layout.batches_per_pass and order == OrderState(passes=order.passes)
        require(may_be, "order", "None without a plan", order)
        check_order(order, state.begin_at.position, layout, by_index)
    if stream is not None:
        check_stream(stream, max(state.workers, 1), layout, state.reuse)
