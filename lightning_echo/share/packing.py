"""Examples as bytes: one by one for the window, and several in one array for another machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from lightning_echo.cache.record import NotPlainError, decode, encode_plain

# ---------------------------------------------------------------------- packing
# Examples are bytes in the window, as records (``cache/record.py``) whose header is JSON. They can hold tensors, arrays, images,
# numbers, strings, bytes, None, and dicts, lists and tuples of these. Named tuples, instances of dataclasses, and containers that
# are in an example twice, are rewritten first. Anything else is refused, and the message gives the path to it. Pickle could write
# it, but bytes from another process are never unpickled here. An error of the data set may stand in the place of an example.

PLAIN, REWRITTEN, ERROR, END = 0, 1, 2, 3  # kinds. The last one has no bytes and marks the end of a pass
HELD = 0x40  # added to the kind of an example that the reader's cache held
_MOST_TEXT = 4000  # characters of an error's message
_NAMED, _TUPLE, _DATACLASS = "named", "tuple", "dataclass"  # tags of a tuple in a rewritten example
_OF_THAT_NAME = "in this training, but the reader's data set returns one of that name"


class Packed(NamedTuple):
    """An example as bytes, in pieces that share memory with the example. ``size`` is that of all pieces, in bytes."""

    kind: int
    parts: Sequence[Any]
    size: int


class SharedReadError(RuntimeError):
    """The data set has raised an exception in the reader whose type is not one of Python's own."""


def pack(example: Any) -> Packed:
    """Returns an example as bytes. Raises a TypeError with the path of a part that cannot be shared."""
    try:
        record, kind = encode_plain(example), PLAIN
    except NotPlainError:
        record, kind = encode_plain(_rewritten(example, "example")), REWRITTEN
    return Packed(kind, record.parts, record.size)


def pack_error(error: Exception) -> Packed:
    """Returns an exception as bytes: its type, its message and its notes."""
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    message = f"{error}{notes}"[:_MOST_TEXT]
    kind = type(error)
    record = encode_plain({"module": kind.__module__, "name": kind.__qualname__, "message": message})
    return Packed(ERROR, record.parts, record.size)


def unpack(kind: int, data: bytearray) -> Any:
    """Returns the example of these bytes, which the caller must not use afterwards, or raises the data set's own error."""
    found = decode(data, trusted=False, is_own=True)
    if kind == ERROR:
        raise _error_of(found)
    return found if kind == PLAIN else _as_it_was(found)


def _error_of(found: dict[str, str]) -> Exception:
    known = getattr(import_module("builtins"), found["name"], None) if found["module"] == "builtins" else None
    if isinstance(known, type) and issubclass(known, Exception) and known is not StopIteration:
        try:
            return known(found["message"])
        except TypeError:  # UnicodeDecodeError and others need more arguments than a message
            pass
    return SharedReadError(f"{found['module']}.{found['name']}: {found['message']}")


# --- values for which a record has no form --------------------------------------------------------------------------------


def _rewritten(value: Any, path: str) -> Any:
    """Returns a copy of a value in which no container is there twice, and each tuple has a tag for its kind."""
    kind = type(value)
    if kind is dict:
        return {key: _rewritten(part, f"{path}[{key!r}]") for key, part in value.items()}
    if kind is list:
        return [_rewritten(part, f"{path}[{number}]") for number, part in enumerate(value)]
    if isinstance(value, tuple):
        names = getattr(kind, "_fields", None)
        if kind is not tuple and (names is None or not _is_found(kind)):
            raise _refused(value, path)
        parts = [
            _rewritten(part, f"{path}.{name}") for name, part in zip(names or map(str, range(len(value))), value, strict=True)
        ]
        return (_TUPLE, *parts) if kind is tuple else (_NAMED, kind.__module__, kind.__qualname__, *parts)
    if is_dataclass(kind) and kind.__new__ is object.__new__ and _is_found(kind):
        # its fields, also those in slots, and other attributes that were set on it
        in_slots = {each.name: getattr(value, each.name) for each in fields(kind) if hasattr(value, each.name)}
        attributes = {**getattr(value, "__dict__", in_slots), **in_slots}
        held = {name: _rewritten(part, f"{path}.{name}") for name, part in attributes.items()}
        return (_DATACLASS, kind.__module__, kind.__qualname__, held)
    try:
        encode_plain(value)
    except NotPlainError:
        raise _refused(value, path) from None
    return value


def _as_it_was(value: Any) -> Any:
    """Undoes `_rewritten`."""
    kind = type(value)
    if kind is dict:
        return {key: _as_it_was(part) for key, part in value.items()}
    if kind is list:
        return [_as_it_was(part) for part in value]
    if kind is not tuple:
        return value
    tag = value[0]
    if tag == _TUPLE:
        return tuple(map(_as_it_was, value[1:]))
    module, name = value[1:3]
    found = _look_up(module, name)
    if tag == _NAMED:
        if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
            raise TypeError(f"{module}.{name} is not a named tuple {_OF_THAT_NAME}")
        return found(*map(_as_it_was, value[3:]))
    if not (isinstance(found, type) and is_dataclass(found) and found.__new__ is object.__new__):
        raise TypeError(f"{module}.{name} is not a dataclass {_OF_THAT_NAME}")
    made: Any = object.__new__(found)  # its own code does not run: it has only its attributes
    for attribute, part in value[3].items():
        object.__setattr__(made, attribute, _as_it_was(part))
    return made


def _is_found(kind: type) -> bool:
    """Whether another process finds a class by its name."""
    return _look_up(kind.__module__, kind.__qualname__) is kind or kind.__module__ == "__main__"


def _look_up(module: str, name: str) -> Any:
    """Returns the object of this name in a module that was imported before; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _refused(value: Any, path: str) -> TypeError:
    kind = type(value)
    return TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be shared: only None, numbers, strings, bytes, tensors "
        "on the CPU, numpy arrays, PIL images, tv_tensors, and dicts, lists, tuples, named tuples and dataclasses of these can. "
        "Let the data set return one of these, and make the rest of it in collate_fn"
    )


# ---------------------------------------------------------------------- chunk
# Packed examples that follow each other, as one array of bytes, which machines send to each other. The numbers come last, so
# that the bytes can be written before their sizes are known::
#
#     | bytes of each | kind and size of each | first item | how many | nanoseconds, processor nanoseconds per example |

_FOOTER = 4  # numbers
_NUMBER_BYTES = 8
_KIND_SHIFT = 56
_MOST_SIZE = 2**_KIND_SHIFT - 1


class ChunkError(ValueError):
    """An array is not a chunk."""


class Piece(NamedTuple):
    """A packed example: its bytes, and their kind, below 256."""

    kind: int
    data: Any


class Chunk(NamedTuple):
    """Examples that follow each other in the reader's stream, from item ``first`` on; empty if there are none yet."""

    first: int
    pieces: Sequence[Piece]
    nanoseconds: int = 0  # the reader's time between two examples
    cpu_nanoseconds: int = 0  # its processor time for one

    def to_array(self) -> Any:
        """Returns the chunk as one array of bytes."""
        writer = ChunkWriter()
        for kind, data in self.pieces:
            writer.add(kind, [data], len(data))
        return writer.array(self.first, self.nanoseconds, self.cpu_nanoseconds)

    @classmethod
    def from_array(cls, array: Any) -> Chunk:
        """Returns the chunk of an array. The bytes are not copied: they are views of the array. Raises a `ChunkError`."""
        flat: Any = np.ascontiguousarray(array, np.uint8)
        view = memoryview(flat).toreadonly()
        least = _FOOTER * _NUMBER_BYTES
        if len(view) < least:
            raise ChunkError(f"a chunk has {least} bytes or more, got {len(view)}")
        first, count, nanoseconds, cpu = np.frombuffer(view[-least:], np.uint64).tolist()
        end = len(view) - least - count * _NUMBER_BYTES
        if end < 0:
            raise ChunkError(
                f"a chunk of {count:,} examples has {least + count * _NUMBER_BYTES:,} bytes or more, got {len(view):,}"
            )
        at, pieces = 0, list[Piece]()
        for word in np.frombuffer(view[end : len(view) - least], np.uint64).tolist():
            size = word & _MOST_SIZE
            pieces.append(Piece(word >> _KIND_SHIFT, view[at : at + size]))
            at += size
        if at != end:
            raise ChunkError(f"a chunk says that its examples have {at:,} bytes, and they have {end:,}")
        return cls(first, pieces, nanoseconds, cpu)


class ChunkWriter:
    """Writes examples into one array. Its memory is used again: an array is only valid until the next `begin`."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self.begin()

    def begin(self) -> None:
        self._words, self._size = list[int](), 0

    def add(self, kind: int, parts: Sequence[Any], size: int) -> None:
        """Adds an example of ``size`` bytes, in pieces."""
        at, self._size = self._size, self._size + size
        self._reserve(self._size)
        with memoryview(self._memory) as memory:
            for part in parts:
                with memoryview(part) as view:
                    memory[at : at + view.nbytes] = view.cast("B")
                    at += view.nbytes
        self._words.append(kind << _KIND_SHIFT | size)

    def array(self, first: int, nanoseconds: int, cpu_nanoseconds: int) -> Any:
        """Returns what was added as an array. See `Chunk`."""
        numbers = np.array([*self._words, first, len(self._words), nanoseconds, cpu_nanoseconds], np.uint64).tobytes()
        size = self._size + len(numbers)
        self._reserve(size)
        self._memory[self._size : size] = numbers
        return np.frombuffer(self._memory, np.uint8, size)

    def _reserve(self, size: int) -> None:
        if size > len(self._memory):
            self._memory = self._memory.ljust(2 * size, b"\0")  # another one: an array may refer to the one before
