"""Stages as workers run them: an example that does not fit the split is noticed when it is read, and is never echoed.

A split was proved on two examples. Here every read is watched: what the data set does with its transforms (watch.py), whether
loading draws random numbers, whether it fails where the data set by itself does not. An example of which that is true is read
whole for each use, by the data set itself, so that nothing of it is left out, done twice or frozen. That takes the time of a read
each time. So it is said, and refused where more than a third of the examples are like that, or where the user asked for this
insertion point.

Random numbers are watched over all reads of a batch, since that takes longer than the rest. Where they were drawn, the examples
of that batch are read again one by one, and so are those of all batches that follow.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from lightning_echo.insertion import Needs, earliest
from lightning_echo.protecting.generators import places_of_generators
from lightning_echo.protecting.randomness import DrawingTrap, preserved_random_states
from lightning_echo.splitting.cut import SplitRefused
from lightning_echo.splitting.staged import batched
from lightning_echo.splitting.stages import Load, Stages

__all__ = ["WHOLE", "WatchedStages"]

_MOST_WHOLE = 1 / 3  # of the examples read
_ENOUGH_READS = 128  # before that share says anything


class _Whole(Enum):  # an enum member, since it stays itself when it is copied or pickled
    read_for_each_use = 1


WHOLE = _Whole.read_for_each_use
"""Stands for an example that is read whole for each use."""


class WatchedStages(Stages):
    """The stages of a data set that was split, watched.

    Args:
        stages: What they consist of. Their ``load`` raises `SplitRefused` for an example that does not fit.
        dataset: The data set, for examples that are read whole.
        refusal: Raised where an example is not read whole but refused; None: only where there are too many of them.

    Attributes:
        note: What is to be said about examples that are read whole; empty if nothing is, or it was said.
    """

    __slots__ = (
        "_checks_each",
        "_dataset",
        "_is_checking",
        "_load_one",
        "_reads",
        "_refusal",
        "_stages",
        "_trap",
        "_wholes",
        "note",
    )

    def __init__(self, stages: Stages, dataset: Any, *, refusal: type[SplitRefused] | None) -> None:
        super().__init__(
            self._load,
            self._augment,
            reused=stages.reused,
            redone=stages.redone,
            load_many=None if stages.load_many is None else self._load_many,
            augment_routes=stages.augment_routes,
        )
        self._stages, self._dataset, self._refusal = stages, dataset, refusal
        self._trap = DrawingTrap([place.state for place in places_of_generators(dataset)])
        many = stages.load_many
        self._load_one: Load = stages.load if many is None else lambda index: many([index])[0]
        self._checks_each = False  # whether random states are looked at for each example, and not for each batch
        self._is_checking = False  # whether they are, of the batch that is loaded now
        self._reads = self._wholes = 0
        self.note = ""

    def begin(self) -> None:
        """Examples of a batch are going to be loaded, and kept."""
        self._is_checking = True
        if not self._checks_each:
            self._trap.set()

    def must_repeat(self) -> bool:
        """Whether random numbers were drawn since `begin`, so that all that was loaded must be loaded again, one by one."""
        if self._checks_each or not self._trap.drawn_from():
            return False
        self._checks_each = True
        return True

    def end(self) -> None:
        """All examples of the batch are loaded; the global generators are to be seeded for what is redone."""
        self._is_checking = False

    def _load(self, index: Any) -> Any:
        self._reads += 1
        try:
            return self._checked(index) if self._is_checking and self._checks_each else self._load_one(index)
        except SplitRefused as refused:
            reason = refused.reason
        except Exception as error:  # whatever the data set raises: by itself it may not
            with preserved_random_states():
                self._read_whole(index)
            reason = f"loading it in stages raised {type(error).__name__}: {error}"
        self._wholes += 1
        self._say_or_refuse(index, reason)
        return WHOLE

    def _load_many(self, indices: list[Any]) -> list[Any]:
        assert self._stages.load_many is not None
        if not (self._is_checking and self._checks_each):
            try:
                loaded = self._stages.load_many(indices)
                self._reads += len(indices)
                return loaded
            except SplitRefused:  # one of them at least
                pass
            except Exception:  # as above
                with preserved_random_states():
                    self._read_whole_many(indices)
        return [self._load(index) for index in indices]

    def _checked(self, index: Any) -> Any:
        self._trap.set()
        example = self._load_one(index)
        if who := self._trap.drawn_from():
            raise SplitRefused(f"loading it draws random numbers from {who}")
        return example

    def _augment(self, index: Any, example: Any) -> Any:
        return self._read_whole(index) if example is WHOLE else self._stages.augment(index, example)

    def _read_whole(self, index: Any) -> Any:
        return self._read_whole_many([index])[0]

    def _read_whole_many(self, indices: list[Any]) -> list[Any]:
        """As the plain loader reads them."""
        many = batched(self._dataset)
        return [self._dataset[index] for index in indices] if many is None else many(indices)

    def _say_or_refuse(self, index: Any, reason: str) -> None:
        if self._refusal is not None:
            raise self._refusal(f"example {index!r}: {reason}")
        if self._reads >= _ENOUGH_READS and self._wholes > _MOST_WHOLE * self._reads:
            raise SplitRefused(
                f"{self._wholes} of the {self._reads} examples that this process has read do not fit (the last one, {index!r}: "
                f"{reason})"
            )
        if self._wholes == 1:
            self.note = (
                f"example {index!r} does not fit the split of the data set: {reason}. It is read whole for each use, and so is "
                f"each one like it, which takes the time of a read each time. Use {earliest(Needs.examples).option} if there "
                "are many"
            )
