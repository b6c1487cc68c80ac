"""Short trainings: how long a step takes, with a batch that is ready, and with batches from a loader.

Each training is a real ``Trainer.fit``, without validation, logging, checkpoints and the user's callbacks, because these must not
take part in a measurement.
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

from lightning_echo.analysis.probing.transfers import wait_for

__all__ = ["WARM_UP_STEPS", "PreparedLoader", "RepeatedBatch", "StepClock", "fit"]

WARM_UP_STEPS = 5
# Number of steps between two synchronisations with a device that runs behind the host, or with the clocks of the other ranks.
_SYNCHRONISED_EVERY = 10
_FIXED_OPTIONS: dict[str, Any] = {
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
    """Measures the seconds of each step, after the first ones.

    On a device that runs behind the host, the seconds are means of ten steps.

    Args:
        most_seconds: The fit ends after this time, on all ranks with the same step.
        skipped: Number of first steps that do not count; at least 1.
        most_skipped_seconds: Skipping ends after this time. Default: half of ``most_seconds``.
        fewest: Least number of steps that count, however long they take.

    Attributes:
        seconds: Seconds of each step that counts.
        cpu_seconds: Processor time of this process per step, of all its threads together.
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
        elif self._steps - self._noted == (_SYNCHRONISED_EVERY if pl_module.device.type == "cuda" else 1):
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
        """Adds the steps since the last call."""
        assert self._counts_from is not None
        wait_for(device)
        now, steps = time.perf_counter(), self._steps - self._noted
        self.seconds += [(now - self._last) / steps] * steps
        self.cpu_seconds = (time.process_time() - self._cpu_begin) / (self._steps - self._counts_from)
        self._last, self._noted = now, self._steps

    def _is_over(self, trainer: pl.Trainer) -> bool:
        """Whether the time is up on any rank. All ranks call this at the same steps, and the time of the call does not count."""
        is_over = self._counts_from is not None and self._steps - self._counts_from >= self._fewest
        is_over = is_over and self._last - self._begin > self._most_seconds
        if trainer.world_size == 1:
            return is_over
        if self._steps % _SYNCHRONISED_EVERY:
            return False
        begin = time.perf_counter()
        is_over = trainer.strategy.reduce_boolean_decision(is_over, all=False)
        self._last += time.perf_counter() - begin
        return is_over


class _Lenient(pl.Callback):
    """Lets learning-rate schedulers work without the metric that they monitor, since there is no validation."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False


class PreparedLoader(pl.Callback):
    """Takes the training loader as the Trainer has prepared it.

    Attributes:
        was_here: Whether the fit ran in this process.
        loader: The loader; None before the first step.
    """

    def __init__(self) -> None:
        self.was_here = False
        self.loader: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.was_here = True

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.loader = trainer.train_dataloader


class RepeatedBatch:
    """A loader that yields one batch again and again.

    Args:
        batch: The batch.
        steps: How many times.
    """

    def __init__(self, batch: Any, steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(repeat(self._batch), self._steps)


def fit(model: pl.LightningModule, data: Any, steps: int, callback: pl.Callback, trainer_kwargs: Mapping[str, Any]) -> None:
    """Trains the model for a few steps.

    Args:
        model: The model that is trained.
        data: A data module or loaders, as ``Trainer.fit`` takes them.
        steps: Largest number of steps.
        callback: Takes part; the user's callbacks do not.
        trainer_kwargs: The user's options of the Trainer, without those that would write, validate or end the training. They are
            copied, since a strategy or a plugin belongs to one Trainer only.
    """
    left_out = {*_FIXED_OPTIONS, "callbacks", "logger"}
    options = {name: copy.deepcopy(value) for name, value in trainer_kwargs.items() if name not in left_out}
    options |= {**_FIXED_OPTIONS, "callbacks": [callback, _Lenient()], "limit_train_batches": steps}
    # A step may write to its logger, unless the user has switched logging off.
    options["logger"] = DummyLogger() if trainer_kwargs.get("logger", True) else False
    named = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    with _quiet():
        pl.Trainer(**options).fit(model, **named)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Lightning's messages about fits that are only measurements."""
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
