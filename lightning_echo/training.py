"""`TrainingEcho`: the training loader of a run, echoed: what `EchoDataModule` and `EchoCallback` have in common.

It stands between who is asked for the training loader and who made it: it wraps what the user's ``train_dataloader`` returns,
carries factor, place and counts from one loader to the next, and lets the Trainer hear of a new length of epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch.optim.lr_scheduler import OneCycleLR

from lightning_echo.config import EchoConfig
from lightning_echo.echoing import options
from lightning_echo.echoing.loader import EchoLoader
from lightning_echo.transfer import TransferHooks

__all__ = ["Attached", "TrainingEcho", "check_factor"]


class Attached(Protocol):
    """What knows the Trainer of the run."""

    @property
    def trainer(self) -> Any:
        """The Trainer, None while there is none."""


class TrainingEcho:
    """The training loader of a run, echoed.

    Args:
        config: The options of the `EchoLoader`.
        attached: Asked for the Trainer whenever it is needed.
        owner: What the user has in hands: named where something must be set there and not on the loader.
        way_out: What to do where the user's loader is an `EchoLoader` already, to end a sentence; None: it is taken as it is.
        shard: Whether each rank gets its share of the data.

    Attributes:
        is_asked: Whether the Trainer of this ``fit`` asks here for its loader, and so gets one that was wrapped here.

    Raises:
        TypeError: ``shard`` is no truth value.
    """

    def __init__(
        self, config: EchoConfig, attached: Attached, *, owner: str, way_out: str | None = None, shard: bool = True
    ) -> None:
        if not isinstance(shard, bool):
            raise TypeError(f"shard must be True or False, got {shard!r}")
        self._options = config.as_options()
        self._attached, self._owner, self._way_out, self._shard = attached, owner, way_out, shard
        self._factor: float | None = None  # that was set, or was in force, while there was no loader
        self._loader: EchoLoader | None = None
        self._state: dict[str, Any] | None = None  # of a loader that does not exist yet
        self._users_reload: int | None = None  # the Trainer's setting while ours stands in its place
        self._transfer_hooks = TransferHooks()
        self.is_asked = False
        self._said = False

    @property
    def loader(self) -> EchoLoader | None:
        """The `EchoLoader` in use; None before the Trainer has asked, and with ``Trainer(overfit_batches=...)``."""
        return self._loader

    # ------------------------------------------------------------------ factor

    @property
    def factor(self) -> float:
        """The echo factor last set."""
        if self._loader is not None:
            return self._loader.factor
        return float(self._options["factor"] if self._factor is None else self._factor)

    @factor.setter
    def factor(self, value: float) -> None:
        value = options.check_factor(value)
        if self._loader is None:
            self._factor = value
        elif value != self.factor:
            self._change_factor(self._loader, value)

    def _change_factor(self, loader: EchoLoader, value: float) -> None:
        trainer = self._attached.trainer
        changes_length = loader.epoch_length == "full_pass" and trainer is not None and trainer.training
        if changes_length:
            check_factor(trainer, loader, value)
            if self.is_asked:  # then it answers the reload, and says the new length there
                loader.keep_length()
        loader.set_factor(value)
        if changes_length:
            self._order_reload()

    # ------------------------------------------------------------------ loader

    def train_dataloader(self, ask: Callable[[], Any]) -> Any:
        """What the Trainer gets: what the user's ``train_dataloader`` (``ask``) returns, echoed.

        Raises:
            MisconfigurationException: The user's loader cannot be echoed, or is already.
        """
        self.is_asked, only_for_length = True, self.end_own_reload()
        if self._loader is not None:
            self._loader.release_length()
            if only_for_length:
                self._order_reload_after_resuming(self._loader)
                return self._loader
        loader = ask()
        trainer = self._attached.trainer
        if trainer is not None and trainer.overfit_batches > 0:
            self.close()
            self._factor, self._loader = self.factor, None
            rank_zero_info("lightning_echo: Trainer(overfit_batches=...) trains on the same few batches; echoing is off")
            return loader
        if self._loader is None or (loader is not self._loader.loader and loader is not self._loader):
            return self.use(self._as_echo_loader(loader))
        return self.use(self._loader)

    def adopt(self, loader: EchoLoader) -> None:
        """Takes a loader that the Trainer has already, and trains with now.

        Raises:
            MisconfigurationException: The factor to begin with would change the length of the epoch that is about to begin.
        """
        self.is_asked = False
        if loader.epoch_length == "full_pass" and self._loader is None and self._factor not in (None, loader.factor):
            raise MisconfigurationException(
                f"{self._owner} begins with factor {self._factor:g}, but the epoch's length is settled already: with "
                f"epoch_length='full_pass' pass EchoLoader(loader, {self._factor:g}, ...) to fit"
            )
        self.use(loader)

    def use(self, loader: EchoLoader) -> EchoLoader:
        """Makes a loader the one in use; it goes on where the one before stands, or with a state that waits for it."""
        before, self._loader = self._loader, loader
        loader.factor_owner = self._owner
        if before is not None and before is not loader:
            before.close()
            loader.follow(before)
        elif before is None and self._factor is not None:
            loader.set_factor(self._factor)
        trainer = self._attached.trainer
        loader.limit_train_batches = None if trainer is None else trainer.limit_train_batches
        self._transfer_hooks.follow(loader, trainer)
        if self._state is not None:
            loader.load_state_dict(self._state)
            self._state = None
            self._order_reload_after_resuming(loader)
        self._say(loader)
        return loader

    def _as_echo_loader(self, loader: Any) -> EchoLoader:
        if isinstance(loader, EchoLoader):
            if self._way_out is None:
                return loader
            raise MisconfigurationException(
                f"train_dataloader returns an EchoLoader already: return the plain loader, or {self._way_out}"
            )
        if isinstance(loader, dict | list | tuple) or hasattr(loader, "flattened"):
            raise MisconfigurationException(
                f"train_dataloader returns a {type(loader).__name__} of loaders, which cannot be echoed as a whole: wrap each in "
                f"an EchoLoader yourself, without {self._owner}, or return a single loader"
            )
        trainer, ranks = self._attached.trainer, {}
        if trainer is not None or not self._shard:
            shards = trainer.distributed_sampler_kwargs if trainer is not None and self._shard else None
            ranks = {"num_replicas": 1, "rank": 0, **(shards or {})}
        return EchoLoader(loader, **{**self._options, "factor": self.factor}, **ranks)

    def _say(self, loader: EchoLoader) -> None:
        """Says once what the run will amount to."""
        trainer = self._attached.trainer
        if self._said or trainer is None:
            return
        self._said = True
        steps, limit = len(loader), trainer.limit_train_batches
        steps = int(steps * limit) if isinstance(limit, float) else min(steps, limit)
        epochs = trainer.max_epochs
        if epochs is None or epochs < 0 or not steps:
            return
        passes = epochs * steps / loader.pass_batches / self.factor
        rank_zero_info(
            f"lightning_echo: {epochs:,} epochs x {steps:,} steps = {passes:.3g} passes over the data at factor {self.factor:g}"
        )

    def close(self) -> None:
        """Ends workers and thread; a later epoch starts them anew and goes on where this one stopped."""
        self._transfer_hooks.unbind()
        if self._loader is not None:
            self._loader.close()

    # ------------------------------------------------------------------ the length of epochs

    def _order_reload(self) -> None:
        """The only public way to a new length: Lightning asks for the loader again (and gets the same one)."""
        trainer = self._attached.trainer
        if self._users_reload is None and trainer is not None:
            self._users_reload = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1

    def _order_reload_after_resuming(self, loader: EchoLoader) -> None:
        """A resumed epoch keeps its length; where the factor has changed since it began, the next one has another."""
        if loader.keeps_length:
            self._order_reload()

    def end_own_reload(self) -> bool:
        """Gives the Trainer's setting back; whether only we have asked for this reload."""
        reload, self._users_reload = self._users_reload, None
        if reload is None:
            return False
        trainer = self._attached.trainer
        if trainer is not None:
            trainer.reload_dataloaders_every_n_epochs = reload
        return not reload

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any] | None:
        """The loader's state, or the one that waits for a loader; None: neither.

        Saved beside what Lightning saves of the loader itself, since that is forgotten where the model reads
        ``trainer.estimated_stepping_batches``.
        """
        return self._state if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on where a state was taken; None was saved before there was a loader: the start of the run."""
        if self._loader is None:
            self._state = state
        elif state is None:
            self._loader.restart()
        else:
            trainer = self._attached.trainer
            self._loader.limit_train_batches = None if trainer is None else trainer.limit_train_batches
            self._loader.load_state_dict(state)


def check_factor(trainer: pl.Trainer, loader: EchoLoader, factor: float) -> None:
    """Whether a factor could be set during training, now or later.

    Raises:
        ValueError: The loader's buffer cannot hold what it needs.
        MisconfigurationException: It would make epochs longer than a schedule of the learning rate expects.
    """
    loader.check_factor(factor)
    if loader.epoch_length == "fixed" or factor <= loader.factor:
        return
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, OneCycleLR) and config.interval == "step":
            raise MisconfigurationException(
                "the factor cannot be raised during training with epoch_length='full_pass' and OneCycleLR: epochs would become "
                "longer than the schedule's total_steps. Use epoch_length='fixed', whose length never changes, or another "
                "schedule"
            )
