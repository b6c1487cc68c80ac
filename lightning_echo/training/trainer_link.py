"""`TrainerLink`: an `EchoLoader` asks its Trainer how far the Trainer is.

A loader knows which batches it has delivered. Only the Trainer knows

* whether it ends an epoch earlier than the loader would,
* whether its epoch continues, if it trains on several loaders,
* which batch is in use, if it fetches one batch ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from lightning_echo.loading.delivery import BatchesUsed
from lightning_echo.loading.epochs import TrainerPlace, takes_iterator
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.collection import is_collection, is_sized
from lightning_echo.training.lengths import Attached

__all__ = ["TrainerLink"]

Answer = TypeVar("Answer")


class TrainerLink:
    """Connects the loaders of one run with their Trainer.

    Args:
        attached: Knows the Trainer. It is asked whenever the Trainer is needed.
        owner_name: Name of the object on which users set the factor, instead of on the loader.
    """

    def __init__(self, attached: Attached, owner_name: str) -> None:
        self._attached, self._owner_name = attached, owner_name

    def connect(self, loader: EchoLoader, trained_on: Any) -> None:
        """Lets a loader ask the Trainer, from now on.

        Args:
            loader: The loader itself, or one of a collection.
            trained_on: What the Trainer trains on: the loader, or the collection.
        """
        loader.factor_owner = self._owner_name
        loader.epoch_goes_on = self._epoch_goes_on if is_collection(trained_on) else None
        loader.trainer_place = None if is_collection(trained_on) else self._place
        loader.batches_used = None if is_sized(trained_on) else self._batches_used

    def set_limit(self, loader: EchoLoader) -> None:
        """Tells a loader where the Trainer ends an epoch."""
        trainer = self._attached.trainer
        loader.limit_train_batches = None if trainer is None else trainer.limit_train_batches

    def disconnect(self, loaders: Iterable[EchoLoader]) -> None:
        """Ends the connection of loaders and Trainer. Call it while there still is a Trainer.

        The loaders may be the user's own, and used elsewhere. A checkpoint may still be saved. Therefore each loader keeps the
        last answers until an iteration asks it for another batch.
        """
        goes_on, place = self._epoch_goes_on(), self._place()
        for loader in loaders:
            loader.factor_owner, loader.limit_train_batches = "", None
            loader.batches_used = None
            if loader.epoch_goes_on is not None:
                loader.epoch_goes_on = partial(_until_iterated, loader, loader.delivered_batches, goes_on)
            if loader.trainer_place is not None and place is not None:
                last_place = place._replace(epoch_batches=-1, resumes=False)
                loader.trainer_place = partial(_until_iterated, loader, loader.delivered_batches, last_place)

    def _epoch_goes_on(self) -> bool | None:
        """Returns whether the Trainer's epoch has begun and has more batches; None without a Trainer."""
        trainer = self._attached.trainer
        return None if trainer is None else trainer.fit_loop.batch_idx >= 0 and not trainer.is_last_batch

    def _place(self) -> TrainerPlace | None:
        """Returns where the Trainer is in its epoch, as a checkpoint of the Trainer has it; None without a Trainer."""
        trainer = self._attached.trainer
        if trainer is None:
            return None
        epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
        has_length = trainer.training and trainer.num_training_batches != math.inf
        return TrainerPlace(
            in_epoch=batches.ready,
            processed=batches.processed,
            epoch_batches=int(trainer.num_training_batches) if has_length else -1,
            ended=epochs.processed,
            is_over=epochs.ready == epochs.started == epochs.processed,
            in_step=batches.completed < batches.ready,
            resumes=trainer.ckpt_path is not None,
            limit=trainer.limit_train_batches,
        )

    def _batches_used(self) -> BatchesUsed | None:
        """Returns the number of batches that the Trainer has used, in the run and in the epoch.

        Returns None if the Trainer knows the length of the epoch, or if the model fetches its batches itself, because no batch is
        then fetched ahead.
        """
        trainer = self._attached.trainer
        if trainer is None or trainer.num_training_batches != math.inf or takes_iterator(trainer.lightning_module):
            return None
        return BatchesUsed(trainer.fit_loop.total_batch_idx + 1, trainer.fit_loop.batch_idx + 1)


def _until_iterated(loader: EchoLoader, delivered: int, answer: Answer) -> Answer | None:
    """Returns the last Trainer's answer, as long as the loader has delivered no further batch. After that, None."""
    return answer if loader.delivered_batches == delivered else None
