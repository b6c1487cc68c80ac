"""A tiny run behind a slow source, for real: what must hold however busy the machine is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning.arms import Arm
from learning.digits import DIGITS
from learning.rules import Evaluation, reached_at
from learning.run import echoed
from learning.task import Split, Task
from torch import nn
from wallclock.device import DEVICE_SECONDS
from wallclock.plans import NO_ECHO, NOT_SLOWED, Plan
from wallclock.stages import Stage, measure_basis
from wallclock.stopwatch import Stopwatch
from wallclock.timed import timed_run

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
POINT, DELAY_SECONDS, EVALUATION_SECONDS, SPACING = "before_augmentation", 0.002, 1000.0, 48


class Clock:
    """The real time, and what evaluations are made to take."""

    def __init__(self) -> None:
        self.added_seconds = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.added_seconds


def tiny(clock: Clock, source_stood: list[bool], values: list[float]) -> Task:
    """The target is reached at the third evaluation, two of which make a window, and an evaluation takes ages."""

    def make_split(seed: int) -> Split:
        split = DIGITS.make_split(seed)

        def evaluate(model: nn.Module) -> float:
            clock.added_seconds += EVALUATION_SECONDS
            source: Any = split.train.before_read  # type: ignore[attr-defined]
            source_stood.append(source is not None and source.stands_still)
            values.append([0.0, 60.0, 140.0, 999.0][len(values)])
            return values[-1]

        return replace(split, evaluate=evaluate)

    return replace(DIGITS, make_split=make_split, spacing_examples=SPACING, window_evaluations=2, budget_examples=1000)


def run(arm: str, factor: float, ratio: float = 4.0) -> tuple[Any, Clock, list[bool]]:
    clock, stood, values = Clock(), [], []
    stage = Stage("digits", ratio, 2, 32, DELAY_SECONDS, 0.01, 0.04, POINT, "0.001", 16)
    plan = Plan("digits", ratio, arm, factor, POINT if arm.startswith(POINT) else "none", 5e-3, "middle of the grid", 1)
    row = timed_run(tiny(clock, stood, values), plan, stage, Stopwatch(clock))
    assert values == [0.0, 60.0, 140.0]  # their means are 30 and 100: the run ends at its third evaluation, at once
    return row, clock, stood


@pytest.mark.parametrize(("arm", "factor"), [(NO_ECHO, 1), (f"{POINT}, e=4", 4), (f"{POINT}, TargetIdle", 1)])
def test_a_run_is_timed_and_counted(arm: str, factor: float) -> None:
    row, clock, stood = run(arm, factor)
    assert (row.arm, row.factor, row.evaluations, row.last) == (arm, factor, 3, 140.0)
    assert (row.fresh_to_target, row.steps_to_target) == (row.fresh, row.steps)
    assert 3 * SPACING <= row.fresh < 3 * SPACING + 32  # at the end of the first step at which so many were used
    echoed = 32 * row.steps - row.fresh
    assert echoed == 0 if row.steps <= 16 and factor == 1 else echoed > 0
    # evaluations are no part of the time, however long they take
    assert clock.added_seconds == 3 * EVALUATION_SECONDS
    assert row.evaluation_seconds >= 3 * EVALUATION_SECONDS
    assert row.seconds_to_target < EVALUATION_SECONDS
    # two workers cannot have read these examples sooner
    assert row.seconds_to_target >= row.fresh * DELAY_SECONDS / 2 - 2 * DELAY_SECONDS
    # a worker starts, and reads a batch, before there is one
    assert (32 if factor == 1 else 8) * DELAY_SECONDS <= row.first_batch_seconds <= row.seconds_to_target
    assert row.factors.startswith(f"0:{factor:g}")
    assert stood == [True] * 3


def test_a_source_that_is_not_slowed_is_read_without_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wallclock.source.SlowSource.__call__", None)  # cannot be called
    row, _, stood = run(NOT_SLOWED, 1, ratio=0)
    assert stood == [False] * 3  # there is none
    assert row.steps == row.fresh / 32 == 5  # 48, 96 and 144 examples are there after steps 2, 3 and 5


def test_runs_have_the_buffer_that_users_get(monkeypatch: pytest.MonkeyPatch) -> None:
    arms: list[Arm] = []
    monkeypatch.setattr(
        "wallclock.timed.echoed", lambda task, arm, *args, **options: arms.append(arm) or echoed(task, arm, *args, **options)
    )
    run(f"{POINT}, e=4", 4)
    assert [(arm.factor, arm.buffer) for arm in arms] == [(4, "default")]


def test_each_step_takes_its_time_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICE_SECONDS, "digits", 0.2)
    row, _, _ = run(NOT_SLOWED, 1, ratio=0)
    assert row.seconds_to_target - row.first_batch_seconds >= row.steps * 0.2


def test_the_time_on_the_device_is_part_of_the_step_that_is_measured() -> None:
    assert measure_basis(DIGITS, 1, 16, rounds=1).step_seconds >= DEVICE_SECONDS["digits"]


@pytest.mark.parametrize(("arm", "point"), [(Arm(1, "after_batching"), "after_batching"), (Arm(), "before_augmentation")])
def test_target_idle_begins_at_factor_1_at_the_point_of_its_arm(arm: Arm, point: str) -> None:
    loader = echoed(DIGITS, arm, DIGITS.make_split(1), 1).train_dataloader()
    assert (loader.factor, loader.insertion_point.value) == (1, point)


def test_the_target_is_reached_by_rule_1() -> None:
    task = tiny(Clock(), [], [])
    evaluations = [Evaluation(fresh, fresh // 32, value) for fresh, value in ((64, 0.0), (96, 60.0), (160, 140.0))]
    assert reached_at(task, evaluations) == evaluations[-1]


def gpu_script(*options: str) -> subprocess.CompletedProcess[str]:
    """Without a GPU, wherever it runs."""
    script = [sys.executable, str(BENCHMARKS / "wallclock" / "gpu.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.program
def test_the_gpu_script_says_that_there_is_no_gpu_and_ends(tmp_path: Path) -> None:
    done = gpu_script("--out", str(tmp_path))
    assert (done.returncode, done.stdout) == (
        0,
        "No GPU here: nothing was measured. --device cpu --tiny shows that the script works.\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.program
def test_the_gpu_script_runs_through_on_a_processor(tmp_path: Path) -> None:
    done = gpu_script("--device", "cpu", "--tiny", "--files", str(tmp_path / "jpegs"), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    header, *rows = (tmp_path / "gpu.csv").read_text().splitlines()
    assert header.startswith("workers,R,point,factor,images per second,speed-up,bound")
    assert [row.split(",")[2] for row in rows] == ["no echo", "before_augmentation", "after_batching", "after_transfer"]
    assert all(float(row.split(",")[4]) > 0 for row in rows)
    assert all(0 <= float(row.split(",")[-2]) < 1 for row in rows)  # idle, by EchoCallback
    assert "options,--tiny: no evidence" in (tmp_path / "gpu_machine.csv").read_text()
