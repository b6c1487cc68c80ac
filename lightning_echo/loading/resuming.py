"""Where a loaded state cannot be gone on with in the middle of a pass: it is refused, or the run goes on with the next pass.

A stream, and a loader without a length, cannot be asked for a place: unless it saves its own state, all that is left is to begin
its next pass. In the middle of a pass that would repeat data, silently; it is an error. Between two passes it is right, only that
what was live then cannot be read again.
"""

from __future__ import annotations

from typing import Any

from lightning_echo.loading.setting import Setting
from lightning_echo.loading.state import EchoStateError, differences

__all__ = ["adapt_state", "begin_next_pass", "follow_state", "has_own_states"]


def adapt_state(state: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The state to go on from: as it is, or at the beginning of its next pass.

    Args:
        state: Of an `EchoLoader`, checked.
        setting: Of the one that loads it.

    Raises:
        EchoStateError: It was taken within a pass, and the loader cannot go on there.
    """
    changed = _changes(state, setting) if setting.by_streams or state.get("stream") else ""
    if setting.resumes and not changed:
        return state
    if not _is_between_passes(state):
        raise EchoStateError(_refusal(state, setting, changed))
    return {**state, **_next_pass(state, setting)}


def begin_next_pass(state: dict[str, Any], setting: Setting) -> tuple[dict[str, Any] | None, bool]:
    """What changes in a state where a run goes on in the same process, and nothing can be read again.

    Returns:
        The changes, None if there are none; and whether the pass under way had to be left.
    """
    if setting.resumes or (state["plan"] is None and not state.get("stream")):
        return None, False
    return _next_pass(state, setting), not _is_between_passes(state)


def follow_state(state: dict[str, Any], before: Setting, setting: Setting) -> tuple[dict[str, Any] | None, bool]:
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
    changed = _changes(state, setting)
    if not own_passes and (before.layout(), before.choice.point) != (setting.layout(), setting.choice.point):
        return None, False
    is_over = _is_between_passes(state)
    if setting.resumes and not (own_passes and (changed or is_over)):
        return state, False
    return {**state, **setting.depends_on(), **_next_pass(state, setting)}, not is_over


def has_own_states(state: dict[str, Any]) -> bool:
    """Whether a state holds one of the user's loader or stream, which we know nothing of."""
    workers = (state.get("stream") or {}).get("workers", ())
    return any(saved is not None for saved in workers) or "loader" in (state["order"] or {})


def _changes(state: dict[str, Any], setting: Setting) -> str:
    kept = ("insertion_point", "layout", "workers", "buffer_size")
    return differences({name: state[name] for name in kept}, setting.depends_on())


def _is_between_passes(state: dict[str, Any]) -> bool:
    stream = state.get("stream")
    if stream is not None:
        return not stream["begun"] or len(stream["ended"]) == len(stream["workers"])
    if state["plan"] is None:
        return True
    position, passes = state["plan"]["position"], state["order"].get("passes")
    if passes:  # the last one is that of the next batch
        return bool(passes[-1][1] == position)
    return bool(position % state["layout"]["batches_per_pass"] == 0)


def _next_pass(state: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Entries of a state that begins a pass, in which nothing is live."""
    stream = state.get("stream")
    if stream is not None:
        workers = max(setting.source.num_workers, 1)
        same = workers == len(stream["workers"])
        number = stream["pass"] + stream["begun"]
        begun = {
            "request": workers * number,  # whatever: a multiple, not 0 in a later pass
            "pass": number,
            "begun": False,
            "ended": [],
            "batches": stream["batches"] if same else [0] * workers,
            "workers": [None] * workers,
            "pending": stream["pending"],
        }
        begun["factors"] = [[begun["request"], stream["factors"][-1][1]]]
        return {"stream": begun}
    plan = state["plan"]
    if plan is None:
        return {}
    position, passes = plan["position"], state["order"].get("passes")
    if passes is None:
        length = state["layout"]["batches_per_pass"]
        return {"plan": None, "order": None, "begin_at": [-(-position // length) * length, state["delivered"]]}
    number, first = passes[-1]
    next_pass = [number + (first < position), position]
    return {"plan": None, "order": {"passes": [next_pass]}, "begin_at": [position, state["delivered"]]}


def _refusal(state: dict[str, Any], setting: Setting, changed: str) -> str:
    loader = setting.source.loader
    if changed:
        return (
            f"the state was saved within a pass of a stream, with {changed}: its workers share a stream out, so "
            "that the run can only go on with the same ones. Resume with the same options, or from a state saved between passes"
        )
    what = type(loader.dataset if setting.by_streams else loader).__name__
    way_out = "resume from a state that was saved at the end of an epoch"
    if state["epoch_batches"] >= 0:  # of known length
        way_out = "let epochs end where the stream does, by epoch_length='full_pass', and resume from a state saved there"
    return (
        f"the state was saved within a pass, and {what} cannot go on there: without state_dict() and load_state_dict(state) its "
        f"data would be repeated. Give it both, or {way_out}"
    )
