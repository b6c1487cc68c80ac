"""The parts of a loader's work that can be run alone: those that data echoing cuts a data set into (splitting/splits.py).

A `Part` is a function that a worker calls once, with its own data set. It returns one or two functions (`Halves`):

* the first half of a batch's work: indices -> values,
* the second half, if it is timed by itself: indices and these values -> examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_echo.fetching.choice import choose
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.protecting.protect import copy_example
from lightning_echo.splitting.staged import batched
from lightning_echo.splitting.stages import Stages

__all__ = ["Cuts", "Halves", "MakeStages", "Part", "both_halves", "cuts", "first_half", "second_half", "whole"]

FirstHalf = Callable[[list[Any]], list[Any]]
SecondHalf = Callable[[list[Any], list[Any]], list[Any]]
MakeStages = Callable[[Any], Stages]


class Halves(NamedTuple):
    """The functions of a part.

    Attributes:
        first: Runs the first half.
        second: Runs the second half; None: the part has one half only.
    """

    first: FirstHalf
    second: SecondHalf | None = None


Part = Callable[[Any], Halves]


class Cuts(NamedTuple):
    """Where data echoing can cut a data set.

    Attributes:
        after_reading: Makes the stages of the cut after reading; None: there is no such cut.
        before_augmenting: Makes the stages of the cut before the augmentation; None: there is no such cut.
        points: The insertion points that are possible, earliest first.
    """

    after_reading: MakeStages | None
    before_augmenting: MakeStages | None
    points: tuple[str, ...]


def whole(dataset: Any) -> Halves:
    """Returns the part that does everything that the loader does for examples."""
    return Halves(batched(dataset) or (lambda indices: [dataset[index] for index in indices]))


def both_halves(make_stages: MakeStages, dataset: Any) -> Halves:
    """Returns the part that does everything, divided at a cut: before it and after it."""
    stages = make_stages(dataset)
    return Halves(_load_many(stages), lambda indices, items: list(map(stages.augment, indices, items)))


def first_half(make_stages: MakeStages, dataset: Any) -> Halves:
    """Returns the part before a cut alone."""
    return Halves(_load_many(make_stages(dataset)))


def second_half(make_stages: MakeStages, items: Mapping[Any, Any], dataset: Any) -> Halves:
    """Returns the part after a cut alone.

    Args:
        make_stages: Makes the functions before and after the cut.
        items: By index, what the part before the cut returns; an item that is missing is loaded.
        dataset: The worker's data set.
    """
    stages = make_stages(dataset)

    def prepare(index: Any) -> Any:
        return stages.augment(index, copy_example(items[index]) if index in items else stages.load(index))

    return Halves(lambda indices: list(map(prepare, indices)))


def _load_many(stages: Stages) -> FirstHalf:
    return stages.load_many or (lambda indices: list(map(stages.load, indices)))


def cuts(loader: DataLoader[Any]) -> Cuts:
    """Returns where data echoing can cut the loader's data set."""
    source = Source(loader)
    chosen = choose(source, InsertionPoint.auto)
    needs = chosen.point.properties.needs
    points = tuple(point.value for point in points_from(needs))
    before_augmenting = chosen.make_stages if needs is Needs.split else None
    if source.prepared_in_workers and before_augmenting is None:
        return Cuts(None, None, points)  # perhaps only the workers can read the data set
    try:
        of_raw_items = choose(source, earliest(Needs.raw_items))
    except ValueError:  # the data set cannot be cut after reading
        return Cuts(None, before_augmenting, points)
    return Cuts(of_raw_items.make_stages, before_augmenting, (of_raw_items.point.value, *points))
