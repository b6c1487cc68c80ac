"""`EchoLoaders`: the `EchoLoader`s that a Trainer combines, and what can be said of all of them together.

A step takes a batch of each, so that counts add up. Times do not: the workers of one loader run beside those of another, and the
step waits for the slowest. What has no meaning for several (the passes over "the" data) is said of each only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_echo.loading.counts import EchoCounts
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.training.collection import leaves_of

__all__ = ["EchoLoaders", "Echoed", "common_factor", "echoed_in", "parts_of"]


class EchoLoaders(Mapping[str, EchoLoader]):
    """The `EchoLoader`s of a collection by name.

    Args:
        loaders: By name, at least one.
        beside: Names of the loaders of the collection that are not echoed.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> options = {"insertion_point": "after_augmentation", "seed": 0}
        >>> loaders = {name: EchoLoader(DataLoader(range(8), batch_size=4), 2, **options) for name in ("scans", "text")}
        >>> together = EchoLoaders(loaders)
        >>> _ = [(next(scans), next(text)) for scans, text in [(iter(loaders["scans"]), iter(loaders["text"]))]]
        >>> together.factor, together.counts
        (2.0, EchoCounts(fresh=8, echoed=0, refetched=0))
    """

    def __init__(self, loaders: Mapping[str, EchoLoader], beside: tuple[str, ...] = ()) -> None:
        self._loaders, self.beside = dict(loaders), beside

    def __getitem__(self, name: str) -> EchoLoader:
        return self._loaders[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    @property
    def counts(self) -> EchoCounts:
        """Examples delivered on this rank so far, of all of them."""
        return reduce(EchoCounts.__add__, (loader.counts for loader in self.values()), EchoCounts())

    @property
    def factor(self) -> float:
        """The echo factor last set; where they have factors of their own, see `_together`."""
        return _together(loader.factor for loader in self.values())

    @property
    def factor_in_force(self) -> float:
        """The same of the batches that come next."""
        return _together(loader.factor_in_force for loader in self.values())

    @property
    def is_equal(self) -> bool:
        """Whether one factor was set for all of them."""
        return len({loader.factor for loader in self.values()}) == 1

    @property
    def is_one(self) -> bool:
        """Whether the cost model can judge them as one: same factor, all with workers or all without, nothing beside."""
        alike = {(loader.factor, loader.num_workers > 0) for loader in self.values()}
        points = {loader.insertion_point for loader in self.values() if not loader.num_workers}  # their costs add up
        return len(alike) == 1 and len(points) <= 1 and not self.beside

    @property
    def passes(self) -> None:
        """Each has passes of its own."""
        return None


Echoed: TypeAlias = EchoLoader | EchoLoaders


def echoed_in(loaders: Any) -> Echoed | None:
    """What is echoed of what a Trainer trains on: the loader, those of a collection, or nothing (None)."""
    leaves = leaves_of(loaders)
    echoed = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, EchoLoader)}
    if not echoed:
        return None
    if leaves.keys() == {""}:
        return echoed[""]
    return EchoLoaders(echoed, tuple(name for name in leaves if name not in echoed))


def parts_of(echoed: Echoed | None) -> Mapping[str, EchoLoader]:
    """By name; one that stands alone has the empty name."""
    if echoed is None:
        return {}
    return echoed if isinstance(echoed, EchoLoaders) else {"": echoed}


def common_factor(factors: Mapping[str, float]) -> float:
    """The echo factor that all loaders have.

    Raises:
        MisconfigurationException: They have factors of their own.
    """
    if len(set(factors.values())) > 1:
        said = ", ".join(f"{name} {factor:g}" for name, factor in factors.items())
        raise MisconfigurationException(
            f"the loaders have echo factors of their own ({said}), and here there must be one for all of them (a controller "
            "decides on a single one): give all of them the same factor, or leave the controller out and ask each EchoLoader"
        )
    return next(iter(factors.values()))


def _together(factors: Iterator[float]) -> float:
    """Of the batches that steps take, one of each loader, the share 1 / this is fresh: the harmonic mean."""
    each = list(factors)
    return each[0] if len(set(each)) == 1 else len(each) / sum(1 / factor for factor in each)
