"""`ProfilerTap`: hears when Lightning fetches a batch and hands it to the device.

No hook surrounds the fetch, nor the transfer; what Lightning tells its profiler does, in every run and with any profiler. So
its ``start`` and ``stop`` are taken over for the time of a training, and passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_echo.measuring.timing import StepTimer

__all__ = ["ProfilerTap"]

_FETCH, _COPY = ".train_dataloader_next", ".batch_to_device"
_VALIDATION = ".on_validation_model_zero_grad"  # comes before validation sets its loaders up, which on_validation_start does not


class ProfilerTap:
    """Tells a `StepTimer` what Lightning tells a profiler.

    Args:
        profiler: ``trainer.profiler``.
        timer: Told of fetches, copies and the beginning of validation.
    """

    def __init__(self, profiler: Any, timer: StepTimer) -> None:
        self._profiler, self._timer = profiler, timer
        self._start: Callable[[str], None] = profiler.start
        self._stop: Callable[[str], None] = profiler.stop
        self._had = {name: vars(profiler)[name] for name in ("start", "stop") if name in vars(profiler)}
        profiler.start, profiler.stop = self.start, self.stop

    def start(self, action_name: str) -> None:
        """Stands in for the profiler's."""
        self._start(action_name)
        if action_name.endswith(_FETCH):
            self._timer.begin_fetch()
        elif action_name.endswith(_COPY):
            self._timer.begin_copy()
        elif action_name.endswith(_VALIDATION):
            self._timer.pause()

    def stop(self, action_name: str) -> None:
        """Stands in for the profiler's."""
        if action_name.endswith(_FETCH):
            self._timer.end_fetch()
        elif action_name.endswith(_COPY):
            self._timer.end_copy()
        self._stop(action_name)

    def close(self) -> None:
        """Gives the profiler its own methods back."""
        for name in ("start", "stop"):
            vars(self._profiler).pop(name, None)
        vars(self._profiler).update(self._had)
