"""What a stall analysis predicts of a setting, against what a training with that setting takes.

Pipelines whose stages sleep (and one that works) for known times: bound by fetching, by preparation, by the step. Each is
analyzed once and tried with everything that the analysis can be asked; a faster storage and a faster accelerator are other
pipelines.

`stalls_reads` does the same for reads in flight: reads that sleep, decoding that works, steps that sleep.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from report import Table, progress, verdict
from torch.utils.data import DataLoader
from trainer import SleepingModel

from lightning_echo import StagedDataset, StallAnalyzer
from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.predict import Prediction, TrainingSetting
from lightning_echo.analysis.report import in_words
from lightning_echo.analysis.sources import StepClock, fit

_BATCH_SIZE = 16
_MEDIAN, _WORST = 0.05, 0.08
_KWARGS = {"accelerator": "cpu"}
_COLUMNS = ("pipeline", "workers", "setting", "predicted ms", "measured ms", "limit", "error %", "passed")


@dataclass(frozen=True)
class Pipeline:
    """Milliseconds per example of what sleeps, and of what works; of a step what sleeps."""

    name: str
    read: float
    decode: float
    augment: float
    step: float
    work: float = 0.0
    batch_size: int = _BATCH_SIZE


_PIPELINES = (
    Pipeline("fetch", read=3.0, decode=0.5, augment=0.5, step=12.0),
    Pipeline("prep", read=0.5, decode=1.0, augment=1.5, step=10.0),
    Pipeline("step", read=0.2, decode=0.2, augment=0.2, step=14.0),
    Pipeline("work", read=0.5, decode=0.2, augment=0.2, step=10.0, work=1.0),
)


_READS = (4, 16, 64)
_WAITING = tuple(  # with their workers
    (Pipeline(f"read {read:g}, work {work:g}, step {step:g}, batch {size}", read, 0.0, 0.0, step, work, size), workers)
    for read, work, step, size, workers in (
        (5, 0.1, 10, 16, 1),
        (10, 0.5, 20, 16, 1),
        (20, 1, 20, 16, 1),
        (20, 0.2, 10, 8, 1),
        (5, 1, 50, 32, 1),
        (20, 2, 50, 16, 1),
        (10, 1, 5, 8, 1),
        (10, 0.5, 30, 32, 2),
        (20, 1, 50, 32, 2),
        (20, 0.2, 5, 8, 2),
        (10, 2, 20, 16, 2),
        (5, 1, 20, 16, 2),
    )
)


class Staged(StagedDataset):
    """Every stage takes its time."""

    reads_concurrently = True

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def __len__(self) -> int:
        return 100_000

    def read(self, index: int) -> bytes:
        _sleep(self.pipeline.read)
        return bytes(1000)

    def decode(self, raw: bytes) -> torch.Tensor:
        _sleep(self.pipeline.decode)
        _work(self.pipeline.work)
        return torch.zeros(3, 8, 8)

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        _sleep(self.pipeline.augment)
        return example + 1


def stalls(quick: bool) -> Table:
    steps = 30 if quick else 100
    pipelines = [(pipeline, workers) for pipeline in _PIPELINES for workers in (1, 2)]
    rows = [row for pipeline, workers in (pipelines[:1] if quick else pipelines) for row in _rows(pipeline, workers, steps)]
    errors = [abs(row[-2]) / 100 for row in rows]
    for name, error, most in (("median", statistics.median(errors), _MEDIAN), ("worst", max(errors), _WORST)):
        rows.append(("all", "", f"{name} error", "", "", "", 100 * error, verdict(error <= most)))
    text = (
        f"batch {_BATCH_SIZE}, {steps} steps a phase and a trial; an analysis of each pipeline with so many workers, and each "
        f"setting tried once; required of the errors: median {_MEDIAN:.0%}, worst {_WORST:.0%}"
    )
    return Table("stalls", text, _COLUMNS, rows)


def stalls_reads(quick: bool) -> Table:
    steps = 30 if quick else 100
    rows = [row for pipeline, workers in (_WAITING[:1] if quick else _WAITING) for row in _reads_of(pipeline, workers, steps)]
    error = statistics.median(abs(row[-2]) / 100 for row in rows)
    rows.append(("all", "", "median error", "", "", "", 100 * error, verdict(error <= _MEDIAN)))
    text = (
        f"{steps} steps a phase and a trial; an analysis of each pipeline (milliseconds per example, and of a step), and each "
        f"number of reads in flight tried once; required of the errors: median {_MEDIAN:.0%}"
    )
    return Table("stalls_reads", text, _COLUMNS, rows)


def _reads_of(pipeline: Pipeline, workers: int, steps: int) -> list[tuple]:
    progress(f"reads in flight, {pipeline.name}, {workers} workers")
    analyzer = StallAnalyzer(_model(pipeline), _loader(pipeline, workers), trainer_kwargs=_KWARGS, say=lambda message: None)
    analysis = analyzer.run(steps)
    for reads in _READS:
        analysis = analyzer.check(analysis, reads_in_flight=reads)
    tried = [(each.setting, each.step_seconds.median) for each in analysis.checked]
    return [_row(pipeline, workers, setting, analysis.predict(**vars(setting)), measured) for setting, measured in tried]


def _rows(pipeline: Pipeline, workers: int, steps: int) -> list[tuple]:
    progress(f"stall analysis, {pipeline.name}, {workers} workers")
    analyzer = StallAnalyzer(_model(pipeline), _loader(pipeline, workers), trainer_kwargs=_KWARGS, say=lambda message: None)
    analysis = analyzer.run(steps)
    tried = [(TrainingSetting(), analysis.step_seconds)]
    for setting in _settings(workers, analysis.stages.points):
        analysis = analyzer.check(analysis, **setting)
        tried.append((analysis.checked[-1].setting, analysis.checked[-1].step_seconds.median))
    tried.append((TrainingSetting(storage_speedup=2.0), _trained(replace(pipeline, read=pipeline.read / 2), workers, steps)))
    tried.append((TrainingSetting(step_speedup=2.0), _trained(replace(pipeline, step=pipeline.step / 2), workers, steps)))
    return [_row(pipeline, workers, setting, analysis.predict(**vars(setting)), measured) for setting, measured in tried]


def _settings(workers: int, points: tuple[str, ...]) -> list[dict[str, object]]:
    echoed = [{"factor": factor, "insertion_point": point} for point in points for factor in (2.0, 4.0, 8.0)]
    return [{"workers": 3 - workers}, {"cached_fraction": 0.5}, {"cached_fraction": 1.0}, *echoed]


def _row(pipeline: Pipeline, workers: int, setting: TrainingSetting, predicted: Prediction, measured: float) -> tuple:
    error = predicted.step_seconds / measured - 1
    times = 1e3 * predicted.step_seconds, 1e3 * measured
    return (pipeline.name, workers, in_words(setting), *times, predicted.limit, 100 * error, verdict(abs(error) <= _WORST))


def _trained(pipeline: Pipeline, workers: int, steps: int) -> float:
    clock = StepClock()
    fit(_model(pipeline), _loader(pipeline, workers), steps, clock, _KWARGS)
    return Spread.of(clock.seconds, workers).median


def _model(pipeline: Pipeline) -> SleepingModel:
    return SleepingModel(pipeline.step / 1e3)


def _loader(pipeline: Pipeline, workers: int) -> DataLoader:
    return DataLoader(Staged(pipeline), pipeline.batch_size, shuffle=True, num_workers=workers)


def _sleep(milliseconds: float) -> None:
    time.sleep(milliseconds / 1e3)


def _work(milliseconds: float) -> None:
    """Keeps a processor busy for so long, whoever else it runs meanwhile."""
    end = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < end:
        pass
