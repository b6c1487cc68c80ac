"""`ProfilerTap`: hears when Lightning fetches a batch, copies it to the device, and begins to validate.

A callback has no hook before and after the first two. But in every run Lightning reports them to its profiler, of any kind. So
the tap replaces the profiler's ``start`` and ``stop`` during a training, and calls the original ones.

Lightning calls ``profile`` around every hook, about twenty times in a step. If the profiler does nothing, the tap also replaces
``profile`` with a quicker one. In that case a step costs less with the tap than without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler

from lightning_echo.measuring.timing import StepTimer

__all__ = ["ProfilerTap"]

_FETCH, _COPY = ".train_dataloader_next", ".batch_to_device"
_REPLACED = "start", "stop", "profile"
# Lightning calls this hook before validation sets its loaders up; on_validation_start comes after that.
_VALIDATION = ".on_validation_model_zero_grad"


class ProfilerTap:
    """Tells a `StepTimer` what Lightning reports to its profiler.

    Args:
        profiler: ``trainer.profiler``.
        timer: The timer that is told of fetches, copies and the beginning of validation.
    """

    def __init__(self, profiler: Any, timer: StepTimer) -> None:
        self._profiler = profiler
        self._had = {name: vars(profiler)[name] for name in _REPLACED if name in vars(profiler)}
        start = {_FETCH: timer.begin_fetch, _COPY: timer.begin_copy, _VALIDATION: timer.pause}
        stop = {_FETCH: timer.end_fetch, _COPY: timer.end_copy}
        does_nothing = type(profiler) is PassThroughProfiler and not self._had
        if does_nothing:
            profiler.profile = _quick_profile((*start, *stop), profiler.profile)
        profiler.start = _with_timer(profiler.start, start, timer_first=False)
        profiler.stop = _with_timer(profiler.stop, stop, timer_first=True)

    def close(self) -> None:
        """Gives back to the profiler its own methods."""
        for name in _REPLACED:
            vars(self._profiler).pop(name, None)
        vars(self._profiler).update(self._had)


def _with_timer(
    original: Callable[[str], None], calls: dict[str, Callable[[], None]], *, timer_first: bool
) -> Callable[[str], None]:
    """Returns a replacement for a profiler's ``start`` or ``stop`` that calls the timer, too.

    Args:
        original: The profiler's own method.
        calls: The timer's methods to call, by the end of the action's name.
        timer_first: Whether to call the timer before the original method. True for ``stop`` and False for ``start``, so that the
            profiler's own time is not measured.
    """
    known: dict[str, Callable[[], None] | None] = {}

    def replacement(action_name: str) -> None:
        if action_name not in known:
            known[action_name] = next((call for end, call in calls.items() if action_name.endswith(end)), None)
        call = known[action_name]
        if call is not None and timer_first:
            call()
        original(action_name)
        if call is not None and not timer_first:
            call()

    return replacement


def _quick_profile(
    ends: tuple[str, ...], original: Callable[[str], AbstractContextManager[None]]
) -> Callable[[str], AbstractContextManager[None]]:
    """Returns a replacement for ``profile`` of a profiler that does nothing. It calls the original only for these actions."""
    silent: set[str] = set()
    nothing = nullcontext()

    def profile(action_name: str) -> AbstractContextManager[None]:
        if action_name in silent:
            return nothing
        if not action_name.endswith(ends):
            silent.add(action_name)
        return original(action_name)

    return profile
