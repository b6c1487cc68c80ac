"""Reads through the cache: what is held is not read, and what is read is held if there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from operator import index as as_integer
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from lightning_echo.cache.arena import Arena
from lightning_echo.cache.board import FromOthers
from lightning_echo.cache.kept import PASSES_ON, parts_of, readers_in
from lightning_echo.cache.record import decode, digest_of, is_whole, owner_in, owner_of
from lightning_echo.data.copies import copy_example
from lightning_echo.data.difference import difference
from lightning_echo.data.randomness import preserved_random_states
from lightning_echo.split.check import WHOLE, WatchedStages
from lightning_echo.split.describe import Description, Role, data_sets_inside, describe, pass_on
from lightning_echo.split.staged import Augment, Stages, add_decoding, examples_in, unchanged

# ---------------------------------------------------------------------- keys
# A ``Subset`` or ``ConcatDataset`` only passes an index on. Two subsets of a data set may have the same example under different
# indices, and different examples under the same index. So the key of an example is made from the data set that reads it and from
# the index there::
#
#     ConcatDataset:  index 7 -> data set 1, index 2       keys 0 to 4: data set 0
#     Subset there:   index 2 -> index 11                  keys 5 to 24: data set 1        -> key 5 + 11
#
# If a data set is inside twice, both have the same keys. A named cut (`StagedDataset.of`) has its own keys, because two of them
# may decode the examples of one data set in two ways.


class NoKeysError(TypeError):
    """The examples of a data set cannot be told apart by numbers."""


class Keys:
    """The keys of the examples of a map-style data set. Raises `NoKeysError` for a reading data set that has no length.

    ``parts`` has name and length of each data set that reads examples, in the order of their keys.

    Example:
        >>> from torch.utils.data import ConcatDataset, Subset
        >>> words, numbers = ["a", "b"], [10, 11, 12]
        >>> keys = Keys(ConcatDataset([words, Subset(numbers, [2, 0])]))
        >>> keys.count, [keys.of(index) for index in range(4)]
        (5, [0, 1, 4, 2])
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._description = dataset, describe(dataset)
        self._indices: tuple[Any, npt.NDArray[np.int64] | None] | None = None  # of a subset, and the same as an array
        self._starts: dict[int, tuple[int, int]] = {}  # number of a data set that reads -> its first key, and its length
        self.count = 0
        self.parts: list[tuple[str, int]] = []
        for reader, description in readers_in(dataset, self._description):
            if description.number in self._starts:
                continue
            if description.is_stream:
                raise NoKeysError(
                    f"{description.name} is a stream: its examples have no index, under which they could be found again. Copy it "
                    "to a local disk, or echo it"
                )
            try:
                length = len(reader)
            except TypeError as error:
                raise NoKeysError(
                    f"{description.name} has no length, so it is not known how many examples it has: add __len__"
                ) from error
            self._starts[description.number] = self.count, length
            self.count += length
            self.parts.append((_name_of(description), length))

    def of(self, index: Any) -> int | None:
        """Returns the key of an example; None if the index that the reading data set gets is not a number, or is out of range."""
        dataset, description = self._dataset, self._description
        while description.role in PASSES_ON:
            number, index = pass_on(dataset, description.role, index)
            dataset, description = data_sets_inside(dataset, description.role)[number], description.inside[number]
        start, length = self._starts[description.number]
        try:
            place = as_integer(index)
        except TypeError:
            return None
        return start + place if 0 <= place < length else None  # only that data set knows what an index below 0 means

    def of_many(self, indices: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Returns the keys of several examples, -1 for an example without a key. It is fast if the indices are integers."""
        if len(indices) and all(type(index) is int for index in indices):
            places, description = np.asarray(indices), self._description
            if description.role is Role.subset and ((places >= 0) & (places < len(self._dataset.indices))).all():
                inside = description.inside[0]
                if inside.role not in PASSES_ON and (table := self._table()) is not None:
                    places, description = table[places], inside
            if description.role not in PASSES_ON:
                start, length = self._starts[description.number]
                return np.where((places >= 0) & (places < length), start + places.astype(np.int64), -1)
        keys = np.full(len(indices), -1, dtype=np.int64)
        for place, index in enumerate(indices):
            # A data set that passes the index on may raise anything. It raises it again when the example is read.
            with suppress(Exception):
                if (key := self.of(index)) is not None:
                    keys[place] = key
        return keys

    def _table(self) -> npt.NDArray[np.int64] | None:
        """Returns the indices of a subset as an array; None if they are not integers."""
        indices = self._dataset.indices
        if self._indices is None or self._indices[0] is not indices:
            table = np.asarray(indices)
            self._indices = indices, table if table.ndim == 1 and table.dtype.kind in "iu" else None
        return self._indices[1]


def _name_of(description: Description) -> str:
    inside = ", ".join(map(_name_of, description.inside))
    return f"{description.name}({inside})" if inside else description.name


# ---------------------------------------------------------------------- example store

BESIDE = 2
"""Records behind those of the examples: what the workers have agreed on, and what the examples are made from."""

MISSING = object()
"""What `ExampleStore` returns for an example that is not held."""


class StaleCacheError(RuntimeError):
    """A data set returns an example that differs from the one that was held."""


class Lookups(NamedTuple):
    """How often a process found a fresh example in the cache, and how often it had to read one."""

    hits: int = 0
    misses: int = 0


class LookedUp(NamedTuple):
    """The result of `ExampleStore.look_up`."""

    found: list[Any]  # for each key a copy of the example, which belongs to the caller alone, or `MISSING`
    missing: list[int]  # places in ``found`` of the examples that are not held
    to_audit: list[int]  # and of the 1st, 10th, 100th ... hit of a process, which must be read once more and compared


class ExampleStore:
    """The examples in an arena, as one process sees them. It counts hits and misses, and audits some hits.

    Its keys are those of `Keys`. If the examples are kept under a ``name`` after the job, each consists of types that can be read
    without running code, and is checked at its first hit in a process. ``data`` is a number of 32 bits that stands for the data.
    Each record names its data and its key. ``received`` counts misses whose examples another node has sent: they are hits.

    Example:
        >>> store = ExampleStore(Arena.create(keys=10, budget_bytes=2**20))
        >>> store.get(3) is MISSING, store.put(3, {"label": 7}), store.get(3), store.lookups
        (True, True, {'label': 7}, Lookups(hits=1, misses=1))
    """

    def __init__(self, arena: Arena, name: str | None = None, data: int = 0) -> None:
        self.arena, self.name, self.data = arena, name, data
        self._hits = self._misses = self.received = 0
        self._audit_at = 1
        self._checked = bytearray(0 if name is None else arena.keys // 8 + 1)  # a bit for each key: there may be 10^7

    @property
    def lookups(self) -> Lookups:
        return Lookups(self._hits + self.received, self._misses - self.received)

    def look_up(self, keys: Sequence[int | None], *, are_fresh: bool = True) -> LookedUp:
        """Looks examples up. Raises `StaleCacheError` if a kept record is damaged, or a record is that of another example.

        An example without a key (None) cannot be held. Examples that are read again after a resume (``are_fresh`` is False) are
        not counted or audited.
        """
        find, is_kept = self.arena.get, self.name is not None
        found: list[Any] = []
        missing: list[int] = []
        for place, key in enumerate(keys):
            record = None if key is None else find(key)
            if key is None or record is None:
                found.append(MISSING)
                missing.append(place)
            else:
                found.append(self._of_file(key, record) if is_kept else self.decoded(key, record))
        if not are_fresh:
            return LookedUp(found, missing, [])
        before = self._hits
        self._hits += len(keys) - len(missing)
        self._misses += len(missing)
        due = []
        if self._hits >= self._audit_at:
            hits = [place for place, example in enumerate(found) if example is not MISSING]
            while self._audit_at <= self._hits:
                due.append(hits[self._audit_at - before - 1])
                self._audit_at *= 10
        return LookedUp(found, missing, due)

    def decoded(self, key: int, record: Any) -> Any:
        """Returns the example of a record that this job has written, on this node or on another one."""
        if owner_in(record) != owner_of(self.data, key):
            raise StaleCacheError(
                f"the cache is damaged: the record of example {key} is that of another example, or of other data. Leave the "
                "cache out, and please report this"
            )
        return decode(record)

    def get(self, key: int | None) -> Any:
        return self.look_up([key]).found[0]

    def _of_file(self, key: int, record: Any) -> Any:
        """Returns the example of a record that may have been written by another job."""
        if not self._checked[key >> 3] & (bit := 1 << (key & 7)):
            if not is_whole(record, owner_of(self.data, key)):
                raise StaleCacheError(
                    f"the cache {self.name!r} is damaged: the record of example {key} is not what was written. Remove its file"
                )
            self._checked[key >> 3] |= bit
        return decode(record, trusted=False)

    def audit(self, held: Any, read: Any, index: Any) -> None:
        """Raises `StaleCacheError` if an example that was held differs from the same one, read again."""
        if (where := difference(held, read, takes_apart=True)) is not None:
            raise StaleCacheError(
                f"example {index!r} has changed since it was cached: {where}. A cache needs a data set "
                "that returns the same before its augmentation each time: leave the cache out, or move what changes after the cut"
            )

    def put(self, key: int, example: Any) -> bool:
        """Adds an example, if there is room. Returns whether it was added. It raises the errors of `encode` and `parts_of`."""
        if key in self.arena or self.arena.counts.is_frozen:
            return False
        return self.arena.put(key, parts_of(example, self.name, owner_of(self.data, key)))

    def __getstate__(self) -> dict[str, Any]:
        return {"arena": self.arena, "name": self.name, "data": self.data}  # another process counts by itself, from 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        ExampleStore.__init__(self, state["arena"], state["name"], state["data"])


# ---------------------------------------------------------------------- cached reads
# The cache holds the output of the data set at a cut. The stages from there to the insertion point run after a lookup as they run
# after a read::
#
#     held:        index --read--> raw --decode--> example --augment--> example'
#     "raw"                        ^
#     "loaded"                                     ^
#     "whole"                                                           ^
#
# For the examples of a batch, a worker does three things:
#
# 1. It looks all of them up, and reads those that are missing. Meanwhile it watches the random states: an example whose stages
#    before the cut draw random numbers is never held.
# 2. It seeds the random states as it does without a cache.
# 3. It finishes each example, in the order of the batch. No stage before the cut has drawn random numbers, so each later stage
#    draws the same ones with and without the cache.

_MOST_KEPT_BYTES = 2**25 - 2**13  # glibc learns from no larger piece


class Held(NamedTuple):
    """The stages whose ``load`` returns what is held, and the way from there to what the insertion point reuses."""

    stages: WatchedStages  # each read with them is watched
    finish: Augment | None = None  # turns an index and what is held into what the insertion point reuses. None: both are the same
    may_draw: bool = True  # whether ``finish`` may draw random numbers, as augmentation does. If not, it is watched, too


@dataclass(frozen=True)
class Caching:
    """Everything that a worker needs for its reads. It is sent to the worker."""

    store: ExampleStore
    make_held: Callable[[Any, Stages], Held]
    check_at: Sequence[Any] = ()  # indices at which the workers compare their data sets; empty if all have the same one
    others: FromOthers | None = None  # the examples of other nodes, if the cache is partitioned
    agreed: Arena | None = None  # where the workers of this job agree on their data set; None: where the examples are


class CachedReads:
    """Looks up or reads the examples for the batches of one process.

    It is used through its `stages`, in place of those of the insertion point. Their ``load`` takes what `look_up` has found, in
    its order. If it ``preserves`` the global random states, they are put back after each read; else the caller seeds them. It
    raises `StaleCacheError` if the cache was made for a data set with another number of examples.
    """

    def __init__(self, caching: Caching, dataset: Any, stages: Stages, *, preserves: bool = False) -> None:
        self._around_reads: Callable[[], AbstractContextManager[None]] = preserved_random_states if preserves else nullcontext
        self.store, self._keys, self._held = caching.store, Keys(dataset), caching.make_held(dataset, stages)
        if self._keys.count != (count := caching.store.arena.keys - BESIDE):
            raise StaleCacheError(
                f"the data set has {self._keys.count:,} examples here, and had {count:,} when the cache was made: give all "
                "workers the same data set, or leave the cache out"
            )
        self._check_at, self._others = caching.check_at, caching.others
        self._to_compare = list(dict.fromkeys((caching.store.arena, caching.agreed or caching.store.arena)))
        self._asked = self._digest = b""
        if self._held.stages is not stages:
            add_decoding(self._held.stages)
        self._finishing: WatchedStages | None = None  # does what is left to do before the insertion point's cut
        if (finish := self._held.finish) is not None and not self._held.may_draw:
            one_more = Stages(
                lambda index: finish(index, copy_example(self._next_to_finish)),  # a copy, since it may be finished again
                unchanged,
                reused=stages.reused,
                redone=(),
            )
            refusal = stages.refusal if isinstance(stages, WatchedStages) else None
            self._finishing = WatchedStages(one_more, dataset, refusal=refusal)
        self._next_to_finish: Any = None
        if get_worker_info() is not None:
            keep_freed_memory()
        self.found: deque[Any] = deque()  # what `look_up` has found and what was not yet taken, as it is held
        self._has_said = self._has_said_short = self._holds_nothing = False
        self.reading = ""  # what `look_up` was doing with the data set when an error occurred, for messages
        self.stages = Stages(
            self._next,
            stages.augment,
            reused=stages.reused,
            redone=stages.redone,
            load_many=None if stages.load_many is None else lambda indices: [self._next(index) for index in indices],
            augment_routes=stages.augment_routes,
        )
        self._note = ""

    def take_note(self) -> str:
        """Returns a message for the user, or empty."""
        note, self._note = self._note, ""
        for stages in filter(None, (self._held.stages, self._finishing)):
            note, stages.note = note or stages.note, ""
        return note

    def look_up(self, indices: Sequence[Any], *, are_fresh: bool) -> None:
        """Looks examples up, and reads those that are not held. If random states are not preserved, the caller seeds them then.

        It raises `StaleCacheError` if the data set returns another example than the held one, and `SplitRefused` as
        `WatchedStages`. The indices are in the order in which `stages` will be asked for them. A data set that reads whole
        batches reads all missing examples in one call. For ``are_fresh`` see `ExampleStore.look_up`.
        """
        if self._check_at:
            self._check_data_set()
        store, self.found, self.reading = self.store, deque(), ""  # an error may have left some of the last batch
        keys = [self._key_of(index) for index in indices]
        found, to_read, audited = store.look_up(keys, are_fresh=are_fresh)
        if to_read and self._others is not None and are_fresh:
            taken = self._others.take([keys[place] for place in to_read], store.decoded)
            for number, example in taken.items():
                found[to_read[number]] = example
            store.received += len(taken)
            to_read = [place for number, place in enumerate(to_read) if number not in taken]
        if to_read or audited:
            read = self._read([indices[place] for place in (*to_read, *audited)])
            for place, example in zip(to_read, read, strict=False):
                found[place] = example
                if (key := keys[place]) is None and not self._holds_nothing:
                    self._say(
                        f"the cache cannot hold example {indices[place]!r}, nor others whose index is not a number from 0 on: "
                        "they are read each time"
                    )
                elif key is not None and example is not WHOLE:
                    self._put(key, example)
            for place, example in zip(audited, read[len(to_read) :], strict=True):
                store.audit(found[place], example, indices[place])
        self._held.stages.reads += len(indices) - len(to_read)
        if (stages := self._finishing) is not None:  # an example that draws random numbers there is read whole
            found = self._watched(stages, lambda: [self._finish(stages, *each) for each in zip(indices, found, strict=True)])
        self.found.extend(found)

    def _key_of(self, index: Any) -> int | None:
        if self._holds_nothing:
            return None
        try:
            return self._keys.of(index)
        except Exception:  # whatever a data set raises that passes the index on: it will do so again when it is read
            return None

    @property
    def held_stages(self) -> WatchedStages:
        """The stages whose ``load`` reads what the cache holds."""
        return self._held.stages

    def holds(self, index: Any) -> bool:
        """Returns whether the cache holds an example. It then stays to the end."""
        key = self._key_of(index)
        return key is not None and key in self.store.arena

    def has_in_memory(self, index: Any) -> bool:
        """Returns whether the cache has an example in memory, in the form in which it is reused. It then stays to the end."""
        if self._held.finish is not None or not self.store.arena.is_in_memory:
            return False
        key = self._key_of(index)
        return key is not None and key in self.store.arena

    def again(self, index: Any) -> Any:
        """Returns a copy of an example that the cache `has_in_memory`, for a further use. This is not counted as a lookup."""
        return self.store.look_up([self._key_of(index)], are_fresh=False).found[0]

    def finish(self, index: Any, example: Any) -> Any:
        """Turns an example of `found` into what the insertion point reuses."""
        finish = self._held.finish
        return example if finish is None or self._finishing is not None else finish(index, example)

    def _next(self, index: Any) -> Any:
        return self.finish(index, self.found.popleft())

    def _read(self, indices: list[Any]) -> list[Any]:
        return self._watched(self._held.stages, lambda: self._load(indices))

    def _watched(self, stages: WatchedStages, load: Callable[[], list[Any]]) -> list[Any]:
        """Calls ``load``, which loads with ``stages``, and returns the result. Calls it again if random numbers were drawn."""
        with self._around_reads():
            stages.begin()
            loaded = load()
            if stages.must_repeat():
                loaded = load()
            stages.end()
        return loaded

    def _load(self, indices: list[Any]) -> list[Any]:
        stages = self._held.stages
        if stages.load_many is None:
            return [self._load_one(stages, index) for index in indices]
        try:
            return examples_in(stages.load_many(indices), indices)
        except Exception:
            self.reading = f"reading examples {indices!r} of the data set in one call"
            raise

    def _load_one(self, stages: WatchedStages, index: Any) -> Any:
        try:
            return stages.load(index)
        except Exception:
            self.reading = f"reading example {index!r} of the data set"
            raise

    def _put(self, key: int, example: Any) -> None:
        if self._others is not None and not self._others.may_keep(key):
            return
        try:
            if not self.store.put(key, example) and (shortage := self.store.arena.shortage) and not self._has_said_short:
                self._has_said_short = True
                count = self.store.arena.counts.records
                self._note = f"the cache is full with {count:,} examples, before it has reached its size: {shortage}"
        except StaleCacheError:
            raise
        except Exception as error:  # pickle may raise anything for an object of the user's: this example is then read each time
            self._say(
                f"an example of type {type(example).__name__} cannot be held by the cache, and so it is read each time: "
                f"{type(error).__name__}: {error}"
            )

    def _say(self, note: str) -> None:
        if not self._has_said:
            self._has_said, self._note = True, note

    def _finish(self, stages: WatchedStages, index: Any, held: Any) -> Any:
        self._next_to_finish = held
        return held if held is WHOLE else self._load_one(stages, index)

    def _check_data_set(self) -> None:
        """Makes sure that this worker has the same data set as the other workers: ``worker_init_fn`` may have changed it."""
        # The first worker writes its examples next to the cached ones. If they are not there yet, another worker continues its
        # work, and checks later. A kept cache may have been begun by a job that reads other examples of the same data, so the
        # workers of a job agree among themselves, too, and compare what they read with what the cache holds.
        if not self._digest:
            read = self._read(list(self._check_at))
            is_kept = self.store.name is not None
            for index, example in zip(self._check_at, read, strict=True) if is_kept else ():
                held = self.again(index)
                where = None if held is MISSING or example is WHOLE else difference(held, example, takes_apart=True)
                if where is not None:
                    raise StaleCacheError(
                        f"example {index!r} is another one in this worker, after worker_init_fn, than in the cache "
                        f"{self.store.name!r} ({where}): give another cache.name, or give all workers the same data set"
                    )
            try:
                self._asked, self._digest = digest_of([tuple(map(self._key_of, self._check_at))]), digest_of(read)
            except Exception as error:  # whatever pickle raises: such examples cannot be held either
                self._check_at, self._holds_nothing = (), True
                self._note = (
                    "the cache holds nothing: worker_init_fn may give each worker another data set, and examples of type "
                    f"{type(read[0]).__name__} cannot be compared, so that they are read each time: {error}"
                )
                return
        self._to_compare = [arena for arena in self._to_compare if not self._agrees_in(arena)]
        if not self._to_compare:
            self._check_at = ()

    def _agrees_in(self, arena: Arena) -> bool:
        """Returns whether the worker that was the first to write into an arena has the same data set; False if there is none."""
        place = min(self._keys.count, arena.keys - 1)
        arena.put(place, [self._asked, self._digest])
        if (first := arena.get(place)) is None:
            return False
        asked, digest = bytes(first[: len(self._asked)]), bytes(first[len(self._asked) :])
        if asked != self._asked or digest == self._digest:  # another job has asked for others
            return True
        if (name := self.store.name) is not None:
            raise StaleCacheError(
                f"the data set is another one in this worker, after worker_init_fn, than in the one that has begun the cache "
                f"{name!r}: give another cache.name, or give all workers the same data set"
            )
        raise StaleCacheError(
            "the data set is another one in each worker, since worker_init_fn changes it, so that an example of one would be "
            "taken for that of another: leave the cache out, or give all workers the same data set"
        )


def keep_freed_memory() -> None:
    """Lets this process keep the memory of freed copies for the next copies."""
    # A worker makes copies of some MB for each batch. By default, glibc gives their memory back to the system after each batch.
    # Then the system clears it again, page by page, and this takes longer than to copy the examples. glibc keeps as much as the
    # largest piece that was freed, up to 32 MB (mallopt(3), M_MMAP_THRESHOLD). So this function frees a large piece once. The
    # piece is never written to, so it takes no memory.
    bytearray(_MOST_KEPT_BYTES)
