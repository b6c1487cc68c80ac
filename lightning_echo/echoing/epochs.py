"""Epochs: stretches of the endless stream of batches, and how far the run has come in them."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Epoch", "Iterations", "Progress"]


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

    @property
    def over(self) -> bool:
        """Whether all batches of the epoch under way were delivered."""
        return 0 <= self.epoch_batches <= self.in_epoch

    def begin(self, length: int, *, keeps_length: bool = False) -> None:
        """Begins the next epoch, or goes on with the one that was resumed; a kept length may go on being kept."""
        if not self.resuming:
            self.epoch += bool(self.epoch_batches)
            self.in_epoch, self.epoch_batches = 0, length
        self.resuming = False
        if not keeps_length:
            self.kept_length = None

    def end(self) -> None:
        """The pass has ended, and the epoch with it."""
        self.epoch_batches = self.in_epoch

    def count(self) -> None:
        """One more batch was delivered."""
        self.delivered += 1
        self.in_epoch += 1

    def state(self) -> dict[str, int]:
        """Plain types."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any], limit: int | float | None) -> Progress:
        """Goes on where a state was taken; with ``limit`` (``Trainer(limit_train_batches)``) an epoch ends sooner.

        Where several loaders make up an epoch, the state says whether it goes on: one of them may be over before it is, or not.
        """
        progress = cls(*(state[name] for name in ("epoch", "epoch_batches", "in_epoch", "delivered")))
        end: float = progress.epoch_batches if progress.epoch_batches >= 0 else math.inf
        if limit is not None and end < math.inf:
            end = int(end * limit) if isinstance(limit, float) else min(limit, end)
        elif isinstance(limit, int):
            end = limit
        goes_on = state.get("epoch_goes_on")
        progress.resuming = progress.in_epoch < end if goes_on is None else goes_on
        return progress


class Epoch(Iterator[Any]):
    """The iteration of one epoch. Nothing happens before its first ``next``."""

    def __init__(self, progress: Callable[[], Progress], begin: Callable[[Epoch], None], fetch: Callable[[], Any]) -> None:
        self._progress, self._begin, self._fetch = progress, begin, fetch
        self._begun_in: Progress | None = None
        self.finished = False  # whether who iterates has been told the end: Lightning, which counts, never asks for it

    def __next__(self) -> Any:
        if self.finished:
            raise StopIteration
        if self._begun_in is not self._progress():  # a state was loaded meanwhile, or nothing has begun yet
            _let_go_of_handled_end()
            self._begin(self)
            self._begun_in = self._progress()
        self.finished = True  # as a generator is after an exception
        if self._progress().over:
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
                    "To look at data during training iterate the loader inside, EchoLoader.loader; if the first iteration was "
                    "abandoned or is over, drop its iterator"
                )
