"""Trainers that do nothing but what is measured, and models whose step takes a known time."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import lightning.pytorch as pl
import torch

_QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class SleepingModel(pl.LightningModule):
    """A step that takes a while, as on an accelerator: the processor is free."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.seconds:
            time.sleep(self.seconds)

    def configure_optimizers(self) -> None:
        return None


class Ready:
    """Batches that cost nothing to fetch.

    Args:
        steps: In an epoch.
        batches: In turn; None: one of images and labels.
    """

    SHAPE = (32, 3, 32, 32)

    def __init__(self, steps: int, batches: Sequence[Any] | None = None) -> None:
        self._steps = steps
        images = (torch.zeros(self.SHAPE, dtype=torch.uint8), torch.zeros(self.SHAPE[0], dtype=torch.int64))
        self._batches = [images] if batches is None else batches

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(cycle(self._batches), self._steps)


class Clock(pl.Callback):
    """When the first step began and each epoch ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.start: float | None = None
        self.ends: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        if self.start is None:
            self.start = self._clock()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.ends.append(self._clock())


def fit(
    model: pl.LightningModule, loader: Any, callbacks: list[pl.Callback], *, ckpt_path: Any = None, **options: Any
) -> pl.Trainer:
    """Trains without a word."""
    be_quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(callbacks, **options)
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def quiet_trainer(callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    """A Trainer that says and writes nothing, on the processor unless ``options`` say otherwise."""
    return pl.Trainer(callbacks=callbacks, **{**_QUIET, **options})


def be_quiet() -> None:
    """No word from Lightning, none of this package's log; its warnings stay."""
    for name in ("lightning.pytorch", "lightning_echo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
