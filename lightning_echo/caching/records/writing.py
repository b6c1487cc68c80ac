"""How a record is made of an example. `reading.py` is the other way.

What comes out must be the same to the bit. The JSON forms here are made so that it is. What pickle writes must be tried
(``record.py``), because a class decides itself what its pickle leaves out.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_echo.caching.records.reading import made_image, sparse_compressed, sparse_coo
from lightning_echo.protecting.objects import is_from_pillow, is_image
from lightning_echo.protecting.protect import copy_example

__all__ = ["Buffers", "NotPlainError", "aligned", "pickled", "pickled_alike", "plain_form"]

_ALIGNMENT = 16
_SCALARS = (type(None), bool, int, float, str)
_TV_TENSORS = "torchvision.tv_tensors"
_IMAGE_MODES = {"1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX"}
_IMAGE_MODES |= {"I;16", "I;16L", "I;16B"}
_has_names = getattr(torch.Tensor, "has_names", lambda tensor: False)  # new versions of torch have no named tensors
_WITHIN_PAIR = re.compile("(?<=[\ud800-\udbff])(?=[\udc00-\udfff])")  # JSON would make one character of two surrogates


class NotPlainError(TypeError):
    """An example contains a type that only pickle can write."""


class Buffers:
    """The buffers of a record that is being written, and the forms of the objects in them.

    Attributes:
        parts: The bytes, in pieces that share memory with the example.
        size: Bytes of all parts together.
        is_certain: Whether it is known that what comes out will be the same.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.size = 0
        self.is_certain = True
        self.count = 0
        self.forms: dict[int, tuple[Any, Any]] = {}  # id -> the object, kept so that its id is not used again, and its form
        self.containers: dict[int, Any] = {}  # id -> list or dict that was met

    def add(self, data: Any) -> int:
        """Adds a buffer; returns its offset."""
        offset, size = self.size, memoryview(data).nbytes
        self.parts.append(data)
        self.size = aligned(offset + size)
        if gap := self.size - offset - size:
            self.parts.append(bytes(gap))
        return offset


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def plain_form(example: Any) -> tuple[bytes, Buffers]:
    """Returns an example as JSON and buffers.

    Raises:
        NotPlainError: Only pickle can write this example.
    """
    buffers = Buffers()
    try:
        return json.dumps(_form(example, buffers), separators=(",", ":")).encode(), buffers
    except ValueError as error:  # an integer of more than 4,300 digits
        raise NotPlainError(f"an example with a number that JSON cannot write can only be pickled ({error})") from error


def pickled(example: Any) -> tuple[bytes, Buffers]:
    """Returns an example as a pickle and buffers.

    Raises:
        Exception: What pickle raises for an example that it cannot write.
    """
    buffers, target = Buffers(), io.BytesIO()
    buffers.is_certain = False
    _Pickler(target, buffers).dump(example)
    return target.getvalue(), buffers


def pickled_alike(example: Any) -> tuple[bytes, Buffers]:
    """Returns an example as bytes for a comparison. Equal examples give equal bytes, in other processes, too.

    Raises:
        Exception: As in `pickled`.
    """
    buffers, target = Buffers(), io.BytesIO()
    try:
        pickler = _AlikePickler(target, buffers)
        pickler.fast = True  # it does not note which strings are one object, since this is by chance
        pickler.dump(example)
    except (ValueError, RecursionError):  # the example refers back to itself
        buffers, target = Buffers(), io.BytesIO()
        _AlikePickler(target, buffers).dump(example)
    return target.getvalue(), buffers


# --- forms for JSON ---------------------------------------------------------------------------------------------------


def _form(value: Any, buffers: Buffers) -> Any:
    """Returns a value in a form for JSON: a scalar as it is, anything else as a list that begins with a tag."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() or not _WITHIN_PAIR.search(value) else ["text", *_WITHIN_PAIR.split(value)]
    if kind is float and value != value:
        return _nan_form(value)
    if kind in _SCALARS:
        return value
    if kind is tuple:
        return ["tuple", *[_form(part, buffers) for part in value]]
    if kind is list or kind is dict:
        if id(value) in buffers.containers:
            raise NotPlainError(f"an example that holds a {kind.__name__} twice can only be pickled")
        buffers.containers[id(value)] = value
    if kind is list:
        return ["list", *[_form(part, buffers) for part in value]]
    if kind is dict:
        return ["dict", *[[_form(key, buffers), _form(part, buffers)] for key, part in value.items()]]
    form = _leaf_form(value, buffers)
    if form is None:
        raise NotPlainError(f"an example with a {kind.__module__}.{kind.__qualname__} can only be pickled")
    return form


def _nan_form(value: float) -> Any:
    """Returns the form of a number that is none. JSON writes only one of them; the others differ in sign and payload."""
    bits = struct.pack("<d", value)
    return value if bits == struct.pack("<d", math.nan) else ["nan", struct.unpack("<Q", bits)[0]]


def _leaf_form(value: Any, buffers: Buffers) -> list[Any] | None:
    """Returns the form of an object that is kept in a buffer (tag, number, and what its class needs); None for other objects."""
    if (known := buffers.forms.get(id(value))) is not None:
        form: list[Any] = known[1]
        return form
    write = _writer_of(value)
    rest = None if write is None else write(value, buffers)
    if rest is None:
        return None
    form = [rest[0], buffers.count, *rest[1:]]
    buffers.count += 1
    buffers.forms[id(value)] = value, form
    return form


def _writer_of(value: Any) -> Callable[[Any, Buffers], list[Any] | None] | None:
    kind = type(value)
    if kind is torch.Tensor:
        return _write_tensor
    if kind is np.ndarray:
        return _write_array
    if kind is bytes:
        return _write_bytes
    if isinstance(value, np.generic):
        return _write_scalar
    if isinstance(value, torch.Tensor) and kind.__module__.startswith(_TV_TENSORS):
        return _write_tv_tensor
    return _write_image if is_image(value) and is_from_pillow(kind) else None


def _write_bytes(value: bytes, buffers: Buffers) -> list[Any]:
    return ["bytes", buffers.add(value), len(value)]


def _write_tensor(tensor: torch.Tensor, buffers: Buffers, attributes: int = 0) -> list[Any] | None:
    is_usual = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    if not is_usual or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or len(tensor.__dict__) > attributes:
        return None
    if tensor.is_nested or _has_names(tensor):
        return None
    strides = tensor.stride()
    if tensor.is_contiguous():
        dense, strides = tensor, ()
    elif torch.ops.aten.is_non_overlapping_and_dense(tensor):
        dense = tensor.as_strided((tensor.numel(),), (1,))
    else:
        dense, strides = tensor.contiguous(), ()
    data = dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else b""
    return ["tensor", buffers.add(data), str(tensor.dtype), list(tensor.shape), list(strides)]


def _write_tv_tensor(tensor: torch.Tensor, buffers: Buffers) -> list[Any] | None:
    attributes = dict(tensor.__dict__)
    form = attributes.pop("format", None)
    try:
        others = _form(attributes, buffers)
    except NotPlainError:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        written = _write_tensor(tensor, buffers, attributes=len(tensor.__dict__))
    if written is None:
        return None
    kind = type(tensor)
    return ["tv_tensor", *written[1:], kind.__module__, kind.__name__, None if form is None else form.name, others]


def _write_array(array: Any, buffers: Buffers) -> list[Any] | None:
    if not _is_named(array.dtype):
        return None
    dense, axes = array, []
    if not array.flags.c_contiguous:
        axes = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)  # as they lie in memory
        dense = array.transpose(axes)
        if not dense.flags.c_contiguous:
            dense, axes = np.ascontiguousarray(array), []
    data = dense.reshape(-1).view(np.uint8) if dense.size else b""
    return ["array", buffers.add(data), array.dtype.str, list(array.shape), axes]


def _is_named(dtype: Any) -> bool:
    """Returns whether a numpy type is all that its name says."""
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None or dtype.metadata is not None:
        return False
    return bool(np.dtype(dtype.str) == dtype)


def _write_scalar(value: Any, buffers: Buffers) -> list[Any] | None:
    if not _is_named(value.dtype) or type(value) is not np.dtype(value.dtype.str).type:
        return None
    if isinstance(value, np.str_):  # numpy itself gives an empty string a zero
        data = value.encode("utf-32-le", "surrogatepass")
    else:
        data = bytes.__getitem__(value, slice(None)) if isinstance(value, np.bytes_) else value.tobytes()
    return ["scalar", buffers.add(data), len(data), value.dtype.str]


def _write_image(image: Any, buffers: Buffers) -> list[Any] | None:
    if image.mode not in _IMAGE_MODES:
        return None
    try:
        info = _form(dict(image.info), buffers)
    except NotPlainError:
        return None
    if image.format is not None and type(image.format) is not str:
        return None
    palette = _palette_of(image)
    if palette is not None:
        palette = palette[0], _form(palette[1], buffers)
        buffers.is_certain = False
    data = image.tobytes()
    return ["image", buffers.add(data), len(data), image.mode, list(image.size), palette, info, image.format]


def _palette_of(image: Any) -> tuple[str, Any] | None:
    """Returns mode and colours of the palette of an image; None if it has none. Also reads the image, if that was still to do."""
    image.load()
    if image.palette is None:
        return None
    mode = image.palette.mode
    return mode, bytes(image.getpalette(mode) or ())


# --- pickles ----------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Writes what is large into buffers."""

    def __init__(self, target: io.BytesIO, buffers: Buffers) -> None:
        super().__init__(target, protocol=5)
        self._buffers = buffers

    def persistent_id(self, value: Any) -> Any:
        """Returns the form of an object that is kept in a buffer; None: pickle writes it."""
        return None if type(value) in _SCALARS else _leaf_form(value, self._buffers)

    def reducer_override(self, value: Any) -> Any:
        """Returns how an object is made again, if its own way would lose or keep too much.

        * Torch keeps each sparse tensor in a list until ``torch.load`` is called. Here that list would grow without end.
        * Torch writes all memory that a tensor is a part of.
        * Pillow drops the transparency of a palette.
        """
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and value.layout in _SPARSE:
                return _reduced_sparse(value)
            return copy_example(value).__reduce_ex__(5) if _is_part_of_more(value) else NotImplemented
        if is_image(value) and is_from_pillow(type(value)):
            palette = _palette_of(value)
            return made_image, (value.mode, value.size, value.tobytes(), palette, dict(value.info), value.format)
        return NotImplemented


class _AlikePickler(_Pickler):
    """Writes sets in an order of their own, since that of a set differs from process to process."""

    def persistent_id(self, value: Any) -> Any:
        if type(value) in (set, frozenset):
            return type(value).__name__, sorted(_digest_of(member) for member in value)
        return super().persistent_id(value)


def _digest_of(value: Any) -> bytes:
    header, buffers = pickled_alike(value)
    digest = hashlib.blake2b(header, digest_size=16)
    for part in buffers.parts:
        digest.update(part)
    return digest.digest()


_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc}


def _reduced_sparse(value: torch.Tensor) -> tuple[Any, ...]:
    rest, shape = (value.requires_grad, dict(value.__dict__)), tuple(value.shape)
    value = value.detach()
    if value.layout is torch.sparse_coo:
        return sparse_coo, (value._indices(), value._values(), shape, value.is_coalesced(), rest)
    by_rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends, places = (value.crow_indices(), value.col_indices()) if by_rows else (value.ccol_indices(), value.row_indices())
    return sparse_compressed, (ends, places, value.values(), shape, value.layout, rest)


def _is_part_of_more(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has only a part of the memory that belongs to it."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    except RuntimeError:  # it has no memory of its own
        return False
