"""How time is taken: steady state only, partners in turn, medians."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP_BATCHES = 48
_TICKS = os.sysconf("SC_CLK_TCK")


def seconds_per_batch(loader: Iterable[Any], batches: int, step: Callable[[], None] | None = None) -> float:
    """Mean time from batch to batch in steady state, a step after each.

    The first `WARM_UP_BATCHES` are not timed: start of the workers, filling of their queues, and the start of the echo
    plan, which fills its buffer with additional fresh examples.
    """
    iterator = iter(loader)
    for _ in range(WARM_UP_BATCHES):
        next(iterator)
        if step is not None:
            step()
    start = time.perf_counter()
    for _ in range(batches):
        next(iterator)
        if step is not None:
            step()
    elapsed = time.perf_counter() - start
    del iterator  # ends the workers of a plain loader
    if callable(close := getattr(loader, "close", None)):
        close()
    return elapsed / batches


def alternate(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs the partners in turn, A B C A B C, so that what else the machine does reaches all of them."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            results[name].append(run())
    return results


def median_seconds(
    call: Callable[[], object], calls: int, repeats: int = 7, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median over the repeats of the mean time of a call."""
    means = []
    for _ in range(repeats):
        start = clock()
        for _ in range(calls):
            call()
        means.append((clock() - start) / calls)
    return statistics.median(means)


def tree_seconds(pid: int) -> float:
    """Processor seconds of a process and of its children that live."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(_of_process(each) for each in (pid, *map(int, children)))


class Memory(NamedTuple):
    """What processes hold, added up. What k processes have mapped counts 1/k for each of them (Linux' PSS).

    Attributes:
        own_bytes: All but shared memory.
        shared_memory_bytes: Shared memory, such as a window.
    """

    own_bytes: int
    shared_memory_bytes: int


def tree_memory(pid: int) -> Memory:
    """Memory of a process and of its children that live."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = shared = 0
    for each in (pid, *map(int, children)):
        lines = [line.split() for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]]
        kilobytes = {line[0].rstrip(":"): int(line[1]) for line in lines}
        own += 1024 * (kilobytes["Pss_Anon"] + kilobytes["Pss_File"])
        shared += 1024 * kilobytes["Pss_Shmem"]
    return Memory(own, shared)


class Stopwatch:
    """Seconds since it was started, less those in which it stood.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin: float | None = None
        self.stood_seconds = 0.0

    @property
    def is_started(self) -> bool:
        return self._begin is not None

    @property
    def seconds(self) -> float:
        """0 before the start."""
        return 0.0 if self._begin is None else self._clock() - self._begin - self.stood_seconds

    def start(self) -> None:
        self._begin = self._clock()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self.stood_seconds += self._clock() - begin


def _of_process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
