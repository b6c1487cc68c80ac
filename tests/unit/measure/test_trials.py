"""What raising the factor has brought: when it is looked at, and what is made of it. In simulations: test_target_idle.

The host takes 40 ms per fresh batch here, and a step 10: at factor 2 the model says 10 ms of waiting per step, at 4 none.
"""

from dataclasses import replace

import pytest
import torch

from lightning_echo.measure.control import Observation, PipelineCosts
from lightning_echo.measure.target_idle import Trials, share_gained

TARGET = 0.05
COSTS = PipelineCosts("after_augmentation", 0.04, 0.0, 0.0, device_seconds=0.01, workers=1)


def seen(factor, waited, steps=500, costs=COSTS):
    """An epoch whose steps wait so many milliseconds each."""
    seconds = 0.01 + waited / 1e3
    return Observation(0, factor, steps=steps, idle_fraction=waited / 1e3 / seconds, step_seconds=seconds, costs=costs)


def raised(before=2.0, waited=10.0, steps=500):
    """The factor was raised from one at which steps waited so many milliseconds."""
    trials = Trials(TARGET)
    trials.add(seen(before, waited, steps))
    trials.note_raise()
    return trials


def after(trials, *epochs):
    """The factors gone back to and given up, once these epochs were seen."""
    for epoch in epochs:
        trials.add(epoch)
    return None if trials.taken_back is None else (trials.taken_back.before.factor, trials.taken_back.tried.factor)


def failed():
    """Gone back from 4, where 9 ms were waited, to 2."""
    trials = raised()
    assert after(trials, *[seen(4, 9)] * 3) == (2, 4)
    return trials


@pytest.mark.parametrize(
    ("before", "now", "share"),
    [
        (seen(2, 10), seen(4, 0), 1.0),
        (seen(2, 10), seen(4, 9), 0.1),
        (seen(2, 10), seen(4, 12), -0.2),
        # A host that was slower than its costs is taken to be so still. Twice as slow: 40 ms a step at factor 2, 20 at 4.
        (seen(2, 30), seen(4, 10), 1.0),
        (seen(2, 30), seen(4, 20), 0.5),
        # Where the model says nothing, nothing is said.
        (seen(2, 10, costs=None), seen(4, 5), None),
        (seen(2, 10, costs=replace(COSTS, workers=0)), seen(4, 5), None),
        (seen(2, 10, costs=replace(COSTS, source_seconds=0.0)), seen(4, 5), None),
        (seen(5, 0), seen(6, 0), None),
    ],
)
def test_what_came_is_the_share_of_the_waiting_that_the_model_says_to_go(before, now, share):
    assert share_gained(before, now) == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("before", "now", "doubtful"),
    [
        pytest.param({}, seen(4, 4.9), False, id="more than half has come"),
        pytest.param({}, seen(4, 5.1), True, id="less than half"),
        # 8 ms are waited: with 1.5 times the costs a step takes 15 ms at factor 4, of which 5 are waited; with 1.6 times 6.
        pytest.param({}, seen(4, 8, costs=COSTS.slower(1.5)), True, id="not explained by the costs of today"),
        pytest.param({}, seen(4, 8, costs=COSTS.slower(1.6)), False, id="explained by the costs of today"),
        pytest.param({}, seen(4, 9, costs=None), False, id="unknown costs"),
        pytest.param({}, seen(4, 9, costs=replace(COSTS, workers=2)), False, id="other workers"),
        pytest.param({}, seen(4, 9, costs=replace(COSTS, insertion_point="after_batching")), False, id="another point"),
        # A quarter more must show, or half as much again where idle is under twice the target: 1 ms of 11 is 9%.
        pytest.param({}, seen(2.4, 9.5), False, id="a small raise"),
        pytest.param({}, seen(2.6, 9.5), True, id="a larger raise"),
        pytest.param({"waited": 1.0}, seen(2.8, 1.0), False, id="a small raise near the target"),
        pytest.param({"waited": 1.0}, seen(3.2, 1.0), True, id="a larger raise near the target"),
        pytest.param({"waited": 1.0}, seen(3.2, 0.4), False, id="that brought enough"),
        pytest.param({"steps": 3}, seen(4, 9), False, id="few steps before"),
        pytest.param({"steps": 4}, seen(4, 9, 50), True, id="enough steps"),
        pytest.param({}, seen(4, 9, 49), False, id="few steps now"),
    ],
)
def test_less_than_half_of_what_the_model_says_is_doubtful(before, now, doubtful):
    trials = raised(**before)
    assert trials.before_failed_raise() is None
    trials.add(now)
    assert (trials.before_failed_raise() is not None) is doubtful


def test_of_several_raises_the_first_one_that_brought_too_little_is_taken_back():
    """From 1 to 2 brought all; from 2 to 3 and to 4 nothing."""
    trials = raised(1, 30)
    for epoch in (seen(2, 10), seen(3, 10)):
        trials.add(epoch)
        trials.note_raise()
    assert after(trials, *[seen(4, 10)] * 3) == (2, 4)


@pytest.mark.parametrize(("steps", "needed"), [(5000, 3), (400, 3), (100, 10), (16, 63)])
def test_a_raise_has_failed_after_three_stretches_and_a_thousand_steps(steps, needed):
    trials = raised()
    assert after(trials, *[seen(4, 9, steps)] * (needed - 1)) is None
    assert after(trials, seen(4, 9, steps)) == (2, 4)


def test_the_worst_stretch_is_left_out():
    """As where a source was slow for an epoch: 30 ms once, 4 otherwise, which is 12.7 on average."""
    assert after(raised(), seen(4, 30), seen(4, 4), seen(4, 4)) is None
    assert after(raised(), seen(4, 30), seen(4, 9), seen(4, 4)) == (2, 4)


def test_a_raise_for_waiting_that_only_the_worst_stretch_has_is_not_judged():
    """Nothing of it is left to gain over the others: 0.2 ms of 10.2 are 2% idle, 40 of 50 are 80%."""
    trials = Trials(TARGET)
    for epoch in (seen(2, 0.2), seen(2, 40)):
        trials.add(epoch)
    trials.note_raise()
    assert after(trials, *[seen(4, 0.3, costs=COSTS.slower(0.1))] * 3) is None


def test_a_raise_that_was_worth_it_or_taken_back_by_somebody_else_is_not_looked_at_again():
    trials = raised()
    assert after(trials, *[seen(4, 2)] * 3) is None
    assert after(trials, *[seen(4, 9)] * 9) is None
    assert trials.before_failed_raise() is None
    assert after(raised(), seen(1.5, 12), seen(4, 9), seen(4, 9), seen(4, 9)) is None


def test_it_stays_taken_back_until_the_costs_change():
    trials = failed()
    assert after(trials, *[seen(2, 10, costs=COSTS.slower(ratio)) for ratio in [1.0, 0.8, 1.2, 1.45, 0.7] * 10]) == (2, 4)
    assert after(trials, *[seen(2, 10)] * 3, seen(2, 10, costs=COSTS.slower(1.7))) == (2, 4), "not seen for long enough"
    assert after(trials, *[seen(2, 10, costs=COSTS.slower(1.7))] * 2) is None
    assert after(failed(), *[seen(2, 10, costs=COSTS.slower(0.6))] * 3) is None
    assert after(failed(), *[seen(2, 10, costs=replace(COSTS, device_seconds=0.016))] * 3) is None


@pytest.mark.parametrize(
    ("factor", "waited", "held"),
    [
        # At factor 4 steps waited 9 ms. From 20 at factor 2 they should have waited 5: 11 of 15 came. From 21 it is 12 of 15.5.
        (2, 20, True),
        (2, 21, False),
        (1, 40, True),  # at another factor nothing is shown, as where a guard has lowered it further
    ],
)
def test_going_back_shows_whether_the_raise_was_right_after_all(factor, waited, held):
    trials = failed()
    assert after(trials, *[seen(factor, waited)] * 2) == (2, 4), "not seen for long enough"
    assert after(trials, seen(factor, waited)) == ((2, 4) if held else None)


def test_a_raise_that_was_right_after_all_is_made_again_and_not_doubted_but_what_follows_it_is():
    trials = failed()
    after(trials, *[seen(2, 40)] * 3)
    trials.note_raise()
    assert after(trials, *[seen(4, 40)] * 9) is None
    assert trials.before_failed_raise() is None
    trials.add(seen(4, 15))
    trials.note_raise()
    assert after(trials, *[seen(8, 40)] * 3) == (4, 8)


@pytest.mark.parametrize("saved_after", range(12))
def test_it_goes_on_from_its_state(saved_after, tmp_path):
    """Through all that may happen: a raise, a failure, going back, and the raise made again."""
    course = [seen(2, 10), *[seen(4, 9, 300)] * 4, *[seen(2, 40)] * 3, *[seen(4, 15)] * 2, *[seen(8, 15)] * 3]
    raises_after = (0, 7, 9)

    def run(saves):
        trials, told = Trials(TARGET), []
        for i, epoch in enumerate(course):
            trials.add(epoch)
            if i in raises_after:
                trials.note_raise()
            told.append((trials.taken_back, trials.before_failed_raise() is not None))
            if saves and i == saved_after:
                torch.save(trials.state_dict(), tmp_path / "state.ckpt")
                trials = failed()
                trials.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True))
        return told

    told = run(saves=False)
    assert [None if held is None else held[0].factor for held, _ in told][4:] == [2, 2, 2, None, None, None, None, None, 4]
    assert run(saves=True) == told
