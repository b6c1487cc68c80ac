"""Records: an example as bytes, and an independent example made from such bytes."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_echo.cache.arena import aligned
from lightning_echo.data.copies import copy_example
from lightning_echo.data.difference import difference
from lightning_echo.data.objects import is_from_pillow, is_image

# ---------------------------------------------------------------------- reading
# Each tensor, array and image gets memory of its own, so that the example does not keep more memory than it needs: a label that
# is kept does not keep the image of the same record.

_parsed = json.JSONDecoder().raw_decode  # `json.loads` also looks for the encoding and for blanks: it takes three times as long
_MOST_REMEMBERED = 1024  # bytes of a header whose maker is remembered: a long one is seldom met twice, and takes much memory
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NUMPY_DTYPES = {  # the types that torch and numpy both have
    f"torch.{name}": np.dtype(name)
    for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128", "bool")
}
_TV_TENSORS = "torchvision.tv_tensors"


class Body:
    """The buffers of a record, which begin at ``start``, and the objects that are made from them. Each is made once.

    ``is_own``: nobody else uses the memory of the record.
    """

    __slots__ = ("_is_own", "_made", "_record", "_start")

    def __init__(self, record: Any, start: int, is_own: bool) -> None:
        self._record, self._start, self._is_own = record, start, is_own
        self._made: dict[int, Any] | None = None

    def memory(self, at: int, size: int) -> Any:
        """Returns bytes in memory to write into. It is a copy, except for a part of one's own record that takes most of it."""
        begin = self._start + at
        part = memoryview(self._record)[begin : begin + size]
        return part if self._is_own and 2 * size > len(self._record) else bytearray(part)

    def bytes_at(self, at: int, size: int) -> bytes:
        begin = self._start + at
        return bytes(memoryview(self._record)[begin : begin + size])

    def dense(self, sizes: tuple[int, ...], kind: np.dtype[Any], at: int, size: int) -> torch.Tensor:
        """Returns a tensor of these bytes, see `memory`, in the quickest way."""
        if self._is_own and 2 * size > len(self._record):
            return torch.from_numpy(np.ndarray(sizes, kind, self._record, self._start + at))
        return torch.from_numpy(np.ndarray(sizes, kind, self.memory(at, size)))

    def get(self, form: Sequence[Any]) -> Any:
        if self._made is None:
            self._made = {}
        found = self._made.get(form[1])
        if found is None:
            found = self._made[form[1]] = _READERS[form[0]](self, *form[2:])
        return found

    def tensor(self, at: int, dtype: str, shape: list[int], strides: list[int]) -> torch.Tensor:
        if not strides and (kind := _NUMPY_DTYPES.get(dtype)) is not None:  # twice as fast as the general way
            return torch.from_numpy(np.ndarray(shape, kind, self.memory(at, kind.itemsize * prod(shape))))
        kept = _DTYPES[dtype]
        if 0 in shape:
            return torch.empty(shape, dtype=kept)
        flat = torch.frombuffer(self.memory(at, kept.itemsize * prod(shape)), dtype=kept, count=prod(shape))
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
        memory = self.memory(at, kind.itemsize * prod(shape))
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


def _maker(header: bytes) -> Callable[[Body], Any]:
    """Returns a function that makes the example of a record with this header of JSON. Raises ``ValueError`` for another text."""
    form, parsed = _parsed(decoded := header[len(_JSON) :].decode())
    if parsed != len(decoded):
        raise ValueError(f"the header of a record ends after {parsed} of {len(decoded)} characters")
    return _quick_maker(form, set()) or (lambda body: _value(form, body))


_remembered_maker = lru_cache(maxsize=1024)(_maker)  # similar examples often have equal headers


def _quick_maker(form: Any, met: set[int]) -> Callable[[Body], Any] | None:
    """Returns such a function for an example of scalars and dense tensors, which is twice as fast as `_value`; None for others.

    ``met``: numbers of the tensors that were met before. A tensor that is in an example twice is one object.
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
        return lambda body: body.dense(sizes, kind, at, size)
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


_READERS: dict[str, Callable[..., Any]] = {
    "bytes": Body.bytes_at,
    "tensor": Body.tensor,
    "tv_tensor": Body.tv_tensor,
    "array": Body.array,
    "scalar": Body.scalar,
    "image": Body.image,
}


def _value(form: list[Any], body: Body) -> Any:
    """Returns the value of a form that is a list. A form that is not a list is the value itself."""
    tag = form[0]
    if tag == "tuple":
        return tuple([_value(part, body) if type(part) is list else part for part in form[1:]])
    if tag == "dict":
        return {
            _value(key, body) if type(key) is list else key: _value(part, body) if type(part) is list else part
            for key, part in form[1:]
        }
    if tag == "list":
        return [_value(part, body) if type(part) is list else part for part in form[1:]]
    if tag == "text":
        return "".join(form[1:])
    if tag == "nan":
        return struct.unpack("<d", struct.pack("<Q", form[1]))[0]
    return body.get(form)


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, body: Body) -> None:
        super().__init__(source)
        self._body = body

    def persistent_load(self, form: Any) -> Any:
        return self._body.get(form)


# --- functions in pickles ---------------------------------------------------------------------------------------------


def made_image(
    mode: str, size: tuple[int, int], data: bytes, palette: tuple[str, bytes] | None, info: dict[Any, Any], form: str | None
) -> Any:
    image = import_module("PIL.Image").frombytes(mode, size, data)  # its writer had Pillow
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info, image.format = info, form
    return image


def made_sparse(
    parts: tuple[torch.Tensor, ...], shape: tuple[int, ...], form: dict[str, Any], has_gradient: bool, attributes: dict[str, Any]
) -> torch.Tensor:
    """Returns a sparse tensor. ``form``: whether it is coalesced, or the layout in which it is compressed."""
    make: Callable[..., torch.Tensor] = torch.sparse_compressed_tensor if "layout" in form else torch.sparse_coo_tensor
    made = make(*parts, shape, **form, check_invariants=False)
    made.__dict__.update(attributes)
    return made.requires_grad_() if has_gradient else made


# ---------------------------------------------------------------------- record
# ::
#
#     | header size | checksum, or whose |   header   |  buffer 0  |  buffer 1  | ...
#        4 bytes            4 bytes                     each begins at a multiple of 16 bytes
#
# The buffers contain the large parts of an example, as they lie in memory: tensors, arrays, images, bytes. The header defines how
# the example is made of them. There are two kinds of header:
#
# * JSON, for examples that consist of a closed list of types: None, bool, int, float, str, bytes, tuple, list, dict, tensors on
#   the CPU, torchvision's ``tv_tensors``, numpy arrays and scalars, PIL images. Reading it cannot run any code, so it may come
#   from a file.
# * pickle, for all other examples. Only the job that has written it may read it.
#
# `decode` copies each buffer. So an edit in place cannot change the cache.
#
# If one object is in an example twice, it is one object again after decoding (an example with the same list or dict twice is
# pickled). Two tensors that are views of one memory become independent, as in a copy for an echo. Tensors and arrays keep their
# strides if no two elements share memory and there are no gaps.

_PREFIX = struct.Struct("<II")
_SIZE = struct.Struct("<I")
_KEY = struct.Struct("<Q")
_JSON, _PICKLE = b"J", b"P"


class Record(NamedTuple):
    """An example as bytes, in pieces that are written one after the other. They share memory with the example."""

    parts: Sequence[Any]
    size: int
    is_plain: bool  # whether the header is JSON, so that the record may be kept in a file


class ChangedError(TypeError):
    """An example would not come out of a record as it is."""


def encode(example: Any, *, checksum: bool = False, owner: int = 0) -> Record:
    """Returns the record of an example, which must not change until the record is written.

    It raises `ChangedError` if `decode` would not return the same example, and any error of pickle. The output of pickle is
    tried, because a class decides itself what its pickle leaves out. ``owner`` is a number of 32 bits that names the example and
    its data. The record has it, or a ``checksum`` for `is_whole`: a CRC-32 of ``owner`` and of all bytes but its own.

    Example:
        >>> import torch
        >>> record = encode({"image": torch.arange(6).reshape(2, 3), "label": 7})
        >>> decode(b"".join(record.parts))
        {'image': tensor([[0, 1, 2],
                [3, 4, 5]]), 'label': 7}
    """
    try:
        return _record(_JSON, example, plain_form, checksum, owner)
    except (NotPlainError, ChangedError):
        return _record(_PICKLE, example, pickled, checksum, owner)


def encode_plain(example: Any) -> Record:
    """Returns the record of an example that any process may read. Raises `NotPlainError` if only pickle can write it."""
    try:
        return _record(_JSON, example, plain_form, False, 0)
    except ChangedError as error:
        raise NotPlainError(str(error)) from error


def _record(kind: bytes, example: Any, write: Callable[[Any], tuple[bytes, Buffers]], checksum: bool, owner: int) -> Record:
    header, buffers = write(example)
    header = kind + header
    start = aligned(_PREFIX.size + len(header), _ALIGNMENT)
    parts = [header, bytes(start - _PREFIX.size - len(header)), *buffers.parts]
    crc = zlib.crc32(_SIZE.pack(len(header)), owner) if checksum else owner
    for part in parts if checksum else ():
        crc = zlib.crc32(part, crc)
    record = Record([_PREFIX.pack(len(header), crc), *parts], start + buffers.size, kind == _JSON)
    if buffers.is_certain:
        return record
    try:
        where = difference(example, decode(b"".join(record.parts)), exactly=True, takes_apart=True)
    except Exception as error:  # any error of the user's classes
        where = f"{type(error).__name__}: {error}"
    if where is not None:
        raise ChangedError(f"it would come out changed: {where}")
    return record


def decode(data: Any, *, trusted: bool = True, is_own: bool = False) -> Any:
    """Returns the example of a record (anything with a buffer), made from a copy of the record.

    A pickled record is refused unless it is ``trusted``: this job has written it. If only the caller uses ``data``, a bytearray
    (``is_own``), then a part that takes most of it is not copied.
    """
    end = _SIZE.unpack_from(data)[0] + _PREFIX.size
    header, body = bytes(data[_PREFIX.size : end]), Body(data, -(-end // _ALIGNMENT) * _ALIGNMENT, is_own)
    if header.startswith(_JSON):
        make = _remembered_maker if len(header) <= _MOST_REMEMBERED else _maker
        return make(header)(body)
    if not trusted:
        raise ValueError("the record is pickled, and may only be read by the job that has written it")
    return _Unpickler(io.BytesIO(header[len(_PICKLE) :]), body).load()


def owner_of(data: int, key: int) -> int:
    """Returns the number of 32 bits by which a record names its data (a number of 32 bits, too) and its key."""
    return zlib.crc32(_KEY.pack(key), data)


def owner_in(data: Any) -> int:
    """Returns the owner of a record that has no checksum."""
    number: int = _PREFIX.unpack_from(data)[1]
    return number


def is_whole(data: Any, owner: int = 0) -> bool:
    """Returns whether a record still has its checksum, and is the one of an example, see `encode`."""
    if len(data) < _PREFIX.size:
        return False
    begin = zlib.crc32(memoryview(data)[: _SIZE.size], owner)
    return bool(_PREFIX.unpack_from(data)[1] == zlib.crc32(memoryview(data)[_PREFIX.size :], begin))


def digest_of(examples: Iterable[Any]) -> bytes:
    """Returns a digest of examples. Equal examples have equal digests, in other processes, too."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        try:
            header, buffers = plain_form(example)
        except NotPlainError:
            header, buffers = pickled_alike(example)
        for part in (_SIZE.pack(len(header)), header, *buffers.parts):
            digest.update(part)
    return digest.digest()


# ---------------------------------------------------------------------- writing
# A decoded example must be the same to the bit. The JSON forms here guarantee that. The output of pickle must be tried
# (`pickled_alike`), because a class decides itself what its pickle leaves out.

_ALIGNMENT = 16
_SCALARS = (type(None), bool, int, float, str)
_IMAGE_MODES = {"1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX"}
_IMAGE_MODES |= {"I;16", "I;16L", "I;16B"}
_has_names = getattr(torch.Tensor, "has_names", lambda tensor: False)  # new versions of torch have no named tensors
_WITHIN_PAIR = re.compile("(?<=[\ud800-\udbff])(?=[\udc00-\udfff])")  # JSON would make one character of two surrogates


class NotPlainError(TypeError):
    """An example contains a type that only pickle can write."""


class Buffers:
    """The buffers of a record that is being written, and the forms of the objects in them."""

    def __init__(self) -> None:
        self.parts: list[Any] = []  # they share memory with the example
        self.size = 0
        self.is_certain = True  # that the decoded example will be the same
        self.count = 0
        self.forms: dict[int, tuple[Any, Any]] = {}  # id -> the object, kept so that its id is not used again, and its form
        self.containers: dict[int, Any] = {}  # id -> list or dict that was met

    def add(self, data: Any) -> int:
        offset, size = self.size, memoryview(data).nbytes
        self.parts.append(data)
        self.size = aligned(offset + size, _ALIGNMENT)
        if gap := self.size - offset - size:
            self.parts.append(bytes(gap))
        return offset


def plain_form(example: Any) -> tuple[bytes, Buffers]:
    """Returns an example as JSON and buffers. Raises `NotPlainError` if only pickle can write it."""
    buffers = Buffers()
    try:
        return json.dumps(_form(example, buffers), separators=(",", ":")).encode(), buffers
    except ValueError as error:  # an integer of more than 4,300 digits
        raise NotPlainError(f"an example with a number that JSON cannot write can only be pickled ({error})") from error


def pickled(example: Any) -> tuple[bytes, Buffers]:
    buffers, target = Buffers(), io.BytesIO()
    buffers.is_certain = False
    _Pickler(target, buffers).dump(example)
    return target.getvalue(), buffers


def pickled_alike(example: Any) -> tuple[bytes, Buffers]:
    """Returns an example as bytes for a comparison. Equal examples give equal bytes, in other processes, too."""
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
    if kind is float and value != value:  # JSON writes only one NaN; the others differ in sign and payload
        bits = struct.pack("<d", value)
        return value if bits == struct.pack("<d", math.nan) else ["nan", struct.unpack("<Q", bits)[0]]
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


def _leaf_form(value: Any, buffers: Buffers) -> list[Any] | None:
    """Returns the form of an object that is kept in a buffer (tag, number, and what its class needs); None for other objects."""
    if (known := buffers.forms.get(id(value))) is not None:
        form: list[Any] = known[1]
        return form
    kind = type(value)
    rest: list[Any] | None = None
    if kind is torch.Tensor:
        rest = _write_tensor(value, buffers)
    elif kind is np.ndarray:
        rest = _write_array(value, buffers)
    elif kind is bytes:
        rest = ["bytes", buffers.add(value), len(value)]
    elif isinstance(value, np.generic):
        rest = _write_scalar(value, buffers)
    elif isinstance(value, torch.Tensor) and kind.__module__.startswith(_TV_TENSORS):
        rest = _write_tv_tensor(value, buffers)
    elif is_image(value) and is_from_pillow(kind):
        rest = _write_image(value, buffers)
    if rest is None:
        return None
    form = [rest[0], buffers.count, *rest[1:]]
    buffers.count += 1
    buffers.forms[id(value)] = value, form
    return form


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
    """Returns whether the name of a numpy type describes it completely."""
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
    """Writes large objects into buffers."""

    def __init__(self, target: io.BytesIO, buffers: Buffers) -> None:
        super().__init__(target, protocol=5)
        self._buffers = buffers

    def persistent_id(self, value: Any) -> Any:
        """Returns the form of an object that is kept in a buffer; None: pickle writes it."""
        return None if type(value) in _SCALARS else _leaf_form(value, self._buffers)

    def reducer_override(self, value: Any) -> Any:
        """Returns how an object is made again, if its own way would lose or keep too much."""
        if isinstance(value, torch.Tensor):
            # Torch keeps each sparse tensor in a list until ``torch.load`` is called. Here that list would grow without end.
            if type(value) is torch.Tensor and value.layout in _SPARSE:
                return _reduced_sparse(value)
            # Torch writes all memory that a tensor is a part of.
            return copy_example(value).__reduce_ex__(5) if _is_part_of_more(value) else NotImplemented
        if is_image(value) and is_from_pillow(type(value)):
            palette = _palette_of(value)  # Pillow drops its transparency
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
    shape, rest = tuple(value.shape), (value.requires_grad, dict(value.__dict__))
    value = value.detach()
    if value.layout is torch.sparse_coo:
        return made_sparse, ((value._indices(), value._values()), shape, {"is_coalesced": value.is_coalesced()}, *rest)
    by_rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends, places = (value.crow_indices(), value.col_indices()) if by_rows else (value.ccol_indices(), value.row_indices())
    return made_sparse, ((ends, places, value.values()), shape, {"layout": value.layout}, *rest)


def _is_part_of_more(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has only a part of the memory that belongs to it."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    except RuntimeError:  # it has no memory of its own
        return False
