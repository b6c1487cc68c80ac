"""Values and memory as short texts: what is short stands there as it is, anything else as its size and a digest."""

from __future__ import annotations

import ctypes
import datetime
import decimal
import fractions
import hashlib
import marshal
import pathlib
import re
import uuid
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from lightning_echo.protecting.objects import is_from_pillow, is_image, is_mapped

__all__ = [
    "OPENED",
    "SIMPLE",
    "TRAINED",
    "Memory",
    "digest_of_texts",
    "short",
    "text_of_atom",
    "text_of_atoms",
    "text_of_generator",
]

OPENED = "open: "
"""Begins the text of what is only compared by its class, since it may be opened or made later."""

TRAINED = " that is trained"
"""Is in the text of a tensor that takes gradients."""

SIMPLE = (bool, int, float, complex, str, bytes, type(None))

_MOST_TEXT = 80  # characters
_DIGEST_BYTES = 8
_CHUNK = 2**16  # members that are digested at once
_BY_REPR = (
    range,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    uuid.UUID,
    type(...),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_OF_CTYPES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_WHOLE_BYTES = 256 * 2**20  # up to so many bytes all of a tensor or array is compared
_WHOLE_BYTES_QUICKLY = 16 * 2**20
_MAPPED_BYTES = 2**20  # the same for memory maps, which are read from a disk
_BLOCKS, _BLOCK_BYTES = 256, 2**20  # of what is larger
_BLOCKS_QUICKLY, _BLOCK_BYTES_QUICKLY = 256, 2**14
_BLOCKS_MAPPED, _BLOCK_BYTES_MAPPED = 64, 2**12
_ROWS = 256  # of what is larger and not contiguous
_MOST_CHOSEN_SEED = 2**32  # a larger one is drawn by the system


def short(text: str) -> str:
    """Returns a text that is at most about 100 characters long. Different texts stay different."""
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[: _MOST_TEXT // 2]}... ({len(text):,} characters, {_hex(text.encode('utf-8', 'surrogatepass'))})"


def digest_of_texts(texts: Iterable[str]) -> str:
    """Returns a digest of texts in their order."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def text_of_atom(value: Any) -> str | None:
    """Returns the text of a value without parts; None if it is none of the known types. It runs no code of the user's."""
    kind = type(value)
    if kind in SIMPLE:
        return short(repr(value)) if kind is not bytes or len(value) <= _MOST_TEXT else f"{len(value):,} bytes ({_hex(value)})"
    if kind in _BY_REPR:
        return short(repr(value))
    if issubclass(kind, datetime.datetime):  # also pandas's
        return short(datetime.datetime.isoformat(value))
    if issubclass(kind, pathlib.PurePath):
        return short(repr(pathlib.PurePath.__str__(value)))
    if kind is re.Pattern:
        return short(f"{value.pattern!r} ({value.flags})")
    if issubclass(kind, np.dtype):
        return short(repr(value))
    if issubclass(kind, np.generic):
        return f"{kind.__name__} {short(repr(value)) if kind is not np.void else _hex(value.tobytes())}"
    if issubclass(kind, _OF_CTYPES):
        return f"{kind.__name__} ({_hex(bytes(memoryview(value).cast('B')))})"
    return None


def text_of_generator(value: Any) -> str:
    """Returns the text of a random generator: its class, and the seed if somebody has chosen it."""
    kind = type(value)
    seed: Any = None
    if issubclass(kind, torch.Generator):
        seed = value.initial_seed()
    elif issubclass(kind, np.random.Generator):
        seed = getattr(value.bit_generator.seed_seq, "entropy", None)
    is_chosen = type(seed) is int and seed < _MOST_CHOSEN_SEED
    return f"{kind.__name__} of seed {seed}" if is_chosen else kind.__name__


def text_of_atoms(values: Sequence[Any]) -> str | None:
    """Returns a digest of many plain values, or of lists or tuples of them; None if there are others among them.

    It takes about 0.1 s for a million pairs. Strings that are equal give equal digests, whether or not they are one object.
    """
    kinds = set(map(type, values))
    if len(kinds) == 1 and issubclass(kind := kinds.pop(), np.generic) and not issubclass(kind, (np.void, np.object_)):
        array = np.array(values)
        return _hex(f"{array.dtype} {array.shape}".encode(), array.tobytes())
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for start in range(0, len(values), _CHUNK):
        chunk = list(values[start : start + _CHUNK])
        kinds = set(map(type, chunk))
        nested = kinds & {list, tuple}
        if not kinds <= {*SIMPLE, list, tuple}:
            return None
        if nested and not set(map(type, chain.from_iterable(one for one in chunk if type(one) in nested))) <= {*SIMPLE}:
            return None
        digest.update(marshal.dumps(chunk, 2))  # version 2 does not tell whether two members are one object
    return digest.hexdigest()


class Memory:
    """The texts of tensors, arrays and images.

    Args:
        quickly: Whether the content is compared by checksums, and by tensors' version counters, for two looks of one process.
    """

    def __init__(self, *, quickly: bool) -> None:
        self._quickly = quickly
        self._whole_bytes = _WHOLE_BYTES_QUICKLY if quickly else _WHOLE_BYTES
        self._left = 8 * self._whole_bytes  # beyond that, of each further object only blocks are compared

    def text(self, value: Any) -> str | None:
        """Returns the text of a tensor, an array or an image; None for other objects, and for arrays of objects."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return self._of_tensor(value)
        if issubclass(kind, np.ndarray):
            return None if value.dtype.hasobject else self._of_array(value)
        if kind in (bytearray, memoryview) or (kind.__module__, kind.__name__) == ("array", "array"):
            return f"{kind.__name__} ({self.digest(np.frombuffer(value, np.uint8))})"
        if is_image(value) and is_from_pillow(kind) and getattr(value, "fp", None) is None:
            return f"image {value.mode} {value.size} ({self.digest(np.frombuffer(value.tobytes(), np.uint8))})"
        return None

    def _of_tensor(self, value: torch.Tensor) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            trained, value = TRAINED if value.requires_grad else "", value.detach()
            what = f"tensor {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{trained}"
            if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
                version = f", version {value._version}" if self._quickly and not value.is_inference() else ""
                return f"{OPENED}{what} on {value.device}, {value.layout}{version}"
            if not value.numel():
                return what
            if self._quickly and not value.ndim and value.is_shared():  # type: ignore[no-untyped-call]
                return f"{what} in shared memory"  # a word that tells running workers something, as a stream's epoch does
            where = ""
            if self._quickly and not value.is_inference():
                where = f"version {value._version} at {value.data_ptr():x}, "
            value = self._rows(value.resolve_conj().resolve_neg(), value.is_contiguous()).contiguous()
            return f"{what} ({where}{self.digest(value.reshape(-1).view(torch.uint8).numpy())})"

    def _of_array(self, value: Any) -> str:
        what = f"array {short(str(value.dtype))} {value.shape}"
        if not value.size:
            return what
        mapped = is_mapped(value)
        value = np.ascontiguousarray(self._rows(np.asarray(value), value.flags.c_contiguous))
        return f"{what} ({self.digest(value.reshape(-1).view(np.uint8), is_mapped=mapped)})"

    def _rows(self, value: Any, is_contiguous: bool) -> Any:
        """Returns some rows of what is too large to be copied, or all of it."""
        is_small = is_contiguous or value.nbytes <= self._whole_bytes
        return value if is_small else value[:: len(value) // _ROWS + 1]

    def digest(self, data: Any, *, is_mapped: bool = False) -> str:
        """Returns a digest of bytes, or of blocks that are spread over them.

        Args:
            data: A flat array of bytes.
            is_mapped: Whether they are read from a disk.
        """
        whole = min(_MAPPED_BYTES if is_mapped else self._whole_bytes, max(self._left, 2**16))
        blocks = [data]
        if len(data) > whole:
            count, size = (_BLOCKS_QUICKLY, _BLOCK_BYTES_QUICKLY) if self._quickly else (_BLOCKS, _BLOCK_BYTES)
            if is_mapped or not self._left:
                count, size = _BLOCKS_MAPPED, _BLOCK_BYTES_MAPPED
            size = min(size, len(data) // count)
            blocks = [data[place * (len(data) - size) // (count - 1) :][:size] for place in range(count)]
        self._left = max(self._left - sum(map(len, blocks)), 0)
        if self._quickly:
            checksum = 0
            for block in blocks:
                checksum = zlib.crc32(block, checksum)
            found = f"{checksum:08x}"
        else:
            found = _hex(*blocks)
        return found if len(blocks) == 1 else f"{found} of {len(blocks)} blocks"


def _hex(*parts: Any) -> str:
    digest = hashlib.sha1(usedforsecurity=False)  # the fastest one of hashlib
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[: 2 * _DIGEST_BYTES]
