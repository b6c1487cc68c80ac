"""The logged idle fraction against the truth of runs that sleep: within 0.03, whatever else the host does.

The truth is computed from stamps of the sources, steps and validations themselves (idle_runs.py), so that a machine that sleeps
too long or is busy otherwise moves truth and measurement alike. Sleeps are of 5 ms and more, runs of 40 steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import idle_runs
import lightning.pytorch as pl
import pytest
import torch
from idle_runs import MS, STEPS, Sleeper, Sleeping, TimedLoader, fit
from torch.utils.data import DataLoader

from lightning_echo import EchoCallback, EchoLoader, StagedDataset

pytestmark = pytest.mark.alone

TOLERANCE = 0.03


def truth(loader: TimedLoader, model: Sleeper) -> float:
    """Waits after the first batch, of the time from its arrival to the last step's end, without validation."""
    assert loader.arrived is not None
    inside = sum(end - begin for begin, end in model.validations if end < model.ended[-1])
    return sum(loader.waited[1:]) / (model.ended[-1] - loader.arrived - inside)


@pytest.mark.parametrize(("wait", "step", "idle"), [(0, 20, 0.0), (5, 15, 0.25), (10, 10, 0.5), (45, 5, 0.9)])
def test_idle_fraction_of_a_source_and_a_step_of_known_durations(wait: int, step: int, idle: float) -> None:
    loader = TimedLoader(Sleeping([300 * MS] + [wait * MS] * (STEPS - 1)))  # the first batch takes long, which is another figure
    model = Sleeper(step * MS, loader)
    logged = fit(model)
    assert logged["echo/idle_fraction"] == pytest.approx(truth(loader, model), abs=TOLERANCE)
    assert logged["echo/idle_fraction"] == pytest.approx(idle, abs=0.15), "the run is what it should be, but for overhead"
    assert logged["echo/first_batch_seconds"] == pytest.approx(loader.waited[0], abs=20 * MS)
    waits = sum(loader.waited[1:]) / STEPS
    assert logged["echo/data_wait_seconds"] == pytest.approx(waits, abs=2 * MS)


def test_each_epoch_is_measured_by_itself() -> None:
    """The source takes 15 ms longer in each epoch than in the one before."""

    class Slowing(Sleeping):
        def __iter__(self) -> Any:
            yield from super().__iter__()
            self.waits = [wait + 15 * MS for wait in self.waits]

    loader = TimedLoader(Slowing([0.0] * STEPS))
    model = Sleeper(15 * MS, loader)
    echo = EchoCallback(summary=False)
    fit(model, echo=echo, max_epochs=3)
    assert len(echo.reports) == 3
    for epoch, report in enumerate(echo.reports):
        first, end = epoch * STEPS, (epoch + 1) * STEPS
        true = sum(loader.waited[first + 1 : end]) / (model.ended[end - 1] - model.begun[first])
        assert report.idle_fraction == pytest.approx(true, abs=TOLERANCE)


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
    ("read", "step", "echo", "idle"),
    [
        (10, 10, None, 0.75),  # four examples a batch: 40 ms against 10
        (5, 25, None, 0.0),  # 20 ms against 25: hidden behind the step
        (20, 20, "after_batching", 0.5),  # 80 ms against 40, for every other step
    ],
)
def test_with_a_worker_what_the_step_hides_of_its_time_is_no_idling(read: int, step: int, echo: str | None, idle: float) -> None:
    plain = DataLoader(Slowly(4 * STEPS, read * MS), 4, num_workers=1)
    loader = TimedLoader(plain if echo is None else EchoLoader(plain, 2, insertion_point=echo, seed=1))
    model = Sleeper(step * MS, loader)
    logged = fit(model)
    assert logged["echo/idle_fraction"] == pytest.approx(truth(loader, model), abs=TOLERANCE)
    assert logged["echo/idle_fraction"] == pytest.approx(idle, abs=0.15), "the run is what it should be, but for overhead"


class Epochs(pl.Callback):
    """Remembers when each began."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.begun.append(time.perf_counter())


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_a_single_step_are_as_idle_as_their_waits_make_them(workers: int) -> None:
    """Four reads of 10 ms for a step of 5 ms; only the first batch of all is a figure of its own."""
    loader = EchoLoader(DataLoader(Slowly(4 * STEPS, 10 * MS), 4, num_workers=workers), 1, insertion_point="after_augmentation")
    model, epochs, echo = Sleeper(5 * MS, loader), Epochs(), EchoCallback(summary=False)
    logged = fit(model, epochs, echo=echo, max_epochs=STEPS, limit_train_batches=1)
    waited = [step - epoch for epoch, step in zip(epochs.begun, model.begun, strict=True)]
    lasted = [end - epoch for epoch, end in zip(epochs.begun, model.ended, strict=True)]
    seconds = [report.steps * ((report.data_wait_seconds or 0) + (report.step_seconds or 0)) for report in echo.reports[1:]]
    measured = sum(report.data_wait_seconds or 0 for report in echo.reports[1:]) / sum(seconds)
    assert measured == pytest.approx(sum(waited[1:]) / sum(lasted[1:]), abs=TOLERANCE)
    assert measured == pytest.approx(40 / 45, abs=0.15), "the run is what it should be, but for overhead"
    assert [report.first_batch_seconds is None for report in echo.reports] == [False] + [True] * (STEPS - 1)
    if workers:  # else they are the first advice
        assert logged["echo/recommended_factor"] > 2


def test_two_ranks_are_as_idle_as_the_longest_wait_of_each_step_and_the_slow_one_is_named(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "LOCAL_RANK")}
    command = [sys.executable, idle_runs.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]
    true, own = {}, {}
    for scenario in ("unequal", "in turn", "neither"):
        runs = [rank[scenario] for rank in ranks]
        waited = [run["waited"][1:] for run in runs]
        lasted = [run["ended"][-1] - run["arrived"] for run in runs]
        own[scenario] = [sum(its) / seconds for its, seconds in zip(waited, lasted, strict=True)]
        true[scenario] = sum(map(max, zip(*waited, strict=True))) / max(lasted)
        assert runs[0]["logged"] == runs[1]["logged"]
        assert runs[0]["logged"]["echo/idle_fraction"] == pytest.approx(true[scenario], abs=TOLERANCE)
    assert own["unequal"][1] > own["unequal"][0] + 0.2
    assert ranks[0]["unequal"]["logged"]["echo/slowest_rank"] == 1
    assert true["in turn"] > max(own["in turn"]) + 0.15, "they stop the job twice as often as each of them waits"
    assert true["neither"] < TOLERANCE, "although they wait for each other"
