"""`CacheConfig`, and a cache that is kept under a name: its file, and the proof that its contents are of the same data."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral, Real
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_echo.cache.arena import Arena, ArenaError, open_own
from lightning_echo.cache.record import decode, encode, owner_of
from lightning_echo.data.contents import full_name
from lightning_echo.data.copies import bytes_from_words
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.data.fingerprint import Fingerprint, changed_paths, fingerprint, glance
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.data.objects import in_words, is_of_lightning
from lightning_echo.split.describe import (
    Convention,
    CutLeaf,
    Description,
    Role,
    cut,
    data_sets_inside,
    describe,
    members_before_cut,
)
from lightning_echo.split.prove import Split
from lightning_echo.split.staged import AugmentedDataset, read_batch, sample_places

# ---------------------------------------------------------------------- cache config

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
            ValueError: ``size`` is a share, and the system does not report how much memory is free.
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
    """Returns the options of a cache, from a `CacheConfig`, a mapping of its fields (also OmegaConf's), a size, or None."""
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
        raise TypeError(f"cache.size must be {_EXPECTED}, got {in_words(size)}")
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
    size = bytes_from_words(text)
    if size is None:
        raise ValueError(f"cache.size must be {_EXPECTED}, got {text!r}")
    if size < _LEAST_BYTES:
        raise ValueError(f"cache.size={text!r} is less than one MiB: a cache holds examples")
    return size


# ---------------------------------------------------------------------- made from
# The objects that the records of a cache are made from. Two caches hold the same if the fingerprints of these are the same.
#
# * The data sets that read examples. One that only passes an index on (``Subset``, ``ConcatDataset``) does not count: the keys of
#   a cache are those of the data sets inside (reads.py).
# * Of a data set that holds transforms, those before the cut. The transforms after each lookup do not count, so that another
#   augmentation empties no cache. If a data set has the stages as methods, the code of ``augment`` (for raw items also that of
#   ``decode``) does not count, but all attributes do, since a method may use any of them.
# * The user's ``worker_init_fn``, if there is one.

HINT = "; cache.ignore leaves out what decides no example"
"""Follows a difference of two fingerprints in a message."""

PASSES_ON = (Role.subset, Role.concat)
_STEPS = {Role.subset: ".dataset", Role.concat: ".datasets[{}]", Role.named_cut: "._inner"}
_REDONE = {  # methods that run after the cut, and the attributes of a named cut that hold them
    Convention.protocol: (("augment",), ("_augment_one",)),
    Convention.read: (("load", "decode", "augment"), ("_decode_one", "_augment_one")),
}


class MadeFrom(NamedTuple):
    """The objects that records are made from."""

    parts: dict[str, Any]  # by name. The names begin the paths of a fingerprint
    ignore: tuple[str, ...]  # attributes and code that do not count, see `fingerprint`
    readers: tuple[Any, ...]  # the data sets that read, in the order of their keys

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.parts, self.ignore)


def made_from(dataset: Any, split: Split | None, ignore: Iterable[str] = (), worker_init_fn: Any = None) -> MadeFrom:
    """Returns what the records of a cache are made from. No example is read. ``split`` is None if whole examples are held.

    Example:
        >>> from torch.utils.data import Subset
        >>> one, other = (made_from(Subset(["a", "b", "c"], indices), None) for indices in ([0, 1], [0, 2]))
        >>> one.fingerprint() == other.fingerprint()
        True
    """
    where = None if split is None else cut(describe(dataset), split.conventions, raw=split.raw)
    description = describe(dataset) if where is None else where.description
    readers = {part.number: (each, part) for each, part in readers_in(dataset, description)}
    parts: dict[str, Any] = {}
    left_out = list(ignore)
    leaves = {} if where is None else {leaf.description.number: leaf for leaf in where.leaves}
    for place, (reader, described) in enumerate(readers.values()):
        name = "dataset" if len(readers) == 1 else f"dataset {place}"
        parts[name] = reader
        for path, each, leaf in _cuts(reader, described, name, leaves) if leaves else ():
            redone, transforms = _around_cut(path, each, leaf)
            left_out += redone
            parts.update(transforms)
    if worker_init_fn is not None and not is_of_lightning(worker_init_fn):
        parts["worker_init_fn"] = worker_init_fn
    return MadeFrom(parts, tuple(left_out), tuple(reader for reader, _ in readers.values()))


def readers_in(dataset: Any, description: Description) -> Iterator[tuple[Any, Description]]:
    """Yields the data sets that read examples. One that is there twice comes twice."""
    if description.role not in PASSES_ON:
        yield dataset, description
        return
    for part, described in zip(data_sets_inside(dataset, description.role), description.inside, strict=True):
        yield from readers_in(part, described)


def _cuts(
    dataset: Any, description: Description, path: str, leaves: dict[int, CutLeaf]
) -> Iterator[tuple[str, Any, CutLeaf | None]]:
    """Yields path, data set and cut of each leaf; and the same of each named cut around one, which has no cut of its own."""
    leaf = leaves.get(description.number)
    if leaf is not None or description.role is Role.named_cut:
        yield path, dataset, leaf
    inside = data_sets_inside(dataset, description.role) if leaf is None else ()
    for place, (part, described) in enumerate(zip(inside, description.inside, strict=False)):
        yield from _cuts(part, described, path + _STEPS[description.role].format(place), leaves)


def _around_cut(path: str, dataset: Any, leaf: CutLeaf | None) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of a data set's attributes and code that run after the cut, and its transforms before the cut."""
    if leaf is None:
        return [f"{path}._augment_one"], {}
    if leaf.convention in _REDONE:
        methods, held = _REDONE[leaf.convention]
        of_object = [f"{path}.{name}" for name in (held if isinstance(dataset, AugmentedDataset) else methods)]
        return of_object + [f"{full_name(base)}.{name}" for base in type.mro(type(dataset)) for name in methods], {}
    transforms = {}
    for chain in (leaf.image, leaf.target) if leaf.convention is not Convention.folder else ():
        if chain.path and (reused := members_before_cut(attrgetter(chain.path)(dataset))):
            transforms[f"{path}.{chain.path}"] = reused
    return [f"{path}.{chain.attribute}" for chain in leaf.description.chains], transforms


# ---------------------------------------------------------------------- own changes
# Changes that reading itself makes in a data set, such as a counter of reads, are not changes of the data. A validation that
# reads the same data set in the training's process makes them, too.

_MOST_SECONDS = 1.0  # no further example is read after that


def changed_by_reading(
    loader: DataLoader[Any],
    parts: Callable[[Any], Mapping[str, Any]],
    ignore: Iterable[str] = (),
    indices: Sequence[Any] | None = None,
) -> set[str]:
    """Reads up to eight examples in another process. Returns the paths in ``parts`` that have changed there."""
    found = read_elsewhere(loader, _changed, parts, tuple(ignore), indices)
    return set() if isinstance(found, NotRead) else found


def _changed(
    dataset: Any, parts: Callable[[Any], Mapping[str, Any]], ignore: tuple[str, ...], indices: Sequence[Any] | None
) -> set[str]:
    before, started = glance(parts(dataset), ignore), perf_counter()
    indices = range(len(dataset)) if indices is None else indices
    for place in sample_places(len(indices)):
        if perf_counter() - started > _MOST_SECONDS:
            break
        with suppress(Exception):  # the training will meet it or not
            read_batch(dataset, [indices[place]])
    return changed_paths(before, glance(parts(dataset), ignore))


# ---------------------------------------------------------------------- kept
# The file is ``<path>/<name>-<hold>-<digest>.cache``, where the digest is that of the fingerprint of all that decides what an
# example is (`made_from`). So a job with other labels, another data set or other transforms before the cut has another file, and
# each finds its own again. Besides the examples the file holds the fingerprint, so that the log can name the difference.
#
# A fingerprint does not cover the contents of the user's files. So examples are compared, too. The process that makes the file
# puts a few examples into it before the file appears. A process that opens the file reads up to eight of the held examples again,
# and compares (``loader_cache.py``).
#
# Several jobs may use the file concurrently. They fill it together. If several make the file concurrently, all use the file of
# the first.

_MOST_BYTES = 1000  # of a text in the file
_END, _DIGEST = ".cache", 16  # end of a file's name, and characters of the digest before it
_TRIES = 10  # to open or to make the file, while others make and remove it


class Contents(NamedTuple):
    """The contents of a file: classes and lengths of the data sets that read, the hold, and the names of all before the cut."""

    data_sets: str
    hold: str
    what: str

    @classmethod
    def of(cls, data_sets: Iterable[tuple[str, int]], hold: str, what: str) -> Contents:
        return cls(_short(", ".join(f"{name} of {length:,}" for name, length in data_sets)), hold, _short(what))

    def to_bytes(self) -> bytes:
        """Returns the contents as bytes for the file, at most about 2 KB."""
        return json.dumps(self._asdict(), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Contents:
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise ArenaError("the file was made by another version: remove it, or give another name") from error

    def difference(self, wanted: Contents) -> str:
        """Returns, in words, how these contents differ from the wanted ones; empty if they do not differ."""
        if self.data_sets != wanted.data_sets:
            return f"it was made of [{self.data_sets}], and the data set here is [{wanted.data_sets}]"
        if self.hold != wanted.hold or self.what != wanted.what:
            return f"it holds [{self.what}] ({self.hold}), and here [{wanted.what}] ({wanted.hold}) would be held"
        return ""


def file_of(config: CacheConfig, hold: str, made_from: Fingerprint) -> str:
    assert config.path is not None  # a name needs a path
    return os.path.join(config.path, f"{config.name}-{hold}-{made_from.digest()}{_END}")


def is_any_there(config: CacheConfig) -> bool:
    return config.name is not None and bool(glob.glob(f"{glob.escape(f'{config.path}/{config.name}')}-*{_END}"))


def why_another(path: str, made_from: Fingerprint) -> str:
    """Returns, for the log, why a file is made although there is one under its name; empty if there is none. It never fails."""
    others = glob.glob(glob.escape(path[: -_DIGEST - len(_END)]) + "?" * _DIGEST + _END)
    try:
        newest = max(others, key=os.path.getmtime)
        arena = Arena(open_own(newest))
        found = Fingerprint(**decode(arena.get(arena.keys - 1), trusted=False))
        return f"{newest} is of other data ({found.difference(made_from)}{HINT})"
    except (ValueError, TypeError, OSError, ArenaError):
        return ""


def open_kept(
    config: CacheConfig, path: str, keys: int, data: int, begin: Callable[[], tuple[Contents, dict[int, Any]]]
) -> tuple[Arena, Contents]:
    """Returns the arena that is kept under a name, and its contents. If there is none, it is made.

    It raises ``ValueError`` if the file cannot be used, and ``TypeError`` for an example of a type that cannot be kept. If the
    arena is made, ``begin`` returns its contents, and the first examples for it, by key. For ``data`` see `owner_of`.
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
            records = {key: parts_of(example, config.name, owner_of(data, key)) for key, example in examples.items()}
            try:
                return Arena.create_file(path, keys, config.bytes_of(), contents.to_bytes(), records), contents
            except FileExistsError:  # another job was quicker
                pass
    except ArenaError as error:
        raise ValueError(f"cache.name={config.name!r} cannot be used: {error} ({path})") from error
    except OSError as error:
        raise ValueError(f"cache.name={config.name!r} cannot be used: {error}") from error
    raise ValueError(
        f"cache.name={config.name!r} cannot be used: {path} is repeatedly created and deleted by another process; give this job "
        "a name of its own"
    )


def parts_of(example: Any, name: str | None, owner: int) -> Sequence[Any]:
    """Returns the parts of an example's record, see `encode`. ``name``: under which it is kept; None: not after the job."""
    record = encode(example, checksum=name is not None, owner=owner)
    if name is not None and not record.is_plain:
        raise TypeError(
            f"an example of type {type(example).__name__} cannot be kept under the name {name!r}: only None, numbers, strings, "
            "bytes, tuples, lists, dicts, tensors, arrays and images can be read again without running code. Leave cache.name out"
        )
    return record.parts


def _short(text: str) -> str:
    """Returns a text that is short enough for the file. Different texts stay different."""
    data = text.encode()
    if len(data) <= _MOST_BYTES:
        return text
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{data[: _MOST_BYTES - 100].decode(errors='ignore')}... ({digest})"
