"""`ExampleStore`: the examples in an arena, as one process sees them. It counts hits and misses, and audits some hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_echo.caching.arena import Arena
from lightning_echo.caching.kept import refusal
from lightning_echo.caching.record import decode, encode, is_whole, owner_in, owner_of
from lightning_echo.protecting.difference import difference

__all__ = ["BESIDE", "MISSING", "ExampleStore", "LookedUp", "Lookups", "StaleCacheError"]

BESIDE = 2
"""Records behind those of the examples: what the workers have agreed on, and what the examples are made from."""

MISSING = object()
"""What `ExampleStore` returns for an example that is not held."""


class StaleCacheError(RuntimeError):
    """A data set returns an example that differs from the one that was held."""


class Lookups(NamedTuple):
    """How often a process has looked for a fresh example.

    Attributes:
        hits: How often the example was held.
        misses: How often the example had to be read.
    """

    hits: int = 0
    misses: int = 0


class LookedUp(NamedTuple):
    """What `ExampleStore.look_up` has found.

    Attributes:
        found: For each key a copy of the example, which belongs to the caller alone, or `MISSING`.
        missing: The places in ``found`` of the examples that are not held.
        to_audit: The places in ``found`` of the hits that must be read once more and compared: the 1st, 10th, 100th ... hit that
            a process counts.
    """

    found: list[Any]
    missing: list[int]
    to_audit: list[int]


class ExampleStore:
    """Looks examples up, and adds those that were read.

    Args:
        arena: Where the examples are. Its keys are those of `Keys`.
        name: The name under which the examples are kept after the job; None: they are not kept. A kept example consists of types
            that can be read without running code, and is checked at its first hit in a process.
        data: A number of 32 bits that stands for the data. Each record says of which data it is, and of which key.

    Attributes:
        arena: As given.
        name: As given.
        data: As given.
        lookups: Hits and misses of this process.

    Example:
        >>> store = ExampleStore(Arena.create(keys=10, budget_bytes=2**20))
        >>> store.get(3) is MISSING, store.put(3, {"label": 7}), store.get(3), store.lookups
        (True, True, {'label': 7}, Lookups(hits=1, misses=1))
    """

    def __init__(self, arena: Arena, name: str | None = None, data: int = 0) -> None:
        self.arena, self.name, self.data = arena, name, data
        self._hits = self._misses = self._received = 0
        self._audit_at = 1
        self._checked = bytearray(0 if name is None else arena.keys // 8 + 1)  # a bit for each key: there may be 10^7

    @property
    def lookups(self) -> Lookups:
        """Hits and misses of this process."""
        return Lookups(self._hits + self._received, self._misses - self._received)

    def look_up(self, keys: Sequence[int | None], *, are_fresh: bool = True) -> LookedUp:
        """Looks several examples up.

        Args:
            keys: Their keys. None for an example without a key, which cannot be held.
            are_fresh: Whether these are fresh examples. Examples that are read again after a resume are not counted or audited.

        Raises:
            StaleCacheError: A kept record is damaged, or a record is that of another example.
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
                found.append(self._of_file(key, record) if is_kept else self._of_job(key, record))
        if not are_fresh:
            return LookedUp(found, missing, [])
        before = self._hits
        self._hits += len(keys) - len(missing)
        self._misses += len(missing)
        return LookedUp(found, missing, self._to_audit(before, found) if self._hits >= self._audit_at else [])

    def _of_job(self, key: int, record: Any) -> Any:
        """Returns the example of a record that this job has written, on this node or on another one."""
        if owner_in(record) != owner_of(self.data, key):
            raise StaleCacheError(
                f"the cache is damaged: the record of example {key} is that of another example, or of other data. Leave the "
                "cache out, and please report this"
            )
        return decode(record)

    def decoded(self, key: int, record: Any) -> Any:
        """Returns the example of a record that another node holds."""
        return self._of_job(key, record)

    def count_as_hits(self, misses: int) -> None:
        """Counts this number of misses as hits, because another node has sent the examples and they need not be read."""
        self._received += misses

    def get(self, key: int | None) -> Any:
        """Returns what `look_up` finds for one example."""
        return self.look_up([key]).found[0]

    def _to_audit(self, hits_before: int, found: Sequence[Any]) -> list[int]:
        hits = [place for place, example in enumerate(found) if example is not MISSING]
        due = []
        while self._audit_at <= self._hits:
            due.append(hits[self._audit_at - hits_before - 1])
            self._audit_at *= 10
        return due

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
        """Compares an example that was held with the same one, read again.

        Args:
            held: The example that was held.
            read: The example that the data set returns now.
            index: The index of the example in the data set, for the message.

        Raises:
            StaleCacheError: They differ.
        """
        if (where := difference(held, read, takes_apart=True)) is not None:
            raise StaleCacheError(
                f"example {index!r} is another one now than when it was put into the cache: {where}. A cache needs a data set "
                "that returns the same before its augmentation each time: leave the cache out, or move what changes after the cut"
            )

    def put(self, key: int, example: Any) -> bool:
        """Adds an example, if there is room.

        Args:
            key: Its key.
            example: The example. It must not change during this call.

        Returns:
            Whether it was added.

        Raises:
            TypeError: The example would not come out as it is; or the cache has a name, and the example contains a type that
                cannot be kept under a name.
            Exception: What pickle raises for an example that it cannot write.
        """
        if key in self.arena or self.arena.counts.is_frozen:
            return False
        record = encode(example, checksum=self.name is not None, owner=owner_of(self.data, key))
        if self.name is not None and not record.is_plain:
            raise TypeError(refusal(example, self.name))
        return self.arena.put(key, record.parts)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for another process. That process counts by itself, from 0."""
        return {"arena": self.arena, "name": self.name, "data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ExampleStore.__init__(self, state["arena"], state["name"], state["data"])
