"""Seeds every generator that may be used, with another seed for each batch and each example of a rank."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_echo.planning.hashing import mix
from lightning_echo.protecting.randomness import seed_all

__all__ = ["BATCH", "EXAMPLE", "NoSeeding", "Seeding", "seeders"]

BATCH, EXAMPLE = 1, 2  # purposes of a seed
_FEW = 16  # members of containers that are looked at
_DEEP = 8  # levels of data sets, containers and transforms that are followed


class Seeding:
    """Seeds the three global generators, and those of transforms and data sets that have a method for it (see `seeders`).

    Args:
        dataset: The data set in which such transforms and data sets are searched.
        key: Seed of this rank.
    """

    def __init__(self, dataset: Any, key: int) -> None:
        self._key = key
        self._seeders = list(seeders(dataset).values())

    def seed(self, purpose: int, number: int) -> None:
        """Seeds all generators for a batch (`BATCH`) or for reading an example (`EXAMPLE`)."""
        seed = mix(self._key, purpose, number)
        seed_all(seed)
        for place, seed_one in enumerate(self._seeders):  # each gets another seed, since no two may draw the same numbers
            seed_one(seed + place & 0x7FFFFFFF)


class NoSeeding:
    """Takes the place of a `Seeding` if no random numbers are drawn."""

    def seed(self, purpose: int, number: int) -> None:
        """Does nothing."""


def seeders(dataset: Any) -> dict[int, Callable[[int], Any]]:
    """Returns functions that seed the generators of transforms and data sets, by the ``id`` of the object that has the method.

    The methods are Albumentations' ``set_random_seed(seed)`` and MONAI's ``set_random_state(seed=seed)``, of all objects in a
    chain of data sets that have one. The method of a stream itself is not called. All workers must keep the same seed there: they
    shuffle the examples in the same way, and then divide them among themselves (MONAI's ``ShuffleBuffer``).
    """
    found: dict[int, Callable[[int], Any]] = {}
    seen: dict[int, Any] = {}
    left = deque([(dataset, 0)])
    while left:
        value, depth = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        seeder = None if isinstance(value, IterableDataset) else _seeder_of(value)
        if seeder is not None:
            found[id(value)] = seeder
        is_dataset = depth == 0 or isinstance(value, Dataset)
        if depth < _DEEP and (is_dataset or seeder is None):  # a transform seeds its members itself
            left += [(part, depth + 1) for part in _parts(value, is_dataset)]
    return found


def _parts(value: Any, is_dataset: bool) -> Iterable[Any]:
    if is_dataset:
        return list(getattr(value, "__dict__", {}).values())
    if type(value) in (list, tuple):  # exactly these types: a subclass may read data when it is iterated
        return list(value[:_FEW])
    if type(value) is dict:
        return islice(value.values(), _FEW)
    members = value if isinstance(value, torch.nn.Sequential) else getattr(value, "__dict__", {}).get("transforms")
    return list(members)[:_FEW] if isinstance(members, torch.nn.Sequential | list | tuple) else ()


def _seeder_of(value: Any) -> Callable[[int], Any] | None:
    kind = type(value)  # not the object itself, which may have an attribute for any name
    if callable(getattr(kind, "set_random_seed", None)):
        seeder: Callable[[int], Any] = value.set_random_seed
        return seeder
    if callable(method := getattr(kind, "set_random_state", None)) and "seed" in inspect.signature(method).parameters:
        return lambda seed: value.set_random_state(seed=seed)
    return None
