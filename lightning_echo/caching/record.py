"""Records: an example as bytes, and an independent example made from such bytes.

::

    | header size | checksum, or whose |   header   |  buffer 0  |  buffer 1  | ...
       4 bytes            4 bytes                     each begins at a multiple of 16 bytes

The buffers contain the large parts of an example, as they lie in memory: tensors, arrays, images, bytes. The header says how the
example is made of them. There are two kinds of header:

* JSON, for examples that consist of a closed list of types: None, bool, int, float, str, bytes, tuple, list, dict, tensors on
  the CPU, torchvision's ``tv_tensors``, numpy arrays and scalars, PIL images. Reading it cannot run any code, so it may come
  from a file.
* pickle, for all other examples. Only the job that has written it may read it.

`decode` copies each buffer. So an edit in place cannot change the cache.

If one object is in an example twice, it is one object again after decoding (an example with the same list or dict twice is
pickled). Two tensors that are views of one memory become independent, as in a copy for an echo. Tensors and arrays keep their
strides if no two elements share memory and there are no gaps.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lightning_echo.caching.records.reading import Body, from_json, from_pickle
from lightning_echo.caching.records.writing import Buffers, NotPlainError, aligned, pickled, pickled_alike, plain_form
from lightning_echo.protecting.difference import difference

__all__ = ["ChangedError", "NotPlainError", "Record", "decode", "digest_of", "encode", "encode_plain", "is_whole", "owner_in"]

_PREFIX = struct.Struct("<II")
_SIZE = struct.Struct("<I")
_KEY = struct.Struct("<Q")
_JSON, _PICKLE = b"J", b"P"


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


class ChangedError(TypeError):
    """An example would not come out of a record as it is."""


def encode(example: Any, *, checksum: bool = False, owner: int = 0) -> Record:
    """Returns the record of an example.

    Args:
        example: What a data set returned. It must not change until the record is written.
        checksum: Whether the record gets a checksum, for `is_whole`. It is a CRC-32 of ``owner`` and of all bytes but its
            own. If not, ``owner`` stands in its place.
        owner: A number of 32 bits that says which example this is, of which data.

    Raises:
        ChangedError: `decode` would not return the same example. What pickle writes is tried, because a class decides itself what
            its pickle leaves out.
        Exception: What pickle raises for an example that it cannot write.

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
    """Returns the record of an example that any process may read.

    Raises:
        NotPlainError: Only pickle can write this example.
    """
    try:
        return _record(_JSON, example, plain_form, False, 0)
    except ChangedError as error:
        raise NotPlainError(str(error)) from error


def _record(kind: bytes, example: Any, write: Callable[[Any], tuple[bytes, Buffers]], checksum: bool, owner: int) -> Record:
    header, buffers = write(example)
    header = kind + header
    start = aligned(_PREFIX.size + len(header))
    parts = [header, bytes(start - _PREFIX.size - len(header)), *buffers.parts]
    crc = zlib.crc32(_SIZE.pack(len(header)), owner) if checksum else owner
    for part in parts if checksum else ():
        crc = zlib.crc32(part, crc)
    record = Record([_PREFIX.pack(len(header), crc), *parts], start + buffers.size, kind == _JSON)
    if not buffers.is_certain and (where := _change(example, record)) is not None:
        raise ChangedError(f"it would come out changed: {where}")
    return record


def _change(example: Any, record: Record) -> str | None:
    """Returns, in words, what is another one in what comes out of a record; None if it is the same."""
    try:
        return difference(example, decode(b"".join(record.parts)), exactly=True, takes_apart=True)
    except Exception as error:  # what the classes of the user's raise
        return f"{type(error).__name__}: {error}"


def decode(data: Any, *, trusted: bool = True, is_own: bool = False) -> Any:
    """Returns the example of a record, made from a copy of the record.

    Args:
        data: The bytes of the record: anything with a buffer.
        trusted: Whether this job has written the record. If not, a pickled record is refused.
        is_own: Whether ``data`` is a bytearray that only the caller uses. Then a part that takes most of it is not copied.

    Raises:
        ValueError: The record is pickled and not trusted.
    """
    view = memoryview(data)
    end = _PREFIX.unpack_from(view)[0] + _PREFIX.size
    kind, header = bytes(view[_PREFIX.size : _PREFIX.size + 1]), bytes(view[_PREFIX.size + 1 : end])
    body = Body(view, aligned(end), is_own=is_own)
    if kind == _JSON:
        return from_json(header, body)
    if not trusted:
        raise ValueError("the record is pickled, and may only be read by the job that has written it")
    return from_pickle(header, body)


def owner_of(data: int, key: int) -> int:
    """Returns the number of 32 bits by which a record says which example it is.

    Args:
        data: A number of 32 bits that stands for the data.
        key: The key of the example in that data.
    """
    return zlib.crc32(_KEY.pack(key), data)


def owner_in(data: Any) -> int:
    """Returns whose record this is, if it has no checksum."""
    number: int = _PREFIX.unpack_from(data)[1]
    return number


def is_whole(data: Any, owner: int = 0) -> bool:
    """Returns whether a record still has its checksum, and is the one of an example, see `encode`."""
    if len(data) < _PREFIX.size:
        return False
    begin = zlib.crc32(memoryview(data)[: _SIZE.size], owner)
    return bool(_PREFIX.unpack_from(data)[1] == zlib.crc32(memoryview(data)[_PREFIX.size :], begin))


def digest_of(examples: Iterable[Any]) -> bytes:
    """Returns a digest of examples. Equal examples have equal digests, in other processes, too.

    Raises:
        Exception: What pickle raises for an example that it cannot write.
    """
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        try:
            header, buffers = plain_form(example)
        except NotPlainError:
            header, buffers = pickled_alike(example)
        for part in (_SIZE.pack(len(header)), header, *buffers.parts):
            digest.update(part)
    return digest.digest()
