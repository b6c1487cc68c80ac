"""What has been delivered so far: counts, seconds, and how far epochs have come.

Where there is no length, Lightning asks for a batch before the one in use is done with, to see where an epoch ends. What counts
then is the batch in use: counts and state are those of before the last fetch, and a batch that was fetched and not used when
another iteration begins is the first one of that::

    who trains takes       batch 0         batch 1         batch 2
    is asked for    0    1               2               3

Of several loaders that are asked together one may have ended before the others are asked: only what was taken tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_echo.loading.counts import EchoCounts
from lightning_echo.loading.epochs import Progress, TrainerPlace
from lightning_echo.workers.seconds import Report, StageSeconds

__all__ = ["Delivered", "Delivery", "Item"]

Item = tuple[Any, Report]


def _never() -> bool:
    return False


class Delivered(NamedTuple):
    """What had been delivered at some batch.

    Attributes:
        counts: Examples.
        last: Those of the batch.
        progress: How far epochs had come.
        passes_over: Passes over the data that have ended.
    """

    counts: EchoCounts
    last: EchoCounts
    progress: Progress
    passes_over: int


class Delivery:
    """Counts what is delivered.

    Attributes:
        progress: How far epochs have come, by what was fetched.
        seconds: What the batches cost their workers.
        note: What the user should hear of the batches so far; empty: nothing.
        taken: Says how many batches who iterates has taken into use, in its run and in its epoch, where it asks for one ahead.
            None, or if it says None: it does not.
        place: Says where the Trainer is that iterates. None, or if it says None: there is none, or it iterates several loaders.
    """

    def __init__(self) -> None:
        self.taken: Callable[[], tuple[int, int] | None] | None = None
        self.place: Callable[[], TrainerPlace | None] | None = None
        self.note = ""
        self.reset()

    def reset(self) -> None:
        """Goes back to the start of the run."""
        self.seconds = StageSeconds()
        self.begin_at(Progress(), EchoCounts(), 0)

    def begin_at(self, progress: Progress, counts: EchoCounts, passes_over: int) -> None:
        """Goes to another place in the run."""
        self.progress, self._passes_over = progress, passes_over
        self._fresh, self._echoed, self._refetched = counts.fresh, counts.echoed, counts.refetched
        self._last: tuple[int, int, int] = (0, 0, 0)
        self._before: Delivered | None = None  # what was delivered before the last fetch, where it is kept
        self._fetched: Item | None = None  # by the last fetch
        self._unused: Item | None = None  # fetched, but not used
        self._asked_at: int | None = None  # batches taken in the run when the last one was fetched
        self._used_at = 0  # batches taken in the run from which on that one is in use

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process nobody takes anything yet."""
        return _restored, (self.progress, self._all(), self._passes_over, self.seconds)

    # ------------------------------------------------------------------ what is in use

    @property
    def is_ahead(self) -> bool:
        """Whether the batch fetched last is not in use yet."""
        if self._unused is not None:
            return True
        taken = None if self.taken is None or self._before is None else self.taken()
        return taken is not None and taken[0] < self._used_at

    @property
    def in_use(self) -> Delivered:
        """All that was delivered up to the batch in use."""
        if self._before is not None and self.is_ahead:
            return self._before
        return self._delivered()

    @property
    def counts(self) -> EchoCounts:
        """Examples delivered."""
        return self._all() if self._before is None else self.in_use.counts

    @property
    def last(self) -> EchoCounts:
        """Those of the batch in use."""
        return EchoCounts(*self._last) if self._before is None else self.in_use.last

    @property
    def batches(self) -> int:
        """Batches delivered in the run."""
        return self.progress.delivered if self._before is None else self.in_use.progress.delivered

    @property
    def passes_over(self) -> int:
        """Passes over the data that have ended."""
        return self._passes_over if self._before is None else self.in_use.passes_over

    # ------------------------------------------------------------------ delivering

    def begin_epoch(self, length: int, *, keeps_length: bool) -> None:
        """Begins the next epoch, or goes on with a resumed one; ``length`` -1: it ends with a pass."""
        taken = None if self.taken is None else self.taken()
        # Within who iterates' epoch it is one of several loaders that begins again, and what it handed out is being taken.
        if taken is not None and taken[1] == 0 and not (self.progress.over and taken[0] == self._asked_at):
            self.settle()
        place = self._place()
        training = place if place is not None and place.epoch_batches >= 0 else None
        self.progress.begin(length, keeps_length=keeps_length, place=training)

    def trainers_length(self, length: int) -> int:
        """As `Progress.trainers_length`."""
        return self.progress.trainers_length(length, self._place())

    def _place(self) -> TrainerPlace | None:
        return None if self.place is None else self.place()

    def settle(self) -> None:
        """Who iterates does so no more: what was fetched and not used is kept for who comes next."""
        if self._before is not None and self.is_ahead:
            before, unused, asked_at = self._before, self._fetched, self._asked_at
            progress = before.progress.snapshot()
            progress.resuming = not progress.in_epoch  # it had not really begun
            self.begin_at(progress, before.counts, before.passes_over)
            self._unused, self._asked_at = unused, asked_at

    def forget_unused(self) -> None:
        """Lets go of a batch that was fetched and not used, to be fetched again."""
        self.settle()
        self._unused = None

    def fetch(self, next_batch: Callable[[int], Item | None], goes_on: Callable[[], bool] = _never) -> Any:
        """Returns the next batch, and counts it.

        All that a batch costs beside being made is done here, in one function: the training waits for it.

        Args:
            next_batch: Returns the batch that follows so many delivered ones; None where a pass has ended.
            goes_on: Whether the epoch goes on when a pass has ended.

        Raises:
            StopIteration: The epoch has ended.
            RuntimeError: ``next_batch`` raised a StopIteration, which would silently end the epoch.
        """
        before = None if self.taken is None else self._delivered()
        item, progress = self._unused, self.progress
        if item is None:
            try:
                while (item := next_batch(progress.delivered)) is None:
                    self._passes_over += 1
                    if not goes_on():
                        break
            except StopIteration as error:
                raise RuntimeError("StopIteration was raised while a batch was made, by collate_fn or a transform") from error
        if item is None:
            self._before = None
            progress.end()
            raise StopIteration
        if before is not None:
            self._note_fetch(before)
        batch, report = item
        fresh, echoed, refetched, source, rest, collate, note = report
        if self._unused is None and (source or rest or collate):
            self._add_seconds(source, rest, collate, fresh + refetched)
        if note:
            self.note = note
        self._unused, self._fetched = None, None if self._before is None else item
        self._count(fresh, echoed, refetched)
        return batch

    def _add_seconds(self, source: float, rest: float, collate: float, examples: int) -> None:
        seconds = self.seconds
        seconds.source += source
        seconds.rest += rest
        seconds.collate += collate
        seconds.examples += examples
        seconds.batches += 1

    def _count(self, fresh: int, echoed: int, refetched: int) -> None:
        """The last thing of a fetch: an interrupt before it has fetched nothing, and one after it is one of who iterates."""
        self._last = fresh, echoed, refetched
        self._fresh, self._echoed, self._refetched = self._fresh + fresh, self._echoed + echoed, self._refetched + refetched
        progress = self.progress
        progress.delivered += 1
        progress.in_epoch += 1

    def _all(self) -> EchoCounts:
        return EchoCounts(self._fresh, self._echoed, self._refetched)

    def _delivered(self) -> Delivered:
        return Delivered(self._all(), EchoCounts(*self._last), self.progress.snapshot(), self._passes_over)

    def _note_fetch(self, before: Delivered) -> None:
        """A batch is used when the one before it has been; the first one of an iteration as soon as one is."""
        taken = None if self.taken is None else self.taken()
        self._before = None if taken is None else before
        if taken is not None:
            in_run, in_epoch = taken
            is_first = self._asked_at is None or self._unused is not None or (in_epoch == 0 and in_run != self._asked_at)
            self._asked_at, self._used_at = in_run, in_run + (1 if is_first else 2)


def _restored(progress: Progress, counts: EchoCounts, passes_over: int, seconds: StageSeconds) -> Delivery:
    delivery = Delivery()
    delivery.begin_at(progress, counts, passes_over)
    delivery.seconds = seconds
    return delivery
