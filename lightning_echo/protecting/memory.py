"""How much memory an example takes while it is live, and how a number of bytes is written in words and read from words."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import numpy as np
import torch

from lightning_echo.protecting.objects import is_image
from lightning_echo.protecting.protect import IMMUTABLE

__all__ = ["bytes_from_words", "bytes_in_words", "nbytes"]

_UNITS = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}


def nbytes(value: Any, *, is_packed: bool = False) -> int:
    """Returns an estimate of the memory in bytes that an example takes while it is live.

    For tensors and arrays their own elements count, not the storage that they view. An object that is held twice counts once.

    Args:
        value: The example.
        is_packed: Whether the pixels of images count without padding, as in a file. In memory, Pillow pads some.

    >>> nbytes(torch.zeros(3, 8, 8)) >= 3 * 8 * 8 * 4
    True
    """
    return _nbytes(value, set(), is_packed)


def _nbytes(value: Any, seen: set[int], is_packed: bool) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        members = value.flat if value.dtype == object else ()
        return int(value.nbytes) + sum(_nbytes(item, seen, is_packed) for item in members)
    if is_image(value):
        return int(value.width * value.height * _pixel_bytes(value.mode, is_packed))
    own = sys.getsizeof(value, 64)
    if isinstance(value, IMMUTABLE):
        return own
    if isinstance(value, dict):
        own += sum(_nbytes(key, seen, is_packed) + _nbytes(item, seen, is_packed) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        own += sum(_nbytes(item, seen, is_packed) for item in value)
    attributes = vars(value).values() if hasattr(value, "__dict__") else _slot_values(value)
    return own + sum(_nbytes(item, seen, is_packed) for item in attributes)


def _pixel_bytes(mode: str, is_packed: bool) -> int:
    """Returns the bytes of a pixel in Pillow's memory, which pads three of them to four."""
    if mode in ("1", "L", "P"):
        return 1
    if is_packed and mode in ("RGB", "YCbCr", "LAB", "HSV"):
        return 3
    return 2 if mode.startswith("I;16") else 4


def _slot_values(value: Any) -> list[Any]:
    if not dataclasses.is_dataclass(value):
        return []
    return [getattr(value, field.name, None) for field in dataclasses.fields(value)]


def bytes_in_words(number: float) -> str:
    """Returns a number of bytes in the unit that people would choose.

    >>> bytes_in_words(1000), bytes_in_words(3 * 2**19), bytes_in_words(2**33), bytes_in_words(1016 * 2**10)
    ('1,000 bytes', '1.5 MiB', '8 GiB', '1,016 KiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            size = number / 2**power
            return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
    return f"{number:,.0f} bytes"


def bytes_from_words(text: str) -> int | None:
    """Returns the bytes that a number with a unit stands for; None if the text is something else.

    >>> bytes_from_words("8GiB") == 2**33, bytes_from_words("1.5 kB"), bytes_from_words("8 apples"), bytes_from_words("8")
    (True, 1500, None, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", text)
    if match is None or (unit := match[2].lower()) not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[unit])
