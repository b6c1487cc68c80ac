"""What each stage takes on this machine, measured one by one before the runs; the delay per read follows from it.

The step: the task's model in a Trainer with the epochs of the runs, its batches already there. One worker by itself: a batch of
fresh examples without any delay, and a batch at the largest factor for each insertion point, which is what is redone for each
use. With the delay chosen, the upstream time per batch of all workers, without a step beside them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learning.run import ENDLESS
from learning.task import Task
from timing import seconds_per_batch
from torch.utils.data import DataLoader, RandomSampler, default_collate
from trainer import Clock, Ready, be_quiet, quiet_trainer

from lightning_echo import EchoLoader
from wallclock.device import DeviceModule
from wallclock.source import SlowSource

__all__ = ["EPOCH_STEPS", "LARGEST_FACTOR", "WORKERS", "Basis", "Stage", "delay_per_read", "measure_basis", "points_to_run"]

WORKERS = 2
LARGEST_FACTOR = 8.0
# `TargetIdle` decides between epochs: in runs of 400 steps and more the first tenth holds two decisions and more.
EPOCH_STEPS = 16
_FEEDS = 0.8  # of the step's time at most for what is redone, so that a source can be hidden behind the rest


@dataclass(frozen=True)
class Basis:
    """What a task takes here by itself.

    Attributes:
        step_seconds: Of a step in the Trainer, its batch already there (d).
        fresh_seconds: Of one worker for a batch of fresh examples, the source not slowed.
        redone_seconds: Of one worker for a batch at `LARGEST_FACTOR`, by insertion point.
    """

    step_seconds: float
    fresh_seconds: float
    redone_seconds: dict[str, float]


@dataclass(frozen=True)
class Stage:
    """One task and source, a row of ``stages.csv``.

    Attributes:
        task: Its name.
        ratio: R as wanted; 0: the source is not slowed.
        workers: That read.
        batch_size: Examples (b).
        delay_seconds: Per read.
        step_seconds: d.
        upstream_seconds: For a batch of fresh examples, all workers working on it (b u).
        points: Insertion points of the arms, separated by spaces.
        redone_seconds: Of one worker for a batch at the largest factor, at each of these points, separated by spaces.
        epoch_steps: Steps of an epoch.
    """

    task: str
    ratio: float
    workers: int
    batch_size: int
    delay_seconds: float
    step_seconds: float
    upstream_seconds: float
    points: str
    redone_seconds: str
    epoch_steps: int

    @property
    def measured_ratio(self) -> float:
        """R as measured."""
        return self.upstream_seconds / self.step_seconds


def delay_per_read(ratio: float, basis: Basis, batch_size: int, workers: int) -> float:
    """The delay with which a batch takes all workers R steps' time: ``workers`` batches are read in ``workers * R`` of it.

    Raises:
        ValueError: The source is slower than that without a delay.

    Example:
        >>> basis = Basis(step_seconds=0.01, fresh_seconds=0.008, redone_seconds={})
        >>> round(delay_per_read(4, basis, batch_size=32, workers=2), 6)  # (2 * 4 * 10 ms - 8 ms) / 32
        0.00225
    """
    room = workers * ratio * basis.step_seconds - basis.fresh_seconds
    if room < 0:
        raise ValueError(
            f"R = {ratio:g} cannot be had with {workers} workers: without a delay one of them takes "
            f"{basis.fresh_seconds * 1e3:.3g} ms for a batch, more than {workers} x R steps of "
            f"{basis.step_seconds * 1e3:.3g} ms. Choose a larger R, or fewer workers"
        )
    return room / batch_size


def points_to_run(points: Sequence[str], basis: Basis, workers: int, cores: int) -> list[str]:
    """The best point for learning, and, where what it redoes for each use does not leave the device fed here, the next that does.

    Workers share the cores that the training process leaves them.

    Args:
        points: Best for learning first.
        basis: What is redone, and the step.
        workers: That read.
        cores: Of the machine.
    """
    busy = min(workers, max(cores - 1, 1))
    feeding = [point for point in points if basis.redone_seconds[point] <= _FEEDS * busy * basis.step_seconds]
    return list(dict.fromkeys([points[0], *feeding[:1]]))


def measure_basis(task: Task, seed: int, batches: int, rounds: int = 3) -> Basis:
    """Measures the task by itself."""
    data = task.make_split(seed).train

    def echoed(point: str) -> EchoLoader:
        return EchoLoader(_loader(task, data, 1), LARGEST_FACTOR, insertion_point=point, seed=seed)

    def median(seconds: Callable[[], float]) -> float:
        return statistics.median(seconds() for _ in range(rounds))

    return Basis(
        median(lambda: _step_seconds(task, data, batches)),
        median(lambda: seconds_per_batch(_loader(task, data, 1), batches)),
        {point: median(lambda point=point: seconds_per_batch(echoed(point), batches)) for point in task.points},
    )


def measure_stage(task: Task, ratio: float, basis: Basis, points: Sequence[str], seed: int, batches: int) -> Stage:
    """Chooses the delay for R, and measures what the upstream time then is."""
    delay = delay_per_read(ratio, basis, task.batch_size, WORKERS) if ratio else 0.0
    data = task.make_split(seed).train
    data.before_read = SlowSource(delay) if ratio else None  # type: ignore[attr-defined]
    upstream = seconds_per_batch(_loader(task, data, WORKERS), batches)
    redone = " ".join(f"{basis.redone_seconds[point]:.6f}" for point in points)
    values = (delay, basis.step_seconds, upstream)
    return Stage(task.name, ratio, WORKERS, task.batch_size, *values, " ".join(points), redone, EPOCH_STEPS)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loader(task: Task, data: Any, workers: int) -> DataLoader[Any]:
    """Never at its end while something is measured."""
    endless = RandomSampler(data, replacement=True, num_samples=10_000 * task.batch_size)
    return DataLoader(data, task.batch_size, sampler=endless, num_workers=workers)


def _step_seconds(task: Task, data: Any, steps: int) -> float:
    """Mean time per step over whole epochs, without the first."""
    be_quiet()
    examples = [data[index] for index in range(4 * task.batch_size)]
    batches = [default_collate(examples[i::4]) for i in range(4)]
    clock, epochs = Clock(), 1 + max(round(steps / EPOCH_STEPS), 1)
    trainer = quiet_trainer([clock], **ENDLESS, max_steps=epochs * EPOCH_STEPS)
    trainer.fit(DeviceModule(task, task.rates[len(task.rates) // 2]), Ready(EPOCH_STEPS, batches))
    return (clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1) / EPOCH_STEPS
