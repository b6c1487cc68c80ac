"""Seeds of a rank: for every batch and every example one of its own, set wherever random numbers may be drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_echo.echoing.hashing import mix
from lightning_echo.echoing.randomness import seed_all
from lightning_echo.echoing.staged import AugmentedDataset

__all__ = ["BATCH", "EXAMPLE", "Seeding"]

BATCH, EXAMPLE = 1, 2  # what a seed is for
_MISSING = object()


class Seeding:
    """Seeds the three global generators, and transforms with generators of their own (``set_random_seed``).

    Args:
        dataset: Looked through for such transforms.
        key: Seed of this rank.
    """

    def __init__(self, dataset: Any, key: int) -> None:
        self._key = key
        self._seeders = list(_seeders(dataset))

    def seed(self, purpose: int, number: int) -> None:
        """Seeds all of them for a batch (`BATCH`) or for reading an example (`EXAMPLE`)."""
        seed = mix(self._key, purpose, number)
        seed_all(seed)
        for set_random_seed in self._seeders:
            set_random_seed(seed & 0x7FFFFFFF)


def _seeders(dataset: Any) -> Iterable[Callable[[int], Any]]:
    """``set_random_seed`` of transforms, wherever the chain of data sets holds them."""
    if isinstance(dataset, Subset):
        yield from _seeders(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _seeders(part)
    else:
        inner = dataset._inner if isinstance(dataset, AugmentedDataset) else _MISSING
        for value in getattr(dataset, "__dict__", {}).values():
            if callable(set_random_seed := getattr(value, "set_random_seed", None)):
                yield set_random_seed
            elif value is inner or isinstance(value, Subset | ConcatDataset):
                yield from _seeders(value)
