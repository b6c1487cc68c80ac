"""What `EchoCallback` costs the host per step: in processor time, since nothing here waits and others may run beside it."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from report import Table, progress, verdict
from timing import alternate
from trainer import Clock, Ready, SleepingModel, fit

from lightning_echo import EchoCallback, EchoLoader

_REQUIRED_MICROSECONDS, _STEP_MICROSECONDS = 30, 10_000


def measuring(quick: bool) -> Table:
    steps, rounds = (500, 5) if quick else (1000, 51)
    rows = []
    for name, make in (("any iterable", Ready), ("EchoLoader", _echoed)):
        progress(f"cost of measuring, {name}")
        runs = {kind: partial(_microseconds, make, kind, steps) for kind in ("none", "empty", "echo")}
        times = alternate(runs, rounds)
        pairs = zip(times["echo"], times["none"], strict=True)  # many short rounds, since the machine's speed changes
        low, extra, high = statistics.quantiles((echo - none for echo, none in pairs), n=4)
        each, share = [statistics.median(times[kind]) for kind in runs], 100 * extra / _STEP_MICROSECONDS
        passed = verdict(extra < _REQUIRED_MICROSECONDS)
        rows.append((name, *each, extra, low, high, share, _REQUIRED_MICROSECONDS, passed))
    text = f"Trainer on an empty training step of {steps} steps, median of {rounds} rounds; us = processor time per step"
    columns = (
        *("loader", "no callback us", "empty callback us", "EchoCallback us", "extra us", "quarter under", "quarter over"),
        *("% of a 10 ms step", "required us", "passed"),
    )
    return Table("measuring", text, columns, rows)


def _echoed(batches: int) -> EchoLoader:
    return EchoLoader(Ready(batches), 16, seed=0)  # next to nothing is read: the less noise


def _microseconds(make: Any, kind: str, steps: int) -> float:
    import lightning.pytorch as pl

    callbacks = {"none": [], "empty": [pl.Callback()], "echo": [EchoCallback(summary=False)]}[kind]
    clock = Clock(time.process_time)
    fit(SleepingModel(0), make(steps), [clock, *callbacks], max_epochs=1)
    assert clock.start is not None
    return (clock.ends[0] - clock.start) / steps * 1e6
