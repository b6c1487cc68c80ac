"""Prefetching: a simulation of a loader's queue, which shows how long steps wait behind batches that take unequally long."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Sequence
from functools import lru_cache

# The workers of a ``DataLoader`` take turns: batch k is made by worker k % workers, and batches come in this order. When the
# training takes batch k, batch k + workers * prefetch_factor is asked for. So a long batch is no stall if those that are queued
# before it last as long as it does. If a queue without end is as fast, prefetching more changes nothing: the workers are as fast
# as they are on average, or the step is the limit.
#
# The times are those of the batches that the loader's phases have measured anyway. A single long one may be chance, as of another
# program on the same cores. So the longest counts as long as the second longest.

FEWEST_BATCHES = 16  # fewer do not show what is rare
_LEAST_COUNTED = 1.02  # more than the simulation of a steady source is off, by where it begins and ends
_LEAST_TURNS = 4
_UNEVEN, _UNEVEN_SECONDS = 1.2, 0.0005  # the mean is so many times the median, and so much longer
_QUEUES_OF_FREE, _QUEUES_OF_SHARED = 0.1, 0.5  # most that prefetched batches take of the free memory


def without_chance(batch_seconds: Sequence[float]) -> list[float]:
    """Returns the times with the longest as long as the second longest.

    >>> without_chance([5.0, 80.0, 6.0])
    [5.0, 6.0, 6.0]
    """
    most = sorted(batch_seconds)[-2:][0]
    return [min(seconds, most) for seconds in batch_seconds]


def is_uneven(batch_seconds: Sequence[float]) -> bool:
    """Whether rare long batches make up so much of the time that the median of some blocks is not what a batch takes."""
    if len(batch_seconds) < FEWEST_BATCHES:
        return False
    mean, median = statistics.fmean(without_chance(batch_seconds)), statistics.median(batch_seconds)
    return mean > _UNEVEN * median and mean - median > _UNEVEN_SECONDS


def period_of(batch_seconds: Sequence[float], measurements: int) -> int:
    """Returns the least number of measurements in a block of a `Spread`: half of them if batches are uneven, else 1.

    The median of two blocks is the mean of all: of several blocks, most may have no long batch.
    """
    return max(1, measurements // 2) if is_uneven(batch_seconds) else 1


@lru_cache(maxsize=4096)
def times_as_long(batch_seconds: tuple[float, ...], workers: int, prefetch_factor: int, step_seconds: float) -> float:
    """Returns how many times as long a step takes as with a queue without end, since batches take unequally long.

    Args:
        batch_seconds: Seconds of a worker for each of a series of batches, in their order.
        workers: Number of workers, 1 or more.
        prefetch_factor: Batches that each worker is asked for ahead.
        step_seconds: Seconds of a step whose batch is ready.

    Example:
        >>> series = tuple([0.005] * 15 + [0.08]) * 2  # a long batch among 16: eight steps of 10 ms
        >>> [round(times_as_long(series, 2, factor, 0.01), 2) for factor in (1, 2, 4, 8)]
        [1.36, 1.24, 1.0, 1.0]
    """
    if len(batch_seconds) < FEWEST_BATCHES or not any(batch_seconds):
        return 1.0
    # With a few batches of mean length, each turn begins with the next worker, so that no worker gets all long ones.
    series = without_chance(batch_seconds)
    series += [statistics.fmean(series)] * ((1 - len(series)) % workers)
    simulated = _simulated(series, workers, workers * prefetch_factor, step_seconds)
    times = simulated / max(statistics.fmean(series) / workers, step_seconds)
    return times if times > _LEAST_COUNTED else 1.0


def _simulated(series: Sequence[float], workers: int, queued: int, step_seconds: float) -> float:
    """Returns the mean seconds from step to step, after the queue has been filled."""
    filled = len(series) * math.ceil(queued / len(series))
    taken: list[float] = []
    done, ready = [0.0] * workers, 0.0  # when each worker, and when the training, can continue
    turns = workers * math.ceil(_LEAST_TURNS / workers)  # each worker gets each batch equally often
    for number in range(filled + len(series) * turns + 1):
        worker = number % workers
        asked = taken[number - queued] if number >= queued else 0.0
        done[worker] = max(done[worker], asked) + series[number % len(series)]
        taken.append(max(done[worker], ready))
        ready = taken[-1] + step_seconds
    return (taken[-1] - taken[filled]) / (len(taken) - 1 - filled)


def fits_memory(batch_bytes: float | None, batches: int, free_bytes: float | None, shared_bytes: float | None) -> bool:
    """Whether so many prefetched batches take a small part of the free memory, and of the free part of ``/dev/shm``.

    None for free memory: it is not known, and not a limit. What is not known of a batch does not fit.

    >>> fits_memory(2**20, 16, free_bytes=2**30, shared_bytes=2**26), fits_memory(2**20, 64, 2**30, 2**26)
    (True, False)
    """
    if batch_bytes is None:
        return False
    needed = batches * batch_bytes
    limits = [(free_bytes, _QUEUES_OF_FREE), (shared_bytes, _QUEUES_OF_SHARED)]
    return all(free is None or needed <= part * free for free, part in limits)


def free_shared_bytes(path: str = "/dev/shm") -> int | None:
    """Returns the free bytes of the shared memory in which workers hand over their batches; None if there is no such place."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
