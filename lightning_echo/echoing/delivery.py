"""What has been delivered so far: counts, seconds, and how far epochs have come.

Where there is no length, Lightning asks for a batch before the one in use is done with, to see where an epoch ends. What counts
then is the batch in use: counts and state are those of before the last fetch, and a batch that was fetched and not used when
another iteration begins is the first one of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_echo.echoing.counts import EchoCounts
from lightning_echo.echoing.epochs import Progress
from lightning_echo.echoing.seconds import Report, StageSeconds

__all__ = ["Delivered", "Delivery", "Item"]

Item = tuple[Any, Report]


class Delivered(NamedTuple):
    """What had been delivered at some batch.

    Attributes:
        counts: Examples.
        last: Those of the batch.
        progress: As `Progress.state`.
        passes_over: Passes over the data that have ended.
    """

    counts: EchoCounts
    last: EchoCounts
    progress: dict[str, int]
    passes_over: int


class Delivery:
    """Counts what is delivered.

    Attributes:
        progress: How far epochs have come, by what was fetched.
        seconds: What the batches cost their workers.
        fetches_ahead: Says whether who iterates asks for a batch before the one in use is done with; None: it does not.
    """

    def __init__(self) -> None:
        self.fetches_ahead: Callable[[], bool] | None = None
        self.reset()

    def reset(self) -> None:
        """Goes back to the start of the run."""
        self.seconds = StageSeconds()
        self.begin_at(Progress(), EchoCounts(), 0)

    def begin_at(self, progress: Progress, counts: EchoCounts, passes_over: int) -> None:
        """Goes to another place in the run."""
        self.progress, self._counts, self._passes_over = progress, counts, passes_over
        self._last = EchoCounts()
        self._before: Delivered | None = None  # what was delivered before the last fetch, where it is kept
        self._fetched: Item | None = None  # by the last fetch
        self._unused: Item | None = None  # fetched, but not used

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process nothing is fetched ahead."""
        return _restored, (self.progress, self._counts, self._passes_over, self.seconds)

    # ------------------------------------------------------------------ what is in use

    @property
    def is_ahead(self) -> bool:
        """Whether the batch fetched last is not in use yet."""
        return self._before is not None and not self.progress.over and self.fetches_ahead is not None and self.fetches_ahead()

    @property
    def in_use(self) -> Delivered:
        """All that was delivered up to the batch in use."""
        if self._before is not None and self.is_ahead:
            return self._before
        return Delivered(self._counts, self._last, self.progress.state(), self._passes_over)

    @property
    def counts(self) -> EchoCounts:
        """Examples delivered."""
        return self._counts if self._before is None else self.in_use.counts

    @property
    def last(self) -> EchoCounts:
        """Those of the batch in use."""
        return self._last if self._before is None else self.in_use.last

    @property
    def batches(self) -> int:
        """Batches delivered in the run."""
        return self.progress.delivered if self._before is None else self.in_use.progress["delivered"]

    @property
    def passes_over(self) -> int:
        """Passes over the data that have ended."""
        return self._passes_over if self._before is None else self.in_use.passes_over

    # ------------------------------------------------------------------ delivering

    def begin_epoch(self, length: int, *, keeps_length: bool) -> None:
        """Begins the next epoch, or goes on with a resumed one; ``length`` -1: it ends with a pass."""
        if self._before is not None and self.is_ahead:
            before, unused, progress = self._before, self._fetched, Progress(**self._before.progress)
            progress.resuming = not progress.in_epoch  # it had not really begun
            self.begin_at(progress, before.counts, before.passes_over)
            self._unused = unused
        self.progress.begin(length, keeps_length=keeps_length)

    def fetch(self, next_item: Callable[[], Item | None]) -> Any:
        """The next batch; ``next_item`` fetches it, None where the epoch ends with the pass.

        Raises:
            StopIteration: The epoch has ended.
        """
        self._before = None if self.fetches_ahead is None else Delivered(*self._all())
        item = self._unused or next_item()
        if item is None:
            self.progress.end()
            raise StopIteration
        batch, report = item
        if self._unused is None:
            self.seconds.add(report)
        self._unused, self._fetched = None, None if self._before is None else item
        self._last = EchoCounts(*report[:3])
        self._counts += self._last
        self.progress.count()
        return batch

    def end_pass(self) -> None:
        """A pass over the data has ended."""
        self._passes_over += 1

    def _all(self) -> tuple[EchoCounts, EchoCounts, dict[str, int], int]:
        return self._counts, self._last, self.progress.state(), self._passes_over


def _restored(progress: Progress, counts: EchoCounts, passes_over: int, seconds: StageSeconds) -> Delivery:
    delivery = Delivery()
    delivery.begin_at(progress, counts, passes_over)
    delivery.seconds = seconds
    return delivery
