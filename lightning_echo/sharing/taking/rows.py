"""Whole batches, cut for a training with another batch size: the rows of each leaf, from the first on.

A leaf is a tensor, an array, or a list or tuple of plain values (what torch's collate function makes of strings). All leaves of a
batch must have the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["cut", "joined", "rows_of"]

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def rows_of(batch: Any) -> int:
    """Returns the number of rows.

    Raises:
        ValueError: The leaves have different numbers of rows, or one has no rows.

    Example:
        >>> rows_of({"image": torch.zeros(3, 8), "name": ["a", "b", "c"]})
        3
    """
    found = {_length(leaf) for leaf in _leaves(batch)}
    if len(found) != 1 or None in found:
        counts = ", ".join(sorted(map(str, found))) or "none"
        raise ValueError(
            f"a shared batch cannot be cut for another batch size: its leaves must have one number of rows, got {counts}. Give "
            "the loader of each training the batch size of the others"
        )
    return int(found.pop() or 0)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Returns some rows of a batch.

    Example:
        >>> cut({"x": torch.arange(4), "name": ["a", "b", "c", "d"]}, 1, 3)
        {'x': tensor([1, 2]), 'name': ['b', 'c']}
    """
    return _mapped(lambda leaf: leaf[start:stop], batch)


def joined(parts: Sequence[Any]) -> Any:
    """Returns the rows of batches one after the other, as one batch.

    Example:
        >>> joined([[torch.tensor([1]), ["a"]], [torch.tensor([2]), ["b"]]])
        [tensor([1, 2]), ['a', 'b']]
    """
    return parts[0] if len(parts) == 1 else _mapped(_join, *parts)


def _join(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(leaves)
    if isinstance(first, np.ndarray):
        return np.concatenate(leaves)
    return type(first)(value for leaf in leaves for value in leaf)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, dict):
        return False
    return not isinstance(value, list | tuple) or (
        not hasattr(value, "_fields") and bool(value) and all(isinstance(part, _PLAIN) for part in value)
    )


def _leaves(batch: Any) -> list[Any]:
    if _is_leaf(batch):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [leaf for part in parts for leaf in _leaves(part)]


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return len(leaf) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list | tuple) else None


def _mapped(function: Callable[..., Any], *batches: Any) -> Any:
    """Returns the result of a function for each leaf, in containers like those of the first batch."""
    first = batches[0]
    if _is_leaf(first):
        return function(*batches)
    if isinstance(first, dict):
        return {key: _mapped(function, *(batch[key] for batch in batches)) for key in first}
    parts = [_mapped(function, *several) for several in zip(*batches, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
