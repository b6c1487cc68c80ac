"""How long each transform in a ``Compose`` takes: its members are replaced by timed ones, in a worker's own copy of the data set.

A ``Compose`` is found by the name of its class, in the attributes of the data set. So the classes of both versions of torchvision
are found, and others that hold their members in ``transforms``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["TimedTransforms"]

_DEPTH = 8  # largest depth of objects in objects
_MOST_MEMBERS = 64  # an object with more members is not searched


class TimedTransforms:
    """Times the transforms of a data set from now on. It changes the data set, so use it only in a worker.

    Args:
        dataset: The worker's data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._seconds: dict[str, float] = {}
        for compose in list(_composes(dataset, set(), _DEPTH)):
            members = [self._timed(member) for member in compose.transforms]
            compose.transforms = type(compose.transforms)(members)

    def take(self) -> dict[str, float]:
        """Returns the seconds of each transform since the last call, by its name, in the order of the pipeline."""
        taken = dict(self._seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken

    def _timed(self, transform: Any) -> Any:
        if _is_compose(transform):
            return transform  # its members are timed instead
        named = transform if hasattr(transform, "__name__") else type(transform)
        name = base = str(named.__name__)
        number = 1
        while name in self._seconds:  # a second transform of this name
            number += 1
            name = f"{base} ({number})"
        self._seconds[name] = 0.0
        return _Timed(transform, name, self._add)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds


class _Timed:
    """Takes the place of a transform, and times each call."""

    def __init__(self, transform: Any, name: str, add: Callable[[str, float], None]) -> None:
        self._transform, self._name, self._add = transform, name, add

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self._add(self._name, time.perf_counter() - begin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


def _composes(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yields each ``Compose`` that a value refers to, outer ones first."""
    if depth < 0 or id(value) in seen or isinstance(value, torch.Tensor | np.ndarray | str | bytes | type):
        return
    seen.add(id(value))
    if _is_compose(value):
        yield value
    if isinstance(value, dict):
        members = list(value.values())
    elif isinstance(value, list | tuple):
        members = list(value)
    else:
        members = list(getattr(value, "__dict__", {}).values())
    if len(members) <= _MOST_MEMBERS:
        for each in members:
            yield from _composes(each, seen, depth - 1)


def _is_compose(value: Any) -> bool:
    named = any(kind.__name__ == "Compose" for kind in type(value).__mro__)
    return named and isinstance(getattr(value, "transforms", None), list | tuple)
