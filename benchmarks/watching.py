"""What it costs, per read, that every read of a data set that was split is watched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from report import Table, progress, verdict
from timing import median_seconds
from torch.utils.data import Dataset

from lightning_echo.split.check import WatchedStages
from lightning_echo.split.prove import make_stages

_FRESH = 8  # examples that are read for a batch of 32 at factor 4
_REQUIRED_MICROSECONDS = 3.0
_FOR_ANOTHER_TRANSFORM = 1.0


def unchanged(value: Any) -> Any:
    """A transform that takes no time."""
    return value


class Examples(Dataset[Any]):
    """Reading takes no time either, so that what is left is the watching."""

    def __init__(self, **transforms: Any) -> None:
        self.transform = self.target_transform = None
        vars(self).update(transforms)

    def __getitem__(self, index: int) -> tuple[int, int]:
        image, target = index, index
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


class InCalls(Examples):
    """Reads the examples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [self[index] for index in indices]


def watching(quick: bool) -> Table:
    """Loading a batch's fresh examples, random states looked at before and after, against reading them from the data set."""
    progress("watching")
    cases = {
        "transform": Examples(transform=unchanged),
        "transform and target_transform": Examples(transform=unchanged, target_transform=unchanged),
        "transform, read in calls": InCalls(transform=unchanged),
    }
    rows = []
    for name, dataset in cases.items():
        found = _microseconds(dataset, 200 if quick else 2000, 5 if quick else 15)
        middle = statistics.median(found)
        required = _REQUIRED_MICROSECONDS + (_FOR_ANOTHER_TRANSFORM if dataset.target_transform is not None else 0)
        rows.append((name, middle, min(found), max(found), required, verdict(middle <= required)))
    text = f"beyond what the data set takes by itself, processor time, {_FRESH} fresh examples a batch, median of the rounds"
    return Table("watching", text, ("what it has", "us per read", "lowest", "highest", "required", "passed"), rows)


def _microseconds(dataset: Examples, calls: int, rounds: int) -> list[float]:
    indices = list(range(_FRESH))
    stages = WatchedStages(make_stages(dataset), dataset, refusal=None)
    load_many = stages.load_many

    def watched() -> None:
        stages.begin()
        _ = load_many(indices) if load_many is not None else [stages.load(index) for index in indices]
        assert not stages.must_repeat()
        stages.end()

    def plain() -> None:
        _ = dataset.__getitems__(indices) if isinstance(dataset, InCalls) else [dataset[index] for index in indices]

    def seconds(call: Callable[[], None]) -> float:
        return median_seconds(call, calls, repeats=1, clock=time.process_time)

    return [(seconds(watched) - seconds(plain)) / _FRESH * 1e6 for _ in range(rounds)]
