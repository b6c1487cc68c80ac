"""A tiny run behind a slow source, for real: what must hold however busy the machine is."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learning.reuse.studies import STUDIES, Study
from learning.task import Split
from timing import Stopwatch
from torch import nn
from torch.utils.data import Dataset
from wallclock.plans import BURSTS, DEMAND, DEMAND_16, FIXED, HEAVY_TAIL, SETTLED, STEADY, TARGET_IDLE, TORCH, Plan
from wallclock.stages import Stage
from wallclock.timed import TimedRow, timed_run

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
DELAY_SECONDS, STEP_SECONDS, EVALUATION_SECONDS, SPACING = 0.002, 0.01, 1000.0, 8


class Clock:
    """The real time, and what evaluations are made to take."""

    def __init__(self) -> None:
        self.added_seconds = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.added_seconds


class Few(Dataset[Any]):
    """Examples as those of the task, as many as make a pass of 40 batches."""

    before_read: Any = None

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> Any:
        if self.before_read is not None:
            self.before_read()
        text = (torch.arange(65) + index) % 256
        return text[:-1], text[1:]


def tiny(clock: Clock, source_stood: list[bool]) -> Study:
    """The target is reached at the third evaluation, two of which make a window, and an evaluation takes ages."""
    values = [8.0, 5.0, 1.0]

    def make_split(seed: int) -> Split:
        data = Few()

        def evaluate(model: nn.Module) -> float:
            clock.added_seconds += EVALUATION_SECONDS
            source_stood.append(data.before_read is None or data.before_read.stands_still)
            return values[min(len(source_stood), 3) - 1]

        return Split(data, evaluate)

    study = STUDIES["language_model"]
    task = replace(study.task, make_split=make_split, window_evaluations=2)
    return replace(study, task=task, spacing_steps=SPACING, most_steps=100)


def run(arm: str, factor: float, steps: int = 0, source: str = STEADY) -> tuple[TimedRow, Clock, list[bool]]:
    clock, stood = Clock(), []
    stage = Stage("language_model", 4, 2, 8, DELAY_SECONDS, STEP_SECONDS, 0.04, source)
    plan = Plan("language_model", 4, arm, factor, 1e-3, 301, steps, source)
    return timed_run(tiny(clock, stood), plan, stage, Stopwatch(clock)), clock, stood


@pytest.mark.parametrize(("arm", "factor", "steps"), [(FIXED, 4, 0), (TARGET_IDLE, 1, 0), (SETTLED, 2.5, 40)])
def test_a_run_is_timed_and_counted(arm: str, factor: float, steps: int) -> None:
    row, clock, stood = run(arm, factor, steps)
    assert (row.arm, row.factor, row.wanted_steps) == (arm, factor, steps)
    # the means of the windows are 6.5 and 3.0, where 3.4 is the target; what is to take so many steps goes on after that
    assert (row.steps, row.is_reached) == (steps or 3 * SPACING, True)
    assert len(row.fresh_counts) == row.steps
    # the first batch is all fresh; from then on two of eight at a factor of 4
    assert row.fresh_counts[0] == 8
    assert sum(row.fresh_counts) < 8 * row.steps if factor > 1 else row.fresh_counts == [8] * row.steps
    # evaluations are no part of the time, however long they take
    assert clock.added_seconds == len(stood) * EVALUATION_SECONDS == row.steps // SPACING * EVALUATION_SECONDS
    assert row.evaluation_seconds >= clock.added_seconds
    assert row.seconds < EVALUATION_SECONDS
    # two workers cannot have read these examples sooner
    assert row.seconds >= sum(row.fresh_counts) * DELAY_SECONDS / 2 - 2 * DELAY_SECONDS
    # a worker starts, and reads a batch, before there is one
    assert 8 * DELAY_SECONDS <= row.first_batch_seconds <= row.seconds
    assert 0 <= row.idle_seconds <= row.seconds
    assert row.factors.startswith(f"0:{factor:g}")
    assert row.last_factor == factor
    assert 0 <= row.late_idle <= 1
    assert all(stood)


@pytest.mark.parametrize(
    ("arm", "factor", "source"),
    [(DEMAND, 8, STEADY), (DEMAND_16, 16, BURSTS), (DEMAND_16, 16, HEAVY_TAIL), ("factor 4", 4, BURSTS), (TORCH, 8, HEAVY_TAIL)],
)
def test_a_run_on_demand_and_one_behind_each_source_is_timed_and_counted(arm: str, factor: float, source: str) -> None:
    row, clock, stood = run(arm, factor, source=source)
    assert (row.arm, row.source, row.factor, row.steps, row.is_reached) == (arm, source, factor, 3 * SPACING, True)
    assert row.plan == Plan("language_model", 4, arm, factor, 1e-3, 301, 0, source)
    assert len(row.fresh_counts) == row.steps
    assert row.fresh_counts[0] == 8
    assert 8 * row.steps / factor <= sum(row.fresh_counts) <= 8 * row.steps  # no more uses per fresh example than that
    assert row.evaluation_seconds >= clock.added_seconds == len(stood) * EVALUATION_SECONDS
    assert row.seconds < EVALUATION_SECONDS
    if source == BURSTS:  # two lanes at twice the speed: no storage can have answered these reads sooner
        assert row.seconds >= sum(row.fresh_counts) * DELAY_SECONDS / 4 - 2 * DELAY_SECONDS
    assert 0 < row.first_batch_seconds <= row.seconds
    assert 0 <= row.late_idle <= 1
