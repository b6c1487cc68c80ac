"""Where a run continues: from a loaded state, or from the run of the `EchoLoader` that was made before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from lightning_echo.loader.setting import Setting
from lightning_echo.loader.state import EchoState, FactorChange, OrderState, PassEnd, PassStart
from lightning_echo.pipeline.pipelines import Layout, Start
from lightning_echo.schema import EchoStateError

# ---------------------------------------------------------------------- from a state
# Pure functions from one state to another. A run continues at the place of the state, or at the same place of a pass that is cut
# differently, or with the next pass. In the usual case nothing has changed, and the state is taken as it is: its plan and order
# go to ``pipeline/requests.py`` (`_PlannedRequests`), which asks for the batch after the last one that was delivered. The counts
# of batches, in the run and in the epoch, are fields of the state, and go to ``loader/epochs.py`` (`Delivery.continue_at`).
#
# A stream, and a loader without a length, cannot start at a given place. Without a state of their own, they can only begin their
# next pass. In the middle of a pass, that would repeat data silently, so it is an error. Between two passes it is right, but the
# items that were live then cannot be read again.


def adapt_state(state: EchoState, setting: Setting) -> EchoState:
    """Returns the state from which a run continues: ``state`` itself, or one at the start of the next pass."""
    changed = (
        state.conditions.differences(setting.conditions()) if setting.kind.plans_in_workers or state.stream is not None else ""
    )
    if setting.on_demand and state.stream is not None and not state.stream.on_demand:
        changed = ", ".join(filter(None, (changed, "a constant factor (now factor='demand')")))
    if setting.kind.resumes and not changed:
        return state
    if is_between_passes(state):
        return _next_pass(state, setting)
    if changed:
        raise EchoStateError(
            f"the state was saved within a pass of a stream, with {changed}: the workers divide a stream among themselves, so "
            "the run can only continue with the same ones. Resume with the same options, or from a state saved between passes: "
            "with epoch_length='full_pass', those of the ends of epochs are"
        )
    advice = "resume from a state that was saved at the end of an epoch"
    if state.epoch_batches >= 0:  # of known length
        advice = "let epochs end when the stream ends, by epoch_length='full_pass', and resume from a state saved there"
    raise EchoStateError(
        f"the state was saved within a pass, and {type(setting.kind.stateful).__name__} cannot continue there: without "
        f"state_dict() and load_state_dict(state), data would be repeated. Give it both methods, or {advice}"
    )


def check_same_passes(state: EchoState, setting: Setting, *, may_change: bool) -> None:
    """Raises an `EchoStateError` if the passes of a state have another order, length or sharing than those of its loader.

    ``may_change``: whether the length of a pass may follow its number.
    """
    length = setting.layout().length
    if other_order := other_order_of(state, setting):
        if not is_between_passes(state):
            raise EchoStateError(
                f"the state was saved within a pass, with {other_order}: in another order the rest of that pass would repeat "
                "examples and leave others out. Resume with the same sampler, or from a state that was saved where a pass "
                "had ended, or restart without the loader's state. Without a DistributedSampler, EchoLoader divides the "
                "data itself, and then continues with any number of ranks"
            )
    elif may_change and is_between_passes(state):
        pass  # the pass that begins has the length that it has
    elif length not in (state.layout.length, state.new_length) and state.delivered:
        raise EchoStateError(
            f"the state is of a pass of {state.layout.length:,} items, but a pass of this loader has {length:,}: the data "
            "set, the sampler or the kind of insertion point has changed. Resume with the same one, or restart without "
            "the loader's state"
        )
    if state.stream is not None and state.stream.on_demand and not setting.on_demand:
        raise EchoStateError(
            "the state is of a run over a stream that echoed on demand, and this loader has a constant factor. Resume with "
            "factor='demand' (with max_factor=1 nothing is echoed), or restart without the loader's state"
        )
    if state.demand is not None and not setting.on_demand:
        raise EchoStateError(
            "the state is of a run that echoed on demand, and this loader has a constant factor, which cannot continue within "
            "a pass of which some examples came early. Resume with factor='demand' (and set .factor to 1, if nothing is to be "
            "echoed), or restart without the loader's state"
        )
    before = None if state.order is None else state.order.share
    here = setting.sharing.config.name if setting.sharing is not None and setting.sharing.is_replayed else None
    if (state.plan is not None or state.demand is not None) and before != here:
        raise EchoStateError(
            f"the state is of a run with share={before!r}, and this loader has share={here!r}: they have different orders. "
            f"Resume with share={before!r}, or restart without the loader's state"
        )


def begin_next_pass(state: EchoState, setting: Setting) -> tuple[EchoState | None, bool]:
    """Returns the state from which a run continues after its workers ended, and whether the pass was cut short.

    The state is at the start of the next pass, or None if the loader can continue at its place.
    """
    if setting.kind.resumes or (state.plan is None and state.stream is None and state.demand is None):
        return None, False
    return _next_pass(state, setting), not is_between_passes(state)


def follow_state(state: EchoState, before: Setting, setting: Setting) -> tuple[EchoState | None, bool]:
    """Returns the state with which a loader continues the run of another one, and whether the pass was cut short.

    The state is None if a position does not mean the same in both loaders. If a loader of unknown length, or of a stream, was
    made again between two passes, the new loader reads its next pass, because it may read other data.
    """
    is_over = is_between_passes(state)
    own_passes, by_batches = setting.kind.reads_own_passes, setting.kind.by_batches
    mine = (own_passes, by_batches, setting.on_demand)
    if mine != (before.kind.reads_own_passes, before.kind.by_batches, before.on_demand):
        return None, not is_over
    now = setting.conditions()
    layout = setting.layout()
    is_alike = (before.layout(), before.choice.point, state.layout.length) == (layout, setting.choice.point, layout.length)
    if not own_passes and (not is_alike or other_order_of(state, setting)):
        return None, not is_over
    if setting.kind.resumes and not (own_passes and (is_over or state.conditions != now)):
        return state, False
    return _next_pass(state, setting).under(now), not is_over


def start_of_next_pass(state: EchoState, now: Layout, by_batches: bool) -> Start:
    """Returns where the next pass, of known length, begins in a run with the layout ``now``. It may begin right here."""
    before = state.layout
    number = passes = -(-state.position // before.items_per_pass(state.insertion_point.by_batches))
    if state.demand is not None:  # ranks may be in different passes, and have the same number of batches
        passes = -(-state.delivered // before.batches_per_pass)
    return Start(number * now.items_per_pass(by_batches), passes * now.batches_per_pass)


def why_next_pass(state: EchoState, setting: Setting) -> str:
    """Returns why the next pass begins and the present one is not continued, for people."""
    if other_order := other_order_of(state, setting):
        return f"the state was saved with {other_order}: the next pass begins, in the new order"
    what, before, now = setting.kind.laid_out, state.layout, setting.layout()
    return (
        f"a pass has {now.length:,} {what} now, and had {before.length:,} when it began: the present pass ends here, and the "
        "next one has all of them. New workers are started"
    )


def where_to_go_on(state: EchoState, now: Layout, by_batches: bool) -> Start:
    """Returns the position and batch number at which a run with the layout ``now`` continues, so that it leaves out no example.

    The run skips all that all ranks together had taken from the pass, rounded down to whole batches of this run. A pass of
    unknown length is not divided among ranks, so its batches are at the same places. A pass of another length cannot be
    continued: the next one begins. ``by_batches``: whether positions of this run count batches.
    """
    position, before = state.position, state.layout
    if not before.batches_per_pass:
        assert state.plan is not None
        return Start(position, state.plan.number)
    if before.length != now.length:
        return start_of_next_pass(state, now, by_batches)
    if state.insertion_point.by_batches:
        number, batches = divmod(position, before.batches_per_pass)
        taken = batches * before.batch_size
    else:
        number, taken = divmod(position, before.pass_length)
    batches = min(taken * before.replicas // now.replicas // now.batch_size, now.batches_per_pass - 1)
    batch_number = number * now.batches_per_pass + batches
    return Start(batch_number if by_batches else number * now.pass_length + batches * now.batch_size, batch_number)


def order_to_go_on(state: EchoState, now: Layout, begin_at: Start) -> OrderState | None:
    """Returns the order with which a run with the layout ``now`` continues within a pass.

    The start of a pass is rearranged. How, depends on where the pass before it ended, and so on the number of ranks at that time.
    The present pass must keep its arrangement: otherwise some of its examples would be left out, and others would come twice.
    """
    order, before = state.order, state.layout
    end = before.pass_length * before.replicas
    if order is None or order.distances is None or not before.batches_per_pass or end == now.pass_length * now.replicas:
        return order
    return replace(order, ends=(*(order.ends or ()), PassEnd(begin_at.number // now.batches_per_pass, end)))


def continued_elsewhere(state: EchoState, setting: Setting) -> tuple[EchoState, int | None, str]:
    """Returns the state from which a planned run starts, and a message for the user, which may be empty.

    Between them: the number of batches after which an epoch begins. None: the run continues at its place of the epoch.
    """
    if state.plan is None or not (changed := state.conditions.differences(setting.conditions())):
        return state, None, ""
    layout = setting.layout()
    begin_at = where_to_go_on(state, layout, setting.kind.by_batches)
    order, message = None, why_next_pass(state, setting)
    if state.layout.length == layout.length and not other_order_of(state, setting):
        order = order_to_go_on(state, layout, begin_at)
        message = (
            f"the state was saved with {changed}: the run continues at the same place of the pass and leaves nothing out, but "
            "its batches are not those of the run that was saved"
        )
    return replace(state, plan=None, order=order, begin_at=begin_at), begin_at.number, message


def keeps_arrangement(state: EchoState, now: Layout) -> bool:
    """Returns whether the slots of all passes have the same examples with the layout ``now``, see `order_to_go_on`."""
    distances = None if state.order is None else state.order.distances
    is_spread = any(distance.positions for distance in distances or ())
    return not is_spread or state.layout.pass_length * state.layout.replicas == now.pass_length * now.replicas


def other_order_of(state: EchoState, setting: Setting) -> str:
    """Returns, in words, what decided the order in a state and does not decide it here. Empty if the order is the same."""
    return state.conditions.other_order(setting.conditions()) if state.delivered else ""


def has_own_states(state: EchoState) -> bool:
    workers = () if state.stream is None else state.stream.workers
    return any(saved is not None for saved in workers) or (state.order is not None and state.order.loader is not None)


def is_between_passes(state: EchoState) -> bool:
    """Returns whether a pass is about to begin in a state."""
    stream, plan = state.stream, state.plan
    if stream is not None:
        return not stream.begun or len(stream.ended) == len(stream.workers)
    if state.demand is not None:
        return state.demand.is_between_passes(state.layout.pass_length)
    if plan is None:
        return True
    if state.order is not None and state.order.passes:  # of unknown length; the last is the next batch's
        return state.order.passes[-1].first == plan.position
    return state.position % state.layout.items_per_pass(state.insertion_point.by_batches) == 0


def _next_pass(state: EchoState, setting: Setting) -> EchoState:
    """Returns the state at the start of the next pass, with nothing live."""
    stream, plan = state.stream, state.plan
    if stream is not None:
        workers = max(setting.kind.num_workers, 1)
        number = stream.pass_ + stream.begun
        request = workers * number  # any multiple of the number of workers will do, but 0 only in the first pass
        begun = replace(
            stream,
            request=request,
            pass_=number,
            begun=False,
            ended=(),
            batches=stream.batches if workers == len(stream.workers) else (0,) * workers,
            workers=(None,) * workers,
            factors=(FactorChange(request, stream.factors[-1].factor),),
        )
        return replace(state, stream=begun)
    if plan is None:
        return state
    if state.order is None or not state.order.passes:  # the length of passes is known
        length = state.layout.batches_per_pass
        return replace(state, plan=None, order=None, begin_at=Start(-(-plan.position // length) * length, state.delivered))
    last = state.order.passes[-1]
    following = PassStart(last.number + (last.first < plan.position), plan.position)
    return replace(state, plan=None, order=OrderState(passes=(following,)), begin_at=Start(plan.position, state.delivered))


# ---------------------------------------------------------------------- from the loader before
# A hook may return a new `EchoLoader` each time that it is called (``reload_dataloaders_every_n_epochs=1``), or each of several
# short trainings may make one. Each loader would begin a run of its own, and all would deliver the same part of the data. The
# loader is not informed directly, but there are two signs:
#
# * Lightning calls ``set_epoch`` of a loader's samplers. So an `EchoLoader` has a ``batch_sampler`` that receives it
#   (`EpochListener`).
# * A loader finds the run of the loader that was made before it over the same data set, if that run is alive (`predecessor_of`).
#   How that run began is known as long as the data set is alive (`Beginning`).
#
# If a loader is at the start of its run and Lightning sets a later epoch than the first, it continues the run of its predecessor
# (`follow_state`). The loader warns if there is no predecessor, or if two trainings begin with the same part of the data.


@dataclass
class Beginning:
    """How a run began. It shows whether a later run delivers the same batches, and it does not keep the loader alive.

    Attributes:
        epochs: Number of epochs that were begun.
        seed: Seed in use; None before the first batch.
        heard_epoch: The epoch that Lightning set last; -1 if it set none.
        share: Share of a pass that the first epoch delivers, without the examples that fill the buffer.
        before: Beginning of the run that was made before over the same data. None once this run begins.
    """

    epochs: int = 0
    seed: int | None = None
    heard_epoch: int = -1
    share: float = 0.0
    before: Beginning | None = None


class Follower(Protocol):
    """What this needs of an `EchoRun`."""

    @property
    def beginning(self) -> Beginning: ...

    @property
    def predecessor(self) -> Any: ...


_Run = TypeVar("_Run", bound=Follower)


class _Last(NamedTuple):
    """The run that was made last over some data. It keeps neither alive."""

    data: weakref.ref[Any]
    run: weakref.ref[Any]
    beginning: Beginning


# By the data set's identity: equal data sets are not the same, and tensors do not compare to True or False.
_last: dict[int, _Last] = {}


class EpochListener:
    """Receives the epoch from Lightning, which calls ``loader.batch_sampler.sampler.set_epoch``.

    DeepSpeed reads ``batch_size`` here.
    """

    def __init__(self, batch_size: int, set_epoch: Callable[[int], None]) -> None:
        self.batch_size, self.set_epoch = batch_size, set_epoch

    @property
    def sampler(self) -> EpochListener:
        """The object on which Lightning calls ``set_epoch``: this one."""
        return self


def predecessor_of(run: _Run, loader: Any) -> _Run | None:
    """Returns the last run that was made over the same data, if it is alive, and remembers ``run`` in its place.

    ``run.beginning.before`` then has the beginning of the earlier run, even if that is not alive.
    """
    data = getattr(loader, "dataset", loader)
    key = id(data)
    last = _last.get(key)
    try:
        alive = weakref.ref(data, lambda _: _last.pop(key, None))
    except TypeError:  # the data set allows no weak reference, as a list
        return None
    _last[key] = _Last(alive, weakref.ref(run), run.beginning)
    if last is None or last.data() is not data:
        return None
    found: _Run | None = last.run()
    if last.beginning.epochs:
        run.beginning.before = last.beginning
        return found
    run.beginning.before = last.beginning.before  # the last run was never begun, so take the one before it
    return None if found is None else found.predecessor


def begins_alike(before: Beginning | None, seed: int | None, heard_epoch: int) -> bool:
    """Returns whether a run delivers the same batches as the one before: that has delivered an epoch shorter than a pass."""
    return (
        before is not None
        and (seed is not None and before.seed is not None and seed == before.seed)
        and before.epochs == 1
        and before.heard_epoch == heard_epoch == 0
        and before.share < 1
    )
