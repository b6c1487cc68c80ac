"""How an example is made of a record. `writing.py` is the other way.

Each tensor, array and image gets memory of its own, so that the example does not keep more memory than it needs: a label that is
kept does not keep the image that was beside it.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import torch

__all__ = ["Body", "from_json", "from_pickle", "made_image", "sparse_compressed", "sparse_coo"]

_parsed = json.JSONDecoder().raw_decode  # `json.loads` also looks for the encoding and for blanks: it takes three times as long
_MOST_REMEMBERED = 1024  # bytes of a header whose maker is remembered: a long one is seldom met twice, and takes much memory
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMPY_DTYPES = {  # the types that torch and numpy both have
    f"torch.{name}": np.dtype(name)
    for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128", "bool")
}
_TV_TENSORS = "torchvision.tv_tensors"


class Body:
    """The buffers of a record.

    Args:
        record: All bytes of the record.
        start: Where the buffers begin.
        is_own: Whether nobody else uses the memory of the record.
    """

    __slots__ = ("_is_own", "_record", "_start")

    def __init__(self, record: memoryview, start: int, *, is_own: bool) -> None:
        self._record, self._start, self._is_own = record, start, is_own

    def memory(self, at: int, size: int) -> Any:
        """Returns bytes in memory to write into. It is a copy, but for a part of one's own record that takes most of it."""
        begin = self._start + at
        part = self._record[begin : begin + size]
        return part if self._is_own and 2 * size > len(self._record) else bytearray(part)

    def bytes_at(self, at: int, size: int) -> bytes:
        """Returns bytes."""
        begin = self._start + at
        return bytes(self._record[begin : begin + size])


def from_json(text: bytes, body: Body) -> Any:
    """Returns the example of a record whose header is this text.

    Raises:
        ValueError: The text is not a header.
    """
    make = _remembered_maker if len(text) <= _MOST_REMEMBERED else _maker
    return make(text)(body)


def from_pickle(header: bytes, body: Body) -> Any:
    """Returns the example of a record whose header is this pickle."""
    return _Unpickler(io.BytesIO(header), _Leaves(body)).load()


def _maker(text: bytes) -> Callable[[Body], Any]:
    """Returns a function that makes the example of a record with this header. Similar examples often have equal headers."""
    form, parsed = _parsed(decoded := text.decode())
    if parsed != len(decoded):
        raise ValueError(f"the header of a record ends after {parsed} of {len(decoded)} characters")
    return _quick_maker(form, set()) or (lambda body: _value(form, _Leaves(body)))


_remembered_maker = lru_cache(maxsize=1024)(_maker)


def _quick_maker(form: Any, met: set[int]) -> Callable[[Body], Any] | None:
    """Returns such a function for an example of scalars and dense tensors, which is twice as fast as `_value`; None for others.

    Args:
        form: The form.
        met: Numbers of the tensors that were met before. A tensor that is in an example twice is one object.
    """
    if type(form) is not list:
        return lambda body: form
    tag, *rest = form
    if tag == "tensor":
        number, at, dtype, shape, strides = rest
        kind = _NUMPY_DTYPES.get(dtype)
        if strides or kind is None or number in met:
            return None
        met.add(number)
        sizes, size = tuple(shape), kind.itemsize * prod(shape)
        return lambda body: torch.from_numpy(np.ndarray(sizes, kind, body.memory(at, size)))  # twice as fast as the general way
    if tag not in ("tuple", "list", "dict"):
        return None
    if tag != "dict" and not any(type(part) is list for part in rest):
        return (lambda body: rest.copy()) if tag == "list" else (lambda body: tuple(rest))
    parts = [_quick_maker(part[1] if tag == "dict" else part, met) for part in rest]
    makers = [maker for maker in parts if maker is not None]
    if len(makers) < len(parts):
        return None
    if tag == "tuple":
        return lambda body: tuple([make(body) for make in makers])
    if tag == "list":
        return lambda body: [make(body) for make in makers]
    keys = [key for key, _ in rest]
    if any(type(key) is list for key in keys):
        return None
    return lambda body: {key: make(body) for key, make in zip(keys, makers, strict=True)}


class _Leaves:
    """The objects that are made from the buffers of a record. Each is made once."""

    __slots__ = ("_body", "_made")

    def __init__(self, body: Body) -> None:
        self._body = body
        self._made: dict[int, Any] = {}

    def get(self, form: Sequence[Any]) -> Any:
        """Returns the object of a form."""
        found = self._made.get(form[1])
        if found is None:
            found = self._made[form[1]] = _READERS[form[0]](self, *form[2:])
        return found

    def bytes_at(self, at: int, length: int) -> bytes:
        return self._body.bytes_at(at, length)

    def tensor(self, at: int, dtype: str, shape: list[int], strides: list[int]) -> torch.Tensor:
        if not strides and (kind := _NUMPY_DTYPES.get(dtype)) is not None:  # twice as fast as the general way
            return torch.from_numpy(np.ndarray(shape, kind, self._body.memory(at, kind.itemsize * prod(shape))))
        kept = _DTYPES[dtype]
        if 0 in shape:
            return torch.empty(shape, dtype=kept)
        flat = torch.frombuffer(self._body.memory(at, kept.itemsize * prod(shape)), dtype=kept, count=prod(shape))
        return flat.as_strided(shape, strides) if strides else flat.view(shape)

    def tv_tensor(
        self, at: int, dtype: str, shape: list[int], strides: list[int], module: str, name: str, form: str | None, others: Any
    ) -> torch.Tensor:
        if not module.startswith(_TV_TENSORS):
            raise ValueError(f"a record with a tensor of {module}, which is not {_TV_TENSORS}")
        place = import_module(module)  # torchvision is installed, since the writer had it, but may not be imported here
        kind = getattr(place, name, None)
        if not isinstance(kind, type) or not issubclass(kind, torch.Tensor):
            raise ValueError(f"{module} has no {name}")
        found = self.tensor(at, dtype, shape, strides).as_subclass(kind)
        if form is not None:
            found.__dict__["format"] = import_module(_TV_TENSORS).BoundingBoxFormat[form]
        found.__dict__.update(_value(others, self))
        return found

    def array(self, at: int, dtype: str, shape: list[int], axes: list[int]) -> Any:
        kind = np.dtype(dtype)
        if 0 in shape:
            return np.empty(shape, kind)
        memory = self._body.memory(at, kind.itemsize * prod(shape))
        if not axes:
            return np.ndarray(shape, kind, memory)
        return np.ndarray([shape[axis] for axis in axes], kind, memory).transpose(np.argsort(axes))

    def scalar(self, at: int, length: int, dtype: str) -> Any:
        kind, data = np.dtype(dtype), self.bytes_at(at, length)
        if kind.kind == "U":  # an array would drop zeros at the end
            return np.str_(data.decode("utf-32-le", "surrogatepass"))
        return np.bytes_(data) if kind.kind == "S" else np.frombuffer(data, kind, 1)[0]

    def image(self, at: int, length: int, mode: str, size: list[int], palette: Any, info: Any, form: str | None) -> Any:
        if palette is not None:
            palette = palette[0], self.get(palette[1])
        return made_image(mode, (size[0], size[1]), self.bytes_at(at, length), palette, _value(info, self), form)


_READERS: dict[str, Callable[..., Any]] = {
    "bytes": _Leaves.bytes_at,
    "tensor": _Leaves.tensor,
    "tv_tensor": _Leaves.tv_tensor,
    "array": _Leaves.array,
    "scalar": _Leaves.scalar,
    "image": _Leaves.image,
}


def _value(form: list[Any], leaves: _Leaves) -> Any:
    """Returns the value of a form that is a list. A form that is not a list is the value itself."""
    tag = form[0]
    if tag == "tuple":
        return tuple([_value(part, leaves) if type(part) is list else part for part in form[1:]])
    if tag == "dict":
        return {
            _value(key, leaves) if type(key) is list else key: _value(part, leaves) if type(part) is list else part
            for key, part in form[1:]
        }
    if tag == "list":
        return [_value(part, leaves) if type(part) is list else part for part in form[1:]]
    if tag == "text":
        return "".join(form[1:])
    if tag == "nan":
        return struct.unpack("<d", struct.pack("<Q", form[1]))[0]
    return leaves.get(form)


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, leaves: _Leaves) -> None:
        super().__init__(source)
        self._leaves = leaves

    def persistent_load(self, form: Any) -> Any:
        return self._leaves.get(form)


# --- what a pickle calls ----------------------------------------------------------------------------------------------


def made_image(
    mode: str, size: tuple[int, int], data: bytes, palette: tuple[str, bytes] | None, info: dict[Any, Any], form: str | None
) -> Any:
    """Returns a Pillow image.

    Args:
        mode: Its mode.
        size: Width and height.
        data: Its pixels.
        palette: Mode and colours of its palette; None: it has none.
        info: Its information.
        form: The format of its file; None: it comes from no file.
    """
    image = import_module("PIL.Image").frombytes(mode, size, data)  # its writer had Pillow
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info, image.format = info, form
    return image


def sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool, rest: tuple[bool, dict[str, Any]]
) -> torch.Tensor:
    """Returns a sparse tensor. ``rest``: whether it requires a gradient, and its attributes."""
    made = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
    return _with_rest(made, rest)


def sparse_compressed(
    ends: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: torch.layout,
    rest: tuple[bool, dict[str, Any]],
) -> torch.Tensor:
    """Returns a sparse tensor in a compressed layout."""
    made = torch.sparse_compressed_tensor(ends, places, values, shape, layout=layout, check_invariants=False)
    return _with_rest(made, rest)


def _with_rest(made: torch.Tensor, rest: tuple[bool, dict[str, Any]]) -> torch.Tensor:
    made.__dict__.update(rest[1])
    return made.requires_grad_(rest[0]) if rest[0] else made
