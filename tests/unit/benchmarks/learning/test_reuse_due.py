"""Which runs of the study of reuse are due, and what a row keeps."""

from __future__ import annotations

import dataclasses
import math

import pytest
from learning.reuse.due import ReuseProgress
from learning.reuse.rows import ReuseRow, reuse_row
from learning.reuse.run import ReuseRun
from learning.reuse.studies import NO_ECHO, ReuseArm
from learning.rules import Evaluation, Seeds
from reuse_cases import row, study, tuned

SEEDS = Seeds((201, 202, 203), (301, 302))
ARM = ReuseArm("memory", 8, None)


def jobs(rows: list[ReuseRow], arm: ReuseArm) -> set[tuple[float, int]]:
    return {(job.rate, job.seed) for job in ReuseProgress(study(), SEEDS, rows).due(arm)}


def test_a_tie_goes_to_the_rate_without_echoing() -> None:
    rows = tuned(NO_ECHO, SEEDS.tuning, 500)
    for later, expected in ((10, 0.2), (11, 0.1)):  # an evaluation is made each 10 steps
        steps = {0.1: 400, 0.2: 400 + later, 0.4: math.inf}
        of_arm = [row(ARM, seed, steps[rate], rate=rate) for rate in steps for seed in SEEDS.tuning]
        if expected == 0.1:  # at the edge: the next one is tried first
            assert jobs(rows + of_arm, ARM) == {(0.05, seed) for seed in SEEDS.tuning}
            of_arm += [row(ARM, seed, math.inf, rate=0.05) for seed in SEEDS.tuning]
        assert jobs(rows + of_arm, ARM) == {(expected, 301), (expected, 302)}


def test_an_arm_tries_the_rate_without_echoing_where_that_lies_beyond_the_grid() -> None:
    rows = tuned(NO_ECHO, SEEDS.tuning, 500, best=0.4)
    rows += [row(NO_ECHO, seed, steps, rate=rate) for rate, steps in ((0.8, 400), (1.6, math.inf)) for seed in SEEDS.tuning]
    assert ReuseProgress(study(), SEEDS, rows).rate(NO_ECHO) == 0.8
    assert jobs(rows + tuned(ARM, SEEDS.tuning, 500), ARM) == {(0.8, seed) for seed in SEEDS.tuning}


def test_only_whole_reports_are_reported() -> None:
    rows = [*tuned(NO_ECHO, SEEDS.tuning, 500), row(NO_ECHO, 302, 480)]
    assert ReuseProgress(study(), SEEDS, rows).reported(NO_ECHO) == []
    both = [*rows, row(NO_ECHO, 301, 460)]
    assert [one.seed for one in ReuseProgress(study(), SEEDS, both).reported(NO_ECHO)] == [301, 302]


class TestRow:
    def test_says_when_the_target_was_reached_and_what_was_fresh(self) -> None:
        run = ReuseRun([Evaluation(40 + 4 * i, 10 * i, 80 + 2.0 * i) for i in range(1, 9)], [32] + [4] * 79, 1.0)
        made = reuse_row(study(), ARM, 0.1, 1, run)
        # means of two: 83, 85, 87, 89, 91 at the sixth
        assert (made.steps_to_target, made.fresh_to_target, made.steps) == (60, 64, 80)
        assert made.fresh == "32*1 4*79"
        assert made.fresh_counts == run.fresh

    def test_time_counts_the_steps_to_the_target_alone(self) -> None:
        made = row(ARM, 1, 60)
        # 8 steps for the first batch, 59 of one step each
        assert made.time_to_target(32, ratio=8) == pytest.approx(67)
        longer = dataclasses.replace(made, fresh=made.fresh + " 32*100")
        assert longer.time_to_target(32, ratio=8) == pytest.approx(67)
        assert row(ARM, 1, math.inf).time_to_target(32, ratio=8) == math.inf
