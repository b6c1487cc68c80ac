"""A setting tried: the training with it, and what a step took.

Over the same batches as the real run, with the files' pages dropped; the first steps, in which an `EchoLoader` fills its buffer,
do not count. A share of the data set is put into memory as the page cache holds it, or, where nothing opens files, by raw items
that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.predict import Setting
from lightning_echo.analysis.probing.data import TrainingData
from lightning_echo.analysis.probing.fits import WARM_UP_STEPS, Ready, StepClock, fit
from lightning_echo.analysis.probing.loading import Batches, FirstBatches, options_of
from lightning_echo.analysis.probing.pages import drop_pages
from lightning_echo.analysis.probing.parts import preparing
from lightning_echo.analysis.probing.phases import LoaderPhases
from lightning_echo.loading.loader import EchoLoader

__all__ = ["Trial", "run_trial"]

_EPOCH = 10_000  # batches: none that is tried gets to its end

Value = TypeVar("Value")


@dataclass(frozen=True)
class Trial:
    """A training that can be run for a few steps.

    Attributes:
        model: Is trained.
        data: What it is trained on, over any loader.
        loader: As Lightning has prepared it.
        phases: What is known of it.
        trainer_kwargs: The user's.
        most_seconds: The longest time of a run.
    """

    model: pl.LightningModule
    data: TrainingData
    loader: DataLoader[Any]
    phases: LoaderPhases
    trainer_kwargs: Mapping[str, Any]
    most_seconds: float

    def clock(self, loader: Batches | FirstBatches | Ready, steps: int) -> StepClock:
        """Trains over a loader; what a step took.

        Raises:
            ValueError: It has too few batches.
        """
        steps = min(steps, len(loader))
        return self._clock(self.data.over(loader), steps, min(WARM_UP_STEPS, steps // 2))

    def clock_echoed(self, loader: DataLoader[Any], steps: int, factor: float, insertion_point: str) -> StepClock:
        """The same with echoing; what it takes to fill the buffer does not count, however long that is."""
        filling = EchoLoader(loader, factor, insertion_point=insertion_point, num_replicas=1, rank=0).settled_at + WARM_UP_STEPS
        data = self.data.echoed(loader, factor=factor, insertion_point=insertion_point, seed=0, shard=False)
        return self._clock(data, filling + steps, filling, most_skipped_seconds=math.inf)

    def _clock(self, data: Any, steps: int, skipped: int, **options: float) -> StepClock:
        clock = StepClock(self.most_seconds, skipped, fewest=self.loader.num_workers, **options)
        fit(self.model, data, steps, clock, self.trainer_kwargs)
        if not clock.seconds:
            raise ValueError("too few batches in the time there is to measure a step: give more seconds, or smaller batches")
        return clock


def run_trial(trial: Trial, setting: Setting, steps: int) -> Spread:
    """Seconds of a step with a setting.

    Args:
        trial: The training.
        setting: What is tried.
        steps: That count, at most.

    Raises:
        ValueError: It cannot be tried here.
    """
    for name in ("storage_speedup", "step_speedup"):
        if getattr(setting, name) != 1:
            raise ValueError(f"{name}={getattr(setting, name):g} cannot be tried on this machine, only predicted")
    if setting.cached_fraction and setting.factor > 1:
        raise ValueError("cached_fraction and factor > 1 cannot be tried together, only predicted")
    workers = trial.loader.num_workers if setting.workers is None else setting.workers
    drop_pages(trial.phases.files)
    if setting.factor > 1:
        clock = trial.clock_echoed(_to_echo(trial, workers), steps, setting.factor, setting.insertion_point)
    else:
        clock = trial.clock(_plain(trial, setting.cached_fraction, workers), steps)
    # A fresh batch, which steps wait for, comes once in so many steps.
    return Spread.of(clock.seconds, max(workers, 1) * math.ceil(setting.factor))


def _plain(trial: Trial, cached_fraction: float, workers: int) -> Batches | FirstBatches:
    phases, real = trial.phases, trial.phases.real
    if not isinstance(real, Batches):
        if cached_fraction or workers != trial.loader.num_workers:
            raise ValueError(
                "workers and cached_fraction of a stream cannot be tried, only predicted: change it and analyze again"
            )
        return real
    part, indices = real.part, real.indices
    if cached_fraction and len(phases.files) > 1:
        for path in _share_of(phases.files, cached_fraction):
            Path(path).read_bytes()
    elif cached_fraction and phases.kept and phases.raw is not None and phases.in_memory is not None:
        kept = {index: phases.kept[index] for index in _share_of(list(phases.kept), cached_fraction)}
        part, indices = partial(preparing, phases.raw, kept), phases.in_memory.indices
    elif cached_fraction:
        raise ValueError(
            "cached_fraction cannot be tried, only predicted: this data set opens fewer than two files, and nothing was kept"
        )
    return Batches(trial.loader, part, indices, workers)


def _share_of(values: Sequence[Value], share: float) -> list[Value]:
    """So many of them, evenly spread."""
    return [value for number, value in enumerate(values) if int((number + 1) * share) > int(number * share)]


def _to_echo(trial: Trial, workers: int) -> DataLoader[Any]:
    """The same batches as the real run, often enough for a long epoch."""
    loader, real = trial.loader, trial.phases.real
    if isinstance(real, Batches):
        indices = list(real.indices) * -(-_EPOCH // len(real))
        options = {"collate_fn": loader.collate_fn, **options_of(loader, workers)}
        if loader.batch_size is None:
            loader = DataLoader(loader.dataset, batch_sampler=indices, **options)
        else:
            order = [index for batch in indices for index in batch]
            sampler: Any = _Again(order) if trial.phases.takes_ahead else order
            loader = DataLoader(loader.dataset, loader.batch_size, sampler=sampler, **options)
    elif workers != loader.num_workers:
        raise ValueError("workers of a stream cannot be tried, only predicted: change them and analyze again")
    return loader


class _Again(list[Any]):
    """Indices that are the same in every pass, which an `EchoLoader` takes for a promise."""

    def set_epoch(self, epoch: int) -> None:
        """There is nothing to change."""
