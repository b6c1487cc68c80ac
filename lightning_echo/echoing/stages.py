"""The stages that an example goes through: ``load`` is reused, ``augment`` is redone for each use.

A data set says where it can be cut by having both stages as methods (`StagedDataset`, as a base class or
only in shape), or the user names the cut (`StagedDataset.of`), or it is inferred (splits.py). Whatever the
origin, a worker runs the same small value, `Stages`: two functions, and a third where the data set reads
whole batches at once.

``Subset`` and ``ConcatDataset`` only route indices, so stages are made for the data sets inside and routed
the same way. Both are looked through by what they do, not by name: a subclass that overrides ``__getitem__``
is a data set of its own.

A later point may cut ``load`` once more, into ``read`` and ``decode``; nothing here stands in its way.
"""

from __future__ import annotations

import bisect
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

Load = Callable[[Any], Any]
LoadMany = Callable[[list[Any]], list[Any]]
Augment = Callable[[Any, Any], Any]


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


class Stages:
    """What a worker runs for one data set. A value: the functions are looked up once, not for every example.

    Attributes:
        load: index -> example. Its result is reused.
        augment: index, example -> what the collate function gets. Redone for each use; the index only tells which data set
            inside a ``ConcatDataset`` the example came from.
        load_many: indices -> examples in one call, where the innermost data set has a ``__getitems__`` of its own, else
            None. Where it is set, fresh examples go through it and not through ``load``.
        reused: What is in ``load``, for people, e.g. ``("load", "Resize")``.
        redone: What is in ``augment``, e.g. ``("RandomResizedCrop", "RandomHorizontalFlip")``; empty when nothing is.
        augment_routes: Whether ``augment`` looks at the index.
    """

    __slots__ = ("augment", "augment_routes", "load", "load_many", "redone", "reused")

    def __init__(
        self,
        load: Load,
        augment: Augment,
        *,
        reused: tuple[str, ...],
        redone: tuple[str, ...],
        load_many: LoadMany | None = None,
        augment_routes: bool = False,
    ) -> None:
        self.load = load
        self.augment = augment
        self.load_many = load_many
        self.reused = reused
        self.redone = redone
        self.augment_routes = augment_routes

    def __repr__(self) -> str:
        return f"reuse [{', '.join(self.reused)}], redo [{', '.join(self.redone)}]"


class WholeDataset(Stages):
    """Stages of a data set that is not cut (``after_augmentation``): all of it is reused.

    >>> stages = WholeDataset([10, 20])
    >>> stages.augment(1, stages.load(1)), stages
    (20, reuse [load, augment], redo [])
    """

    __slots__ = ()

    def __init__(self, dataset: Any) -> None:
        super().__init__(
            dataset.__getitem__,
            unchanged,
            reused=("load", "augment"),
            redone=(),
            load_many=batched(dataset),
        )


class ProtocolStages(Stages):
    """Stages of a data set that has them as methods.

    >>> ProtocolStages(StagedDataset.of([1, 2], augment=float)).augment(0, 1)
    1.0
    """

    __slots__ = ()

    def __init__(self, dataset: Any) -> None:
        load, augment, load_many = dataset.load, dataset.augment, None
        if isinstance(dataset, AugmentedDataset):
            load, augment = dataset._inner.__getitem__, dataset._augment_one
            load_many = batched(dataset._inner)
        super().__init__(
            load,
            lambda index, example: augment(example),
            reused=("load",),
            redone=("augment",),
            load_many=load_many,
        )


class SubsetStages(Stages):
    """Stages of ``subset``, made of those of the data set inside."""

    __slots__ = ()

    def __init__(self, subset: Subset[Any], inner: Stages) -> None:
        load, many, augment = inner.load, inner.load_many, inner.augment
        load_many: LoadMany | None = None
        if many is not None:
            load_many = lambda indices: many([subset.indices[index] for index in indices])  # noqa: E731
        super().__init__(
            lambda index: load(subset.indices[index]),
            # The usual case costs nothing more.
            (lambda index, example: augment(subset.indices[index], example)) if inner.augment_routes else augment,
            reused=inner.reused,
            redone=inner.redone,
            load_many=load_many,
            augment_routes=inner.augment_routes,
        )


class ConcatStages(Stages):
    """Stages of ``concat``, made of those of the data sets inside; it reads no whole batches."""

    __slots__ = ()

    def __init__(self, concat: ConcatDataset[Any], inner: list[Stages]) -> None:
        ends = concat.cumulative_sizes

        def load(index: Any) -> Any:
            part, index = locate(ends, index)
            return inner[part].load(index)

        def augment(index: Any, example: Any) -> Any:
            part, index = locate(ends, index)
            return inner[part].augment(index, example)

        redoes = any(stages.augment is not unchanged for stages in inner)
        super().__init__(
            load,
            augment if redoes else unchanged,
            reused=_without_repeats(name for stages in inner for name in stages.reused),
            redone=_without_repeats(name for stages in inner for name in stages.redone),
            augment_routes=redoes,
        )


def unchanged(index: Any, example: Any) -> Any:
    """The ``augment`` of stages that redo nothing."""
    return example


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


def is_subset(dataset: Any) -> TypeGuard[Subset[Any]]:
    """Whether ``dataset`` does nothing but choose indices of the data set inside."""
    return _routes_as(dataset, Subset, ("__getitem__", "__getitems__"))


def is_concat(dataset: Any) -> TypeGuard[ConcatDataset[Any]]:
    """Whether ``dataset`` does nothing but string other data sets together."""
    return _routes_as(dataset, ConcatDataset, ("__getitem__", "__getitems__"))


def _routes_as(dataset: Any, base: type, methods: tuple[str, ...]) -> bool:
    return isinstance(dataset, base) and all(
        getattr(type(dataset), method, None) is getattr(base, method, None) for method in methods
    )


def locate(ends: list[int], index: int) -> tuple[int, int]:
    """Returns which data set of a ``ConcatDataset`` an index falls into, and its index there."""
    if index < 0:
        index += ends[-1]
    part = bisect.bisect_right(ends, index)
    return part, index - ends[part - 1] if part else index


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


def _without_repeats(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
