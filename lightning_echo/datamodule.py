"""`EchoDataModule`: the user's data module, with its training loader echoed.

Only `train_dataloader` and what belongs to it (factor, state, closing) is defined here. All else is the user's: see `StandIn`.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_echo.config import EchoConfig, Options, given_options, read_loaders, without_auto
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.refusals import is_in_fit
from lightning_echo.training.stand_in import StandIn
from lightning_echo.training.training_echo import TrainingEcho

__all__ = ["DecidesFactor", "EchoDataModule"]


class DecidesFactor:
    """A callback that sets the factor of an `EchoDataModule` with ``factor="auto"``."""


class EchoDataModule(StandIn):
    """Echoes the training loader of a data module; everything else of it is as if it were attached itself.

    Where ``train_dataloader`` returns a collection of loaders (dict, list, tuple, nested, or a ``CombinedLoader`` with any mode),
    each is echoed, with its own counts, or those that ``loaders`` names. Lightning combines them as it would the plain ones, by
    their lengths; where a mode restarts a loader that is through, its passes over the data go on. A reload of the user's goes on
    with loaders of the same names. A loader that stands in the collection twice is echoed twice.

    Args:
        datamodule: The user's data module.
        factor: Echo factor, a real number >= 1: uses per fresh example. 1 is the plain loader. ``"auto"``: the `EchoCallback` of
            the Trainer decides, by its controller, or by a `TargetIdle` with its defaults if it has none.
        insertion_point: Where the echo stage stands, see `InsertionPoint`.
        buffer_size: Most live examples per rank (batches for ``after_batching`` and ``after_transfer``), see `EchoLoader`.
        epoch_length: ``"fixed"`` or ``"full_pass"``, see `EchoLoader`.
        seed: Seed of order, draws and augmentation. Default: that of ``seed_everything``, else drawn once. Of a collection each
            loader's own is made of it and the loader's name.
        loaders: In place of all these: the options of those loaders of a collection that are echoed, by name. Names are keys, or
            positions from ``"0"`` on, joined by ``/`` where collections are nested. Loaders not named are left as they are.
        shard: Whether each rank gets its share of the data. False for ``Trainer(use_distributed_sampler=False)``.

    Raises:
        TypeError: ``datamodule`` is no ``LightningDataModule`` of the package ``lightning``, or an option has a wrong type.
        ValueError: An option has an impossible value.
        MisconfigurationException: The data module has no training loader, or one that cannot be echoed. In ``fit``: the factor is
            ``"auto"`` and the Trainer has no `EchoCallback`.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> datamodule = EchoDataModule.from_dataloaders(DataLoader(range(64), batch_size=8), factor=2)
        >>> datamodule.factor, len(datamodule.train_dataloader())
        (2.0, 8)
        >>> loaders = {"labelled": DataLoader(range(64), batch_size=8), "unlabelled": DataLoader(range(640), batch_size=8)}
        >>> datamodule = EchoDataModule.from_dataloaders(loaders, loaders={"unlabelled": EchoConfig(factor=2)})
        >>> combined = datamodule.train_dataloader()
        >>> type(combined["labelled"]).__name__, combined["unlabelled"].factor
        ('DataLoader', 2.0)
    """

    _own = ("_echo", "_is_auto")

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        factor: int | float | str | None = None,
        *,
        insertion_point: InsertionPoint | str = InsertionPoint.auto.value,
        buffer_size: int | None = None,
        epoch_length: str = "fixed",
        seed: int | None = None,
        loaders: dict[str, EchoConfig] | None = None,
        shard: bool = True,
    ) -> None:
        super().__init__(datamodule)
        _check_trains(datamodule)
        options = given_options(
            factor=factor, insertion_point=insertion_point, buffer_size=buffer_size, epoch_length=epoch_length, seed=seed
        )
        given: Options
        if loaders is None:
            if factor is None:
                raise TypeError("factor is missing: EchoDataModule(datamodule, factor=4), or options by name in loaders")
            given = EchoConfig(**options)
        elif options:
            raise ValueError("loaders has the options of each loader: leave factor and the other options out beside it")
        else:
            given = read_loaders("loaders", loaders)
        config, self._is_auto = without_auto("loaders", given)
        way_out = "use the data module without EchoDataModule around it"
        self._echo = TrainingEcho(config, datamodule, owner_name="EchoDataModule", way_out=way_out, shard=shard)

    @classmethod
    def from_dataloaders(
        cls,
        train_dataloaders: Any,
        val_dataloaders: Any = None,
        test_dataloaders: Any = None,
        predict_dataloaders: Any = None,
        *,
        factor: int | float | str | None = None,
        **echo_options: Any,
    ) -> EchoDataModule:
        """An echoing data module of loaders, as they would be passed to ``Trainer.fit``.

        Args:
            train_dataloaders: The loader to echo, or a collection of them.
            val_dataloaders: Left as they are, like those for testing and predicting.
            test_dataloaders: See there.
            predict_dataloaders: See there.
            factor: Echo factor; to be left out with ``loaders``.
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
    def loader(self) -> Any:
        """The `EchoLoader` in use; of a collection the same collection, with `EchoLoader`s for the loaders that are echoed.

        Raises:
            MisconfigurationException: There is none: before ``fit``, or with ``Trainer(overfit_batches=...)``.
        """
        if self._echo.loader is None:
            raise MisconfigurationException(
                "no EchoLoader is in use: it is made when the Trainer asks for the training loader, and not at all with "
                "Trainer(overfit_batches=...)"
            )
        return self._echo.loader

    @property
    def is_auto(self) -> bool:
        """Whether the Trainer's `EchoCallback` is to decide on the factor."""
        return self._is_auto

    @property
    def factor(self) -> float:
        """The echo factor last set; see `EchoLoader.factor` for the batch from which it counts.

        Of a collection it is that of all loaders that are echoed: set here, all of them have it from then on, whatever they had
        before. Where they have factors of their own, ask ``loader``, and set single ones there (with ``epoch_length="fixed"``).

        With ``epoch_length="full_pass"`` a new factor changes the length of the next epoch that has not begun: set it in
        ``on_train_epoch_end``. Set within an epoch, it also makes Lightning build the validation loaders again, once.

        Raises:
            MisconfigurationException: There are several loaders with factors of their own.
        """
        return self._echo.factor

    @factor.setter
    def factor(self, value: float) -> None:
        self._echo.factor = value

    def expect_factor(self, value: float) -> None:
        """Warns once if a factor, set during training, would make the run longer than a schedule of the learning rate knows."""
        self._echo.expect_factor(value)

    def check_one_factor(self) -> None:
        """Makes sure that all loaders have the same factor, as they must before a controller sets one for all.

        Raises:
            MisconfigurationException: They have different factors.
        """
        self._echo.check_one_factor()

    def train_dataloader(self) -> Any:
        """The user's training loader, echoed. Asked again by a reload of the user's, it is the user's new one."""
        return self._echo.train_dataloader(self._inner.train_dataloader)

    # ------------------------------------------------------------------ hooks that echoing has a part in

    def setup(self, stage: str) -> None:
        if stage == "fit" and self._inner.trainer is not None:
            self._check_decided(self._inner.trainer)
            self._echo.begin_fit(self._inner.trainer)
        self._inner.setup(stage)
        self._bind_overridden()  # setup may have put loaders on the instance

    def _check_decided(self, trainer: Any) -> None:
        if self._is_auto and not any(isinstance(callback, DecidesFactor) for callback in trainer.callbacks):
            raise MisconfigurationException(
                "EchoDataModule(factor='auto') needs an EchoCallback in the Trainer, which measures and decides: "
                "Trainer(..., callbacks=[EchoCallback()]), or give the factor as a number"
            )

    def teardown(self, stage: str) -> None:
        self._echo.end_own_reload()
        try:
            self._inner.teardown(stage)
        finally:
            self._echo.close()

    def on_exception(self, exception: BaseException) -> None:
        if is_in_fit(self.trainer):
            return  # another Trainer has failed, to attach: one that fails itself is no longer in its fit
        self._echo.end_own_reload()
        try:
            self._inner.on_exception(exception)
        finally:
            self._echo.close()

    def state_dict(self) -> dict[str, Any]:
        """The user's state and the loader's."""
        return {"datamodule": self._inner.state_dict(), "loader": self._echo.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict["datamodule"])
        self._echo.load_state_dict(state_dict["loader"])

    def __str__(self) -> str:
        factors = ", ".join(f"{name} factor {factor:g}".strip() for name, factor in self._echo.factors.items())
        what = repr(self._echo.loader) if isinstance(self._echo.loader, EchoLoader) else factors
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
