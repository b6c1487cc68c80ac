"""The stages that an example goes through: ``load`` is reused, ``augment`` is redone for each use.

What both consist of is the insertion point's matter: at ``after_read``, ``load`` only reads, and ``augment`` decodes first.

A data set says where it can be cut by having both stages as methods (`StagedDataset`, as a base class or only in shape), or the
user names the cut (`StagedDataset.of`), or it is inferred (describe.py). Whatever the origin, a worker runs the same small value,
`Stages`: two functions, and a third where the data set reads whole batches at once.

``Subset`` and ``ConcatDataset`` only route indices, so stages are made for the data sets inside and routed the same way.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_echo.splitting.staged import AugmentedDataset, LoadMany, batched, load_of

Load = Callable[[Any], Any]
Augment = Callable[[Any, Any], Any]


class Stages:
    """What a worker runs for one data set. A value: the functions are looked up once, not for every example.

    Attributes:
        load: index -> example. Its result is reused.
        augment: index, example -> what the collate function gets. Redone for each use; the index only tells which data set
            inside a ``ConcatDataset`` the example came from.
        load_many: indices -> examples in one call, where the innermost data set has a ``__getitems__`` of its own, else
            None. Where it is set, fresh examples go through it and not through ``load``.
        reused: What is in ``load``, for people, e.g. ``("load", "Resize")`` or ``("read",)``.
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

    @property
    def redoing(self) -> str:
        """What ``augment`` does, for messages."""
        return "decoding and augmenting" if "decode" in self.redone else "augmenting"

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

    >>> from lightning_echo import StagedDataset
    >>> ProtocolStages(StagedDataset.of([1, 2], augment=float)).augment(0, 1)
    1.0
    """

    __slots__ = ()

    def __init__(self, dataset: Any) -> None:
        load, augment, load_many = load_of(dataset), dataset.augment, None
        if isinstance(dataset, AugmentedDataset):
            augment, load_many = dataset._augment_one, then(batched(dataset._inner), dataset._decode_one)
            if dataset._decode_one is None:  # the usual case costs nothing more
                load = dataset._inner.__getitem__
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


class AugmentedStages(Stages):
    """Stages of what `StagedDataset.of` returned, made of those of the data set inside."""

    __slots__ = ()

    def __init__(self, dataset: AugmentedDataset, inner: Stages) -> None:
        redo, augment = inner.augment, dataset._augment_one
        super().__init__(
            inner.load,
            lambda index, raw: augment(redo(index, raw)),
            reused=inner.reused,
            redone=(*inner.redone, "augment"),
            load_many=inner.load_many,
            augment_routes=inner.augment_routes,
        )


def unchanged(index: Any, example: Any) -> Any:
    """The ``augment`` of stages that redo nothing."""
    return example


def then(load_many: LoadMany | None, function: Callable[[Any], Any] | None) -> LoadMany | None:
    """Returns ``load_many``, if there is any, followed by ``function``, if there is any."""
    if load_many is None or function is None:
        return load_many
    return lambda indices: [function(sample) for sample in load_many(indices)]


def _without_repeats(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def locate(ends: list[int], index: int) -> tuple[int, int]:
    """Returns which data set of a ``ConcatDataset`` an index falls into, and its index there."""
    if index < 0:
        index += ends[-1]
    part = bisect.bisect_right(ends, index)
    return part, index - ends[part - 1] if part else index
