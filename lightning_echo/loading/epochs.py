"""Epochs: stretches of the endless stream of batches, and how far the run has come in them."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from lightning_echo.loading.state import EchoState, TrainerState

__all__ = ["Epoch", "Iterations", "Progress", "TrainerPlace"]


class TrainerPlace(NamedTuple):
    """Where the Trainer is that iterates the loader.

    Attributes:
        in_epoch: Batches of its epoch that it has taken.
        epoch_batches: Batches that it takes in its epoch; -1 while it trains none, or where nobody knows.
        ended: Epochs that it has ended.
        is_over: Whether it has ended the epoch that it began last: what comes next belongs to another one.
        in_step: Whether it has not counted the batch that it took last: it is in ``on_train_batch_end``, or before.
        resumes: Whether it goes on from a checkpoint.
        limit: Its ``limit_train_batches``.
    """

    in_epoch: int
    epoch_batches: int
    ended: int
    is_over: bool
    in_step: bool
    resumes: bool
    limit: int | float | None = None

    def state(self) -> TrainerState:
        """What a state says of it."""
        return TrainerState(in_epoch=self.in_epoch, ended=self.ended, is_over=self.is_over, in_step=self.in_step)


def limited(batches: float, limit: int | float | None) -> float:
    """Batches that a Trainer takes of an epoch, by its ``limit_train_batches``; infinite ones by an integer alone.

    >>> limited(7, 0.5), limited(7, 5), limited(math.inf, 5), limited(7, None)
    (3, 5, 5, 7)
    """
    if isinstance(limit, float):
        return int(batches * limit) if batches < math.inf else batches
    return batches if limit is None else min(limit, batches)


def unlimited(taken: float, limit: int | float | None) -> int:
    """Length of the shortest epoch of which a Trainer takes so many batches, or as many as it may.

    >>> unlimited(3, 0.5), unlimited(3, 0.3), unlimited(3, 5)
    (6, 10, 3)
    """
    if not isinstance(limit, float):
        return int(taken)
    length = math.ceil(taken / limit)
    return length if limited(length, limit) >= taken else length + 1  # rounding


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        epoch: Number of the epoch under way, from 0.
        epoch_batches: Its length; -1 while it is under way and ends with a pass whose length is not known.
        in_epoch: Its batches that were delivered.
        delivered: Batches delivered in the whole run.
    """

    epoch: int = 0
    epoch_batches: int = 0
    in_epoch: int = 0
    delivered: int = 0

    def __post_init__(self) -> None:
        self.resuming = False  # whether the next iteration goes on with the epoch under way
        self.kept_length: int | None = None  # length of the next epoch where the factor does not decide it
        # Where the Trainer was that has not ended this epoch, although all its batches were delivered.
        self.not_ended: TrainerState | None = None

    @property
    def over(self) -> bool:
        """Whether all batches of the epoch under way were delivered."""
        return 0 <= self.epoch_batches <= self.in_epoch

    def begin(self, length: int, *, keeps_length: bool = False, place: TrainerPlace | None = None) -> None:
        """Begins the next epoch, or goes on with the one that was resumed.

        Args:
            length: Of the next epoch.
            keeps_length: Whether a kept length goes on being kept.
            place: Of the Trainer, where it tells: the epoch is then where the Trainer's is, and never ends before that.
        """
        goes_on = self.resuming and (place is None or place.in_epoch > 0)
        if not goes_on:
            self.epoch += bool(self.epoch_batches)
            self.in_epoch, self.epoch_batches = 0, length
        if place is not None:
            self.in_epoch, self.epoch_batches = place.in_epoch, max(self.epoch_batches, place.epoch_batches)
        self.resuming, self.not_ended = False, None
        if not keeps_length:
            self.kept_length = None

    def trainers_length(self, length: int, place: TrainerPlace | None) -> int:
        """Length of the next epoch as a Trainer has to hear it that resumes and, when it was saved, had not ended the last one.

        Saved in ``on_train_batch_end``, Lightning counts on from there, unless the next epoch is no longer than that. Saved
        later, it first ends the epoch.

        Args:
            length: Of the next epoch.
            place: Of the Trainer, if there is one.
        """
        if self.not_ended is None or place is None or not place.resumes:
            return length
        counted = self.not_ended.in_epoch
        if self.not_ended.in_step:
            taken = limited(length, place.limit)
            return length if counted >= taken else unlimited(counted + taken, place.limit)
        return length if place.ended > self.not_ended.ended else self.epoch_batches

    def end(self) -> None:
        """The pass has ended, and the epoch with it."""
        self.epoch_batches = self.in_epoch

    def snapshot(self) -> Progress:
        """The same numbers, which stay as they are."""
        return replace(self)

    @classmethod
    def from_state(cls, state: EchoState, limit: int | float | None) -> Progress:
        """Goes on where a state was taken; with ``limit`` (``Trainer(limit_train_batches)``) an epoch ends sooner.

        Where several loaders make up an epoch, the state says whether it goes on: one of them may be over before it is, or not.
        """
        progress = cls(state.epoch, state.epoch_batches, state.in_epoch, state.delivered)
        end = limited(progress.epoch_batches if progress.epoch_batches >= 0 else math.inf, limit)
        goes_on, trainer = state.epoch_goes_on, state.trainer
        progress.resuming = goes_on if isinstance(goes_on, bool) else progress.in_epoch < end
        if trainer is not None and trainer.is_over:  # it may have stopped within the epoch
            progress.resuming = False
        elif trainer is not None and not progress.resuming:
            progress.not_ended = trainer
        return progress


class HasProgress(Protocol):
    """What has a place in a run, another one when a state is loaded."""

    progress: Progress


class Epoch(Iterator[Any]):
    """The iteration of one epoch. Nothing happens before its first ``next``.

    Args:
        place: Where the run is.
        begin: Begins an epoch.
        fetch: Returns its next batch.
    """

    def __init__(self, place: HasProgress, begin: Callable[[Epoch], None], fetch: Callable[[], Any]) -> None:
        self._place, self._begin, self._fetch = place, begin, fetch
        self._begun_in: Progress | None = None
        self.finished = False  # whether who iterates has been told the end: Lightning, which counts, never asks for it

    def __next__(self) -> Any:
        if self.finished:
            raise StopIteration
        progress = self._place.progress
        if self._begun_in is not progress:  # a state was loaded meanwhile, or nothing has begun yet
            _let_go_of_handled_end()
            self._begin(self)
            progress = self._begun_in = self._place.progress
        self.finished = True  # as a generator is after an exception
        if progress.over:
            raise StopIteration
        batch = self._fetch()
        self.finished = False
        return batch


def _let_go_of_handled_end() -> None:
    """Lightning begins a loader anew while it still handles the end of its last iteration, whose traceback holds all iterators.

    A stream that is begun now may keep that exception for as long as it lives: compiled code (Cython's, numpy's for one) that is
    called in a generator leaves there what is being handled outside.
    """
    handled = sys.exc_info()[1]
    if isinstance(handled, StopIteration):
        handled.__traceback__ = None


class Iterations:
    """The iterations that are still referenced, in the order in which they were made: only the last one may go on."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Epoch]] = []

    def __reduce__(self) -> tuple[type[Iterations], tuple[()]]:
        """In another process there are none."""
        return Iterations, ()

    def add(self, epoch: Epoch) -> None:
        """Keeps a new one, without keeping it alive."""
        self._refs = [ref for ref in self._refs if ref() is not None] + [weakref.ref(epoch)]

    def check_alone(self, epoch: Epoch) -> None:
        """Refuses to begin an epoch while an earlier iteration is not over, be it only made: Lightning makes its own early.

        Raises:
            RuntimeError: With the ways out.
        """
        for ref in self._refs:
            other = ref()
            if other is epoch:
                return
            if other is not None and not other.finished:
                epoch.finished = True
                raise RuntimeError(
                    "this EchoLoader is being iterated already, and a second iteration would take batches away from the first. "
                    "To look at data during training iterate the loader inside, EchoLoader.loader; two trainings need an "
                    "EchoLoader each; if the first iteration was abandoned or is over, drop its iterator"
                )
