"""How many steps an analysis measures in a phase: as many as the user asks for, else a default or as many as there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["StepNumber"]

_FEWEST = 4
_DEFAULT = 100


@dataclass(frozen=True)
class StepNumber:
    """The number of steps of a phase.

    Args:
        asked: What the user asks for; None: 100, or as many as the loader has batches.
        tell: Gets a message if the loader has fewer batches than the default.

    Raises:
        ValueError: The user asks for too few.

    Example:
        >>> StepNumber(None, print).within(8)
        8 steps in each phase: the training loader has no more batches
        8
    """

    asked: int | None
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        if self.asked is not None and self.asked < _FEWEST:
            raise ValueError(f"steps must be >= {_FEWEST}, got {self.asked!r}")

    @property
    def most(self) -> int:
        """The largest number of batches that are taken from a loader."""
        return _DEFAULT if self.asked is None else self.asked

    def within(self, batches: int) -> int:
        """Returns the number of steps for a loader with ``batches`` batches.

        Args:
            batches: Number of batches. If there are more than `most`, they need not be counted further. It must be the same on
                all ranks.

        Raises:
            ValueError: There are fewer batches than the user asks for, or than an analysis needs.
        """
        if batches >= self.most:
            return self.most
        if self.asked is not None:
            raise ValueError(
                f"steps must be at most {batches}, the batches of the training loader, got {self.asked}: give fewer steps, or "
                "none, to measure as many as there are"
            )
        if batches < _FEWEST:
            raise ValueError(
                f"the training loader must have at least {_FEWEST} batches for an analysis, got {batches}: make batches smaller"
            )
        self.tell(f"{batches} steps in each phase: the training loader has no more batches")
        return batches
