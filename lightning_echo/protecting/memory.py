"""How much memory an example takes while it is live."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import torch

from lightning_echo.protecting.objects import is_image
from lightning_echo.protecting.protect import IMMUTABLE

__all__ = ["nbytes"]


def nbytes(value: Any) -> int:
    """Returns an estimate of the memory in bytes that an example takes while it is live.

    Tensors and arrays count by their own elements, not by the storage that they view. An object that is held twice counts once.

    >>> nbytes(torch.zeros(3, 8, 8)) >= 3 * 8 * 8 * 4
    True
    """
    return _nbytes(value, set())


def _nbytes(value: Any, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        members = value.flat if value.dtype == object else ()
        return int(value.nbytes) + sum(_nbytes(item, seen) for item in members)
    if is_image(value):
        return int(value.width * value.height * _pixel_bytes(value.mode))
    own = sys.getsizeof(value, 64)
    if isinstance(value, IMMUTABLE):
        return own
    if isinstance(value, dict):
        own += sum(_nbytes(key, seen) + _nbytes(item, seen) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        own += sum(_nbytes(item, seen) for item in value)
    attributes = vars(value).values() if hasattr(value, "__dict__") else _slot_values(value)
    return own + sum(_nbytes(item, seen) for item in attributes)


def _pixel_bytes(mode: str) -> int:
    """Returns the bytes of a pixel in Pillow's memory, which pads RGB to four."""
    if mode in ("1", "L", "P"):
        return 1
    return 2 if mode.startswith("I;16") else 4


def _slot_values(value: Any) -> list[Any]:
    if not dataclasses.is_dataclass(value):
        return []
    return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
