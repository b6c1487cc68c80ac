"""A cache that is kept under a name: its file, and what the file says that it holds.

The file is ``<path>/<name>.cache``. Beside the examples it says what they are: the classes and lengths of the data sets that read
them, and what is held of them (`Contents`). A job whose data set or transforms before the cut are others does not get it. Bytes
tell more than names: whoever makes the file puts a few examples into it before it appears, and whoever opens it reads up to
eight of those that are held once more, and compares (``loader_cache.py``).

Several jobs may have the file at once. They fill it together. The one that makes it first wins, and the others open that one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lightning_echo.caching.arena import Arena
from lightning_echo.caching.arena_file import ArenaError
from lightning_echo.caching.cache_config import CacheConfig
from lightning_echo.caching.record import encode

__all__ = ["Contents", "file_of", "open_kept", "refusal", "way_out"]

_MOST_BYTES = 1000  # of a text in the file
_TRIES = 10  # to open or to make the file, while others make and remove it


class Contents(NamedTuple):
    """What a file holds.

    Attributes:
        data_sets: Classes and lengths of the data sets that read the examples.
        hold: What is held of an example: ``"raw"``, ``"loaded"`` or ``"whole"``.
        what: The same in detail: the names of all that comes before the cut.
    """

    data_sets: str
    hold: str
    what: str

    @classmethod
    def of(cls, data_sets: Iterable[tuple[str, int]], hold: str, what: str) -> Contents:
        """Returns what a cache of these data sets would hold."""
        return cls(_short(", ".join(f"{name} of {length:,}" for name, length in data_sets)), hold, _short(what))

    def to_bytes(self) -> bytes:
        """Returns them for the file, at most about 2 KB."""
        return json.dumps(self._asdict(), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Contents:
        """Reads them from the file.

        Raises:
            ArenaError: They are those of something else.
        """
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise ArenaError("the file was made by another version: remove it, or give another name") from error

    def difference(self, wanted: Contents) -> str:
        """Returns in which way these are not what is wanted; empty if they are."""
        if self.data_sets != wanted.data_sets:
            return f"it was made of [{self.data_sets}], and the data set here is [{wanted.data_sets}]"
        if self.hold != wanted.hold or self.what != wanted.what:
            return f"it holds [{self.what}] ({self.hold}), and here [{wanted.what}] ({wanted.hold}) would be held"
        return ""


def file_of(config: CacheConfig) -> str:
    """Returns the path of the file."""
    assert config.path is not None  # a name needs a path
    return os.path.join(config.path, f"{config.name}.cache")


def way_out(config: CacheConfig) -> str:
    """Returns what the user can do if the file does not fit."""
    return f"Give another cache.name, or remove {file_of(config)} to begin anew"


def open_kept(config: CacheConfig, keys: int, begin: Callable[[], tuple[Contents, dict[int, Any]]]) -> tuple[Arena, Contents]:
    """Returns the arena that is kept under a name, and what it holds. If there is none, it is made.

    Args:
        config: The options.
        keys: Number of keys.
        begin: Is called if it is made. Returns what it is to hold, and a few examples by key, which it gets at once.

    Raises:
        ValueError: The file cannot be used.
        TypeError: An example consists of other types than those that may be kept.
    """
    path = file_of(config)
    try:
        for _ in range(_TRIES):
            try:
                arena = Arena.open_file(path)
            except FileNotFoundError:
                pass
            else:
                return arena, Contents.from_bytes(arena.note)
            contents, examples = begin()
            records = {key: _record(config, key, example) for key, example in examples.items()}
            try:
                return Arena.create_file(path, keys, config.bytes_of(), contents.to_bytes(), records), contents
            except FileExistsError:  # another job was quicker
                pass
    except ArenaError as error:
        raise ValueError(f"cache.name={config.name!r} cannot be used: {error} ({path})") from error
    except OSError as error:
        raise ValueError(f"cache.name={config.name!r} cannot be used: {error}") from error
    raise ValueError(f"cache.name={config.name!r} cannot be used: {path} comes and goes; give this job a name of its own")


def _record(config: CacheConfig, key: int, example: Any) -> Any:
    record = encode(example, checksum=True, key=key)
    if not record.is_plain:
        raise TypeError(refusal(example, config.name))
    return record.parts


def refusal(example: Any, name: str | None) -> str:
    """Returns why an example cannot be kept under a name."""
    return (
        f"an example of type {type(example).__name__} cannot be kept under the name {name!r}: only None, numbers, strings, "
        "bytes, tuples, lists, dicts, tensors, arrays and images can be read again without running code. Leave cache.name out"
    )


def _short(text: str) -> str:
    """Returns a text that fits into the file, and is another one for another text."""
    data = text.encode()
    if len(data) <= _MOST_BYTES:
        return text
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{data[: _MOST_BYTES - 100].decode(errors='ignore')}... ({digest})"
