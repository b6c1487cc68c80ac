"""What an echo of a whole batch costs the host: processor time of a Trainer's step, against that on the bare loader."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from report import Table, progress, verdict
from timing import alternate
from trainer import Clock, Ready, SleepingModel, fit

from lightning_echo import EchoDataModule, InsertionPoint

_FACTOR = 16  # fifteen of sixteen steps are echoes
_REQUIRED_MICROSECONDS = 60
_POINTS = (InsertionPoint.after_batching, InsertionPoint.after_transfer)


def echoes(quick: bool) -> Table:
    steps, rounds = (500, 5) if quick else (1000, 31)
    progress("cost of an echo on the host")
    runs = {"none": partial(_microseconds, Ready(steps), steps)}
    for point in _POINTS:
        runs[point.value] = partial(_echoed, point, steps)
    times = alternate(runs, rounds)
    rows = []
    for point in _POINTS:
        pairs = zip(times[point.value], times["none"], strict=True)
        low, extra, high = statistics.quantiles((echo - none for echo, none in pairs), n=4)
        each = [statistics.median(times[name]) for name in ("none", point.value)]
        passed = verdict(extra < _REQUIRED_MICROSECONDS)
        rows.append((point.value, *each, extra, low, high, _REQUIRED_MICROSECONDS, passed))
    text = (
        f"Trainer on the CPU, an empty step, batches of {Ready.SHAPE} bytes and labels, factor {_FACTOR}, {steps} steps, "
        f"median of {rounds} rounds; us = processor time per step"
    )
    columns = ("point", "bare loader us", "echoed us", "extra us", "quarter under", "quarter over", "required us", "passed")
    return Table("echoes", text, columns, rows)


def _echoed(point: InsertionPoint, steps: int) -> float:
    data = EchoDataModule.from_dataloaders(Ready(steps), factor=_FACTOR, insertion_point=point, seed=0)
    return _microseconds(data, steps)


def _microseconds(data: Any, steps: int) -> float:
    clock = Clock(time.process_time)
    fit(SleepingModel(0), data, [clock], max_epochs=1)
    assert clock.start is not None
    return (clock.ends[0] - clock.start) / steps * 1e6
