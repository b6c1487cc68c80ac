"""A state says what has changed since it was saved, and when a new factor counts; until then the one before is in force."""

from dataclasses import replace

import pytest
from states import echo_state, plan_state

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.run import RunFactor
from lightning_echo.loader.state import Conditions, FactorChange, StreamState
from lightning_echo.pipeline.pipelines import Layout, Start
from lightning_echo.plan.plan import Reuse


def conditions(**changes):
    return Conditions(InsertionPoint.after_augmentation, Layout(103, 2, 4, 4, 13), 2, 16, Reuse.each)._replace(**changes)


def test_each_difference_is_named_with_both_values():
    assert conditions().differences(conditions()) == ""
    now = conditions(workers=0, layout=Layout(103, 3, 5, 5, 7))
    assert conditions().differences(now) == (
        "workers=2 (now 0), batch_size=4 (now 5), batches_per_pass=13 (now 7), last_batch_size=4 (now 5), replicas=2 (now 3)"
    )
    now = conditions(insertion_point=InsertionPoint.after_batching)
    assert conditions().differences(now) == "insertion_point='after_augmentation' (now 'after_batching')"
    assert conditions().differences(conditions(reuse=Reuse.memory)) == "reuse='each' (now 'memory')"


def stream_state(*pending):
    changes = tuple(FactorChange(*change) for change in pending)
    return StreamState(request=0, pass_=0, begun=True, ended=(), batches=(0,), workers=(None,), factors=(), pending=changes)


@pytest.mark.parametrize("by_streams", [False, True])
def test_a_new_factor_takes_the_place_of_changes_that_were_to_come_later(by_streams):
    pending = ((3, 2.0), (9, 3.0))
    state = echo_state(stream=stream_state(*pending)) if by_streams else echo_state(plan=plan_state(pending=pending))
    changed = state.with_change(9, 4.0)
    assert changed.pending == ((3, 2.0), (9, 4.0))
    assert changed.with_change(2, 5.0).pending == ((2, 5.0),)
    assert state.pending == pending, "a state never changes"


def test_before_the_first_batch_there_is_nothing_to_change_and_the_place_is_where_it_begins():
    state = echo_state(begin_at=Start(7, 3))
    assert state.with_change(9, 4.0) == state
    assert state.pending is None
    assert (state.position, replace(state, plan=plan_state(9)).position) == (7, 9)


def test_a_change_before_the_last_one_counts_leaves_the_factor_before_both_in_force():
    factor = RunFactor(2.0)
    factor.change(4.0, since=10, delivered=3)
    assert [factor.in_force(number) for number in (0, 9, 10)] == [2.0, 2.0, 4.0]
    factor.change(1.0, since=12, delivered=5)
    assert [factor.in_force(number) for number in (5, 11, 12)] == [2.0, 2.0, 1.0]
    assert (factor.value, factor.since, factor.largest) == (1.0, 12, 4.0)


def test_a_state_brings_it_back_with_the_change_that_is_still_to_come():
    resumed = RunFactor(3.0)
    fields = {"factor": 4.0, "largest_factor": 4.0, "factor_before": 2.0, "factor_since": 10}
    resumed.load(echo_state(**fields, plan=plan_state(pending=((10, 4.0),))))
    assert (resumed.value, resumed.largest, resumed.since, resumed.in_force(9), resumed.in_force(10)) == (4.0, 4.0, 10, 2.0, 4.0)
    resumed.load(echo_state(**fields, plan=plan_state(factor=4.0)))
    assert (resumed.since, resumed.in_force(0)) == (0, 4.0)
    resumed.load(echo_state(**fields))
    assert resumed.in_force(0) == 4.0
