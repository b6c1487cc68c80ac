"""A new length of epochs during training: what forbids it, and how a Trainer comes to hear of it.

The only public way is to let Lightning ask for the training loader again, once.
"""

from __future__ import annotations

from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import OneCycleLR

from lightning_echo.several import Echoed, parts_of

__all__ = ["Attached", "Reload", "check_factor"]


class Attached(Protocol):
    """What knows the Trainer of the run."""

    @property
    def trainer(self) -> Any:
        """The Trainer, None while there is none."""


class Reload:
    """Sets ``trainer.reload_dataloaders_every_n_epochs``, and gives the user's setting back.

    Args:
        attached: Asked for the Trainer.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._users: int | None = None  # the Trainer's setting while ours stands in its place

    def order(self) -> None:
        """From the next epoch on Lightning asks for the loader again."""
        trainer = self._attached.trainer
        if self._users is None and trainer is not None:
            self._users = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1

    def end(self) -> bool:
        """Gives the Trainer's setting back; whether only we have asked for this reload."""
        users, self._users = self._users, None
        if users is None:
            return False
        trainer = self._attached.trainer
        if trainer is not None:
            trainer.reload_dataloaders_every_n_epochs = users
        return not users


def check_factor(trainer: pl.Trainer, echoed: Echoed, factor: float) -> None:
    """Whether a factor could be set during training, now or later.

    Raises:
        ValueError: The loader's buffer cannot hold what it needs.
        MisconfigurationException: It would make epochs longer than a schedule of the learning rate expects.
    """
    loaders = parts_of(echoed).values()
    for loader in loaders:
        loader.check_factor(factor)
    if all(loader.epoch_length == "fixed" or factor <= loader.factor for loader in loaders):
        return
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, OneCycleLR) and config.interval == "step":
            raise MisconfigurationException(
                "the factor cannot be raised during training with epoch_length='full_pass' and OneCycleLR: epochs would become "
                "longer than the schedule's total_steps. Use epoch_length='fixed', whose length never changes, or another "
                "schedule"
            )
