"""Predicts the step time, idle fraction and speed-up of another setting of a training, from the measurements of each stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_echo.analysis.measured import CachedExample, MeasuredStages, Spread, check_at_least
from lightning_echo.analysis.prefetch import FEWEST_BATCHES, fits_memory, times_as_long
from lightning_echo.insertion import POINTS, InsertionPoint, Needs, earliest, points_from
from lightning_echo.measure.control import TAKING_SECONDS, PipelineCosts, callback_line, least_of_most
from lightning_echo.split.reading import MOST_IN_FLIGHT, Part

# ---------------------------------------------------------------------- reads in flight
# Threads read ahead of the worker's own thread, which does the rest. So reading and the rest run concurrently, and the slower one
# counts. If the order is not known ahead, only the reads of one batch are under way at once, and the rest of it comes after them.


def read_seconds(stages: MeasuredStages, reads: int, figure: str = "median") -> float:
    """Returns the seconds per example with so many reads under way, all workers together. No more is promised than measured.

    Between two numbers that were measured, the time is a power of the number.
    """
    known = stages.in_flight
    after = next((number for number, each in enumerate(known) if each.reads >= reads), len(known) - 1)
    upper, lower = known[after], known[max(after - 1, 0)]
    high, low = getattr(upper.seconds, figure), getattr(lower.seconds, figure)
    if reads >= upper.reads or upper is lower or not (high and low):
        return float(high)
    power = math.log(high / low) / math.log(upper.reads / lower.reads)
    return float(low * (reads / lower.reads) ** power)


def _cpu_of_read(stages: MeasuredStages, reads: int) -> float:
    """Returns the processor time of a read among so many."""
    return min(stages.in_flight, key=lambda each: abs(math.log(each.reads / reads))).cpu_seconds


# ---------------------------------------------------------------------- caches
# A cache holds raw items or loaded examples (`CacheConfig.hold`). All workers and ranks of a machine share one cache.

HOLDS = {"raw": earliest(Needs.raw_items), "loaded": earliest(Needs.split)}
"""The forms, each with the insertion point whose cut gives it."""

_MOST_OF_FREE = 0.75  # the rest is for the buffer of echoes and for the training
_SPARE = 1.05  # a margin, since the mean size of the measured examples may be too small
_MIB, _GIB = 2**20, 2**30


def possible_holds(stages: MeasuredStages) -> tuple[str, ...]:
    """Returns the forms in which a cache can hold an example. If that was not measured, they follow from the insertion points."""
    if stages.in_cache is None:
        return tuple(hold for hold, point in HOLDS.items() if point.value in stages.points)
    return tuple(stages.in_cache)


def fits_point(hold: str, insertion_point: str) -> bool:
    """Whether the cut of the cache does not come after the insertion point."""
    reused = InsertionPoint(insertion_point).properties.reused
    return all(stage in reused for stage in HOLDS[hold].properties.reused)


def cached_example(stages: MeasuredStages, hold: str) -> CachedExample | None:
    """Returns the cost of an example in this form; None if that was not measured."""
    return None if stages.in_cache is None else stages.in_cache.get(hold)


def fitting_fraction(stages: MeasuredStages, hold: str) -> float | None:
    """Returns the largest share of the data set that memory holds, in whole percent; None if unknown."""
    whole = _bytes_of(stages, hold, 1.0)
    if whole is None or stages.free_bytes is None:
        return None
    return min(1.0, math.floor(100 * _MOST_OF_FREE * stages.free_bytes / whole) / 100) if whole else 1.0


def size_for(stages: MeasuredStages, hold: str, fraction: float) -> str | None:
    """Returns the size of a cache for a share of the data set, as `CacheConfig` takes it; None if unknown."""
    size = _bytes_of(stages, hold, fraction)
    if size is None:
        return None
    return f"{math.ceil(10 * size / _GIB) / 10:g}GiB" if size >= _GIB else f"{max(1, math.ceil(size / _MIB))}MiB"


def _bytes_of(stages: MeasuredStages, hold: str, fraction: float) -> float | None:
    example = cached_example(stages, hold)
    if example is None or stages.examples is None:
        return None
    return _SPARE * fraction * stages.examples * example.bytes


# ---------------------------------------------------------------------- prefetching


def queue_fits(stages: MeasuredStages, setting: TrainingSetting) -> bool:
    """Whether the batches that the workers of all ranks prefetch with a setting take a small part of the free memory."""
    workers, prefetch_factor = _queue_of(stages, setting)
    batches = workers * prefetch_factor * stages.ranks
    return fits_memory(stages.batch_bytes, batches, stages.free_bytes, stages.free_shared_bytes)


def waiting_for_long_batches(stages: MeasuredStages, setting: TrainingSetting, slower: float = 1.0) -> float:
    """Returns how many times as long a step takes since batches take unequally long, and the queue is as short as it is.

    With ``slower``, each batch takes this many times as long. Their times are taken to have the same proportions in each setting.
    A reader's queue is another one, and is not predicted.
    """
    workers, prefetch_factor = _queue_of(stages, setting)
    if not stages.batch_seconds or not workers or setting.has_reader:
        return 1.0
    alone = costs_of(replace(stages, contention=1.0), TrainingSetting()).host_seconds(1) * max(stages.workers, 1)
    costs = costs_of(stages, setting)
    times = slower * costs.host_seconds(setting.factor) * workers / alone if alone else 0.0
    at_least = max(costs.device_seconds, _cores_seconds(stages, setting, "median"), reads_per_step(stages, setting))
    return times_as_long(tuple(times * each for each in stages.batch_seconds), workers, prefetch_factor, at_least)


def _queue_of(stages: MeasuredStages, setting: TrainingSetting) -> tuple[int, int]:
    workers = stages.workers if setting.workers is None else setting.workers
    return workers, setting.prefetch_factor or stages.prefetch_factor


# ---------------------------------------------------------------------- predict
# Predicts the step time, idle fraction and speed-up of another setting:
#
#     r(x, s)  = x * read_cached + (1 - x) * read / s        reading one example, a share x in memory, the storage s times as fast
#              = x * hit + (1 - x) * read / s                a share x in a cache of ours; of loaded examples, only a share
#                                                            1 - x is decoded
#     host     = max(h(e), cpu(e) / cores)                   h(e): the cost model's host time per batch, read = r(x, s)
#     T        = max(host, step / n + copy + hand-over)      the accelerator n times as fast
#     T        = host + step / n + copy                      without workers: everything takes turns
#     T        = max(T, B / e * (1 - x) * read_N / s)        threads read ahead, N reads under way. Of reading, h has only the
#                                                            processor time of the threads: a worker takes turns with them
#     T        = max(T, pin)                                 batches are pinned: the copy is that from pinned memory
#     T        = q * T                                       batches take unequally long: q by simulation (prefetch.py)
#
# DS-Analyzer (Mohan et al. 2021, arXiv 2007.06775, section 3.4) predicts min(F, P, G), with the preparation rate P, the ingestion
# rate G and the fetch rate F = 1 / (x / C + (1 - x) / S): its loader fetches ahead of what it prepares. A worker of torch's
# ``DataLoader`` reads an example and then prepares it, so here both times add up in h.
#
# * ``cpu(e)`` is the processor time of a batch, the step included. If all processors are busy, more workers change nothing.
# * While the training runs, workers may take longer than alone (`MeasuredStages.contention`). Workers that share a storage or
#   processors take longer the more of them there are (`read_sharing`, `prepare_sharing`). Both are in h.
# * With echoing, reads in flight or a cache of ours, T contains no hand-over if an `EchoLoader` takes batches from the workers in
#   a thread of its own. Otherwise, an echoed batch needs no hand-over.
# * At ``after_transfer``, an echo needs no copy either.
# * A thread pins the batches while the step runs. Without workers, the training does it. Echoes of whole batches are pinned
#   already.
# * With fewer fresh batches, or faster stages, the times of all batches are multiplied by the same number in the simulation.
# * If k trainings share one reader (CoorDL's coordinated preparation: section 4.3), the reader's workers read, decode and augment
#   once for all of them. Each training collates in a thread of its own, while its step runs. So the processors do the reader's
#   work once and the rest k times: ``T = max(upstream(e) / workers, collate(e), step / n + copy, (cpu_upstream(e) + k cpu_own(e))
#   / cores)``. It is assumed that each training has an accelerator of its own.
# * N workers on other machines make a share y of the fresh examples, and the reader's workers the rest. Each has a core of its
#   own, reads one example after the other, and takes as long as one worker alone here. The share settles where T is least
#   (`least_of_most`), since lanes get the next examples when they are free:
#
#     T    = max(collate(e), step / n + copy, the least over y of
#                max((1 - y) * upstream(e) / workers, y * B / e * (read + decode + augment) / N, y * B / e * taking * ranks,
#                    ((1 - y) * cpu_upstream(e) + y * B / e * taking + k cpu_own(e)) / cores))
#
#   ``taking`` is the time that an example from there costs this machine (`TAKING_SECONDS`). All of it is taken to be that of one
#   thread for all ranks, which may be more than it is. Where ``read_sharing`` is above 0, workers on other machines make the
#   storage slower for all, as more workers here would. Whether the machines share a storage, and what it can deliver to them all,
#   is not measured.

_WAITS = 1.1  # a training waits for its workers if its steps take this many times as long as with everything ready
_HELPS = 0.9  # more workers help if with twice as many a step takes at most this many times as long
_WAITS_FOR_READS = 0.8  # share of a batch's time, from which on it shows reads rather than the workers' own threads
_MOST_AHEAD_CONTENTION = 10.0
_LEAST_CONTENTION, _MOST_CONTENTION = 0.9, 3.0  # a value beyond has other reasons


@dataclass(frozen=True)
class TrainingSetting:
    """A setting of the training that can be asked about.

    Attributes:
        workers: Number of worker processes; None: as measured.
        factor: Echo factor, >= 1.
        insertion_point: Where the echo stage stands. At factor 1 it makes no difference.
        cached_fraction: Share of the data set that is in memory, in [0, 1].
        hold: The form in which a cache of ours holds that share. ``"raw"``: it is not read again, but decoded. ``"loaded"``: it
            is neither read nor decoded again. None: there is no such cache, and that share is in the system's page cache, from
            which files are read faster.
        cache_size: Size of the cache that holds that share, as `CacheConfig` takes it. It has no influence on predictions, which
            use ``cached_fraction``.
        shared_by: Number of such trainings on this machine that share one reader. ``workers`` are then the reader's.
        reads_in_flight: Number of reads that may be under way on a rank. 1: workers read one example after the other.
        prefetch_factor: Number of batches that each worker is asked for ahead; None: as measured.
        pin_memory: Whether the loader pins its batches, so that they are copied faster to the device. False: as measured.
        cluster_workers: Number of workers on other machines, each with a core of its own, that prepare examples for the reader of
            this training, besides ``workers`` (`ShareConfig.cluster_workers`). With several ranks: the number for each rank.
            Their reading is assumed to scale as that of more workers here does (`MeasuredStages.read_sharing`). What a storage
            that all machines share can deliver was not measured.
        storage_speedup: How many times as fast the storage is.
        step_speedup: How many times as fast the accelerator is.

    Raises:
        ValueError: An option has an impossible value.
    """

    workers: int | None = None
    factor: float = 1.0
    insertion_point: str = earliest(Needs.batches).value
    cached_fraction: float = 0.0
    storage_speedup: float = 1.0
    step_speedup: float = 1.0
    hold: str | None = None
    cache_size: str | None = None
    shared_by: int = 1
    reads_in_flight: int = 1
    cluster_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_at_least("workers", self.workers, 0)
        check_at_least("factor", self.factor, 1)
        if self.insertion_point not in POINTS:
            known = ", ".join(repr(point.value) for point in POINTS)
            raise ValueError(f"insertion_point must be one of {known}, got {self.insertion_point!r}")
        check_at_least("cached_fraction", self.cached_fraction, 0)
        if self.cached_fraction > 1:
            raise ValueError(f"cached_fraction must be a share in [0, 1], got {self.cached_fraction!r}; 1 is all of the data set")
        for name in ("storage_speedup", "step_speedup"):
            check_at_least(name, getattr(self, name), 0)
            if not getattr(self, name):
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)!r}; 2 is twice as fast")
        if self.hold is not None and self.hold not in HOLDS:
            raise ValueError(f"hold must be {' or '.join(map(repr, HOLDS))} or None, got {self.hold!r}")
        if self.hold is not None and not self.cached_fraction:
            raise ValueError(f"hold={self.hold!r} needs a share that is held: give cached_fraction, too")
        if self.hold is not None and self.factor > 1 and not fits_point(self.hold, self.insertion_point):
            raise ValueError(
                f"hold={self.hold!r} does not fit insertion_point={self.insertion_point!r}, whose echoes redo a part of what is "
                f"held: use hold={next(iter(HOLDS))!r}, or a later insertion point"
            )
        self._check_loader()
        self._check_shared()

    def _check_loader(self) -> None:
        ahead = self.prefetch_factor
        if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1):
            raise ValueError(f"prefetch_factor must be a number of batches for each worker, 1 or more, or None, got {ahead!r}")
        if ahead is not None and self.workers == 0:
            raise ValueError(f"prefetch_factor={ahead} needs workers that prefetch: give workers=1 or more, or None")
        if not isinstance(self.pin_memory, bool):
            raise ValueError(f"pin_memory must be True or False, got {self.pin_memory!r}")

    def _check_shared(self) -> None:
        if isinstance(self.shared_by, bool) or not isinstance(self.shared_by, int) or self.shared_by < 1:
            raise ValueError(f"shared_by must be a number of trainings, 1 or more, got {self.shared_by!r}")
        reads = self.reads_in_flight
        if isinstance(reads, bool) or not isinstance(reads, int) or not 1 <= reads <= MOST_IN_FLIGHT:
            raise ValueError(f"reads_in_flight must be a number of reads from 1 to {MOST_IN_FLIGHT:,}, got {reads!r}")
        there = self.cluster_workers
        if isinstance(there, bool) or not isinstance(there, int) or there < 0:
            raise ValueError(f"cluster_workers must be a number of workers on other machines, 0 or more, got {there!r}")
        if not self.has_reader:
            return
        asked = f"cluster_workers={there}" if there else f"shared_by={self.shared_by}"
        if self.hold is not None:
            raise ValueError(
                f"{asked} and hold={self.hold!r} are impossible together: a cache in a reader is not predicted. Ask about one of "
                "them"
            )
        later = [point.value for point in points_from(Needs.examples)]
        if self.factor > 1 and self.insertion_point not in later:
            raise ValueError(
                f"{asked} does not fit insertion_point={self.insertion_point!r}, since examples are shared as they are "
                f"augmented: use one of {', '.join(map(repr, later))}"
            )

    @property
    def has_reader(self) -> bool:
        """Whether a reader prepares the examples, and the training only collates them."""
        return self.shared_by > 1 or self.cluster_workers > 0

    @property
    def options(self) -> dict[str, Any]:
        """The options of an `EchoConfig` for this setting; empty if the setting neither reads ahead, nor echoes, nor caches."""
        beside: dict[str, Any] = {}
        if self.cache_size and self.hold:
            beside["cache"] = {"size": self.cache_size, "hold": self.hold}
        if self.reads_in_flight > 1:
            beside["reads_in_flight"] = self.reads_in_flight
        if self.factor > 1:
            return {"factor": self.factor, "insertion_point": self.insertion_point, **beside}
        return {"factor": 1.0, **beside} if beside else {}

    @property
    def line(self) -> str:
        """The `EchoCallback` for the Trainer, as a line of Python; empty if this setting has no `options`."""
        return callback_line(self.options) if self.options else ""

    @property
    def loader_options(self) -> dict[str, Any]:
        """The options of the user's ``DataLoader`` that this setting asks for, in its words."""
        options = {"num_workers": self.workers, "prefetch_factor": self.prefetch_factor, "pin_memory": self.pin_memory or None}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def lines_of_loader(self) -> list[str]:
        """The options of the ``DataLoader`` that change, as a line to paste: ``num_workers=4, prefetch_factor=8``. Or none."""
        line = ", ".join(f"{name}={value}" for name, value in self.loader_options.items())
        return [line] if line else []

    @property
    def lines(self) -> list[str]:
        """The lines to paste: `lines_of_loader`, and `line` for the Trainer if any."""
        return [*self.lines_of_loader, self.line] if self.line else self.lines_of_loader


@dataclass(frozen=True)
class Prediction:
    """The prediction for a setting.

    Attributes:
        step_seconds: Seconds from step to step.
        idle_fraction: Share of that time in which the accelerator waits.
        speedup: Steps per second, divided by those of the setting that was measured.
        step_seconds_range: Lowest and highest number of seconds from step to step, from the measured spread.
        limit: The limit of the time: ``"step"``, ``"workers"``, ``"storage"`` or ``"cores"`` (of this machine); ``"queue"`` if
            steps wait behind single long batches, so that prefetching more would help; ``"pinning"`` if the thread that pins
            batches is the slowest. Only in the case of ``"workers"``, more workers would help; with ``cluster_workers``, more of
            both kinds.
    """

    step_seconds: float
    idle_fraction: float
    speedup: float
    step_seconds_range: tuple[float, float]
    limit: str


def predict(stages: MeasuredStages, setting: TrainingSetting) -> Prediction:
    """Returns the prediction for a setting; raises a ValueError if this data set rules out its insertion point or its cache.

    Workers on other machines (``cluster_workers``) are assumed to compute as fast as one worker alone here, and to read as more
    workers here would. A limit of a storage that all machines share, and the network, are not in the prediction.

    Example:
        >>> from lightning_echo.analysis.predict import Spread
        >>> seconds = dict.fromkeys(("read_cached", "decode", "augment", "collate", "hand_over", "copy"), Spread.exactly(0.0))
        >>> stages = MeasuredStages(
        ...     read=Spread.exactly(0.01), step=Spread.exactly(0.02), **seconds, read_cpu_share=0.0, prepare_cpu_share=1.0,
        ...     step_cpu_seconds=0.0, batch_size=8, workers=2, takes_ahead=True, cores=4,
        ...     points=("after_augmentation", "after_batching"),
        ... )
        >>> predict(stages, TrainingSetting()).idle_fraction, predict(stages, TrainingSetting(workers=4)).speedup
        (0.5, 2.0)
    """
    if setting.factor > 1 and setting.insertion_point not in stages.points:
        possible = ", ".join(stages.points)
        raise ValueError(f"insertion_point={setting.insertion_point!r} is not possible here; these are: {possible}")
    if setting.hold is not None and setting.hold not in possible_holds(stages):
        raise ValueError(
            f"hold={setting.hold!r} is not possible here: a cache cannot hold the examples of this data set in this form; these "
            f"are possible: {', '.join(map(repr, possible_holds(stages))) or 'none'}"
        )
    if setting.reads_in_flight > 1 and not stages.in_flight:
        why = stages.no_reads_ahead or "how reads scale was not measured"
        raise ValueError(f"reads_in_flight={setting.reads_in_flight} is not possible here: {why}")
    if setting.cluster_workers and stages.no_cluster_workers:
        raise ValueError(f"cluster_workers={setting.cluster_workers} is not possible here: {stages.no_cluster_workers}")
    if why := _no_loader_option(stages, setting):
        raise ValueError(why)
    times, times_now = (waiting_for_long_batches(stages, each) for each in (setting, TrainingSetting()))
    seconds, limit = _step_seconds(stages, setting, "median")
    seconds, limit = times * seconds, "queue" if times > 1 else limit
    now = times_now * _step_seconds(stages, TrainingSetting(), "median")[0]
    low, high = (times * _step_seconds(stages, setting, figure)[0] for figure in ("low", "high"))
    busy = stages.step.median / setting.step_speedup
    return Prediction(
        step_seconds=seconds,
        idle_fraction=max(0.0, 1 - busy / seconds) if seconds else 0.0,
        speedup=now / seconds if seconds else 1.0,
        step_seconds_range=(low, high),
        limit=limit,
    )


def _no_loader_option(stages: MeasuredStages, setting: TrainingSetting) -> str:
    """Returns why the options of the loader are not possible; empty if they are."""
    workers, ahead = stages.workers if setting.workers is None else setting.workers, setting.prefetch_factor
    if ahead is not None and not workers:
        return f"prefetch_factor={ahead} is not possible here, since the loader has no workers that prefetch: give workers, too"
    if ahead is not None and not stages.batch_seconds:
        why = f"the times of single batches were not measured (that takes {FEWEST_BATCHES} of them, and no stream)"
        return f"prefetch_factor={ahead} is not possible here: {why}"
    if setting.pin_memory and stages.pinning is None:
        return f"pin_memory=True is not possible here: {stages.no_pinning or 'copies from pinned memory were not measured'}"
    return ""


def contention(stages: MeasuredStages, step_seconds: float) -> float:
    """Returns the time that workers take while the training runs (its data in memory), divided by the time they take alone.

    If the training does not wait for its workers, it reveals nothing about them, and the result is 1.
    """
    warm = replace(stages, read=Spread.exactly(0.0), read_cached=Spread.exactly(0.0))
    costs, cold = costs_of(warm, TrainingSetting()), costs_of(stages, TrainingSetting()).host_seconds(1)
    host = costs.host_seconds(1)
    if not host:
        return 1.0
    warm = replace(warm, batch_seconds=tuple(each * host / cold for each in stages.batch_seconds))
    if step_seconds < _WAITS * waiting_for_long_batches(warm, TrainingSetting()) * costs.device_seconds:
        return 1.0
    times = (step_seconds if stages.workers else step_seconds - costs.device_seconds) / host
    return times if _LEAST_CONTENTION <= times <= _MOST_CONTENTION else 1.0


def ahead_contention(stages: MeasuredStages, reads: int, batch_seconds: float) -> float:
    """Returns `MeasuredStages.ahead_contention`, from the seconds of a batch of the loader alone with so many reads in flight.

    If the workers' own threads wait for reads, that reveals nothing about them, and the result is 1.
    """
    alone, setting = replace(stages, contention=1.0, ahead_contention=1.0), TrainingSetting(reads_in_flight=reads)
    host = costs_of(alone, setting).host_seconds(1)
    if not host or reads_per_step(alone, setting) > _WAITS_FOR_READS * batch_seconds:
        return 1.0
    return min(max(batch_seconds / host, 1.0), _MOST_AHEAD_CONTENTION)


def costs_of(stages: MeasuredStages, setting: TrainingSetting, figure: str = "median") -> PipelineCosts:
    """Returns the cost model's figures of a setting, from the ``"median"``, ``"low"`` or ``"high"`` ``figure`` of each `Spread`.

    ``device_seconds`` are those of step, copy and hand-over together.
    """
    workers = stages.workers if setting.workers is None else setting.workers
    point = InsertionPoint(setting.insertion_point)
    copies = 1 / setting.factor if "transfer" in point.properties.reused else 1.0  # per step
    copy = stages.pinning.copy if setting.pin_memory and stages.pinning is not None else stages.copy
    device = getattr(stages.step, figure) / setting.step_speedup + copies * getattr(copy, figure)
    is_hidden = stages.takes_ahead and (setting.factor > 1 or setting.reads_in_flight > 1 or setting.hold is not None)
    if workers and not setting.has_reader and not is_hidden:
        hand_overs = 1 / setting.factor if point.by_batches else 1.0  # per step
        device += hand_overs * getattr(stages.hand_over, figure)
    if not workers:
        device += _pin_seconds(stages, setting, figure)
    return _costs_at(setting.insertion_point, _worker_seconds(stages, setting, figure), device, workers)


class _WorkerSeconds(NamedTuple):
    """Worker seconds per batch of fresh examples."""

    hit: float
    read: float
    decode: float
    augment: float
    collate: float


def _step_seconds(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> tuple[float, str]:
    """Returns the time per step, and its limit, see `Prediction`."""
    if setting.cluster_workers:
        return _cluster_seconds(stages, setting, figure)
    costs, by_reads = costs_of(stages, setting, figure), reads_per_step(stages, setting, figure)
    by_pinning = _pin_seconds(stages, setting, figure) if costs.workers else 0.0
    seconds = max(_seconds_with_cores(stages, setting, figure), by_reads, by_pinning)
    by_cores = _cores_seconds(stages, setting, figure)
    if by_cores > seconds:
        return by_cores, "cores"
    if seconds == costs.device_seconds:
        return seconds, "step"
    if seconds == by_pinning:
        return seconds, "pinning"
    if seconds == by_reads:
        return seconds, "storage"
    with_twice = _seconds_with_cores(stages, replace(setting, workers=2 * max(costs.workers, 1)), figure)
    if with_twice < _HELPS * seconds:
        return seconds, "workers"
    return seconds, "storage" if stages.read_sharing > stages.prepare_sharing else "cores"


def _seconds_with_cores(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> float:
    """Returns the time per step if there are processors enough."""
    costs = costs_of(stages, setting, figure)
    if setting.shared_by == 1:
        return costs.step_seconds(setting.factor)
    upstream, own = _shared_seconds(setting, _worker_seconds(stages, setting, figure))
    return max(upstream / max(costs.workers, 1), own, costs.device_seconds)


def _cluster_seconds(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> tuple[float, str]:
    """Returns the time per step if workers on other machines prepare a share of the examples, and its limit."""

    def seconds_with(times: int) -> float:
        asked = replace(setting, workers=times * max(costs.workers, 1), cluster_workers=times * setting.cluster_workers)
        upstream, own = _shared_seconds(asked, _worker_seconds(stages, asked, figure))
        busy_upstream, rest = _shared_seconds(asked, _busy_seconds(stages, asked, figure))
        rest = asked.shared_by * (rest + stages.step_cpu_seconds / asked.step_speedup)
        fresh = stages.batch_size / asked.factor
        taking = fresh * TAKING_SECONDS
        limits = [  # at the ends: all examples are from other machines, and none are
            (0.0, upstream / (asked.workers or 1)),
            (0.0, reads_per_step(stages, asked, figure)),
            (fresh * _lone_seconds(stages, asked, figure) / asked.cluster_workers, 0.0),
            (taking * stages.ranks, 0.0),  # one reader takes them in for all ranks
            ((taking + rest) / stages.cores, (busy_upstream + rest) / stages.cores),
        ]
        return max(least_of_most(limits), own, costs.device_seconds)

    costs = costs_of(stages, setting, figure)
    seconds = seconds_with(1)
    if seconds == costs.device_seconds:
        return seconds, "step"
    with_twice = seconds_with(2)
    if with_twice < _HELPS * seconds or with_twice == costs.device_seconds:
        return seconds, "workers"
    return seconds, "storage" if stages.read_sharing > stages.prepare_sharing else "cores"


def _lone_seconds(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> float:
    """Returns the seconds of a worker with a core of its own for an example, without collation. No memory here holds it."""
    read = getattr(stages.read, figure) / setting.storage_speedup * _times_reading(stages, setting)
    prepare = getattr(stages.decode, figure) + getattr(stages.augment, figure)
    return float(read + prepare * (1 / max(stages.workers, 1)) ** stages.prepare_sharing)


def mostly_computes(stages: MeasuredStages) -> bool:
    """Whether a worker with a core of its own is busy for at least half of the time in which it prepares an example."""
    busy = stages.read.median * stages.read_cpu_share
    busy += (stages.decode.median + stages.augment.median) * stages.prepare_cpu_share
    return 2 * busy >= _lone_seconds(stages, TrainingSetting(), "median")


def _times_reading(stages: MeasuredStages, setting: TrainingSetting) -> float:
    """Returns how many times as long a worker reads an example from the storage, since others read from it as well."""
    workers = stages.workers if setting.workers is None else setting.workers
    return float(((max(workers, 1) + setting.cluster_workers) / max(stages.workers, 1)) ** stages.read_sharing)


def reads_per_step(stages: MeasuredStages, setting: TrainingSetting, figure: str = "median") -> float:
    """Returns the time per step in which threads read what it needs; 0 if they do not read ahead of the rest."""
    if setting.reads_in_flight == 1 or not stages.takes_ahead:
        return 0.0
    read = stages.batch_size / setting.factor * (1 - setting.cached_fraction)
    return read * read_seconds(stages, setting.reads_in_flight, figure) / setting.storage_speedup


def _pin_seconds(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> float:
    """Returns the time per step in which batches are pinned; 0 if they are not, or are already."""
    if not setting.pin_memory or stages.pinning is None:
        return 0.0
    pinned = 1 / setting.factor if InsertionPoint(setting.insertion_point).by_batches else 1.0  # per step
    return float(pinned * getattr(stages.pinning.pin, figure))


def _shared_seconds(setting: TrainingSetting, seconds: _WorkerSeconds) -> tuple[float, float]:
    """Returns two times per step: of the reader's work for all trainings, and of a training's own work without its step."""
    collations = 1 / setting.factor if InsertionPoint(setting.insertion_point).by_batches else 1.0  # per step
    return (seconds.hit + seconds.read + seconds.decode + seconds.augment) / setting.factor, seconds.collate * collations


def cores_wanted(stages: MeasuredStages, setting: TrainingSetting) -> float:
    """Returns the cores that keep up with the accelerator: processor time of a step's examples and of the training, per step."""
    return _cores_seconds(stages, setting, "median") * stages.cores / costs_of(stages, setting).device_seconds


def _cores_seconds(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> float:
    """Returns the time per step if all processors are always busy. Time in which a process waits does not count."""
    busy = _busy_seconds(stages, setting, figure)
    if setting.shared_by > 1:
        upstream, own = _shared_seconds(setting, busy)
        return (upstream + setting.shared_by * (own + stages.step_cpu_seconds / setting.step_speedup)) / stages.cores
    cpu = _costs_at(setting.insertion_point, busy, 0.0, 1)
    return (cpu.host_seconds(setting.factor) + stages.step_cpu_seconds / setting.step_speedup) / stages.cores


def _busy_seconds(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> _WorkerSeconds:
    """Returns the processor time of the workers per batch of fresh examples."""
    alone = replace(stages, contention=1.0, ahead_contention=1.0, read_sharing=0.0, prepare_sharing=0.0)
    seconds, share = _worker_seconds(alone, setting, figure), stages.prepare_cpu_share
    read = seconds.read * stages.read_cpu_share
    if setting.reads_in_flight > 1:
        in_storage = stages.batch_size * (1 - setting.cached_fraction)
        read = in_storage * _cpu_of_read(stages, setting.reads_in_flight)
    return _WorkerSeconds(
        seconds.hit,
        read,
        seconds.decode * share,
        seconds.augment * share,
        seconds.collate * share,
    )


def _worker_seconds(stages: MeasuredStages, setting: TrainingSetting, figure: str) -> _WorkerSeconds:
    cached, size = setting.cached_fraction, stages.batch_size
    workers = stages.workers if setting.workers is None else setting.workers
    times_workers = max(workers, 1) / max(stages.workers, 1)
    slower = stages.contention * times_workers**stages.prepare_sharing
    slower *= stages.ahead_contention if setting.reads_in_flight > 1 else 1.0
    from_storage = getattr(stages.read, figure) / setting.storage_speedup * _times_reading(stages, setting)
    in_cache = cached if setting.hold is not None else 0.0
    in_memory = cached - in_cache
    held = None if setting.hold is None else cached_example(stages, setting.hold)
    read = in_memory * getattr(stages.read_cached, figure) + (1 - cached) * from_storage
    decoded = 1 - in_cache if setting.hold is not None and "decode" in HOLDS[setting.hold].properties.reused else 1.0
    if setting.reads_in_flight > 1:
        read = in_memory * getattr(stages.read_cached, figure) + (1 - cached) * _own_read(stages, setting, figure, workers)
        read *= stages.ahead_contention
        if stages.read_ahead == Part.whole.value:  # threads decode what is not in a cache
            decoded = decoded - (1 - in_cache)
    return _WorkerSeconds(
        hit=size * in_cache * getattr(held.hit, figure) * slower if held is not None else 0.0,
        read=size * read * (1 + (stages.contention - 1) * stages.read_cpu_share),
        decode=size * decoded * getattr(stages.decode, figure) * slower,
        augment=size * getattr(stages.augment, figure) * slower,
        collate=getattr(stages.collate, figure) * slower,
    )


def _own_read(stages: MeasuredStages, setting: TrainingSetting, figure: str, workers: int) -> float:
    """Returns the time of a worker's own thread for reading an example that threads read ahead."""
    own = _cpu_of_read(stages, setting.reads_in_flight)  # threads of a process take turns with its own thread
    if stages.read_ahead == Part.files.value:
        own += getattr(stages.read_cached, figure)
    if not stages.takes_ahead:
        reads = min(setting.reads_in_flight, max(1, int(stages.batch_size)) * max(workers, 1))
        own += read_seconds(stages, reads, figure) * max(workers, 1) / setting.storage_speedup
    return own


def _costs_at(point: str, seconds: _WorkerSeconds, device: float, workers: int) -> PipelineCosts:
    """Returns the costs of echoing at an insertion point. Work before it belongs to the source, work after it to the rest."""
    reused = InsertionPoint(point).properties.reused
    source = rest = 0.0
    for stage, spent in (("read", seconds.hit + seconds.read), ("decode", seconds.decode), ("augment", seconds.augment)):
        if stage in reused:
            source += spent
        else:
            rest += spent
    return PipelineCosts(point, source, rest, seconds.collate, device, workers)
