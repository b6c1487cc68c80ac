"""`Attachment`: echoes the training loader of a ``fit``, for `EchoCallback`, and hands on the states of other kinds of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_echo.config import AUTO_FACTOR, EchoConfig
from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.state import is_state
from lightning_echo.schema import entry, state_of
from lightning_echo.training.hooks import BoundHooks
from lightning_echo.training.loaders import echoed_in, leaves_of
from lightning_echo.training.package import MisconfigurationException, is_overridden
from lightning_echo.training.trainer import refuse_second_fit
from lightning_echo.training.training_echo import TrainingEcho, is_same_data

# ---------------------------------------------------------------------- checkpoints
# Lightning keeps the states of training loaders in the checkpoint of its loop, and the state of a data module under the name of
# its class. It raises an error if there is a loader state but no stateful loader. It is silent if there is no state for a data
# module.

_ECHOED = EchoDataModule.__qualname__


def adapt_checkpoint(
    checkpoint: dict[str, Any], datamodule: pl.LightningDataModule | None, *, echoed_before: bool, echoes: bool
) -> None:
    """Makes a checkpoint, as Lightning has loaded it, fit the run that resumes from it. It is changed in place.

    ``echoed_before`` says whether `EchoCallback` or `EchoDataModule` echoed the run that was saved (an `EchoLoader` of the user's
    does not count), and ``echoes`` whether one of them echoes the run that resumes, which has this data module.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states = loop.get("combined_loader", [])  # of all stateful loaders of a collection, echoed or not
    are_ours = [is_state(state) for state in states]
    fit = any(are_ours) if echoed_before else all(are_ours)
    if (echoes and not fit) or (echoed_before and not echoes):
        others = [] if echoes else [state for state in states if not is_state(state)]
        loop.pop("combined_loader", None)
        if others:
            loop["combined_loader"] = others
    # The user's data module gets its state, if the checkpoint has it where the other kind of run saves it.
    if isinstance(datamodule, EchoDataModule):
        name = type(datamodule.datamodule).__qualname__
        if _ECHOED not in checkpoint and name in checkpoint:
            datamodule.datamodule.load_state_dict(checkpoint[name])
    elif datamodule is not None and type(datamodule).__qualname__ not in checkpoint and _ECHOED in checkpoint:
        with state_of(_ECHOED):
            users = entry(checkpoint[_ECHOED], "datamodule", dict)
        datamodule.load_state_dict(users)


# ---------------------------------------------------------------------- attachment
# The training loader comes from a ``train_dataloader``, or was passed to ``fit``. Therefore there are two hooks during the
# ``fit``:
#
# * ``train_dataloader`` is bound on the user's instance, as ``LightningDataModule.from_datasets`` binds its own.
#   ``trainer.datamodule`` stays the user's object. The public API does not reveal which instance Lightning will ask
#   (``trainer.datamodule`` may be that of an earlier ``fit``), so both the data module and the model get the hook. The user may
#   call it, too, so it returns the user's loaders, and remembers them.
# * ``process_dataloader`` is bound on the Trainer's strategy, which gets every loader before Lightning uses it. Only loaders that
#   the Trainer itself has asked for come there, and they are echoed there. The training loader comes in the stage of training;
#   validation loaders come in the stage of validation, or of the sanity check.

_ASK = "train_dataloader"


class Attachment:
    """Echoes whatever training loader a ``fit`` asks for. Without options, a loader that the user already echoes stays as it is.

    The data of a loader from ``train_dataloader`` is divided among the ranks by ``trainer.distributed_sampler_kwargs`` if
    Lightning has put its ``DistributedSampler`` there. It does not with ``Trainer(use_distributed_sampler=False)``. A loader that
    was passed to ``fit`` already has its ``DistributedSampler``, if it needs one. Its data is not divided again.

    Attributes:
        echo: The loader in use, its factor and state. They are kept from ``fit`` to ``fit``.
        trainer: The Trainer while attached, otherwise None.
        has_echoed: Whether it was attached in the present ``fit``, or in the last one.
    """

    def __init__(self, config: EchoConfig | Mapping[str, EchoConfig] | None, *, is_auto: bool = False) -> None:
        self.trainer: Any = None  # untyped like the attributes that Trainer sets outside __init__
        self.has_echoed = False
        self._takes_echoed = config is None
        hint = None if config is None else "leave echo out of EchoCallback"
        default = EchoConfig(AUTO_FACTOR) if is_auto else EchoConfig()
        self.echo = TrainingEcho(config or default, self, owner_name="EchoCallback", hint=hint)
        self._has_names = isinstance(config, Mapping)
        self._hooks = BoundHooks()
        self._echoed_passed: EchoLoader | None = None  # made around the loader that was passed to fit
        self._is_echo_loader_passed = False

    def attach(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Binds the hooks, unless an `EchoDataModule` already echoes. Call it in ``setup`` of a ``fit``."""
        self.detach()
        self.has_echoed = self._is_echo_loader_passed = False
        self._echoed_passed = None
        if isinstance(trainer.datamodule, EchoDataModule):
            if self._takes_echoed:
                return
            raise MisconfigurationException(
                "the data is echoed twice, by an EchoDataModule and by EchoCallback: leave echo out of EchoCallback, like factor "
                "and the other options (a controller then drives the EchoDataModule), or pass the data module inside, its "
                ".datamodule"
            )
        owners = [each for each in (trainer.datamodule, pl_module) if is_overridden(_ASK, each)]
        for instance in owners:
            bound = getattr(vars(instance).get(_ASK), "__self__", None)
            refuse_second_fit(type(instance).__name__, trainer, bound.trainer if isinstance(bound, AskHook) else None)
        self.trainer, self.has_echoed, self.echo.gives_loader = trainer, True, False
        self.echo.begin_fit(trainer, self._echo_passed)
        for instance in owners:
            hook = AskHook(getattr(instance, _ASK), self.echo.train_dataloader, trainer)
            self._hooks.bind(instance, _ASK, hook.train_dataloader)

    def detach(self) -> None:
        """Removes the hooks and ends the workers. You may call it at any time."""
        self._hooks.unbind()
        if self.trainer is None:
            return
        self.echo.end_fit()
        self.echo.disconnect()
        self.trainer = None

    def check_in_use(self) -> None:
        """Raises a MisconfigurationException if the Trainer does not train on an echoed loader.

        Such a loader is one of several that were passed to ``fit``, or did not pass through the hooks. Call this in
        ``on_train_start``, the first hook that can know it.
        """
        trainer = self.trainer
        if trainer is None or trainer.overfit_batches > 0:
            return
        used = trainer.train_dataloader
        if self.echo.is_in_use(used):
            self.echo.use(self.echo.loader)  # it may have been passed to fit again
            return
        if self._echoed_passed is not None and self._echoed_passed in leaves_of(used).values():
            raise self._several()
        if echoed_in(used) is None or not self._takes_echoed:
            raise MisconfigurationException(
                f"EchoCallback does not echo the loader that the Trainer trains on, a {type(used).__name__}: its hook on "
                "train_dataloader or on the strategy's process_dataloader was replaced, or the strategy has put this loader "
                f"there. Use EchoLoader(loader, {self.echo.factor_to_paste}) there and no echo in EchoCallback, or let "
                "the train_dataloader of the model or of a data module return the loader"
            )
        self.echo.adopt(used)

    def _echo_passed(self, loader: Any) -> Any:
        """Returns the loader, echoed if it was passed to ``fit`` for training."""
        trainer = self.trainer
        if trainer is None:
            return loader
        is_echoed = isinstance(loader, EchoLoader)
        if is_echoed and not self._takes_echoed:
            raise MisconfigurationException(
                "an EchoLoader is passed to fit, and EchoCallback has options of its own: pass the plain loader, or leave echo, "
                "factor and the other options out of EchoCallback"
            )
        earlier = self._echoed_passed
        is_first_or_again = earlier is None or trainer.train_dataloader is earlier or is_same_data(loader, earlier.loader)
        if self._has_names or not is_first_or_again:
            raise self._several()
        self._is_echo_loader_passed |= is_echoed
        if self._is_echo_loader_passed:
            return loader  # an EchoLoader, or a plain loader next to one
        given = self.echo.take_passed(loader)
        self._echoed_passed = self.echo.loader  # None with Trainer(overfit_batches=...)
        return given

    def _several(self) -> MisconfigurationException:
        factor = self.echo.factor_to_paste
        return MisconfigurationException(
            "EchoCallback cannot echo several loaders that were passed to fit: they come one by one, without their names. Use "
            f"EchoLoader(loader, {factor}) for each of them and no echo in EchoCallback, or "
            f"EchoDataModule.from_dataloaders(loaders, factor={factor}), or let a train_dataloader return them"
        )


class AskHook:
    """Stands in place of an instance's ``train_dataloader``: ``answer`` gets the user's hook, and returns the result.

    Echoing belongs only to this run. Therefore the hook of a copy of the instance, even one saved whole during training, has no
    ``answer``, and only calls the user's hook.
    """

    def __init__(
        self, ask_user: Callable[[], Any], answer: Callable[[Callable[[], Any]], Any] | None = None, trainer: Any = None
    ) -> None:
        self._ask_user, self._answer = ask_user, answer
        self.trainer = trainer

    def train_dataloader(self) -> Any:
        return self._ask_user() if self._answer is None else self._answer(self._ask_user)

    def __reduce__(self) -> tuple[type[AskHook], tuple[Callable[[], Any]]]:
        return AskHook, (self._ask_user,)
