"""A cache that is kept under a name: its file, and what the file says about its contents.

The file is ``<path>/<name>-<hold>-<digest>.cache``, where the digest is that of the fingerprint of all that decides what an
example is (``records/made_from.py``). So a job with other labels, another data set or other transforms before the cut has another
file, and each finds its own again. Beside the examples the file holds the fingerprint, so that the log can name the difference.

A fingerprint does not show what lies in the files of the user's. So examples are compared, too. The process that makes the file
puts a few examples into it before the file appears. A process that opens the file reads up to eight of the held examples again,
and compares (``loader_cache.py``).

Several jobs may use the file at the same time. They fill it together. If several make the file at the same time, all use the file
of the first.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lightning_echo.caching.arena import Arena
from lightning_echo.caching.arena_file import ArenaError, open_own
from lightning_echo.caching.cache_config import CacheConfig
from lightning_echo.caching.record import decode, encode, owner_of
from lightning_echo.caching.records.made_from import HINT
from lightning_echo.protecting.fingerprints.fingerprint import Fingerprint

__all__ = ["Contents", "file_of", "is_any_there", "open_kept", "refusal", "way_out", "why_another"]

_MOST_BYTES = 1000  # of a text in the file
_END, _DIGEST = ".cache", 16  # end of a file's name, and characters of the digest before it
_TRIES = 10  # to open or to make the file, while others make and remove it


class Contents(NamedTuple):
    """What a file holds.

    Attributes:
        data_sets: Classes and lengths of the data sets that read the examples.
        hold: What is held of an example: ``"raw"``, ``"loaded"`` or ``"whole"``.
        what: What is held, in detail: the names of everything that comes before the cut.
    """

    data_sets: str
    hold: str
    what: str

    @classmethod
    def of(cls, data_sets: Iterable[tuple[str, int]], hold: str, what: str) -> Contents:
        """Returns what a cache of these data sets would hold."""
        return cls(_short(", ".join(f"{name} of {length:,}" for name, length in data_sets)), hold, _short(what))

    def to_bytes(self) -> bytes:
        """Returns the contents as bytes for the file, at most about 2 KB."""
        return json.dumps(self._asdict(), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Contents:
        """Reads the contents from the bytes of a file.

        Raises:
            ArenaError: The bytes are something else.
        """
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise ArenaError("the file was made by another version: remove it, or give another name") from error

    def difference(self, wanted: Contents) -> str:
        """Returns, in words, how these contents differ from what is wanted; empty if they do not differ."""
        if self.data_sets != wanted.data_sets:
            return f"it was made of [{self.data_sets}], and the data set here is [{wanted.data_sets}]"
        if self.hold != wanted.hold or self.what != wanted.what:
            return f"it holds [{self.what}] ({self.hold}), and here [{wanted.what}] ({wanted.hold}) would be held"
        return ""


def file_of(config: CacheConfig, hold: str, made_from: Fingerprint) -> str:
    """Returns the path of the file.

    Args:
        config: The options.
        hold: What is held of an example.
        made_from: The fingerprint of what the examples are made from.
    """
    assert config.path is not None  # a name needs a path
    return os.path.join(config.path, f"{config.name}-{hold}-{made_from.digest()}{_END}")


def is_any_there(config: CacheConfig) -> bool:
    """Returns whether there is any file under the name."""
    return config.name is not None and bool(glob.glob(f"{glob.escape(f'{config.path}/{config.name}')}-*{_END}"))


def why_another(path: str, made_from: Fingerprint) -> str:
    """Returns, for the log, why a file is made although there is one under its name; empty if there is none. It never fails.

    Args:
        path: The path of the new file.
        made_from: The fingerprint of what its examples are made from.
    """
    others = glob.glob(glob.escape(path[: -_DIGEST - len(_END)]) + "?" * _DIGEST + _END)
    try:
        newest = max(others, key=os.path.getmtime)
        arena = Arena(open_own(newest))
        found = Fingerprint(**decode(arena.get(arena.keys - 1), trusted=False))
        return f"{newest} is of other data ({found.difference(made_from)}{HINT})"
    except (ValueError, TypeError, OSError, ArenaError):
        return ""


def way_out(config: CacheConfig, path: str) -> str:
    """Returns what the user can do if the file does not fit."""
    return f"Give another cache.name than {config.name!r}, or remove {path}"


def open_kept(
    config: CacheConfig, path: str, keys: int, data: int, begin: Callable[[], tuple[Contents, dict[int, Any]]]
) -> tuple[Arena, Contents]:
    """Returns the arena that is kept under a name, and what it holds. If there is none, it is made.

    Args:
        config: The options.
        path: The path of its file.
        keys: Number of keys.
        data: A number that stands for the data, see `encode`.
        begin: Called if the arena is made. It returns what the arena will hold, and the first examples for it, by key.

    Raises:
        ValueError: The file cannot be used.
        TypeError: An example contains a type that cannot be kept.
    """
    try:
        for _ in range(_TRIES):
            try:
                arena = Arena.open_file(path)
            except FileNotFoundError:
                pass
            else:
                return arena, Contents.from_bytes(arena.note)
            contents, examples = begin()
            records = {key: _record(config, owner_of(data, key), example) for key, example in examples.items()}
            try:
                return Arena.create_file(path, keys, config.bytes_of(), contents.to_bytes(), records), contents
            except FileExistsError:  # another job was quicker
                pass
    except ArenaError as error:
        raise ValueError(f"cache.name={config.name!r} cannot be used: {error} ({path})") from error
    except OSError as error:
        raise ValueError(f"cache.name={config.name!r} cannot be used: {error}") from error
    raise ValueError(f"cache.name={config.name!r} cannot be used: {path} comes and goes; give this job a name of its own")


def _record(config: CacheConfig, owner: int, example: Any) -> Any:
    record = encode(example, checksum=True, owner=owner)
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
    """Returns a text that is short enough for the file. Different texts stay different."""
    data = text.encode()
    if len(data) <= _MOST_BYTES:
        return text
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{data[: _MOST_BYTES - 100].decode(errors='ignore')}... ({digest})"
