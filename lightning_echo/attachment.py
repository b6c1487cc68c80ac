"""`Attachment`: for the time of a ``fit``, echoing stands between Lightning and the user's ``train_dataloader``.

The hook is bound on the user's instance, as ``LightningDataModule.from_datasets`` binds its own, and taken away again:
``trainer.datamodule`` stays the user's object. Which instance Lightning asks cannot be known by public means
(``trainer.datamodule`` may be that of an earlier ``fit``), so that both get the hook; and loaders that were passed to ``fit`` are
seen only once they are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_echo.config import EchoConfig
from lightning_echo.datamodule import EchoDataModule
from lightning_echo.training.one_fit import refuse_second_fit
from lightning_echo.training.other_package import refuse_other_package
from lightning_echo.training.several import echoed_in
from lightning_echo.training.training_echo import TrainingEcho

__all__ = ["Attachment"]

HOOK = "train_dataloader"
NOTHING = object()


class Attachment:
    """Echoes whatever training loader a ``fit`` asks for.

    Sharding follows ``trainer.distributed_sampler_kwargs``. Whether ``Trainer(use_distributed_sampler=False)`` was set cannot be
    read by public means; where ranks shall share their data, use ``EchoDataModule(..., shard=False)``.

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
        self._bound: list[tuple[Any, Any, Any]] = []  # instance, our hook, the attribute that was there

    def attach(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Binds the hook, but where an `EchoDataModule` echoes already; to be called in ``setup`` of a ``fit``.

        Raises:
            MisconfigurationException: There is nothing to bind it on, options are given beside an `EchoDataModule`, or another
                Trainer echoes the same data in a ``fit`` that is under way.
            TypeError: The Trainer is none of the package ``lightning``.
        """
        refuse_other_package("trainer", trainer)
        self.detach()
        self.has_echoed = False
        if isinstance(trainer.datamodule, EchoDataModule):
            if self._takes_echoed:
                return
            raise MisconfigurationException(
                "the data is echoed twice, by an EchoDataModule and by EchoCallback(echo=...): leave echo out of EchoCallback (a "
                "controller then drives the EchoDataModule), or pass the data module inside, its .datamodule"
            )
        asked = [each for each in (trainer.datamodule, pl_module) if is_overridden(HOOK, each)]
        if not asked and not self._takes_echoed:
            raise self._unreachable()
        for instance in asked:
            bound = getattr(vars(instance).get(HOOK), "__self__", None)
            refuse_second_fit(type(instance).__name__, trainer, bound.trainer if isinstance(bound, _Hook) else None)
        self.trainer, self.has_echoed, self.echo.is_asked = trainer, True, False
        self.echo.begin_fit(trainer)
        for instance in asked:
            hook = _Hook(getattr(instance, HOOK), self.echo.train_dataloader, trainer).train_dataloader
            self._bound.append((instance, hook, vars(instance).get(HOOK, NOTHING)))
            vars(instance)[HOOK] = hook

    def detach(self) -> None:
        """Takes the hook away and ends the workers; may be called at any time."""
        for instance, hook, before in self._bound:
            if vars(instance).get(HOOK) == hook:  # else somebody has put another one there meanwhile
                del vars(instance)[HOOK]
                if before is not NOTHING:
                    vars(instance)[HOOK] = before
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
            MisconfigurationException: Another loader is in use: passed to ``fit``, or by a hook that was replaced.
        """
        trainer = self.trainer
        if trainer is None or trainer.overfit_batches > 0:
            return
        used = trainer.train_dataloader
        if self.echo.is_in_use(used):
            self.echo.use(self.echo.loader)  # it may have been passed to fit again
            return
        if echoed_in(used) is None or not self._takes_echoed:
            raise self._unreachable()
        self.echo.adopt(used)

    def _unreachable(self) -> MisconfigurationException:
        factor = max(self.echo.factors.values())
        return MisconfigurationException(
            "EchoCallback cannot echo a training loader that does not come from a train_dataloader: it was passed to fit, or the "
            f"hook was replaced after setup. Use EchoLoader(loader, {factor:g}) there and no echo in EchoCallback, or let the "
            "train_dataloader of the model or of a data module return the loader"
        )


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
