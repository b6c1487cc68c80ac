"""Reads through the cache: what is held is not read, and what is read is held if there is room.

What is held is what a cut of the data set gives, and the rest of the way to what the insertion point reuses is done after a
lookup as after a read::

    held:        index --read--> raw --decode--> example --augment--> example'
    "raw"                        ^
    "loaded"                                     ^
    "whole"                                                           ^

So a worker does three things for the examples that a batch needs. It looks all of them up, and reads those that are missing,
while the random states are watched: what draws random numbers is never held. Then it seeds the random states as it does without a
cache. Then it finishes each example, in the order of the batch. Nothing before the cut draws random numbers, so each later stage
draws the same ones with and without the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lightning_echo.caching.example_store import ExampleStore, Lookups, StaleCacheError
from lightning_echo.caching.keys import Keys
from lightning_echo.caching.nodes.board import FromOthers
from lightning_echo.caching.record import digest_of
from lightning_echo.protecting.protect import copy_example
from lightning_echo.protecting.randomness import preserved_random_states
from lightning_echo.splitting.decoding import add_decoding
from lightning_echo.splitting.fallback import WHOLE, WatchedStages
from lightning_echo.splitting.stages import Augment, Stages, unchanged

__all__ = ["CachedReads", "Caching", "Held", "keep_freed_memory"]

_MOST_KEPT_BYTES = 2**25 - 2**13  # glibc learns from no larger piece


class Held(NamedTuple):
    """The stages whose ``load`` gives what is held, and the way from there to what the insertion point reuses.

    Attributes:
        stages: Every read of theirs is watched.
        finish: index, what is held -> what the insertion point reuses; None: that is what is held.
        may_draw: Whether ``finish`` may draw random numbers, as it does where it augments. If not, it is watched, too.
    """

    stages: WatchedStages
    finish: Augment | None = None
    may_draw: bool = True


@dataclass(frozen=True)
class Caching:
    """What a worker needs for its reads. It is sent to the worker.

    Attributes:
        store: Where the examples are held.
        make_held: Makes of the data set, and of the stages of the insertion point, what is held.
        check_at: Indices at which the workers compare their data sets; empty if all have the same one.
        others: What other nodes hold, where the cache is partitioned.
    """

    store: ExampleStore
    make_held: Callable[[Any, Stages], Held]
    check_at: Sequence[Any] = ()
    others: FromOthers | None = None


class CachedReads:
    """Looks up or reads what the batches of one process need.

    Args:
        caching: What is held, and where.
        dataset: The user's data set.
        stages: The stages of the insertion point.
        preserves: Whether the global random states are put back after each read. If not, the caller seeds them anew.

    Attributes:
        stages: In place of ``stages``: their ``load`` takes what `look_up` has found, in its order.
        reading: What `look_up` was doing with the data set when an error came, for messages; empty if it came from elsewhere.

    Raises:
        StaleCacheError: The data set has another number of examples than the one that the cache was made for.
    """

    def __init__(self, caching: Caching, dataset: Any, stages: Stages, *, preserves: bool = False) -> None:
        self._around_reads: Callable[[], AbstractContextManager[None]] = preserved_random_states if preserves else nullcontext
        self._store, self._keys, self._held = caching.store, Keys(dataset), caching.make_held(dataset, stages)
        if self._keys.count != (count := caching.store.arena.keys - 1):
            raise StaleCacheError(
                f"the data set has {self._keys.count:,} examples here, and had {count:,} when the cache was made: give all "
                "workers the same data set, or leave the cache out"
            )
        self._check_at, self._digest, self._others = caching.check_at, b"", caching.others
        if self._held.stages is not stages:
            add_decoding(self._held.stages)
        self._finishing: WatchedStages | None = None  # does what is left to do before the insertion point's cut
        if self._held.finish is not None and not self._held.may_draw:
            one_more = Stages(self._finish_next, unchanged, reused=stages.reused, redone=())
            refusal = stages.refusal if isinstance(stages, WatchedStages) else None
            self._finishing = WatchedStages(one_more, dataset, refusal=refusal)
        self._next_to_finish: Any = None
        if get_worker_info() is not None:
            keep_freed_memory()
        self._found: deque[Any] = deque()  # what `look_up` has found and nobody has taken
        self._has_said = self._has_said_short = False
        self.reading = ""
        self.stages = Stages(
            self._next,
            stages.augment,
            reused=stages.reused,
            redone=stages.redone,
            load_many=None if stages.load_many is None else lambda indices: [self._next(index) for index in indices],
            augment_routes=stages.augment_routes,
        )
        self._note = ""

    @property
    def lookups(self) -> Lookups:
        """Hits and misses so far."""
        return self._store.lookups

    def take_note(self) -> str:
        """Returns what the user should be told; empty if there is nothing."""
        note, self._note = self._note, ""
        for stages in filter(None, (self._held.stages, self._finishing)):
            note, stages.note = note or stages.note, ""
        return note

    def look_up(self, indices: Sequence[Any], *, are_fresh: bool) -> None:
        """Looks examples up, and reads those that are not held.

        Unless the random states are preserved, the caller then seeds them anew.

        Args:
            indices: The indices, in the order in which `stages` will be asked for them. A data set that reads whole batches reads
                in one call what is missing of them.
            are_fresh: Whether they are counted. What is read again after a resume is not.

        Raises:
            StaleCacheError: The data set returns another example than the one that is held.
            SplitRefused: As in `WatchedStages`.
        """
        if self._check_at:
            self._check_data_set()
        store, self._found, self.reading = self._store, deque(), ""  # an error may have left some of the last batch
        keys = [self._key_of(index) for index in indices]
        found, to_read, audited = store.look_up(keys, are_fresh=are_fresh)
        if to_read and self._others is not None and are_fresh:
            to_read = self._take_from(self._others, keys, found, to_read)
        if to_read or audited:
            read = self._read([indices[place] for place in (*to_read, *audited)])
            for place, example in zip(to_read, read, strict=False):
                found[place] = example
                if (key := keys[place]) is None:
                    self._say(
                        f"the cache cannot hold example {indices[place]!r}, nor others whose index is no number from 0 on: they "
                        "are read each time"
                    )
                elif example is not WHOLE:
                    self._put(key, example)
            for place, example in zip(audited, read[len(to_read) :], strict=True):
                store.audit(found[place], example, indices[place])
        self._held.stages.reads += len(indices) - len(to_read)
        self._found.extend(found if self._finishing is None else self._finished(self._finishing, indices, found))

    def _take_from(self, others: FromOthers, keys: list[int | None], found: list[Any], missing: list[int]) -> list[int]:
        """Takes what other nodes have sent. Returns the places of what is to be read."""
        taken = others.take([keys[place] for place in missing], self._store.decoded)
        for number, example in taken.items():
            found[missing[number]] = example
        self._store.count_as_hits(len(taken))
        return [place for number, place in enumerate(missing) if number not in taken]

    def _key_of(self, index: Any) -> int | None:
        try:
            return self._keys.of(index)
        except Exception:  # whatever a data set raises that passes the index on: it will do so again when it is read
            return None

    def has_in_memory(self, index: Any) -> bool:
        """Returns whether the cache has an example in memory, in the form in which it is reused. If so, it has it to the end."""
        if self._held.finish is not None or not self._store.arena.is_in_memory:
            return False
        key = self._key_of(index)
        return key is not None and key in self._store.arena

    def again(self, index: Any) -> Any:
        """Returns a copy of an example that the cache `has_in_memory`, for a further use: this counts as no lookup."""
        return self._store.look_up([self._key_of(index)], are_fresh=False).found[0]

    def take(self) -> Any:
        """Returns the next example that `look_up` has found, as it is held."""
        return self._found.popleft()

    def finish(self, index: Any, example: Any) -> Any:
        """Returns what the insertion point reuses.

        Args:
            index: Its index.
            example: What `take` returned.
        """
        finish = self._held.finish
        return example if finish is None or self._finishing is not None else finish(index, example)

    def _next(self, index: Any) -> Any:
        return self.finish(index, self._found.popleft())

    def _read(self, indices: list[Any]) -> list[Any]:
        return self._watched(self._held.stages, lambda: self._load(indices))

    def _watched(self, stages: WatchedStages, load: Callable[[], list[Any]]) -> list[Any]:
        """Returns what ``load`` returns, which loads by ``stages``: a second time if random numbers were drawn."""
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
            read = list(stages.load_many(indices))
        except Exception:
            self.reading = f"reading examples {indices!r} of the data set in one call"
            raise
        if len(read) != len(indices):
            raise ValueError(
                f"__getitems__ of the data set returned {len(read)} examples for {len(indices)} indices: "
                "it must return one for each"
            )
        return read

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
            if not self._store.put(key, example) and (shortage := self._store.arena.shortage) and not self._has_said_short:
                self._has_said_short = True
                count = self._store.arena.counts.records
                self._note = f"the cache is full with {count:,} examples, before it has reached its size: {shortage}"
        except StaleCacheError:
            raise
        except Exception as error:  # whatever pickle raises for an object of the user's: the example is read each time
            self._say(
                f"an example of type {type(example).__name__} cannot be held by the cache, and so it is read each time: "
                f"{type(error).__name__}: {error}"
            )

    def _say(self, note: str) -> None:
        if not self._has_said:
            self._has_said, self._note = True, note

    def _finished(self, stages: WatchedStages, indices: Sequence[Any], found: list[Any]) -> list[Any]:
        """Returns the examples with all that comes before the cut of the insertion point. One that draws there is read whole."""
        return self._watched(stages, lambda: [self._finish(stages, *each) for each in zip(indices, found, strict=True)])

    def _finish(self, stages: WatchedStages, index: Any, held: Any) -> Any:
        self._next_to_finish = held
        return held if held is WHOLE else self._load_one(stages, index)

    def _finish_next(self, index: Any) -> Any:
        assert self._held.finish is not None
        return self._held.finish(index, copy_example(self._next_to_finish))  # a copy, since it may be finished again

    def _check_data_set(self) -> None:
        """Makes sure that the data set of this worker is that of the other workers: ``worker_init_fn`` may have changed it.

        The first worker writes what it reads beside the examples. Another one waits for that with its check, not with its work.

        Raises:
            StaleCacheError: It is another one.
        """
        arena = self._store.arena
        if not self._digest:
            self._digest = digest_of(self._read(list(self._check_at)))
            arena.put(arena.keys - 1, [self._digest])
        first = arena.get(arena.keys - 1)
        if first is None:
            return
        self._check_at = ()
        if bytes(first) == self._digest:
            return
        if (name := self._store.name) is not None:
            raise StaleCacheError(
                f"the data set is another one in this worker, after worker_init_fn, than in the one that has begun the cache "
                f"{name!r}: give another cache.name, or give all workers the same data set"
            )
        raise StaleCacheError(
            "the data set is another one in each worker, since worker_init_fn changes it, so that an example of one would be "
            "taken for that of another: leave the cache out, or give all workers the same data set"
        )


def keep_freed_memory() -> None:
    """Lets this process keep the memory of the copies that are let go, for the next copies.

    A worker makes copies of some MB for each batch. Else glibc gives their memory back to the system after each batch, and the
    system clears it anew, page by page, which takes longer than to copy the examples. How much is kept, glibc learns from the
    largest piece that was freed, of at most 32 MB (mallopt(3), M_MMAP_THRESHOLD). This one is never written to: it takes no
    memory.
    """
    bytearray(_MOST_KEPT_BYTES)
