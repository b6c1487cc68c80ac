"""What each stage takes on this machine, measured one by one before the runs; the delay per read follows from it.

The step: the task's model in a Trainer, its batches already there. One worker by itself: a batch of fresh examples without any
delay. With the delay chosen, the upstream time per batch of all workers, without a step beside them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from learning.run import ENDLESS, Module
from learning.task import Task
from timing import seconds_per_batch
from torch.utils.data import DataLoader, RandomSampler, default_collate
from trainer import Clock, Ready, be_quiet, quiet_trainer

from wallclock.plans import BURST_STEPS, BURSTS, STEADY
from wallclock.source import Bursts, HeavyTail, Pace, PacedSource, SlowReads, SlowSource, Source

__all__ = ["WORKERS", "Basis", "Stage", "behind", "delay_per_read", "make_source", "measure_basis", "measure_stage"]

WORKERS = 2
_EPOCH_STEPS = 16


@dataclass(frozen=True)
class Basis:
    """What a task takes here by itself.

    Attributes:
        step_seconds: Of a step in the Trainer, its batch already there.
        fresh_seconds: Of one worker for a batch of fresh examples, the source not slowed.
    """

    step_seconds: float
    fresh_seconds: float


@dataclass(frozen=True)
class Stage:
    """One task and source, a row of ``stages.csv``.

    Attributes:
        task: Its name.
        ratio: R as wanted.
        workers: That read.
        batch_size: Examples (B).
        delay_seconds: Per read.
        step_seconds: Of a step alone.
        upstream_seconds: For a batch of fresh examples, all workers working on it (h).
        source: One of `SOURCES`.
    """

    task: str
    ratio: int
    workers: int
    batch_size: int
    delay_seconds: float
    step_seconds: float
    upstream_seconds: float
    source: str = STEADY

    @property
    def measured_ratio(self) -> float:
        """R as measured."""
        return self.upstream_seconds / self.step_seconds


def delay_per_read(ratio: float, basis: Basis, batch_size: int, workers: int) -> float:
    """The delay with which a batch takes all workers R steps' time: ``workers`` batches are read in ``workers * R`` of it.

    Raises:
        ValueError: The source is slower than that without a delay.

    Example:
        >>> basis = Basis(step_seconds=0.01, fresh_seconds=0.008)
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


def measure_basis(task: Task, seed: int, batches: int, rounds: int = 3) -> Basis:
    """Measures the task by itself."""
    data = task.make_split(seed).train

    def median(seconds: Callable[[], float]) -> float:
        return statistics.median(seconds() for _ in range(rounds))

    step = median(lambda: _step_seconds(task, data, batches))
    return Basis(step, median(lambda: seconds_per_batch(_loader(task, data, 1), batches)))


def measure_stage(task: Task, ratio: int, basis: Basis, seed: int, batches: int, source: str = STEADY) -> Stage:
    """Chooses the delay for R, and measures what the upstream time then is.

    A storage with lanes is R times as slow as the step whatever the workers do with what it answers.
    """
    if source == STEADY:
        delay = delay_per_read(ratio, basis, task.batch_size, WORKERS)
    else:
        delay = WORKERS * ratio * basis.step_seconds / task.batch_size
    stage = Stage(task.name, ratio, WORKERS, task.batch_size, delay, basis.step_seconds, math.nan, source)
    slow = make_source(stage, seed)
    slow.begin()
    upstream = seconds_per_batch(_loader(task, behind(slow, task.make_split(seed).train), WORKERS), batches)
    return replace(stage, upstream_seconds=upstream)


def make_source(stage: Stage, seed: int) -> Source:
    """The source of a stage. ``seed``: of the times of its reads, if they are random."""
    if stage.source == STEADY:
        return SlowSource(stage.delay_seconds)
    pace: Pace = HeavyTail(stage.delay_seconds, seed)
    if stage.source == BURSTS:
        pace = Bursts(stage.delay_seconds, BURST_STEPS * stage.step_seconds)
    return PacedSource(pace, lanes=stage.workers)


def behind(source: Source, data: Any) -> Any:
    """A task's data set behind a source."""
    if isinstance(source, PacedSource):
        return SlowReads(data, source)
    data.before_read = source
    return data


def _loader(task: Task, data: Any, workers: int) -> DataLoader[Any]:
    """Never at its end while something is measured."""
    endless = RandomSampler(data, replacement=True, num_samples=10_000 * task.batch_size)
    return DataLoader(data, task.batch_size, sampler=endless, num_workers=workers)


def _step_seconds(task: Task, data: Any, steps: int) -> float:
    """Mean time per step over whole epochs, without the first."""
    be_quiet()
    examples = [data[index] for index in range(4 * task.batch_size)]
    batches = [default_collate(examples[i::4]) for i in range(4)]
    clock, epochs = Clock(), 1 + max(round(steps / _EPOCH_STEPS), 1)
    trainer = quiet_trainer([clock], **ENDLESS, max_steps=epochs * _EPOCH_STEPS)
    trainer.fit(Module(task, task.rates[len(task.rates) // 2]), Ready(_EPOCH_STEPS, batches))
    return (clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1) / _EPOCH_STEPS
