"""`Attachment`: for the time of a ``fit``, echoing stands between Lightning and the training loader.

The loader comes from a ``train_dataloader`` or was passed to ``fit``. So echoing stands in two places, and leaves both again:

* ``train_dataloader`` is bound on the user's instance, as ``LightningDataModule.from_datasets`` binds its own.
  ``trainer.datamodule`` stays the user's object. Which instance Lightning asks cannot be known by public means
  (``trainer.datamodule`` may be that of an earlier ``fit``), so that the data module and the model both get the hook.
* ``process_dataloader`` is bound on the Trainer's strategy. Lightning gives it every loader before it uses it. A loader to train
  on is one that comes in the stage of training: validation loaders come in the stage of validation, or of the sanity check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_echo.config import EchoConfig
from lightning_echo.datamodule import EchoDataModule
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.collection import leaves_of
from lightning_echo.training.one_fit import refuse_second_fit
from lightning_echo.training.other_package import refuse_other_package
from lightning_echo.training.several import echoed_in
from lightning_echo.training.training_echo import TrainingEcho

__all__ = ["Attachment"]

HOOK, PROCESS = "train_dataloader", "process_dataloader"
NOTHING = object()


class Attachment:
    """Echoes whatever training loader a ``fit`` asks for.

    What a ``train_dataloader`` returns is dealt out to the ranks by ``trainer.distributed_sampler_kwargs``. Whether
    ``Trainer(use_distributed_sampler=False)`` was set cannot be read by public means; where ranks shall share their data, use
    ``EchoDataModule(..., shard=False)``. A loader that was passed to ``fit`` has its ``DistributedSampler`` by then, where
    it needs one, and is not dealt out again.

    Args:
        config: The options of echoing, or of the loaders of a collection by name. None: nothing was said about them, so that a
            loader that the user echoes already is taken as it is.

    Attributes:
        echo: The loader in use, its factor and state; they live on from ``fit`` to ``fit``.
        trainer: The Trainer while attached, else None.
        has_echoed: Whether it was attached in the ``fit`` that is under way or was the last one.
    """

    def __init__(self, config: EchoConfig | Mapping[str, EchoConfig] | None) -> None:
        self.trainer: Any = None  # untyped like the attributes that Trainer sets outside __init__
        self.has_echoed = False
        self._takes_echoed = config is None
        way_out = None if config is None else "leave echo out of EchoCallback"
        self.echo = TrainingEcho(config or EchoConfig(), self, owner="EchoCallback", way_out=way_out)
        self._has_names = isinstance(config, Mapping)
        self._bound: list[tuple[Any, str, Any, Any]] = []  # instance, name, our hook, the attribute that was there
        self._is_hook_asked = False
        self._made: Any = None  # the EchoLoader around the loader that was passed to fit
        self._is_users_own = False  # whether an EchoLoader was passed to fit

    def attach(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Binds the hooks, but where an `EchoDataModule` echoes already; to be called in ``setup`` of a ``fit``.

        Raises:
            MisconfigurationException: Options are given beside an `EchoDataModule`, or another Trainer echoes the same data in a
                ``fit`` that is under way.
            TypeError: The Trainer is none of the package ``lightning``.
        """
        refuse_other_package("trainer", trainer)
        self.detach()
        self.has_echoed = self._is_hook_asked = self._is_users_own = False
        self._made = None
        if isinstance(trainer.datamodule, EchoDataModule):
            if self._takes_echoed:
                return
            raise MisconfigurationException(
                "the data is echoed twice, by an EchoDataModule and by EchoCallback: leave echo out of EchoCallback, like factor "
                "and the other options (a controller then drives the EchoDataModule), or pass the data module inside, its "
                ".datamodule"
            )
        asked = [each for each in (trainer.datamodule, pl_module) if is_overridden(HOOK, each)]
        for instance in asked:
            bound = getattr(vars(instance).get(HOOK), "__self__", None)
            refuse_second_fit(type(instance).__name__, trainer, bound.trainer if isinstance(bound, _Hook) else None)
        self.trainer, self.has_echoed, self.echo.is_asked = trainer, True, False
        self.echo.begin_fit(trainer)
        for instance in asked:
            self._bind(instance, HOOK, _Hook(getattr(instance, HOOK), self._answer_hook, trainer).train_dataloader)
        self._bind(trainer.strategy, PROCESS, _Process(trainer.strategy.process_dataloader, self._echo_passed).process_dataloader)

    def _bind(self, instance: Any, name: str, hook: Any) -> None:
        self._bound.append((instance, name, hook, vars(instance).get(name, NOTHING)))
        vars(instance)[name] = hook

    def detach(self) -> None:
        """Takes the hooks away and ends the workers; may be called at any time."""
        for instance, name, hook, before in self._bound:
            if vars(instance).get(name) == hook:  # else somebody has put another one there meanwhile
                del vars(instance)[name]
                if before is not NOTHING:
                    vars(instance)[name] = before
        self._bound.clear()
        if self.trainer is None:
            return
        self.echo.end_own_reload()
        self.echo.close()
        self.echo.let_go()
        self.trainer = None

    def check_in_use(self) -> None:
        """Makes sure that what is trained on is echoed; to be called in ``on_train_start``, the first hook that can know.

        Raises:
            MisconfigurationException: Another loader is in use: one of several that were passed to ``fit``, or one that came
                past the hooks.
        """
        trainer = self.trainer
        if trainer is None or trainer.overfit_batches > 0:
            return
        used = trainer.train_dataloader
        if self.echo.is_in_use(used):
            self.echo.use(self.echo.loader)  # it may have been passed to fit again
            return
        if self._made is not None and self._made in leaves_of(used).values():
            raise self._several()
        if echoed_in(used) is None or not self._takes_echoed:
            raise self._unreachable(used)
        self.echo.adopt(used)

    def _answer_hook(self, ask: Callable[[], Any]) -> Any:
        """What a bound ``train_dataloader`` returns."""
        self._is_hook_asked = True
        return self.echo.train_dataloader(ask)

    def _echo_passed(self, loader: Any) -> Any:
        """What the strategy gets of a loader that the Trainer is about to use: echoed, if it was passed to ``fit`` to train on.

        Raises:
            MisconfigurationException: Several were passed, or one that is echoed already beside options.
        """
        trainer = self.trainer
        if trainer is None or not trainer.training or self._is_hook_asked:
            return loader
        is_echoed = isinstance(loader, EchoLoader)
        if is_echoed and not self._takes_echoed:
            raise MisconfigurationException(
                "an EchoLoader is passed to fit, and EchoCallback has options of its own: pass the plain loader, or leave echo, "
                "factor and the other options out of EchoCallback"
            )
        is_first_or_again = (
            self._made is None or trainer.train_dataloader is self._made or _has_data_of(loader, self._made.loader)
        )
        if self._has_names or not is_first_or_again:
            raise self._several()
        self._is_users_own |= is_echoed
        if self._is_users_own:
            return loader  # an EchoLoader, or one beside it
        given = self.echo.train_dataloader(lambda: loader, is_dealt_out=True)
        self._made = self.echo.loader  # None with Trainer(overfit_batches=...)
        return given

    def _several(self) -> MisconfigurationException:
        factor = max(self.echo.factors.values())
        return MisconfigurationException(
            "EchoCallback cannot echo several loaders that were passed to fit: they come one by one, without their names. Use "
            f"EchoLoader(loader, {factor:g}) for each of them and no echo in EchoCallback, or "
            f"EchoDataModule.from_dataloaders(loaders, factor={factor:g}), or let a train_dataloader return them"
        )

    def _unreachable(self, used: Any) -> MisconfigurationException:
        factor = max(self.echo.factors.values())
        return MisconfigurationException(
            f"EchoCallback does not echo what the Trainer trains on, a {type(used).__name__}: its hook on train_dataloader or on "
            "the strategy's process_dataloader was replaced, or the strategy has put this one there. Use "
            f"EchoLoader(loader, {factor:g}) there and no echo in EchoCallback, or let the train_dataloader of the model or of a "
            "data module return the loader"
        )


def _has_data_of(loader: Any, other: Any) -> bool:
    """Whether a loader is another one, or one that Lightning has made of it for a sampler of its own.

    Lightning asks for the loader again not only where the user wants a reload: after it has looked for a learning rate, too.
    """
    return loader is other or getattr(loader, "dataset", loader) is getattr(other, "dataset", NOTHING)


class _Hook:
    """Stands in the place of an instance's ``train_dataloader``.

    A copy of the instance, and one that is saved whole during training, has a hook that only asks: echoing belongs to this run.
    """

    def __init__(
        self, ask: Callable[[], Any], answer: Callable[[Callable[[], Any]], Any] | None = None, trainer: Any = None
    ) -> None:
        self._ask, self._answer = ask, answer
        self.trainer = trainer  # whose run it is

    def train_dataloader(self) -> Any:
        return self._ask() if self._answer is None else self._answer(self._ask)

    def __reduce__(self) -> tuple[type[_Hook], tuple[Callable[[], Any]]]:
        return _Hook, (self._ask,)


class _Process:
    """Stands in the place of a strategy's ``process_dataloader``; a copy of the strategy has a hook that changes nothing."""

    def __init__(self, process: Callable[[Any], Any], echo: Callable[[Any], Any] | None = None) -> None:
        self._process, self._echo = process, echo

    def process_dataloader(self, dataloader: Any) -> Any:
        return self._process(dataloader if self._echo is None else self._echo(dataloader))

    def __reduce__(self) -> tuple[type[_Process], tuple[Callable[[Any], Any]]]:
        return _Process, (self._process,)
