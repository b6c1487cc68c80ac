"""Which runs are due, and that rows outlive the process."""

from __future__ import annotations

import math

from learning.arms import Arm, first_arms, further_arms
from learning.due import Progress
from learning.rules import Evaluation, Seeds
from learning.run import Run
from learning.store import Row, Store, row_of
from learning_cases import SMALL, row, tuned

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


def test_a_best_rate_at_the_edge_is_followed() -> None:
    rows = [row(Arm(), seed, 1000 * rate, rate=rate) for rate in SMALL.rates for seed in SEEDS.tuning]
    assert jobs(rows, Arm()) == {(0.05, 101, True), (0.05, 102, True)}


def test_what_is_done_is_not_due() -> None:
    rows = [*tuned(Arm(), SEEDS.tuning, 500), row(Arm(), 1, 500)]
    assert jobs(rows, Arm()) == {(0.2, 2, False)}


def test_only_arms_of_finding_6_go_on_to_the_budget() -> None:
    for arm, ends_at_target in (
        (Arm(4, "after_batching"), False),
        (Arm(8, "after_batching"), True),
        (Arm(cached_share=0.25), True),
    ):
        assert {end for _, _, end in jobs(tuned(arm, SEEDS.tuning, 500), arm)} == {ends_at_target}


def test_the_arms_at_the_best_point_come_when_it_is_known() -> None:
    rows = []
    for arm in first_arms(SMALL):
        rows += tuned(arm, SEEDS.tuning, 400 if arm.point == "after_augmentation" else 500)
    assert progress([]).best_point() is None
    assert progress(rows).best_point() == "after_augmentation"
    assert progress(rows).arms()[len(first_arms(SMALL)) :] == further_arms(SMALL, "after_augmentation")


def test_a_buffer_is_two_batches_the_least_that_fills_one_or_sixteen() -> None:
    assert Arm(4, "after_augmentation").buffer_size(32) == 64
    assert Arm(4, "after_batching").buffer_size(32) == 4
    assert Arm(4, "after_batching", buffer="default").buffer_size(32) is None
    assert Arm(4, "after_augmentation", buffer="small").buffer_size(32) == 24  # of 32, 8 are fresh
    assert Arm(4, "after_augmentation", buffer="large").buffer_size(32) == 512
    assert Arm(4, "after_batching", buffer="small").buffer_size(32) == 1
    assert Arm(4, "after_batching", buffer="large").buffer_size(32) == 16


def test_a_batch_four_times_as_large_has_three_times_the_budget() -> None:
    assert Arm(8, "after_batching").budget_examples(SMALL) == 1000
    assert Arm(batch_multiple=4).budget_examples(SMALL) == 3000


def test_rows_come_back_from_the_file(tmp_path) -> None:
    rows = [row(Arm(2, "after_batching"), 1, 512), row(Arm(), 2, math.inf)]
    store = Store(tmp_path, "small")
    for one in rows:
        store.add(one)
    assert Store(tmp_path, "small").rows == rows


def test_a_row_says_when_the_target_was_reached() -> None:
    run = Run([Evaluation(100 * i, 10 * i, 80 + 2.0 * i) for i in range(1, 11)], 1.0)
    made = row_of(SMALL, Arm(), 0.1, 1, run)
    # means of two: 83, 85, ... 91 at the sixth evaluation; of the last two 99
    assert (made.fresh_to_target, made.steps_to_target, made.quality) == (600, 60, 99)
    assert made.values.split()[:3] == ["82", "84", "86"]
