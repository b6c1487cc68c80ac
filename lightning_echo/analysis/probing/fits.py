"""The Trainer's part: how long steps take, with a batch that is ready and with what comes from a loader.

Each is a real ``Trainer.fit``, without validation, logging, checkpoints and the user's callbacks, which would take part in what
is only a measurement.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, repeat
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_echo.analysis.probing.copying import wait_for

__all__ = ["WARM_UP_STEPS", "Prepared", "Ready", "StepClock", "fit"]

WARM_UP_STEPS = 5
_AT_ONCE = 10  # steps between two looks at a device that runs behind the host, or at the other ranks' clocks
_OWN: dict[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "max_epochs": 1,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
    "profiler": None,
    "barebones": False,
}


class StepClock(pl.Callback):
    """Seconds of each step, after the first ones; of a device that runs behind the host, means of ten.

    Args:
        most_seconds: After so long the fit ends, on all ranks with the same step.
        skipped: First steps that do not count; at least 1.
        most_skipped_seconds: No more of them than are done in that time. Default: half of the longest time.
        fewest: Steps that count whatever the time.

    Attributes:
        seconds: Of each step that counts.
        cpu_seconds: Processor time of this process per step, all its threads.
    """

    def __init__(
        self,
        most_seconds: float = float("inf"),
        skipped: int = WARM_UP_STEPS,
        fewest: int = 1,
        most_skipped_seconds: float | None = None,
    ) -> None:
        self._most_seconds, self._skipped, self._fewest = most_seconds, max(1, skipped), fewest
        self._most_skipped_seconds = most_seconds / 2 if most_skipped_seconds is None else most_skipped_seconds
        self._begin = self._last = self._cpu_begin = 0.0
        self._steps = self._noted = 0
        self._counts_from: int | None = None
        self.seconds: list[float] = []
        self.cpu_seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._steps += 1
        if self._counts_from is None:
            self._warm_up(pl_module.device)
        elif self._steps - self._noted == (_AT_ONCE if pl_module.device.type == "cuda" else 1):
            self._note(pl_module.device)
        if self._is_over(trainer):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._counts_from is not None and self._steps > self._noted:
            self._note(pl_module.device)

    def _warm_up(self, device: torch.device) -> None:
        wait_for(device)
        now = time.perf_counter()
        if self._steps >= self._skipped or now - self._begin > self._most_skipped_seconds:
            self._counts_from = self._noted = self._steps
            self._begin = self._last = now
            self._cpu_begin = time.process_time()

    def _note(self, device: torch.device) -> None:
        """The time since the last note."""
        assert self._counts_from is not None
        wait_for(device)
        now, steps = time.perf_counter(), self._steps - self._noted
        self.seconds += [(now - self._last) / steps] * steps
        self.cpu_seconds = (time.process_time() - self._cpu_begin) / (self._steps - self._counts_from)
        self._last, self._noted = now, self._steps

    def _is_over(self, trainer: pl.Trainer) -> bool:
        """Whether the time is up on any rank: all of them ask at the same steps, and how long that takes does not count."""
        is_over = self._counts_from is not None and self._steps - self._counts_from >= self._fewest
        is_over = is_over and self._last - self._begin > self._most_seconds
        if trainer.world_size == 1:
            return is_over
        if self._steps % _AT_ONCE:
            return False
        begin = time.perf_counter()
        is_over = trainer.strategy.reduce_boolean_decision(is_over, all=False)
        self._last += time.perf_counter() - begin
        return is_over


class _Lenient(pl.Callback):
    """Learning-rate schedulers go without what they monitor: there is no validation."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False


class Prepared(pl.Callback):
    """What the Trainer makes of the training loader.

    Attributes:
        was_here: Whether it was a fit of this process.
        loader: As Lightning has prepared it; None before the first step.
    """

    def __init__(self) -> None:
        self.was_here = False
        self.loader: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.was_here = True

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.loader = trainer.train_dataloader


class Ready:
    """One batch, again and again."""

    def __init__(self, batch: Any, steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(repeat(self._batch), self._steps)


def fit(model: pl.LightningModule, data: Any, steps: int, callback: pl.Callback, trainer_kwargs: Mapping[str, Any]) -> None:
    """Trains the model for so many steps.

    Args:
        model: Is trained.
        data: A data module or loaders, as ``fit`` takes them.
        steps: At most.
        callback: Takes part; the user's do not.
        trainer_kwargs: The user's; what would write, validate or end the training is left out. Copied, since a strategy or a
            plugin can be of one Trainer only.
    """
    kept = {name: copy.deepcopy(value) for name, value in trainer_kwargs.items() if name not in {*_OWN, "callbacks", "logger"}}
    # A step may write to its logger, unless it has none.
    kept["logger"] = DummyLogger() if trainer_kwargs.get("logger", True) else False
    named = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    with _quiet():
        pl.Trainer(**{**kept, **_OWN, "callbacks": [callback, _Lenient()], "limit_train_batches": steps}).fit(model, **named)


@contextmanager
def _quiet() -> Iterator[None]:
    """Not a word of Lightning's about fits that are measurements."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning_echo")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
