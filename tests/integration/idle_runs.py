"""Runs whose idle fraction is known: sources and steps that sleep, and say by the clock of the machine what they did when.

The truth is computed from these stamps alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from trainer_runs import trainer

from lightning_echo import EchoCallback

MS = 1e-3
STEPS = 40


class TimedLoader:
    """Passes on the batches of a loader; remembers how long each was waited for and used, and when the first one came."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.waited: list[float] = []
        self.used: list[float] = []  # until the next batch was asked for: a step, with all that a host does around it
        self.arrived: float | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        for _ in range(len(self.loader)):
            begun = perf_counter()
            batch = next(batches)
            arrived = perf_counter()
            self.waited.append(arrived - begun)
            self.arrived = self.arrived or arrived
            yield batch
            self.used.append(perf_counter() - arrived)


class Sleeping:
    """Batches that take ``waits[k]`` seconds each."""

    def __init__(self, waits: list[float]) -> None:
        self.waits = waits

    def __len__(self) -> int:
        return len(self.waits)

    def __iter__(self) -> Iterator[Any]:
        for wait in self.waits:
            if wait:
                time.sleep(wait)
            yield torch.ones(2, 1)


class Sleeper(pl.LightningModule):
    """A step takes ``seconds``; remembers when each began and ended, and how long validation took."""

    def __init__(self, seconds: float, train_loader: Any = None, validation_seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seconds, self.train_loader, self.validation_seconds = seconds, train_loader, validation_seconds
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.validations: list[tuple[float, float]] = []

    def train_dataloader(self) -> Any:
        return self.train_loader

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 1), 1)

    def training_step(self, batch: Any) -> Any:
        self.begun.append(perf_counter())
        time.sleep(self.seconds)
        return self.layer(batch).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended.append(perf_counter())

    def on_validation_start(self) -> None:
        self.validation_begun = perf_counter()

    def validation_step(self, batch: Any) -> None:
        time.sleep(self.validation_seconds / 2)

    def on_validation_end(self) -> None:
        self.validations.append((self.validation_begun, perf_counter()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(model: Sleeper, *callbacks: Any, echo: EchoCallback | None = None, **options: Any) -> dict[str, float]:
    """Trains for an epoch; what was logged of echoing."""
    callbacks = (echo or EchoCallback(summary=False), *callbacks)
    its_trainer = trainer(**{"max_epochs": 1, "limit_val_batches": 0, "callbacks": list(callbacks), **options})
    its_trainer.fit(model)
    return {name: value.item() for name, value in its_trainer.callback_metrics.items() if name.startswith("echo/")}
