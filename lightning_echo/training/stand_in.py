"""`StandIn`: a data module that takes the place of the user's and behaves like it.

* A hook that the user's module overrides is bound on this instance. All other hooks are left alone, because Lightning compares
  code to find out what is overridden.
* Every other attribute is read from the user's module and set on it.
* A subclass keeps what it defines itself.

A user may put a hook on an instance later (``module.val_dataloader = ...``). Therefore hooks are bound anew whenever a Trainer is
attached.
"""

from __future__ import annotations

from inspect import getattr_static
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.parsing import save_hyperparameters

from lightning_echo.training.refusals import refuse_other_package, refuse_second_fit

__all__ = ["StandIn"]


class StandIn(pl.LightningDataModule):
    """Stands for the user's data module. All attributes are the user's, except those that a subclass defines.

    An attribute that is set on an instance is set on the user's module. Properties of the subclass and names in its ``_own`` are
    the exceptions.

    Args:
        datamodule: The user's data module.

    Raises:
        TypeError: ``datamodule``, or a Trainer that is attached, does not come from the package ``lightning``.
        MisconfigurationException: A Trainer is attached while another Trainer's ``fit`` uses the data module.
    """

    _own: tuple[str, ...] = ()

    def __init__(self, datamodule: pl.LightningDataModule) -> None:
        if not isinstance(datamodule, pl.LightningDataModule):
            refuse_other_package("datamodule", datamodule)
            raise TypeError(
                f"datamodule must be a LightningDataModule, got {type(datamodule).__name__}; for loaders use "
                f"{type(self).__name__}.from_dataloaders(train_dataloaders, ..., factor=...) or EchoLoader(loader, factor)"
            )
        # The base class is not initialised: it would overwrite its attributes, which are the user's here (see __setattr__).
        self.__dict__["_inner"] = datamodule
        _set_own_hparams(datamodule)
        self._bind_overridden()

    @property
    def datamodule(self) -> pl.LightningDataModule:
        """The user's data module."""
        inner: pl.LightningDataModule = self._inner
        return inner

    @property
    def trainer(self) -> Any:  # the Trainer, None while detached; untyped like the attributes that Trainer sets outside __init__
        return self._inner.trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        refuse_other_package("trainer", trainer)
        refuse_second_fit(f"the data module {type(self._inner).__name__}", trainer, self._inner.trainer)
        self._inner.trainer = trainer
        self._bind_overridden()

    def _bind_overridden(self) -> None:
        """Binds on this instance what the user's module overrides of Lightning's base class."""
        inner, base = self._inner, pl.LightningDataModule
        for name in dir(base):
            if name.startswith("__") or self._defines(name):
                continue
            if name in vars(inner) or getattr_static(type(inner), name) is not getattr_static(base, name):
                value = getattr(inner, name, None)
                if callable(value) or not isinstance(getattr(base, name), property):
                    self.__dict__[name] = value

    @classmethod
    def _defines(cls, name: str) -> bool:
        """Returns whether this class, or a subclass, defines a name itself."""
        return any(name in vars(owner) for owner in cls.__mro__ if issubclass(owner, StandIn))

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name == "_inner" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not set yet: the object is being built or unpickled
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or (self._defines(name) and isinstance(getattr(type(self), name), property)):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)
            if hasattr(pl.LightningDataModule, name):
                self._bind_overridden()


def _set_own_hparams(datamodule: pl.LightningDataModule) -> None:
    """Gives the user's module the hyperparameters that LightningCLI would record for it without a stand-in.

    If LightningCLI builds both data modules, ``save_hyperparameters`` in the user's constructor records the configuration of the
    outer one. If the user's constructor reads ``hparams``, it still sees this configuration.
    """
    outer = dict(datamodule.hparams)
    node = outer.get("datamodule")
    if "_instantiator" not in outer or not isinstance(node, dict) or "class_path" not in node:
        return
    if node["class_path"].rpartition(".")[2] != type(datamodule).__name__:
        return
    own = {"_class_path": node["class_path"], **node.get("init_args", {}), **node.get("dict_kwargs", {})}
    datamodule.hparams.clear()
    save_hyperparameters(datamodule, given_hparams={**own, "_instantiator": outer["_instantiator"]})
