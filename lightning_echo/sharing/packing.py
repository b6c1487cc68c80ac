"""Examples as bytes in the window. An error of the data set may stand in the place of an example.

The bytes are records (``caching/record.py``) whose header is JSON. They can hold tensors, arrays, images, numbers, strings,
bytes, None, and dicts, lists and tuples of these. Named tuples, instances of dataclasses, and containers that are in an example
twice, are rewritten first.
Anything else is refused, and the message gives the path to it. Pickle could write it, but bytes from another process are never
unpickled here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple

from lightning_echo.caching.record import NotPlainError, decode, encode_plain

__all__ = ["END", "ERROR", "Packed", "SharedReadError", "pack", "pack_error", "unpack"]

PLAIN, REWRITTEN, ERROR, END = 0, 1, 2, 3  # kinds. The last one has no bytes and says that a pass has ended
_MOST_TEXT = 4000  # characters of an error's message
_NAMED, _TUPLE, _DATACLASS = "named", "tuple", "dataclass"  # tags of a tuple in a rewritten example


class Packed(NamedTuple):
    """An example as bytes.

    Attributes:
        kind: What the bytes are.
        parts: The bytes, in pieces that share memory with the example.
        size: Bytes of all pieces.
    """

    kind: int
    parts: Sequence[Any]
    size: int


class SharedReadError(RuntimeError):
    """The data set has raised an exception in the reader whose type is not one of Python's own."""


def pack(example: Any) -> Packed:
    """Returns an example as bytes.

    Raises:
        TypeError: A part of the example cannot be shared. The message says where it is.

    Example:
        >>> kind, parts, _ = pack({"image": [1.5, 2.0], "label": 7})
        >>> unpack(kind, bytearray(b"".join(map(bytes, parts))))
        {'image': [1.5, 2.0], 'label': 7}
    """
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
    """Returns the example of these bytes. The caller must not use the bytes afterwards.

    Raises:
        Exception: The data set has raised an exception in the reader. If its type is one of Python's own, this one has the same
            type. Otherwise it is a `SharedReadError`.
    """
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
    """Returns a copy of a value in which no container is there twice, and each tuple says which kind it is."""
    kind = type(value)
    if kind is dict:
        return {key: _rewritten(part, f"{path}[{key!r}]") for key, part in value.items()}
    if kind is list:
        return [_rewritten(part, f"{path}[{number}]") for number, part in enumerate(value)]
    if isinstance(value, tuple):
        fields = getattr(kind, "_fields", None)
        if kind is not tuple and (fields is None or not _is_found(kind)):
            raise _refused(value, path)
        parts = [
            _rewritten(part, f"{path}.{name}") for name, part in zip(fields or map(str, range(len(value))), value, strict=True)
        ]
        return (_TUPLE, *parts) if kind is tuple else (_NAMED, kind.__module__, kind.__qualname__, *parts)
    if is_dataclass(kind) and kind.__new__ is object.__new__ and _is_found(kind):
        held = {name: _rewritten(part, f"{path}.{name}") for name, part in _attributes_of(value).items()}
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
    if value[0] == _TUPLE:
        return tuple(map(_as_it_was, value[1:]))
    if value[0] == _DATACLASS:
        made: Any = object.__new__(_dataclass(value[1], value[2]))  # its own code does not run: the attributes are all that it is
        for name, part in value[3].items():
            object.__setattr__(made, name, _as_it_was(part))
        return made
    named = _named(value[1], value[2])
    return named(*map(_as_it_was, value[3:]))


def _attributes_of(instance: Any) -> dict[str, Any]:
    """Returns the attributes of an instance of a dataclass: its fields, also those in slots, and what else was set on it."""
    in_slots = {each.name: getattr(instance, each.name) for each in fields(instance) if hasattr(instance, each.name)}
    return {**getattr(instance, "__dict__", in_slots), **in_slots}


def _is_found(kind: type) -> bool:
    """Whether another process finds a class by its name."""
    return _look_up(kind.__module__, kind.__qualname__) is kind or kind.__module__ == "__main__"


def _named(module: str, name: str) -> Any:
    found = _look_up(module, name)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise TypeError(f"{module}.{name} is no named tuple in this training, but the reader's data set returns one of that name")
    return found


def _dataclass(module: str, name: str) -> type:
    found = _look_up(module, name)
    if not (isinstance(found, type) and is_dataclass(found) and found.__new__ is object.__new__):
        raise TypeError(
            f"{module}.{name} is not a dataclass in this training, but the reader's data set returns one of that name"
        )
    return found


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
