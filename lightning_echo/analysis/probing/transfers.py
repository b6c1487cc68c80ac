"""The transfers of batches to the device: how long each takes, and the batch on the device.

The hook ``transfer_batch_to_device`` may be the model's or the data module's, and Lightning decides which one it calls. So both
are replaced, in copies of the user's objects. The hook returns the batch before ``on_after_batch_transfer``, which is part of a
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Transfers", "transfers_noted", "transfers_skipped", "wait_for"]

_BEFORE, _HOOK = "on_before_batch_transfer", "transfer_batch_to_device"


class Transfers:
    """The transfers that were noted.

    Attributes:
        seconds: Seconds of each transfer, the device's work included.
        batch: The last batch, on the device; None before the first transfer.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.batch: Any = None


@contextmanager
def transfers_noted(instances: Iterable[Any], transfers: Transfers) -> Iterator[None]:
    """Notes the transfers that these instances make, until the ``with`` block ends.

    Args:
        instances: The model and the data module.
        transfers: Gets the transfers.
    """
    replaced = list(instances)
    for instance in replaced:
        vars(instance)[_HOOK] = _Tap(getattr(instance, _HOOK), transfers)
    try:
        yield
    finally:
        for instance in replaced:
            vars(instance).pop(_HOOK, None)


@contextmanager
def transfers_skipped(instances: Iterable[Any]) -> Iterator[None]:
    """Skips the transfers, and the hook before them, until the ``with`` block ends: the batches are on the device already."""
    replaced = list(instances)
    for instance in replaced:
        vars(instance).update({_HOOK: _same, _BEFORE: _same})
    try:
        yield
    finally:
        for instance in replaced:
            for name in (_HOOK, _BEFORE):
                vars(instance).pop(name, None)


def _same(batch: Any, *args: Any, **kwargs: Any) -> Any:
    return batch


class _Tap:
    """Takes the place of an instance's hook. Lightning looks at ``__wrapped__`` to see whose hook it is."""

    def __init__(self, users_hook: Callable[..., Any], transfers: Transfers) -> None:
        self.__wrapped__ = users_hook
        self._transfers = transfers

    def __call__(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        wait_for(device)
        begin = time.perf_counter()
        self._transfers.batch = self.__wrapped__(batch, device, dataloader_idx)
        wait_for(device)
        self._transfers.seconds.append(time.perf_counter() - begin)
        return self._transfers.batch


def wait_for(device: torch.device) -> None:
    """Waits until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
