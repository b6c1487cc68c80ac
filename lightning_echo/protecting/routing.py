"""Data sets that only route indices to the data sets inside: looked through by what they do, not by name.

A subclass that overrides ``__getitem__`` is a data set of its own.
"""

from __future__ import annotations

import bisect
from typing import Any, TypeGuard

from torch.utils.data import ConcatDataset, Subset


def is_subset(dataset: Any) -> TypeGuard[Subset[Any]]:
    """Whether ``dataset`` does nothing but choose indices of the data set inside."""
    return routes_as(dataset, Subset, ("__getitem__", "__getitems__"))


def is_concat(dataset: Any) -> TypeGuard[ConcatDataset[Any]]:
    """Whether ``dataset`` does nothing but string other data sets together."""
    return routes_as(dataset, ConcatDataset, ("__getitem__", "__getitems__"))


def routes_as(dataset: Any, base: type, methods: tuple[str, ...]) -> bool:
    """Whether ``dataset`` is a ``base`` that overrides none of the methods."""
    return isinstance(dataset, base) and all(
        getattr(type(dataset), method, None) is getattr(base, method, None) for method in methods
    )


def locate(ends: list[int], index: int) -> tuple[int, int]:
    """Returns which data set of a ``ConcatDataset`` an index falls into, and its index there."""
    if index < 0:
        index += ends[-1]
    part = bisect.bisect_right(ends, index)
    return part, index - ends[part - 1] if part else index
