"""The parts of a loader's work that can be run alone: those that data echoing cuts a data set into (splitting/splits.py).

A `Part` is a function that a worker calls once, with its own data set. It returns one or two functions (`Halves`):

* the first half of a batch's work: indices -> values,
* the second half, if it is timed by itself: indices and these values -> examples.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_echo.caching.arena import Arena
from lightning_echo.caching.example_store import ExampleStore
from lightning_echo.fetching.choice import choose
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.protecting.elsewhere import NotRead, read_elsewhere
from lightning_echo.protecting.protect import copy_example
from lightning_echo.splitting.splits import find_split, make_stages
from lightning_echo.splitting.staged import batched
from lightning_echo.splitting.stages import Stages

__all__ = [
    "Cuts",
    "Halves",
    "InCache",
    "MakeStages",
    "Part",
    "both_halves",
    "cuts",
    "first_half",
    "in_cache",
    "second_half",
    "whole",
]

_MOST_CACHED_BYTES = 2**30
_NOT_PICKLED = (pickle.PicklingError, TypeError, AttributeError)

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


class InCache(NamedTuple):
    """What an example costs in a cache.

    Attributes:
        bytes: The bytes that it takes.
        hit_seconds: Seconds of looking it up.
    """

    bytes: float
    hit_seconds: float


def in_cache(cuts_to_hold: Mapping[str, MakeStages], dataset: Any) -> Halves:
    """Returns the part that puts examples into a cache, and looks them up there.

    Its values are not examples, but for each example a mapping of the forms in which a cache can hold it to `InCache`. A form is
    left out if a cache cannot hold it.

    Args:
        cuts_to_hold: By form, what makes the functions before and after the cut.
        dataset: The worker's data set.
    """
    loads = {hold: _load_many(make_stages(dataset)) for hold, make_stages in cuts_to_hold.items()}

    def put_and_get(indices: list[Any]) -> list[Any]:
        found = {hold: _put_and_get(load(indices)) for hold, load in loads.items()}
        return [{hold: costs[number] for hold, costs in found.items() if costs} for number in range(len(indices))]

    return Halves(put_and_get)


def _put_and_get(examples: list[Any]) -> list[InCache]:
    """Returns what each example costs in a cache; an empty list if it cannot hold them."""
    arena, costs = Arena.create(keys=len(examples), budget_bytes=_MOST_CACHED_BYTES), list[InCache]()
    store = ExampleStore(arena)
    for key, example in enumerate(examples):
        before = arena.counts.bytes
        try:
            is_held = store.put(key, example)
        except _NOT_PICKLED:
            return []
        if not is_held:
            return []
        begin = time.perf_counter()
        store.get(key)
        costs.append(InCache(arena.counts.bytes - before, time.perf_counter() - begin))
    return costs


def _load_many(stages: Stages) -> FirstHalf:
    return stages.load_many or (lambda indices: list(map(stages.load, indices)))


def cuts(loader: DataLoader[Any]) -> Cuts:
    """Returns where data echoing can cut the loader's data set. Examples are read in another process."""
    source = Source(loader)
    found = read_elsewhere(loader, _cuts_there, loader) if source.rebuilds else _cuts_there(None, loader)
    if not isinstance(found, NotRead):
        return found
    possible = points_from(Needs.batches if source.own_batches else Needs.examples)
    return Cuts(None, None, tuple(point.value for point in possible))


def _cuts_there(dataset: Any, loader: DataLoader[Any]) -> Cuts:
    source = Source(loader)
    chosen = choose(source, InsertionPoint.auto)
    needs = chosen.point.properties.needs
    points = tuple(point.value for point in points_from(needs))
    if source.own_batches and source.rebuilds:  # whole batches are echoed, and yet each example is read by its index
        return Cuts(_split(source, raw=True), _split(source, raw=False), points)
    before_augmenting = chosen.make_stages if needs is Needs.split else None
    try:
        of_raw_items = choose(source, earliest(Needs.raw_items))
    except Exception:  # it cannot be cut after reading; or it cannot be read, which the first run will show
        return Cuts(None, before_augmenting, points)
    return Cuts(of_raw_items.make_stages, before_augmenting, (of_raw_items.point.value, *points))


def _split(source: Source, *, raw: bool) -> MakeStages | None:
    """Returns what makes the stages of a cut, wherever the loader is echoed; None if there is no such cut."""
    try:
        split = find_split(source.loader.dataset, source.readable_indices, raw=raw)
    except Exception:  # it is refused; or the data set cannot be read by the integers that it was tried with
        return None
    return partial(make_stages, conventions=split.conventions, raw=raw)
