"""Epochs judged together: the means are those of all their steps, worked out by hand."""

from dataclasses import replace

import pytest
import torch

from lightning_echo.measure.control import ENOUGH_STEPS, FEWEST_STEPS, Observation, PipelineCosts, RecentSteps

COSTS = PipelineCosts("after_batching", 0.04, 0.02, 0.01, device_seconds=0.01, workers=2)


def epoch(steps, idle, step_seconds=0.01, factor=4.0, costs=None):
    return Observation(0, factor, steps=steps, idle_fraction=idle, step_seconds=step_seconds, costs=costs, metrics={"loss": 1.0})


def test_the_first_epoch_stands_for_itself():
    seen = epoch(16, 0.3, costs=COSTS)
    assert RecentSteps().joined(seen) == seen


def test_short_epochs_have_the_idle_fraction_of_all_their_time():
    """10 steps of 10 ms, of which 5 waited, and 30 of 30 ms, of which 3: 140 ms of waiting in a second."""
    recent = RecentSteps()
    recent.joined(epoch(10, 0.5, 0.01))
    both = recent.joined(epoch(30, 0.1, 0.03))
    assert both.steps == 40
    assert both.step_seconds == pytest.approx(1.0 / 40)
    assert both.idle_fraction == pytest.approx(0.14)
    assert both.metrics == {"loss": 1.0}


@pytest.mark.parametrize("steps", [ENOUGH_STEPS, 5000])
def test_a_long_epoch_stands_for_itself_whatever_came_before(steps):
    recent = RecentSteps()
    recent.joined(epoch(99, 0.5, 0.04, costs=COSTS))
    seen = epoch(steps, 0.1, 0.013, costs=replace(COSTS, source_seconds=0.07))
    assert recent.joined(seen) == seen


def test_older_steps_count_less_where_there_are_more_than_enough():
    """Of 60 + 60 steps the later ones count in full, and the others for the 40 that are missing to a hundred."""
    recent = RecentSteps()
    recent.joined(epoch(60, 0.5))
    both = recent.joined(epoch(60, 0.0))
    assert (both.steps, both.idle_fraction) == (100, pytest.approx(0.2))


def test_a_change_for_good_is_believed_after_a_few_hundred_steps():
    recent = RecentSteps()
    for _ in range(20):
        recent.joined(epoch(25, 0.0))
    seen = [recent.joined(epoch(25, 0.4)).idle_fraction for _ in range(12)]
    assert seen[0] == pytest.approx(0.1)  # 25 of the last 100 steps
    assert seen == sorted(seen)
    assert seen[-1] > 0.38


def test_another_factor_begins_anew():
    recent = RecentSteps()
    recent.joined(epoch(50, 0.5, costs=COSTS))
    seen = epoch(20, 0.1, factor=4.5, costs=replace(COSTS, device_seconds=0.02))
    assert recent.joined(seen) == seen


def test_an_epoch_that_was_not_measured_changes_nothing():
    recent = RecentSteps()
    recent.joined(epoch(50, 0.5))
    unmeasured = Observation(1, 4.0, steps=2, costs=COSTS)
    assert recent.joined(unmeasured) == unmeasured
    assert recent.joined(epoch(50, 0.0)).idle_fraction == pytest.approx(0.25)


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


def test_costs_are_means_too():
    recent = RecentSteps()
    recent.joined(epoch(20, 0.0, costs=COSTS))
    slower = PipelineCosts("after_batching", 0.08, 0.06, 0.03, device_seconds=0.02, workers=2)
    joined = recent.joined(epoch(60, 0.0, costs=slower)).costs
    assert joined == PipelineCosts(
        "after_batching", *map(pytest.approx, (0.07, 0.05, 0.025)), device_seconds=pytest.approx(0.0175), workers=2
    )


@pytest.mark.parametrize("other", [None, replace(COSTS, workers=1), replace(COSTS, insertion_point="after_augmentation")])
def test_costs_of_another_pipeline_are_not_mixed_in(other):
    recent = RecentSteps()
    recent.joined(epoch(20, 0.0, costs=other))
    assert recent.joined(epoch(20, 0.0, costs=COSTS)).costs == COSTS
    assert recent.joined(epoch(20, 0.0)).costs is None


def test_an_observation_that_does_not_say_over_how_many_steps_stands_for_itself():
    recent = RecentSteps()
    for idle in (0.3, 0.1):
        assert recent.joined(epoch(0, idle)).idle_fraction == idle
    assert recent.joined(epoch(0, 0.0, step_seconds=0.0)).idle_fraction == 0


@pytest.mark.parametrize("costs", [None, COSTS])
def test_it_goes_on_from_its_state(costs, tmp_path):
    recent, other = RecentSteps(), RecentSteps()
    recent.joined(epoch(30, 0.5, costs=costs))
    torch.save(recent.state_dict(), tmp_path / "state.ckpt")
    other.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True))
    seen = epoch(20, 0.1, costs=COSTS)
    assert other.joined(seen) == recent.joined(seen) != seen


def test_a_state_from_before_the_first_epoch_is_empty():
    recent = RecentSteps()
    recent.joined(epoch(30, 0.5))
    recent.load_state_dict(RecentSteps().state_dict())
    seen = epoch(20, 0.1)
    assert recent.joined(seen) == seen
