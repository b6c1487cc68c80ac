"""What is in a checkpoint: `EchoState`, the state of an `EchoLoader`.

`EchoState.from_dict` checks a state as a whole, and `EchoState.to_dict` writes it in plain types. Only ``echo_run.py`` makes and
loads states. All other code receives the object. The classes here, in ``pipeline_state.py`` (plan, order, stream) and in
``fetching/layout.py`` are the only list of the fields, and ``schema.py`` reads that list.

A checkpoint of a run with `EchoCallback` holds more beside it: the counts of all ranks, the controller's state, reports and
decisions. `EchoCallback.state_dict` lists them, and `EchoCallback.on_save_checkpoint` adds the logged metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from lightning_echo.fetching.layout import Layout, Start
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.pipeline_state import (
    FactorChange,
    FromMinusOne,
    Integer,
    OrderState,
    PipelineState,
    PlanState,
    Size,
    StreamState,
    check_order,
    check_plan,
    check_stream,
)
from lightning_echo.loading.schema import LEFT_OUT, ROW, EchoStateError, LeftOut, plain, read, require
from lightning_echo.planning.shape import Reuse

__all__ = [
    "STATE_VERSION",
    "Conditions",
    "EchoCounts",
    "EchoState",
    "EchoStateError",
    "TrainerState",
    "is_state",
]

STATE_VERSION = 1


# --- parts ------------------------------------------------------------------------------------------------------------


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
    """Where the Trainer was when the state was saved, see `TrainerPlace`.

    Attributes:
        in_epoch: Number of batches that it had taken in its epoch.
        ended: Number of epochs that it had ended.
        is_over: Whether it had ended the epoch that it began last.
        in_step: Whether it had taken a batch that it had not yet counted as completed.
    """

    in_epoch: int
    ended: int
    is_over: bool
    in_step: bool


class Conditions(NamedTuple):
    """What must be the same for a run to continue exactly. `EchoState` explains the fields."""

    insertion_point: InsertionPoint
    layout: Layout
    workers: int
    buffer_size: int
    reuse: Reuse
    order_by: str | None = None

    def differences(self, now: Conditions) -> str:
        """Returns what has changed, as a text for people. It is empty if nothing has changed."""
        before, after = (
            {**each._asdict(), "insertion_point": str(each.insertion_point), "reuse": str(each.reuse)} for each in (self, now)
        )
        first, then = before.pop("layout").state(), after.pop("layout").state()
        del before["order_by"]
        found = [f"{name}={before[name]!r} (now {after[name]!r})" for name in before if before[name] != after[name]]
        found += [f"{name}={first[name]} (now {then[name]})" for name in sorted(first) if first[name] != then[name]]
        return ", ".join(filter(None, (*found, self.other_order(now))))

    def other_order(self, now: Conditions) -> str:
        """Returns what has changed of the order, as a text for people. It is empty if that is the same, or not known."""
        if None in (self.order_by, now.order_by) or self.order_by == now.order_by:
            return ""
        return f"an order by {self.order_by} (now by {now.order_by})"


# --- the whole --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EchoState:
    """The state of an `EchoLoader` after some batch. It holds positions but never examples.

    It is the same on all ranks, except for `refetched` among the counts, and for a state of the user's own loader, sampler or
    stream.

    Attributes:
        version: Version of this list of fields.
        insertion_point: Where the run echoes; never ``auto``.
        layout: How a pass is cut into batches and divided among the ranks.
        workers: Number of worker processes.
        buffer_size: Largest number of live items on a rank.
        reuse: The rule of reuse. It is not in the file if it is ``each``, the rule of the paper.
        order_by: The sampler that decides the order, in words. If that is not known, it is None, and not in the file.
        seed: Seed in use; None before the first batch, if none was given.
        factor: The echo factor that was set last.
        constructed_factor: The factor with which the loader was made.
        largest_factor: The largest factor so far. It decides how far ahead batches may be planned.
        factor_before: The factor that applies until `factor` does.
        factor_since: Number of the first batch to which `factor` applies.
        epoch: Number of the present epoch.
        epoch_batches: Length of the present epoch in batches. -1 while that is not known, because the epoch ends when a pass
            ends.
        in_epoch: Number of batches of the present epoch that were delivered.
        delivered: Number of batches that were delivered in the whole run.
        begin_at: Position and batch number at which the run begins, if there is no plan.
        passes_over: Number of passes over the data that have ended. Older versions did not save it.
        counts: Examples delivered on this rank: fresh, echoed, refetched.
        plan: Which item is used when. None before the first batch, at the start of a pass with nothing live, and for a stream.
        order: Which index stands at which position. It is there if there is a plan, and at the start of a pass whose length is
            not known.
        stream: For a stream, in place of plan and order. For other data it is None, and not in the file.
        epoch_goes_on: If several loaders make up an epoch: whether the epoch continues (None: not known). Otherwise left out.
        trainer: Where the Trainer was. If that is not known, it is None, and not in the file.
        new_length: Length of a pass of the data set when the state was saved, if the data set had grown or shrunk since the
            present pass began. Otherwise None, and not in the file.
        has_begun_pass: True if the present pass began in the present epoch, and only a limit of the Trainer ends an epoch.
            Otherwise None, and not in the file.
    """

    version: int = STATE_VERSION
    insertion_point: InsertionPoint
    layout: Layout
    workers: int
    buffer_size: Size
    reuse: Reuse = Reuse.each
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
    passes_over: int = 0
    counts: Annotated[EchoCounts, ROW]
    plan: PlanState | None
    order: OrderState | None
    stream: StreamState | None = None
    epoch_goes_on: bool | LeftOut | None = LEFT_OUT
    trainer: TrainerState | None = None
    new_length: Size | None = None
    has_begun_pass: bool | None = None

    @classmethod
    def from_dict(cls, state: Any, *, by_index: bool) -> EchoState:
        """Reads a state from plain types, and checks all of it.

        Args:
            state: What `to_dict` has returned, in this version or an earlier one.
            by_index: Whether the loader that loads the state reads by index. Otherwise it reads batches or a stream, pass by
                pass.

        Raises:
            EchoStateError: This is not a state of an `EchoLoader`, or it is of a later version, or it is damaged. The message
                names the field that is missing, superfluous or wrong.
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
        """Returns the state in plain types: what a checkpoint holds."""
        state: dict[str, Any] = plain(self)
        return state

    @staticmethod
    def parts_of(pipeline: dict[str, Any]) -> tuple[PlanState | None, OrderState | None, StreamState | None]:
        """Reads plan, order and stream from the plain types in which a pipeline returns them, see `pipeline`."""
        parts = read(PipelineState, pipeline)
        return parts.plan, parts.order, parts.stream

    def pipeline(self) -> dict[str, Any]:
        """Returns what a pipeline continues from, in plain types: ``plan``, ``order``, and ``stream`` for a stream."""
        state: dict[str, Any] = plain(PipelineState(plan=self.plan, order=self.order, stream=self.stream))
        return state

    @property
    def conditions(self) -> Conditions:
        """What must be the same for a run to continue exactly."""
        return Conditions(self.insertion_point, self.layout, self.workers, self.buffer_size, self.reuse, self.order_by)

    @property
    def position(self) -> int:
        """Position of the next fresh item. It means nothing for a stream, whose workers count for themselves."""
        return self.begin_at.position if self.plan is None else self.plan.position

    def under(self, conditions: Conditions) -> EchoState:
        """Returns the same state with other conditions."""
        return replace(self, **conditions._asdict())

    @property
    def pending(self) -> tuple[FactorChange, ...] | None:
        """Changes of the factor that are still to come; None if no plan has begun."""
        planned = self.plan or self.stream
        return None if planned is None else planned.pending

    def with_change(self, number: int, factor: float) -> EchoState:
        """Returns the same state, but another factor applies from batch ``number`` on."""
        if self.pending is None:
            return self
        pending = (*[change for change in self.pending if change.number < number], FactorChange(number, factor))
        if self.plan is not None:
            return replace(self, plan=replace(self.plan, pending=pending))
        assert self.stream is not None
        return replace(self, stream=replace(self.stream, pending=pending))


def is_state(state: Any) -> bool:
    """Returns whether this is a state of an `EchoLoader`, of any version, and not of another stateful loader.

    A state that lacks a field counts as one, too: it is refused where it is read, and not ignored here.
    """
    return isinstance(state, dict) and len({"version", "insertion_point", "layout"} & state.keys()) >= 2


# --- what must hold between fields ------------------------------------------------------------------------------------


def _check(state: EchoState, *, by_index: bool) -> None:
    plan, order, stream, layout = state.plan, state.order, state.stream, state.layout
    for name in ("replicas", "batch_size", "last_batch_size"):
        require(getattr(layout, name) >= 1, f"layout.{name}", "an integer >= 1", getattr(layout, name))
    require(plan is None or order is not None, "order", "there if there is a plan", order)
    require(stream is None or plan is None, "stream", "None beside a plan", stream)
    begins = plan is None and stream is None  # a pass begins, and nothing is live
    require(not begins or state.begin_at.number == state.delivered, "plan, or stream,", "there once batches were delivered", plan)
    by_batches = state.insertion_point.by_batches
    if plan is not None and order is not None:
        buffers = 1 if by_batches else max(state.workers, 1)
        require(plan.number == state.delivered, "delivered", f"{plan.number}, the number of the plan", state.delivered)
        check_plan(plan, "plan", plan.number * (1 if by_batches else layout.batch_size), buffers, state.reuse)
        check_order(order, plan.position, layout, by_index)
    elif order is not None:  # a pass begins whose length is not known
        may_be = not by_index and not layout.batches_per_pass and order == OrderState(passes=order.passes)
        require(may_be, "order", "None without a plan", order)
        check_order(order, state.begin_at.position, layout, by_index)
    if stream is not None:
        check_stream(stream, max(state.workers, 1), layout, state.reuse)
