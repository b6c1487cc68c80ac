"""What was measured of a training's input, stage by stage: a value.

    read --> decode --> augment --> collate --> hand-over --> copy --> step
    |<------------- workers, per example ---->| |<- main process, per batch ->|

Each figure is a median and its variation (`Spread`). Reading has two times: cold (from the storage) and warm (from memory). The
other stages do not depend on where the data is.

If a data set cannot be cut into all stages, a stage is contained in the one before it:

* If reading and decoding cannot be told apart, ``read`` is the time by which a cold run is longer than a warm run.
* If augmentation cannot be told apart, it is in ``decode``.

`points` holds the insertion points that are then possible.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_echo.insertion import POINTS

__all__ = ["CachedExample", "MeasuredStages", "Spread", "check_at_least"]

_BLOCKS = 10
_LEAST = {
    **dict.fromkeys(
        ("read_cpu_share", "prepare_cpu_share", "step_cpu_seconds", "read_sharing", "prepare_sharing", "contention"), 0
    ),
    **{"batch_size": 1, "workers": 0, "cores": 1},
}


def check_at_least(name: str, value: Any, least: float) -> None:
    """Refuses a value that is not a number, or too small.

    Raises:
        ValueError: The value is not a number, or too small.
    """
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"{name} must be a number >= {least}, got {value!r}")


@dataclass(frozen=True)
class Spread:
    """A time in seconds, and its variation.

    Attributes:
        median: Median of all blocks of measurements.
        low: Nine of ten blocks took longer.
        high: Nine of ten blocks took less.

    Raises:
        ValueError: One of them is not a time.

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
        """Returns the spread of the means of up to ten blocks of single measurements.

        A step waits for the mean of several batches, not for each: queues level out the differences between successive batches.

        Args:
            seconds: The measurements, in the order in which they were made.
            period: Least number of measurements in a block. Workers that began together deliver their batches in bursts.

        Raises:
            ValueError: There is no measurement.
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
        """Returns this time and another one together.

        >>> Spread(3.0, 1.0, 6.0).plus(Spread(2.0, 1.0, 3.0))
        Spread(median=5.0, low=2.0, high=9.0)
        """
        return Spread(self.median + part.median, self.low + part.low, self.high + part.high)

    @classmethod
    def exactly(cls, seconds: float) -> Spread:
        """Returns a time that does not vary."""
        return cls(seconds, seconds, seconds)


@dataclass(frozen=True)
class CachedExample:
    """What an example costs in a cache, for one of the forms in which a cache holds it.

    Attributes:
        bytes: Mean number of bytes that an example takes.
        hit: Seconds of a lookup, with the copy that it returns.

    Raises:
        ValueError: A value is impossible.
    """

    bytes: float
    hit: Spread

    def __post_init__(self) -> None:
        check_at_least("bytes", self.bytes, 1)


@dataclass(frozen=True)
class MeasuredStages:
    """One training as it was set up. Some figures are seconds of a worker, others are seconds of the main process.

    Attributes:
        read: Seconds per example in a worker, from the storage.
        read_cached: Seconds per example in a worker, from memory.
        decode: Seconds per example in a worker.
        augment: Seconds per example in a worker.
        collate: Seconds per batch in a worker.
        hand_over: Seconds per batch in the main process, which takes the batch from a worker.
        copy: Seconds per batch for the copy to the device.
        step: Seconds per step, if the batch is ready on the device.
        read_cpu_share: Share of the reading time in which a processor is busy.
        prepare_cpu_share: Share of the time of decoding, augmentation and collation in which a processor is busy.
        step_cpu_seconds: Processor time of a step in the main process, of all its threads together.
        batch_size: Mean number of examples in a batch.
        workers: Number of worker processes. With 0, loading and training take turns.
        takes_ahead: Whether an `EchoLoader` takes batches from the workers in a thread of its own, beside the step.
        cores: Number of cores that this process and its workers may use, on this rank.
        points: Insertion points that are possible, earliest first.
        read_sharing: How reading slows down with more workers: with ``w`` workers, one of them takes
            ``(w / workers) ** read_sharing`` times as long. 0: it does not slow down. 1: more workers bring nothing, since all
            share the same speed.
        prepare_sharing: How decoding, augmentation and collation slow down with more workers, in the same way.
        contention: How many times as long decoding, augmentation and collation take while the training runs. The threads of the
            training need processors, too, even those that only wait (OpenMP's threads spin for a while).
        can_have_workers: Whether the data set works in a worker process, too.
        in_cache: What an example costs in a cache, for each form in which a cache can hold it (`CacheConfig.hold`). None: not
            known, as in an analysis that an older version saved.
        examples: Number of examples in the data set; None: not known.
        free_bytes: Memory that was free before the analysis; None: not known.

    Raises:
        ValueError: A value is impossible.
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

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_at_least(name, getattr(self, name), least)
        for name in ("examples", "free_bytes"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 0)
        if not self.step.median > 0:
            raise ValueError(f"step must take time, got {self.step!r}")
        if unknown := set(self.points) - {point.value for point in POINTS}:
            raise ValueError(f"points must be insertion points, got {', '.join(sorted(map(repr, unknown)))}")
