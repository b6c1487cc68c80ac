"""`EchoDataModule`: the user's data module, with its training loader echoed.

Only `train_dataloader` and what belongs to it (factor, state, closing) is defined here. All else is the user's: see `StandIn`.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import OneCycleLR

from lightning_echo.echoing import options
from lightning_echo.echoing.insertion import InsertionPoint
from lightning_echo.echoing.loader import EchoLoader
from lightning_echo.stand_in import StandIn

__all__ = ["EchoDataModule"]


class EchoDataModule(StandIn):
    """Echoes the training loader of a data module; everything else of it is as if it were attached itself.

    Args:
        datamodule: The user's data module.
        factor: Echo factor, a real number >= 1: uses per fresh example. 1 is the plain loader.
        insertion_point: Where the echo stage stands, see `InsertionPoint`.
        buffer_size: Most live examples per rank (batches for ``after_batching``), see `EchoLoader`.
        epoch_length: ``"fixed"`` or ``"full_pass"``, see `EchoLoader`.
        seed: Seed of order, draws and augmentation. Default: that of ``seed_everything``, else drawn once.
        shard: Whether each rank gets its share of the data. False for ``Trainer(use_distributed_sampler=False)``.

    Raises:
        TypeError: ``datamodule`` is no ``LightningDataModule`` of the package ``lightning``, or an option has a wrong type.
        ValueError: An option has an impossible value.
        MisconfigurationException: The data module has no training loader, or one that cannot be echoed.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> datamodule = EchoDataModule.from_dataloaders(DataLoader(range(64), batch_size=8), factor=2)
        >>> datamodule.factor, len(datamodule.train_dataloader())
        (2.0, 8)
    """

    _own = ("_options", "_factor", "_shard", "_loader", "_state", "_users_reload", "_said")

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        factor: float,
        *,
        insertion_point: InsertionPoint | str = "auto",
        buffer_size: int | None = None,
        epoch_length: str = "fixed",
        seed: int | None = None,
        shard: bool = True,
    ) -> None:
        super().__init__(datamodule)
        _check_trains(datamodule)
        self._factor = options.check_factor(factor)
        self._options: dict[str, Any] = {
            "insertion_point": options.check_point(insertion_point),
            "buffer_size": options.check_buffer_size(buffer_size),
            "epoch_length": options.check_epoch_length(epoch_length),
            "seed": options.check_seed(seed),
        }
        if not isinstance(shard, bool):
            raise TypeError(f"shard must be True or False, got {shard!r}")
        self._shard = shard
        self._loader: EchoLoader | None = None
        self._state: dict[str, Any] | None = None  # of a loader that does not exist yet
        self._users_reload: int | None = None  # the Trainer's setting while ours stands in its place
        self._said = False

    @classmethod
    def from_dataloaders(
        cls,
        train_dataloaders: Any,
        val_dataloaders: Any = None,
        test_dataloaders: Any = None,
        predict_dataloaders: Any = None,
        *,
        factor: float,
        **echo_options: Any,
    ) -> EchoDataModule:
        """An echoing data module of loaders, as they would be passed to ``Trainer.fit``.

        Args:
            train_dataloaders: The loader to echo.
            val_dataloaders: Left as they are, like those for testing and predicting.
            test_dataloaders: See there.
            predict_dataloaders: See there.
            factor: Echo factor.
            **echo_options: The other options of `EchoDataModule`.
        """
        inner = pl.LightningDataModule()
        loaders = {
            "train": train_dataloaders,
            "val": val_dataloaders,
            "test": test_dataloaders,
            "predict": predict_dataloaders,
        }
        for name, value in loaders.items():
            if value is not None:
                setattr(inner, f"{name}_dataloader", _Returns(value).loaders)
        return cls(inner, factor, **echo_options)

    # ------------------------------------------------------------------ echoing

    @property
    def loader(self) -> EchoLoader:
        """The `EchoLoader` in use.

        Raises:
            MisconfigurationException: There is none: before ``fit``, or with ``Trainer(overfit_batches=...)``.
        """
        if self._loader is None:
            raise MisconfigurationException(
                "no EchoLoader is in use: it is made when the Trainer asks for the training loader, and not at all with "
                "Trainer(overfit_batches=...)"
            )
        return self._loader

    @property
    def factor(self) -> float:
        """The echo factor last set; see `EchoLoader.factor` for the batch from which it counts.

        With ``epoch_length="full_pass"`` a new factor changes the length of the next epoch that has not begun: set it in
        ``on_train_epoch_end``. Set within an epoch, it also makes Lightning build the validation loaders again, once.
        """
        return self._factor if self._loader is None else self._loader.factor

    @factor.setter
    def factor(self, value: float) -> None:
        value = options.check_factor(value)
        if value == self.factor:
            return
        trainer = self.trainer
        changes_length = self._options["epoch_length"] == "full_pass" and trainer is not None and trainer.training
        if changes_length and value > self.factor:
            _refuse_fixed_schedules(trainer)
        if self._loader is not None:
            if changes_length:
                self._loader.keep_length()
            self._loader.set_factor(value)
        self._factor = value
        if changes_length:
            self._order_reload()

    def train_dataloader(self) -> Any:
        """The user's training loader, echoed. Asked again by a reload of the user's, it is the user's new one."""
        only_for_length = self._end_own_reload()
        if self._loader is not None:
            self._loader.release_length()
            if only_for_length:
                self._order_reload_after_resuming()
                return self._loader
        loader = self._inner.train_dataloader()
        trainer = self.trainer
        if trainer is not None and trainer.overfit_batches > 0:
            self._close()
            self._factor, self._loader = self.factor, None
            rank_zero_info("lightning_echo: Trainer(overfit_batches=...) trains on the same few batches; echoing is off")
            return loader
        if self._loader is None or loader is not self._loader.loader:
            self._loader = self._echo(loader, self._loader)
        self._loader.limit_train_batches = None if trainer is None else trainer.limit_train_batches
        if self._state is not None:
            self._loader.load_state_dict(self._state)
            self._state = None
            self._order_reload_after_resuming()
        self._say()
        return self._loader

    def _echo(self, loader: Any, before: EchoLoader | None) -> EchoLoader:
        if isinstance(loader, EchoLoader):
            raise MisconfigurationException(
                "train_dataloader returns an EchoLoader already: return the plain loader, or use the data module without "
                "EchoDataModule around it"
            )
        if isinstance(loader, dict | list | tuple) or hasattr(loader, "flattened"):
            raise MisconfigurationException(
                f"train_dataloader returns a {type(loader).__name__} of loaders, which cannot be echoed as a whole: wrap each in "
                "an EchoLoader yourself, or return a single loader"
            )
        ranks: dict[str, Any] = {}
        if self.trainer is not None:
            shards = self.trainer.distributed_sampler_kwargs if self._shard else None
            ranks = {"num_replicas": 1, "rank": 0, **(shards or {})}
        elif not self._shard:
            ranks = {"num_replicas": 1, "rank": 0}
        echoed = EchoLoader(loader, self.factor, **self._options, **ranks)
        echoed.factor_owner = "EchoDataModule"
        if before is not None:
            before.close()
            echoed.follow(before)
        return echoed

    def _say(self) -> None:
        """Says once what the run will amount to."""
        trainer, loader = self.trainer, self.loader
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

    def _order_reload(self) -> None:
        """The only public way to a new length: Lightning asks for the loader again (and gets the same one)."""
        trainer = self.trainer
        if self._users_reload is None and trainer is not None:
            self._users_reload = trainer.reload_dataloaders_every_n_epochs
            trainer.reload_dataloaders_every_n_epochs = 1

    def _order_reload_after_resuming(self) -> None:
        """A resumed epoch keeps its length; where the factor has changed since it began, the next one has another."""
        if self.loader.keeps_length:
            self._order_reload()

    def _end_own_reload(self) -> bool:
        """Gives the Trainer's setting back; whether only we have asked for this reload."""
        reload, self._users_reload = self._users_reload, None
        if reload is None:
            return False
        if self.trainer is not None:
            self.trainer.reload_dataloaders_every_n_epochs = reload
        return not reload

    def _close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    # ------------------------------------------------------------------ hooks that echoing has a part in

    def setup(self, stage: str) -> None:
        self._inner.setup(stage)
        self._bind_overridden()  # setup may have put loaders on the instance

    def teardown(self, stage: str) -> None:
        self._end_own_reload()
        try:
            self._inner.teardown(stage)
        finally:
            self._close()

    def on_exception(self, exception: BaseException) -> None:
        self._end_own_reload()
        try:
            self._inner.on_exception(exception)
        finally:
            self._close()

    def state_dict(self) -> dict[str, Any]:
        """The user's state and the loader's, which Lightning forgets where ``estimated_stepping_batches`` is read."""
        loader = self._state if self._loader is None else self._loader.state_dict()
        return {"datamodule": self._inner.state_dict(), "loader": loader}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict["datamodule"])
        if self._loader is None:
            self._state = state_dict["loader"]
        elif state_dict["loader"] is not None:
            self._loader.limit_train_batches = None if self.trainer is None else self.trainer.limit_train_batches
            self._loader.load_state_dict(state_dict["loader"])
        else:  # saved before there was a loader: the start of the run
            self._loader.restart()

    def __str__(self) -> str:
        what = repr(self._loader) if self._loader is not None else f"factor {self._factor:g}"
        return f"EchoDataModule({type(self._inner).__name__}, {what})"


class _Returns:
    """Has a loader hook that returns what it was given; picklable, unlike a function made on the spot."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def loaders(self) -> Any:
        return self._value


def _check_trains(datamodule: pl.LightningDataModule) -> None:
    if isinstance(datamodule, EchoDataModule):
        raise ValueError("datamodule is an EchoDataModule already: set .factor on it instead of wrapping it again")
    if not is_overridden("train_dataloader", datamodule):
        raise MisconfigurationException(
            f"datamodule {type(datamodule).__name__} has no train_dataloader, so there is nothing to echo. Give it one, or pass "
            "EchoLoader(loader, factor) to fit"
        )


def _refuse_fixed_schedules(trainer: pl.Trainer) -> None:
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, OneCycleLR) and config.interval == "step":
            raise MisconfigurationException(
                "the factor cannot be raised during training with epoch_length='full_pass' and OneCycleLR: epochs would become "
                "longer than the schedule's total_steps. Use epoch_length='fixed', whose length never changes, or another "
                "schedule"
            )
