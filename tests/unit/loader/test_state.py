"""What is said to have changed since a state was saved, and what a change of the factor does to it."""

import json
from dataclasses import replace

import pytest
from states import echo_state, plan_state

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.state import Conditions, EchoState, FactorChange, OrderState, StreamState
from lightning_echo.pipeline.kinds import Layout
from lightning_echo.pipeline.pipelines import Start
from lightning_echo.plan.plan import Reuse


def conditions(**changes):
    return Conditions(InsertionPoint.after_augmentation, Layout(103, 2, 4, 4, 13), 2, 16, Reuse.each)._replace(**changes)


def test_nothing_is_said_of_a_run_that_is_the_same():
    assert conditions().differences(conditions()) == ""


def test_each_difference_is_named_with_both_values():
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


def test_before_the_first_batch_there_is_nothing_to_change():
    state = echo_state()
    assert state.with_change(9, 4.0) == state
    assert state.pending is None


def test_the_position_is_that_of_the_plan_or_where_it_begins():
    begins = echo_state(begin_at=Start(7, 3))
    assert begins.position == 7
    assert replace(begins, plan=plan_state(9)).position == 9


def test_what_a_pipeline_goes_on_from_is_plain_and_comes_back():
    for state in (echo_state(), echo_state(plan=plan_state(3), order=OrderState()), echo_state(stream=stream_state((9, 3.0)))):
        pipeline = state.pipeline()
        assert json.loads(json.dumps(pipeline)) == pipeline
        assert ("stream" in pipeline) == (state.stream is not None)
        assert EchoState.parts_of(pipeline) == (state.plan, state.order, state.stream)


def test_other_conditions_change_nothing_else():
    other = conditions(workers=5)
    assert echo_state().under(other) == replace(echo_state(), workers=5, insertion_point=other.insertion_point)
