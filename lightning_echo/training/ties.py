"""`Ties`: what an `EchoLoader` asks the Trainer that iterates it, and how long.

A loader knows what it has delivered. What has become of it, only the Trainer knows: whether it stops an epoch sooner, whether the
epoch under way (of several loaders) goes on, and, where it fetches a batch ahead, which batch is in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from lightning_echo.loading.delivery import BatchesUsed
from lightning_echo.loading.epochs import TrainerPlace
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.collection import is_collection, is_sized
from lightning_echo.training.lengths import Attached

__all__ = ["Ties"]

Answer = TypeVar("Answer")


class Ties:
    """Of the loaders of one run.

    Args:
        attached: Asked for the Trainer whenever it is needed.
        owner: Whose factor is to be set in place of a loader's own.
    """

    def __init__(self, attached: Attached, owner: str) -> None:
        self._attached, self._owner = attached, owner

    def tie(self, loader: EchoLoader, trained_on: Any) -> None:
        """Lets a loader ask from now on.

        Args:
            loader: The loader itself, or one of a collection.
            trained_on: What the Trainer has: the loader, or the collection.
        """
        loader.factor_owner = self._owner
        loader.epoch_goes_on = self._epoch_goes_on if is_collection(trained_on) else None
        loader.trainer_place = None if is_collection(trained_on) else self._place
        loader.batches_used = None if is_sized(trained_on) else self._batches_used

    def limit(self, loader: EchoLoader) -> None:
        """Says where the Trainer stops an epoch."""
        trainer = self._attached.trainer
        loader.limit_train_batches = None if trainer is None else trainer.limit_train_batches

    def untie(self, loaders: Iterable[EchoLoader]) -> None:
        """Leaves loaders to themselves, while there still is a Trainer: they may be the user's own, and used elsewhere."""
        goes_on, place = self._epoch_goes_on(), self._place()
        for loader in loaders:
            loader.factor_owner, loader.limit_train_batches = "", None
            loader.batches_used = None
            if loader.epoch_goes_on is not None:  # a checkpoint may still be saved
                loader.epoch_goes_on = partial(_until_used, loader, loader.delivered_batches, goes_on)
            if loader.trainer_place is not None and place is not None:
                left = place._replace(epoch_batches=-1, resumes=False)
                loader.trainer_place = partial(_until_used, loader, loader.delivered_batches, left)

    def _epoch_goes_on(self) -> bool | None:
        """Whether the Trainer's epoch is neither over nor still to begin; a loader of a collection cannot tell from itself."""
        trainer = self._attached.trainer
        return None if trainer is None else trainer.fit_loop.batch_idx >= 0 and not trainer.is_last_batch

    def _place(self) -> TrainerPlace | None:
        """Where the Trainer is in its epoch, as it is, or will be, in its checkpoint."""
        trainer = self._attached.trainer
        if trainer is None:
            return None
        epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
        trains = trainer.training and trainer.num_training_batches != math.inf
        return TrainerPlace(
            in_epoch=batches.ready,
            epoch_batches=int(trainer.num_training_batches) if trains else -1,
            ended=epochs.processed,
            is_over=epochs.ready == epochs.started == epochs.processed,
            in_step=batches.completed < batches.ready,
            resumes=trainer.ckpt_path is not None,
            limit=trainer.limit_train_batches,
        )

    def _batches_used(self) -> BatchesUsed | None:
        """Batches that the Trainer has taken, in the run and in the epoch, where it knows no length and so fetches one ahead."""
        trainer = self._attached.trainer
        if trainer is None or trainer.num_training_batches != math.inf:
            return None
        return BatchesUsed(trainer.fit_loop.total_batch_idx + 1, trainer.fit_loop.batch_idx + 1)


def _until_used(loader: EchoLoader, delivered: int, answer: Answer) -> Answer | None:
    """An answer of the last Trainer, as long as the loader stands where that left it."""
    return answer if loader.delivered_batches == delivered else None
