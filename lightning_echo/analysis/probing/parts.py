"""What of a loader's work can be run alone: the parts that data echoing cuts a data set into (splitting/splits.py).

A part is a function that a worker calls once with the data set as it is there. It returns one or two functions: what is timed as
the first half of a batch, indices -> values, and what is timed as the second one, indices and values -> examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.fetching.choice import choose
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.protecting.protect import copy_example
from lightning_echo.splitting.staged import batched
from lightning_echo.splitting.stages import Stages

__all__ = ["First", "MakeStages", "Part", "Second", "cuts", "halves", "preparing", "reading", "whole"]

First = Callable[[list[Any]], list[Any]]
Second = Callable[[list[Any], list[Any]], list[Any]]
Part = Callable[[Any], tuple[First, Second | None]]
MakeStages = Callable[[Any], Stages]


def whole(dataset: Any) -> tuple[First, None]:
    """All that the loader does for examples."""
    return batched(dataset) or (lambda indices: [dataset[index] for index in indices]), None


def halves(make_stages: MakeStages, dataset: Any) -> tuple[First, Second]:
    """What a split reuses, and what it redoes."""
    stages = make_stages(dataset)
    return _loading(stages), lambda indices, items: list(map(stages.augment, indices, items))


def reading(make_stages: MakeStages, dataset: Any) -> tuple[First, None]:
    """What a split reuses, alone."""
    return _loading(make_stages(dataset)), None


def preparing(make_stages: MakeStages, kept: Mapping[Any, Any], dataset: Any) -> tuple[First, None]:
    """What a split redoes, of items that are kept in memory; what is not kept is loaded."""
    stages = make_stages(dataset)

    def prepare(index: Any) -> Any:
        return stages.augment(index, copy_example(kept[index]) if index in kept else stages.load(index))

    return lambda indices: list(map(prepare, indices)), None


def _loading(stages: Stages) -> First:
    return stages.load_many or (lambda indices: list(map(stages.load, indices)))


def cuts(loader: DataLoader[Any]) -> tuple[MakeStages | None, MakeStages | None, tuple[str, ...]]:
    """Where data echoing would cut the data set: after reading, before augmentation; and the insertion points that gives."""
    source = Source(loader)
    chosen = choose(source, InsertionPoint.auto)
    needs = chosen.point.properties.needs
    points = [point.value for point in points_from(needs)]
    raw, split = None, chosen.make_stages if needs is Needs.split else None
    if source.prepared_in_workers and split is None:
        return None, None, tuple(points)  # it may not be readable here
    try:
        of_raw_items = choose(source, earliest(Needs.raw_items))
        raw = of_raw_items.make_stages
        points.insert(0, of_raw_items.point.value)
    except ValueError:  # impossible there
        pass
    return raw, split, tuple(points)
