"""How long it takes to copy a batch to the device, and the batch that is there then.

The hook ``transfer_batch_to_device`` may be the model's or the data module's, whoever Lightning asks; so it is tapped on both,
which are copies of the user's. What it returns is the batch before ``on_after_batch_transfer``, which is part of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Copies", "tapped", "transferred", "wait_for"]

_BEFORE, _HOOK = "on_before_batch_transfer", "transfer_batch_to_device"


class Copies:
    """What was seen of copying.

    Attributes:
        seconds: Of each copy, the device's work included.
        batch: The last one, on the device; None before.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.batch: Any = None


@contextmanager
def tapped(instances: Iterable[Any], copies: Copies) -> Iterator[None]:
    """While it lasts, copies made by these instances are noted.

    Args:
        instances: Model and data module.
        copies: Where.
    """
    tapped = list(instances)
    for instance in tapped:
        vars(instance)[_HOOK] = _Tap(getattr(instance, _HOOK), copies)
    try:
        yield
    finally:
        for instance in tapped:
            vars(instance).pop(_HOOK, None)


@contextmanager
def transferred(instances: Iterable[Any]) -> Iterator[None]:
    """While it lasts, batches are on the device already: what is done before and at a transfer is not done again."""
    muted = list(instances)
    for instance in muted:
        vars(instance).update({_HOOK: _same, _BEFORE: _same})
    try:
        yield
    finally:
        for instance in muted:
            for name in (_HOOK, _BEFORE):
                vars(instance).pop(name, None)


def _same(batch: Any, *args: Any, **kwargs: Any) -> Any:
    return batch


class _Tap:
    """Stands in the place of an instance's hook; Lightning looks through ``__wrapped__`` to see whose it is."""

    def __init__(self, users_hook: Callable[..., Any], copies: Copies) -> None:
        self.__wrapped__ = users_hook
        self._copies = copies

    def __call__(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        wait_for(device)
        begin = time.perf_counter()
        self._copies.batch = self.__wrapped__(batch, device, dataloader_idx)
        wait_for(device)
        self._copies.seconds.append(time.perf_counter() - begin)
        return self._copies.batch


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
