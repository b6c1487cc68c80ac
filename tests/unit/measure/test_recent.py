"""Epochs judged together: the means are those of all their steps, worked out by hand."""

from dataclasses import replace

import pytest
import torch

from lightning_echo.measure.control import ENOUGH_STEPS, FEWEST_STEPS, Observation, PipelineCosts, RecentSteps

COSTS = PipelineCosts("after_batching", 0.04, 0.02, 0.01, device_seconds=0.01, workers=2)


def epoch(steps, idle, step_seconds=0.01, factor=4.0, costs=None):
    return Observation(0, factor, steps=steps, idle_fraction=idle, step_seconds=step_seconds, costs=costs, metrics={"loss": 1.0})


def after(*epochs):
    recent = RecentSteps()
    for each in epochs:
        recent.joined(each)
    return recent


def test_short_epochs_have_the_idle_fraction_and_the_costs_of_all_their_time():
    """10 steps of 10 ms, of which 5 waited, and 30 of 30 ms, of which 3: 140 ms of waiting in a second."""
    both = after(epoch(10, 0.5, 0.01)).joined(epoch(30, 0.1, 0.03))
    assert (both.steps, both.step_seconds, both.idle_fraction) == (40, pytest.approx(1.0 / 40), pytest.approx(0.14))
    assert both.metrics == {"loss": 1.0}
    slower = PipelineCosts("after_batching", 0.08, 0.06, 0.03, device_seconds=0.02, workers=2)
    joined = after(epoch(20, 0.0, costs=COSTS)).joined(epoch(60, 0.0, costs=slower)).costs
    mean = map(pytest.approx, (0.07, 0.05, 0.025))
    assert joined == PipelineCosts("after_batching", *mean, device_seconds=pytest.approx(0.0175), workers=2)


@pytest.mark.parametrize(
    ("before", "seen"),
    [
        pytest.param([], epoch(16, 0.3, costs=COSTS), id="first"),
        pytest.param([epoch(99, 0.5, 0.04, costs=COSTS)], epoch(ENOUGH_STEPS, 0.1, costs=COSTS.slower(2)), id="long"),
        pytest.param([epoch(50, 0.5, costs=COSTS)], epoch(20, 0.1, factor=4.5, costs=COSTS.slower(2)), id="another factor"),
        pytest.param([epoch(50, 0.5)], Observation(1, 4.0, steps=2, costs=COSTS), id="not measured"),
        pytest.param([epoch(0, 0.3)], epoch(0, 0.1), id="unknown number of steps"),
        pytest.param([epoch(0, 0.3)], epoch(0, 0.0, step_seconds=0.0), id="no time"),
    ],
)
def test_some_epochs_stand_for_themselves(before, seen):
    assert after(*before).joined(seen) == seen


def test_an_epoch_that_was_not_measured_changes_nothing():
    recent = after(epoch(50, 0.5), Observation(1, 4.0, steps=2, costs=COSTS))
    assert recent.joined(epoch(50, 0.0)).idle_fraction == pytest.approx(0.25)


def test_older_steps_count_less_where_there_are_more_than_enough():
    """Of 60 + 60 steps the later ones count in full, and the others for the 40 that are missing to a hundred."""
    both = after(epoch(60, 0.5)).joined(epoch(60, 0.0))
    assert (both.steps, both.idle_fraction) == (100, pytest.approx(0.2))
    recent = after(*[epoch(25, 0.0)] * 20)
    seen = [recent.joined(epoch(25, 0.4)).idle_fraction for _ in range(12)]
    assert seen[0] == pytest.approx(0.1)  # 25 of the last 100 steps
    assert seen == sorted(seen)
    assert seen[-1] > 0.38


def test_too_few_steps_say_nothing_until_the_epochs_together_have_enough_of_them():
    recent = RecentSteps()
    for steps in range(1, FEWEST_STEPS):
        few = recent.joined(epoch(1, 0.5, costs=COSTS))
        assert (few.steps, few.idle_fraction, few.step_seconds) == (steps, None, None)
        assert few.costs is not None, "what workers cost is known all the same"
    enough = recent.joined(epoch(1, 0.1))
    assert (enough.steps, enough.step_seconds) == (FEWEST_STEPS, pytest.approx(0.01))
    assert enough.idle_fraction == pytest.approx((3 * 0.5 + 0.1) / 4)
    assert recent.joined(epoch(1, 0.1, factor=5.0)).idle_fraction is None


@pytest.mark.parametrize("other", [None, replace(COSTS, workers=1), replace(COSTS, insertion_point="after_augmentation")])
def test_costs_of_another_pipeline_are_not_mixed_in(other):
    recent = after(epoch(20, 0.0, costs=other))
    assert recent.joined(epoch(20, 0.0, costs=COSTS)).costs == COSTS
    assert recent.joined(epoch(20, 0.0)).costs is None


@pytest.mark.parametrize("costs", [None, COSTS])
def test_it_goes_on_from_its_state(costs, tmp_path):
    recent, other = after(epoch(30, 0.5, costs=costs)), after(epoch(7, 0.9))
    torch.save(recent.state_dict(), tmp_path / "state.ckpt")
    other.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True))
    seen = epoch(20, 0.1, costs=COSTS)
    assert other.joined(seen) == recent.joined(seen) != seen
    other.load_state_dict(RecentSteps().state_dict())
    assert other.joined(seen) == seen
