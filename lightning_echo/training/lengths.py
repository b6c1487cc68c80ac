"""A new length of epochs during training: what forbids it, what comes to grief by it, and how a Trainer comes to hear of it.

The only public way is to let Lightning ask for the training loader again, once.

A schedule of the learning rate that is stepped with each batch, and built for ``trainer.estimated_stepping_batches``, is through
before longer epochs are: `OneCycleLR` then fails, others train on at the rate where they end. That the estimate was read shows in
when the Trainer has its training loader: before optimizers are configured, and not after (`Estimate`).
"""

from __future__ import annotations

from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import OneCycleLR

from lightning_echo.training.several import Echoed, parts_of

__all__ = ["Attached", "Estimate", "Reload", "check_factor", "too_short_schedules"]


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


class Estimate:
    """Whether the model of a ``fit`` has read ``trainer.estimated_stepping_batches`` to configure its optimizers.

    Attributes:
        was_read: See there.
    """

    def __init__(self) -> None:
        self.was_read = False
        self._before: Any = None  # the optimizers of an earlier fit, or none: replaced when they are configured

    def begin(self, trainer: Any) -> None:
        """A ``fit`` is being set up."""
        self.was_read, self._before = False, trainer.optimizers

    def asked(self, trainer: Any) -> None:
        """The Trainer asks for its training loader."""
        self.was_read |= trainer.optimizers is self._before

    def configured(self, trainer: Any) -> None:
        """Optimizers are configured, and nothing else has needed the training loader yet: as in ``on_fit_start``."""
        self.was_read |= trainer.train_dataloader is not None


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


def too_short_schedules(trainer: pl.Trainer, echoed: Echoed, factor: float) -> str:
    """What to say of schedules that would be through before the run is, were the factor set; empty: there are none.

    Args:
        trainer: Its model has read ``estimated_stepping_batches``.
        echoed: What it trains on.
        factor: To be set during training, now or later.
    """
    growing = [each for each in parts_of(echoed).values() if each.epoch_length == "full_pass" and each.has_length]
    names = {type(config.scheduler).__name__: None for config in trainer.lr_scheduler_configs if config.interval == "step"}
    steps, limit = trainer.estimated_stepping_batches, trainer.max_steps
    if not names or all(factor <= each.factor for each in growing) or 0 <= limit <= steps:  # at the limit the run ends anyway
        return ""
    return (
        f"{', '.join(names)} is stepped with each batch (interval='step'), and the model has read "
        f"trainer.estimated_stepping_batches: {steps:,} steps. With epoch_length='full_pass' a larger factor (up to {factor:g} "
        "here) makes epochs longer: the schedule is through before the run is, which goes on at the learning rate of its end. "
        "Use epoch_length='fixed', whose length never changes, or Trainer(max_epochs=-1, max_steps=...), or a schedule that is "
        "stepped per epoch"
    )
