"""The stages as workers run them: an example that does not fit the split is noticed when it is read, and is never echoed.

A split was proved on two examples. While training runs, every read is watched for four things:

* The data set uses its transforms in another way than its convention says (`read_check.py`).
* Loading draws random numbers.
* Loading fails, but the data set itself does not.
* An example is loaded into the memory of another one of its batch (``protecting/overlaps.py``). The batch is then loaded again,
  and from then on each example is copied when it is loaded.

If one of the first three happens, the data set itself reads that example whole for each use. So no transform is left out, applied
twice or frozen. Each use then takes the time of a read. So the user is told. If more than a third of the examples are like that,
`SplitFails` says that the split is not worth keeping: the training continues at a later insertion point. If the user asked for
this insertion point, it ends at the first such example. An error that does not come again, such as that of a slow disk, counts
for nothing.

Random numbers are watched over all reads of a batch together, because watching each read takes longer. If some were drawn, the
examples of that batch are read again one by one, and so are those of all batches that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from lightning_echo.insertion import Needs, earliest
from lightning_echo.protecting.difference import difference
from lightning_echo.protecting.generators import places_of_generators
from lightning_echo.protecting.overlaps import Overlaps
from lightning_echo.protecting.protect import copy_example
from lightning_echo.protecting.randomness import DrawingTrap, preserved_random_states
from lightning_echo.splitting.cut import SplitRefused
from lightning_echo.splitting.staged import read_batch
from lightning_echo.splitting.stages import Load, Stages

__all__ = ["WHOLE", "SplitFails", "WatchedStages"]

_LARGEST_MISFIT_SHARE = 1 / 3  # of the examples read
_ENOUGH_READS = 128  # with fewer reads, that share says nothing


class _Whole(Enum):  # an enum member, since it stays itself when it is copied or pickled
    read_for_each_use = 1


WHOLE = _Whole.read_for_each_use
"""Stands for an example that is read whole for each use."""


class SplitFails(RuntimeError):
    """Too many examples do not fit the split. The message says how many, and why the last one does not.

    Attributes:
        reason: The message in one line. torch adds the traceback of the worker to an error from there.
    """

    @property
    def reason(self) -> str:
        return str(self).rpartition(f"{type(self).__name__}: ")[2].partition("\n")[0]


class WatchedStages(Stages):
    """The stages of a data set that was split. Every read is watched.

    Reads are watched for random numbers only between `begin` and `end`: an example that is not kept may draw them.

    Args:
        stages: The stages to watch. Their ``load`` raises `SplitRefused` for an example that does not fit.
        dataset: The data set. It reads examples whole.
        refusal: Raised for the first example that does not fit. None: such examples are read whole.
        may_fail: Whether `SplitFails` is raised if too many examples are read whole.

    Attributes:
        note: What the user should be told about examples that are read whole; empty if there is nothing to tell.
        reads: Number of examples that were read. Too many of them must not be misfits. A cache also counts the examples it held.
        refusal: As given.
        may_fail: As given.
    """

    __slots__ = (
        "_checks_each",
        "_copied",
        "_copies",
        "_dataset",
        "_generators",
        "_is_checking",
        "_is_overlapping",
        "_load_one",
        "_look_at",
        "_misfits",
        "_overlaps",
        "_stages",
        "_trap",
        "may_fail",
        "note",
        "reads",
        "refusal",
    )

    def __init__(self, stages: Stages, dataset: Any, *, refusal: type[SplitRefused] | None, may_fail: bool = False) -> None:
        super().__init__(
            self._load,
            self._augment,
            reused=stages.reused,
            redone=stages.redone,
            load_many=None if stages.load_many is None else self._load_many,
            augment_routes=stages.augment_routes,
        )
        self._stages, self._dataset, self.refusal, self.may_fail = stages, dataset, refusal, may_fail
        self._trap, self._generators, self._look_at = DrawingTrap(), 0, 1
        self._set_trap()
        many = stages.load_many
        self._load_one: Load = stages.load if many is None else lambda index: many([index])[0]
        self._checks_each = False  # whether random states are compared after each example, and not after each batch
        self._is_checking = False  # whether a batch is being loaded whose random states are compared
        self._overlaps, self._is_overlapping = Overlaps(), False
        self._copies = False  # whether each example is copied when it is loaded
        self._copied: list[tuple[Any, Any, Any]] = []  # index, example and copy, of the first batch that is copied
        self.reads = self._misfits = 0
        self.note = ""

    def _set_trap(self) -> bool:
        """Watches all generators that the data set has by now. Returns whether there are more of them than before."""
        before, places = self._generators, places_of_generators(self._dataset, *self._stages.sources)
        self._generators = len(places)
        if self._generators > before:
            self._trap = DrawingTrap([place.state for place in places])
        return self._generators > before

    def begin(self) -> None:
        """Call this before the examples of a batch are loaded, if some of them are kept."""
        self._is_checking = True
        self._overlaps.clear()
        if not self._checks_each:
            self._trap.set()

    def must_repeat(self) -> bool:
        """Returns whether to load all examples of the batch again, one by one. Call it once after `begin`.

        The reason is that random numbers were drawn, or that two examples are in the same memory. A generator may have been made
        by one of the reads. It is looked for at the 1st, 10th, 100th ... read.
        """
        has_new = False
        while self.reads >= self._look_at:
            self._look_at *= 10
            has_new = self._set_trap() or has_new
        is_due = has_new or (self._is_overlapping and not self._copies)
        self._copies = self._copies or self._is_overlapping
        if self._checks_each or not (has_new or self._trap.drawn_from()):
            return is_due
        self._checks_each = True
        return True

    def end(self) -> None:
        """Call this when all examples of the batch are loaded, and then seed the global generators anew."""
        self._is_checking = False
        self._overlaps.clear()
        if self._copied:
            self._tell_if_overwritten(self._copied)
            self._copied, self._is_overlapping = [], False

    def _load(self, index: Any) -> Any:
        self.reads += 1
        load, reason = self._checked if self._is_checking and self._checks_each else self._load_one, ""
        for _ in range(2):  # an error that does not come again is not the split's
            try:
                return self._apart(index, load(index))
            except SplitRefused as refused:
                reason = refused.reason
                break
            except Exception as error:  # the data set may raise anything. If it also fails without the split, that is raised
                with preserved_random_states():
                    self._read_whole(index)
                reason = f"loading it in stages raised {type(error).__name__}: {error}"
        self._misfits += 1
        self._tell_or_refuse(index, reason)
        return WHOLE

    def _load_many(self, indices: list[Any]) -> list[Any]:
        assert self._stages.load_many is not None
        overwritten: Sequence[Any] = ()
        if not (self._is_checking and self._checks_each) and not self._copies:
            try:
                loaded = self._stages.load_many(indices)
                self.reads += len(indices)
                if not self._is_overlapped(indices, loaded):
                    return loaded
                self._copies, overwritten = True, loaded
            except SplitRefused:  # at least one of them does not fit: it is found below
                pass
            except Exception:  # as in _load
                with preserved_random_states():
                    read_batch(self._dataset, indices)
        one_by_one = [self._load(index) for index in indices]
        self._tell_if_overwritten(zip(indices, overwritten, one_by_one, strict=False))
        return one_by_one

    def _is_overlapped(self, indices: list[Any], loaded: Any) -> bool:
        """Returns whether examples that were loaded in one call are in the same memory."""
        overlaps = Overlaps()
        return isinstance(loaded, (list, tuple)) and any(map(overlaps.add, indices, loaded))

    def _apart(self, index: Any, example: Any) -> Any:
        """Returns an example as it was loaded, or a copy of it if the data set is known to use memory twice."""
        if self._copies:
            copied = copy_example(example)
            if self._is_overlapping:
                self._copied.append((index, example, copied))
            return copied
        if self._is_checking and not self._is_overlapping:
            self._is_overlapping = self._overlaps.add(index, example)
        return example

    def _tell_if_overwritten(self, copied: Iterable[tuple[Any, Any, Any]]) -> None:
        """Says so if the data set uses its memory again. What examples have in common may also never change.

        Args:
            copied: Index, example as it is now, and a copy of it as it was.
        """
        for index, example, copy in copied:
            if difference(copy, example, takes_apart=True) is not None:
                name = type(self._dataset).__name__
                self.note = self.note or (
                    f"example {index!r} is overwritten when a later one of its batch is loaded, since {name} uses its memory "
                    "again: from now on, each example is copied when it is loaded"
                )
                return

    def _checked(self, index: Any) -> Any:
        """Loads one example, and raises `SplitRefused` if that draws random numbers."""
        self._trap.set()
        example = self._load_one(index)
        if who := self._trap.drawn_from():
            raise SplitRefused(f"loading it draws random numbers from {who}")
        return example

    def _augment(self, index: Any, example: Any) -> Any:
        return self._read_whole(index) if example is WHOLE else self._stages.augment(index, example)

    def _read_whole(self, index: Any) -> Any:
        return read_batch(self._dataset, [index])[0]

    def _tell_or_refuse(self, index: Any, reason: str) -> None:
        if self.refusal is not None:
            raise self.refusal(f"example {index!r}: {reason}")
        if self.may_fail and self.reads >= _ENOUGH_READS and self._misfits > _LARGEST_MISFIT_SHARE * self.reads:
            raise SplitFails(
                f"{self._misfits} of the {self.reads} examples that this process has read do not fit (the last one, {index!r}: "
                f"{reason})"
            )
        if self._misfits == 1:
            self.note = (
                f"example {index!r} does not fit the split of the data set: {reason}. This example and each one like it is read "
                f"whole for each use, which takes the time of a read each time. Use {earliest(Needs.examples).option} if there "
                "are many"
            )
