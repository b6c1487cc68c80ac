"""`CachedDataset`: a map-style data set with a cache, for any ``DataLoader``: validation, prediction, other frameworks.

Each example is bit by bit what the data set inside returns, even if that draws random numbers. The stages before the cut draw
none. The stages after the cut draw the same numbers after a lookup as after a read. A read is watched (`WatchedStages`), and this
moves the global random states. So they are put back before the example is finished.

The constructor opens the cache in the process that calls it. The processes that get the data set from this one have the same
cache: workers, forked or spawned, ranks that are started with it, and tasks of a process pool. If it is pickled (in a checkpoint)
and loaded after that process has ended, its examples are read, and nothing is kept. The ranks do not agree on anything, because
one rank may make a data set that the others do not make. So if each rank makes its own `CachedDataset`, each has its own cache.
If the cache has a name, these ranks use its file together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo.caching.cache_config import CacheConfig, read_cache_config
from lightning_echo.caching.cached_reads import CachedReads, Caching
from lightning_echo.caching.example_store import ExampleStore
from lightning_echo.caching.loader_cache import LoaderCache
from lightning_echo.caching.node_cache import CacheCounts, NodeCache
from lightning_echo.log import LOGGER
from lightning_echo.protecting.generators import TRANSFORMS
from lightning_echo.splitting.describe import Description, data_sets_inside, describe
from lightning_echo.splitting.staged import StagedDataset
from lightning_echo.splitting.stages import uncut_stages

__all__ = ["CachedDataset"]


@dataclass(frozen=True)
class _Opened:
    """The cache, as this process has it. Copies of the data set have the same one: an arena is never copied."""

    caching: Caching
    node: NodeCache


class CachedDataset(StagedDataset):
    """A map-style data set with a cache: an example that the cache holds is not read again, only augmented.

    It returns what ``dataset[index]`` returns, for any ``DataLoader`` of map-style data: with and without workers, forked or
    spawned. The cache never replaces an example. If you edit a returned example, the cache does not change.

    The stages before the cut (reading, decoding, resizing) must give the same each time and draw no random numbers. This is
    proved on a few examples, watched in each read, and checked again at the 1st, 10th, 100th ... hit of a process. The stages
    after the cut run for each use.

    Use it for validation, prediction and frameworks other than Lightning. For the loader of a training, use
    ``EchoLoader(loader, factor=1, cache=...)``: the ranks of a node share its cache. An ``EchoLoader`` over a ``CachedDataset``
    works, too, and echoes what is held.

    * In a job of several ranks, each rank that makes a ``CachedDataset`` has a cache of its own, of the full size. With a
      ``path`` and a ``name`` in `CacheConfig`, the ranks of a node use one file together.
    * All attributes are read from the data set inside, and set there. You may replace a transform that comes after the cut: each
      process uses the new one from its next read on. Do not change what comes before the cut.
    * Read it from only one thread of a process, because all threads of a process have the same global random states.

    Args:
        dataset: A map-style data set with a length.
        cache: A `CacheConfig`, a mapping of its fields, or its size, such as ``"8GiB"``.

    Raises:
        TypeError: ``dataset`` is no map-style data set with a length.
        ValueError: ``dataset`` is empty, no part of its examples can be held, or the cache cannot be made as ``cache`` says.

    Example:
        >>> squares = StagedDataset.of([number * number for number in range(10)], augment=float)
        >>> cached = CachedDataset(squares, "1MiB")
        >>> [cached[3], cached[3], cached[3]], cached.cache_counts.hits, cached.cache_counts.misses
        ([9.0, 9.0, 9.0], 2, 1)
    """

    # The only attributes of its own. Their names must not hide an attribute of the data set inside.
    _OWN = ("_cached_inside", "_cached_by")

    def __init__(self, dataset: Dataset[Any], cache: CacheConfig | Mapping[str, Any] | str | float | int) -> None:
        config = read_cache_config(cache)
        if config is None:
            raise TypeError('CachedDataset: cache must be a size such as "8GiB", a CacheConfig or a mapping, got None')
        if config.partitioned:
            raise ValueError(
                "CachedDataset: cache.partitioned=True needs to know which examples other nodes will ask for, as an EchoLoader "
                "does: leave it out, or use EchoLoader, EchoDataModule or EchoCallback"
            )
        _check(dataset)
        opening = LoaderCache(config, dataset, None, None, uncut_stages, differs_in_workers=False)
        if message := opening.open(together=False):
            warnings.warn(f"lightning_echo: {message}", UserWarning, stacklevel=2)
        if line := opening.describe():
            LOGGER.info("%s", line)
        self.__dict__.update(_cached_inside=dataset, _cached_by=_Opened(opening.caching(), opening.of_node))

    @property
    def cache_counts(self) -> CacheCounts:
        """What the cache holds, and the hits and misses of all processes that use it."""
        counts: CacheCounts = self._cached_by.node.counts
        return counts

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        indices = list(indices)
        finish = self._looked_up(indices).stages.load
        return list(map(finish, indices))

    def __len__(self) -> int:
        return len(self._cached_inside)

    def load(self, index: Any) -> Any:
        """Returns the pair of ``index`` and what the cache holds of its example. An ``EchoLoader`` reuses this pair."""
        return index, self._looked_up([index]).take()

    def augment(self, example: Any) -> Any:
        """Returns what ``dataset[index]`` returns, made from what `load` returned."""
        return _reads_of(self).finish(*example)

    def _looked_up(self, indices: list[Any]) -> CachedReads:
        reads, counted = _reads_of(self), self._cached_by.node
        before = reads.lookups
        reads.look_up(indices, are_fresh=True)
        now = reads.lookups
        counted.add_lookups(now.hits - before.hits, now.misses - before.misses)
        if note := reads.take_note():
            warnings.warn(f"lightning_echo: {note}", UserWarning, stacklevel=3)
        return reads

    def __getattr__(self, name: str) -> Any:
        # Its own attributes are missing only while it is being unpickled. Special methods of the data set inside know no cache.
        if name in self._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._cached_inside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cached_inside, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _check(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, CachedDataset):
        raise TypeError("CachedDataset: the data set is a CachedDataset already: give that one the size")
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"CachedDataset: {name} is a stream, whose examples have no index under which they could be found again. Copy it to "
            "a local disk, or echo it: EchoLoader(loader, factor)"
        )
    if isinstance(dataset, DataLoader):
        raise TypeError("CachedDataset: give it the data set of the loader, and make a DataLoader over the CachedDataset")
    if not hasattr(type(dataset), "__getitem__") or not hasattr(type(dataset), "__len__"):
        raise TypeError(f"CachedDataset: dataset must be map-style, with __getitem__ and __len__, got {name}")
    if not len(dataset):
        raise ValueError(f"CachedDataset: {name} has no example")


# ---------------------------------------------------------------------- the reads of this process


class _Reads(CachedReads):
    """The reads of a data set in this process. When a transform of the data set is replaced, they are made anew."""

    def __init__(self, caching: Caching, dataset: Any) -> None:
        store = ExampleStore(caching.store.arena, caching.store.name, caching.store.data)  # so that the first hit is audited
        super().__init__(replace(caching, store=store), dataset, uncut_stages(dataset), preserves=True)
        self._inside, self._description = dataset, describe(dataset)
        self._transforms = list(_transforms_in(dataset, self._description))

    def are_of_now(self) -> bool:
        """Returns whether the data set still has the transforms that these reads were made with."""
        found = _transforms_in(self._inside, self._description)
        return all(now is then for now, then in zip(found, self._transforms, strict=True))


_reads: WeakKeyDictionary[CachedDataset, _Reads] = WeakKeyDictionary()  # beside the data sets: copies must not share them


def _reads_of(cached: CachedDataset) -> _Reads:
    found = _reads.get(cached)
    if found is None or not found.are_of_now():
        found = _reads[cached] = _Reads(cached._cached_by.caching, cached._cached_inside)
    return found


def _transforms_in(dataset: Any, description: Description) -> Iterator[Any]:
    attributes = getattr(dataset, "__dict__", {})
    yield from (attributes.get(name) for name in TRANSFORMS)
    for part, described in zip(data_sets_inside(dataset, description.role), description.inside, strict=True):
        yield from _transforms_in(part, described)
