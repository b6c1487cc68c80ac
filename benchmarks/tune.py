"""What `StallAnalyzer.prove` keeps, against a full grid of settings; and the gains that it proves, against longer trainings.

The rules were fixed before the first run:

* **Pipelines.** Eight, whose stages sleep or work for known times. One is not starved; each of the others has another cure. Data
  that fits into memory has 32 batches and is shuffled; the other sets are longer than any memory.
* **What is kept.** A pipeline is analyzed once, and its advice is proved twice. `to_keep` of the first proof is applied as a user
  does: ``num_workers`` of the ``DataLoader``, and an `EchoCallback`. None: the training as it is.
* **The truth** is a ``Trainer.fit``, by a clock of this benchmark. The first eight steps of an epoch do not count, nor those in
  which a cache is filled. The others count in groups of eight: whole turns of the workers and of the factors.
* **The grid**: 0, 1 and 2 workers, 1 and 8 reads in flight where threads may read, no cache and one of all examples where they
  fit, no echoing and factors 2 and 4 at `before_augmentation` and `after_augmentation`. (The later points reuse collation,
  too, and `after_read` redoes decoding: that makes no step shorter here.) No cell counts as shorter than a step of the model
  alone.
* **Within 5%.** The plain training, the proved settings and the two best cells are trained again, in turns after each proof, so
  that a cell is not the best by luck. The setting that is kept may take 1.05 times as long as the better cell.
* **Coverage.** The gain of a proved setting in these turns (geometric mean) has to be in its 95% interval, for 90% of all
  intervals. ``noise %`` is its own standard error: intervals that are not wider than that miss it by chance.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from report import Cell, Table, progress, verdict
from torch.utils.data import DataLoader
from trainer import Ready, SleepingModel, fit

from lightning_echo import EchoCallback, StagedDataset, StallAnalyzer
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.report import in_words
from lightning_echo.analysis.result import ProvedGain, to_keep

_BATCH_SIZE, _STEP = 8, 0.030  # seconds: the hand-over of a batch, about one millisecond, is not what is judged here
_MOST_OF_BEST, _COVERED = 1.05, 0.9
_GROUP = 8  # steps: a multiple of the workers, and of the workers times a factor
_BATCHES, _TOO_MANY = 32, 10**10  # of data that fits into memory; examples of data that does not
_CACHE_SIZE = "16MiB"  # for all that fits, which takes 10
_SIDE, _SIDE_OF_FITTING = 32, 112  # pixels: so large that the size of a cache, in whole MiB, is near what was tried
_POINTS = ("before_augmentation", "after_augmentation")


class _Pipeline(NamedTuple):
    """Milliseconds per example. Reading sleeps; the other stages work if ``works``, and sleep otherwise."""

    name: str
    workers: int
    read: float
    decode: float = 0.0
    augment: float = 0.0
    works: bool = False
    reads_concurrently: bool = False
    fits: bool = False


_PIPELINES = (
    _Pipeline("not starved", 2, read=1.5),
    _Pipeline("no workers", 0, read=3),
    _Pipeline("few workers", 1, read=6),
    _Pipeline("reads that threads may overlap", 1, read=15, reads_concurrently=True),
    _Pipeline("costly decoding of few examples", 1, read=1, decode=9, fits=True),
    _Pipeline("costly augmentation", 1, read=1, augment=12, works=True),
    _Pipeline("a very slow source", 1, read=18),
    _Pipeline("reading and augmentation", 1, read=7.5, augment=3, works=True),
)


class _Effort(NamedTuple):
    """How much is measured. A cell of the grid and an arm of the turns: steps, or those of so many seconds if that is less."""

    analysis: float  # seconds
    proof: float
    proofs: int
    cell: tuple[int, float]
    arm: tuple[int, float]
    turns: int  # after each proof
    points: tuple[str, ...]


_FULL = _Effort(analysis=20, proof=20, proofs=2, cell=(32, 0.8), arm=(64, 2.5), turns=2, points=_POINTS)
_QUICK = _Effort(analysis=6, proof=4, proofs=1, cell=(16, 0.4), arm=(32, 1), turns=2, points=_POINTS[:1])
_COLUMNS = (
    *("pipeline", "plain ms", "kept", "kept ms", "best of the grid", "best ms", "step alone ms", "cells"),
    *("kept / best", "passed"),
)
_GAIN_COLUMNS = ("pipeline", "setting", "proof", "blocks", "gain", "low", "high", "trained again", "noise %", "covered", "passed")


def tune(quick: bool) -> list[Table]:
    effort = _QUICK if quick else _FULL
    alone = _seconds_per_step(None, TrainingSetting(), *effort.arm)
    rows, gains = list[tuple[Cell, ...]](), list[tuple[Cell, ...]]()
    for pipeline in _PIPELINES[2:3] if quick else _PIPELINES:
        row, found = _tuned(pipeline, alone, effort)
        rows.append(row)
        gains += found
    share = statistics.fmean(row[-2] == "yes" for row in gains)
    gains.append(("all", "", "", "", "", "", "", "", "", f"{share:.0%}", verdict(share >= _COVERED)))
    text = (
        f"batch {_BATCH_SIZE}, a step of {_STEP * 1e3:g} ms; proofs of {effort.proof:g} s; kept and best: means of "
        f"{effort.proofs * effort.turns} trainings in turn; required: {_MOST_OF_BEST:g} times the best cell, or the step alone"
    )
    about = f"{effort.proofs} proofs of each pipeline; required: {_COVERED:.0%} of the 95% intervals have the gain of the turns"
    return [Table("tune", text, _COLUMNS, rows), Table("tune_gains", about, _GAIN_COLUMNS, gains)]


def _tuned(pipeline: _Pipeline, alone: float, effort: _Effort) -> tuple[tuple[Cell, ...], list[tuple[Cell, ...]]]:
    """Returns the row of a pipeline, and those of its gains."""
    plain = TrainingSetting()
    cells = {cell: _cell(pipeline, cell, effort) for cell in _grid(pipeline, effort.points)}
    best = sorted(cells, key=lambda cell: cells[cell])[:2]
    proofs, found = list[tuple[ProvedGain, ...]](), dict[TrainingSetting, list[float]]()
    for proof in _proofs(pipeline, effort):
        proofs.append(proof)
        _add_turns(pipeline, [plain, *(each.setting for each in proof), *best], effort, found)
    kept = to_keep(proofs[0])
    setting = plain if kept is None else kept.setting
    means = {arm: statistics.fmean(seconds) for arm, seconds in found.items()}
    better = min(best, key=lambda cell: means[cell])
    ratio = means[setting] / max(means[better], alone)
    row = (
        *(pipeline.name, means[plain] * 1e3, in_words(setting), means[setting] * 1e3, in_words(better), means[better] * 1e3),
        *(alone * 1e3, len(cells), ratio, verdict(ratio <= _MOST_OF_BEST)),
    )
    gains = [
        _gain(pipeline, number, each, found[plain], found[each.setting])
        for number, proof in enumerate(proofs, start=1)
        for each in proof
    ]
    return row, gains


def _proofs(pipeline: _Pipeline, effort: _Effort) -> Iterator[tuple[ProvedGain, ...]]:
    """Yields the gains of each proof; none of them where the advice is to change nothing."""
    progress(f"tune, {pipeline.name}: analysis")
    model, loader = SleepingModel(_STEP), _loader(pipeline, pipeline.workers)
    analyzer = StallAnalyzer(model, loader, trainer_kwargs={"accelerator": "cpu"}, say=lambda message: None)
    analysis = analyzer.run(seconds=effort.analysis)
    for number in range(effort.proofs):
        progress(f"tune, {pipeline.name}: proof {number + 1} of {in_words(analysis.verdict.setting)}")
        yield analyzer.prove(analysis, seconds=effort.proof).proved if analysis.verdict.remedies else ()


def _gain(pipeline: _Pipeline, number: int, proved: ProvedGain, plain: list[float], tried: list[float]) -> tuple[Cell, ...]:
    ratios = [math.log(before / after) for before, after in zip(plain, tried, strict=True)]
    gain = math.exp(statistics.fmean(ratios))
    noise = 100 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return (
        *(pipeline.name, in_words(proved.setting), number, proved.blocks, proved.gain, proved.low, proved.high),
        *(gain, noise, "yes" if proved.low <= gain <= proved.high else "no", ""),
    )


# ---------------------------------------------------------------------- grid


def _grid(pipeline: _Pipeline, points: tuple[str, ...]) -> Iterator[TrainingSetting]:
    reads = (1, 8) if pipeline.reads_concurrently else (1,)
    caches: list[dict[str, Any]] = [{}]
    if pipeline.fits:
        caches.append({"cached_fraction": 1.0, "hold": "loaded", "cache_size": _CACHE_SIZE})
    echoes: list[dict[str, Any]] = [
        {},
        *({"factor": factor, "insertion_point": point} for point in points for factor in (2.0, 4.0)),
    ]
    for workers, ahead, cache, echo in product((0, 1, 2), reads, caches, echoes):
        yield TrainingSetting(workers, reads_in_flight=ahead, **cache, **echo)


def _cell(pipeline: _Pipeline, cell: TrainingSetting, effort: _Effort) -> float:
    progress(f"tune, {pipeline.name}: grid, {in_words(cell)}")
    return _seconds_per_step(pipeline, cell, *effort.cell)


def _add_turns(
    pipeline: _Pipeline, arms: Sequence[TrainingSetting], effort: _Effort, found: dict[TrainingSetting, list[float]]
) -> None:
    """Adds the seconds per step of each arm in each turn. Every other turn is backwards."""
    different = list(dict.fromkeys(arms))
    for turn in range(effort.turns):
        progress(f"tune, {pipeline.name}: turn {turn + 1} of {effort.turns}")
        for arm in different if turn % 2 == 0 else reversed(different):
            found.setdefault(arm, []).append(_seconds_per_step(pipeline, arm, *effort.arm))


# ---------------------------------------------------------------------- training


class _Staged(StagedDataset):
    """Every stage takes its time."""

    def __init__(self, pipeline: _Pipeline) -> None:
        self._pipeline = pipeline
        self.reads_concurrently = pipeline.reads_concurrently

    def __len__(self) -> int:
        return _BATCHES * _BATCH_SIZE if self._pipeline.fits else _TOO_MANY

    def read(self, index: int) -> bytes:
        _spend(self._pipeline.read, works=False)
        return bytes(1000)

    def decode(self, raw: bytes) -> torch.Tensor:
        _spend(self._pipeline.decode, works=self._pipeline.works)
        return _example(self._pipeline)

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        _spend(self._pipeline.augment, works=self._pipeline.works)
        return example + 1


def _example(pipeline: _Pipeline | None) -> torch.Tensor:
    side = _SIDE_OF_FITTING if pipeline is not None and pipeline.fits else _SIDE
    return torch.zeros((3, side, side), dtype=torch.uint8)


def _spend(milliseconds: float, *, works: bool) -> None:
    """Sleeps for so long, or keeps a processor busy for so long, whoever else it runs meanwhile."""
    if not works:
        time.sleep(milliseconds / 1e3)
        return
    end = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < end:
        pass


class _Clock(pl.Callback):
    """Seconds of at most ``steps`` steps, in groups; ends the training after them, or after ``most_seconds`` of them."""

    def __init__(self, steps: int, most_seconds: float, filling: int) -> None:
        self._steps, self._most_seconds, self._filling = steps, most_seconds, filling
        self._done = self._of_epoch = 0
        self._began: float | None = None
        self.seconds, self.steps = 0.0, 0

    def on_train_epoch_start(self, *args: Any) -> None:
        self._of_epoch, self._began = 0, None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        now = time.perf_counter()
        self._done, self._of_epoch = self._done + 1, self._of_epoch + 1
        if self._done < self._filling or self._of_epoch % _GROUP:
            return
        if self._began is not None:
            self.seconds, self.steps = self.seconds + now - self._began, self.steps + _GROUP
        self._began = now
        if self.steps >= self._steps or self.seconds >= self._most_seconds:
            trainer.should_stop = True


def _seconds_per_step(pipeline: _Pipeline | None, setting: TrainingSetting, steps: int, most_seconds: float) -> float:
    """Returns the seconds per step of a training; without a pipeline, of the model alone."""
    filling = math.ceil(_BATCHES * setting.factor) if setting.hold else 0
    clock = _Clock(steps, most_seconds, filling)
    callbacks: list[pl.Callback] = [clock]
    if setting.options:  # 1 read in flight is said, too: by default, it may be more
        options = {**setting.options, "reads_in_flight": setting.reads_in_flight}
        callbacks.append(EchoCallback(summary=False, **options))
    workers = setting.workers if pipeline is None or setting.workers is not None else pipeline.workers
    loader = (
        Ready(_GROUP + steps, [torch.stack([_example(None)] * _BATCH_SIZE)])
        if pipeline is None
        else _loader(pipeline, workers or 0)
    )
    fit(SleepingModel(_STEP), loader, callbacks, max_epochs=-1)
    return clock.seconds / clock.steps


def _loader(pipeline: _Pipeline, workers: int) -> DataLoader[Any]:
    return DataLoader(_Staged(pipeline), _BATCH_SIZE, shuffle=pipeline.fits, num_workers=workers)
