import math

import pytest
from learning.arms import Arm
from learning.digits import DIGITS
from learning.due import Progress
from learning.rules import FULL
from learning.store import Row
from wallclock.plans import NO_ECHO, NOT_SLOWED, Plan, plans_of, points_by_learning, tuned_rate

MIDDLE = DIGITS.rates[1]


def rows_of(arm: Arm, best_rate: float, fresh: float) -> list[Row]:
    """The tuning runs of an arm, the best at a rate inside the grid."""
    return [
        Row("digits", arm.name, rate, seed, fresh if rate == best_rate else 2 * fresh, 1, math.nan, 1, 1, 1.0, 1.0, "")
        for rate in (*DIGITS.rates, DIGITS.rates[0] / 2, DIGITS.rates[-1] * 2)
        for seed in FULL.tuning
    ]


def learned(*arms: tuple[Arm, float, float]) -> Progress:
    return Progress(DIGITS, FULL, [row for arm in arms for row in rows_of(*arm)])


LEARNED = learned(
    (Arm(), DIGITS.rates[2], 9000),
    (Arm(4, "before_augmentation"), DIGITS.rates[0], 4000),
    (Arm(8, "before_augmentation"), DIGITS.rates[2], 4000),
    (Arm(4, "after_augmentation"), MIDDLE, 3000),
    (Arm(4, "after_batching"), MIDDLE, 7000),
)


def test_points_come_best_for_learning_at_e_4_first() -> None:
    assert points_by_learning(DIGITS, LEARNED) == ("after_augmentation", "before_augmentation", "after_batching")


def test_points_come_earliest_first_while_that_is_not_known() -> None:
    assert points_by_learning(DIGITS, learned((Arm(4, "after_batching"), MIDDLE, 1.0))) == DIGITS.points


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1, (DIGITS.rates[2], "tuned for no echo")),
        (4, (DIGITS.rates[0], "tuned for before_augmentation, e=4")),
        (5, (DIGITS.rates[0], "tuned for before_augmentation, e=4")),
        (6, (DIGITS.rates[2], "tuned for before_augmentation, e=8")),  # 4 is 1.5 times as far, 8 1.33 times
        (2, (MIDDLE, "middle of the grid")),
    ],
)
def test_the_rate_is_that_of_the_arm_with_the_nearest_factor_or_the_middle(factor: float, expected: tuple[float, str]) -> None:
    assert tuned_rate(DIGITS, LEARNED, factor, "before_augmentation") == expected


def test_the_rate_is_that_of_the_default_buffer_where_it_was_tuned() -> None:
    tuned = learned((Arm(4, "after_batching"), MIDDLE, 7000), (Arm(4, "after_batching", buffer="large"), DIGITS.rates[0], 5000))
    for factor in (2, 4, 8):
        assert tuned_rate(DIGITS, tuned, factor, "after_batching") == (
            DIGITS.rates[0],
            "tuned for after_batching, e=4, large buffer",
        )
    assert tuned_rate(DIGITS, tuned, 4, "after_augmentation") == (MIDDLE, "middle of the grid")


def test_behind_each_source_every_arm_of_a_seed_before_the_next_seed() -> None:
    plans = plans_of(DIGITS, LEARNED, ["after_batching"], [4.0, 6.0], [1, 2])
    at_4 = ["e=2", "e=4", "e=8", "TargetIdle"]
    at_6 = ["e=2", "e=4", "e=6", "e=8", "TargetIdle"]
    arms = [NOT_SLOWED, NO_ECHO, *(f"after_batching, {arm}" for arm in at_4)]
    arms += [NO_ECHO, *(f"after_batching, {arm}" for arm in at_6)]
    assert [plan.arm for plan in plans] == 2 * arms
    assert [plan.seed for plan in plans] == [1] * len(arms) + [2] * len(arms)
    assert [plan.ratio for plan in plans[: len(arms)]] == [0] + [4.0] * 5 + [6.0] * 6


def test_target_idle_begins_at_1_and_trains_at_the_rate_for_r() -> None:
    plans = plans_of(DIGITS, LEARNED, ["before_augmentation"], [4.0], [1])
    expected = Plan(
        "digits", 4.0, "before_augmentation, TargetIdle", 1, "before_augmentation", DIGITS.rates[0],
        "tuned for before_augmentation, e=4", 1,
    )  # fmt: skip
    assert plans[-1] == expected
    assert [plan.is_controlled for plan in plans] == [False] * 5 + [True]


def test_with_two_points_the_arms_at_both_share_their_baseline() -> None:
    plans = plans_of(DIGITS, LEARNED, ["before_augmentation", "after_batching"], [2.0], [1])
    assert [plan.point for plan in plans] == ["none"] * 2 + ["before_augmentation"] * 4 + ["after_batching"] * 4
