"""How long epochs and the run are with echoing: what the user is told about it, and how a Trainer learns a new length.

With ``epoch_length="full_pass"`` a new factor changes the length of epochs. Lightning asks the loader for its length only when it
asks for the loader itself. Therefore the only public way to tell it a new length during training is to make it ask for the loader
once more (`Reload`).

A learning rate schedule that steps with each batch may be built for ``trainer.estimated_stepping_batches`` steps. If epochs
become longer, the schedule ends before the run does. ``OneCycleLR`` then raises an error. Other schedules keep their last
learning rate. The Trainer needs its training loader for this estimate. So if the Trainer has the loader when optimizers are
configured, the model has read the estimate (`StepsEstimate`).
"""

from __future__ import annotations

from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import OneCycleLR

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.collection import Echoed, parts_of

__all__ = ["Attached", "Reload", "StepsEstimate", "check_factor_during_training", "forecast", "too_short_schedules"]

_SHORT_RUN_STEPS = 2000  # in longer runs, the filling of the buffer makes no difference, and planning them takes time
_NOTICEABLE = 1.03  # times as many passes


class Attached(Protocol):
    """An object that knows the Trainer of the run, such as a data module."""

    @property
    def trainer(self) -> Any:
        """The Trainer; None while there is none."""


class Reload:
    """Makes the Trainer ask for its training loader again, by ``trainer.reload_dataloaders_every_n_epochs``.

    Args:
        attached: Knows the Trainer.
    """

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._users: int | None = None  # the user's setting while ours stands in its place

    def order(self) -> None:
        """Makes Lightning ask for the loader again before the next epoch."""
        trainer = self._attached.trainer
        if self._users is None and trainer is not None:
            self._users = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1

    @property
    def is_ordered(self) -> bool:
        """Whether the Trainer will ask only because this object ordered it: the user's setting does not ask for a reload."""
        return self._users == 0

    def end(self) -> bool:
        """Gives back to the Trainer the user's setting.

        Returns:
            Whether only this object ordered the reload: the user's setting does not ask for one.
        """
        users, self._users = self._users, None
        if users is None:
            return False
        trainer = self._attached.trainer
        if trainer is not None:
            trainer.reload_dataloaders_every_n_epochs = users
        return not users


class StepsEstimate:
    """Finds out whether the model of a ``fit`` has read ``trainer.estimated_stepping_batches`` to configure its optimizers.

    Attributes:
        was_read: Whether the model has read it.
    """

    def __init__(self) -> None:
        self.was_read = False
        self._optimizers_before: Any = None  # of an earlier fit, or none; the Trainer replaces them when it configures its own

    def begin_fit(self, trainer: Any) -> None:
        """Call this when a ``fit`` is set up."""
        self.was_read, self._optimizers_before = False, trainer.optimizers

    def loader_asked(self, trainer: Any) -> None:
        """Call this when the Trainer asks for its training loader."""
        self.was_read |= trainer.optimizers is self._optimizers_before

    def optimizers_configured(self, trainer: Any) -> None:
        """Call this in ``on_fit_start``: optimizers are then configured, and nothing else has needed the training loader."""
        self.was_read |= trainer.train_dataloader is not None


def check_factor_during_training(trainer: pl.Trainer, echoed: Echoed, factor: float) -> None:
    """Makes sure that a factor can be set during training, now or later.

    Args:
        trainer: The Trainer. Its learning rate schedules are checked.
        echoed: The loaders that are echoed.
        factor: The factor. It is not set here.

    Raises:
        ValueError: A loader's buffer cannot hold what the factor needs.
        MisconfigurationException: The factor makes epochs longer than a learning rate schedule expects.
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
    """Returns a warning about learning rate schedules that would end before the run. It is empty if there are none.

    Args:
        trainer: The Trainer, whose model has read ``estimated_stepping_batches``.
        echoed: The loaders that are echoed.
        factor: The factor that is set during training, now or later.
    """
    growing = [each for each in parts_of(echoed).values() if each.epoch_length == "full_pass" and each.has_length]
    names = {type(config.scheduler).__name__: None for config in trainer.lr_scheduler_configs if config.interval == "step"}
    steps, limit = trainer.estimated_stepping_batches, trainer.max_steps
    if not names or all(factor <= each.factor for each in growing) or 0 <= limit <= steps:  # at the limit the run ends anyway
        return ""
    return (
        f"{', '.join(names)} is stepped with each batch (interval='step'), and the model has read "
        f"trainer.estimated_stepping_batches: {steps:,} steps. With epoch_length='full_pass' a larger factor (up to {factor:g} "
        "here) makes epochs longer: the schedule ends before the run does, and the rest of the run has the learning rate of its "
        "end. Use epoch_length='fixed', whose length never changes, or Trainer(max_epochs=-1, max_steps=...), or a schedule that "
        "is stepped per epoch"
    )


def forecast(trainer: Any, echoed: Echoed) -> str:
    """Returns how many epochs, steps and passes over the data a run will have, as a line for users.

    The user gets it when a run begins, because the factor changes what an epoch means. While the buffer is being filled, more of
    each batch is fresh. In a short run this makes a difference, so the line takes it into account.

    Args:
        trainer: The Trainer. It knows the number of epochs, and how many batches it takes in each.
        echoed: The loaders that are echoed.

    Returns:
        The line. It is empty if the run has no known end, or no steps.
    """
    if not isinstance(echoed, EchoLoader):
        others = f"; not echoed: {', '.join(echoed.not_echoed)}" if echoed.not_echoed else ""
        return f"loaders that are echoed: {', '.join(echoed)}{others}"
    factor = echoed.factor
    if not echoed.has_length:
        return f"an epoch ends where a pass over the data ends, and has factor {factor:g} times as many steps"
    steps, limit, epochs = len(echoed), trainer.limit_train_batches, trainer.max_epochs
    steps = int(steps * limit) if isinstance(limit, float) else min(steps, limit)
    if epochs is None or epochs < 0 or not steps:
        return ""
    passes = epochs * steps / echoed.pass_batches / factor
    unit = "pass" if f"{passes:.3g}" == "1" else "passes"
    line = f"{epochs:,} epochs x {steps:,} steps = {passes:.3g} {unit} over the data at factor {factor:g}"
    planned = echoed.passes_in(epochs * steps) if echoed.is_at_start and epochs * steps <= _SHORT_RUN_STEPS else None
    if planned is not None and planned > _NOTICEABLE * passes:
        line += f", {planned:.3g} with the fresh examples of the first batches"
    return line
