"""Sources that take a while for each read, and stand still while the model is evaluated.

Evaluations are taken out of the wall-clock. Were the source to read on meanwhile, workers would fill their queues in time that
nobody counts: of seven or eight fresh batches between two evaluations, up to one. So a read that an evaluation interrupts waits
for its end, and then for what was left.

* `SlowSource`: each read takes a delay, whoever reads. The six cells of R = 4, 8 and 16 are behind it.
* `PacedSource`: a storage of some lanes, each of which answers one read at a time. So however many reads are in flight, the
  storage is R times as slow as the step on average. Bursts and a heavy tail are behind it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lightning_echo import StagedDataset

__all__ = ["Bursts", "HeavyTail", "Pace", "PacedSource", "SlowReads", "SlowSource", "Source"]

SIGMA = 1.5  # of the heavy tail's lognormal distribution
_AGAIN_SECONDS = 0.001  # a lane that is asked again so soon was never idle


class Source:
    """Called before each read, in any process and thread. A subclass says how long a read takes.

    Args:
        sleep: As ``time.sleep``.
        clock: Seconds, the same in all processes.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.perf_counter) -> None:
        self._sleep, self._clock = sleep, clock
        self._goes_on = torch.multiprocessing.Event()
        self._goes_on.set()
        self._stood = torch.zeros((), dtype=torch.float64).share_memory_()  # seconds so far, in all processes

    def __call__(self) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """The training begins."""

    @property
    def stands_still(self) -> bool:
        """Whether no read may continue."""
        return not self._goes_on.is_set()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """No read ends in the meantime, and none comes any nearer to its end."""
        begin = self._clock()
        self._goes_on.clear()
        try:
            yield
        finally:
            self._stood += self._clock() - begin
            self._goes_on.set()


class SlowSource(Source):
    """Each read takes a delay.

    What a sleep takes too long (50 to 100 microseconds) is taken off the next read's, so that reads take the delay on average.

    Args:
        delay_seconds: Per read.
        sleep: As ``time.sleep``.
        clock: Seconds.
    """

    def __init__(
        self,
        delay_seconds: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(sleep, clock)
        self.delay_seconds = delay_seconds
        self._too_long = 0.0

    def __call__(self) -> None:
        self._goes_on.wait()
        begin, stood = self._clock(), self._stood.item()
        wanted = self.delay_seconds - self._too_long
        while (left := begin + wanted + self._stood.item() - stood - self._clock()) > 0:
            self._sleep(left)
            self._goes_on.wait()
        self._too_long = min(-left, self.delay_seconds)


class Pace(Protocol):
    """When a lane has answered a read."""

    def end(self, begin: float, number: int) -> float:
        """The end of a read that a lane begins, in seconds since the training began.

        Args:
            begin: In the same seconds.
            number: Of the read, in the order of asking.
        """


class Bursts:
    """Twice the speed for a while, then nothing for as long.

    Args:
        read_seconds: Of a read, on average.
        on_seconds: How long the storage answers before it pauses for as long.

    Example:
        >>> bursts = Bursts(read_seconds=2.0, on_seconds=10.0)
        >>> bursts.end(3.0, 0), bursts.end(9.5, 0), bursts.end(12.0, 0)  # within a burst; over a pause; asked in the pause
        (4.0, 20.5, 21.0)
    """

    def __init__(self, read_seconds: float, on_seconds: float) -> None:
        self._read, self._on = read_seconds / 2, on_seconds

    def end(self, begin: float, number: int) -> float:
        pauses, at = divmod(begin, 2 * self._on)
        # By a clock that stands in pauses; without a loop over bursts, which rounding could keep from ever ending.
        bursts, at = divmod(pauses * self._on + min(at, self._on) + self._read, self._on)
        return bursts * 2 * self._on + at if at else (2 * bursts - 1) * self._on


class HeavyTail:
    """Lognormal: most reads are quick, and a few take very long. The times are the same in each run with a seed.

    Args:
        read_seconds: Of a read, on average.
        seed: Of the times.
    """

    def __init__(self, read_seconds: float, seed: int) -> None:
        self._mu, self._seed = math.log(read_seconds) - SIGMA**2 / 2, seed

    def end(self, begin: float, number: int) -> float:
        return begin + random.Random(f"{self._seed} {number}").lognormvariate(self._mu, SIGMA)


class PacedSource(Source):
    """A storage of some lanes: a read waits for the lane that is free first. Before the training begins, reads take no time.

    Args:
        pace: When a lane has answered a read.
        lanes: How many reads the storage answers at once.
        sleep: As ``time.sleep``.
        clock: Seconds, the same in all processes.
    """

    def __init__(
        self,
        pace: Pace,
        lanes: int,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(sleep, clock)
        self._pace = pace
        self._lock = torch.multiprocessing.Lock()
        self._begin = torch.full((), math.inf, dtype=torch.float64).share_memory_()
        self._free = torch.zeros(lanes, dtype=torch.float64).share_memory_()  # when a lane is, seconds since the beginning
        self._asked = torch.zeros((), dtype=torch.int64).share_memory_()  # reads

    def begin(self) -> None:
        self._begin.fill_(self._clock())

    def __call__(self) -> None:
        if math.isinf(self._begin.item()):
            return
        self._goes_on.wait()
        with self._lock:
            end = self._answered_at(self._now())
        while (left := end - self._now()) > 0:
            self._sleep(left)
            self._goes_on.wait()

    def _now(self) -> float:
        return float(self._clock() - self._begin.item() - self._stood.item())

    def _answered_at(self, now: float) -> float:
        lane = int(self._free.argmin())
        free, number = self._free[lane].item(), int(self._asked)
        end = self._pace.end(free if free > now - _AGAIN_SECONDS else now, number)
        self._free[lane] = end
        self._asked += 1
        return end


class SlowReads(StagedDataset):
    """A task's data set behind a source. Only ``read`` waits, so that threads can wait.

    Args:
        data: With ``load`` and ``augment``, or with ``__getitem__`` alone.
        source: Called before each read.
    """

    def __init__(self, data: Any, source: Source) -> None:
        self.data, self.source = data, source

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> int:
        self.source()
        return index

    def decode(self, raw: int) -> Any:
        return self.data.load(raw) if hasattr(self.data, "load") else self.data[raw]

    def augment(self, example: Any) -> Any:
        return self.data.augment(example) if hasattr(self.data, "augment") else example
