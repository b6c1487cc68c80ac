"""`StallAnalyzer`: measures one training, phase by phase, and leaves it as it was.

    what the Trainer makes of the data      one step: the loader, a batch on the device
    the loader alone                        reading, preparation, augmentation (phases.py, streams.py)
    hand-over, copy                         a batch that is ready, taken and copied
    ingestion                               the step alone
    data in memory                          the training, without reading
    the real run                            the training, nothing in memory

The model that is trained is a copy, and so is its data (data.py). Random states are restored (process.py). With several ranks,
all of them measure at the same time, and the job waits for the slowest.
"""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_echo.analysis.checks import ShortTraining, try_setting
from lightning_echo.analysis.measured import MeasuredStages, Spread
from lightning_echo.analysis.predict import TrainingSetting, contention
from lightning_echo.analysis.probing.data import TrainingData, nothing
from lightning_echo.analysis.probing.files import drop_pages
from lightning_echo.analysis.probing.fits import PreparedLoader, RepeatedBatch, StepClock, fit
from lightning_echo.analysis.probing.phases import CHUNKS, LoaderPhases, measure_loader
from lightning_echo.analysis.probing.process import process_state_restored
from lightning_echo.analysis.probing.ranks import gathered
from lightning_echo.analysis.probing.steps import StepNumber
from lightning_echo.analysis.probing.streams import measure_stream
from lightning_echo.analysis.probing.transfers import Transfers, transfers_noted, transfers_skipped
from lightning_echo.analysis.progress import Progress
from lightning_echo.analysis.report.questions import in_words
from lightning_echo.analysis.result import CheckedSetting, StallAnalysis
from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.fetching.source import Source
from lightning_echo.monitoring.cores import usable_cores
from lightning_echo.training.rank_zero import rank_zero_info

__all__ = ["StallAnalyzer"]

_END_HOOKS = ("on_train_epoch_end", "on_train_end", "on_fit_end")
_HANDED_OVER = _COPIED = 8  # number of batches whose hand-over and whose copy are timed
_NOT_COPIED = "{what}: too large to be copied, so that edits in place remain after the analysis"
_PHASES = 14  # runs and fits; each may take this share of the time
_TRAININGS = 4  # phases after those of the loader


class StallAnalyzer:
    """Measures where the time of a training's steps goes (Mohan et al. 2021, arXiv 2007.06775, section 3.2).

    Args:
        model: Your model. A copy of it is trained.
        datamodule: A data module, or a training loader. None: the model's own ``train_dataloader``. If the data is echoed, it is
            measured without echoing.
        trainer_kwargs: Options of ``Trainer``. Options that write, validate or end the training are left out, and so are
            callbacks.
        say: A function that gets a message for each phase, with the time left. Default: Lightning's log, on the first rank.

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
        self._training: ShortTraining | None = None
        self._progress = Progress(1.0, _PHASES, self._tell)
        self._steps = 0
        self._free_bytes: int | None = None

    def run(self, steps: int | None = None, seconds: float = 60.0) -> StallAnalysis:
        """Measures this many steps in each phase, or as many as the time allows.

        Args:
            steps: Number of steps: at least 4, and at most the number of batches of the training loader. None: 100, or the number
                of batches if that is smaller.
            seconds: About how long the analysis may take, in seconds. Each phase waits for at least two batches, however long
                they take.

        Returns:
            What was measured. With several ranks, the analysis of the slowest rank.

        Raises:
            MisconfigurationException: There is no training loader, or it is not a ``DataLoader``.
            ValueError: The loader has fewer batches than ``steps``, or fewer than 4; or a value is impossible.
            Exception: The model or the data set raises it.
        """
        number = StepNumber(steps, self._tell)
        if not seconds > 0:
            raise ValueError(f"seconds must be > 0, got {seconds!r}")
        share, self._progress = seconds / _PHASES, Progress(seconds, _PHASES, self._tell)
        self._free_bytes = free_memory_bytes()  # before the analysis takes some itself
        with process_state_restored():
            model, data = _copy_of(self._model), TrainingData(self._data)
            loader = self._prepare(model, data)
            self._steps, phases = self._loader_alone(loader, number, share)
            self._training = ShortTraining(model, data, loader, phases, self._trainer_kwargs, share)
            return StallAnalysis.of_ranks(gathered(self._train(self._training, self._steps)))

    def _train(self, training: ShortTraining, steps: int) -> StallAnalysis:
        """Measures the trainings, and returns the analysis of this rank."""
        phases, workers = training.phases, max(training.loader.num_workers, 1)
        self._progress.phase("hand-over and copy", to_come=_TRAININGS)
        hand_over, transfers = _time_hand_over(training), _time_transfers(training)
        self._progress.phase("ingestion rate: the step alone")
        # If no hook was called, the strategy transfers batches in its own way, and this batch is still on the host.
        with transfers_skipped([training.model, *training.data.instances] if transfers.seconds else []):
            ingestion = training.clock(RepeatedBatch(transfers.batch, steps), steps)
        stages = _measured_stages(training, hand_over, Spread.of(transfers.seconds or [0.0]), ingestion)
        self._progress.phase("the training, its data in memory")
        cached = None if phases.in_memory is None else Spread.of(training.clock(phases.in_memory, steps).seconds, workers)
        self._progress.phase("the training as it is")
        drop_pages(phases.files)
        real = Spread.of(training.clock(phases.real, steps).seconds, workers)
        stages = replace(stages, contention=contention(stages, (cached or real).median), free_bytes=self._free_bytes)
        return StallAnalysis(stages, real, cached, phases.transforms, (*phases.notes, *_notes_on_shared_data(training)))

    def check(self, analysis: StallAnalysis, **setting: Any) -> StallAnalysis:
        """Trains with a setting, and compares the measured step with the prediction.

        Args:
            analysis: What `run` of this analyzer returned.
            **setting: Options of `TrainingSetting`, as for `StallAnalysis.predict`. Without options, the setting that the verdict
                advises is tried.

        Returns:
            The analysis with one more `CheckedSetting`.

        Raises:
            RuntimeError: Nothing was analyzed before.
            TypeError: An option is not known.
            ValueError: The setting cannot be tried on this machine. It asks for a faster storage or accelerator, or for a cache
                of data that cannot be held in memory.
        """
        if self._training is None:
            raise RuntimeError("nothing was analyzed yet: call run() first")
        tried = TrainingSetting(**setting) if setting else analysis.verdict.setting
        self._progress.phase(f"trying {in_words(tried)}", to_come=0)
        with process_state_restored():
            measured = try_setting(self._training, tried, self._steps)
        slowest = max(gathered(measured), key=lambda each: each.median)
        return analysis.with_check(CheckedSetting(tried, slowest))

    def _prepare(self, model: pl.LightningModule, data: TrainingData) -> DataLoader[Any]:
        """Returns the training loader as Lightning prepares it."""
        self._progress.phase("what the Trainer makes of the data")
        first = PreparedLoader()
        fit(model, data.as_given(model), 1, first, self._trainer_kwargs)
        if not first.was_here:
            raise MisconfigurationException(
                "trainer_kwargs has a strategy that starts new processes for each fit, and no measurement comes back from them: "
                "use strategy='ddp'"
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

    def _loader_alone(self, loader: DataLoader[Any], number: StepNumber, most_seconds: float) -> tuple[int, LoaderPhases]:
        """Returns the number of steps of a phase, and what was measured of the loader."""
        if not Source(loader).rebuilds or loader.batch_sampler is None:
            return measure_stream(loader, number, _size_of(loader), most_seconds, self._progress.phase)
        batches = [list(indices) for indices in islice(iter(loader.batch_sampler), CHUNKS * number.most)]
        steps = number.within(min(gathered(len(batches))))
        return steps, measure_loader(loader, batches, steps, most_seconds, self._progress.phase)


def _copy_of(model: pl.LightningModule) -> pl.LightningModule:
    """Returns a copy without the model's own callbacks and without its end hooks, which are not meant for a few steps."""
    copied = copy.deepcopy(model)
    vars(copied).update(dict.fromkeys(_END_HOOKS, nothing), configure_callbacks=list)
    return copied


def _size_of(loader: DataLoader[Any]) -> int:
    """Returns the number of examples in a batch; 1 if only the loader knows it."""
    return loader.batch_size or 1


def _time_hand_over(training: ShortTraining) -> Spread:
    """Measures how long it takes to get a batch that a worker has ready."""
    workers = training.loader.num_workers
    if not workers:
        return Spread.exactly(0.0)
    iterator, seconds = iter(training.phases.in_memory or training.phases.real), []
    begin = time.perf_counter()
    for _ in range(workers + 1):
        next(iterator, None)
    longest = time.perf_counter() - begin  # until each worker has made a batch, the start of the workers included
    for _ in range(max(2, min(_HANDED_OVER, int(training.most_seconds / longest)))):
        time.sleep(longest)
        begin = time.perf_counter()
        if next(iterator, None) is None:
            break
        seconds.append(time.perf_counter() - begin)
    return Spread.of(seconds or [0.0])


def _time_transfers(training: ShortTraining) -> Transfers:
    """Measures the transfers to the device. The result also holds a batch that is on the device."""
    transfers, batches = Transfers(), training.phases.in_memory or training.phases.real
    with transfers_noted([training.model, *training.data.instances], transfers):
        training.clock(batches, _COPIED)
    if transfers.batch is None:  # the strategy does not call the hook
        transfers.batch = next(iter(batches))
    return transfers


def _measured_stages(training: ShortTraining, hand_over: Spread, copied: Spread, ingestion: StepClock) -> MeasuredStages:
    phases, loader = training.phases, training.loader
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
        cores=_cores_of_rank(),
        points=phases.points,
        read_sharing=phases.read_sharing,
        prepare_sharing=phases.prepare_sharing,
        can_have_workers=phases.can_have_workers,
        in_cache=phases.in_cache,
        examples=phases.examples,
    )


def _notes_on_shared_data(training: ShortTraining) -> list[str]:
    """Returns notes on data that was not copied: if this process reads that data, edits in place change the user's objects."""
    if training.loader.num_workers or not training.data.too_large:
        return []
    return [_NOT_COPIED.format(what=", ".join(training.data.too_large))]


def _cores_of_rank() -> int:
    """Returns the number of cores of this rank: the ranks of a machine share its cores equally."""
    hosts = gathered(socket.gethostname())
    return max(1, usable_cores() // hosts.count(socket.gethostname()))
