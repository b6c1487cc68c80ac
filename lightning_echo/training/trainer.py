"""The exchange between a Trainer and its loaders: the Trainer's place, new lengths, and a second ``fit``, which is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from torch.optim.lr_scheduler import OneCycleLR

from lightning_echo.loader.epochs import BatchesUsed, TrainerPlace, takes_iterator
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.log import LOGGER
from lightning_echo.training.loaders import Echoed, is_collection, leaves_of, parts_of
from lightning_echo.training.package import MisconfigurationException

# ---------------------------------------------------------------------- second fit
# Echoing follows one ``fit`` at a time: its epochs, its limits and its factor. Lightning itself lets two Trainers train over one
# data module, in two threads.


def is_in_fit(trainer: Any) -> bool:
    return trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


def refuse_second_fit(what: str, trainer: Any, other: Any) -> None:
    """Raises a MisconfigurationException for a ``fit`` while that of another Trainer uses the same object."""
    if other is not trainer and is_in_fit(trainer) and is_in_fit(other):
        raise MisconfigurationException(
            f"{what} is in use by another Trainer, whose fit is still running: echoing follows one training at a time. Give each "
            "Trainer a data module, and an EchoDataModule or EchoCallback, of its own, or let one fit end before the next begins"
        )


# ---------------------------------------------------------------------- lengths
# The lengths of epochs and of the run with echoing, for users, and how a Trainer learns a new length.
#
# With ``epoch_length="full_pass"`` a new factor changes the length of epochs. Lightning asks the loader for its length only when
# it asks for the loader itself. Therefore the only public way to give it a new length during training is to make it ask for the
# loader once more (`Reload`).
#
# A learning rate schedule that steps with each batch may be built for ``trainer.estimated_stepping_batches`` steps. If epochs
# become longer, the schedule ends before the run does. ``OneCycleLR`` then raises an error; other schedules keep their last
# learning rate. The Trainer needs its training loader for this estimate. So if the Trainer has the loader when optimizers are
# configured, the model has read the estimate (`StepsEstimate`).

_SHORT_RUN_STEPS = 2000  # in longer runs, the filling of the buffer makes no difference, and planning them takes time
_NOTICEABLE = 1.03  # times as many passes


class Attached(Protocol):
    """An object that knows the Trainer of the run, such as a data module."""

    @property
    def trainer(self) -> Any:
        """None while there is none."""


class Reload:
    """Makes the Trainer ask for its training loader again, by ``trainer.reload_dataloaders_every_n_epochs``."""

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
        """Whether the Trainer will ask only because of this object: the user's setting does not ask for a reload."""
        return self._users == 0

    def end(self) -> bool:
        """Restores the user's setting. Returns whether only this object ordered the reload."""
        users, self._users = self._users, None
        if users is None:
            return False
        trainer = self._attached.trainer
        if trainer is not None:
            trainer.reload_dataloaders_every_n_epochs = users
        return not users


class StepsEstimate:
    """Finds out whether the model of a ``fit`` has read ``trainer.estimated_stepping_batches`` to configure its optimizers."""

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
    """Raises an error if a factor cannot be set during training, immediately or later: for the buffer, or for a schedule."""
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
    """Returns a warning about learning rate schedules that would end before the run; empty if there are none.

    The model must have read ``estimated_stepping_batches``.
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
    """Returns a line about the epochs, steps and passes of a run, for its beginning: the factor changes the meaning of an epoch.

    It is empty if the run has no known end, or no steps, or if its epochs have no known length.
    """
    if not isinstance(echoed, EchoLoader):
        others = f"; not echoed: {', '.join(echoed.not_echoed)}" if echoed.not_echoed else ""
        return f"loaders that are echoed: {', '.join(echoed)}{others}"
    factor = 1.0 if echoed.on_demand else echoed.factor  # on demand a batch may have no echo
    if not echoed.has_length:  # where its epochs end is told when its run begins
        return ""
    steps, limit, epochs = len(echoed), trainer.limit_train_batches, trainer.max_epochs
    steps = int(steps * limit) if isinstance(limit, float) else min(steps, limit)
    if epochs is None or epochs < 0 or not steps:
        return ""
    passes = epochs * steps / echoed.pass_batches / factor
    lengths = [f"{count:,} {noun if count == 1 else noun + 's'}" for count, noun in ((epochs, "epoch"), (steps, "step"))]
    unit = "pass" if f"{passes:.3g}" == "1" else "passes"
    if echoed.on_demand:
        return f"{lengths[0]} x {lengths[1]} on demand: at most {passes:.3g} {unit} over the data, less what is echoed"
    line = f"{lengths[0]} x {lengths[1]} = {passes:.3g} {unit} over the data at factor {factor:g}"
    # While the buffer is being filled, more of each batch is fresh. In a short run this makes a difference.
    planned = echoed.passes_in(epochs * steps) if echoed.is_at_start and epochs * steps <= _SHORT_RUN_STEPS else None
    if planned is not None and planned > _NOTICEABLE * passes:
        line += f", {planned:.3g} with the fresh examples of the first batches"
    return line


# ---------------------------------------------------------------------- trainer link
# A loader knows which batches it has delivered. Only the Trainer knows
#
# * whether it ends an epoch earlier than the loader would,
# * whether its epoch continues, if it trains on several loaders,
# * which batch is in use, if it fetches one batch ahead.

Answer = TypeVar("Answer")


class TrainerLink:
    """Connects the loaders of one run with their Trainer, which is asked whenever it is needed."""

    def __init__(self, attached: Attached, owner_name: str) -> None:
        self._attached, self._owner_name = attached, owner_name  # users set the factor on the owner, instead of on the loader

    def connect(self, loader: EchoLoader, trained_on: Any) -> None:
        """Lets a loader ask the Trainer, from here on. ``trained_on`` is the loader itself, or the collection that it is in."""
        loader.factor_owner = self._owner_name
        loader.epoch_goes_on = self._epoch_goes_on if is_collection(trained_on) else None
        loader.trainer_place = None if is_collection(trained_on) else self._place
        is_sized = None not in [sized_len(leaf) for leaf in leaves_of(trained_on).values()]
        loader.batches_used = None if is_sized else self._batches_used

    def set_limit(self, loader: EchoLoader) -> None:
        """Sets a loader's limit: where the Trainer ends an epoch."""
        trainer = self._attached.trainer
        loader.limit_train_batches = None if trainer is None else trainer.limit_train_batches

    def disconnect(self, loaders: Iterable[EchoLoader]) -> None:
        """Ends the connection of loaders and Trainer. Call it while there still is a Trainer."""
        # The loaders may be used elsewhere, and a checkpoint may still be saved. Therefore each loader keeps the last answers
        # until an iteration asks it for another batch.
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
        """Returns the Trainer's place in its epoch, as in a checkpoint of the Trainer; None without a Trainer."""
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
        """Returns the number of batches that the Trainer has used, in the run and in the epoch; None if it fetches none ahead."""
        trainer = self._attached.trainer
        if trainer is None or trainer.num_training_batches != math.inf or takes_iterator(trainer.lightning_module):
            return None
        return BatchesUsed(trainer.fit_loop.total_batch_idx + 1, trainer.fit_loop.batch_idx + 1)


def _until_iterated(loader: EchoLoader, delivered: int, answer: Answer) -> Answer | None:
    """Returns the last Trainer's answer until the loader delivers another batch; then None."""
    return answer if loader.delivered_batches == delivered else None


# ---------------------------------------------------------------------- rank zero
# Lines for the user on rank 0, through the one logger of the package; Lightning's own function uses Lightning's logger.


@rank_zero_only
def rank_zero_info(message: str) -> None:
    """Logs a line, which begins with ``lightning_echo: ``, on rank 0."""
    LOGGER.info("%s", message, stacklevel=3)  # past this function and the decorator: the line names the caller
