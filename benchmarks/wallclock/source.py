"""A source that takes a while for each read, and stands still while the model is evaluated.

Evaluations are taken out of the wall-clock. Were the source to read on meanwhile, workers would fill their queues in time that
nobody counts: of seven or eight fresh batches between two evaluations, up to one. So a read that an evaluation interrupts waits
for its end, and then for what was left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["SlowSource"]


class SlowSource:
    """Called before each read, in any process.

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
        self.delay_seconds = delay_seconds
        self._sleep, self._clock = sleep, clock
        self._goes_on = torch.multiprocessing.Event()
        self._goes_on.set()
        self._stood = torch.zeros((), dtype=torch.float64).share_memory_()  # seconds so far, in all processes
        self._too_long = 0.0

    def __call__(self) -> None:
        self._goes_on.wait()
        begin, stood = self._clock(), self._stood.item()
        wanted = self.delay_seconds - self._too_long
        while (left := begin + wanted + self._stood.item() - stood - self._clock()) > 0:
            self._sleep(left)
            self._goes_on.wait()
        self._too_long = min(-left, self.delay_seconds)

    @property
    def stands_still(self) -> bool:
        """Whether no read may go on."""
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
