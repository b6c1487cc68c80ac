"""What the Trainer tests share: a data set that says what was done where, a model that remembers its batches, a quiet Trainer."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_echo import EchoDataModule, EchoLoader, StagedDataset, insertion
from lightning_echo.training.loaders import leaves_of

POINTS = tuple(point.value for point in insertion.POINTS)  # a Trainer can run all of them
Noise = tuple[float, ...]
Batch = tuple[tuple[int, ...], tuple[Noise, ...]]


class Scans(StagedDataset):
    """Example ``index``: the index, the process it was read in, and three numbers drawn while augmenting.

    The three numbers (torch, numpy, ``random``) name one run of the augmentation: from `after_augmentation` on, all uses of one
    fresh example share them, and no other has them. Reading takes a random time of up to ``delay`` seconds, appends a line with
    the index to ``log``, and raises at index ``fail_at``.
    """

    def __init__(self, length: int = 22, delay: float = 0.0, log: Path | None = None, fail_at: int | None = None) -> None:
        self.length, self.delay, self.log, self.fail_at = length, delay, log, fail_at

    def __len__(self) -> int:
        return self.length

    def read(self, index: Any) -> Any:
        if index == self.fail_at:
            raise LookupError("unreadable")
        if self.delay:
            time.sleep(random.SystemRandom().random() * self.delay)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        return f"{index} {os.getpid()}".encode()

    def decode(self, raw: Any) -> Any:
        return dict(zip(("index", "pid"), map(int, raw.split()), strict=True))

    def augment(self, example: Any) -> Any:
        noise = [torch.rand((), dtype=torch.float64).item(), np.random.rand(), random.random()]
        return {**example, "noise": torch.tensor(noise, dtype=torch.float64)}


class Data(pl.LightningDataModule):
    """A data module as a user writes it. ``asked`` counts what Lightning asks it for. ``scans``: options of the data set."""

    def __init__(self, workers: int = 0, batch_size: int = 4, loader_options: Any = None, **scans: Any) -> None:
        super().__init__()
        self.workers, self.batch_size, self.scans = workers, batch_size, scans
        self.loader_options = {"shuffle": True} if loader_options is None else loader_options
        self.asked: Counter[str] = Counter()

    def train_dataloader(self) -> Any:
        self.asked["train"] += 1
        return DataLoader(Scans(**self.scans), self.batch_size, num_workers=self.workers, **self.loader_options)

    def val_dataloader(self) -> Any:
        self.asked["val"] += 1
        return DataLoader(Scans(6), batch_size=3)


class Recorder(pl.LightningModule):
    """Remembers every batch that reaches it, and draws no random numbers itself.

    With ``reads_stepping`` it reads ``trainer.estimated_stepping_batches`` to configure its optimizer. A step takes a random time
    of up to ``delay`` seconds.
    """

    def __init__(self, reads_stepping: bool = False, delay: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.zeros_(self.layer.bias)
        self.reads_stepping, self.delay = reads_stepping, delay
        self.batches: list[Batch] = []
        self.pids: list[set[int]] = []
        self.epochs: list[int] = []  # for each batch the epoch that it came in
        self.validated_at: list[int] = []  # global steps at which a validation began

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        if self.delay:
            time.sleep(random.SystemRandom().random() * self.delay)
        self.batches.append((tuple(batch["index"].tolist()), tuple(map(tuple, batch["noise"].tolist()))))
        self.pids.append(set(batch["pid"].tolist()))
        self.epochs.append(self.current_epoch)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated_at.append(self.global_step)
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> Any:
        target = batch["index"].float()[:, None] / 22
        return (self.layer(batch["noise"].float()) - target).pow(2).mean()

    def configure_optimizers(self) -> Any:
        if self.reads_stepping:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    @property
    def sizes(self) -> list[list[int]]:
        """Batch sizes, epoch by epoch."""
        return [[len(batch[0]) for batch in epoch] for epoch in self.by_epoch]

    @property
    def steps(self) -> list[int]:
        """Batches of each epoch."""
        return [len(epoch) for epoch in self.by_epoch]

    @property
    def by_epoch(self) -> list[list[Batch]]:
        epochs = range(self.epochs[0], self.epochs[-1] + 1)
        return [[batch for batch, its in zip(self.batches, self.epochs, strict=True) if its == epoch] for epoch in epochs]

    @property
    def weights(self) -> list[float]:
        return [value for parameter in self.parameters() for value in parameter.detach().flatten().tolist()]


def trainer(**options: Any) -> pl.Trainer:
    """A Trainer that writes and shows nothing, unless told to."""
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    usual: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "num_sanity_val_steps": 0}
    return pl.Trainer(**{**off, **usual, **options})


@dataclass
class Run:
    """What is left after ``fit``."""

    model: Any
    data: Any
    trainer: pl.Trainer

    @property
    def loader(self) -> EchoLoader:
        if isinstance(self.data, EchoLoader):
            return self.data
        loader: EchoLoader = self.data.loader
        return loader


def fit(data: Any, *, model: Any = None, ckpt_path: Any = None, **options: Any) -> Run:
    """Trains on a data module, or on a loader beside a validation loader; returns what is left."""
    run = Run(Recorder() if model is None else model, data, trainer(**options))
    if isinstance(data, pl.LightningDataModule):
        run.trainer.fit(run.model, datamodule=data, ckpt_path=ckpt_path)
    else:
        run.trainer.fit(run.model, data, Data().val_dataloader(), ckpt_path=ckpt_path)
    return run


def echoed(factor: float = 2.5, *, point: str = "after_augmentation", seed: int | None = 7, **options: Any) -> EchoDataModule:
    """An echoing data module around `Data`; echo options by name, the rest are options of `Data`."""
    echo = {name: options.pop(name) for name in ("buffer_size", "epoch_length", "reuse", "shard") if name in options}
    return EchoDataModule(Data(**options), factor, insertion_point=point, seed=seed, **echo)


def first_uses(batches: Iterable[Batch]) -> list[list[int]]:
    """Per batch the indices of the examples whose noise was never seen before: the fresh ones, from `after_augmentation` on."""
    seen: set[Noise] = set()
    fresh = []
    for indices, noises in batches:
        new = [index for index, noise in zip(indices, noises, strict=True) if noise not in seen]
        seen.update(noises)
        fresh.append(new)
    return fresh


def fresh_stream(batches: Iterable[Batch]) -> list[int]:
    """The indices of the fresh examples in the order in which they came."""
    return [index for new in first_uses(batches) for index in new]


def chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """All full chunks."""
    return [items[start : start + size] for start in range(0, len(items) - size + 1, size)]


class At(pl.Callback):
    """Calls functions at the ends of chosen epochs: ``At({0: lambda trainer: ...})``."""

    def __init__(self, actions: Any) -> None:
        self.actions = actions

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        del pl_module
        if trainer.current_epoch in self.actions:
            self.actions[trainer.current_epoch](trainer)


class SetFactor(At):
    """Sets factors at the ends of chosen epochs, as a user's callback would."""

    def __init__(self, data: EchoDataModule | EchoLoader, factors: dict[int, float]) -> None:
        super().__init__({epoch: self._setter(data, factor) for epoch, factor in factors.items()})

    @staticmethod
    def _setter(data: Any, factor: float) -> Any:
        return lambda trainer: setattr(data, "factor", factor)


class Killed(Exception):
    """The end of a run that was meant to be killed."""


class SaveAt(pl.Callback):
    """Saves a checkpoint after chosen steps, counted over the run, and dies after the last one if told to."""

    def __init__(self, folder: Path, steps: Iterable[int], *, dies: bool = False) -> None:
        self.folder, self.steps, self.dies = folder, set(steps), dies

    def path(self, step: int) -> str:
        return str(self.folder / f"step-{step}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        del args
        step = trainer.fit_loop.total_batch_idx + 1
        if step in self.steps:
            trainer.save_checkpoint(self.path(step))
            if self.dies and step == max(self.steps):
                raise Killed(f"after step {step}")


def counts(run: Run) -> dict[str, tuple[int, int]]:
    """Fresh and echoed examples of each echoed loader, by name."""
    leaves = leaves_of(run.trainer.train_dataloader).items()
    return {name: (leaf.counts.fresh, leaf.counts.echoed) for name, leaf in leaves if isinstance(leaf, EchoLoader)}


def assert_resumes(make: Callable[..., Run], folder: Path, steps: Iterable[int]) -> Run:
    """From checkpoints after these steps, a run resumes as if nothing had happened. Returns the uninterrupted run.

    ``make(*callbacks, ckpt_path=...)`` trains.
    """
    save = SaveAt(folder, steps)
    whole = make(save)
    for step in sorted(save.steps):
        resumed = make(ckpt_path=save.path(step))
        assert resumed.model.batches == whole.model.batches[step:], step
        assert len(resumed.model.batches) > 0
        assert resumed.model.epochs == whole.model.epochs[step:], step
        if whole.trainer.accumulate_grad_batches == 1:  # else the model counts other steps
            assert resumed.model.validated_at == [at for at in whole.model.validated_at if at > step], step
        assert resumed.trainer.global_step == whole.trainer.global_step
        assert resumed.model.weights == whole.model.weights, step
        assert counts(resumed) == counts(whole), step
    return whole
