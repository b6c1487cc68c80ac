"""`CacheConfig`: how much is kept, of what, and where."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.protecting.memory import bytes_from_words

__all__ = ["HOLDS", "CacheConfig", "read_cache_config"]

HOLDS = ("auto", "raw", "loaded", "whole")
_LEAST_BYTES = 2**20
_EXPECTED = 'a string with a unit such as "8GiB", a share of the free memory such as 0.5, or a number of bytes'


@dataclass(frozen=True, kw_only=False)
class CacheConfig:
    """The options of a cache (CoorDL's MinIO cache: Mohan et al. 2021, arXiv 2007.06775, section 4.1).

    Args:
        size: What the cache may hold on each node. A string is a size with a unit (``"8GiB"``, ``"500MB"``, ``"1.5 GiB"``). A
            float between 0 and 1 is a share of the memory that is free when the cache is made. An integer is a number of bytes,
            at least one MiB.
        hold: What is held of an example. ``"raw"``: what was read, before decoding (as at ``after_read``). ``"loaded"``: the
            decoded example, before its augmentation (as at ``before_augmentation``). ``"whole"``: what ``__getitem__`` returns,
            if it returns the same each time. ``"auto"``: raw or loaded, whichever saves more time per byte.
        path: A folder on a local disk, which then holds the examples. None: they are held in memory.
        name: The cache is kept under this name in ``path`` after the job, and the next job uses it. It needs ``path``.
        partitioned: Whether the nodes of a job hold different examples and send them to each other. Together they then hold as
            much as all of them have room for. It cannot be combined with ``name``.
        ignore: Names of attributes of the data set and its transforms that decide no example, such as ``("log_dir",)``, or whole
            paths as a message names them. If one of the others differs, nothing that was held for other data is used.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: An option has an impossible value.

    Example:
        >>> CacheConfig("1.5 GiB").bytes_of(free_bytes=10**12)
        1610612736
        >>> CacheConfig(0.25).bytes_of(free_bytes=4_000_000_000)
        1000000000
    """

    size: int | float | str
    hold: str = "auto"
    path: str | None = None
    name: str | None = None
    partitioned: bool = False
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _checked_size(self.size))
        if self.hold not in HOLDS:
            raise ValueError(f"cache.hold must be one of {', '.join(map(repr, HOLDS))}, got {self.hold!r}")
        for option in ("path", "name"):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
                raise TypeError(f"cache.{option} must be a string or None, got {value!r}")
        if self.name is not None:
            if self.path is None:
                raise ValueError(f"cache.name={self.name!r} needs a folder on a local disk: give cache.path, too")
            if not re.fullmatch(r"[\w.-]{1,64}", self.name) or self.name.startswith("."):
                raise ValueError(
                    f"cache.name must be 1 to 64 letters, digits, '_', '-' or '.', not beginning with '.', got {self.name!r}"
                )
        if not isinstance(self.partitioned, bool):
            raise TypeError(f"cache.partitioned must be True or False, got {self.partitioned!r}")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise TypeError(f'cache.ignore must be names of attributes, such as ["log_dir"], got {self.ignore!r}')
        object.__setattr__(self, "ignore", tuple(self.ignore))
        if self.partitioned and self.name is not None:
            raise ValueError(
                f"cache.partitioned=True and cache.name={self.name!r} exclude each other: what a node keeps would be right for "
                "this number of nodes alone. Leave one of them out"
            )

    def bytes_of(self, free_bytes: int | None = None) -> int:
        """Returns the size in bytes.

        Args:
            free_bytes: Free memory in bytes, used if ``size`` is a share. None: the system is asked.

        Raises:
            ValueError: ``size`` is a share, and the system does not tell how much memory is free.
        """
        if isinstance(self.size, str):
            return _parsed(self.size)
        if isinstance(self.size, int):
            return self.size
        free = free_memory_bytes() if free_bytes is None else free_bytes
        if free is None:
            raise ValueError(
                f"cache.size={self.size!r} is a share of the free memory, which this system does not tell: give bytes"
            )
        return int(free * self.size)


def read_cache_config(value: Any) -> CacheConfig | None:
    """Returns the options of a cache, from any form in which users may give them; None for no cache.

    Args:
        value: A `CacheConfig`, a mapping of its fields (also OmegaConf's), a size, or None.

    Raises:
        TypeError: ``value`` is none of these, or a field has a wrong type.
        ValueError: A field is unknown, missing, or has an impossible value.
    """
    if value is None or isinstance(value, CacheConfig):
        return value
    if isinstance(value, Mapping):
        known = [field.name for field in fields(CacheConfig)]
        if unknown := [str(key) for key in value if key not in known]:
            raise ValueError(f"cache has unknown options {', '.join(unknown)}: known are {', '.join(known)}")
        if "size" not in value:
            raise ValueError('cache needs a size, such as "8GiB"')
        return CacheConfig(**{str(key): value[key] for key in value})
    return CacheConfig(value)


def _checked_size(size: Any) -> int | float | str:
    """Checks a size, and returns it as a plain value of Python, also if it is a number of numpy's."""
    if isinstance(size, str):
        _parsed(size)
        return size
    if isinstance(size, bool) or not isinstance(size, Real):
        raise TypeError(f"cache.size must be {_EXPECTED}, got {size!r}")
    if isinstance(size, Integral):
        plain = int(size)
        if plain < _LEAST_BYTES:
            meant = f': did you mean "{plain}GiB"?' if plain > 0 else ""
            raise ValueError(f"cache.size={plain} is less than one MiB (an integer is a number of bytes){meant}")
        return plain
    if not 0 < float(size) < 1:
        raise ValueError(f"cache.size as a share of the free memory must be between 0 and 1, got {size!r}; or give {_EXPECTED}")
    return float(size)


def _parsed(text: str) -> int:
    """Returns the bytes that a size with a unit stands for."""
    size = bytes_from_words(text)
    if size is None:
        raise ValueError(f"cache.size must be {_EXPECTED}, got {text!r}")
    if size < _LEAST_BYTES:
        raise ValueError(f"cache.size={text!r} is less than one MiB: a cache holds examples")
    return size
