"""What a checkpoint holds of a pipeline: the plan and the order of the indices. For a stream, each worker has both in one.

The classes are fields of `EchoState` (``state.py``), and ``schema.py`` reads them. The functions check what must hold between
fields. Their arguments are what is known from elsewhere.

An item is an example, or a batch if whole batches are reused. A position counts the fresh items on one rank from the start of the
run. Batches and passes are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from lightning_echo.fetching.layout import Layout
from lightning_echo.loading.schema import Least, require
from lightning_echo.planning.buffer import Call
from lightning_echo.planning.memory_plan import unpack_calls
from lightning_echo.planning.shape import Reuse

__all__ = [
    "BufferState",
    "Distance",
    "FactorChange",
    "FromMinusOne",
    "Integer",
    "LiveItem",
    "MemoryState",
    "OrderState",
    "OwnLoaderState",
    "PassEnd",
    "PassStart",
    "PipelineState",
    "PlanState",
    "Pulled",
    "SamplerState",
    "Size",
    "StreamState",
    "StreamWorkerState",
    "check_order",
    "check_plan",
    "check_stream",
]

Size = Annotated[int, Least(1)]
FromMinusOne = Annotated[int, Least(-1)]
Integer = Annotated[int, Least(None)]


# --- the plan ---------------------------------------------------------------------------------------------------------


class FactorChange(NamedTuple):
    """A factor, and the number of the first batch to which it applies. In `StreamState.factors`: of the first request."""

    number: int
    factor: float


class LiveItem(NamedTuple):
    """An item with uses left.

    Attributes:
        position: Its position.
        left: Uses left.
        used: Uses so far.
        call_first: Position of the first fresh item of the batch in which this item was fresh. All fresh items of that batch were
            read in one call.
        call_size: Number of fresh items in that batch.
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
        live: The live items, in the order from which they are drawn.
        uses_left: Uses left of all live items together; None if an older version saved the state.
        warming: Whether the buffer is being filled.
        owed: Uses that had no place in a batch and are given to later items. Below 0: items have got too many uses.
        staggered: Items that have been given uses since the buffer began to be filled.
        delivered: Items delivered since the error diffusion began anew.
        fresh: Fresh items among those.
    """

    live: tuple[LiveItem, ...]
    uses_left: int | None = None
    warming: bool
    owed: Integer
    staggered: int
    delivered: int
    fresh: int


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """What one worker holds, see ``planning/memory_plan.py``.

    Attributes:
        delivered: Items delivered since the error diffusion began anew.
        fresh: Fresh items among those.
        held: Number of held items.
        calls: The calls in which they were read, compressed.
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
    """Which item is used when, see ``planning/plan.py``. It has either buffers or memories, by the rule of reuse.

    Attributes:
        number: Number of the next batch.
        position: Position of the next fresh item.
        factor: The echo factor that applies to the next batch.
        pending: Changes of the factor that are still to come.
        buffers: One for each worker. There is a single one without workers, and if whole batches are reused.
        memories: In place of buffers, if echoes are drawn from all that memory holds.
    """

    number: int
    position: int
    factor: float
    pending: tuple[FactorChange, ...]
    buffers: tuple[BufferState, ...] | None = None
    memories: tuple[MemoryState, ...] | None = None

    @property
    def oldest(self) -> int | None:
        """Position of the oldest live item; None if there is none."""
        live = [item.position for buffer in self.buffers or () for item in buffer.live]
        live += [memory.oldest for memory in self.memories or () if memory.held]
        return min(live, default=None)


# --- the order ---------------------------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """From pass ``first`` on: how many positions of a lane two uses of an index are apart, see ``planning/order.py``."""

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
    """The state of the user's loader.

    Attributes:
        position: Position of the batch that the loader reads next.
        state: What the loader's ``state_dict()`` returned.
    """

    position: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class OrderState:
    """Which index stands at which position. The kind of order decides which fields there are.

    Attributes:
        distances: For an order by index, see ``planning/order.py``.
        ends: For an order by index: where passes ended before the run went on with another number of ranks.
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


# --- a stream ---------------------------------------------------------------------------------------------------------


class Pulled(NamedTuple):
    """What a worker pulled from its stream for one batch.

    Attributes:
        position: Position of the first example, among those that this worker has pulled.
        wanted: Number of examples that the plan asked for.
        batch_number: Number of the batch in this worker.
        pass_number: Number of the pass.
    """

    position: int
    wanted: int
    batch_number: int
    pass_number: int


@dataclass(frozen=True, kw_only=True)
class StreamWorkerState:
    """One worker that reads a stream, see ``workers/streams.py``.

    Attributes:
        plan: The worker's own plan.
        ended: The last pass whose stream has ended in this worker; -1: none.
        stream: What the stream's ``state_dict()`` returned before the oldest live example was pulled.
        stream_pass: The pass to which `stream` belongs; -1: none has begun.
        pulled: What was pulled since then, and must be pulled again.
    """

    plan: PlanState
    ended: FromMinusOne
    stream: Any
    stream_pass: FromMinusOne
    pulled: tuple[Pulled, ...]


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Where a run over a stream stands, see ``fetching/stream_pipeline.py``. A list about workers is in their order.

    Attributes:
        request: Number of the next request to the workers.
        pass_: Number of the pass (in the file: ``pass``).
        begun: Whether the pass has had a batch.
        ended: Numbers of the workers whose stream has ended in this pass.
        batches: Number of batches that each worker has made.
        workers: State of each worker; None if it has not begun, or if its stream has no state.
        factors: Factors, each with the number of the first request to which it applies. The first factor applies now.
        pending: Changes of the factor that are still to come. Their numbers are those of batches of the run.
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
class PipelineState:
    """What a pipeline returns and continues from: the fields of these names in `EchoState`."""

    plan: PlanState | None
    order: OrderState | None
    stream: StreamState | None = None


# --- what must hold between fields ------------------------------------------------------------------------------------


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
        if worker is not None:
            path, its = f"stream.workers[{number}].plan", worker.plan
            check_plan(its, path, its.number * layout.batch_size, 1, reuse)
            _check_pulled(worker.pulled, its, f"stream.workers[{number}].pulled")
    since = stream.factors[0].number if stream.factors else None
    require(since == stream.request, "stream.factors", "a list that begins with the request", stream.factors)


def _check_pulled(pulled: Sequence[Pulled], plan: PlanState, path: str) -> None:
    """Checks that what was pulled from a stream has no gap, and that all live examples are among it."""
    starts = [*[row.position for row in pulled[1:]], plan.position] if pulled else []
    follows = all(row.position <= start <= row.position + row.wanted for row, start in zip(pulled, starts, strict=True))
    oldest = plan.oldest
    holds = oldest is None or (bool(pulled) and pulled[0].position <= oldest)
    require(follows and holds, path, "rows without a gap, from the oldest live example on", pulled)


def _check_workers(plan: PlanState, path: str, workers: int, reuse: Reuse) -> None:
    """Checks that a plan has one buffer or one memory for each worker, as its rule of reuse needs, and not both."""
    held: dict[str, tuple[BufferState | MemoryState, ...] | None] = {"buffers": plan.buffers, "memories": plan.memories}
    needed = "buffers" if reuse is Reuse.each else "memories"
    for name, there in held.items():
        if name != needed:
            require(there is None, f"{path}.{name}", f"None with reuse={reuse}", there)
        else:
            require(
                there is not None and len(there) == workers, f"{path}.{name}", f"a list of {workers} with reuse={reuse}", there
            )


def _check_memory(memory: MemoryState, path: str, position: int) -> None:
    """Checks what one worker holds. All of it must stand before ``position``."""
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
    _check_workers(plan, path, workers, reuse)
    require(plan.position <= most, f"{path}.position", f"at most {most}, by its number of batches", plan.position)
    for number, memory in enumerate(plan.memories or ()):
        _check_memory(memory, f"{path}.memories[{number}]", plan.position)
    for number, buffer in enumerate(plan.buffers or ()):
        where, live, uses = f"{path}.buffers[{number}].live", buffer.live, buffer.uses_left
        require(uses is None or uses == sum(item.left for item in live), where, f"items with uses_left={uses} in all", live)
        for item in live:
            in_call = item.call_first <= item.position < item.call_first + item.call_size
            fits, found = in_call and item.position < plan.position, (item.position, item.call_first, item.call_size)
            require(fits, where, "items of positions before that of the plan, each in its call", found)
        require(len({item.position for item in live}) == len(live), where, "items of different positions", live)
