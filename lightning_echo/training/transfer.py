"""`TransferHooks`: for the time of a ``fit``, batches of ``after_transfer`` are put on the device once, and reused there.

Of such a loader Lightning gets a `BatchUse` in place of each batch. Two hooks know what that is; they are bound on the user's
instances in the place of their own, and taken away again:

    on_before_batch_transfer    prepares the host batch, at its first use by the user's hook; hands the use on
    transfer_batch_to_device    at the first use, and after an in-place edit, by the user's hook; hands aliases on
    on_after_batch_transfer     is the user's own, and gets a batch like any other, at every use

Which instance it asks, model or data module, Lightning finds out by comparing code, and it looks through ``__wrapped__``: it
decides, and warns, as without these hooks. All other batches, those of validation for one, go straight to the user's hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_echo.fetching.batches import BatchUse
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.stand_in import StandIn

__all__ = ["TransferHooks"]

_BEFORE, _TRANSFER = "on_before_batch_transfer", "transfer_batch_to_device"
_NOTHING = object()
_Answer = Callable[[BatchUse, Callable[[Any], Any]], Any]


class TransferHooks:
    """The hooks of one run."""

    def __init__(self) -> None:
        self._loader: EchoLoader | None = None
        self._bound: list[tuple[Any, str, Any]] = []  # instance, name, the attribute that was there
        self._said = self._warned = False

    def follow(self, loader: EchoLoader, trainer: Any) -> None:
        """Binds the hooks if a Trainer trains on this loader and it needs them, else takes them away.

        Raises:
            MisconfigurationException: The Trainer puts batches on the device by other means than these hooks.
        """
        if not loader.insertion_point.on_device or trainer is None or not trainer.training:
            self.unbind()
            return
        _check_asks_hooks(trainer, loader.insertion_point)
        if self._loader is not None:
            self._loader.is_transferred = False
        self._loader, loader.is_transferred = loader, True
        for instance in () if self._bound else _asked(trainer):
            for name, answer in ((_BEFORE, self._prepare), (_TRANSFER, self._transfer)):
                self._bound.append((instance, name, vars(instance).get(name, _NOTHING)))
                vars(instance)[name] = _Hook(getattr(instance, name), answer)

    def unbind(self) -> None:
        """Gives the instances their own hooks back; may be called at any time."""
        for instance, name, before in self._bound:
            if isinstance(vars(instance).get(name), _Hook):  # else somebody has put another one there meanwhile
                del vars(instance)[name]
                if before is not _NOTHING:
                    vars(instance)[name] = before
        self._bound.clear()
        self._said = self._warned = False
        if self._loader is not None:
            self._loader.is_transferred = False
            self._loader = None

    def _prepare(self, use: BatchUse, users_hook: Callable[[Any], Any]) -> BatchUse:
        use.live.prepare(use.host, users_hook)
        return use

    def _transfer(self, use: BatchUse, users_hook: Callable[[Any], Any]) -> Any:
        if use.live.let_go_if_edited() and not self._warned:
            self._warned = True
            rank_zero_warn(
                "lightning_echo: a batch was edited in place on the device. Its next use gets it unedited, by a fresh transfer "
                "from the host; where each use edits its batch, each use is transferred. Do not edit batches in place (x = x * 2 "
                f"instead of x *= 2), or use {earliest(Needs.batches).option}, which hands out copies"
            )
        batch = use.live.transfer(users_hook, is_last=use.is_last)
        if not self._said and self._loader is not None and use.live.nbytes:
            self._said = True
            each, count = use.live.nbytes / 2**20, self._loader.buffer_size
            rank_zero_info(
                f"lightning_echo: a live batch takes {each:.3g} MiB of device memory, buffer_size={count:,} of them "
                f"{each * count:.3g} MiB, and about as much on the host"
            )
        return batch


class _Hook:
    """Stands in the place of an instance's hook.

    A copy of the instance, and one that is saved whole during training, has its own hook again: echoing belongs to this run.
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
    return value


def _asked(trainer: Any) -> list[Any]:
    """Whom Lightning may ask. A `StandIn` takes its hooks anew from the user's data module whenever it is set up."""
    model, datamodule = trainer.lightning_module, trainer.datamodule
    inner = datamodule.datamodule if isinstance(datamodule, StandIn) else None
    return [instance for instance in (model, inner, datamodule) if instance is not None]


def _check_asks_hooks(trainer: Any, point: InsertionPoint) -> None:
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
