"""`ProfilerTap`: hears when Lightning fetches a batch and hands it to the device.

No hook surrounds the fetch, nor the transfer; what Lightning tells its profiler does, in every run and with any profiler. So
its ``start`` and ``stop`` are taken over for the time of a training, and passed on. Of a profiler that does nothing ``profile``
is too: it surrounds every hook, some twenty in a step, and now costs less there than without the tap.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler

from lightning_echo.measuring.timing import StepTimer

__all__ = ["ProfilerTap"]

_FETCH, _COPY = ".train_dataloader_next", ".batch_to_device"
_TAPPED = "start", "stop", "profile"
_VALIDATION = ".on_validation_model_zero_grad"  # comes before validation sets its loaders up, which on_validation_start does not


class ProfilerTap:
    """Tells a `StepTimer` what Lightning tells a profiler.

    Args:
        profiler: ``trainer.profiler``.
        timer: Told of fetches, copies and the beginning of validation.
    """

    def __init__(self, profiler: Any, timer: StepTimer) -> None:
        self._profiler = profiler
        self._had = {name: vars(profiler)[name] for name in _TAPPED if name in vars(profiler)}
        start = {_FETCH: timer.begin_fetch, _COPY: timer.begin_copy, _VALIDATION: timer.pause}
        stop = {_FETCH: timer.end_fetch, _COPY: timer.end_copy}
        does_nothing = type(profiler) is PassThroughProfiler and not self._had
        if does_nothing:
            profiler.profile = _told_only_of((*start, *stop), profiler.profile)
        profiler.start = _told(profiler.start, start, timer_first=False)
        profiler.stop = _told(profiler.stop, stop, timer_first=True)

    def close(self) -> None:
        """Gives the profiler its own methods back."""
        for name in _TAPPED:
            vars(self._profiler).pop(name, None)
        vars(self._profiler).update(self._had)


def _told(original: Callable[[str], None], tells: dict[str, Callable[[], None]], *, timer_first: bool) -> Callable[[str], None]:
    """Stands in for a profiler's ``start`` or ``stop``, whose own time is not to be measured."""
    known: dict[str, Callable[[], None] | None] = {}

    def told(action_name: str) -> None:
        if action_name not in known:
            known[action_name] = next((tell for end, tell in tells.items() if action_name.endswith(end)), None)
        tell = known[action_name]
        if tell is not None and timer_first:
            tell()
        original(action_name)
        if tell is not None and not timer_first:
            tell()

    return told


def _told_only_of(
    ends: tuple[str, ...], original: Callable[[str], AbstractContextManager[None]]
) -> Callable[[str], AbstractContextManager[None]]:
    """Stands in for ``profile`` of a profiler that does nothing."""
    silent: set[str] = set()
    nothing = nullcontext()

    def profile(action_name: str) -> AbstractContextManager[None]:
        if action_name in silent:
            return nothing
        if not action_name.endswith(ends):
            silent.add(action_name)
        return original(action_name)

    return profile
