"""What is set on the data between two epochs: it is found out, so that the next epoch has it.

A plain loader starts its workers in each epoch, so that they see what was set since then: the stage of a curriculum, pseudo
labels, ``dataset.set_epoch``. An `EchoLoader` keeps its workers. It looks at the data when it starts them, and at the beginning
of each epoch (`glance`). If something has changed, new workers are started.

What the reading itself changes does not count, such as a counter of reads: whatever has changed while the first batch was made is
left out from then on. A validation may read the same data set in this process, while the training reads it in workers, or through
a copy. What that changes is found by reading a few examples once more (``caching/records/own_changes.py``), when a change is
seen for the first time.

With ``persistent_workers=True``, a plain loader's workers would not see a change either, so that nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from lightning_echo.protecting.fingerprints.fingerprint import first_difference, glance

__all__ = ["Changed", "Changes", "changed_paths"]

_LONG_SECONDS = 1.0


class Changed(NamedTuple):
    """What was changed: for each part the first difference, in words. Empty: nothing.

    Attributes:
        data: Of the data set, or of ``collate_fn``.
        order: Of a sampler of torch's.
    """

    data: str = ""
    order: str = ""


class Changes:
    """Finds out what was changed since the workers were started.

    Args:
        parts: Returns what decides the examples, by name: ``"dataset"`` and others. It is empty if nothing is to be compared.
        sampler: Returns what decides the order, by name. It may be empty.
        ignore: Attributes that do not count, see `fingerprint`.
        by_reading: Reads some examples in another process, and returns the paths of what that changes. Called at most once.

    Attributes:
        own: Paths of what reading itself changes, as far as that is known.
        seconds: Seconds that the last look has taken.
    """

    def __init__(
        self,
        parts: Callable[[], Mapping[str, Any]],
        sampler: Callable[[], Mapping[str, Any]] = dict,
        ignore: Iterable[str] = (),
        by_reading: Callable[[], Iterable[str]] = set,
    ) -> None:
        self._parts, self._sampler, self._ignore, self.seconds = parts, sampler, tuple(ignore), 0.0
        self._by_reading: Callable[[], Iterable[str]] | None = by_reading
        self._known: dict[str, str] = {}  # the data when the workers were started
        self._known_order: dict[str, str] = {}  # the sampler then
        self.own: set[str] = set()

    def watch(self, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Looks from now on at the same data as another loader has it."""
        self._parts = parts

    @property
    def why_slow(self) -> str:
        """A message for the user if the looks take long; otherwise empty."""
        if self.seconds <= _LONG_SECONDS:
            return ""
        return (
            f"looking for changes of the data set takes long: {self.seconds:.1f} s in each epoch. If nothing is set on it "
            "between epochs, DataLoader(persistent_workers=True) leaves that out"
        )

    def begin(self) -> None:
        """Notes the data as it is. Call it before workers are started."""
        self._known, self._known_order = self._look()

    def note_own(self) -> None:
        """Notes what reading itself changes. Call it when the first batch is there."""
        if not self._known:
            return
        self.own |= changed_paths(self._known, self._look()[0])

    def ask_own(self) -> None:
        """Finds out what reading itself changes, unless that was asked before."""
        if self._by_reading is not None:
            ask, self._by_reading = self._by_reading, None
            self.own.update(ask())

    def look(self) -> Changed:
        """Looks at the data, and returns what was changed."""
        if not self._known:
            return Changed()
        now, order = self._look()
        if first_difference(self._known, now, self.own):
            self.ask_own()
        return Changed(first_difference(self._known, now, self.own), first_difference(self._known_order, order))

    def _look(self) -> tuple[dict[str, str], dict[str, str]]:
        started, parts = perf_counter(), self._parts()
        found = (glance(parts, self._ignore), glance(self._sampler(), ignore=("data_source", "dataset"))) if parts else ({}, {})
        self.seconds = perf_counter() - started
        return found


def changed_paths(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Returns the paths whose texts differ.

    >>> changed_paths({"data.reads": "1", "data.p": "0.5"}, {"data.reads": "2", "data.p": "0.5", "data.memo[3]": "7"}) == {
    ...     "data.reads",
    ...     "data.memo",
    ... }
    True
    """
    found = set()
    for path in before.keys() | now.keys():
        if before.get(path) != now.get(path):
            is_member = path.endswith("]") and not (path in before and path in now)
            found.add(path.rpartition("[")[0] if is_member else path)  # what loses or gets a member changes itself
    return found
