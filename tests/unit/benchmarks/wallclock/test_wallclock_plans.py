from learning.reuse.studies import STUDIES
from wallclock.plans import (
    BURSTS,
    DEMAND,
    DEMAND_16,
    EQUAL,
    HEAVY_TAIL,
    RATIOS,
    SEEDS,
    SOURCE_ARMS,
    STEADY,
    TARGET_IDLE,
    TORCH,
    Plan,
    next_plan,
    seeds_of,
)
from wallclock.rules import arms_of

RATES = {1.0: 0.1, 4.0: 0.4, 8.0: 0.8, 16.0: 1.6}
STUDY = STUDIES["glyphs"]


def all_plans(ratio: int, source: str = STEADY) -> list[Plan]:
    """In order; each run ends after 200 steps with factor 6."""
    done: list[tuple[Plan, int, float]] = []
    while (plan := next_plan(STUDY, RATES, ratio, 301, done, source)) is not None:
        done.append((plan, 200, 6.0))
    return [plan for plan, _, _ in done]


def test_each_arm_that_is_judged_is_run_once() -> None:
    for ratio in RATIOS:
        assert [plan.arm for plan in all_plans(ratio)] == list(arms_of(STEADY, ratio))
    for source in (BURSTS, HEAVY_TAIL):
        assert [plan.arm for plan in all_plans(8, source)] == list(arms_of(source, 8)) == list(SOURCE_ARMS)


def test_factor_r_is_run_for_as_many_steps_as_the_run_on_demand_that_is_judged() -> None:
    done = [(plan, 300 if plan.arm == DEMAND_16 else 200, 6.0) for plan in all_plans(16)[:-1]]
    plan = next_plan(STUDY, RATES, 16, 301, done)
    assert plan is not None
    assert (plan.arm, plan.factor, plan.steps, plan.rate) == (EQUAL, 16, 300, 1.6)


def test_options_of_echoing() -> None:
    steady = {plan.arm: plan.options for plan in all_plans(16)}
    assert steady[DEMAND] == {"factor": "demand", "max_factor": 8.0}
    assert steady[DEMAND_16] == {"factor": "demand", "max_factor": 16}
    assert steady[TARGET_IDLE] == {"factor": 1}
    bursts = {plan.arm: plan.options for plan in all_plans(8, BURSTS)}
    assert bursts["factor 4"] == {"factor": 4, "reads_in_flight": 16}
    assert bursts[TORCH] == {"factor": 8, "reads_in_flight": 1}
    assert bursts[DEMAND_16] == {"factor": "demand", "max_factor": 16, "reads_in_flight": 16}


def test_rates_are_those_of_the_nearest_factor_and_on_demand_of_r() -> None:
    rates = {plan.arm: plan.rate for plan in all_plans(8, HEAVY_TAIL)}
    assert rates == {"factor 2": 0.4, "factor 4": 0.4, "factor 8": 0.8, "factor 16": 1.6, TORCH: 0.8, DEMAND_16: 0.8, DEMAND: 0.8}


def test_a_run_behind_one_source_is_none_behind_another() -> None:
    done = [(plan, 200, 6.0) for plan in all_plans(8, BURSTS)]
    assert next_plan(STUDY, RATES, 8, 301, done, BURSTS) is None
    plan = next_plan(STUDY, RATES, 8, 301, done, HEAVY_TAIL)
    assert plan is not None
    assert (plan.arm, plan.source) == ("factor 2", HEAVY_TAIL)


def test_the_headline_has_eight_seeds() -> None:
    assert len(SEEDS) == len(seeds_of(STEADY, 8)) == len(seeds_of(BURSTS, 8)) == 8
    assert seeds_of(STEADY, 4) == seeds_of(STEADY, 16) == SEEDS[:3]
