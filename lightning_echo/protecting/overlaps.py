"""Where the memory of examples is: a data set may return memory that an earlier example, which is still in use, has already.

A data set may decode into a few buffers by turns. In a plain loader that is right, since each example is augmented, and so
copied, before the next one is read. If all examples of a batch are loaded first, the last one overwrites the first. Two examples
whose memory overlaps show this at the first time.

Overlapping memory need not be overwritten: windows of one time series overlap, too, and two examples may have the same embedding
of their class. So who finds an overlap copies what is loaded from then on, which is right in any case.

This runs for each example that is loaded, so it must be fast. It takes about 2 us for a pair of image and label.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from lightning_echo.protecting.objects import attributes_of, image_class
from lightning_echo.protecting.protect import IMMUTABLE

__all__ = ["Overlaps"]

_DEEP = 8
_Add = Callable[[Any, list[tuple[int, int]], int], None]


class Overlaps:
    """The memory of the examples of one batch, which must be in use until `clear` is called.

    Example:
        >>> overlaps, buffer = Overlaps(), torch.zeros(4)
        >>> [overlaps.add(index, example) for index, example in enumerate((buffer[:2], buffer[2:], buffer[1:3]))]
        [False, False, True]
    """

    def __init__(self) -> None:
        self._starts: list[int] = []  # of ranges that do not overlap, in their order
        self._ends: list[int] = []
        self._owners: list[Any] = []

    def clear(self) -> None:
        """Forgets all examples."""
        self._starts.clear()
        self._ends.clear()
        self._owners.clear()

    def add(self, index: Any, example: Any) -> bool:
        """Adds an example. Returns whether its memory overlaps with that of an example with another index.

        Args:
            index: Its index in the data set. The same index may give the same memory.
            example: The example.
        """
        ranges: list[tuple[int, int]] = []
        _add(example, ranges, 0)
        starts, ends, owners, found = self._starts, self._ends, self._owners, False
        for start, end in ranges:
            place = bisect_right(starts, start)
            if (place and ends[place - 1] > start) or (place < len(starts) and starts[place] < end):
                owner = owners[place - 1] if place and ends[place - 1] > start else owners[place]
                found = found or not _is_same(owner, index)
                continue
            starts.insert(place, start)
            ends.insert(place, end)
            owners.insert(place, index)
        return found


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (int, str)) and type(one) is type(other) and bool(one == other))


def _add(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    kind = type(value)
    adder = _ADDERS.get(kind)
    if adder is None:
        adder = _ADDERS[kind] = _adder_for(kind)
    adder(value, ranges, depth)


def _nothing(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    pass


def _tensor(value: torch.Tensor, ranges: list[tuple[int, int]], depth: int) -> None:
    try:
        start, size = value.data_ptr(), value.numel()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, for instance, has no memory of its own
        return
    if size and start:
        if not value.is_contiguous():
            size = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
        ranges.append((start, start + size * value.element_size()))


def _any_tensor(value: torch.Tensor, ranges: list[tuple[int, int]], depth: int) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _tensor(value, ranges, depth)


def _array(value: np.ndarray[Any, Any], ranges: list[tuple[int, int]], depth: int) -> None:
    if value.size:
        if value.flags.c_contiguous:
            start = value.__array_interface__["data"][0]
            ranges.append((start, start + value.nbytes))
        else:
            ranges.append(_bounds(value))


def _bounds(value: np.ndarray[Any, Any]) -> tuple[int, int]:
    first = last = value.__array_interface__["data"][0]
    for length, stride in zip(value.shape, value.strides, strict=True):
        first, last = first + min(stride * (length - 1), 0), last + max(stride * (length - 1), 0)
    return first, last + value.itemsize


def _buffer(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    with suppress(ValueError, BufferError):  # it is not contiguous, or released
        if not memoryview(value).readonly:
            _array(np.frombuffer(value, np.uint8), ranges, depth)


def _members(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    if depth < _DEEP:
        for member in value:
            _add(member, ranges, depth + 1)


def _values(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    if depth < _DEEP:
        for member in dict.values(value):
            _add(member, ranges, depth + 1)


def _image(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    # An image of Pillow does not tell where its memory is, only that it is that of an array or a file (Image.fromarray). Two such
    # images count as in the same memory.
    place = id(_image) if getattr(value, "readonly", False) else id(value)
    ranges.append((place, place + 1))


def _object(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    ranges.append((id(value), id(value) + 1))  # one object in two examples
    if depth < _DEEP:
        _values(attributes_of(value), ranges, depth)


_ADDERS: dict[type, _Add] = {
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes), _nothing),
    torch.Tensor: _tensor,
    np.ndarray: _array,
    tuple: _members,
    list: _members,
    dict: _values,
    bytearray: _buffer,
    memoryview: _buffer,
}


def _adder_for(kind: type) -> _Add:
    if issubclass(kind, IMMUTABLE) or issubclass(kind, np.generic):
        return _nothing
    if issubclass(kind, torch.Tensor):
        return _any_tensor
    if issubclass(kind, image_class() or ()):
        return _image
    for base, adder in ((np.ndarray, _array), (dict, _values), (tuple, _members), (list, _members), (deque, _members)):
        if issubclass(kind, base):
            return adder
    return _object
