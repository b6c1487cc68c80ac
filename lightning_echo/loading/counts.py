"""What was delivered: fresh and echoed examples, counted exactly."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EchoCounts"]


@dataclass(frozen=True)
class EchoCounts:
    """Examples delivered on this rank.

    Attributes:
        fresh: First uses.
        echoed: Further uses of the same output of the stage before the insertion point.
        refetched: Examples that were read again after a resume, because they were live and no process held them. They are among
            the echoed ones, or were read together with an echoed one.

    Example:
        >>> counts = EchoCounts(fresh=8, echoed=24)
        >>> counts.delivered, counts.factor
        (32, 4.0)
    """

    fresh: int = 0
    echoed: int = 0
    refetched: int = 0

    @property
    def delivered(self) -> int:
        """All examples delivered, fresh and echoed."""
        return self.fresh + self.echoed

    @property
    def factor(self) -> float:
        """Uses per fresh example so far; 1 before the first example."""
        return self.delivered / self.fresh if self.fresh else 1.0

    def __add__(self, other: EchoCounts) -> EchoCounts:
        return EchoCounts(self.fresh + other.fresh, self.echoed + other.echoed, self.refetched + other.refetched)
