"""A new factor counts from a batch on; until then the one before is in force."""

from states import echo_state, plan_state

from lightning_echo.loader.run import RunFactor


def saved(factor, pending, planned_with):
    return without_plan(factor, plan=plan_state(factor=planned_with, pending=pending))


def without_plan(factor, **fields):
    return echo_state(
        factor=factor.value,
        constructed_factor=factor.constructed,
        largest_factor=factor.largest,
        factor_before=factor.before,
        factor_since=factor.since,
        **fields,
    )


def test_a_factor_is_in_force_from_the_batch_on_that_it_counts_for():
    factor = RunFactor(2.0)
    assert [factor.in_force(number) for number in (0, 100)] == [2.0, 2.0]
    factor.change(4.0, since=10, delivered=3)
    assert [factor.in_force(number) for number in (3, 9, 10, 11)] == [2.0, 2.0, 4.0, 4.0]
    assert (factor.value, factor.since) == (4.0, 10)


def test_a_change_before_the_last_one_counts_leaves_the_factor_before_both_in_force():
    factor = RunFactor(2.0)
    factor.change(4.0, since=10, delivered=3)
    factor.change(1.0, since=12, delivered=5)
    assert [factor.in_force(number) for number in (5, 11, 12)] == [2.0, 2.0, 1.0]


def test_the_largest_factor_so_far_is_remembered():
    factor = RunFactor(2.0)
    factor.change(6.0, since=1, delivered=1)
    factor.change(3.0, since=2, delivered=2)
    assert factor.largest == 6.0
    factor.restart()
    assert (factor.value, factor.largest, factor.since) == (2.0, 2.0, 0)


def test_another_start_does_not_change_what_was_constructed():
    factor = RunFactor(2.0)
    factor.restart(5.0)
    assert (factor.value, factor.in_force(0), factor.constructed) == (5.0, 5.0, 2.0)


def test_a_state_brings_it_back_with_the_change_that_is_still_to_come():
    factor, resumed = RunFactor(2.0), RunFactor(3.0)
    factor.change(4.0, since=10, delivered=3)
    resumed.load(saved(factor, ((10, 4.0),), 2.0))
    assert (resumed.value, resumed.since, resumed.in_force(9), resumed.in_force(10)) == (4.0, 10, 2.0, 4.0)
    resumed.load(saved(factor, (), 4.0))
    assert (resumed.since, resumed.in_force(0)) == (0, 4.0)
    resumed.load(without_plan(factor))
    assert resumed.in_force(0) == 4.0
