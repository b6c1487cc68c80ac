"""Hooks on the user's instances during a ``fit``: bound, removed, and a data module that stands in for the user's."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static, isfunction
from types import MethodType
from typing import Any, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import save_hyperparameters
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_echo.data.objects import in_words
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.pipeline.batches import BatchUse
from lightning_echo.training.package import MisconfigurationException, Package, classes, in_both, join, package_of
from lightning_echo.training.trainer import rank_zero_info, refuse_second_fit

# ---------------------------------------------------------------------- hooks
# `BoundHooks` puts hooks on the user's instances during a ``fit``, and leaves the instances as they were.

_NOTHING = object()


class BoundHooks:
    """Binds hooks on instances in place of their own attributes, and later gives these back."""

    def __init__(self) -> None:
        # Instance, name, hook, and the attribute of that name that the instance itself had (`_NOTHING`: only its class had one).
        self._bound: list[tuple[Any, str, Any, Any]] = []

    @property
    def are_bound(self) -> bool:
        return bool(self._bound)

    def bind(self, instance: Any, name: str, hook: Any) -> None:
        self._bound.append((instance, name, hook, vars(instance).get(name, _NOTHING)))
        vars(instance)[name] = hook

    def unbind(self) -> None:
        """Removes all hooks. You may call it at any time. If other code has set the attribute in the meantime, it stays."""
        ours = {id(hook) for _, _, hook, _ in self._bound}  # on every instance: a stand-in copies the hooks of its data module
        for instance, name, _, before in self._bound:
            if id(vars(instance).get(name)) not in ours:
                continue
            del vars(instance)[name]
            if before is not _NOTHING:
                vars(instance)[name] = before
        self._bound.clear()


class ProcessHook:
    """Stands in place of a strategy's ``process_dataloader``, to process the ``answer``. That of a copy changes nothing."""

    def __init__(self, process: Callable[[Any], Any], answer: Callable[[Any], Any] | None = None) -> None:
        self._process, self._answer = process, answer

    def process_dataloader(self, dataloader: Any) -> Any:
        return self._process(dataloader if self._answer is None else self._answer(dataloader))

    def __reduce__(self) -> tuple[type[ProcessHook], tuple[Callable[[Any], Any]]]:
        return ProcessHook, (self._process,)


# ---------------------------------------------------------------------- transfer
# `TransferHooks`: during a ``fit``, puts the batches of ``after_transfer`` on the device once, and reuses them there.
#
# With such a loader Lightning gets a `BatchUse` in place of each batch. Two hooks turn it into a batch on the device. They are
# bound on the user's instances, in place of the instances' own hooks. The third hook stays as it is:
#
# ============================ ================================================================================================
# ``on_before_batch_transfer`` ours: at the first use of a batch, the user's hook prepares the batch on the host
# ``transfer_batch_to_device`` ours: at the first use, and after an in-place edit, the user's hook moves the batch to the device;
#                              each use gets an alias of it
# ``on_after_batch_transfer``  the user's own: gets a batch like any other, at every use
# ============================ ================================================================================================
#
# Lightning compares code to decide which instance it asks, the model or the data module, and looks through ``__wrapped__``.
# Therefore it decides and warns as it would without these hooks. All other batches, such as those of validation, go directly to
# the user's hook.

_PREPARE, _TRANSFER = "on_before_batch_transfer", "transfer_batch_to_device"
_UsersHook: TypeAlias = Callable[[Any], Any]  # of a host batch; the other arguments of Lightning's call are filled in
_Answer: TypeAlias = Callable[[BatchUse, _UsersHook], Any]


class TransferHooks:
    def __init__(self) -> None:
        self._loader: EchoLoader | None = None
        self._hooks = BoundHooks()
        self._is_memory_logged = self._is_edit_warned = False

    def bind(self, loader: EchoLoader, trainer: Any) -> None:
        """Binds the hooks if a Trainer trains on this loader and the loader needs them; otherwise removes them."""
        if not loader.insertion_point.on_device or trainer is None or not trainer.training:
            self.unbind()
            return
        _check_asks_hooks(trainer, loader.insertion_point)
        if self._loader is not None:
            self._loader.is_transferred = False
        self._loader, loader.is_transferred = loader, True
        if self._hooks.are_bound:
            return
        # Lightning may ask the hooks of each of these; a stand-in copies the hooks of the user's module whenever it is set up.
        model, datamodule = trainer.lightning_module, trainer.datamodule
        inner = datamodule.datamodule if isinstance(datamodule, StandIn) else None
        for instance in (each for each in (model, inner, datamodule) if each is not None):
            for name, answer in ((_PREPARE, self._prepare), (_TRANSFER, self._transfer)):
                self._hooks.bind(instance, name, _TransferHook(getattr(instance, name), answer))

    def unbind(self) -> None:
        """Ends what `bind` has begun. You may call it at any time."""
        self._hooks.unbind()
        self._is_memory_logged = self._is_edit_warned = False
        if self._loader is not None:
            self._loader.is_transferred = False
            self._loader = None

    def _prepare(self, use: BatchUse, users_hook: _UsersHook) -> BatchUse:
        use.live.prepare(use.host, users_hook)
        return use

    def _transfer(self, use: BatchUse, users_hook: _UsersHook) -> Any:
        if use.live.let_go_if_edited() and not self._is_edit_warned:
            self._is_edit_warned = True
            rank_zero_warn(
                "lightning_echo: a batch was edited in place on the device. Its next use gets the unedited batch, by a fresh "
                "transfer from the host. If each use edits its batch, each use is transferred. Do not edit batches in place "
                f"(x = x * 2 instead of x *= 2), or use {earliest(Needs.batches).option}, which hands out copies"
            )
        batch = use.live.transfer(users_hook, is_last=use.is_last)
        if not self._is_memory_logged and self._loader is not None and use.live.nbytes:
            self._is_memory_logged = True
            each, count = use.live.nbytes / 2**20, self._loader.buffer_size
            rank_zero_info(
                f"lightning_echo: a live batch takes {each:.3g} MiB of device memory, buffer_size={count:,} of them "
                f"{each * count:.3g} MiB, and about as much on the host"
            )
        return batch


class _TransferHook:
    """Stands in place of an instance's hook. A copy of the instance, even one saved whole during training, has its own hook."""

    def __init__(self, users_hook: Callable[..., Any], answer: _Answer) -> None:
        self.__wrapped__ = getattr(users_hook, "__wrapped__", users_hook)  # Lightning looks through one wrapper only
        self._users_hook, self._answer = users_hook, answer

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if type(batch) is not BatchUse:
            return self._users_hook(batch, *args, **kwargs)
        return self._answer(batch, lambda host: self._users_hook(host, *args, **kwargs))

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Callable[..., Any]]]:
        return _itself, (self._users_hook,)


def _itself(value: Any) -> Any:
    """A copy of a `_TransferHook` is made with this function."""
    return value


def _check_asks_hooks(trainer: Any, point: InsertionPoint) -> None:
    """Refuses a Trainer that transfers batches without the hooks, or whose model does."""
    instead = f"use {earliest(Needs.batches).option}, where each use is transferred"
    strategy, base = type(trainer.strategy), package_of(trainer.strategy).get("strategies.Strategy")
    for name in ("batch_to_device", "process_dataloader"):
        if getattr(strategy, name) is not getattr(base, name):
            raise MisconfigurationException(
                f"{point.option} is impossible with {strategy.__name__}, which transfers batches in its own {name}: {instead}"
            )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"{point.option} is impossible with training_step(self, dataloader_iter), which transfers its "
            f"batches itself: take batch and batch_idx instead, or {instead}"
        )


# ---------------------------------------------------------------------- stand in
# `StandIn`: a data module that takes the place of the user's and behaves like it.
#
# * A hook that the user's module overrides is bound on this instance. In place of all others Lightning's own are bound, because
#   Lightning compares code to find out what is overridden.
# * Every other attribute is read from the user's module and set on it.
# * A subclass keeps its own definitions. If one of them calls ``super()``, it comes to the user's module.
#
# A user may put a hook on an instance later (``module.val_dataloader = ...``), so hooks are newly bound whenever a Trainer is
# attached.


@in_both("LightningDataModule")
class StandIn(pl.LightningDataModule):
    """Stands for the user's data module. All attributes are the user's, except those that a subclass defines.

    Setting an attribute sets it on the user's module, except for properties of the subclass and names in its ``_own``.
    """

    _own: tuple[str, ...] = ()

    def __init__(self, datamodule: pl.LightningDataModule) -> None:
        join()
        if not isinstance(datamodule, classes("LightningDataModule")):
            got = in_words(datamodule) if isinstance(datamodule, type) else type(datamodule).__name__
            raise TypeError(
                f"datamodule must be a LightningDataModule, got {got}; for loaders use "
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
        join()
        if trainer is not None:
            package_of(trainer).check_same(self._inner)
        refuse_second_fit(f"the data module {type(self._inner).__name__}", trainer, self._inner.trainer)
        self._inner.trainer = trainer
        self._bind_overridden()

    def _bind_overridden(self) -> None:
        """Binds on this instance what the user's module overrides of its base class; for each other method, the default one.

        The default is that of the Trainer's package: compared with it, the method is not overridden.
        """
        inner, base = self._inner, package_of(self._inner).get("LightningDataModule")
        for name in dir(base):
            if name.startswith("__") or self._defines(name):
                continue
            if name in vars(inner) or getattr_static(type(inner), name) is not getattr_static(base, name):
                value = getattr(inner, name, None)
                if callable(value) or not isinstance(getattr(base, name), property):
                    self.__dict__[name] = value
            elif self._is_default(vars(self).get(name)):
                del self.__dict__[name]
        self._bind_defaults(package_of(inner if self.trainer is None else self.trainer))

    def _bind_defaults(self, package: Package) -> None:
        base = package.get("LightningDataModule")
        for name in _FORWARDED:
            if name not in vars(self) and not self._defines(name) and (default := getattr_static(base, name, None)) is not None:
                self.__dict__[name] = MethodType(default, self)

    def _is_default(self, value: Any) -> bool:
        return isinstance(value, MethodType) and value.__self__ is self

    @classmethod
    def _defines(cls, name: str) -> bool:
        owners = [owner for owner in cls.__mro__ if issubclass(owner, StandIn)]
        return any(name in vars(owner) for owner in owners if owner is not StandIn or name not in _FORWARDED)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not self._is_default(value)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        join()
        vars(self).update(state)
        self._bind_defaults(package_of(self._inner))  # whose own state may come later

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


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    forward.__name__, forward.__qualname__ = name, f"{StandIn.__qualname__}.{name}"
    return forward


_METHODS = [name for name in dir(pl.LightningDataModule) if isfunction(getattr_static(pl.LightningDataModule, name))]
_FORWARDED = {name for name in _METHODS if not name.startswith("_") and name not in vars(StandIn)}
for _name in _FORWARDED:
    setattr(StandIn, _name, _forwarding(_name))


def _set_own_hparams(datamodule: pl.LightningDataModule) -> None:
    """Gives the user's module the hyperparameters that LightningCLI would record for it without a stand-in.

    If LightningCLI builds both data modules, ``save_hyperparameters`` in the user's constructor records the configuration of the
    outer one. If that constructor reads ``hparams``, it still sees this configuration.
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
