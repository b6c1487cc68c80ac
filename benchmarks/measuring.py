"""What `EchoCallback` costs the host per step."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from report import Table, progress, verdict
from timing import alternate
from trainer import Clock, Ready, SleepingModel, fit

from lightning_echo import EchoCallback, EchoLoader

_REQUIRED_MICROSECONDS, _STEP_MICROSECONDS = 30, 10_000


def measuring(quick: bool) -> Table:
    steps, rounds = (500, 3) if quick else (4000, 9)
    rows = []
    for name, make in (("any iterable", Ready), ("EchoLoader", _echoed)):
        progress(f"cost of measuring, {name}")
        runs = {kind: partial(_microseconds, make, kind, steps) for kind in ("none", "empty", "echo")}
        times = alternate(runs, rounds)
        extra = [echo - none for echo, none in zip(times["echo"], times["none"], strict=True)]
        middle = statistics.median(extra)
        rows.append(
            (
                *(name, *(statistics.median(times[kind]) for kind in runs), middle, min(extra), max(extra)),
                *(100 * middle / _STEP_MICROSECONDS, _REQUIRED_MICROSECONDS, verdict(middle < _REQUIRED_MICROSECONDS)),
            )
        )
    text = f"Trainer on an empty training step, {steps} steps, median of {rounds} rounds; us = microseconds of the host per step"
    columns = (
        *("loader", "no callback us", "empty callback us", "EchoCallback us", "extra us", "lowest", "highest"),
        *("% of a 10 ms step", "required us", "passed"),
    )
    return Table("measuring", text, columns, rows)


def _echoed(batches: int) -> EchoLoader:
    return EchoLoader(Ready(batches), 2, seed=0)


def _microseconds(make: Any, kind: str, steps: int) -> float:
    import lightning.pytorch as pl

    callbacks = {"none": [], "empty": [pl.Callback()], "echo": [EchoCallback(summary=False)]}[kind]
    clock = Clock()
    fit(SleepingModel(0), make(steps), [clock, *callbacks], max_epochs=1)
    assert clock.start is not None
    return (clock.ends[0] - clock.start) / steps * 1e6
