"""Records: an example as bytes, and an independent example made from such bytes.

::

    | header size | checksum |   header   |  buffer 0  |  buffer 1  | ...
       4 bytes      4 bytes                 each begins at a multiple of 16 bytes

The buffers contain the large parts of an example, as they lie in memory: tensors, arrays, images, bytes. The header says how the
example is made of them. There are two kinds of header:

* JSON, for examples that consist of a closed list of types: None, bool, int, float, str, bytes, tuple, list, dict, tensors on
  the CPU, torchvision's ``tv_tensors``, numpy arrays and scalars, PIL images. Reading it cannot run any code, so it may come
  from a file.
* pickle, for all other examples. Only the job that has written it may read it.

`decode` copies the record once, and makes the example from that copy. So an edit in place cannot change the cache.

If one object is in an example twice, it is one object again after decoding (an example with the same list or dict twice is
pickled). Two tensors that are views of one memory become independent, as in a copy for an echo. Tensors and arrays keep their
strides if no two elements share memory and there are no gaps.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_echo.protecting.objects import is_from_pillow, is_image

__all__ = ["NotPlainError", "Record", "decode", "digest_of", "encode", "encode_plain", "is_whole"]

_PREFIX = struct.Struct("<II")
_parsed = json.JSONDecoder().raw_decode  # `json.loads` also looks for the encoding and for blanks: it takes three times as long
_ALIGNMENT = 16
_JSON, _PICKLE = b"J", b"P"
_SCALARS = (type(None), bool, int, float, str)
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMPY_DTYPES = {  # the types that torch and numpy both have
    f"torch.{name}": np.dtype(name)
    for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128", "bool")
}
_TV_TENSORS = "torchvision.tv_tensors"
_IMAGE_MODES = {"1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX"}
_IMAGE_MODES |= {"I;16", "I;16L", "I;16B"}


class NotPlainError(TypeError):
    """An example contains a type that only pickle can write."""


class Record(NamedTuple):
    """An example as bytes.

    Attributes:
        parts: The bytes, in several pieces that are written one after the other. They share memory with the example.
        size: Bytes of all parts together.
        is_plain: Whether the header is JSON, so that the record may be kept in a file.
    """

    parts: Sequence[Any]
    size: int
    is_plain: bool


def encode(example: Any, *, checksum: bool = False, key: int = 0) -> Record:
    """Returns the record of an example.

    Args:
        example: What a data set returned. It must not change until the record is written.
        checksum: Whether the record gets a checksum, for `is_whole`. It is a CRC-32 of the key and of all bytes after the first
            eight.
        key: The key of the example.

    Raises:
        Exception: What pickle raises for an example that it cannot write.

    Example:
        >>> record = encode({"image": torch.arange(6).reshape(2, 3), "label": 7})
        >>> decode(b"".join(record.parts))
        {'image': tensor([[0, 1, 2],
                [3, 4, 5]]), 'label': 7}
    """
    try:
        header, buffers, is_plain = *_plain_form(example), True
    except NotPlainError:
        buffers, target = _Buffers(), io.BytesIO()
        _Pickler(target, buffers).dump(example)
        header, is_plain = _PICKLE + target.getvalue(), False
    return _record(header, buffers, is_plain, checksum, key)


def encode_plain(example: Any) -> Record:
    """Returns the record of an example that any process may read.

    Raises:
        NotPlainError: Only pickle can write this example.
    """
    return _record(*_plain_form(example), True, False, 0)


def _plain_form(example: Any) -> tuple[bytes, _Buffers]:
    buffers = _Buffers()
    return _JSON + json.dumps(_form(example, buffers), separators=(",", ":")).encode(), buffers


def _record(header: bytes, buffers: _Buffers, is_plain: bool, checksum: bool, key: int) -> Record:
    start = _aligned(_PREFIX.size + len(header))
    parts = [header, bytes(start - _PREFIX.size - len(header)), *buffers.parts]
    crc = _begin_of_checksum(key)
    for part in parts if checksum else ():
        crc = zlib.crc32(part, crc)
    return Record([_PREFIX.pack(len(header), crc if checksum else 0), *parts], start + buffers.size, is_plain)


def decode(data: Any, *, trusted: bool = True, is_copy: bool = False) -> Any:
    """Returns the example of a record, made from a copy of the record.

    Args:
        data: The bytes of the record: anything with a buffer.
        trusted: Whether this job has written the record. If not, a pickled record is refused.
        is_copy: Whether ``data`` is a bytearray that only the caller uses. Then it is not copied.

    Raises:
        ValueError: The record is pickled and not trusted.
    """
    own = data if is_copy else bytearray(data)
    end = _PREFIX.unpack_from(own)[0] + _PREFIX.size
    header = bytes(own[_PREFIX.size : end])
    if header[0] == _JSON[0]:
        return _maker_from(header)(own)
    if not trusted:
        raise ValueError("the record is pickled, and may only be read by the job that has written it")
    return _Unpickler(io.BytesIO(header[len(_PICKLE) :]), _Leaves(own, _aligned(end))).load()


@lru_cache(maxsize=1024)
def _maker_from(header: bytes) -> Callable[[Any], Any]:
    """Returns a function that makes the example of a record with this header. Similar examples often have equal headers."""
    text = header[len(_JSON) :].decode()
    form, parsed = _parsed(text)
    if parsed != len(text):
        raise ValueError(f"the header of a record ends after {parsed} of {len(text)} characters")
    start = _aligned(_PREFIX.size + len(header))
    return _quick_maker(form, start, set()) or (lambda data: _value(form, _Leaves(data, start)))


def _quick_maker(form: Any, start: int, met: set[int]) -> Callable[[Any], Any] | None:
    """Returns such a function for an example of scalars and dense tensors, which is twice as fast as `_value`; None for others.

    Args:
        form: The form.
        start: Where the buffers begin.
        met: Numbers of the tensors that were met before. A tensor that is in an example twice is one object.
    """
    if type(form) is not list:
        return lambda data: form
    tag = form[0]
    if tag == "tensor":
        number, offset, dtype, shape, strides = form[1:]
        kind = _NUMPY_DTYPES.get(dtype)
        if strides or kind is None or number in met:
            return None
        met.add(number)
        at, sizes = start + offset, tuple(shape)
        return lambda data: torch.from_numpy(np.ndarray(sizes, kind, data, at))  # twice as fast as the general way
    if tag not in ("tuple", "list", "dict"):
        return None
    parts = [_quick_maker(part[1] if tag == "dict" else part, start, met) for part in form[1:]]
    makers = [maker for maker in parts if maker is not None]
    if len(makers) < len(parts):
        return None
    if tag == "tuple":
        return lambda data: tuple([make(data) for make in makers])
    if tag == "list":
        return lambda data: [make(data) for make in makers]
    keys = [key for key, _ in form[1:]]
    if any(type(key) is list for key in keys):
        return None
    return lambda data: {key: make(data) for key, make in zip(keys, makers, strict=True)}


def is_whole(data: Any, key: int = 0) -> bool:
    """Returns whether a record still has its checksum and belongs to this key."""
    if len(data) < _PREFIX.size:
        return False
    return bool(_PREFIX.unpack_from(data)[1] == zlib.crc32(memoryview(data)[_PREFIX.size :], _begin_of_checksum(key)))


def digest_of(examples: Iterable[Any]) -> bytes:
    """Returns a digest of the bytes of examples, as a cache would hold them."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        for part in encode(example).parts:
            digest.update(part)
    return digest.digest()


def _begin_of_checksum(key: int) -> int:
    return key % 2**32  # the checksum starts with this number, so the same bytes have another checksum under another key


# --- writing ----------------------------------------------------------------------------------------------------------


class _Buffers:
    """The buffers of a record that is being written, and the forms of the objects in them."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.size = 0
        self.count = 0
        self.forms: dict[int, tuple[Any, Any]] = {}  # id -> the object, kept so that its id is not used again, and its form
        self.containers: dict[int, Any] = {}  # id -> list or dict that was met

    def add(self, data: Any) -> int:
        """Adds a buffer; returns its offset."""
        offset, size = self.size, memoryview(data).nbytes
        self.parts.append(data)
        self.size = _aligned(offset + size)
        if gap := self.size - offset - size:
            self.parts.append(bytes(gap))
        return offset


def _form(value: Any, buffers: _Buffers) -> Any:
    """Returns a value in a form for JSON: a scalar as it is, anything else as a list that begins with a tag."""
    kind = type(value)
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


def _leaf_form(value: Any, buffers: _Buffers) -> list[Any] | None:
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


def _writer_of(value: Any) -> Callable[[Any, _Buffers], list[Any] | None] | None:
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


def _write_bytes(value: bytes, buffers: _Buffers) -> list[Any]:
    return ["bytes", buffers.add(value), len(value)]


def _write_tensor(tensor: torch.Tensor, buffers: _Buffers, attributes: int = 0) -> list[Any] | None:
    is_usual = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    if not is_usual or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or len(tensor.__dict__) > attributes:
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


def _write_tv_tensor(tensor: torch.Tensor, buffers: _Buffers) -> list[Any] | None:
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


def _write_array(array: Any, buffers: _Buffers) -> list[Any] | None:
    if array.dtype.hasobject or array.dtype.fields is not None or np.dtype(array.dtype.str) != array.dtype:
        return None
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    dense = np.asarray(array, order=order)  # type: ignore[call-overload]
    data = dense.reshape(-1, order=order).view(np.uint8) if dense.size else b""
    return ["array", buffers.add(data), array.dtype.str, list(array.shape), order]


def _write_scalar(value: Any, buffers: _Buffers) -> list[Any] | None:
    if value.dtype.hasobject or value.dtype.fields is not None or np.dtype(value.dtype.str) != value.dtype:
        return None
    data = value.tobytes()
    return ["scalar", buffers.add(data), len(data), value.dtype.str]


def _write_image(image: Any, buffers: _Buffers) -> list[Any] | None:
    if image.mode not in _IMAGE_MODES:
        return None
    try:
        info = _form(dict(image.info), buffers)
    except NotPlainError:
        return None
    if image.format is not None and type(image.format) is not str:
        return None
    image.load()
    palette = None
    if image.palette is not None:
        mode, colours = image.palette.getdata()
        palette = [mode, _form(bytes(colours), buffers)]
    data = image.tobytes()
    return ["image", buffers.add(data), len(data), image.mode, list(image.size), palette, info, image.format]


# --- reading ----------------------------------------------------------------------------------------------------------


class _Leaves:
    """The objects that are made from the buffers of a record. Each is made once."""

    __slots__ = ("_data", "_made", "_start")

    def __init__(self, data: bytearray, start: int) -> None:
        self._data, self._start = data, start
        self._made: dict[int, Any] = {}

    def get(self, form: Sequence[Any]) -> Any:
        """Returns the object of a form."""
        found = self._made.get(form[1])
        if found is None:
            found = self._made[form[1]] = _READERS[form[0]](self, self._start + form[2], *form[3:])
        return found

    def bytes_at(self, start: int, length: int) -> bytes:
        return bytes(memoryview(self._data)[start : start + length])

    def tensor(self, start: int, dtype: str, shape: list[int], strides: list[int]) -> torch.Tensor:
        if not strides and (kind := _NUMPY_DTYPES.get(dtype)) is not None:  # twice as fast as the general way
            return torch.from_numpy(np.ndarray(shape, kind, self._data, start))
        if 0 in shape:
            return torch.empty(shape, dtype=_DTYPES[dtype])
        flat = torch.frombuffer(self._data, dtype=_DTYPES[dtype], count=prod(shape), offset=start)
        return flat.as_strided(shape, strides) if strides else flat.view(shape)

    def tv_tensor(
        self, start: int, dtype: str, shape: list[int], strides: list[int], module: str, name: str, form: str | None, others: Any
    ) -> torch.Tensor:
        if not module.startswith(_TV_TENSORS):
            raise ValueError(f"a record with a tensor of {module}, which is not {_TV_TENSORS}")
        place = import_module(module)  # torchvision is installed, since the writer had it, but may not be imported here
        kind = getattr(place, name, None)
        if not isinstance(kind, type) or not issubclass(kind, torch.Tensor):
            raise ValueError(f"{module} has no {name}")
        found = self.tensor(start, dtype, shape, strides).as_subclass(kind)
        if form is not None:
            found.__dict__["format"] = import_module(_TV_TENSORS).BoundingBoxFormat[form]
        found.__dict__.update(_value(others, self))
        return found

    def array(self, start: int, dtype: str, shape: list[int], order: Any) -> Any:
        kind = np.dtype(dtype)
        if 0 in shape:
            return np.empty(shape, kind, order=order)
        return np.frombuffer(self._data, kind, prod(shape), start).reshape(shape, order=order)

    def scalar(self, start: int, length: int, dtype: str) -> Any:
        return np.frombuffer(self.bytes_at(start, length), np.dtype(dtype), 1)[0]

    def image(self, start: int, length: int, mode: str, size: list[int], palette: Any, info: Any, form: str | None) -> Any:
        image = import_module("PIL.Image").frombytes(mode, tuple(size), self.bytes_at(start, length))  # its writer had Pillow
        if palette is not None:
            image.palette = import_module("PIL.ImagePalette").raw(palette[0], self.get(palette[1]))
            image.load()
        image.info, image.format = _value(info, self), form
        return image


_READERS: dict[str, Callable[..., Any]] = {
    "bytes": _Leaves.bytes_at,
    "tensor": _Leaves.tensor,
    "tv_tensor": _Leaves.tv_tensor,
    "array": _Leaves.array,
    "scalar": _Leaves.scalar,
    "image": _Leaves.image,
}


def _value(form: list[Any], leaves: _Leaves) -> Any:
    """Returns the value of a form that is a list. A form that is no list is itself the value."""
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
    return leaves.get(form)


class _Pickler(pickle.Pickler):
    """Writes what is large into buffers."""

    def __init__(self, target: io.BytesIO, buffers: _Buffers) -> None:
        super().__init__(target, protocol=5)
        self._buffers = buffers

    def persistent_id(self, value: Any) -> Any:
        """Returns the form of an object that is kept in a buffer; None: pickle writes it."""
        return None if type(value) in _SCALARS else _leaf_form(value, self._buffers)

    def reducer_override(self, value: Any) -> Any:
        """Returns how a sparse tensor is made again.

        Torch's own way keeps each sparse tensor in a list until ``torch.load`` is called. Here that list would grow without end.
        """
        if type(value) is not torch.Tensor or value.__dict__ or value.requires_grad:
            return NotImplemented
        if value.layout is torch.sparse_coo:
            return _sparse_coo, (value._indices(), value._values(), tuple(value.shape), value.is_coalesced())
        if value.layout in (torch.sparse_csr, torch.sparse_bsr):
            return _sparse_compressed, (
                value.crow_indices(),
                value.col_indices(),
                value.values(),
                tuple(value.shape),
                value.layout,
            )
        if value.layout in (torch.sparse_csc, torch.sparse_bsc):
            return _sparse_compressed, (
                value.ccol_indices(),
                value.row_indices(),
                value.values(),
                tuple(value.shape),
                value.layout,
            )
        return NotImplemented


def _sparse_coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)


def _sparse_compressed(
    ends: torch.Tensor, places: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(ends, places, values, shape, layout=layout, check_invariants=False)


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, leaves: _Leaves) -> None:
        super().__init__(source)
        self._leaves = leaves

    def persistent_load(self, form: Any) -> Any:
        return self._leaves.get(form)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
