"""Trains a few steps with another setting, over the batches of the real run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch.utils.data import DataLoader, Subset, get_worker_info

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.parts import Batches, FirstBatches, drop_pages, options_of, second_half
from lightning_echo.analysis.phases import LoaderPhases
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.prefetch import FEWEST_BATCHES, period_of
from lightning_echo.analysis.sources import WARM_UP_STEPS, RepeatedBatch, StepClock, TrainingData, fit
from lightning_echo.loader.loader import EchoLoader

# ---------------------------------------------------------------------- trying a setting
# The training runs over the batches of the real run, after the files' pages are dropped from memory. The first steps, in which an
# `EchoLoader` fills its buffer, do not count. A share of the data set may be in memory in two ways:
#
# * In a cache of ours (`TrainingSetting.hold`). The examples of that share come first and fill the cache. Only the later steps
#   count. They go once over the batches of the real run, and read the other examples for the first time.
# * In the storage's memory: in the page cache or, if nothing opens files, as raw items.

_LEAST_BYTES = 2**20  # a cache is not smaller
_SPARE = 1.05  # the cache of a trial holds the examples of its first batches, and little more
_EPOCH = 10_000  # batches of an epoch: no setting is tried for so long

Value = TypeVar("Value")


@dataclass(frozen=True)
class ShortTraining:
    """A training that can be run for a few steps (at most ``most_seconds``), over any loader in place of its own.

    ``no_pinning``: why its batches cannot be pinned, or need not be.
    """

    model: pl.LightningModule
    data: TrainingData
    loader: DataLoader[Any]
    phases: LoaderPhases
    trainer_kwargs: Mapping[str, Any]
    most_seconds: float
    no_pinning: str = ""

    def clock(self, loader: Batches | FirstBatches | RepeatedBatch, steps: int) -> StepClock:
        """Trains over a loader, and returns the clock of its steps; raises a ValueError if there are too few batches."""
        steps = min(steps, len(loader))
        return self._clock(self.data.over(loader), steps, min(WARM_UP_STEPS, steps // 2))

    def clock_echoed(self, loader: DataLoader[Any], steps: int, skipped: int = 0, **options: Any) -> StepClock:
        """Trains over a loader that is echoed. The steps in which the buffer is filled do not count, however long they take."""
        unstarted = {**options, "cache": None, "reads_in_flight": 1}
        echoed = EchoLoader(loader, num_replicas=1, rank=0, **unstarted)
        filling = max(echoed.settled_at, skipped) + WARM_UP_STEPS
        data = self.data.echoed(loader, seed=0, shard=False, **options)
        return self._clock(data, filling + steps, filling, most_skipped_seconds=math.inf)

    def _clock(self, data: Any, steps: int, skipped: int, **options: float) -> StepClock:
        clock = StepClock(self.most_seconds, skipped, fewest=self.loader.num_workers, **options)
        fit(self.model, data, steps, clock, self.trainer_kwargs)
        if not clock.seconds:
            raise ValueError("too few batches for measuring a step in this time: give more seconds, or smaller batches")
        return clock


def try_setting(training: ShortTraining, setting: TrainingSetting, steps: int, *, as_mean: bool = False) -> Spread:
    """Trains with a setting, and returns the seconds of at most ``steps`` steps; raises a ValueError if that is impossible.

    ``as_mean``: the steps count as one block, whose mean has rare long ones, too.
    """
    for name in ("storage_speedup", "step_speedup"):
        if getattr(setting, name) != 1:
            raise ValueError(f"{name}={getattr(setting, name):g} cannot be tried on this machine, only predicted")
    if setting.shared_by > 1:
        raise ValueError(f"shared_by={setting.shared_by} cannot be tried with one training, only predicted")
    if setting.cluster_workers:
        raise ValueError(f"cluster_workers={setting.cluster_workers} cannot be tried on this machine, only predicted")
    if setting.cached_fraction and setting.hold is None and (setting.factor > 1 or setting.reads_in_flight > 1):
        beside = "factor > 1" if setting.factor > 1 else "reads_in_flight > 1"
        raise ValueError(f"cached_fraction without hold and {beside} cannot be tried together, only predicted")
    if setting.pin_memory and training.no_pinning:
        raise ValueError(f"pin_memory=True cannot be tried here: {training.no_pinning}")
    workers = training.loader.num_workers if setting.workers is None else setting.workers
    if setting.prefetch_factor is not None and not workers:
        raise ValueError(f"prefetch_factor={setting.prefetch_factor} cannot be tried without workers: give workers, too")
    if setting.prefetch_factor is not None and not training.phases.batch_seconds:
        raise ValueError(
            f"prefetch_factor={setting.prefetch_factor} cannot be tried here, since there is no prediction to compare with: the "
            f"times of single batches were not measured (that takes {FEWEST_BATCHES} of them, and no stream)"
        )
    drop_pages(training.phases.files)
    if setting.hold is not None:
        clock = _clock_cached(training, setting, workers, steps)
    elif setting.factor > 1 or setting.reads_in_flight > 1:
        echoed = to_echo(training, workers, **_changes(setting))
        clock = training.clock_echoed(echoed, steps, **_options(setting))
    else:
        clock = training.clock(_plain(training, setting, workers), steps)
    # This is how often, in steps, the training waits for a fresh batch.
    period = max(workers, 1) * math.ceil(setting.factor)
    if as_mean:
        return Spread.of(clock.seconds, max(1, len(clock.seconds) // period) * period)
    return spread_of(training.phases, clock, period)


def spread_of(phases: LoaderPhases, clock: StepClock, period: int) -> Spread:
    """Returns the spread of the steps; of blocks that all have long batches if these are rare."""
    return Spread.of(clock.seconds, max(period, period_of(phases.batch_seconds, len(clock.seconds))))


def _changes(setting: TrainingSetting) -> dict[str, Any]:
    """Returns the options of the user's loader that a setting changes, besides the number of workers."""
    return {name: value for name, value in setting.loader_options.items() if name != "num_workers"}


def _options(setting: TrainingSetting) -> dict[str, Any]:
    """Returns the options of an `EchoLoader` for a setting, without its cache."""
    options: dict[str, Any] = {"factor": setting.factor, "reads_in_flight": setting.reads_in_flight}
    return {**options, "insertion_point": setting.insertion_point} if setting.factor > 1 else options


def _plain(training: ShortTraining, setting: TrainingSetting, workers: int) -> Batches | FirstBatches:
    phases, real, cached_fraction = training.phases, training.phases.real, setting.cached_fraction
    if not isinstance(real, Batches):
        if cached_fraction or workers != training.loader.num_workers or _changes(setting):
            raise ValueError(
                "workers, pin_memory and cached_fraction of a stream cannot be tried, only predicted: change the loader and "
                "analyze again"
            )
        return real
    part, indices = real.part, real.indices
    if cached_fraction and len(phases.files) > 1:
        for path in _share_of(phases.files, cached_fraction):
            Path(path).read_bytes()
    elif cached_fraction and phases.raw_items and phases.cut_after_reading is not None and phases.in_memory is not None:
        items = {index: phases.raw_items[index] for index in _share_of(list(phases.raw_items), cached_fraction)}
        part, indices = partial(second_half, phases.cut_after_reading, items), phases.in_memory.indices
    elif cached_fraction:
        raise ValueError(
            "cached_fraction cannot be tried, only predicted: this data set opens fewer than two files, and no raw item of it is "
            "held in memory"
        )
    return Batches(training.loader, part, indices, workers, **_changes(setting))


def _clock_cached(training: ShortTraining, setting: TrainingSetting, workers: int, steps: int) -> StepClock:
    """Trains with a cache that holds the setting's share of the real run's examples."""
    phases, real = training.phases, training.phases.real
    example = phases.in_cache.get(setting.hold or "")
    if not isinstance(real, Batches) or example is None:
        raise ValueError(f"hold={setting.hold!r} cannot be tried here: the examples cannot be held in this form")
    examples = list(dict.fromkeys(index for batch in real.indices for index in batch))
    held = _share_of(examples, setting.cached_fraction)
    size = len(real.indices[0])
    first = [(held * 2)[start : start + size] for start in range(0, len(held), size)]
    first = [(batch * size)[:size] for batch in first]  # if few examples are held, they are repeated until they fill a batch
    budget = max(_LEAST_BYTES, math.ceil(_SPARE * example.bytes * len(held)))
    options = {**_options(setting), "cache": {"size": budget, "hold": setting.hold}}
    # After these steps, examples would be read a second time.
    most = max(2, int(len(real) * setting.factor) - WARM_UP_STEPS)
    skipped = math.ceil(len(first) * setting.factor)
    echoed = to_echo(training, workers, first, **_changes(setting))
    return training.clock_echoed(echoed, min(steps, most), skipped, **options)


def _share_of(values: Sequence[Value], share: float) -> list[Value]:
    """Returns this share of the values, evenly spread."""
    return [value for number, value in enumerate(values) if int((number + 1) * share) > int(number * share)]


@dataclass
class _InitOfWhole:
    """A ``worker_init_fn`` that sees the user's data set, where the loader has a ``Subset`` of it."""

    users: Callable[[int], None]

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # torch's own class lets nobody set it, by setattr
        self.users(worker)


def to_echo(training: ShortTraining, workers: int, first: Sequence[list[Any]] = (), **changes: Any) -> DataLoader[Any]:
    """Returns a loader for the ``first`` batches, and then those of the real run, repeated for a long epoch.

    ``changes`` are options in place of the user's. If an `EchoLoader` takes the training's batches ahead, in a thread, it does so
    here: the order is that of a ``Subset``. A list of indices as a sampler would be the user's own code, and each step would pay
    for the hand-over of its batch.
    """
    loader, real = training.loader, training.phases.real
    if isinstance(real, Batches):
        indices = [*first, *(list(real.indices) * -(-_EPOCH // len(real)))]
        options = {"collate_fn": loader.collate_fn, **options_of(loader, workers), **changes}
        if loader.batch_size is None:
            loader = DataLoader(loader.dataset, batch_sampler=indices, **options)
        else:
            order = [index for batch in indices for index in batch]
            if training.phases.takes_ahead:
                if loader.worker_init_fn is not None:
                    options["worker_init_fn"] = _InitOfWhole(loader.worker_init_fn)
                return DataLoader(Subset(loader.dataset, order), loader.batch_size, **options)
            loader = DataLoader(loader.dataset, loader.batch_size, sampler=order, **options)
    elif workers != loader.num_workers or changes:
        raise ValueError(
            "workers and pin_memory of a stream cannot be tried, only predicted: change the loader and analyze again"
        )
    return loader
