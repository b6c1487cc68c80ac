"""`StallAnalyzer`: measures one training, phase by phase, and leaves it as it was; and proves what it advises."""

from __future__ import annotations

import copy
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_echo.analysis.measured import MeasuredStages, Spread
from lightning_echo.analysis.parts import drop_pages, fewest_batches
from lightning_echo.analysis.phases import (
    CHUNKS,
    READ_AHEAD,
    StepNumber,
    gathered,
    measure_loader,
    measure_stream,
    process_state_restored,
)
from lightning_echo.analysis.predict import TrainingSetting, ahead_contention, contention
from lightning_echo.analysis.prefetch import free_shared_bytes
from lightning_echo.analysis.report import in_words
from lightning_echo.analysis.result import MOST_BLOCKS, CheckedSetting, ProvedGain, StallAnalysis, promising
from lightning_echo.analysis.sources import (
    PreparedLoader,
    RepeatedBatch,
    TrainingData,
    Transfers,
    fit,
    nothing,
    quiet,
    transfers_noted,
    transfers_skipped,
)
from lightning_echo.analysis.trials import ShortTraining, spread_of, to_echo, try_setting
from lightning_echo.config import check_reads_in_flight
from lightning_echo.data.copies import nbytes
from lightning_echo.data.machine import CoreWatch, Load, free_memory_bytes, load_of, usable_cores
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.pipeline.kinds import Indexed, kind_of
from lightning_echo.share.ray import is_in_cluster
from lightning_echo.share.same_data import why_not_elsewhere
from lightning_echo.split.reading import AUTO_IN_FLIGHT
from lightning_echo.training.package import MisconfigurationException
from lightning_echo.training.trainer import rank_zero_info

# ---------------------------------------------------------------------- progress
# Each phase may take an equal share of the time, and takes less if its steps are done earlier. So the estimate assumes that the
# phases to come take as long as those before them. The first phase does not count: it waits for the data module, which may
# download data.


class Progress:
    """The progress of an analysis, a line for each phase: time spent, and about how much is left.

    ``tell`` gets each line; ``phases`` is their largest number.

    Example:
        >>> times = iter([0.0, 0.0, 2.0, 5.0])
        >>> progress = Progress(60, 6, print, clock=lambda: next(times))
        >>> progress.phase("the data")
        the data (0 s, about 60 s left)
        >>> progress.phase("reading")
        reading (2 s, about 50 s left)
        >>> progress.phase("the step", to_come=2)
        the step (5 s, about 6 s left)
    """

    def __init__(
        self, seconds: float, phases: int, tell: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._share, self._to_come, self._tell, self._clock = seconds / phases, phases + 1, tell, clock
        self._begun = clock()
        self._begins: list[float] = []

    def phase(self, what: str, to_come: int | None = None) -> None:
        """Reports a phase. ``to_come`` are left, this one included; None: one fewer than before; 0: the time left is unknown."""
        now = self._clock()
        self._to_come = max(self._to_come - 1, 1) if to_come is None else to_come
        self._begins.append(now)
        ended = len(self._begins) - 2  # but for the first phase
        each = (now - self._begins[1]) / ended if ended > 0 else self._share
        left = f", about {self._to_come * each:.0f} s left" if self._to_come else ""
        self._tell(f"{what} ({now - self._begun:.0f} s{left})")


# ---------------------------------------------------------------------- analyzer
#     what the Trainer makes of the data      one step: the loader, a batch on the device
#     the loader alone                        reading, preparation, augmentation (phases.py)
#     hand-over, copy                         a batch that is ready, taken and copied
#     ingestion                               the step alone
#     data in memory                          the training, without reading
#     the real run                            the training, nothing in memory
#
# The trained model is a copy, and so is its data (sources.py). Random states are restored (phases.py). With several ranks, all of
# them measure concurrently, and the job waits for the slowest.

_END_HOOKS = ("on_train_epoch_end", "on_train_end", "on_fit_end")
_HANDED_OVER = _COPIED = 8  # number of batches whose hand-over and whose copy are timed
_NOT_COPIED = "{what}: too large to be copied, so that edits in place remain after the analysis"
_AHEAD_SECONDS = 2.0
_PHASES = 15  # runs and fits; each may take this share of the time
_TRAININGS = 4  # phases after those of the loader
_STEPS_OF_BLOCK = 50  # in a proof
_FEWEST_BLOCKS = 4


class StallAnalyzer:
    """Measures where the time of a training's steps goes (Mohan et al. 2021, arXiv 2007.06775, section 3.2).

    Args:
        model: Your model. A copy of it is trained.
        datamodule: A data module, or a training loader. None: the model's own ``train_dataloader``. If the data is echoed, it is
            measured without echoing.
        trainer_kwargs: Options of ``Trainer``. Options that write, validate or end the training are left out, and so are
            callbacks.
        say: A function that gets a message for each phase, with the time left. Default: Lightning's log, on the first rank.
        reads_in_flight: Whether threads may run the data set's own code to read ahead, as for `EchoLoader`. ``"auto"``: only if
            nothing of it runs in them, or if the data set says that it may (``reads_concurrently = True``). A number: they may.
            1: reading ahead is neither measured nor advised.
        verify: Whether `run` also proves what is recommended (`prove`), for about as long as the analysis takes.

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
        reads_in_flight: int | str = AUTO_IN_FLIGHT,
        verify: bool = False,
    ) -> None:
        if not isinstance(verify, bool):
            raise TypeError(f"verify must be True or False, got {verify!r}")
        self._verify = verify
        self._reads_in_flight = check_reads_in_flight(reads_in_flight) or AUTO_IN_FLIGHT
        self._model, self._data = model, datamodule
        self._trainer_kwargs = dict(trainer_kwargs or {})
        self._tell = say or (lambda message: rank_zero_info(f"lightning_echo: analyzing: {message}"))
        self._training: ShortTraining | None = None
        self._progress = Progress(1.0, _PHASES, self._tell)
        self._steps = 0
        self._free_bytes: int | None = None
        self._free_shared_bytes: int | None = None
        self._watch = CoreWatch()

    def run(self, steps: int | None = None, seconds: float = 60.0) -> StallAnalysis:
        """Measures this many steps in each phase, or as many as the time allows.

        Args:
            steps: Number of steps: at least 4, and at most the number of batches of the training loader. None: 100, or the number
                of batches if that is smaller.
            seconds: About how long the analysis may take, in seconds. Each phase waits for at least two batches, however long
                they take.

        Returns:
            The measurements. With several ranks, the analysis of the slowest rank. With ``verify``, also the gains that were
            proved.

        Raises:
            MisconfigurationException: There is no training loader, or it is not a ``DataLoader``.
            ValueError: The loader has fewer batches than ``steps``, or fewer than 4; or a value is impossible.
            Exception: The model or the data set raises it.
        """
        number = StepNumber(steps, self._tell)
        if not seconds > 0:
            raise ValueError(f"seconds must be > 0, got {seconds!r}")
        share, self._progress = seconds / _PHASES, Progress(seconds, _PHASES, self._tell)
        self._free_bytes, self._free_shared_bytes = free_memory_bytes(), free_shared_bytes()  # before the analysis takes some
        with process_state_restored():
            model, data = _copy_of(self._model), TrainingData(self._data)
            loader = self._prepare(model, data)
            self._watch = CoreWatch(apart=[pid for pid in gathered(os.getpid()) if pid != os.getpid()])
            self._watch.look()
            look, say = self._watch.look, self._progress.phase
            if not isinstance(kind_of(loader), Indexed) or loader.batch_sampler is None:
                size = loader.batch_size or 1
                steps, phases = measure_stream(loader, number, size, share, say, look)
            else:
                most = CHUNKS * number.most + math.ceil(READ_AHEAD / max(loader.batch_size or 1, 1))
                batches = [list(indices) for indices in islice(iter(loader.batch_sampler), most)]
                steps = number.within(min(gathered(len(batches))))
                phases = measure_loader(loader, batches, steps, share, say, self._reads_in_flight, look)
            self._steps, self._training = steps, ShortTraining(model, data, loader, phases, self._trainer_kwargs, share)
            analysis = StallAnalysis.of_ranks(gathered(self._train(self._training, steps)))
        return self.prove(analysis, seconds=seconds) if self._verify else analysis

    def _train(self, training: ShortTraining, steps: int) -> StallAnalysis:
        phases, loader, workers = training.phases, training.loader, max(training.loader.num_workers, 1)
        ahead = None
        if len(phases.in_flight) > 1:
            self._progress.phase("the loader, while threads read ahead")
            with quiet():
                ahead = _time_ahead(training, phases.in_flight[-1].reads)
        self._watch.look()
        self._progress.phase("hand-over and copy", to_come=_TRAININGS)
        hand_over, transfers = _time_hand_over(training), _time_transfers(training)
        self._progress.phase("ingestion rate: the step alone")
        # If no hook was called, the strategy transfers batches in its own way, and this batch is still on the host.
        with transfers_skipped([training.model, *training.data.instances] if transfers.seconds else []):
            ingestion = training.clock(RepeatedBatch(transfers.batch, steps), steps)
        stages = MeasuredStages(
            read=phases.read,
            read_cached=phases.read_cached,
            decode=phases.decode,
            augment=phases.augment,
            collate=phases.collate,
            hand_over=hand_over,
            copy=Spread.of(transfers.seconds or [0.0]),
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
            in_flight=phases.in_flight,
            read_ahead=phases.read_ahead,
            no_reads_ahead=phases.no_reads_ahead,
            no_cluster_workers=why_not_elsewhere(kind_of(loader), len(gathered(None))),
            has_cluster=is_in_cluster(),
            prefetch_factor=loader.prefetch_factor or 2,
            batch_seconds=phases.batch_seconds,
            batch_bytes=None if transfers.host is None else nbytes(transfers.host),
            free_shared_bytes=self._free_shared_bytes,
            pinning=transfers.pinning,
            no_pinning=transfers.no_pinning,
        )
        self._training = replace(training, no_pinning=transfers.no_pinning)
        if ahead is not None:
            stages = replace(stages, ahead_contention=ahead_contention(stages, phases.in_flight[-1].reads, ahead))
        self._watch.look()
        self._progress.phase("the training, its data in memory")
        cached = None
        if phases.in_memory is not None:
            cached = spread_of(phases, training.clock(phases.in_memory, steps), workers)
        self._watch.look()
        self._progress.phase("the training as it is")
        drop_pages(phases.files)
        real = spread_of(phases, training.clock(phases.real, steps), workers)
        stages = replace(stages, contention=contention(stages, (cached or real).median), free_bytes=self._free_bytes)
        self._watch.look()
        load = self._load()
        notes = phases.notes if load is None or not load.is_notable else (f"{load.sentence}.", *phases.notes)
        if not loader.num_workers and training.data.too_large:  # this process reads the user's own objects
            notes = (*notes, _NOT_COPIED.format(what=", ".join(training.data.too_large)))
        return StallAnalysis(
            stages,
            real,
            cached,
            phases.transforms,
            notes,
            stage_cpu=phases.stage_cpu,
            transform_cpu=phases.transform_cpu,
            load=load,
        )

    def _load(self) -> Load | None:
        """Returns the load of this machine by programs other than the ranks of this job. All ranks must call it together."""
        uses = gathered((socket.gethostname(), self._watch.use))
        return load_of([use for host, use in uses if host == socket.gethostname()])

    def check(self, analysis: StallAnalysis, **setting: Any) -> StallAnalysis:
        """Trains with a setting, and compares the measured step with the prediction.

        Args:
            analysis: The result of `run` of this analyzer.
            **setting: Options of `TrainingSetting`, as for `StallAnalysis.predict`. Without options, the setting that the verdict
                advises is tried.

        Returns:
            The analysis with one more `CheckedSetting`.

        Raises:
            RuntimeError: Nothing was analyzed before.
            TypeError: An option is unknown.
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

    def prove(self, analysis: StallAnalysis, *settings: TrainingSetting, seconds: float = 60.0) -> StallAnalysis:
        """Trains with settings in turn with the training as it is, block by block, and returns how much faster each one is.

        Args:
            analysis: The result of `run` of this analyzer.
            *settings: The settings. Without any, the best two of the verdict's are tried, as far as this machine can. If the
                verdict changes nothing, nothing is tried.
            seconds: About how long it may take, in seconds. It takes four blocks of each setting at least, and 16 at most.

        Returns:
            The analysis with a `ProvedGain` and a `CheckedSetting` for each setting that was tried.

        Raises:
            RuntimeError: Nothing was analyzed before.
            ValueError: A setting that was given cannot be tried on this machine.

        Example:
            >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
            >>> loader = DataLoader(RandomDataset(32, 640), batch_size=8, num_workers=1)
            >>> analyzer = StallAnalyzer(BoringModel(), loader, trainer_kwargs={"accelerator": "cpu"})
            >>> proved = analyzer.prove(analyzer.run(steps=20), TrainingSetting(workers=2), seconds=1).proved
            >>> [(each.setting.workers, each.blocks) for each in proved], proved[0].low <= proved[0].high
            ([(2, 4)], True)
        """
        if self._training is None:
            raise RuntimeError("nothing was analyzed yet: call run() first")
        tried = settings or promising(analysis.verdict)
        if not tried:
            self._tell("nothing to prove: the verdict changes nothing")
            return analysis
        arms: list[tuple[TrainingSetting, list[Spread]]] = [(setting, []) for setting in (TrainingSetting(), *tried)]
        began, turns = time.perf_counter(), 0
        while len(arms) > 1 and self._continues(turns, time.perf_counter() - began, seconds):
            for setting, blocks in list(arms if turns % 2 == 0 else reversed(arms)):
                what = "the training as it is" if setting is arms[0][0] else in_words(setting)
                self._progress.phase(f"proof, block {turns + 1}: {what}", to_come=0)
                try:
                    blocks.append(self._block(setting))
                except ValueError as error:
                    if settings or setting is arms[0][0]:
                        raise
                    self._tell(f"{what}: not tried: {error}")
                    arms = [each for each in arms if each[0] is not setting]
            turns += 1
        present, *others = [(setting, [block.median for block in blocks]) for setting, blocks in arms]
        for setting, seconds_of_blocks in others:
            analysis = analysis.with_check(CheckedSetting(setting, Spread.of(seconds_of_blocks)))
        return analysis.with_proof([ProvedGain.of(setting, present[1], each) for setting, each in others])

    def _block(self, setting: TrainingSetting) -> Spread:
        """Trains some steps with a setting, and returns their seconds on the slowest rank."""
        training, steps = self._training, min(self._steps, _STEPS_OF_BLOCK)
        assert training is not None
        with process_state_restored():
            measured = try_setting(training, setting, steps, as_mean=True)
        return max(gathered(measured), key=lambda each: each.median)

    @staticmethod
    def _continues(blocks: int, passed: float, seconds: float) -> bool:
        """Whether there is one more block of each setting. All ranks decide alike, as the first one does."""
        has_time = passed * (blocks + 1) <= seconds * blocks  # as the blocks so far took
        return bool(gathered(blocks < _FEWEST_BLOCKS or (blocks < MOST_BLOCKS and has_time))[0])

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


def _copy_of(model: pl.LightningModule) -> pl.LightningModule:
    """Returns a copy without the model's own callbacks and without its end hooks, which are not meant for a few steps."""
    copied = copy.deepcopy(model)
    vars(copied).update(dict.fromkeys(_END_HOOKS, nothing), configure_callbacks=list)
    return copied


def _time_ahead(training: ShortTraining, reads: int) -> float | None:
    """Returns the seconds of a batch of the loader alone, with so many reads in flight; None if that cannot be tried."""
    workers = training.loader.num_workers
    try:
        loader = to_echo(training, workers)
        echoed = EchoLoader(loader, 1.0, num_replicas=1, rank=0, reads_in_flight=reads)
    except ValueError:  # a trial of such a setting gives the reason
        return None
    size, arrivals = training.phases.batch_size, list[float]()
    filled = math.ceil(2 * reads / size) + 2 * fewest_batches(
        workers
    )  # from then on, reads and batches follow each other steadily
    try:
        for _ in echoed:
            arrivals.append(time.perf_counter())
            counted = arrivals[filled:]
            if len(counted) > fewest_batches(workers) and counted[-1] - counted[0] > min(training.most_seconds, _AHEAD_SECONDS):
                break
    finally:
        echoed.close()
    counted = arrivals[filled:]
    return (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else None


def _time_hand_over(training: ShortTraining) -> Spread:
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
    transfers, batches = Transfers(training.loader.pin_memory), training.phases.in_memory or training.phases.real
    with transfers_noted([training.model, *training.data.instances], transfers):
        training.clock(batches, _COPIED)
    if transfers.batch is None:  # the strategy does not call the hook
        transfers.batch = next(iter(batches))
    return transfers


def _cores_of_rank() -> int:
    """Returns the number of cores of this rank: the ranks of a machine share its cores equally."""
    hosts = gathered(socket.gethostname())
    return max(1, usable_cores() // hosts.count(socket.gethostname()))
