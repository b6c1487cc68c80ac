"""Which runs are due, and that rows outlive the process."""

from __future__ import annotations

from learning.arms import Arm
from learning.due import Progress
from learning.rules import Evaluation, Seeds
from learning.run import Run
from learning.store import Row, row_of
from learning_cases import SMALL, tuned

SEEDS = Seeds((101, 102), (1, 2))


def progress(rows: list[Row]) -> Progress:
    return Progress(SMALL, SEEDS, rows)


def jobs(rows: list[Row], arm: Arm) -> set[tuple[float, int, bool]]:
    return {(job.rate, job.seed, job.ends_at_target) for job in progress(rows).due() if job.arm == arm}


def test_first_every_rate_is_tried_on_the_tuning_seeds_alone() -> None:
    assert jobs([], Arm()) == {(rate, seed, True) for rate in SMALL.rates for seed in (101, 102)}


def test_then_the_report_runs_at_the_best_rate() -> None:
    rows = tuned(Arm(), SEEDS.tuning, 500)
    assert jobs(rows, Arm()) == {(0.2, 1, False), (0.2, 2, False)}


def test_only_arms_of_finding_6_go_on_to_the_budget() -> None:
    for arm, ends_at_target in (
        (Arm(4, "after_batching"), False),
        (Arm(8, "after_batching"), True),
        (Arm(cached_share=0.25), True),
    ):
        assert {end for _, _, end in jobs(tuned(arm, SEEDS.tuning, 500), arm)} == {ends_at_target}


def test_a_row_says_when_the_target_was_reached() -> None:
    run = Run([Evaluation(100 * i, 10 * i, 80 + 2.0 * i) for i in range(1, 11)], 1.0)
    made = row_of(SMALL, Arm(), 0.1, 1, run)
    # means of two: 83, 85, ... 91 at the sixth evaluation; of the last two 99
    assert (made.fresh_to_target, made.steps_to_target, made.quality) == (600, 60, 99)
    assert made.values.split()[:3] == ["82", "84", "86"]
