"""What each transform in a ``Compose`` takes: its members are replaced by timed ones, in a worker's own copy of the data set.

A ``Compose`` is looked for in what the data set holds, by its class's name: those of both versions of torchvision are found, and
others that keep their members in ``transforms``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["TimedTransforms"]

_DEPTH = 8  # of data sets in data sets
_HELD = 64  # members of a list that are looked at


class TimedTransforms:
    """Times the transforms of a data set from now on: for a worker, since the data set is changed.

    Args:
        dataset: Whose.
    """

    def __init__(self, dataset: Any) -> None:
        self._seconds: dict[str, float] = {}
        for compose in list(_composes(dataset, set(), _DEPTH)):
            members = [self._timed(member) for member in compose.transforms]
            compose.transforms = type(compose.transforms)(members)

    def take(self) -> dict[str, float]:
        """Seconds of each since the last time, by its name, in the order of the pipeline."""
        taken = dict(self._seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken

    def _timed(self, transform: Any) -> Any:
        if _is_compose(transform):
            return transform  # its members are timed
        named = transform if hasattr(transform, "__name__") else type(transform)
        name = base = str(named.__name__)
        number = 1
        while name in self._seconds:  # the same transform a second time
            number += 1
            name = f"{base} ({number})"
        self._seconds[name] = 0.0
        return _Timed(transform, name, self._seconds_of)

    def _seconds_of(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds


class _Timed:
    """A transform that says how long each call took; otherwise what it was."""

    def __init__(self, transform: Any, name: str, tell: Any) -> None:
        self._transform, self._name, self._tell = transform, name, tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self._tell(self._name, time.perf_counter() - begin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


def _composes(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Those that a value holds, outer ones first."""
    if depth < 0 or id(value) in seen or isinstance(value, torch.Tensor | np.ndarray | str | bytes | type):
        return
    seen.add(id(value))
    if _is_compose(value):
        yield value
    if isinstance(value, dict):
        held = list(value.values())
    elif isinstance(value, list | tuple):
        held = list(value)
    else:
        held = list(getattr(value, "__dict__", {}).values())
    if len(held) <= _HELD:
        for each in held:
            yield from _composes(each, seen, depth - 1)


def _is_compose(value: Any) -> bool:
    named = any(kind.__name__ == "Compose" for kind in type(value).__mro__)
    return named and isinstance(getattr(value, "transforms", None), list | tuple)
