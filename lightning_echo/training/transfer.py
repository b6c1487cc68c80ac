"""`TransferHooks`: during a ``fit``, puts the batches of ``after_transfer`` on the device once, and reuses them there.

With such a loader Lightning gets a `BatchUse` in place of each batch. Two hooks turn it into a batch on the device. They are
bound on the user's instances, in place of the instances' own hooks, and later taken away. The third hook stays as it is:

============================ ================================================================================================
``on_before_batch_transfer`` ours: at the first use of a batch, the user's hook prepares the batch on the host
``transfer_batch_to_device`` ours: at the first use, and after an in-place edit, the user's hook moves the batch to the device;
                             each use gets an alias of it
``on_after_batch_transfer``  the user's own: gets a batch like any other, at every use
============================ ================================================================================================

Lightning compares code to decide which instance it asks, the model or the data module. It looks through ``__wrapped__``.
Therefore it decides and warns as it would without these hooks. All other batches, such as those of validation, go directly to the
user's hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_echo.fetching.batches import BatchUse
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.hooks import BoundHooks
from lightning_echo.training.rank_zero import rank_zero_info
from lightning_echo.training.stand_in import StandIn

__all__ = ["TransferHooks"]

_PREPARE, _TRANSFER = "on_before_batch_transfer", "transfer_batch_to_device"
_UsersHook: TypeAlias = Callable[[Any], Any]  # of a host batch; the other arguments of Lightning's call are filled in
_Answer: TypeAlias = Callable[[BatchUse, _UsersHook], Any]


class TransferHooks:
    """The transfer hooks of one run."""

    def __init__(self) -> None:
        self._loader: EchoLoader | None = None
        self._hooks = BoundHooks()
        self._is_memory_logged = self._is_edit_warned = False

    def bind(self, loader: EchoLoader, trainer: Any) -> None:
        """Binds the hooks if a Trainer trains on this loader and the loader needs them. Otherwise takes them away.

        Raises:
            MisconfigurationException: The Trainer puts batches on the device without these hooks.
        """
        if not loader.insertion_point.on_device or trainer is None or not trainer.training:
            self.unbind()
            return
        _check_asks_hooks(trainer, loader.insertion_point)
        if self._loader is not None:
            self._loader.is_transferred = False
        self._loader, loader.is_transferred = loader, True
        if self._hooks.are_bound:
            return
        for instance in _instances_asked(trainer):
            for name, answer in ((_PREPARE, self._prepare), (_TRANSFER, self._transfer)):
                self._hooks.bind(instance, name, _TransferHook(getattr(instance, name), answer))

    def unbind(self) -> None:
        """Gives back to the instances their own hooks. You may call it at any time."""
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
    """Stands in place of an instance's hook.

    Echoing belongs only to this run. Therefore a copy of the instance has its own hook again, also a copy that is saved whole
    during training.
    """

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
    """Returns its argument. A copy of a `_TransferHook` is made with this function."""
    return value


def _instances_asked(trainer: Any) -> list[Any]:
    """Returns the instances whose hooks Lightning may ask.

    The user's data module inside a `StandIn` is one of them: the stand-in copies its hooks whenever it is set up.
    """
    model, datamodule = trainer.lightning_module, trainer.datamodule
    inner = datamodule.datamodule if isinstance(datamodule, StandIn) else None
    return [instance for instance in (model, inner, datamodule) if instance is not None]


def _check_asks_hooks(trainer: Any, point: InsertionPoint) -> None:
    """Raises a `MisconfigurationException` if the Trainer, or its model, transfers batches without the hooks."""
    way_out = f"use {earliest(Needs.batches).option}, where each use is transferred"
    strategy = type(trainer.strategy)
    for name in ("batch_to_device", "process_dataloader"):
        if getattr(strategy, name) is not getattr(Strategy, name):
            raise MisconfigurationException(
                f"{point.option} is impossible with {strategy.__name__}, which transfers batches in its own {name}: {way_out}"
            )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"{point.option} is impossible with training_step(self, dataloader_iter), which transfers its "
            f"batches itself: take batch and batch_idx instead, or {way_out}"
        )
