"""What has been delivered so far: counts, seconds, and how far epochs have come.

If a loader has no length, Lightning fetches one batch ahead, to see where an epoch ends. Counts and state must belong to the
batch in use. So they are those from before the last fetch::

    Lightning fetches   0   1       2       3
    Lightning uses          0       1       2

If a batch was fetched but not used before another iteration begins, it becomes the first batch of that iteration. If the Trainer
fetches from several loaders together, one of them may end before the others are asked. So only the Trainer knows which batch is
in use, and `Delivery.batches_used` asks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_echo.loading.epochs import Progress, Steps, TrainerPlace
from lightning_echo.loading.state import EchoCounts
from lightning_echo.workers.seconds import Report, StageSeconds

__all__ = ["BatchesUsed", "Delivered", "Delivery"]

Fetched = tuple[Any, Report]
Counted = tuple[Progress, int, int, tuple[int, int, int], tuple[int, int, int], int, int]


def _never() -> bool:
    return False


class BatchesUsed(NamedTuple):
    """How many batches a consumer has used, if it fetches one batch ahead.

    Attributes:
        in_run: Batches in the whole run.
        in_epoch: Batches in the present epoch.
    """

    in_run: int
    in_epoch: int


class Delivered(NamedTuple):
    """What had been delivered up to some batch.

    Attributes:
        counts: Examples in all batches.
        last: Examples in the last batch.
        progress: How far epochs had come.
        ended_passes: Passes over the data that had ended.
    """

    counts: EchoCounts
    last: EchoCounts
    progress: Progress
    ended_passes: int


class Delivery:
    """Counts what is delivered.

    Attributes:
        progress: How far epochs have come, including a batch that was fetched ahead.
        seconds: Seconds that the workers spent on the batches.
        note: A message of a worker for the user; empty if there is none.
        batches_used: A function that returns how many batches the consumer has used, if the consumer fetches one ahead. If it is
            None, or returns None, the consumer does not fetch ahead.
        trainer_place: A function that returns where the Trainer is. If it is None, or returns None, there is no Trainer, or the
            Trainer iterates over several loaders.
        add_lookups: A function that counts the hits and misses of a cache, the hits that came from other nodes, and the seconds
            of waiting for those. None: there is no cache.
    """

    def __init__(self) -> None:
        self.batches_used: Callable[[], BatchesUsed | None] | None = None
        self.trainer_place: Callable[[], TrainerPlace | None] | None = None
        self.add_lookups: Callable[[int, int, int, float], None] | None = None
        self.note = ""
        self.reset()

    def reset(self) -> None:
        """Goes back to the start of the run."""
        self.seconds = StageSeconds()
        self.continue_at(Progress(), EchoCounts(), 0)
        self._steps: Steps | None = None  # of the Trainer, since the epoch began
        self._taken = 0  # batches fetched since then

    def continue_at(self, progress: Progress, counts: EchoCounts, ended_passes: int) -> None:
        """Continues at another place in the run."""
        self.progress, self._ended_passes = progress, ended_passes
        self._fresh, self._echoed, self._refetched = counts.fresh, counts.echoed, counts.refetched
        self._last: tuple[int, int, int] = (0, 0, 0)
        self._before: Delivered | None = None  # up to the batch before the last fetch, if the consumer fetches ahead
        self._fetched: Fetched | None = None  # the last batch, if the consumer fetches ahead
        self._unused: Fetched | None = None  # fetched in an earlier iteration and not used: the next fetch returns it
        self._asked_at: int | None = None  # batches used in the run when the last one was fetched
        self._used_at = 0  # number of batches used in the run at which the batch that was fetched last comes into use
        self._passes_at_last = ended_passes  # passes that had ended before the last batch
        self._length_before_end: int | None = None  # length of the epoch, as it was before a pass ended it
        self._counted: Counted = (progress, -1, 0, (0, 0, 0), (0, 0, 0), 0, 0)  # what the last fetch found, see `take_back`

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has no consumer yet."""
        return _restored, (self.progress, self._all(), self._ended_passes, self.seconds)

    # ------------------------------------------------------------------ what is in use

    @property
    def fetches_ahead(self) -> bool:
        """Whether the consumer fetches one batch ahead."""
        return self.batches_used is not None and self.batches_used() is not None

    @property
    def is_ahead(self) -> bool:
        """Whether the batch that was fetched last is not in use yet."""
        if self._unused is not None:
            return True
        used = None if self.batches_used is None or self._before is None else self.batches_used()
        return used is not None and used.in_run < self._used_at

    @property
    def in_use(self) -> Delivered:
        """What was delivered up to the batch in use."""
        if self._before is not None and self.is_ahead:
            return self._before
        return self._delivered()

    @property
    def counts(self) -> EchoCounts:
        """Examples delivered up to the batch in use."""
        return self._all() if self._before is None else self.in_use.counts

    @property
    def last(self) -> EchoCounts:
        """Examples in the batch in use."""
        return EchoCounts(*self._last) if self._before is None else self.in_use.last

    @property
    def batches(self) -> int:
        """Batches delivered in the run up to the batch in use."""
        return self.progress.delivered if self._before is None else self.in_use.progress.delivered

    @property
    def ended_passes(self) -> int:
        """Passes over the data that have ended."""
        return self._ended_passes if self._before is None else self.in_use.ended_passes

    @property
    def is_under_way(self) -> bool:
        """Whether a Trainer has taken the batch in use and its step is not over. A resumed Trainer asks for that batch again."""
        processed = None if self._steps is None else self._steps.processed
        is_ahead = self._before is not None and self.is_ahead
        return processed is not None and self._taken - is_ahead == processed + 1

    @property
    def before_in_use(self) -> Delivered:
        """What was delivered up to the batch before the one in use."""
        now = self.in_use
        progress = now.progress.snapshot()
        progress.delivered -= 1
        progress.in_epoch = max(progress.in_epoch - 1, 0)
        if self._length_before_end is not None:
            progress.epoch_batches = self._length_before_end
        counts, last = now.counts, now.last
        left = EchoCounts(counts.fresh - last.fresh, counts.echoed - last.echoed, counts.refetched - last.refetched)
        return Delivered(left, EchoCounts(), progress, min(now.ended_passes, self._passes_at_last))

    # ------------------------------------------------------------------ delivering

    def take_back(self, delivered: int) -> None:
        """Undoes a fetch, also half of one, because its batch has not reached the consumer.

        Args:
            delivered: Batches that had been delivered before the fetch. If that fetch had not begun, nothing is undone.
        """
        progress, had_delivered, in_epoch, examples, last, taken, passes_at_last = self._counted
        if progress is self.progress and had_delivered == delivered:
            progress.delivered, progress.in_epoch = delivered, in_epoch
            self._fresh, self._echoed, self._refetched = examples
            self._last, self._taken, self._passes_at_last = last, taken, passes_at_last

    def begin_epoch(self, length: int, *, keeps_length: bool, steps: Steps | None = None) -> None:
        """Begins the next epoch, or continues a resumed one.

        Args:
            length: Length of the next epoch; -1 if it ends when a pass ends.
            keeps_length: As in `Progress.begin`.
            steps: The steps of the Trainer that iterates; None if there is none.
        """
        used = None if self.batches_used is None else self.batches_used()
        # A loader that begins again within the consumer's epoch is one of several, and its last batch is about to be used.
        if used is not None and used.in_epoch == 0 and not (self.progress.over and used.in_run == self._asked_at):
            self.settle()
        place = self._place()
        training = place if place is not None and place.epoch_batches >= 0 else None
        self.progress.begin(length, keeps_length=keeps_length, place=training)
        self._steps, self._taken, self._length_before_end = steps, 0, None

    def trainers_length(self, length: int) -> int:
        """Returns the length to tell a Trainer that resumes, see `Progress.trainers_length`."""
        return self.progress.trainers_length(length, self._place())

    def _place(self) -> TrainerPlace | None:
        return None if self.trainer_place is None else self.trainer_place()

    def settle(self) -> None:
        """Ends an iteration: a batch that was fetched and not used is kept for the next one."""
        if self._before is not None and self.is_ahead:
            before, unused, asked_at = self._before, self._fetched, self._asked_at
            progress = before.progress.snapshot()
            progress.resuming = not progress.in_epoch  # an epoch of which no batch was used has not begun
            self.continue_at(progress, before.counts, before.ended_passes)
            self._last = (before.last.fresh, before.last.echoed, before.last.refetched)
            self._unused, self._asked_at, self._taken = unused, asked_at, self._taken - 1

    def forget_unused(self) -> None:
        """Drops a batch that was fetched and not used. It will be fetched again."""
        self.settle()
        self._unused = None

    def fetch(self, next_batch: Callable[[int], Fetched | None], crosses_passes: Callable[[], bool] = _never) -> Any:
        """Returns the next batch, and counts it.

        The training waits for this function. Beside the making of the batch, all work for each batch is done here.

        Args:
            next_batch: Returns the batch after a number of delivered ones, or None if a pass has ended.
            crosses_passes: Whether the epoch continues when a pass has ended.

        Raises:
            StopIteration: The epoch has ended.
            RuntimeError: ``next_batch`` raised a StopIteration. Passed on, it would end the epoch silently.
        """
        progress, examples = self.progress, (self._fresh, self._echoed, self._refetched)
        self._counted = progress, progress.delivered, progress.in_epoch, examples, self._last, self._taken, self._passes_at_last
        before = None if self.batches_used is None else self._delivered()
        item = self._unused
        if item is None:
            try:
                while (item := next_batch(progress.delivered)) is None:
                    self._ended_passes += 1
                    if not crosses_passes():
                        break
            except StopIteration as error:
                raise RuntimeError("StopIteration was raised while a batch was made, by collate_fn or a transform") from error
        if item is None:
            self._before, self._length_before_end = None, progress.epoch_batches
            progress.end()
            raise StopIteration
        if before is not None:
            self._note_fetch(before)
        batch, report = item
        fresh, echoed, refetched, source, rest, collate, note, hits, misses, received, waited = report
        if self._unused is None and (source or rest or collate):
            self._add_seconds(source, rest, collate, fresh + refetched)
        if note:
            self.note = note
        if (hits or misses) and self._unused is None and self.add_lookups is not None:
            self.add_lookups(hits, misses, received, waited)
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
        """Counts a batch, as the last action of a fetch. After an interrupt, see `take_back`."""
        self._last = fresh, echoed, refetched
        self._fresh, self._echoed, self._refetched = self._fresh + fresh, self._echoed + echoed, self._refetched + refetched
        progress = self.progress
        self._passes_at_last = self._ended_passes
        progress.delivered += 1
        progress.in_epoch += 1
        self._taken += 1

    def _all(self) -> EchoCounts:
        return EchoCounts(self._fresh, self._echoed, self._refetched)

    def _delivered(self) -> Delivered:
        return Delivered(self._all(), EchoCounts(*self._last), self.progress.snapshot(), self._ended_passes)

    def _note_fetch(self, before: Delivered) -> None:
        """Notes when the batch that is fetched now will be in use.

        A batch is in use once the consumer has used up the batch before it. The first batch of an iteration is in use once the
        consumer uses a batch.
        """
        used = None if self.batches_used is None else self.batches_used()
        self._before = None if used is None else before
        if used is not None:
            in_run, in_epoch = used
            is_first = self._asked_at is None or self._unused is not None or (in_epoch == 0 and in_run != self._asked_at)
            self._asked_at, self._used_at = in_run, in_run + (1 if is_first else 2)


def _restored(progress: Progress, counts: EchoCounts, ended_passes: int, seconds: StageSeconds) -> Delivery:
    delivery = Delivery()
    delivery.continue_at(progress, counts, ended_passes)
    delivery.seconds = seconds
    return delivery
