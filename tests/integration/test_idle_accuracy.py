"""The logged idle fraction against the truth of runs that sleep: within 0.03, whatever else the host does.

The truth is computed from stamps of the sources, steps and validations themselves (idle_runs.py), so that a machine that sleeps
too long or is busy otherwise moves truth and measurement alike. Sleeps are of 5 ms and more, runs of 40 steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from idle_runs import MS, STEPS, Sleeper, Sleeping, TimedLoader, fit
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, StagedDataset

pytestmark = pytest.mark.alone

TOLERANCE = 0.03


def truth(loader: TimedLoader, model: Sleeper) -> float:
    """Waits after the first batch, of the time from its arrival to the last step's end, without validation."""
    assert loader.arrived is not None
    inside = sum(end - begin for begin, end in model.validations if end < model.ended[-1])
    return sum(loader.waited[1:]) / (model.ended[-1] - loader.arrived - inside)


@pytest.mark.parametrize(("wait", "step"), [(0, 20), (10, 10), (45, 5)])
def test_idle_fraction_of_a_source_and_a_step_of_known_durations(wait: int, step: int) -> None:
    loader = TimedLoader(Sleeping([300 * MS] + [wait * MS] * (STEPS - 1)))  # the first batch takes long, which is another figure
    model = Sleeper(step * MS, loader)
    logged = fit(model)
    assert logged["echo/idle_fraction"] == pytest.approx(truth(loader, model), abs=TOLERANCE)
    idle = wait * MS / (wait * MS + median(loader.used))  # on a slow host a step takes longer than it sleeps
    assert logged["echo/idle_fraction"] == pytest.approx(idle, abs=0.15), "the run is what it should be"
    assert logged["echo/first_batch_seconds"] == pytest.approx(loader.waited[0], abs=20 * MS)
    waits = sum(loader.waited[1:]) / STEPS
    assert logged["echo/data_wait_seconds"] == pytest.approx(waits, abs=2 * MS)


class Slow(pl.Callback):
    """What else a host does between steps."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self.seconds)

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)


class SlowLogger(pl.loggers.CSVLogger):
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(5 * MS)


def test_slow_callbacks_and_loggers_are_no_idling(tmp_path: Path) -> None:
    """10 ms of waiting, 10 of the step, and 15 of other things."""
    loader = TimedLoader(Sleeping([10 * MS] * STEPS))
    model = Sleeper(10 * MS, loader)
    logged = fit(model, Slow(5 * MS), logger=SlowLogger(tmp_path), log_every_n_steps=1)
    assert logged["echo/idle_fraction"] == pytest.approx(truth(loader, model), abs=TOLERANCE)
    assert logged["echo/idle_fraction"] < 0.4


def test_validation_in_the_middle_of_an_epoch_is_neither_idling_nor_time() -> None:
    """Four validations of 0.2 s: twice as long as what is measured. Some come in the middle of an accumulation."""
    loader = TimedLoader(Sleeping([10 * MS] * STEPS))
    model = Sleeper(10 * MS, loader, validation_seconds=0.2)
    logged = fit(model, val_check_interval=10, limit_val_batches=1.0, accumulate_grad_batches=7)
    assert len(model.validations) == 4
    assert logged["echo/idle_fraction"] == pytest.approx(truth(loader, model), abs=TOLERANCE)
    assert logged["echo/idle_fraction"] > 0.35
    assert STEPS * (logged["echo/step_seconds"] + logged["echo/data_wait_seconds"]) < 0.2 * 4 + 0.8


class Slowly(StagedDataset):
    """Reading takes a while."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def load(self, index: Any) -> Any:
        time.sleep(self.seconds)
        return torch.ones(1)

    def augment(self, example: Any) -> Any:
        return example


@pytest.mark.parametrize(
    ("read", "step", "echo", "uses"),
    [
        (10, 10, None, 1),  # four examples a batch: 40 ms against 10
        (5, 25, None, 1),  # 20 ms against 25: hidden behind the step
        (25, 20, "after_batching", 2),  # 100 ms against 40, for every other step
    ],
)
def test_with_a_worker_what_the_step_hides_of_its_time_is_no_idling(read: int, step: int, echo: str | None, uses: int) -> None:
    plain = DataLoader(Slowly(4 * STEPS, read * MS), 4, num_workers=1)
    loader = TimedLoader(plain if echo is None else EchoLoader(plain, uses, insertion_point=echo, seed=1))
    model = Sleeper(step * MS, loader)
    logged = fit(model)
    assert logged["echo/idle_fraction"] == pytest.approx(truth(loader, model), abs=TOLERANCE)
    unhidden = max(0.0, 1 - uses * median(loader.used[1:]) / (4 * read * MS))
    assert logged["echo/idle_fraction"] == pytest.approx(unhidden, abs=0.15), "the run is what it should be"
