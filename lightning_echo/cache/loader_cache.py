"""`LoaderCache`: the cache of one loader. `CachedDataset`: the same for any ``DataLoader``."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo.cache.exchange import Part, Partitioned, Rounds, join
from lightning_echo.cache.holding import Hold, find_holds, holds_found, quickest, read_held
from lightning_echo.cache.kept import (
    HINT,
    CacheConfig,
    Contents,
    MadeFrom,
    changed_by_reading,
    file_of,
    is_any_there,
    made_from,
    read_cache_config,
    why_another,
)
from lightning_echo.cache.node_cache import (
    CacheCounts,
    Identity,
    NodeCache,
    difference_from_rank_0,
    gathered,
    is_distributed,
    nodes_of,
    open_together,
    place_of_process,
)
from lightning_echo.cache.reads import BESIDE, CachedReads, Caching, ExampleStore, Keys
from lightning_echo.cache.record import digest_of
from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.difference import difference
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.data.fingerprint import Changes, Fingerprint
from lightning_echo.data.randomness import TRANSFORMS
from lightning_echo.log import LOGGER
from lightning_echo.split.check import WHOLE
from lightning_echo.split.describe import Description, SplitRefused, data_sets_inside, describe
from lightning_echo.split.prove import Split
from lightning_echo.split.staged import StagedDataset, Stages, sample_places, uncut_stages

# ---------------------------------------------------------------------- loader cache
# Workers start and end, and a reload makes new loaders, but the examples stay. When the loader starts its workers:
#
# 1. The ranks of a node find out whether they have the same data set, and open one cache together (``node_cache.py``).
# 2. After a reload, the old cache stays in use if the new data set has the examples that it holds. Their fingerprint
#    (``kept.py``) and up to eight of them are compared.
# 3. The workers get what they need for their reads (`Caching`).

_MOST_SEARCHED = 100_000  # keys: so many are searched for examples that are held
_WEIGHED = 8  # examples that were read before the start to estimate how much room one takes
_FAR_MORE = 1.5  # times the estimate, from which on it is reported
_MAY_CHANGE = "a worker_init_fn may change them: leave it out, or leave partitioned out"
_NOT_PARTITIONED = "cache.partitioned=True changes nothing here, since {}: each node has a cache of its own"


class LoaderCache:
    """The cache of one loader: its options, its hold, and, from the first start on, the cache of the node.

    ``indices``, ``split`` and ``make_stages`` are as in `find_holds`. ``differs_in_workers``: the user's ``worker_init_fn`` may
    change the data set, so that the workers must find out whether they all have the same one. Examples are read in the kind of
    process that the ``loader`` has (None: one without workers). If no ``holds`` are given, they are found out here.

    It raises ``ValueError`` if nothing can be held of this data set, the ``hold`` of the options is not possible, there is not
    enough memory, or no example can be read, and `NoKeysError` if the examples cannot be told apart by numbers.
    """

    def __init__(
        self,
        config: CacheConfig,
        dataset: Any,
        indices: Sequence[Any] | None,
        split: Split | None,
        make_stages: Callable[[Any], Stages],
        *,
        differs_in_workers: bool,
        loader: DataLoader[Any] | None = None,
        holds: Sequence[Hold] | None = None,
    ) -> None:
        self._config, self._dataset, self._given_indices, self._make_stages = config, dataset, indices, make_stages
        self._differs_in_workers = differs_in_workers
        self._loader = DataLoader(dataset) if loader is None else loader
        Keys(dataset)
        NodeCache.check(config, is_there=is_any_there(config))
        if holds is None:
            holds = holds_found(
                read_elsewhere(self._loader, find_holds, indices, split, config.hold, make_stages, config.bytes_of())
            )
        self._holds = {hold.name: hold for hold in holds}
        self._opened: NodeCache | None = None
        self._readers: tuple[Any, ...] = ()  # the data sets whose examples it holds
        self._fingerprint = Fingerprint({}, {})  # of what its records are made from
        self._changes = Changes(dict)
        self._partitioned: Partitioned | None = None
        self._message = self._path = self._why = ""  # about the file that was opened, its path, why it is a new one
        self._has_said = False

    @property
    def _indices(self) -> Sequence[Any]:
        return range(len(self._dataset)) if self._given_indices is None else self._given_indices

    @property
    def cut(self) -> Split | None:
        """Where an example is cut whose first part is held; None: whole examples are held."""
        return self._hold.split

    # ------------------------------------------------------------------ opening

    def follow(self, before: LoaderCache) -> None:
        """Takes the place of another loader's cache. Its examples stay, if they fit."""
        self._opened, self._partitioned = before._opened, before._partitioned
        self._readers, self._fingerprint, self._changes = before._readers, before._fingerprint, before._changes
        self._changes.watch(self._watched)

    def forget(self, change: str = "") -> str:
        """Forgets all examples, because the data has changed. `open` then makes another cache. Returns a message for the user."""
        self._opened = self._partitioned = None
        return self._begin_again(f"the data set has changed{change and f' ({change})'}")

    def _begin_again(self, why: str) -> str:
        if (name := self._config.name) is None:
            return f"{why}: the cache is emptied"
        self._config = replace(self._config, name=None)
        return f"{why}: the cache {name!r} is kept as it was, and this run continues with a cache of its own"

    def change(self) -> str:
        """Returns the change of the data since the cache was opened, in words; empty if it is another data set, see `open`."""
        if self._opened is None or self._opened.hold not in self._holds:
            return ""
        if not self._has_same_readers(self._made_from(None).readers):
            return ""
        try:
            return self._changes.look().data
        except SplitRefused as refused:
            return refused.reason

    def note_own(self) -> None:
        """Notes what reading itself changes. Call it when the first batch is there."""
        self._changes.note_own()

    def _has_same_readers(self, readers: Sequence[Any]) -> bool:
        return len(readers) == len(self._readers) and all(map(operator.is_, readers, self._readers))

    def _watched(self) -> dict[str, Any]:
        return self._made_from(self._hold).parts

    def _made_from(self, hold: Hold | None) -> MadeFrom:
        prepare = self._loader.worker_init_fn if self._differs_in_workers else None
        return made_from(self._dataset, None if hold is None else hold.split, self._config.ignore, prepare)

    def open(self, part: Part | None = None, *, together: bool = True) -> str:
        """Opens the cache of the node, unless it is open. Returns a message for the user; empty if there is none.

        If the ranks of a node share the cache (``together``), all ranks must call this together. ``part`` is this rank's
        description for the others, if the cache may be partitioned. It raises ``ValueError`` without room or a usable path, if
        the file of this data holds other examples, or if the nodes cannot be joined; ``TypeError`` if an example cannot be kept
        under a name; and ``RuntimeError`` if another rank could not make the cache.
        """
        self._message, keys = "", Keys(self._dataset).count
        readers, before, lost = self._made_from(None).readers, self._opened, ""
        is_same = before is not None and before.hold in self._holds and self._has_same_readers(readers)
        if before is not None and is_same and before.keys == keys:
            return ""
        if before is not None and (different := self._difference(before, keys)):
            before, lost = None, self._begin_again(f"the data set has changed ({different})")
        if together and is_distributed():
            identity, difference = self._identity(keys)
            if self._config.partitioned and part is not None:
                opened, message = self._open_partitioned(identity, difference, part, before)
            else:
                opened, message = open_together(identity, lambda: self._make(keys), before, difference)
        else:
            opened = before or self._make(keys)
            message = _NOT_PARTITIONED.format("there is one process") if self._config.partitioned else ""
        self._opened, self._readers = opened, readers
        # Note what the records are made from, to see later whether that has changed.
        source, own = self._made_from(self._hold), self._changes.own
        if opened is not before:  # else the records are made from what was noted then
            self._fingerprint, own = source.fingerprint(), set()
        self._changes = Changes(self._watched, ignore=source.ignore, by_reading=partial(self._own_of_reading, self._hold))
        self._changes.own |= own
        self._changes.begin()
        if opened is not before and self._hold.example_bytes > opened.counts.size:
            lost = lost or (
                f"the cache of {bytes_in_words(opened.counts.size)} holds nothing: an example takes "
                f"{bytes_in_words(self._hold.example_bytes)}. Give it a larger size"
            )
        return "; ".join(filter(None, (lost, message, self._message)))

    def _open_partitioned(
        self, identity: Identity, difference: str, part: Part, before: NodeCache | None
    ) -> tuple[NodeCache, str]:
        """Opens the cache of the node, and joins it with those of the other nodes. Returns it, and a message for the user."""
        config, keys = self._config, Keys(self._dataset)
        sizes = gathered((place_of_process(), config.bytes_of()))
        nodes = nodes_of([place for place, _ in sizes])
        of_job = sum(sizes[nodes.index(node)][1] for node in range(max(nodes) + 1))
        # All nodes must use the same hold, although each may have measured another one as the best.
        name = gathered(self._quickest(of_job).name if torch.distributed.get_rank() == 0 else "")[0]
        opened, message = open_together(identity, lambda: self._make(keys.count, self._holds[name]), before, difference)
        size, own = self._holds[opened.hold].example_bytes, bool(message)
        joined = join(opened, keys, identity, part, size, difference=difference, has_own_cache=own, before=self._partitioned)
        self._partitioned = joined
        is_said = joined is None and torch.distributed.get_rank() == 0
        return opened, message or (_NOT_PARTITIONED.format("the job has one node") if is_said else "")

    def _make(self, keys: int, hold: Hold | None = None) -> NodeCache:
        """Makes or opens the cache of this node. ``hold`` is the one to use; None: the quickest, or that of the kept cache."""
        if self._config.name is not None:
            return self._open_kept(keys)
        hold = hold or self._quickest()
        cache = NodeCache.make(self._config, hold.name, keys, number_of(self._made_from(hold).fingerprint()))
        if cache.is_limited:
            self._message = (
                f"the cache has {bytes_in_words(cache.counts.size)} and not cache.size={self._config.size!r}, since this process "
                "may write no larger file: raise that limit (ulimit -f)"
            )
        return cache

    def _quickest(self, size: int | None = None) -> Hold:
        return quickest(list(self._holds.values()), len(self._indices), size or self._config.bytes_of())

    def _read(self, hold: Hold, indices: Sequence[Any]) -> list[Any] | NotRead:
        read = read_elsewhere(self._loader, read_held, hold, self._make_stages, indices)
        return read if isinstance(read, NotRead) else list(read[0])

    # ------------------------------------------------------------------ under a name

    def _open_kept(self, keys: int) -> NodeCache:
        """Returns the cache that is kept under the name, of this data. If there is none, it is made."""
        config, first = self._config, self._quickest()
        made_from = {hold.name: self._made_from(hold).fingerprint() for hold in self._holds.values()}
        paths = {name: file_of(config, name, each) for name, each in made_from.items()}
        there = [name for name in (first.name, *paths) if os.path.exists(paths[name])]
        hold = self._holds[there[0]] if there else first
        of_hold, self._path = made_from[hold.name], paths[hold.name]
        self._why = "" if there else why_another(self._path, of_hold)
        cache, found = NodeCache.make_kept(
            config, self._path, keys, number_of(of_hold), lambda: self._begin_kept(hold, keys, of_hold)
        )
        wanted = Contents.of(Keys(self._dataset).parts, hold.name, hold.what)
        different = found.difference(wanted) or ("" if self._differs_in_workers else self._first_difference(cache))
        if different:
            raise ValueError(
                f"{self._path} is kept for something else: {different}. Give another cache.name than {config.name!r}, or "
                f"remove {self._path}"
            )
        if self._differs_in_workers and cache.counts.examples and not self._some_held(cache):
            self._message = (
                f"{self._path} holds none of the examples that are read here, and worker_init_fn may change them, so that none "
                "can be compared: this run has a cache of its own"
            )
            self._config = replace(config, name=None)
            return self._make(keys, hold)
        size = cache.counts.size
        if size != config.bytes_of() and not isinstance(config.size, float):
            self._message = (
                f"cache.size={config.size!r} is not used: the cache {config.name!r} was made with {bytes_in_words(size)}. To "
                f"change that, remove {self._path}"
            )
        return cache

    def _begin_kept(self, hold: Hold, keys: int, made_from: Fingerprint) -> tuple[Contents, dict[int, Any]]:
        """Returns the contents of a new file, a few examples for the next process to compare, and behind them the fingerprint."""
        key_of, indices = Keys(self._dataset).of, self._indices
        at = [] if self._differs_in_workers else [indices[place] for place in sample_places(len(indices))]
        read = self._read(hold, at)
        if isinstance(read, NotRead):
            raise ValueError(f"cache.name={self._config.name!r}: no example can be read for a later comparison: {read.reason}")
        examples = {key_of(index): example for index, example in zip(at, read, strict=True) if example is not WHOLE}
        kept = {key: example for key, example in examples.items() if key is not None}
        contents = Contents.of(Keys(self._dataset).parts, hold.name, hold.what)
        return contents, {**kept, keys + BESIDE - 1: made_from._asdict()}

    # ------------------------------------------------------------------ is it the same data set?

    def _identity(self, keys: int) -> tuple[Identity, str]:
        """Returns what identifies this rank's data set, and how it differs from that of rank 0. All ranks call it together."""
        hold, samples, why_none = list(self._holds.values())[-1], None, _MAY_CHANGE
        made_from = self._made_from(hold).fingerprint()
        if len(set(gathered(made_from.digest()))) > 1:  # perhaps only by what reading itself changes on each rank
            made_from = made_from.without(set().union(*gathered(self._changes.own | self._own_of_reading(hold))))
        if not self._differs_in_workers:
            indices = self._indices
            read = self._read(hold, [indices[place] for place in sample_places(len(indices))])
            if isinstance(read, NotRead):
                why_none = f"its examples could not be read: {read.reason}"
            else:
                try:
                    samples, why_none = digest_of(read), ""
                except Exception as error:  # whatever pickle raises for a class of the user's
                    why_none = f"its examples cannot be written down: {error}"
        identity = Identity(type(self._dataset).__qualname__, keys, samples, made_from.digest(), why_none)
        return identity, difference_from_rank_0(made_from)

    def _difference(self, before: NodeCache, keys: int) -> str:
        """Returns, in words, how the data set differs from that of a cache; empty if it does not."""
        if before.keys != keys:
            return f"{before.keys:,} examples, and now {keys:,}"
        if (hold := self._holds.get(before.hold)) is None:
            return f"{before.hold!r} examples are held, and now {' or '.join(map(repr, self._holds))} can be"
        now = self._made_from(hold).fingerprint()
        if difference := self._fingerprint.difference(now, self._changes.own):
            difference = self._fingerprint.difference(now, self._changes.own | self._own_of_reading(hold))
        if difference:
            return f"{difference}{HINT}"
        return self._first_difference(before)

    def _own_of_reading(self, hold: Hold) -> set[str]:
        """Returns the paths of what reading itself changes in the data set, such as a counter of reads."""
        ignore = self._made_from(hold).ignore
        return changed_by_reading(self._loader, partial(_parts_of, split=hold.split), ignore, self._given_indices)

    def _first_difference(self, cache: NodeCache) -> str:
        """Returns, in words, the first difference between the data set and a cache. Only some examples are compared."""
        store, chosen = cache.store(), self._some_held(cache)
        read = self._read(self._holds[cache.hold], [index for index, _ in chosen]) if chosen else []
        if isinstance(read, NotRead):
            return f"its examples cannot be compared: {read.reason}"
        for (index, key), example in zip(chosen, read, strict=True):
            if (where := difference(store.get(key), example, takes_apart=True)) is not None:
                return f"example {index!r} was another one when it was put there ({where})"
        return ""

    def _some_held(self, cache: NodeCache) -> list[tuple[Any, int]]:
        """Returns index and key of some examples that a cache holds, spread over the data."""
        indices, key_of, held = self._indices, Keys(self._dataset).of, []
        for index in indices[:: max(len(indices) // _MOST_SEARCHED, 1)]:
            key = key_of(index)
            if key is not None and key in cache.arena:
                held.append((index, key))
        return [held[place] for place in sample_places(len(held))]

    # ------------------------------------------------------------------ once it is open

    @property
    def _hold(self) -> Hold:
        assert self._opened is not None
        return self._holds[self._opened.hold]

    def begin_rounds(self) -> Rounds | None:
        """Begins to exchange examples with other nodes, for a pipeline that starts next; None if the cache is not partitioned."""
        return None if self._partitioned is None else self._partitioned.begin()

    def caching(self, rounds: Rounds | None = None) -> Caching:
        cache, check_at = self.of_node, []
        if self._differs_in_workers:  # the workers compare their data sets: of a kept cache at what it holds
            held = [] if self._config.name is None else self._some_held(cache)
            check_at = [index for index, _ in held] or [self._indices[place] for place in sample_places(len(self._indices))]
        others = None if rounds is None else rounds.others
        return Caching(cache.store(), self._hold.make, check_at, others, cache.tally)

    @property
    def of_node(self) -> NodeCache:
        assert self._opened is not None
        return self._opened

    @property
    def counts(self) -> CacheCounts:
        """The contents of the cache, and the lookups so far."""
        if self._opened is not None:
            counts = self._opened.counts
            if self._partitioned is None:
                return counts
            counted = self._partitioned.board.counted._asdict()
            return replace(counts, **counted, nodes=len(self._partitioned.capacities))
        return CacheCounts(0, 0, 0, 0, is_full=False, hold=self._config.hold, size=self._config.bytes_of())

    @property
    def memory_to_come(self) -> int:
        """Bytes of free memory that the cache may still take; 0 if the cache is on a disk."""
        if self._config.path is not None:
            return 0
        counts = self.counts
        return 0 if counts.is_full else max(counts.size - counts.bytes, 0)

    @property
    def not_held(self) -> int | None:
        """About how many examples will not be in memory in the form that the insertion point reuses; None if not known."""
        if self._opened is None or self._config.path is not None or not self._hold.is_of_point:
            return None  # it is not open yet, is on a disk, or holds another form
        counts = self._opened.counts
        held = counts.examples if counts.is_full else counts.size // self._example_bytes
        return max(self._opened.keys - held, 0)

    @property
    def _example_bytes(self) -> int:
        """Bytes that an example takes: the mean of the held ones, if these are more than those of the estimate."""
        assert self._opened is not None
        counts = self._opened.counts
        return counts.bytes // counts.examples if counts.examples > _WEIGHED else self._hold.example_bytes

    @property
    def more_bytes(self) -> int:
        """Mean bytes of the examples that it holds, if this is far more than was estimated before the start; otherwise 0."""
        if self._opened is None or self._opened.hold not in self._holds:  # another loader's, see `follow`
            return 0
        if self._example_bytes < _FAR_MORE * self._hold.example_bytes:
            return 0
        return self._example_bytes

    def correction(self) -> str:
        """Returns a human-readable line if examples take far more than was estimated before the start; otherwise empty."""
        if not (more := self.more_bytes):
            return ""
        estimated = bytes_in_words(self._hold.example_bytes)
        return f"an example takes more than was estimated: {bytes_in_words(more)}, not {estimated}; {self._what_it_holds()}"

    def add_lookups(self, hits: int, misses: int, received: int = 0, waited_seconds: float = 0.0) -> None:
        """Counts fresh examples that were delivered; ``received`` is the number of hits that came from other nodes."""
        if self._opened is not None:
            self._opened.add_lookups(hits, misses)
        if self._partitioned is not None and (received or waited_seconds):
            self._partitioned.board.count(self._partitioned.rank, received, waited_seconds)

    def describe(self) -> str:
        """Returns one human-readable line about the cache once; then empty."""
        if self._has_said or self._opened is None:
            return ""
        self._has_said, hold = True, self._hold
        each = bytes_in_words(self._example_bytes)
        why = f"; {self._why}" if self._why else ""
        return f"cache: holds [{hold.what}] ({hold.name}), {each} per example; {self._what_it_holds()}{why}"

    def _what_it_holds(self) -> str:
        assert self._opened is not None
        # Two indices may lead to the same example, and there may be examples to which no index leads.
        counts, length = self._opened.counts, min(self._opened.keys, len(self._indices))
        nodes, size = 1, counts.size
        if self._partitioned is not None:
            nodes, size = len(self._partitioned.capacities), self._partitioned.size
        share = min(size // self._example_bytes / max(length, 1), 1.0)
        saves = "nothing is read from the second pass on"
        if share < 1:
            saves = f"from the second pass on {1 - share:.0%} are read, which makes reading {1 / (1 - share):.2g} times faster"
        where = f" on the disk of {self._config.path}" if self._config.path else ""
        if nodes > 1:
            where += f" on {nodes} nodes"
        if self._config.name is not None:
            where = f" in {self._path}, where {counts.examples:,} are already,"
        return f"{bytes_in_words(size)}{where} hold {share:.0%} of {length:,} examples: {saves}"

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for another process. That process opens a cache of its own."""
        nothing = {"_opened": None, "_readers": (), "_partitioned": None, "_changes": Changes(dict)}
        return {**vars(self), **nothing}


def _parts_of(dataset: Any, split: Split | None) -> dict[str, Any]:
    return made_from(dataset, split).parts


def number_of(made_from: Fingerprint) -> int:
    """Returns the number of 32 bits by which records name their data."""
    return int(made_from.digest()[:8], 16)


# ---------------------------------------------------------------------- cached dataset
# Each example is bit by bit what the data set inside returns, even if that draws random numbers. The stages before the cut draw
# none. The stages after the cut draw the same numbers after a lookup as after a read. A read is watched (`WatchedStages`), and
# this moves the global random states. So they are put back before the example is finished.
#
# The constructor opens the cache in the process that calls it. The processes that get the data set from this one have the same
# cache: workers, forked or spawned, ranks that are started with it, and tasks of a process pool. If it is pickled (in a
# checkpoint) and loaded after that process has ended, its examples are read, and nothing is kept. The ranks do not agree on
# anything, because one rank may make a data set that the others do not make. So if each rank makes its own `CachedDataset`, each
# has its own cache. If the cache has a name, these ranks use its file together.


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
        TypeError: ``dataset`` is not a map-style data set with a length.
        ValueError: ``dataset`` is empty, no part of its examples can be held, or the cache cannot be made with these options.

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
        name = type(dataset).__name__
        if isinstance(dataset, CachedDataset):
            raise TypeError("CachedDataset: the data set is a CachedDataset already: give that one the size")
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"CachedDataset: {name} is a stream, whose examples have no index under which they could be found again. Copy it "
                "to a local disk, or echo it: EchoLoader(loader, factor)"
            )
        if isinstance(dataset, DataLoader):
            raise TypeError("CachedDataset: give it the data set of the loader, and make a DataLoader over the CachedDataset")
        if not hasattr(type(dataset), "__getitem__") or not hasattr(type(dataset), "__len__"):
            raise TypeError(f"CachedDataset: dataset must be map-style, with __getitem__ and __len__, got {name}")
        if not len(dataset):  # type: ignore[arg-type]  # it has a length
            raise ValueError(f"CachedDataset: {name} has no example")
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
        return index, self._looked_up([index]).found.popleft()

    def augment(self, example: Any) -> Any:
        """Returns what ``dataset[index]`` returns, made from what `load` returned."""
        return _reads_of(self).finish(*example)

    def _looked_up(self, indices: list[Any]) -> CachedReads:
        reads, node = _reads_of(self), self._cached_by.node
        before = reads.store.lookups
        reads.look_up(indices, are_fresh=True)
        now = reads.store.lookups
        node.add_lookups(now.hits - before.hits, now.misses - before.misses)
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


# ---------------------------------------------------------------------- the reads of this process


class _Reads(CachedReads):
    """The reads of a data set in this process."""

    def __init__(self, caching: Caching, dataset: Any) -> None:
        store = ExampleStore(caching.store.arena, caching.store.name, caching.store.data)  # so that the first hit is audited
        super().__init__(replace(caching, store=store), dataset, uncut_stages(dataset), preserves=True)
        self.description = describe(dataset)
        self.transforms = list(_transforms_in(dataset, self.description))


_reads: WeakKeyDictionary[CachedDataset, _Reads] = WeakKeyDictionary()  # next to the data sets: copies must not share them


def _reads_of(cached: CachedDataset) -> _Reads:
    found, dataset = _reads.get(cached), cached._cached_inside
    if found is not None:
        transforms = _transforms_in(dataset, found.description)
        if all(now is then for now, then in zip(transforms, found.transforms, strict=True)):
            return found  # else a transform was replaced, and the reads are made again
    found = _reads[cached] = _Reads(cached._cached_by.caching, dataset)
    return found


def _transforms_in(dataset: Any, description: Description) -> Iterator[Any]:
    attributes = getattr(dataset, "__dict__", {})
    yield from (attributes.get(name) for name in TRANSFORMS)
    for part, described in zip(data_sets_inside(dataset, description.role), description.inside, strict=True):
        yield from _transforms_in(part, described)
