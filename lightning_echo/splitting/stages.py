"""The stages of a data set: ``load``, whose result is reused, and ``augment``, which is redone for each use.

The insertion point decides what is in each of them: at ``after_read``, ``load`` only reads, and ``augment`` first decodes.
However a data set was cut, a worker runs the same small value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_echo.splitting.staged import LoadMany, batched

__all__ = ["Augment", "Load", "Stages", "unchanged", "uncut_stages"]

Load = Callable[[Any], Any]
Augment = Callable[[Any, Any], Any]


class Stages:
    """What a worker runs for one data set. The functions are looked up once, not for every example.

    Attributes:
        load: Gets an index and returns an example. The result is reused.
        augment: Gets an index and an example, and returns what the collate function gets. It runs for each use. The index only
            shows from which data set inside a ``ConcatDataset`` the example came.
        load_many: Gets indices and returns the examples in one call, if the innermost data set has a ``__getitems__`` of its own;
            otherwise None. If it is set, fresh examples are loaded by it and not by ``load``.
        reused: What is in ``load``, for people, e.g. ``("load", "Resize")`` or ``("read",)``.
        redone: What is in ``augment``, e.g. ``("RandomResizedCrop", "RandomHorizontalFlip")``; empty if there is nothing in it.
        augment_routes: Whether ``augment`` uses the index.
        sources: The copies of data sets that ``load`` reads in place of the data sets themselves.
    """

    __slots__ = ("augment", "augment_routes", "load", "load_many", "redone", "reused", "sources")

    def __init__(
        self,
        load: Load,
        augment: Augment,
        *,
        reused: tuple[str, ...],
        redone: tuple[str, ...],
        load_many: LoadMany | None = None,
        augment_routes: bool = False,
        sources: tuple[Any, ...] = (),
    ) -> None:
        self.load = load
        self.augment = augment
        self.load_many = load_many
        self.reused = reused
        self.redone = redone
        self.augment_routes = augment_routes
        self.sources = sources

    @property
    def redoing(self) -> str:
        """What ``augment`` does, for messages."""
        return "decoding and augmenting" if "decode" in self.redone else "augmenting"

    def __repr__(self) -> str:
        return f"reuse [{', '.join(self.reused)}], redo [{', '.join(self.redone)}]"


def unchanged(index: Any, example: Any) -> Any:
    """Returns ``example``: the ``augment`` of stages that redo nothing."""
    return example


def uncut_stages(dataset: Any) -> Stages:
    """Returns the stages of a data set that is not cut (``after_augmentation``): everything is reused.

    >>> stages = uncut_stages([10, 20])
    >>> stages.augment(1, stages.load(1)), stages
    (20, reuse [load, augment], redo [])
    """
    return Stages(dataset.__getitem__, unchanged, reused=("load", "augment"), redone=(), load_many=batched(dataset))
