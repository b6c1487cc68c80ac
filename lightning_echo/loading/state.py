"""The state of an `EchoLoader`: checked when it is loaded, and turned into a place to go on from where a run has changed."""

from __future__ import annotations

from typing import Any

from lightning_echo.fetching.index_pipeline import Layout
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.schema import EchoStateError, check_fields

__all__ = ["STATE_VERSION", "EchoStateError", "check_state", "differences", "is_state", "where_to_go_on"]

STATE_VERSION = 1


def is_state(state: Any) -> bool:
    """Whether something is a state of an `EchoLoader`, of whatever version, and not of another stateful loader."""
    return isinstance(state, dict) and {"version", "insertion_point", "layout"} <= state.keys()


def check_state(state: Any, *, by_index: bool) -> None:
    """Refuses what is no state of an `EchoLoader`, one of a later version, or one that is damaged.

    Args:
        state: To be loaded.
        by_index: As in `check_fields`.

    Raises:
        EchoStateError: With the reason.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise EchoStateError(f"state must be what EchoLoader.state_dict() returned, got {type(state).__name__}: {state!r:.100}")
    version = state["version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise EchoStateError(f"the state is damaged: version must be an integer >= 1, got {version!r:.80}")
    if version > STATE_VERSION:
        raise EchoStateError(
            f"the state has version {version}, this lightning_echo knows up to {STATE_VERSION}: upgrade lightning_echo"
        )
    check_fields(state, by_index=by_index)


def differences(saved_for: dict[str, Any], now: dict[str, Any]) -> str:
    """What a loaded state depends on and is another now, for people; empty if nothing is.

    Args:
        saved_for: Those entries of the state that was loaded; empty if none was.
        now: The state as it would be saved now.
    """
    found = [
        f"{name}={saved_for[name]!r} (now {now[name]!r})"
        for name in saved_for
        if name != "layout" and saved_for[name] != now[name]
    ]
    layout = saved_for.get("layout", {})
    found += [
        f"{name}={layout[name]} (now {now['layout'][name]})" for name in sorted(layout) if layout[name] != now["layout"][name]
    ]
    return ", ".join(found)


def where_to_go_on(plan: dict[str, Any], saved_for: dict[str, Any], now: Layout, by_batches: bool) -> tuple[int, int]:
    """Stream position and batch number at which a changed run leaves nothing of the pass out.

    What all ranks together had taken from the pass, rounded down to whole batches of this run, is skipped. A pass of unknown
    length is not dealt out, and its batches lie where they lay.

    Args:
        plan: The plan's state.
        saved_for: Layout and insertion point of the run that was saved.
        now: The layout of this one.
        by_batches: Whether this one counts positions in batches.
    """
    before = Layout(**saved_for["layout"])
    if not before.batches_per_pass:
        return plan["position"], plan["number"]
    if InsertionPoint(saved_for["insertion_point"]).by_batches:
        number, batches = divmod(plan["position"], before.batches_per_pass)
        taken = batches * before.batch_size
    else:
        number, taken = divmod(plan["position"], before.kept)
    batches = min(taken * before.replicas // now.replicas // now.batch_size, now.batches_per_pass - 1)
    batch_number = number * now.batches_per_pass + batches
    return (batch_number if by_batches else number * now.kept + batches * now.batch_size), batch_number
