"""What an analysis measures: the seconds of each stage of a training by itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_echo.insertion import POINTS
from lightning_echo.split.reading import Part

# ---------------------------------------------------------------------- measured
#     read --> decode --> augment --> collate --> hand-over --> copy --> step
#     |<------------- workers, per example ---->| |<- main process, per batch ->|
#
# Each figure is a median and its variation (`Spread`). Reading has two times: cold (from the storage) and warm (from memory). The
# other stages do not depend on where the data is.
#
# If a data set cannot be cut into all stages, a stage is contained in the one before it:
#
# * If reading and decoding cannot be separated, ``read`` is the time by which a cold run is longer than a warm run.
# * If augmentation cannot be separated, it is in ``decode``.
#
# `points` holds the insertion points that are then possible.

_BLOCKS = 10
_READ_AHEAD = {part.value: part for part in Part}
_NOT_NEGATIVE = (
    *("read_cpu_share", "prepare_cpu_share", "step_cpu_seconds", "read_sharing", "prepare_sharing"),
    *("contention", "ahead_contention"),
)
_LEAST = {**dict.fromkeys(_NOT_NEGATIVE, 0), "batch_size": 1, "workers": 0, "cores": 1, "ranks": 1, "prefetch_factor": 1}


def check_at_least(name: str, value: Any, least: float) -> None:
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"{name} must be a number >= {least}, got {value!r}")


@dataclass(frozen=True)
class Spread:
    """A time in seconds, and its variation: nine of ten blocks of measurements took longer than ``low``, and less than ``high``.

    Example:
        >>> Spread.of([0.01, 0.03] * 10)  # ten blocks of two
        Spread(median=0.02, low=0.02, high=0.02)
    """

    median: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("median", "low", "high"):
            check_at_least(name, getattr(self, name), 0)

    @classmethod
    def of(cls, seconds: Sequence[float], period: int = 1) -> Spread:
        """Returns the spread of the means of up to ten blocks of measurements, given in the order in which they were made.

        A step waits for the mean of several batches, not for each: queues level out the differences between successive batches.

        Args:
            period: Least number of measurements in a block. Workers that began together deliver their batches in bursts.
        """
        if not seconds:
            raise ValueError("seconds must hold at least one measurement, got none")
        periods = max(1, len(seconds) // period)
        seconds = seconds[len(seconds) - periods * period :] if len(seconds) >= period else seconds
        blocks = min(_BLOCKS, periods)
        ends = [periods * i // blocks * period if i < blocks else len(seconds) for i in range(blocks + 1)]
        means = sorted(statistics.fmean(seconds[a:b]) for a, b in pairwise(ends))
        return cls(statistics.median(means), means[round(0.1 * (blocks - 1))], means[round(0.9 * (blocks - 1))])

    def without(self, part: Spread) -> Spread:
        """Returns this time without a part of it.

        >>> Spread(5.0, 4.0, 7.0).without(Spread(2.0, 1.0, 3.0))
        Spread(median=3.0, low=1.0, high=6.0)
        """
        low, high = max(0.0, self.low - part.high), max(0.0, self.high - part.low)
        return Spread(max(0.0, self.median - part.median), low, high)

    def plus(self, part: Spread) -> Spread:
        return Spread(self.median + part.median, self.low + part.low, self.high + part.high)

    @classmethod
    def exactly(cls, seconds: float) -> Spread:
        return cls(seconds, seconds, seconds)


@dataclass(frozen=True)
class ProcessorTime:
    """The seconds of a stage or a transform per example, without those that other work on the cores adds to them.

    Attributes:
        cpu_seconds: Processor time, that of all threads of the worker.
        undelayed_seconds: Wall time, less the time for which the worker was ready and had no processor.
    """

    cpu_seconds: float
    undelayed_seconds: float

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "undelayed_seconds"):
            check_at_least(name, getattr(self, name), 0)

    def without(self, part: ProcessorTime) -> ProcessorTime:
        """Returns this time without a part of it.

        >>> ProcessorTime(5.0, 6.0).without(ProcessorTime(2.0, 7.0))
        ProcessorTime(cpu_seconds=3.0, undelayed_seconds=0.0)
        """
        cpu, undelayed = self.cpu_seconds - part.cpu_seconds, self.undelayed_seconds - part.undelayed_seconds
        return ProcessorTime(max(0.0, cpu), max(0.0, undelayed))

    def plus(self, part: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.cpu_seconds + part.cpu_seconds, self.undelayed_seconds + part.undelayed_seconds)


@dataclass(frozen=True)
class CachedExample:
    """The cost of an example in a cache, in one of the forms: mean bytes, and seconds of a lookup with the copy it returns."""

    bytes: float
    hit: Spread

    def __post_init__(self) -> None:
        check_at_least("bytes", self.bytes, 1)


@dataclass(frozen=True)
class ReadsInFlight:
    """Reading by threads, ahead of time.

    Attributes:
        reads: Number of reads under way on this rank, all workers together.
        seconds: Seconds per example, all workers together: the time of a read divided by the number of reads under way.
        cpu_seconds: Processor time per example, that of the threads included.
    """

    reads: int
    seconds: Spread
    cpu_seconds: float

    def __post_init__(self) -> None:
        check_at_least("reads", self.reads, 1)
        check_at_least("cpu_seconds", self.cpu_seconds, 0)


@dataclass(frozen=True)
class Pinning:
    """What pinning takes and brings: seconds per batch of the thread that pins it, and of its copy to the device from there."""

    pin: Spread
    copy: Spread


@dataclass(frozen=True)
class MeasuredStages:
    """One training as it was set up, measured.

    Attributes:
        read: Seconds per example in a worker, from the storage; so are `read_cached` (from memory), `decode` and `augment`.
        collate: Seconds per batch in a worker.
        hand_over: Seconds per batch in the main process, which takes the batch from a worker; `copy`: to the device.
        step: Seconds per step, if the batch is ready on the device.
        read_cpu_share: Share of the reading time in which a processor is busy.
        prepare_cpu_share: Share of the time of decoding, augmentation and collation in which a processor is busy.
        step_cpu_seconds: Processor time of a step in the main process, of all its threads together.
        batch_size: Mean number of examples in a batch.
        workers: Number of worker processes. With 0, loading and training take turns.
        takes_ahead: Whether an `EchoLoader` takes batches from the workers in a thread of its own, concurrently with the step,
            and knows which examples come next.
        cores: Number of cores that this process and its workers may use, on this rank.
        points: Possible insertion points, earliest first.
        read_sharing: How reading slows down with more workers: with ``w`` workers, one of them takes ``(w / workers) **
            read_sharing`` times as long. 0: it does not slow down. 1: more workers bring nothing, since all share the same speed.
        prepare_sharing: How decoding, augmentation and collation slow down with more workers, in the same way.
        contention: How many times as long decoding, augmentation and collation take while the training runs. The threads of the
            training need processors, too, even those that only wait (OpenMP's threads spin for a while).
        can_have_workers: Whether the data set works in a worker process, too.
        in_cache: The cost of an example for each form in which a cache can hold it (`CacheConfig.hold`). None: unknown.
        examples: Number of examples in the data set; None: unknown.
        free_bytes: Memory that was free before the analysis; None: unknown.
        in_flight: Reading with more and more reads under way, from one for each worker on. Empty if threads may not read ahead.
        read_ahead: What threads read ahead: a value of `Part`, or empty.
        no_reads_ahead: Why threads may not read ahead; empty if they may, or if that is unknown.
        ahead_contention: How many times as long a worker's own thread takes while threads of the worker read ahead, since the
            threads of a process take turns in running Python.
        no_cluster_workers: Why workers on other machines cannot read this data; empty if they can, or if that is unknown.
        has_cluster: Whether the analysis was made in a program that is connected to a Ray cluster.
        ranks: Number of ranks of the job. All figures are those of one rank.
        prefetch_factor: Batches that each worker is asked for ahead.
        batch_seconds: Seconds of a worker for each of a series of batches, in their order. Empty if fewer than 16 were measured,
            or if the loader could only be measured as a whole.
        batch_bytes: Bytes of a batch; None: unknown.
        free_shared_bytes: Free bytes of ``/dev/shm`` before the analysis; None: unknown, or there is none.
        pinning: What pinning takes and brings; None: not measured.
        no_pinning: Why batches cannot be pinned, or need not be; empty if they can, or if that is unknown.
    """

    read: Spread
    read_cached: Spread
    decode: Spread
    augment: Spread
    collate: Spread
    hand_over: Spread
    copy: Spread
    step: Spread
    read_cpu_share: float
    prepare_cpu_share: float
    step_cpu_seconds: float
    batch_size: float
    workers: int
    takes_ahead: bool
    cores: int
    points: tuple[str, ...]
    read_sharing: float = 0.0
    prepare_sharing: float = 0.0
    contention: float = 1.0
    can_have_workers: bool = True
    in_cache: Mapping[str, CachedExample] | None = None
    examples: int | None = None
    free_bytes: int | None = None
    in_flight: tuple[ReadsInFlight, ...] = ()
    read_ahead: str = ""
    no_reads_ahead: str = ""
    ahead_contention: float = 1.0
    no_cluster_workers: str = ""
    has_cluster: bool = False
    ranks: int = 1
    prefetch_factor: int = 2
    batch_seconds: tuple[float, ...] = ()
    batch_bytes: int | None = None
    free_shared_bytes: int | None = None
    pinning: Pinning | None = None
    no_pinning: str = ""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_at_least(name, getattr(self, name), least)
        for seconds in self.batch_seconds:
            check_at_least("batch_seconds", seconds, 0)
        for name in ("examples", "free_bytes", "batch_bytes", "free_shared_bytes"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 0)
        if not self.step.median > 0:
            raise ValueError(f"step must take time, got {self.step!r}")
        if unknown := set(self.points) - {point.value for point in POINTS}:
            raise ValueError(f"points must be insertion points, got {', '.join(sorted(map(repr, unknown)))}")
        if self.in_flight and self.read_ahead not in _READ_AHEAD:
            raise ValueError(f"read_ahead must be one of {', '.join(map(repr, _READ_AHEAD))}, got {self.read_ahead!r}")
