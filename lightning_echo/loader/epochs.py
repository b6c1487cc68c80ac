"""Epochs: stretches of the endless sequence of batches, how far the run has come in them, and the delivered batches."""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_echo.loader.state import EchoCounts, EchoState, TrainerState
from lightning_echo.pipeline.worker import Report, StageSeconds

# ---------------------------------------------------------------------- epochs
# `Progress` holds the numbers, `Epoch` is the iterator of one epoch, `Iterations` refuses two iterators at the same time, and
# `caller` returns for whom an epoch begins.

_PACKAGES = "lightning.pytorch", "pytorch_lightning"


class Caller(NamedTuple):
    """Who iterates over a loader.

    ``trainer`` is the running Trainer; None outside of one. ``is_its_loop`` is False if the user's code iterates, in a hook.
    ``evaluates``: whether the Trainer validates, tests or predicts.
    """

    trainer: Any
    is_its_loop: bool
    evaluates: bool


def caller() -> Caller:
    """Returns who iterates, by the frames of the calling functions."""
    trainers = tuple(sys.modules[name].Trainer for name in _PACKAGES if hasattr(sys.modules.get(name), "Trainer"))
    frame, is_its_loop = sys._getframe(1), False
    while trainers and frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_PACKAGES):
            is_its_loop |= module.endswith(".combined_loader")
            if isinstance(found := frame.f_locals.get("self"), trainers):
                return Caller(found, is_its_loop, evaluates=not found.training)
        frame = frame.f_back  # type: ignore[assignment]
    return Caller(None, is_its_loop=False, evaluates=False)


def few_workers(trainer: Any, loader: Any) -> tuple[str, type[Warning]] | None:
    """Returns Lightning's warning about a loader with few workers, and its class. Lightning checks a ``DataLoader`` alone."""
    if not isinstance(loader, DataLoader) or loader.num_workers >= 2 or not trainer.is_global_zero:
        return None
    for package in ("lightning.fabric.utilities", "lightning_fabric.utilities"):
        suggested = getattr(sys.modules.get(f"{package}.data"), "suggested_max_num_workers", None)
        kind = getattr(sys.modules.get(f"{package}.warnings"), "PossibleUserWarning", UserWarning)
        if suggested is not None and (most := suggested(trainer.num_devices)) > 1:
            return (
                "The 'train_dataloader' does not have many workers which may be a bottleneck. Consider increasing the value of "
                f"the `num_workers` argument` to `num_workers={most}` in the `DataLoader` to improve performance"
            ), kind
    return None


def takes_iterator(model: Any) -> bool:
    """Returns whether the ``training_step`` of a ``LightningModule`` takes an iterator, and fetches its batches itself."""
    kind: Any = type(model)
    return model is not None and _has_iterator(kind)


@lru_cache(maxsize=4)
def _has_iterator(model: Any) -> bool:
    return "dataloader_iter" in inspect.signature(model.training_step).parameters


class Steps:
    """The steps of a Trainer since a loader has begun an epoch. The Trainer is not kept alive."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        self._before: int = trainer.fit_loop.epoch_loop.batch_progress.total.processed

    @property
    def processed(self) -> int | None:
        """Number of batches whose step is over. None: it is not known, or not related to the number of batches taken."""
        trainer = self._trainer()
        if trainer is None or takes_iterator(trainer.lightning_module):
            return None
        processed: int = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return processed - self._before


class TrainerPlace(NamedTuple):
    """The place of the Trainer that iterates over the loader.

    Attributes:
        in_epoch: Number of batches that it has taken in this epoch. With a ``training_step(dataloader_iter)``, the batch that
            such a step is about to take is one of them.
        processed: Number of batches of this epoch whose step is over.
        epoch_batches: Number of batches that it takes in this epoch; -1 if it is not training, or if the number is not known.
        ended: Number of epochs that it has ended.
        is_over: Whether it has ended the epoch that it began last. The next batch then belongs to another epoch.
        in_step: Whether it has taken a batch that it has not counted as completed. It is then in ``on_train_batch_end``, or
            before that hook.
        resumes: Whether it continues from a checkpoint.
        limit: Its ``limit_train_batches``.
    """

    in_epoch: int
    processed: int
    epoch_batches: int
    ended: int
    is_over: bool
    in_step: bool
    resumes: bool
    limit: int | float | None = None

    def state(self) -> TrainerState:
        return TrainerState(in_epoch=self.in_epoch, ended=self.ended, is_over=self.is_over, in_step=self.in_step)


def limited(batches: float, limit: int | float | None) -> float:
    """Returns the number of batches of an epoch that a Trainer with this ``limit_train_batches`` takes.

    Only an integer limits an epoch of infinite length.

    >>> limited(7, 0.5), limited(7, 5), limited(math.inf, 5), limited(7, None)
    (3, 5, 5, 7)
    """
    if isinstance(limit, float):
        return int(batches * limit) if batches < math.inf else batches
    return batches if limit is None else min(limit, batches)


def unlimited(taken: float, limit: int | float | None) -> int:
    """Returns the length of the shortest epoch of which a Trainer takes ``taken`` batches.

    An integer limit does not depend on the length of the epoch. The result is then ``taken``.

    >>> unlimited(3, 0.5), unlimited(3, 0.3), unlimited(3, 5)
    (6, 10, 3)
    """
    if not isinstance(limit, float):
        return int(taken)
    length = math.ceil(taken / limit)
    return length if limited(length, limit) >= taken else length + 1  # rounding


@dataclass
class Progress:
    """The place of a run.

    Attributes:
        epoch_batches: Length of the present epoch; -1 while that is not known, because it ends when a pass ends.
        in_epoch: Batches of the present epoch that were delivered.
        delivered: Batches that were delivered in the whole run.
        has_begun_pass: Whether the present pass began in the present epoch. It is needed if only a limit of the Trainer ends an
            epoch, see `EchoRun`.
        resuming: Whether the next iteration continues the present epoch instead of beginning another one.
        kept_length: Length of the next epoch, if it differs from the length that the factor gives; otherwise None.
        not_ended: Where the Trainer was when the state was saved, if all batches of the epoch had been delivered and the Trainer
            had not ended the epoch; otherwise None.
    """

    epoch: int = 0
    epoch_batches: int = 0
    in_epoch: int = 0
    delivered: int = 0
    has_begun_pass: bool = False

    def __post_init__(self) -> None:
        self.resuming = False
        self.kept_length: int | None = None
        self.not_ended: TrainerState | None = None

    @property
    def over(self) -> bool:
        return 0 <= self.epoch_batches <= self.in_epoch

    def begin(self, length: int, *, keeps_length: bool = False, place: TrainerPlace | None = None) -> None:
        """Begins the next epoch, or continues the one that was resumed.

        ``length`` is -1 if it is not known. ``keeps_length``: whether `kept_length` applies to the epoch after this one, too. The
        epoch has the same place as the Trainer's, if that ``place`` is known, and does not end earlier.
        """
        goes_on = self.resuming and (place is None or place.processed > 0)
        if not goes_on:
            self.epoch += bool(self.epoch_batches) and not (self.resuming and not self.in_epoch)
            self.in_epoch, self.epoch_batches = 0, length
        if place is not None:
            self.in_epoch, self.epoch_batches = place.processed, max(self.epoch_batches, place.epoch_batches)
        self.resuming, self.not_ended = False, None
        if not keeps_length:
            self.kept_length = None

    def trainers_length(self, length: int, place: TrainerPlace | None) -> int:
        """Returns the length to report to a Trainer, which may resume an epoch whose batches had all been delivered."""
        if self.not_ended is None or place is None or not place.resumes:
            return length
        counted = self.not_ended.in_epoch
        if self.not_ended.in_step:
            # Lightning continues to count from that batch, if the next epoch has more batches than that.
            taken = limited(length, place.limit)
            return length if counted >= taken else unlimited(counted + taken, place.limit)
        # The checkpoint was saved after that, so Lightning ends the old epoch first.
        return length if place.ended > self.not_ended.ended else self.epoch_batches

    @classmethod
    def from_state(cls, state: EchoState, limit: int | float | None) -> Progress:
        """Returns the progress of a run that continues from a state. A Trainer with ``limit`` ends an epoch earlier."""
        progress = cls(state.epoch, state.epoch_batches, state.in_epoch, state.delivered, state.has_begun_pass is True)
        end = limited(progress.epoch_batches if progress.epoch_batches >= 0 else math.inf, limit)
        goes_on, trainer = state.epoch_goes_on, state.trainer
        # If several loaders make up an epoch, the state has whether it continues: this loader may end earlier.
        progress.resuming = goes_on if isinstance(goes_on, bool) else progress.in_epoch < end
        if trainer is not None and trainer.is_over:  # the Trainer may have ended the epoch before its last batch
            progress.resuming = False
        elif trainer is not None and not progress.resuming:
            progress.not_ended = trainer
        return progress


class Epoch(Iterator[Any]):
    """The iterator of one epoch. Nothing happens before the first ``next``.

    ``finished``: whether the consumer got the end of the epoch. Lightning counts batches, and never asks for the end.
    ``instead``: other batches than those of the run, to be delivered from now on.
    """

    def __init__(self, delivery: Delivery, begin: Callable[[Epoch], None], fetch: Callable[[], Any]) -> None:
        self._delivery, self._begin, self._fetch = delivery, begin, fetch
        self._begun_in: Progress | None = None
        self.instead: Iterator[Any] | None = None
        self.finished = False

    def __next__(self) -> Any:
        if self.instead is not None:
            return next(self.instead)
        if self.finished:
            raise StopIteration
        progress = self._delivery.progress
        if self._begun_in is not progress:  # the epoch has not begun, or a state was loaded meanwhile: that is another `Progress`
            # Lightning begins the next iteration while it still handles the StopIteration of the last one. A stream that begins
            # now may keep that exception alive as long as the stream lives: if a generator calls compiled code (of Cython, as in
            # numpy), the code stores the exception that its caller is handling. Its traceback holds all iterators.
            handled = sys.exc_info()[1]
            if isinstance(handled, StopIteration):
                handled.__traceback__ = None
            del handled
            self._begin(self)
            if self.instead is not None:
                return next(self.instead)
            progress = self._begun_in = self._delivery.progress
        self.finished = True  # like a generator, it is over after an exception
        if progress.over:
            raise StopIteration
        batch = self._fetch()
        self.finished = False
        return batch


class Iterations:
    """The iterators of a loader that are still referenced, in the order in which they were made."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Epoch]] = []

    def __reduce__(self) -> tuple[type[Iterations], tuple[()]]:
        """A copy in another process has no iterators."""
        return Iterations, ()

    def add(self, epoch: Epoch) -> None:
        self._refs = [ref for ref in self._refs if ref() is not None] + [weakref.ref(epoch)]

    def check_alone(self, epoch: Epoch) -> None:
        """Refuses to begin an epoch while an earlier iterator is not finished, even if that one has not begun."""
        for ref in self._refs:
            other = ref()
            if other is epoch:
                return
            if other is not None and not other.finished:
                epoch.finished = True
                raise RuntimeError(
                    "this EchoLoader is being iterated already, and a second iteration would take batches away from the first. "
                    "To look at data during training, iterate the loader inside, EchoLoader.loader. Two trainings need an "
                    "EchoLoader each. If the first iteration was abandoned or is over, drop its iterator"
                )


# ---------------------------------------------------------------------- delivery
# If a loader has no length, Lightning fetches one batch ahead, to see where an epoch ends. Counts and state must belong to the
# batch in use. So they are those from before the last fetch::
#
#     Lightning fetches   0   1       2       3
#     Lightning uses          0       1       2
#
# If a batch was fetched but not used before another iteration begins, it becomes the first batch of that iteration. If the
# Trainer fetches from several loaders together, one of them may end before the others are asked. So only the Trainer knows which
# batch is in use, and `Delivery.batches_used` asks it.

Fetched = tuple[Any, Report]
Counted = tuple[Progress, int, int, tuple[int, int, int], tuple[int, int, int], int, int]


class BatchesUsed(NamedTuple):
    """How many batches a consumer has used, in the whole run and in the present epoch, if it fetches one batch ahead."""

    in_run: int
    in_epoch: int


class Delivered(NamedTuple):
    """The delivery up to some batch: examples in all batches and in the last one, how far epochs had come, and ended passes."""

    counts: EchoCounts
    last: EchoCounts
    progress: Progress
    ended_passes: int


class Delivery:
    """Counts the delivered batches.

    Attributes:
        progress: How far epochs have come, including a batch that was fetched ahead.
        note: A message of a worker for the user; empty if there is none.
        batches_used: Returns how many batches the consumer has used, if the consumer fetches one ahead. If it is None, or returns
            None, the consumer does not fetch ahead.
        trainer_place: Returns where the Trainer is. If it is None, or returns None, there is no Trainer, or the Trainer iterates
            over several loaders.
        add_lookups: Counts the hits and misses of a cache, the hits that came from other nodes, and the seconds of waiting for
            those. None: there is no cache.
    """

    def __init__(self) -> None:
        self.batches_used: Callable[[], BatchesUsed | None] | None = None
        self.trainer_place: Callable[[], TrainerPlace | None] | None = None
        self.add_lookups: Callable[[int, int, int, float], None] | None = None
        self.note = ""
        self.reset()

    def reset(self) -> None:
        self.seconds = StageSeconds()
        self.continue_at(Progress(), EchoCounts(), 0)
        self._steps: Steps | None = None  # of the Trainer, since the epoch began
        self._taken = 0  # batches fetched since then

    def continue_at(self, progress: Progress, counts: EchoCounts, ended_passes: int) -> None:
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
        self._counted: Counted = (progress, -1, 0, (0, 0, 0), (0, 0, 0), 0, 0)  # the findings of the last fetch, see `take_back`

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has no consumer yet."""
        copied = Delivery()
        copied.continue_at(self.progress, self._all(), self._ended_passes)
        copied.seconds = self.seconds
        return vars(copied)

    # ------------------------------------------------------------------ in use

    @property
    def is_ahead(self) -> bool:
        """Whether the batch that was fetched last is not in use yet."""
        if self._unused is not None:
            return True
        used = None if self.batches_used is None or self._before is None else self.batches_used()
        return used is not None and used.in_run < self._used_at

    @property
    def in_use(self) -> Delivered:
        if self._before is not None and self.is_ahead:
            return self._before
        return self.all_fetched

    @property
    def counts(self) -> EchoCounts:
        return self._all() if self._before is None else self.in_use.counts

    @property
    def all_counts(self) -> EchoCounts:
        """The examples of all batches that were fetched, also of one that is not in use yet."""
        return self._all()

    @property
    def last(self) -> EchoCounts:
        return EchoCounts(*self._last) if self._before is None else self.in_use.last

    @property
    def batches(self) -> int:
        return self.progress.delivered if self._before is None else self.in_use.progress.delivered

    @property
    def ended_passes(self) -> int:
        return self._ended_passes if self._before is None else self.in_use.ended_passes

    @property
    def is_under_way(self) -> bool:
        """Whether a Trainer has taken the batch in use and its step is not over. A resumed Trainer asks for that batch again."""
        processed = None if self._steps is None else self._steps.processed
        is_ahead = self._before is not None and self.is_ahead
        return processed is not None and self._taken - is_ahead == processed + 1

    @property
    def before_in_use(self) -> Delivered:
        """The delivery up to the batch before the one in use."""
        now = self.in_use
        progress = replace(now.progress)
        progress.delivered -= 1
        progress.in_epoch = max(progress.in_epoch - 1, 0)
        if self._length_before_end is not None:
            progress.epoch_batches = self._length_before_end
        counts, last = now.counts, now.last
        left = EchoCounts(counts.fresh - last.fresh, counts.echoed - last.echoed, counts.refetched - last.refetched)
        return Delivered(left, EchoCounts(), progress, min(now.ended_passes, self._passes_at_last))

    # ------------------------------------------------------------------ delivering

    def take_back(self, delivered: int) -> None:
        """Undoes a fetch after ``delivered`` batches, if it has begun, because its batch has not reached the consumer."""
        progress, had_delivered, in_epoch, examples, last, taken, passes_at_last = self._counted
        if progress is self.progress and had_delivered == delivered:
            progress.delivered, progress.in_epoch = delivered, in_epoch
            self._fresh, self._echoed, self._refetched = examples
            self._last, self._taken, self._passes_at_last = last, taken, passes_at_last

    def begin_epoch(self, length: int, *, keeps_length: bool, steps: Steps | None = None) -> None:
        """Begins the next epoch, or continues a resumed one. See `Progress.begin`."""
        used = None if self.batches_used is None else self.batches_used()
        # A loader that begins again within the consumer's epoch is one of several, and its last batch is about to be used.
        if used is not None and used.in_epoch == 0 and not (self.progress.over and used.in_run == self._asked_at):
            self.settle()
        place = self.place()
        training = place if place is not None and place.epoch_batches >= 0 else None
        self.progress.begin(length, keeps_length=keeps_length, place=training)
        self._steps, self._taken, self._length_before_end = steps, 0, None

    def place(self) -> TrainerPlace | None:
        return None if self.trainer_place is None else self.trainer_place()

    def settle(self) -> None:
        """Ends an iteration: a batch that was fetched and not used is kept for the next one."""
        if self._before is not None and self.is_ahead:
            before, unused, asked_at = self._before, self._fetched, self._asked_at
            progress = replace(before.progress)
            progress.resuming = not progress.in_epoch  # an epoch of which no batch was used has not begun
            self.continue_at(progress, before.counts, before.ended_passes)
            self._last = (before.last.fresh, before.last.echoed, before.last.refetched)
            self._unused, self._asked_at, self._taken = unused, asked_at, self._taken - 1

    def forget_unused(self) -> None:
        """Drops a batch that was fetched and not used. It will be fetched again."""
        self.settle()
        self._unused = None

    def fetch(self, next_batch: Callable[[int], Fetched | None], crosses_passes: Callable[[], bool] = lambda: False) -> Any:
        """Returns the next batch, and counts it. The training waits for this function.

        ``next_batch`` gets the number of delivered batches, and returns None where a pass ends. Its StopIteration becomes a
        RuntimeError: passed on, it would end the epoch silently.
        """
        progress, examples = self.progress, (self._fresh, self._echoed, self._refetched)
        self._counted = progress, progress.delivered, progress.in_epoch, examples, self._last, self._taken, self._passes_at_last
        before = None if self.batches_used is None else self.all_fetched
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
            progress.epoch_batches = progress.in_epoch
            raise StopIteration
        if before is not None:
            # The batch is in use once the consumer has used up the batch before it. The first batch of an iteration is in use
            # once the consumer uses a batch.
            used = None if self.batches_used is None else self.batches_used()
            self._before = None if used is None else before
            if used is not None:
                in_run, in_epoch = used
                is_first = self._asked_at is None or self._unused is not None or (in_epoch == 0 and in_run != self._asked_at)
                self._asked_at, self._used_at = in_run, in_run + (1 if is_first else 2)
        batch, report = item
        fresh, echoed, refetched, source, rest, collate, note, hits, misses, received, waited, in_flight = report
        if self._unused is None and (source or rest or collate):
            seconds = self.seconds
            seconds.source += source
            seconds.rest += rest
            seconds.collate += collate
            seconds.examples += fresh + refetched
            seconds.batches += 1
            seconds.in_flight += in_flight
        if note:
            self.note = note
        if (hits or misses) and self._unused is None and self.add_lookups is not None:
            self.add_lookups(hits, misses, received, waited)
        self._unused, self._fetched = None, None if self._before is None else item
        # The batch is counted last. After an interrupt, see `take_back`.
        self._last = fresh, echoed, refetched
        self._fresh, self._echoed, self._refetched = self._fresh + fresh, self._echoed + echoed, self._refetched + refetched
        self._passes_at_last = self._ended_passes
        progress.delivered += 1
        progress.in_epoch += 1
        self._taken += 1
        return batch

    def _all(self) -> EchoCounts:
        return EchoCounts(self._fresh, self._echoed, self._refetched)

    @property
    def all_fetched(self) -> Delivered:
        """The delivery up to the batch that was fetched last, also if that is not in use yet."""
        return Delivered(self._all(), EchoCounts(*self._last), replace(self.progress), self._ended_passes)
