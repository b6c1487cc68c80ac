"""What a cache holds, and how often it was of use."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheCounts"]


@dataclass(frozen=True)
class CacheCounts:
    """What the cache of a node holds, and how often it was of use in a run.

    Attributes:
        examples: Examples that are held.
        bytes: Bytes that they take.
        hits: Fresh examples that were delivered on the ranks of this node and were held, so that nothing was read for them.
        misses: Fresh examples that were delivered on the ranks of this node and had to be read.
        is_full: Whether nothing is added any more.
        hold: What is held of an example: ``"raw"``, ``"loaded"`` or ``"whole"``.
        size: Bytes that the cache may hold.
    """

    examples: int
    bytes: int
    hits: int
    misses: int
    is_full: bool
    hold: str
    size: int

    @property
    def hit_fraction(self) -> float:
        """Share of the fresh examples that were held; 0 before the first one."""
        return self.hits / ((self.hits + self.misses) or 1)
