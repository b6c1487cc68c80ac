"""Data sets that say themselves where they can be cut, by having both stages as methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_echo.echoing.routing import is_subset

LoadMany = Callable[[list[Any]], list[Any]]


class StagedDataset(Dataset[Any]):
    """A map-style data set in two stages, which says itself where it can be echoed before augmentation.

    Subclass it, or give any data set the same two methods: what counts is that ``load`` and ``augment`` are
    callable. ``load`` must not draw random numbers (an echo repeats what it drew), and ``augment`` must need
    nothing but the example (between ``load`` and ``augment`` of one example, others are loaded). Both are
    checked before training.

    >>> class Squares(StagedDataset):
    ...     def load(self, index):
    ...         return index * index
    ...     def augment(self, example):
    ...         return example + 0.5
    ...     def __len__(self):
    ...         return 4
    >>> Squares()[3]
    9.5
    """

    def load(self, index: Any) -> Any:
        """Returns the example at ``index`` as far as it is the same each time: read, decoded, resized."""
        raise NotImplementedError(f"{type(self).__name__} must implement load(index)")

    def augment(self, example: Any) -> Any:
        """Returns what the model's collate function gets for this use of ``example``, which it may edit."""
        raise NotImplementedError(f"{type(self).__name__} must implement augment(example)")

    def __getitem__(self, index: Any) -> Any:
        return self.augment(self.load(index))

    @staticmethod
    def of(dataset: Dataset[Any], augment: Callable[[Any], Any]) -> AugmentedDataset:
        """Returns ``dataset`` with ``augment`` applied to its examples, cut between the two.

        Args:
            dataset: a map-style data set from which the augmentation was taken out.
            augment: what is redone for each use: one example in, one out.

        Raises:
            TypeError: ``augment`` is not callable, or ``dataset`` is a stream.

        >>> StagedDataset.of([1, 2, 3], augment=float)[1]
        2.0
        """
        return AugmentedDataset(dataset, augment)


class AugmentedDataset(StagedDataset):
    """What `StagedDataset.of` returns. Other attributes are those of the data set inside, read and set."""

    # Where to find them in __dict__, so that no attribute of the data set is hidden.
    _OWN = ("_inner", "_augment_one")

    def __init__(self, dataset: Any, augment: Callable[[Any], Any]) -> None:
        if not callable(augment):
            raise TypeError(f"StagedDataset.of: augment must be callable, got {augment!r}")
        if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
            raise TypeError(f"StagedDataset.of: dataset must be map-style (dataset[index]), got {type(dataset).__name__}")
        self.__dict__.update(_inner=dataset, _augment_one=augment)

    def load(self, index: Any) -> Any:
        return self._inner[index]

    def augment(self, example: Any) -> Any:
        return self._augment_one(example)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        # Defined even where it only loops: forwarded by __getattr__, it would leave out the augmentation.
        load_many = batched(self._inner) or (lambda indices: [self._inner[index] for index in indices])
        return [self._augment_one(example) for example in load_many(indices)]

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        # Its own are missing only before it is unpickled; the inner one's special methods do not augment.
        if name in self._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            self.__dict__[name] = value
        else:
            setattr(self._inner, name, value)


def is_staged(dataset: Any) -> bool:
    """Whether ``dataset`` has the shape of a `StagedDataset`; whether it behaves so, the proof decides.

    The proof calls ``load(0)``, and ``open(0)`` in an unrelated ``load(path)`` would close standard input, so
    that what plainly takes a path is not even tried.
    """
    if isinstance(dataset, StagedDataset):
        return True
    load, augment = getattr(dataset, "load", None), getattr(dataset, "augment", None)
    return callable(load) and callable(augment) and _takes_one(load) and _takes_one(augment)


_NO_INDEX = re.compile("path|file|fname|dir|folder|root|url|uri")


def _takes_one(stage: Callable[..., Any]) -> bool:
    """Whether ``stage`` can be called with one value that need not be a path."""
    try:
        signature = inspect.signature(stage)
        signature.bind(None)
    except TypeError:
        return False
    except ValueError:  # built in, without a signature
        return True
    first = next(iter(signature.parameters.values()))
    return not _NO_INDEX.search(first.name) and first.annotation not in (str, "str", Path, "Path")


def batched(dataset: Any) -> LoadMany | None:
    """Returns ``dataset.__getitems__`` where it reads whole batches: that of a ``Subset`` may only loop."""
    innermost = dataset
    while True:
        if is_subset(innermost):
            innermost = innermost.dataset
        elif isinstance(innermost, AugmentedDataset):
            innermost = innermost._inner
        else:
            break
    if not callable(getattr(innermost, "__getitems__", None)):
        return None
    many: LoadMany = dataset.__getitems__
    return many
