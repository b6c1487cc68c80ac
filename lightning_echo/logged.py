"""What a run shows of echoing: metrics and hyperparameters in every logger, a short text in the progress bar."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_echo.echoing.loader import EchoLoader
from lightning_echo.measuring.control import Controller

__all__ = ["ProgressText", "log_hyperparameters", "log_metrics", "steps_taken"]


def steps_taken(trainer: pl.Trainer) -> int:
    """As Lightning counts them for its loggers: under manual optimization every batch is one, however many optimizers step."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.total_batch_idx + 1


def log_metrics(trainer: pl.Trainer, values: dict[str, float]) -> None:
    """Through every logger, beside what Lightning logs at this step."""
    step = max(steps_taken(trainer) - 1, 0)  # Lightning's own number for it, counted from 0
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})


def log_hyperparameters(trainer: pl.Trainer, loader: EchoLoader | None, controller: Controller | None) -> None:
    """What echoing amounts to in this run, as plain types (checkpoints with hyperparameters load with ``weights_only=True``)."""
    if loader is None:
        return
    params: dict[str, Any] = {
        "factor": loader.factor,
        "insertion_point": loader.insertion_point.value,
        "buffer_size": loader.buffer_size,
        "epoch_length": loader.epoch_length,
        "seed": loader.seed,
        "controller": None if controller is None else repr(controller),
    }
    for logger in trainer.loggers:
        logger.log_hyperparams({"echo": params})


class ProgressText:
    """``echo=2.0x idle 3%`` among the progress bar's items, while it is shown."""

    def __init__(self) -> None:
        self.text = ""
        self._bar: Any = None
        self._get_metrics: Any = None

    def show(self, trainer: pl.Trainer) -> None:
        """Begins to add to what the bar displays."""
        self.hide()
        if (bar := trainer.progress_bar_callback) is not None:
            self._bar, self._get_metrics = bar, bar.get_metrics
            vars(bar)["get_metrics"] = self.get_metrics

    def hide(self) -> None:
        """Leaves the bar as it was; may be called at any time."""
        if self._bar is not None:
            del vars(self._bar)["get_metrics"]
            if getattr(self._get_metrics, "__func__", None) is not getattr(type(self._bar), "get_metrics", None):
                vars(self._bar)["get_metrics"] = self._get_metrics  # had been put on the instance by somebody else
            self._bar = None

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Stands in for the bar's own."""
        return {**self._get_metrics(*args, **kwargs), **({"echo": self.text} if self.text else {})}
