"""`StallAnalyzer`: measures one training, phase by phase, and leaves it as it was.

    what the Trainer makes of the data      one step: its loader, a batch on the device
    the loader alone                        reading, preparation, augmentation (phases.py, streams.py)
    hand-over, copy                         a batch that is ready, taken and copied
    ingestion                               the step alone
    data in memory                          the training, nothing read
    the real run                            the training, nothing in memory

The model that is trained is a copy, and so is the data that it is trained on (data.py); random numbers are put back (process.py).
With several ranks all of them measure at the same time, and what the job waits for is the slowest.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lightning_echo.analysis.checks import Trial, run_trial
from lightning_echo.analysis.measured import MeasuredStages, Spread
from lightning_echo.analysis.predict import Setting, contention
from lightning_echo.analysis.probing.copying import Copies, tapped, transferred
from lightning_echo.analysis.probing.data import TrainingData, nothing
from lightning_echo.analysis.probing.fits import Prepared, Ready, StepClock, fit
from lightning_echo.analysis.probing.pages import drop_pages
from lightning_echo.analysis.probing.phases import CHUNKS, LoaderPhases, measure_loader
from lightning_echo.analysis.probing.process import process_kept
from lightning_echo.analysis.probing.ranks import gathered
from lightning_echo.analysis.probing.streams import measure_stream
from lightning_echo.analysis.report.questions import in_words
from lightning_echo.analysis.result import Checked, StallAnalysis
from lightning_echo.fetching.source import Source

__all__ = ["StallAnalyzer"]

_FEWEST_STEPS = 4
_ENDS = ("on_train_epoch_end", "on_train_end", "on_fit_end")
_HANDED_OVER = _COPIED = 8  # batches of which it is timed
_NOT_COPIED = "left as it is after the analysis: what was edited in place in {what}, which is too large to be copied"
_PHASES = 13  # passes and fits; each takes its share of the time at most


class StallAnalyzer:
    """Measures where the time of a training's steps goes (Mohan et al. 2021, arXiv 2007.06775, section 3.2).

    Args:
        model: The user's; a copy of it is trained.
        datamodule: A data module, or a training loader; None: the model's own ``train_dataloader``. What is echoed already is
            looked at without echoing.
        trainer_kwargs: As for ``Trainer``; what writes, validates or ends the training is left out, callbacks too.
        say: Told what is done next. Default: Lightning's log, on the first rank.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> loader = DataLoader(RandomDataset(32, 640), batch_size=8, num_workers=1)
        >>> analysis = StallAnalyzer(BoringModel(), loader, trainer_kwargs={"accelerator": "cpu"}).run(steps=20)
        >>> 0 <= analysis.idle_fraction < 1
        True
    """

    def __init__(
        self,
        model: pl.LightningModule,
        datamodule: Any = None,
        *,
        trainer_kwargs: Mapping[str, Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._model, self._data = model, datamodule
        self._trainer_kwargs = dict(trainer_kwargs or {})
        self._tell = say or (lambda message: rank_zero_info(f"lightning_echo: analyzing: {message}"))
        self._trial: Trial | None = None
        self._steps = 0
        self._begun = 0.0

    def run(self, steps: int = 100, seconds: float = 60.0) -> StallAnalysis:
        """Measures so many steps in each phase, or as many as the time allows.

        Args:
            steps: At least 4, and no more than the training loader has batches.
            seconds: About how long it takes at most, but two batches in each phase are always waited for.

        Raises:
            MisconfigurationException: There is no training loader, or one that is no ``DataLoader``.
            ValueError: The loader has fewer batches than steps, or a value is impossible.
            Exception: The model or the data set raises it.
        """
        if steps < _FEWEST_STEPS:
            raise ValueError(f"steps must be >= {_FEWEST_STEPS}, got {steps!r}")
        if not seconds > 0:
            raise ValueError(f"seconds must be > 0, got {seconds!r}")
        share, self._steps, self._begun = seconds / _PHASES, steps, time.perf_counter()
        with process_kept():
            model, data = _measured(self._model), TrainingData(self._data)
            loader = self._prepare(model, data)
            phases = self._loader_alone(loader, steps, share)
            self._trial = Trial(model, data, loader, phases, self._trainer_kwargs, share)
            return StallAnalysis.of_ranks(gathered(self._train(self._trial, steps)))

    def _train(self, trial: Trial, steps: int) -> StallAnalysis:
        """What is measured of trainings, and all of it together."""
        phases, workers = trial.phases, max(trial.loader.num_workers, 1)
        self._say("hand-over and copy")
        hand_over, copies = _hand_over(trial), _copy(trial)
        self._say("ingestion rate: the step alone")
        # Where no hook was asked, the strategy transfers batches in its own way, and the batch is still on the host.
        with transferred([trial.model, *trial.data.instances] if copies.seconds else []):
            ingestion = trial.clock(Ready(copies.batch, steps), steps)
        stages = _stages(trial, hand_over, Spread.of(copies.seconds or [0.0]), ingestion)
        self._say("the training, its data in memory")
        cached = None if phases.in_memory is None else Spread.of(trial.clock(phases.in_memory, steps).seconds, workers)
        self._say("the training as it is")
        drop_pages(phases.files)
        real = Spread.of(trial.clock(phases.real, steps).seconds, workers)
        stages = replace(stages, contention=contention(stages, (cached or real).median))
        return StallAnalysis(stages, real, cached, phases.transforms, (*phases.notes, *_shared(trial)))

    def check(self, analysis: StallAnalysis, **setting: Any) -> StallAnalysis:
        """Trains with a setting and puts what that took beside what was predicted.

        Args:
            analysis: Of this analyzer's `run`.
            **setting: Options of `Setting`, as for `StallAnalysis.predict`; none: what the verdict advises.

        Returns:
            The analysis with one `Checked` more.

        Raises:
            RuntimeError: Nothing was analyzed before.
            TypeError: An option is not known.
            ValueError: The setting cannot be tried on this machine: a faster storage or accelerator, a cache of what cannot be
                kept in memory.
        """
        if self._trial is None:
            raise RuntimeError("nothing was analyzed yet: call run() first")
        tried = Setting(**setting) if setting else analysis.verdict.setting
        self._say(f"trying {in_words(tried)}")
        with process_kept():
            measured = run_trial(self._trial, tried, self._steps)
        slowest = max(gathered(measured), key=lambda each: each.median)
        return analysis.with_check(Checked(tried, slowest))

    def _say(self, message: str) -> None:
        self._tell(f"{message} ({time.perf_counter() - self._begun:.0f} s)")

    def _prepare(self, model: pl.LightningModule, data: TrainingData) -> DataLoader[Any]:
        """The training loader as Lightning prepares it."""
        self._say("what the Trainer makes of the data")
        first = Prepared()
        fit(model, data.as_given(model), 1, first, self._trainer_kwargs)
        if not first.was_here:
            raise MisconfigurationException(
                "trainer_kwargs: the strategy trains in processes that it starts anew for each fit, and nothing comes back from "
                "them: use strategy='ddp'"
            )
        if first.loader is None:
            raise MisconfigurationException("datamodule has no training batch to analyze: its train_dataloader is empty")
        loader = first.loader
        if not isinstance(loader, DataLoader):
            raise MisconfigurationException(
                f"datamodule must train on one DataLoader, got {type(loader).__name__}: analyze each loader by itself, "
                "with StallAnalyzer(model, loader)"
            )
        return loader

    def _loader_alone(self, loader: DataLoader[Any], steps: int, most_seconds: float) -> LoaderPhases:
        if not Source(loader).rebuilds or loader.batch_sampler is None:
            return measure_stream(loader, steps, _size_of(loader), most_seconds, self._say)
        batches = [list(indices) for indices in islice(iter(loader.batch_sampler), CHUNKS * steps)]
        if (shortest := min(gathered(len(batches)))) < steps:
            raise ValueError(f"steps must be at most {shortest}, the batches of the training loader, got {steps}")
        return measure_loader(loader, batches, steps, most_seconds, self._say)


def _measured(model: pl.LightningModule) -> pl.LightningModule:
    """A copy without callbacks of its own, whose trainings end silently: what is done at an end is not meant for a few steps."""
    copied = copy.deepcopy(model)
    vars(copied).update(dict.fromkeys(_ENDS, nothing), configure_callbacks=list)
    return copied


def _size_of(loader: DataLoader[Any]) -> int:
    """Examples in a batch; 1 where only the loader knows."""
    return loader.batch_size or 1


def _hand_over(trial: Trial) -> Spread:
    """Of taking batches that workers have ready."""
    workers = trial.loader.num_workers
    if not workers:
        return Spread.exactly(0.0)
    iterator, seconds = iter(trial.phases.in_memory or trial.phases.real), []
    begin = time.perf_counter()
    for _ in range(workers + 1):
        next(iterator, None)
    longest = time.perf_counter() - begin  # for as many batches as workers make at once, their start included
    for _ in range(max(2, min(_HANDED_OVER, int(trial.most_seconds / longest)))):
        time.sleep(longest)
        begin = time.perf_counter()
        if next(iterator, None) is None:
            break
        seconds.append(time.perf_counter() - begin)
    return Spread.of(seconds or [0.0])


def _copy(trial: Trial) -> Copies:
    """Of batches to the device; and a batch there."""
    copies, batches = Copies(), trial.phases.in_memory or trial.phases.real
    with tapped([trial.model, *trial.data.instances], copies):
        trial.clock(batches, _COPIED)
    if copies.batch is None:  # a strategy that does not ask the hook
        copies.batch = next(iter(batches))
    return copies


def _stages(trial: Trial, hand_over: Spread, copied: Spread, ingestion: StepClock) -> MeasuredStages:
    phases, loader = trial.phases, trial.loader
    return MeasuredStages(
        read=phases.read,
        read_cached=phases.read_cached,
        decode=phases.decode,
        augment=phases.augment,
        collate=phases.collate,
        hand_over=hand_over,
        copy=copied,
        step=Spread.of(ingestion.seconds),
        read_cpu_share=phases.read_cpu_share,
        prepare_cpu_share=phases.prepare_cpu_share,
        step_cpu_seconds=ingestion.cpu_seconds,
        batch_size=phases.batch_size,
        workers=loader.num_workers,
        takes_ahead=phases.takes_ahead,
        cores=_usable_cores(),
        points=phases.points,
        read_sharing=phases.read_sharing,
        prepare_sharing=phases.prepare_sharing,
        can_have_workers=phases.can_have_workers,
    )


def _shared(trial: Trial) -> list[str]:
    """What is to be said of data that is not a copy: where this process reads it, edits in place are edits of the user's."""
    if trial.loader.num_workers or not trial.data.too_large:
        return []
    return [_NOT_COPIED.format(what=", ".join(trial.data.too_large))]


def _usable_cores() -> int:
    """Of this rank: those of its machine, shared with the other ranks there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hosts = gathered(socket.gethostname())
    return max(1, cores // hosts.count(socket.gethostname()))
