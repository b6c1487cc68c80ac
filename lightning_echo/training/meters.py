"""Measures a training epoch by epoch: from Lightning's profiler, from each loader's workers, and joined over ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_echo.data.machine import (
    NO_OTHER_RUNS,
    NOT_SEEN,
    CoreUse,
    CoreWatch,
    Load,
    OtherRuns,
    load_of,
    other_runs,
    usable_cores,
)
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.measure.advice import Waiting
from lightning_echo.measure.control import PipelineCosts
from lightning_echo.measure.timing import DeviceEvents, IdleFraction, JobSteps, StepTimer
from lightning_echo.pipeline.batches import size_of
from lightning_echo.pipeline.kinds import Indexed, Kind, kind_of
from lightning_echo.schema import FieldError, entry
from lightning_echo.share.ray import is_in_cluster
from lightning_echo.share.same_data import why_not_elsewhere
from lightning_echo.split.reading import may_be_on
from lightning_echo.split.staged import batched
from lightning_echo.training.counts import CacheMeter, CacheUse, Examples, RunCounts, ShareMeter, ShareUse
from lightning_echo.training.loaders import Echoed, EchoLoaders, leaves_of, parts_at_leaves, parts_of
from lightning_echo.training.package import classes
from lightning_echo.training.trainer import rank_zero_info
from lightning_echo.training.waits import FIRST_LOOK, WorkerWaits, cached_fraction, watched_loader

# ---------------------------------------------------------------------- profiler tap
# A callback has no hook before and after fetching a batch or copying it to the device. But in every run Lightning reports both to
# its profiler, of any kind. So the tap replaces the profiler's ``start`` and ``stop`` during a training, and calls the original
# ones.
#
# Lightning calls ``profile`` around every hook, about twenty times in a step. If the profiler does nothing, the tap also replaces
# ``profile`` with a quicker one. Then a step costs less with the tap than without it.

_EVENTS: dict[torch.device, DeviceEvents] = {}  # of all trainings of the process
_FETCH, _COPY = ".train_dataloader_next", ".batch_to_device"
_REPLACED = "start", "stop", "profile"
# Lightning calls this hook before validation sets its loaders up; on_validation_start comes after that.
_VALIDATION = ".on_validation_model_zero_grad"


class ProfilerTap:
    """Reports to a `StepTimer` when Lightning fetches a batch, copies it to the device, and begins to validate."""

    def __init__(self, profiler: Any, timer: StepTimer) -> None:
        self._profiler = profiler
        self._had = {name: vars(profiler)[name] for name in _REPLACED if name in vars(profiler)}
        start = {_FETCH: timer.begin_fetch, _COPY: timer.begin_copy, _VALIDATION: timer.pause}
        stop = {_FETCH: timer.end_fetch, _COPY: timer.end_copy}
        does_nothing = type(profiler) in classes("profilers.PassThroughProfiler") and not self._had
        if does_nothing:
            profiler.profile = _quick_profile((*start, *stop), profiler.profile)
        profiler.start = _with_timer(profiler.start, start, timer_first=False)
        profiler.stop = _with_timer(profiler.stop, stop, timer_first=True)

    def close(self) -> None:
        for name in _REPLACED:
            vars(self._profiler).pop(name, None)
        vars(self._profiler).update(self._had)


def _with_timer(
    original: Callable[[str], None], calls: dict[str, Callable[[], None]], *, timer_first: bool
) -> Callable[[str], None]:
    """Returns a replacement for a profiler's ``start`` or ``stop`` that calls the timer, too.

    ``calls`` are the timer's methods, by the end of the action's name. If the timer is first for ``stop`` and last for ``start``,
    the profiler's own time is not measured.
    """
    known: dict[str, Callable[[], None] | None] = {}

    def replacement(action_name: str) -> None:
        if action_name not in known:
            known[action_name] = next((call for end, call in calls.items() if action_name.endswith(end)), None)
        call = known[action_name]
        if call is not None and timer_first:
            call()
        original(action_name)
        if call is not None and not timer_first:
            call()

    return replacement


def _quick_profile(
    ends: tuple[str, ...], original: Callable[[str], AbstractContextManager[None]]
) -> Callable[[str], AbstractContextManager[None]]:
    """Returns a replacement for ``profile`` of a profiler that does nothing. It calls the original only for these actions."""
    silent: set[str] = set()
    nothing = nullcontext()

    def profile(action_name: str) -> AbstractContextManager[None]:
        if action_name in silent:
            return nothing
        if not action_name.endswith(ends):
            silent.add(action_name)
        return original(action_name)

    return profile


# ---------------------------------------------------------------------- loader meter
# `LoaderMeter` measures the time that the workers of one `EchoLoader` spend on a batch; `costs_of` joins several loaders.
#
# If each step takes a batch of each of several loaders:
#
# * With workers, all loaders work concurrently, and the step waits for the slowest. Its costs are taken as the costs of all.
# * Without workers, the loaders take turns. Their costs are added.
#
# The cost model knows no other case. There are no costs if only some loaders have workers, if factors differ, if a loader of the
# collection is not echoed, or if a step does not take a batch of each loader (``max_size``).


class SecondsPerBatch(NamedTuple):
    """Worker seconds per batch of fresh examples: before the insertion point, after it without collate, and of collate."""

    source: float
    rest: float
    collate: float

    @property
    def is_known(self) -> bool:
        return not any(map(math.isnan, self))


class OfLoader(NamedTuple):
    """What a rank has measured of a loader."""

    seconds: SecondsPerBatch
    reads_in_flight: float  # under way on average, in all workers together; NaN if no threads read ahead


NOT_KNOWN = SecondsPerBatch(math.nan, math.nan, math.nan)


class LoaderMeter:
    """Follows one loader through a training."""

    def __init__(self, loader: EchoLoader, seconds_per_batch: SecondsPerBatch | None = None) -> None:
        self.seconds_per_batch = seconds_per_batch  # measured last, at first before a resume; None: not measured yet
        self.reads_in_flight = math.nan  # measured last, see `OfLoader`
        self._examples_before = self._batches_before = 0  # delivered before the batches that count
        self._is_starting = True  # the workers have not delivered their first batch yet
        self._expect_start(loader)
        self.begin_epoch(loader)

    def begin_epoch(self, loader: EchoLoader) -> None:
        """Notes that an epoch begins, or continues after a resume. A reload may have made the loader newly."""
        self._at_epoch_start = loader.delivered_batches
        if not loader.is_running:
            self._expect_start(loader)
        self.begin_stretch(loader)

    def end_step(self, loader: EchoLoader) -> None:
        if self._is_starting and loader.delivered_batches > self._at_epoch_start:
            self._is_starting = False
            # Batch numbers jump if the rest of a pass was left out, for example because the data set has grown.
            skipped = loader.delivered_batches - 1 - self._at_epoch_start
            self._at_epoch_start += skipped
            self._workers_started_at += skipped
            self._batches_before += skipped
        if loader.delivered_batches == self._workers_started_at:
            self.begin_stretch(loader)  # the workers' first batches include their start

    def begin_stretch(self, loader: EchoLoader) -> None:
        """Starts to measure here: earlier work of the workers does not count."""
        self._seconds_before = loader.seconds
        self._examples_before, self._batches_before = loader.counts.delivered, loader.delivered_batches

    def batches(self, loader: EchoLoader) -> int:
        return loader.delivered_batches - self._at_epoch_start

    def judged_batches(self, loader: EchoLoader) -> int:
        """Returns how many of the last batches show the factor in force, and came from workers that had started."""
        return loader.delivered_batches - max(loader.settled_at, self._workers_started_at)

    def measure(self, loader: EchoLoader) -> OfLoader:
        """Returns the measures since the start of the epoch, or of the stretch; if no batch counts, those made before."""
        spent = loader.seconds - self._seconds_before
        batches = loader.delivered_batches - self._batches_before
        if spent.examples and spent.batches and batches > 0:  # a resumed stream may report repeated reads
            batch_size = (loader.counts.delivered - self._examples_before) / batches
            self.seconds_per_batch = SecondsPerBatch(
                source=spent.source / spent.examples * batch_size,
                rest=spent.rest / spent.batches,
                collate=spent.collate / spent.batches,
            )
        if spent.batches and loader.reads_ahead:
            self.reads_in_flight = spent.in_flight / spent.batches * max(loader.num_workers, 1)
        return OfLoader(self.seconds_per_batch or NOT_KNOWN, self.reads_in_flight)

    def _expect_start(self, loader: EchoLoader) -> None:
        """Notes that the next batch of each worker is its first one."""
        self._workers_started_at = loader.delivered_batches + loader.num_workers
        self._is_starting = True


def costs_of(
    echoed: Echoed, of_ranks: Mapping[str, Sequence[SecondsPerBatch]], device_seconds: float, *, in_step: bool
) -> PipelineCosts | None:
    """Returns the costs of the slowest rank and loader; None in a case that the cost model does not know, see above.

    ``of_ranks``: the measurements of each rank, by the name of the loader. ``in_step``: each step took a batch of each loader.
    """
    parts = parts_of(echoed)
    known = {
        name: [
            PipelineCosts(loader.insertion_point.value, *seconds, device_seconds, loader.num_workers)
            for seconds in of_ranks[name]
            if seconds.is_known
        ]
        for name, loader in parts.items()
    }
    if not all(known.values()) or (isinstance(echoed, EchoLoaders) and not (in_step and echoed.fits_cost_model)):
        return None
    slowest = [max(costs, key=lambda each: each.host_seconds(echoed.factor)) for costs in known.values()]
    if slowest[0].workers:
        return max(slowest, key=lambda each: each.host_seconds(echoed.factor))
    return PipelineCosts(
        slowest[0].insertion_point,
        source_seconds=sum(each.source_seconds for each in slowest),
        rest_seconds=sum(each.rest_seconds for each in slowest),
        collate_seconds=sum(each.collate_seconds for each in slowest),
        device_seconds=device_seconds,
        workers=0,
    )


# ---------------------------------------------------------------------- run meter
# `RunMeter` measures a training epoch by epoch, and joins the ranks' measurements.
#
# It stands between Lightning's hooks and the clocks and metrics of ``measure/``. The ranks exchange a few numbers at the end of
# an epoch, and when a controller decides within an epoch. They exchange the counts whenever these are logged, and nothing in
# other steps.
#
# A controller is shown a *stretch*: the steps of the epoch since its last decision.

_ENOUGH_TO_SHOW = 10  # steps
_LEAST_IDLE = 0.01  # a smaller idle fraction proves nothing about a loader whose workers cannot be measured


@dataclass(frozen=True)
class EpochMeasures:
    """One epoch of the job."""

    whole: JobSteps | None  # all steps; None if no fetch was seen
    judged: JobSteps | None  # the steps of the last stretch that were planned with the factor in force; None if there are none
    costs: PipelineCosts | None  # of the slowest rank; None if the workers cannot be measured and no step waited
    first_batch_seconds: float | None  # the longest wait of any rank for the first batch, if workers had to start for it
    fresh: int  # examples in the epoch, all ranks
    echoed: int
    caches: Mapping[str, CacheUse] = field(default_factory=dict)  # by the name of the loader
    shared: ShareUse | None = None  # None if the loader does not share
    reads_in_flight: float | None = None  # of all loaders together, mean over the ranks; None if no threads read ahead
    worker_wait_fraction: float | None = None  # mean over the ranks; None if unknown
    parts: Mapping[str, Examples] = field(default_factory=dict)  # in the epoch, of each of several loaders, all ranks
    load: Load | None = None  # of the node whose cores other programs took most of; None if it is not known of each node
    is_counted: bool = True  # whether ``fresh`` and ``echoed`` are those of the whole epoch, and of all its batches
    slices: Sequence[tuple[float, float]] = ()  # seconds of waiting and all seconds, see `IdleFraction.slices`


class _Beside(NamedTuple):
    """What the ranks gather beside worker seconds. The first two are means over the ranks; None: unknown."""

    reads_in_flight: float | None
    worker_wait_fraction: float | None
    no_request: float | None  # the least of any rank, see `WorkerWaits.no_request`
    first_batch_seconds: float | None  # the longest of any rank
    load: Load | None  # of the node with the largest one


class RunMeter:
    """Measures one ``fit``."""

    def __init__(self) -> None:
        self.timer = StepTimer()
        self.idle, self.counts = IdleFraction(), RunCounts()  # of the epoch's steps, and of the run's examples
        self.part_counts: dict[str, RunCounts] = {}  # of each of several loaders, by name
        self._at_epoch_start: Examples | None = None  # the totals at the start of the epoch
        self._came_late = False  # this began within the epoch, from a checkpoint without its state
        self._parts_at_epoch_start: dict[str, Examples] = {}  # the same of each of several loaders; without an entry 0
        self._own_at_epoch_start = Examples()  # what this rank had been delivered then, or when it resumed within the epoch
        self._stretch_start = 0  # the number of the epoch's steps before the present stretch
        self._workers = 1  # of a loader, on the rank that has most of them; 0 count as one
        self.has_unknown_sizes = False  # if True, the numbers of examples are too small
        self._not_echoed = 0  # examples delivered on this rank by a loader that is not echoed
        self._loader_meters: dict[str, LoaderMeter] = {}
        self._cache_meter, self._share_meter, self._waits = CacheMeter(), ShareMeter(), WorkerWaits(0)
        self._cores: CoreWatch | None = None  # None: a shared reader works in other processes
        self._own_pids: list[int] = []  # of all ranks: this one may have started others
        self._is_rank_zero = False  # whether this rank gives advice
        self._other_runs: OtherRuns | None = None  # as they were when the verdict was asked for at the end
        self._steps_in_epoch = 0
        self._saved_seconds: dict[str, SecondsPerBatch] = {}  # from a checkpoint, by name of the loader
        self._watched: DataLoader[Any] | None = None
        self._tap: ProfilerTap | None = None
        self.has_stepped = False
        self.world_size = 1
        self.nodes, self.cores = [0], 1  # the node of each rank, as the Trainer numbers them; cores for each rank of this node

    @property
    def is_in_epoch(self) -> bool:
        """Whether steps of an epoch that has not ended were measured."""
        return self.idle.per_step.shape[-1] > 0

    @property
    def idle_so_far(self) -> float | None:
        """This rank's idle fraction in the epoch so far, without synchronising; None before the tenth step."""
        timer = self.timer
        return timer.waited_seconds / timer.seconds if timer.steps >= _ENOUGH_TO_SHOW and timer.seconds else None

    def own_in_epoch(self, loader: Echoed | None) -> Examples:
        """Returns the examples of this rank in the epoch so far, or since it resumed, without synchronising."""
        return self._delivered(loader).since(self._own_at_epoch_start)

    def waiting(self, fraction: float | None, loader: Echoed | None) -> Waiting:
        """Returns what is known of the workers that wait for this share of their time, and of the data. It reads no example."""
        unknown = Waiting(fraction, may_read_ahead=False)
        if self._watched is None:
            return unknown
        workers, size = self._watched.num_workers, self._watched.batch_size or 0
        try:
            kind = kind_of(self._watched)
            size = 0 if why_not_elsewhere(kind, self.world_size) else size
            may_read_ahead = isinstance(kind, Indexed) and may_be_on(self._watched.dataset)
            cached, has_cluster = cached_fraction(kind, loader), is_in_cluster()
            others = self._runs_beside() if self._may_share(kind) else NO_OTHER_RUNS
        except Exception:  # whatever the user's data set, or Ray, raises when it is looked at: no training may fail by advice
            return unknown
        return Waiting(fraction, may_read_ahead, workers, size, self.world_size, cached, has_cluster, *others)

    def node_of(self, rank: int) -> int | None:
        return self.nodes[rank] if len(set(self.nodes)) > 1 else None

    # ------------------------------------------------------------------ called by hooks

    def start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: Echoed | None) -> None:
        """Begins to measure a training, or continues after a resume. All ranks must call this together."""
        device = pl_module.device
        self._pl_module, self.world_size = pl_module, trainer.world_size
        self.nodes = self._gather([trainer.node_rank], dtype=torch.int64).flatten().tolist()
        self.cores = max(1, usable_cores() // self.nodes.count(trainer.node_rank))
        self._own_pids = self._gather([os.getpid()], dtype=torch.int64).flatten().tolist() if self.world_size > 1 else []
        self._is_rank_zero = trainer.is_global_zero
        self.idle.to(device)
        self._add_parts(loader)
        for counts in (self.counts, *self.part_counts.values()):
            counts.counter.to(device)
            if not trainer.is_global_zero:  # a checkpoint holds the job's totals: rank 0 alone counts them
                counts.counter.reset()
        if device.type == "cuda":
            self.timer.close()
            self.timer = StepTimer(events_of(device))
        self._tap = ProfilerTap(trainer.profiler, self.timer)  # type: ignore[attr-defined]  # Trainer sets it outside __init__
        self._train_dataloader = trainer.train_dataloader
        self._watched = watched_loader(self._train_dataloader if loader is None else loader)
        self._waits = WorkerWaits(0 if self._watched is None else self._watched.num_workers)
        self._plain_workers = None if loader is not None else _workers_in(self._train_dataloader)
        self._loader_meters = {name: LoaderMeter(part, self._saved_seconds.get(name)) for name, part in parts_of(loader).items()}
        if self._at_epoch_start is None:
            self.count(loader)
            self._note_epoch_start()
            self._came_late = True  # unless the first step is the epoch's first
        else:  # the checkpoint's totals contain the examples that the loader has delivered so far
            self._go_on_from(self.counts, loader, counts_job=trainer.is_global_zero)
            for name, part in self._counted_parts(loader).items():
                self._go_on_from(self.part_counts[name], part, counts_job=trainer.is_global_zero)
        self.begin_epoch(loader)

    def begin_epoch(self, loader: Echoed | None) -> None:
        """Begins an epoch, or continues one after a resume. All ranks must call this together."""
        self._share_meter.begin_epoch(loader)
        self._waits.begin_epoch()
        shares = any(part.sharing is not None for part in parts_of(loader).values())
        self._cores = None if shares else CoreWatch(apart=[pid for pid in self._own_pids if pid != os.getpid()])
        self._steps_in_epoch = 0
        self._cache_meter.begin_epoch(parts_of(loader))  # before the ranks exchange something: none of them delivers yet
        # All ranks wait if workers start on one of them.
        starts = not self.has_stepped or self._starts_workers(loader)
        workers = max((part.num_workers for part in parts_of(loader).values()), default=0)
        starts_anywhere, most_workers = self._gather([float(starts), float(workers)]).max(dim=0).values.tolist()
        self.timer.begin_epoch(goes_on=not starts_anywhere)
        self._workers = max(int(most_workers), 1)
        self.counts.counted = self._own_at_epoch_start = self._delivered(loader)
        self._add_parts(loader)
        for name, part in parts_of(loader).items():
            if name in self.part_counts:
                self.part_counts[name].counted = self._delivered(part)
            if name in self._loader_meters:
                self._loader_meters[name].begin_epoch(part)
            else:
                self._loader_meters[name] = LoaderMeter(part)

    def begin_step(self) -> None:
        self.timer.begin_step()

    def end_step(self, loader: Echoed | None, batch: Any, in_epoch: int) -> None:
        """Notes that the step is over, with batch ``in_epoch`` of the epoch, from 0.

        If the model takes ``dataloader_iter``, it fetches its batch within the step.
        """
        self.timer.end_step()
        self._waits.end_step()
        self._steps_in_epoch += 1
        steps = self._steps_in_epoch
        if steps >= FIRST_LOOK and not steps & (steps - 1) and self._cores is not None:  # 4, 8, 16 ...
            self._cores.look()
        if not self.has_stepped:
            self.has_stepped, self._came_late = True, self._came_late and in_epoch > 0
        if loader is None and batch is not None:
            parts = parts_at_leaves(self._train_dataloader, batch)
            sizes = [size_of(part) for part in parts if part is not None]
            if None in sizes and not self.has_unknown_sizes:
                self.has_unknown_sizes = True
                rank_zero_info(
                    "lightning_echo: examples are not counted, because a batch raises an error when it is asked for its size; "
                    "give it a batch_size"
                )
            self._not_echoed += sum(size or 0 for size in sizes)
        for name, part in parts_of(loader).items():
            self._loader_meters[name].end_step(part)

    def stop(self) -> None:
        """Ends measuring. You may call it at any time."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        self.timer.close()

    # ------------------------------------------------------------------ joined over ranks: all of them must call these together

    def count(self, loader: Echoed | None) -> Examples:
        self._count_delivered(loader)
        for counts in (self.counts, *self.part_counts.values()):
            counts.add_up()
        if loader is None and self.world_size > 1:
            self.has_unknown_sizes = self.largest(int(self.has_unknown_sizes)) > 0
        return self.counts.totals

    def in_epoch(self, loader: Echoed | None) -> Examples:
        """Returns the examples of all ranks in the epoch so far."""
        return self.count(loader).since(self._at_epoch_start or Examples())

    def part_metrics(self, loader: Echoed | None, *, passes: bool = False) -> dict[str, float]:
        """Returns the metrics of each of several loaders, from the last count."""
        found: dict[str, float] = {}
        for name, part in self._counted_parts(loader).items():
            totals = self.part_counts[name].totals
            found[f"echo/{name}/factor"] = totals.uses if part.on_demand else part.factor_in_force
            found |= {f"echo/{name}/fresh_examples": totals.fresh, f"echo/{name}/echoed_examples": totals.echoed}
            if passes:
                found[f"echo/{name}/passes"] = part.passes
        return found

    def largest(self, value: int) -> int:
        return int(self._gather([value], dtype=torch.int64).max())

    def end_stretch(self, loader: Echoed | None) -> tuple[JobSteps | None, PipelineCosts | None]:
        """Ends a stretch within an epoch, which are all steps since the last decision.

        Returns its ``judged`` and ``costs``, see `EpochMeasures` and `IdleFraction.stretch`.
        """
        self.timer.settle()  # all ranks must have measured the same steps
        self.idle.update(*self.timer.take())
        # The ranks exchange these steps, and as many before them, which may prove more about waiting than the last ones alone.
        # They exchange no more, because the steps of an epoch that never ends become more and more.
        begin, end = self._stretch_start, self.idle.per_step.shape[-1]
        kept = max(0, 2 * begin - end)
        steps = IdleFraction().to(self.idle.device)
        steps.update(*self.idle.per_step[:, kept:])
        judged = None
        if end > begin:
            settled = max(kept, self._first_judged(loader, end))
            with steps.sync_context():
                judged = steps.stretch(max(begin, settled) - kept, settled - kept, self._workers)
        of_ranks, beside = self._gather_seconds(loader)
        costs = self._costs(of_ranks, loader, judged, beside.no_request)
        self._stretch_start = self.idle.per_step.shape[-1]
        for name, part in parts_of(loader).items():
            self._loader_meters[name].begin_stretch(part)
        return judged, costs

    def end_epoch(self, loader: Echoed | None) -> EpochMeasures:
        self.timer.settle()
        measures = self.so_far(loader)
        self._note_epoch_start()
        self._came_late = False
        self.idle.reset()
        self._stretch_start = 0
        return measures

    def so_far(self, loader: Echoed | None) -> EpochMeasures:
        """Returns the measures of the epoch until now, which may continue."""
        self.idle.update(*self.timer.take())
        in_epoch = self.in_epoch(loader)
        parts = {
            name: counts.totals.since(self._parts_at_epoch_start.get(name, Examples()))
            for name, counts in self.part_counts.items()
        }
        gather = partial(self._gather, dtype=torch.int64)
        caches, shared = self._cache_meter.end_epoch(parts_of(loader), gather), self._share_meter.end_epoch(loader, gather)
        with self.idle.sync_context():
            whole = self.idle.steps()
            first = 0 if whole is None else max(self._stretch_start, self._first_judged(loader, whole.steps))
            judged = self.idle.steps(first, self._workers)
            slices = self.idle.slices()
        of_ranks, beside = self._gather_seconds(loader)
        costs = self._costs(of_ranks, loader, judged or whole, beside.no_request)
        return EpochMeasures(
            whole,
            judged,
            costs,
            beside.first_batch_seconds,
            *in_epoch,
            caches,
            shared,
            beside.reads_in_flight,
            beside.worker_wait_fraction,
            parts,
            beside.load,
            is_counted=not (self.has_unknown_sizes or self._came_late),
            slices=slices,
        )

    # ------------------------------------------------------------------ state

    def state_dict(self, loader: Echoed | None) -> dict[str, Any]:
        self._count_delivered(loader)
        self.idle.update(*self.timer.take())
        known = {name: each.seconds_per_batch for name, each in self._loader_meters.items()}
        seconds = {**self._saved_seconds, **{name: each for name, each in known.items() if each is not None}}
        return {
            "counts": self.counts.state(self.world_size, _under_way(loader)),
            "parts": {
                name: counts.state(self.world_size, _under_way(parts_of(loader).get(name)))
                for name, counts in self.part_counts.items()
            },
            "at_epoch_start": list(self._at_epoch_start or self.counts.totals),
            "came_late": self._came_late,
            "parts_at_epoch_start": {name: list(each) for name, each in self._parts_at_epoch_start.items()},
            "per_step": self.idle.per_step.cpu(),
            "stretch_start": self._stretch_start,
            "stages": {name: tuple(each) for name, each in seconds.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state; raises a FieldError if a field is missing or wrong. Call it before `start`."""
        self.idle.reset()
        self.counts.load(entry(state, "counts", tuple[int, int]))
        parts = entry(state, "parts", dict[str, tuple[int, int]])
        self.part_counts = {name: RunCounts() for name in parts}
        for name, counts in self.part_counts.items():
            counts.load(parts[name])
        self._at_epoch_start = Examples(*entry(state, "at_epoch_start", tuple[int, int]))
        self._came_late = entry(state, "came_late", bool)
        begun = entry(state, "parts_at_epoch_start", dict[str, tuple[int, int]])
        self._parts_at_epoch_start = {name: Examples(*each) for name, each in begun.items()}
        per_step = entry(state, "per_step", Tensor)
        if per_step.ndim != 2 or len(per_step) != 2:
            raise FieldError("per_step", f"must have the shape (2, steps), got {tuple(per_step.shape)}")
        self.idle.update(*per_step)
        self._stretch_start = entry(state, "stretch_start", int)
        self._saved_seconds = entry(state, "stages", dict[str, SecondsPerBatch])

    # ------------------------------------------------------------------ inside

    def _may_share(self, kind: Kind) -> bool:
        """Whether runs on this machine could share what a loader reads. Of a data set that is read in calls it is not known."""
        is_here = self._is_rank_zero and len(set(self.nodes)) == 1 and hasattr(os, "memfd_create")
        return is_here and not why_not_elsewhere(kind, self.world_size) and batched(kind.loader.dataset) is None

    def _runs_beside(self) -> OtherRuns:
        """Returns the other runs of this program. After the training it is the first answer, since they end, too."""
        if self._other_runs is None or self._tap is not None:
            self._other_runs = other_runs(self._own_pids)
        return self._other_runs

    def _note_epoch_start(self) -> None:
        self._at_epoch_start = self.counts.totals
        self._parts_at_epoch_start = {name: counts.totals for name, counts in self.part_counts.items()}

    def _add_parts(self, loader: Echoed | None) -> None:
        """Adds counts for each of several loaders. A reload by the user's hook may bring new loaders."""
        for name in loader if isinstance(loader, EchoLoaders) else ():
            if name not in self.part_counts:
                self.part_counts[name] = RunCounts()
                self.part_counts[name].counter.to(self._pl_module.device)

    def _starts_workers(self, loader: Echoed | None) -> bool:
        """Whether the next batch has to wait for workers to start. Those of an `EchoLoader` stay alive from epoch to epoch."""
        echoed = parts_of(loader)
        # Plain loaders restart in each epoch. Even if their workers stay alive, their queues are empty then.
        plain = [leaf for name, leaf in leaves_of(self._train_dataloader).items() if name not in echoed]
        if any(getattr(leaf, "num_workers", 1) for leaf in plain):
            return True
        return any(part.num_workers and not part.is_running for part in echoed.values())

    def _counted_parts(self, loader: Echoed | None) -> dict[str, EchoLoader]:
        return {name: part for name, part in parts_of(loader).items() if name in self.part_counts}

    def _delivered(self, loader: Echoed | None) -> Examples:
        return Examples(self._not_echoed) if loader is None else Examples(loader.counts.fresh, loader.counts.echoed)

    def _go_on_from(self, counts: RunCounts, loader: Echoed | None, *, counts_job: bool) -> None:
        delivered = self._delivered(loader)
        if self.world_size > 1 and any(part.on_demand for part in parts_of(loader).values()):
            of_ranks = self._gather(delivered, dtype=torch.int64)
            counts.correct(Examples(*of_ranks.sum(0).tolist()), counts_job=counts_job)
        counts.go_on_from(delivered)

    def _count_delivered(self, loader: Echoed | None) -> None:
        self.counts.update(self._delivered(loader))
        for name, part in self._counted_parts(loader).items():
            self.part_counts[name].update(self._delivered(part))

    def _first_judged(self, loader: Echoed | None, steps: int) -> int:
        """Returns the first step of the epoch that shows the factor in force, and whose workers had started before."""
        judged = [self._loader_meters[name].judged_batches(part) for name, part in parts_of(loader).items()]
        return max(0, steps - min(judged)) if judged else 0

    def _gather_seconds(self, loader: Echoed | None) -> tuple[dict[str, list[SecondsPerBatch]], _Beside]:
        """Gathers the ranks' worker seconds, by the loader's name, and what is gathered beside them."""
        measured = {name: self._loader_meters[name].measure(part) for name, part in parts_of(loader).items()}
        first_batch = self.timer.first_batch_seconds
        values = list(chain.from_iterable((*each.seconds, each.reads_in_flight) for each in measured.values()))
        if self._cores is not None:
            self._cores.look()
        use = NOT_SEEN if self._cores is None else self._cores.use
        last = (self._waits.fraction, self._waits.no_request, math.nan if first_batch is None else first_batch)
        gathered = self._gather([*(values or NOT_KNOWN), *last, *use])
        gathered, uses = gathered[:, : -len(use)], [CoreUse(*row) for row in gathered[:, -len(use) :].tolist()]
        ranks = len(gathered)
        by_loader = gathered[:, : len(values)].reshape(ranks, len(measured), len(NOT_KNOWN) + 1).transpose(0, 1)
        of_ranks = {
            name: [SecondsPerBatch(*row[:-1]) for row in rows] for name, rows in zip(measured, by_loader.tolist(), strict=True)
        }
        in_flight, waits = by_loader[..., -1], gathered[:, -3].nanmean().item()
        no_request, longest = gathered[:, -2].min().item(), gathered[:, -1].nan_to_num(-1).max().item()
        return of_ranks, _Beside(
            reads_in_flight=None if in_flight.isnan().all() else in_flight.nansum().item() / ranks,
            worker_wait_fraction=None if math.isnan(waits) else waits,
            no_request=None if math.isnan(no_request) else no_request,
            first_batch_seconds=longest if longest >= 0 else None,
            load=self._load_of(uses),
        )

    def _load_of(self, uses: Sequence[CoreUse]) -> Load | None:
        """Returns the load of the node whose cores other programs took most of."""
        nodes = self.nodes if len(self.nodes) == len(uses) else [0] * len(uses)
        of_nodes = [load_of([use for use, at in zip(uses, nodes, strict=True) if at == node]) for node in dict.fromkeys(nodes)]
        known = [load for load in of_nodes if load is not None]
        return max(known, key=lambda load: (load.is_notable, load.slowed_fraction), default=None)

    def _gather(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = torch.tensor(values, dtype=dtype, device=self._pl_module.device)
        gathered = self._pl_module.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered.reshape(-1, len(values)).cpu()

    def _costs(
        self,
        of_ranks: dict[str, list[SecondsPerBatch]],
        loader: Echoed | None,
        steps: JobSteps | None,
        no_request: float | None,
    ) -> PipelineCosts | None:
        if steps is None:
            return None
        if loader is not None and any(seconds.is_known for seconds in chain.from_iterable(of_ranks.values())):
            batches = {self._loader_meters[name].batches(part) for name, part in parts_of(loader).items()}
            return costs_of(loader, of_ranks, steps.busy_seconds, in_step=len(batches) == 1)
        if steps.idle_fraction < _LEAST_IDLE or (isinstance(loader, EchoLoaders) and not loader.fits_cost_model):
            return None
        workers = 1 if loader is not None else self._plain_workers
        if workers is None or (loader is not None and loader.on_demand):  # nor is it known how many examples of a batch are fresh
            return None
        factor = 1.0 if loader is None else loader.factor
        ahead = (no_request or 0.0) if loader is None else 0.0  # a loader that echoes asks its workers as its plan says
        return PipelineCosts.of_waiting(steps.wait_seconds + steps.busy_seconds, steps.idle_fraction, factor, workers, ahead)


def _under_way(loader: Echoed | None) -> Examples:
    """Returns the examples of a step that is not over, if a state that is saved now is that before its batch."""
    if loader is None:
        return Examples()
    return Examples(loader.counts.fresh, loader.counts.echoed).since(
        Examples(loader.saved_counts.fresh, loader.saved_counts.echoed)
    )


def _workers_in(loaders: Any) -> int | None:
    """Returns the number of workers of loaders that are not echoed; None if some have workers and others have none."""
    # An object without ``num_workers`` may prepare batches during the steps: it counts as a loader with a worker.
    found = {getattr(leaf, "num_workers", 1) for leaf in leaves_of(loaders).values()}
    return None if 0 in found and len(found) > 1 else max(found, default=1)


def events_of(device: torch.device) -> DeviceEvents:
    """Returns the CUDA events of a device, which all trainings of the process share."""
    return _EVENTS.setdefault(device, DeviceEvents(partial(torch.cuda.Event, enable_timing=True)))
