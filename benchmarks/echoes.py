"""What an echo of a whole batch costs the host: by itself, and as part of a Trainer's step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from report import Table, progress, verdict
from timing import WARM_UP_BATCHES, alternate
from trainer import Clock, Ready, SleepingModel, fit
from workloads import Transferred

from lightning_echo import EchoDataModule, EchoLoader, InsertionPoint

_FACTOR = 16  # fifteen of sixteen steps are echoes
_ENDLESS = 1e6  # after the start, every batch is an echo
_REQUIRED_MICROSECONDS = 60
_POINTS = (InsertionPoint.after_batching, InsertionPoint.after_transfer)


def echoes(quick: bool) -> Table:
    count, rounds = (500, 5) if quick else (1000, 31)
    progress("cost of an echo on the host")
    runs = {"none": partial(_trained, Ready(count), count)}
    iterators = {point: _echoes(point) for point in _POINTS}
    for point in _POINTS:
        runs[f"{point} alone"] = partial(_alone, iterators[point], count)
        runs[point.value] = partial(_trained_echoes, point, count)
    times = alternate(runs, rounds)
    rows = []
    for point in _POINTS:
        alone = statistics.median(times[f"{point} alone"])
        low, _, high = statistics.quantiles(times[f"{point} alone"], n=4)
        in_trainer = [statistics.median(times[name]) for name in ("none", point.value)]
        rows.append((point.value, alone, low, high, *in_trainer, _REQUIRED_MICROSECONDS, verdict(alone < _REQUIRED_MICROSECONDS)))
    text = (
        f"batches of {Ready.SHAPE} bytes and labels, {count} echoes one after another; beside it a Trainer's empty step on the "
        f"bare loader and at factor {_FACTOR}; median of {rounds} rounds, us = processor time"
    )
    columns = (
        *("point", "echo us", "quarter under", "quarter over", "step on bare loader us", "step echoed us"),
        *("required us", "passed"),
    )
    return Table("echoes", text, columns, rows)


def _echoes(point: InsertionPoint) -> Iterator[Any]:
    loader = EchoLoader(Ready(10**6), _ENDLESS, insertion_point=point, seed=0)
    iterator = iter(Transferred(loader) if point is InsertionPoint.after_transfer else loader)
    for _ in range(WARM_UP_BATCHES):
        next(iterator)
    return iterator


def _alone(iterator: Iterator[Any], count: int) -> float:
    start = time.thread_time()
    for _ in range(count):
        next(iterator)
    return (time.thread_time() - start) / count * 1e6


def _trained_echoes(point: InsertionPoint, steps: int) -> float:
    data = EchoDataModule.from_dataloaders(Ready(steps), factor=_FACTOR, insertion_point=point, seed=0)
    return _trained(data, steps)


def _trained(data: Any, steps: int) -> float:
    clock = Clock(time.process_time)
    fit(SleepingModel(0), data, [clock], max_epochs=1)
    assert clock.start is not None
    return (clock.ends[0] - clock.start) / steps * 1e6
