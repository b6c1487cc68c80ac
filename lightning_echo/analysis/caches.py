"""What a cache could hold of a data set: in which form, how much of it, and the size to ask for.

A cache holds raw items or loaded examples (`CacheConfig.hold`). One cache is shared by all workers and ranks of a machine.
"""

from __future__ import annotations

import math

from lightning_echo.analysis.measured import CachedExample, MeasuredStages
from lightning_echo.insertion import InsertionPoint, Needs, earliest

__all__ = ["HOLDS", "cached_example", "fits_point", "fitting_fraction", "possible_holds", "size_for"]

HOLDS = {"raw": earliest(Needs.raw_items), "loaded": earliest(Needs.split)}
"""The forms, each with the insertion point whose cut gives it."""

_MOST_OF_FREE = 0.75  # the rest is for the buffer of echoes and for the training
_SPARE = 1.05  # a margin, since the mean size of the measured examples may be too small
_MIB, _GIB = 2**20, 2**30


def possible_holds(stages: MeasuredStages) -> tuple[str, ...]:
    """Returns the forms in which a cache can hold an example. If that was not measured, they follow from the insertion points."""
    if stages.in_cache is None:
        return tuple(hold for hold, point in HOLDS.items() if point.value in stages.points)
    return tuple(stages.in_cache)


def fits_point(hold: str, insertion_point: str) -> bool:
    """Whether the cut of the cache does not come after the insertion point."""
    reused = InsertionPoint(insertion_point).properties.reused
    return all(stage in reused for stage in HOLDS[hold].properties.reused)


def cached_example(stages: MeasuredStages, hold: str) -> CachedExample | None:
    """Returns what an example costs in this form; None if that was not measured."""
    return None if stages.in_cache is None else stages.in_cache.get(hold)


def fitting_fraction(stages: MeasuredStages, hold: str) -> float | None:
    """Returns the largest share of the data set that memory holds, in whole percent; None if that is not known."""
    whole = _bytes_of(stages, hold, 1.0)
    if whole is None or stages.free_bytes is None:
        return None
    return min(1.0, math.floor(100 * _MOST_OF_FREE * stages.free_bytes / whole) / 100) if whole else 1.0


def size_for(stages: MeasuredStages, hold: str, fraction: float) -> str | None:
    """Returns the size of a cache for a share of the data set, as `CacheConfig` takes it; None if that is not known."""
    size = _bytes_of(stages, hold, fraction)
    if size is None:
        return None
    return f"{math.ceil(10 * size / _GIB) / 10:g}GiB" if size >= _GIB else f"{max(1, math.ceil(size / _MIB))}MiB"


def _bytes_of(stages: MeasuredStages, hold: str, fraction: float) -> float | None:
    example = cached_example(stages, hold)
    if example is None or stages.examples is None:
        return None
    return _SPARE * fraction * stages.examples * example.bytes
