"""`StallAnalyzer`: measures one training, phase by phase, and leaves it as it was; and the command ``analyze``."""

from __future__ import annotations

import copy
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Subset, get_worker_info

from lightning_echo.analysis.parts import Batches, FirstBatches, drop_pages, fewest_batches, options_of, second_half
from lightning_echo.analysis.phases import (
    CHUNKS,
    READ_AHEAD,
    LoaderPhases,
    StepNumber,
    gathered,
    measure_loader,
    measure_stream,
    process_state_restored,
)
from lightning_echo.analysis.predict import MeasuredStages, Spread, TrainingSetting, ahead_contention, contention
from lightning_echo.analysis.prefetch import FEWEST_BATCHES, free_shared_bytes, period_of
from lightning_echo.analysis.report import in_words, report, save_page, save_png
from lightning_echo.analysis.result import MOST_BLOCKS, CheckedSetting, ProvedGain, StallAnalysis, promising
from lightning_echo.analysis.sources import (
    WARM_UP_STEPS,
    PreparedLoader,
    RepeatedBatch,
    StepClock,
    TrainingData,
    Transfers,
    fit,
    nothing,
    quiet,
    transfers_noted,
    transfers_skipped,
)
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


# ---------------------------------------------------------------------- outputs
# The files that ``analyze`` writes. A name that the user gives is checked before the analysis begins: no measurement is lost.
# Without a name, the analysis itself goes into the Trainer's log directory.


def check_new(**paths: str | None) -> None:
    """Raises a ValueError for names of files that exist already, and for equal names. None: no file is asked for."""
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        if Path(path).exists():
            raise ValueError(f"{name} must be a new file, got {path!r}, which exists: give another name, or remove it first")
        first = seen.setdefault(Path(path).absolute(), name)
        if first != name:
            raise ValueError(f"{first} and {name} must be different files, got {path!r} for both")


def free_path(directory: Path, name: str) -> Path:
    """Returns the path of a new file in the directory: ``analysis.json``, else ``analysis_1.json`` and so on."""
    wanted = directory / name
    numbered = (wanted.with_stem(f"{wanted.stem}_{number}") for number in count(1))
    return wanted if not wanted.exists() else next(path for path in numbered if not path.exists())


# ---------------------------------------------------------------------- advice

_WIDTH = 118
_HOW = "What `analyze` advises. Give this file after your own: fit --config config.yaml --config THIS_FILE"
_LOADER = "Set {name}={value} where your program sets it: only you know the name of that option (now {now})."
_NOTHING = "There is nothing to set in the group echo: this file changes nothing."


def advice_yaml(analysis: StallAnalysis) -> str:
    """Returns the advice as YAML for an `EchoCLI`: options of the group ``echo``, and the rest as comments."""
    verdict, stages = analysis.verdict, analysis.stages
    setting, options = verdict.setting, verdict.options
    comments = [_HOW, verdict.message]
    present = {"num_workers": stages.workers, "prefetch_factor": stages.prefetch_factor, "pin_memory": False}
    for name, value in setting.loader_options.items():
        if value != present[name]:
            comments.append(_LOADER.format(name=name, value=value, now=present[name]))
    if not options:
        comments.append(_NOTHING)
    lines = [f"# {line}\n" for comment in comments for line in wrap(comment, _WIDTH, break_long_words=False)]
    values = [f"  {name}: {json.dumps(value)}\n" for name, value in options.items()]  # JSON is YAML, too
    return "".join([*lines, "echo:\n", *values] if values else [*lines, "{}\n"])


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
        echoed = _to_echo(training, workers, **_changes(setting))
        clock = training.clock_echoed(echoed, steps, **_options(setting))
    else:
        clock = training.clock(_plain(training, setting, workers), steps)
    # This is how often, in steps, the training waits for a fresh batch.
    period = max(workers, 1) * math.ceil(setting.factor)
    if as_mean:
        return Spread.of(clock.seconds, max(1, len(clock.seconds) // period) * period)
    return _spread_of(training.phases, clock, period)


def _spread_of(phases: LoaderPhases, clock: StepClock, period: int) -> Spread:
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
    echoed = _to_echo(training, workers, first, **_changes(setting))
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


def _to_echo(training: ShortTraining, workers: int, first: Sequence[list[Any]] = (), **changes: Any) -> DataLoader[Any]:
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
            cached = _spread_of(phases, training.clock(phases.in_memory, steps), workers)
        self._watch.look()
        self._progress.phase("the training as it is")
        drop_pages(phases.files)
        real = _spread_of(phases, training.clock(phases.real, steps), workers)
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
        loader = _to_echo(training, workers)
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


# ---------------------------------------------------------------------- command
# ``python train.py analyze``: the subcommand that `EchoCLI` adds.


class Analyzes:
    """A Trainer that can analyze. ``analyzed_kwargs`` are the options of the Trainers that an analysis makes."""

    analyzed_kwargs: Mapping[str, Any] = {}

    def analyze(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        steps: int | None = None,
        seconds: float = 60.0,
        verify: bool = False,
        json: str | None = None,
        html: str | None = None,
        png: str | None = None,
        apply: str | None = None,
        reads_in_flight: int | str = AUTO_IN_FLIGHT,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Measures where the time of a step goes, and says what would help.

        Args:
            model: The model whose training is analyzed.
            datamodule: Its data.
            steps: Number of steps that are measured in each phase. Default: 100, or as many as the training loader has batches.
            seconds: About how long the analysis may take.
            verify: Whether to prove what is recommended: the best two settings take turns with the training as it is, for about
                as long as the analysis took.
            json: New file that the analysis is saved in. Default: analysis.json in the Trainer's log directory, or
                analysis_1.json and so on where there is one.
            html: New file for a report as a web page.
            png: New file for a report as a picture.
            apply: New file for what is advised as options of the group echo, to be given to fit: --config FILE.
            reads_in_flight: Whether threads may run the data set's own code to read ahead: a number. Default: only if it says so.
            ckpt_path: Not used. A configuration that fit has saved may have it.
            weights_only: Not used, for the same reason.

        Raises:
            ValueError: A file exists already, or a number is impossible.
        """
        saved = free_path(output_directory(cast(pl.Trainer, self)), "analysis.json") if json is None else Path(json)
        rank_zero_only(check_new)(json=str(saved), html=html, png=png, apply=apply)  # before minutes of work
        analyzer = StallAnalyzer(model, datamodule, trainer_kwargs=self.analyzed_kwargs, reads_in_flight=reads_in_flight)
        analysis = analyzer.run(steps, seconds)
        _write(saved, analysis.to_json)  # before a setting is tried, which may fail
        if verify:
            try:
                analysis = analyzer.prove(analysis, seconds=seconds)
            except ValueError as error:
                rank_zero_info(f"lightning_echo: nothing was proved: {error}")
        _report(analysis, saved, html, png, apply)


def analyzing(trainer_class: type[pl.Trainer]) -> type[pl.Trainer]:
    """Returns a subclass that can analyze. It has the same name, so configurations and messages do not change."""
    if issubclass(trainer_class, Analyzes):
        return trainer_class
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainer_class.__name__, (Analyzes, trainer_class), names)


def output_directory(trainer: pl.Trainer) -> Path:
    """Returns the directory of the Trainer's first logger, else its ``default_root_dir``. All ranks must call it."""
    directory = trainer.log_dir or trainer.default_root_dir
    # Local files do not fit into a remote storage.
    return Path() if "://" in directory else Path(directory)


def write_new(directory: Path, name: str, save: Callable[[Path], object]) -> Path:
    """Writes a new file in a directory, on the first rank, and returns its path: see `free_path`."""
    path = free_path(directory, name)
    _write(path, save)
    return path


@rank_zero_only
def _write(path: Path, save: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path)


@rank_zero_only
def _report(analysis: StallAnalysis, json: Path, html: str | None, png: str | None, apply: str | None) -> None:
    print(report(analysis))
    _write(json, analysis.to_json)  # with the tried setting
    written = [str(json)]
    for path, save in (
        (html, partial(save_page, analysis)),
        (png, partial(save_png, analysis)),
        (apply, lambda path: path.write_text(advice_yaml(analysis), encoding="utf-8")),
    ):
        if path is not None:
            _write(Path(path), save)
            written.append(path)
    print(f"\nWritten: {', '.join(written)}")
