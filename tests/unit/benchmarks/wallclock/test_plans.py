import pytest
from learning.reuse.due import ReuseProgress
from learning.reuse.rows import ReuseRow
from learning.reuse.rules import FULL_SEEDS
from learning.reuse.studies import NO_ECHO as WITHOUT
from learning.reuse.studies import STUDIES, ReuseArm
from wallclock.plans import FIXED, NO_ECHO, SETTLED, STEP, STEP_STEPS, TARGET_IDLE, Plan, next_plan, rates_of

GLYPHS = STUDIES["glyphs"]
RATES = {1.0: 0.1, 4.0: 0.4, 8.0: 0.8, 16.0: 1.6, 32.0: 3.2}


def all_plans(ratio: int, seed: int, done: list[tuple[Plan, int, float]]) -> list[Plan]:
    """Each run takes 325 steps, and a controller ends at 6.5."""
    while (plan := next_plan(GLYPHS, RATES, ratio, seed, done)) is not None:
        done = [*done, (plan, 325, 6.5 if plan.arm == TARGET_IDLE else plan.factor)]
    return [plan for plan, _, _ in done]


def test_behind_a_source_the_arms_follow_each_other_and_the_last_one_is_as_long_as_target_idle() -> None:
    assert all_plans(8, 301, []) == [
        Plan("glyphs", 8, NO_ECHO, 1, 0.1, 301),
        Plan("glyphs", 8, STEP, 32, 0.8, 301, STEP_STEPS),
        Plan("glyphs", 8, FIXED, 8, 0.8, 301),
        Plan("glyphs", 8, TARGET_IDLE, 1, 0.8, 301),
        Plan("glyphs", 8, SETTLED, 6.5, 0.8, 301, 325),
    ]


def test_runs_of_other_sources_and_seeds_are_no_ones_partners() -> None:
    done = [(plan, 325, 6.5) for ratio, seed in ((8, 302), (16, 301)) for plan in all_plans(ratio, seed, [])]
    assert all_plans(8, 301, done)[len(done) :] == all_plans(8, 301, [])


def test_what_is_done_is_not_done_again() -> None:
    first = [(plan, 325, 6.5) for plan in all_plans(4, 301, [])[:3]]
    assert next_plan(GLYPHS, RATES, 4, 301, first) == Plan("glyphs", 4, TARGET_IDLE, 1, 0.4, 301)


def row(arm: ReuseArm, rate: float, seed: int, steps: float) -> ReuseRow:
    return ReuseRow("glyphs", arm.name, rate, seed, steps, steps, 2100, 1.0, 1.0, "1", "1")


def rows(arm: ReuseArm, best: float) -> list[ReuseRow]:
    """The tuning runs of an arm, the best at a rate inside the grid."""
    grid = [GLYPHS.task.rates[0] / 2, *GLYPHS.task.rates, GLYPHS.task.rates[-1] * 2]
    return [row(arm, rate, seed, 500 if rate == best else 1000) for rate in grid for seed in FULL_SEEDS.tuning]


def test_rates_are_those_of_the_default_rule_with_the_most_memory() -> None:
    tuned = rows(WITHOUT, 2e-3)
    for factor, best in ((4, 2e-3), (8, 4e-3), (16, 8e-3), (32, 4e-3)):
        tuned += rows(ReuseArm("memory", factor, None), best) + rows(ReuseArm("memory", factor, 64), 2e-3)
    found = rates_of(GLYPHS, ReuseProgress(GLYPHS, FULL_SEEDS, tuned), "memory")
    assert found == {1.0: 2e-3, 4.0: 2e-3, 8.0: 4e-3, 16.0: 8e-3, 32.0: 4e-3}


def test_each_rule_has_its_own() -> None:
    tuned = rows(WITHOUT, 2e-3)
    for factor in (4, 8, 16, 32):
        tuned += rows(ReuseArm("each", factor, 256), 4e-3) + rows(ReuseArm("each", factor, 64), 8e-3)
    assert rates_of(GLYPHS, ReuseProgress(GLYPHS, FULL_SEEDS, tuned), "each")[8.0] == 4e-3


def test_without_the_study_there_are_no_rates_and_that_is_said() -> None:
    with pytest.raises(LookupError, match=r"no rate for glyphs at a factor of \[4.0, 8.0, 16.0, 32.0\]: run make evidence"):
        rates_of(GLYPHS, ReuseProgress(GLYPHS, FULL_SEEDS, rows(WITHOUT, 2e-3)), "memory")
