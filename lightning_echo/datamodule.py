"""`EchoDataModule`: the user's data module, with its training loader echoed.

Only ``train_dataloader`` and what belongs to it (factor, state, closing) is defined here; the rest is the user's (`StandIn`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_echo.config import CacheOptions, EchoConfig, Options, ShareOptions, given_options, is_auto, read_loaders
from lightning_echo.data.objects import names_options
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.pipeline.journal import Replay
from lightning_echo.schema import entry, state_of
from lightning_echo.training import package
from lightning_echo.training.hooks import StandIn
from lightning_echo.training.package import MisconfigurationException, in_both, is_overridden
from lightning_echo.training.trainer import is_in_fit
from lightning_echo.training.training_echo import TrainingEcho


@in_both("LightningDataModule")
class PassedLoaders(pl.LightningDataModule):
    """Loaders that are passed without a data module. A Trainer of either package takes them."""


class DecidesFactor:
    """Base class of a callback that sets the factor of an `EchoDataModule` with ``factor="auto"``."""


@names_options
class EchoDataModule(StandIn):
    """Echoes the training loader of a data module; everything else is as if the data module were attached itself.

    ``train_dataloader`` may return a collection of loaders (dict, list, tuple, nested, or a ``CombinedLoader`` with any mode):

    * Each loader is echoed, with its own counts. With ``loaders``, only those that it names are echoed.
    * Lightning combines the echoed loaders as it would combine the plain ones, by their lengths. If the mode restarts a loader
      that has come to its end, this loader continues with its next batches.
    * After a reload, a loader continues where the earlier loader of the same name stopped.
    * A loader that stands in the collection twice is echoed twice.

    Args:
        datamodule: The user's data module.
        factor: Echo factor: the uses per fresh example, a real number >= 1. 1 is the plain loader. ``"demand"``: if no fresh
            example has arrived, the training trains on one from memory instead of waiting. ``"auto"``: the controller of the
            Trainer's `EchoCallback` decides. If the callback has none, the loaders echo on demand where that is possible;
            otherwise a `TargetIdle` with ``max_factor`` decides.
        insertion_point: Where the echo stage stands, see `InsertionPoint`.
        buffer_size: The largest number of live examples per rank, or the memory that they may take, see `EchoConfig`.
        reuse: Which examples are used again, ``"memory"`` or ``"each"``, see `EchoConfig`.
        epoch_length: ``"fixed"``: as many steps as without echoing. ``"full_pass"``: as many fresh examples as one pass holds.
        seed: Seed of the order, the draws and the augmentation, see `EchoConfig`. In a collection, each loader has its own seed,
            made from this one and the loader's name.
        cache: A cache that keeps examples, so that they are read once: its size such as ``"8GiB"``, or see `EchoConfig`.
        share: The name under which this training shares the reading with others on this machine, or see `EchoConfig`.
        reads_in_flight: How many reads may be under way at once on a rank, see `EchoConfig`.
        max_factor: On demand: the most uses per fresh example on average, a real number >= 1. The largest factor of ``"auto"``.
            Default: 8.
        loaders: For a collection, in place of all these options: a mapping from the names of the loaders to echo to their
            options. A name is the key of the loader, or its position: ``"0"``, ``"1"``, and so on. In nested collections, ``/``
            joins the names: ``"labelled/0"``. The other loaders are left as they are.
        shard: Whether ranks may get shares of the data. In a ``fit`` it is divided only where Lightning would divide it, as it
            does not with ``Trainer(use_distributed_sampler=False)``. False: it is never divided here.

    Attributes:
        is_auto: Whether the factor is ``"auto"``.

    Raises:
        TypeError: ``datamodule`` is not a ``LightningDataModule``, or an option has a wrong type. In ``fit``: the Trainer is of
            ``lightning`` and the data module of ``pytorch_lightning``, or the other way around.
        ValueError: An option has an impossible value.
        MisconfigurationException: The data module has no training loader, or one that cannot be echoed. In ``fit``:
            the factor is ``"auto"`` and the Trainer has no `EchoCallback`.

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

    _own = ("_echo", "is_auto")

    def __init__(
        self,
        datamodule: package.AnyDataModule,
        factor: int | float | str | Replay | None = None,
        *,
        insertion_point: InsertionPoint | str = InsertionPoint.auto.value,
        buffer_size: int | float | str | None = None,
        reuse: str = "memory",
        epoch_length: str = "fixed",
        seed: int | None = None,
        cache: CacheOptions = None,
        share: ShareOptions = None,
        reads_in_flight: int | str | None = None,
        max_factor: int | float | None = None,
        loaders: dict[str, EchoConfig] | None = None,
        shard: bool = True,
    ) -> None:
        super().__init__(datamodule)
        if isinstance(datamodule, EchoDataModule):
            raise ValueError("datamodule is an EchoDataModule already: set .factor on it instead of wrapping it again")
        if not is_overridden("train_dataloader", datamodule):
            raise MisconfigurationException(
                f"datamodule {type(datamodule).__name__} has no train_dataloader, so there is nothing to echo. Give it one, or "
                "pass EchoLoader(loader, factor) to fit"
            )
        options = given_options(
            factor=factor,
            insertion_point=insertion_point,
            buffer_size=buffer_size,
            reuse=reuse,
            epoch_length=epoch_length,
            seed=seed,
            cache=cache,
            share=share,
            reads_in_flight=reads_in_flight,
            max_factor=max_factor,
        )
        given: Options
        if loaders is None:
            if factor is None:
                raise TypeError(
                    "factor is missing: EchoDataModule(datamodule, factor=4), or options by name in loaders; factor=1 means "
                    "no echoing, for a cache alone"
                )
            given = EchoConfig(**options)
        elif options:
            raise ValueError("loaders has the options of each loader: leave factor and the other options out")
        else:
            given = read_loaders("loaders", loaders)
        self.is_auto = is_auto("loaders", given)
        hint = "use the data module without EchoDataModule around it"
        self._echo = TrainingEcho(given, datamodule, owner_name="EchoDataModule", hint=hint, shard=shard)

    @classmethod
    def from_dataloaders(
        cls,
        train_dataloaders: Any,
        val_dataloaders: Any = None,
        test_dataloaders: Any = None,
        predict_dataloaders: Any = None,
        *,
        factor: int | float | str | Replay | None = None,
        **echo_options: Any,
    ) -> EchoDataModule:
        """Returns an `EchoDataModule` around loaders. Pass it to ``Trainer.fit`` in place of the loaders.

        Args:
            train_dataloaders: The loader to echo, or a collection of loaders.
            val_dataloaders: Loaders for validation; left as they are.
            test_dataloaders: Loaders for testing; left as they are.
            predict_dataloaders: Loaders for predicting; left as they are.
            factor: Echo factor; must be left out where ``loaders`` is given.
            **echo_options: The other options of `EchoDataModule`.

        Raises:
            TypeError: An option has a wrong type, or neither ``factor`` nor ``loaders`` is given.
            ValueError: An option has an impossible value.
        """
        inner = PassedLoaders()
        given = {"train": train_dataloaders, "val": val_dataloaders, "test": test_dataloaders, "predict": predict_dataloaders}
        for name, loaders in given.items():
            if loaders is not None:
                setattr(inner, f"{name}_dataloader", partial(_same, loaders))
        return cls(inner, factor, **echo_options)

    # ------------------------------------------------------------------ echoing

    @property
    def loader(self) -> Any:
        """The `EchoLoader` in use. For a collection: the collection, with an `EchoLoader` in place of each echoed loader.

        Raises:
            MisconfigurationException: There is no `EchoLoader`: before ``fit``, or with ``Trainer(overfit_batches=...)``.
        """
        if self._echo.loader is None:
            raise MisconfigurationException(
                "no EchoLoader is in use: it is made when the Trainer asks for the training loader, and not at all with "
                "Trainer(overfit_batches=...)"
            )
        return self._echo.loader

    @property
    def factor(self) -> float:
        """The echo factor that was set last. `EchoLoader.factor` describes from which batch on it applies.

        In a collection it is the factor of all loaders that are echoed. If you set it here, all of them get this factor. If they
        have different factors, read them from the loaders in `loader`. With ``epoch_length="fixed"`` you can also set the factor
        of a single loader there.

        With ``epoch_length="full_pass"`` a new factor changes the length of the next epoch that has not begun. Set it in
        ``on_train_epoch_end``. If you set it within an epoch, Lightning also builds the validation loaders again, once.

        Raises:
            MisconfigurationException: The loaders have different factors.
        """
        return self._echo.factor

    @factor.setter
    def factor(self, value: float) -> None:
        self._echo.factor = value

    def set_factor(self, value: float, since: int | None = None) -> None:
        """Sets the factor of all loaders that are echoed.

        Args:
            value: The factor.
            since: Number of the first batch of the run to which the factor applies. None: the first batch not yet planned.
        """
        self._echo.set_factor(value, since)

    @property
    def auto_bound(self) -> float:
        """The largest factor that ``"auto"`` may choose where on demand is impossible."""
        return self._echo.auto_bound

    def leave_auto_to_controller(self, has_controller: bool) -> None:
        """Tells what ``factor="auto"`` means. `EchoCallback` calls it when a ``fit`` is set up.

        Args:
            has_controller: Whether a controller of the user's decides on the factor. If not, loaders echo on demand if they can.
        """
        self._echo.auto_may_be_demand = not has_controller

    def write_journals_in(self, log_directory_of: Callable[[Any], str | None]) -> None:
        """Lets runs on demand be written down in the log directory of their Trainer. `EchoCallback` calls it.

        Args:
            log_directory_of: Returns that directory; None if the Trainer has none.
        """
        self._echo.write_journals_in(log_directory_of)

    def expect_factor(self, value: float) -> None:
        """Warns once if a factor, set during training, would make the run longer than the learning rate schedule expects.

        Args:
            value: The factor. It is not set here.
        """
        self._echo.expect_factor(value)

    def check_one_factor(self) -> None:
        """Makes sure that all loaders have the same factor. A controller needs this, because it sets one factor for all.

        Raises:
            MisconfigurationException: They have different factors.
        """
        self._echo.check_one_factor()

    def train_dataloader(self) -> Any:
        """Returns the user's training loader, echoed. During a ``fit``, the user's own, which the Trainer then echoes.

        So a hook of yours that calls this looks at plain data, as it would without echoing.
        """
        return self._echo.train_dataloader(self._inner.train_dataloader)

    # ------------------------------------------------------------------ hooks of the user's module, extended by echoing

    def setup(self, stage: str) -> None:
        if stage == "fit" and self._inner.trainer is not None:
            trainer = self._inner.trainer
            if self.is_auto and not any(isinstance(callback, DecidesFactor) for callback in trainer.callbacks):
                raise MisconfigurationException(
                    "EchoDataModule(factor='auto') needs an EchoCallback in the Trainer, which measures and decides: "
                    "Trainer(..., callbacks=[EchoCallback()]), or give the factor as a number, or 'demand'"
                )
            self._echo.begin_fit(trainer)
        self._inner.setup(stage)
        self._bind_overridden()  # setup may have put loaders on the instance

    def teardown(self, stage: str) -> None:
        self._echo.end_own_reload()
        try:
            self._inner.teardown(stage)
        finally:
            self._echo.end_fit()

    def on_exception(self, exception: BaseException) -> None:
        if is_in_fit(self.trainer):
            return  # another Trainer could not attach; a Trainer whose own fit fails is no longer in it
        self._echo.end_own_reload()
        try:
            self._inner.on_exception(exception)
        finally:
            self._echo.end_fit()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the user's data module and that of the loader."""
        return {"datamodule": self._inner.state_dict(), "loader": self._echo.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Args:
            state_dict: The saved state.

        Raises:
            EchoStateError: The state is damaged, or the loader cannot continue from it.
        """
        with state_of("EchoDataModule"):
            users, loader = entry(state_dict, "datamodule", dict), entry(state_dict, "loader", dict | None)
        self._inner.load_state_dict(users)
        self._echo.load_state_dict(loader)

    def __str__(self) -> str:
        factors = ", ".join(f"{name} factor {factor:g}".strip() for name, factor in self._echo.factors.items())
        what = repr(self._echo.loader) if isinstance(self._echo.loader, EchoLoader) else factors
        return f"EchoDataModule({type(self._inner).__name__}, {what})"


def _same(loaders: Any) -> Any:
    """With the loaders bound, a loader hook; picklable, unlike a function that is defined in another one."""
    return loaders
