"""Where a run goes on from a loaded state: at its place, at the same place of a pass cut otherwise, or with the next pass.

A stream, and a loader without a length, cannot be asked for a place: unless it saves its own state, all that is left is to begin
its next pass. In the middle of a pass that would repeat data, silently; it is an error. Between two passes it is right, only that
what was live then cannot be read again.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_echo.fetching.layout import Layout, Start
from lightning_echo.loading.setting import Setting
from lightning_echo.loading.state import EchoState, EchoStateError, FactorChange, OrderState, PassStart

__all__ = ["adapt_state", "begin_next_pass", "follow_state", "has_own_states", "where_to_go_on"]


def adapt_state(state: EchoState, setting: Setting) -> EchoState:
    """The state to go on from: as it is, or at the beginning of its next pass.

    Args:
        state: Of an `EchoLoader`.
        setting: Of the one that loads it.

    Raises:
        EchoStateError: It was taken within a pass, and the loader cannot go on there.
    """
    changed = state.conditions.differences(setting.conditions()) if setting.by_streams or state.stream is not None else ""
    if setting.resumes and not changed:
        return state
    if not _is_between_passes(state):
        raise EchoStateError(_refusal(state, setting, changed))
    return _next_pass(state, setting)


def begin_next_pass(state: EchoState, setting: Setting) -> tuple[EchoState | None, bool]:
    """The state from which a run goes on in the same process where nothing can be read again.

    Returns:
        The state, None if it stays as it is; and whether the pass under way had to be left.
    """
    if setting.resumes or (state.plan is None and state.stream is None):
        return None, False
    return _next_pass(state, setting), not _is_between_passes(state)


def follow_state(state: EchoState, before: Setting, setting: Setting) -> tuple[EchoState | None, bool]:
    """The state with which a loader goes on where another one has stopped, in the same process.

    Of one that was made anew between two passes, the next pass is read: what it reads may be something else.

    Args:
        state: Of the loader before.
        before: What that stood on.
        setting: Of the one that takes its place.

    Returns:
        The state, None if places mean something else in the two; and whether the pass under way had to be left.
    """
    own_passes = setting.by_streams or setting.source.length is None  # no index tells what comes next
    if own_passes != (before.by_streams or before.source.length is None) or setting.by_batches is not before.by_batches:
        return None, False
    now = setting.conditions()
    if not own_passes and (before.layout(), before.choice.point) != (setting.layout(), setting.choice.point):
        return None, False
    is_over = _is_between_passes(state)
    if setting.resumes and not (own_passes and (is_over or state.conditions != now)):
        return state, False
    return _next_pass(state, setting).under(now), not is_over


def where_to_go_on(state: EchoState, now: Layout, by_batches: bool) -> Start:
    """Stream position and batch number at which a changed run leaves nothing of the pass out.

    What all ranks together had taken from the pass, rounded down to whole batches of this run, is skipped. A pass of unknown
    length is not dealt out, and its batches lie where they lay.

    Args:
        state: Of the run that was saved, with a plan.
        now: The layout of this one.
        by_batches: Whether this one counts positions in batches.
    """
    plan, before = state.plan, state.layout
    assert plan is not None
    if not before.batches_per_pass:
        return Start(plan.position, plan.number)
    if state.insertion_point.by_batches:
        number, batches = divmod(plan.position, before.batches_per_pass)
        taken = batches * before.batch_size
    else:
        number, taken = divmod(plan.position, before.pass_length)
    batches = min(taken * before.replicas // now.replicas // now.batch_size, now.batches_per_pass - 1)
    batch_number = number * now.batches_per_pass + batches
    return Start(batch_number if by_batches else number * now.pass_length + batches * now.batch_size, batch_number)


def has_own_states(state: EchoState) -> bool:
    """Whether a state holds one of the user's loader or stream, which we know nothing of."""
    workers = () if state.stream is None else state.stream.workers
    return any(saved is not None for saved in workers) or (state.order is not None and state.order.loader is not None)


def _is_between_passes(state: EchoState) -> bool:
    stream, plan = state.stream, state.plan
    if stream is not None:
        return not stream.begun or len(stream.ended) == len(stream.workers)
    if plan is None:
        return True
    if (last := _last_pass(state)) is not None:  # that of the next batch
        return last.first == plan.position
    return plan.position % state.layout.batches_per_pass == 0


def _last_pass(state: EchoState) -> PassStart | None:
    """The pass under way, where passes have no known length."""
    return state.order.passes[-1] if state.order is not None and state.order.passes else None


def _next_pass(state: EchoState, setting: Setting) -> EchoState:
    """The same at the beginning of a pass, in which nothing is live."""
    stream, plan = state.stream, state.plan
    if stream is not None:
        workers = max(setting.source.num_workers, 1)
        number = stream.pass_ + stream.begun
        request = workers * number  # whatever: a multiple, not 0 in a later pass
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
    if (last := _last_pass(state)) is None:
        length = state.layout.batches_per_pass
        return replace(state, plan=None, order=None, begin_at=Start(-(-plan.position // length) * length, state.delivered))
    following = PassStart(last.number + (last.first < plan.position), plan.position)
    return replace(state, plan=None, order=OrderState(passes=(following,)), begin_at=Start(plan.position, state.delivered))


def _refusal(state: EchoState, setting: Setting, changed: str) -> str:
    loader = setting.source.loader
    if changed:
        return (
            f"the state was saved within a pass of a stream, with {changed}: its workers share a stream out, so "
            "that the run can only go on with the same ones. Resume with the same options, or from a state saved between passes"
        )
    what = type(loader.dataset if setting.by_streams else loader).__name__
    way_out = "resume from a state that was saved at the end of an epoch"
    if state.epoch_batches >= 0:  # of known length
        way_out = "let epochs end where the stream does, by epoch_length='full_pass', and resume from a state saved there"
    return (
        f"the state was saved within a pass, and {what} cannot go on there: without state_dict() and load_state_dict(state) its "
        f"data would be repeated. Give it both, or {way_out}"
    )
