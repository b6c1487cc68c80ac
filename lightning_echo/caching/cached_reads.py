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
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_echo.caching.agreement import digest_of
from lightning_echo.caching.example_store import MISSING, ExampleStore, StaleCacheError
from lightning_echo.caching.keys import Keys
from lightning_echo.protecting.protect import copy_example
from lightning_echo.protecting.randomness import DrawingTrap
from lightning_echo.splitting.decoding import add_decoding
from lightning_echo.splitting.fallback import WHOLE, WatchedStages
from lightning_echo.splitting.stages import Augment, Stages

__all__ = ["CachedReads", "Caching", "Held"]


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
    """

    store: ExampleStore
    make_held: Callable[[Any, Stages], Held]
    check_at: Sequence[Any] = ()


class CachedReads:
    """Looks up or reads what the batches of one process need.

    Args:
        caching: What is held, and where.
        dataset: The user's data set.
        stages: The stages of the insertion point.

    Attributes:
        stages: In place of ``stages``: their ``load`` takes what `look_up` has found, in its order.
        reading: What is read from the data set at the moment, for messages; None: nothing.
    """

    def __init__(self, caching: Caching, dataset: Any, stages: Stages) -> None:
        self._store, self._keys, self._held = caching.store, Keys(dataset), caching.make_held(dataset, stages)
        self._check_at = caching.check_at
        if self._held.stages is not stages:
            add_decoding(self._held.stages)
        self._trap = None if self._held.finish is None or self._held.may_draw else DrawingTrap()
        self._found: deque[Any] = deque()  # what `look_up` has found and nobody has taken
        self._has_said = False
        self.reading: Any = None
        self.stages = Stages(
            self._next,
            stages.augment,
            reused=stages.reused,
            redone=stages.redone,
            load_many=None if stages.load_many is None else lambda indices: list(map(self._next, indices)),
            augment_routes=stages.augment_routes,
        )
        self.note = ""

    def take_note(self) -> str:
        """Returns what the user should be told; empty if there is nothing."""
        stages = self._held.stages
        note, self.note, stages.note = self.note or stages.note, "", ""
        return note

    def look_up(self, indices: Sequence[Any], first_fresh: int) -> None:
        """Looks examples up, and reads those that are not held. The caller then seeds the random states anew.

        Args:
            indices: The indices, in the order in which `stages` will be asked for them.
            first_fresh: The place of the first fresh one. Those before it are read again, and are not counted.

        Raises:
            StaleCacheError: The data set returns another example than the one that is held.
            SplitRefused: As in `WatchedStages`.
        """
        if self._check_at:
            self._check_data_set()
        store, self._found = self._store, deque()  # an error may have left some of the last batch
        keys = list(map(self._keys.of, indices))
        found = [MISSING if key is None else store.get(key, is_fresh=place >= first_fresh) for place, key in enumerate(keys)]
        to_read = [place for place, example in enumerate(found) if example is MISSING]
        audited = [place for place, example in enumerate(found) if example is not MISSING][:1] if store.must_audit else []
        if to_read or audited:
            read = self._read([indices[place] for place in (*to_read, *audited)])
            for place, example in zip(to_read, read, strict=False):
                found[place] = example
                if keys[place] is not None and example is not WHOLE:
                    self._put(keys[place], example)
            for place in audited:
                store.audit(found[place], read[-1], indices[place])
        self._found.extend(found if self._trap is None else self._finished(self._trap, indices, found))

    def _next(self, index: Any) -> Any:
        example, finish = self._found.popleft(), self._held.finish
        return example if finish is None or self._trap is not None else finish(index, example)

    def _read(self, indices: list[Any]) -> list[Any]:
        stages = self._held.stages
        stages.begin()
        read = self._load(indices)
        if stages.must_repeat():
            read = self._load(indices)
        stages.end()
        self.reading = None
        return read

    def _load(self, indices: list[Any]) -> list[Any]:
        stages = self._held.stages
        if stages.load_many is None:
            loaded = []
            for self.reading in indices:
                loaded.append(stages.load(self.reading))
            return loaded
        self.reading = indices
        read = list(stages.load_many(indices))
        if len(read) != len(indices):
            raise ValueError(f"__getitems__ of the data set returned {len(read)} examples for {len(indices)} indices")
        return read

    def _put(self, key: int | None, example: Any) -> None:
        assert key is not None
        try:
            self._store.put(key, example)
        except StaleCacheError:
            raise
        except Exception as error:  # whatever pickle raises for an object of the user's: the example is read each time
            if not self._has_said:
                self._has_said = True
                self.note = (
                    f"an example of type {type(example).__name__} cannot be held by the cache, and so it is read each time: "
                    f"{type(error).__name__}: {error}"
                )

    def _finished(self, trap: DrawingTrap, indices: Sequence[Any], found: list[Any]) -> list[Any]:
        """Returns the examples with all that comes before the cut of the insertion point. One that draws there is read whole."""
        trap.set()
        finished = [self._finish(index, copy_example(held)) for index, held in zip(indices, found, strict=True)]
        if not trap.drawn_from():
            return finished
        for place, (index, held) in enumerate(zip(indices, found, strict=True)):
            trap.set()
            finished[place] = self._finish(index, held)
            if trap.drawn_from():
                finished[place] = WHOLE
        return finished

    def _finish(self, index: Any, held: Any) -> Any:
        assert self._held.finish is not None
        return held if held is WHOLE else self._held.finish(index, held)

    def _check_data_set(self) -> None:
        """Makes sure that the data set of this worker is that of the other workers: ``worker_init_fn`` may have changed it.

        The first worker writes what it reads beside the examples. Another one waits for that with its check, not with its work.

        Raises:
            StaleCacheError: It is another one.
        """
        arena, mine = self._store.arena, digest_of(self._read(list(self._check_at)))
        arena.put(arena.keys - 1, [mine])
        first = arena.get(arena.keys - 1)
        if first is None:
            return
        self._check_at = ()
        if bytes(first) != mine:
            raise StaleCacheError(
                "the data set is another one in each worker, since worker_init_fn changes it, so that an example of one would be "
                "taken for that of another: leave the cache out, or give all workers the same data set"
            )
