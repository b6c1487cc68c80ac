"""What raising the factor has brought: when it is looked at, and what is made of it. In simulations: test_target_idle.

The host takes 40 ms per fresh batch here, and a step 10: at factor 2 the model says 10 ms of waiting per step, at 4 none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_echo.measure.control import Observation, PipelineCosts
from lightning_echo.measure.target_idle import Trials, share_gained

TARGET = 0.05
COSTS = PipelineCosts("after_augmentation", 0.04, 0.0, 0.0, device_seconds=0.01, workers=1)


def seen(factor: float, waited: float, steps: int = 500, costs: PipelineCosts | None = COSTS) -> Observation:
    """An epoch whose steps wait so many milliseconds each."""
    seconds = 0.01 + waited / 1e3
    return Observation(0, factor, steps=steps, idle_fraction=waited / 1e3 / seconds, step_seconds=seconds, costs=costs)


def costly(ratio: float) -> PipelineCosts:
    """Workers that have measured so many times as much."""
    return COSTS.slower(ratio)


def raised(before: float = 2.0, waited: float = 10.0, steps: int = 500) -> Trials:
    """The factor was raised from one at which steps waited so many milliseconds."""
    trials = Trials(TARGET)
    trials.add(seen(before, waited, steps))
    trials.note_raise()
    return trials


def after(trials: Trials, *epochs: Observation) -> tuple[float, float] | None:
    """The factors gone back to and given up, once these epochs were seen."""
    for epoch in epochs:
        trials.add(epoch)
    return None if trials.taken_back is None else (trials.taken_back.before.factor, trials.taken_back.tried.factor)


# ---------------------------------------------------------------------- one look


@pytest.mark.parametrize(("waited", "share"), [(0.0, 1.0), (2.5, 0.75), (5.0, 0.5), (9.0, 0.1), (10.0, 0.0), (12.0, -0.2)])
def test_what_came_is_the_share_of_the_waiting_that_the_model_says_to_go(waited: float, share: float) -> None:
    assert share_gained(seen(2, 10), seen(4, waited)) == pytest.approx(share)


def test_a_host_that_was_slower_than_its_costs_is_taken_to_be_so_still() -> None:
    """Twice as slow: at factor 2 steps take 40 ms, at 4 they should take 20, of which 10 are waited."""
    assert share_gained(seen(2, 30), seen(4, 10)) == pytest.approx(1.0)
    assert share_gained(seen(2, 30), seen(4, 20)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (seen(2, 10, costs=None), seen(4, 5)),
        (seen(2, 10, costs=replace(COSTS, workers=0)), seen(4, 5)),
        (seen(2, 10, costs=replace(COSTS, source_seconds=0.0)), seen(4, 5)),
        (seen(5, 0), seen(6, 0)),  # nothing was to be gained
    ],
)
def test_nothing_is_said_where_the_model_says_nothing(before: Observation, now: Observation) -> None:
    assert share_gained(before, now) is None


@pytest.mark.parametrize(("waited", "doubtful"), [(0, False), (4.9, False), (5.1, True), (9, True), (12, True)])
def test_less_than_half_of_what_the_model_says_is_doubtful(waited: float, doubtful: bool) -> None:
    trials = raised()
    assert trials.before_failed_raise() is None
    trials.add(seen(4, waited))
    assert (trials.before_failed_raise() is not None) is doubtful


@pytest.mark.parametrize(("ratio", "doubtful"), [(1.0, True), (1.5, True), (1.6, False), (3.0, False), (0.3, True)])
def test_waiting_that_the_costs_of_today_explain_is_no_failure(ratio: float, doubtful: bool) -> None:
    """8 ms are waited: with 1.5 times the costs a step takes 15 ms at factor 4, of which 5 are waited; with 1.6 times 6."""
    trials = raised()
    trials.add(seen(4, 8, costs=costly(ratio)))
    assert (trials.before_failed_raise() is not None) is doubtful


@pytest.mark.parametrize("other", [None, replace(COSTS, workers=2), replace(COSTS, insertion_point="after_batching")])
def test_another_pipeline_says_nothing_of_the_one_before(other: PipelineCosts | None) -> None:
    trials = raised()
    trials.add(seen(4, 9, costs=other))
    assert trials.before_failed_raise() is None


@pytest.mark.parametrize(
    ("factor", "waited", "doubtful"),
    [(2.4, 9.5, False), (2.6, 9.5, True), (2.8, 1.0, False), (3.2, 1.0, True), (3.2, 0.4, False)],
)
def test_small_raises_say_little_all_the_more_where_hardly_anything_is_waited(
    factor: float, waited: float, doubtful: bool
) -> None:
    """A quarter more must show, or half as much again where idle is under twice the target: 1 ms of 11 is 9%."""
    trials = raised(waited=10.0 if waited > 1 else 1.0)
    trials.add(seen(factor, waited))
    assert (trials.before_failed_raise() is not None) is doubtful


@pytest.mark.parametrize(("before", "now", "doubtful"), [(49, 500, False), (50, 500, True), (500, 49, False), (500, 50, True)])
def test_a_few_steps_say_nothing(before: int, now: int, doubtful: bool) -> None:
    trials = raised(steps=before)
    trials.add(seen(4, 9, now))
    assert (trials.before_failed_raise() is not None) is doubtful


def test_of_several_raises_the_first_one_that_brought_too_little_is_taken_back() -> None:
    """From 1 to 2 brought all; from 2 to 3 and to 4 nothing."""
    trials = raised(1, 30)
    for epoch in (seen(2, 10), seen(3, 10)):
        trials.add(epoch)
        trials.note_raise()
    assert after(trials, *[seen(4, 10)] * 3) == (2, 4)


# ---------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("steps", "needed"),
    [(5000, 3), (500, 3), (400, 3), (100, 10), (60, 17), (16, 63)],  # three stretches, and a thousand steps
)
def test_a_raise_has_failed_after_three_stretches_and_a_thousand_steps(steps: int, needed: int) -> None:
    trials = raised()
    for epoch in range(needed):
        assert trials.taken_back is None, epoch
        trials.add(seen(4, 9, steps))
    assert trials.taken_back is not None


def test_short_epochs_are_stretches_together() -> None:
    """Of 63 epochs of 16 steps every tenth waits 60 ms, the others 4: 9 ms on average, of stretches of 64 steps 18 or 4."""
    trials = raised()
    for epoch in range(63):
        trials.add(seen(4, 60 if epoch % 10 == 0 else 4, 16))
    assert trials.taken_back is not None
    tried = trials.taken_back.tried
    assert 900 <= tried.steps < 1008
    assert tried.step_seconds is not None
    assert tried.step_seconds - 0.01 == pytest.approx(9e-3, abs=1e-3)


def test_the_worst_stretch_is_left_out() -> None:
    """As where a source was slow for an epoch: 30 ms once, 4 otherwise, which is 12.7 on average."""
    assert after(raised(), seen(4, 30), seen(4, 4), seen(4, 4)) is None
    assert after(raised(), seen(4, 30), seen(4, 9), seen(4, 4)) == (2, 4)


def test_a_raise_that_was_found_to_be_worth_it_is_not_looked_at_again() -> None:
    trials = raised()
    assert after(trials, *[seen(4, 2)] * 3) is None
    assert after(trials, *[seen(4, 9)] * 9) is None
    assert trials.before_failed_raise() is None


def test_a_raise_that_was_taken_back_by_somebody_else_is_not_looked_at() -> None:
    assert after(raised(), seen(1.5, 12), seen(4, 9), seen(4, 9), seen(4, 9)) is None


# ---------------------------------------------------------------------- after a raise was taken back


def failed() -> Trials:
    """Gone back from 4, where 9 ms were waited, to 2."""
    trials = raised()
    assert after(trials, *[seen(4, 9)] * 3) == (2, 4)
    return trials


def test_it_stays_taken_back_until_the_costs_change() -> None:
    trials = failed()
    for ratio in [1.0, 0.8, 1.2, 1.45, 0.7] * 20:
        assert after(trials, seen(2, 10, costs=costly(ratio))) == (2, 4)


@pytest.mark.parametrize("ratio", [0.6, 1.6])
def test_costs_that_have_changed_let_everything_be_tried_again(ratio: float) -> None:
    trials = failed()
    assert after(trials, seen(2, 10, costs=costly(ratio)), seen(2, 10, costs=costly(ratio))) == (2, 4), "not seen for long enough"
    assert after(trials, *[seen(2, 10, costs=costly(ratio))] * 3) is None


def test_costs_that_change_after_a_long_time_are_seen_as_soon() -> None:
    trials = failed()
    for _ in range(50):
        trials.add(seen(2, 10))
    assert after(trials, seen(2, 10, costs=costly(1.7))) == (2, 4)
    assert after(trials, *[seen(2, 10, costs=costly(1.7))] * 2) is None


def test_a_device_that_has_got_slower_changes_costs_too() -> None:
    assert after(failed(), *[seen(2, 10, costs=replace(COSTS, device_seconds=0.016))] * 3) is None


def test_costs_between_those_of_the_two_factors_are_no_others() -> None:
    """A source that hangs at times costs more per fresh batch where fewer are fresh: 40 ms at factor 2, and 70 at 4."""
    trials = raised()
    assert after(trials, *[seen(4, 40, costs=costly(1.75))] * 3) == (2, 4)
    for ratio in [1.0, 1.75, 0.7, 2.6] * 10:
        assert after(trials, seen(2, 10, costs=costly(ratio))) == (2, 4)


@pytest.mark.parametrize(("waited", "held"), [(10, True), (20, True), (21, False), (40, False)])
def test_going_back_shows_whether_the_raise_was_right_after_all(waited: float, held: bool) -> None:
    """At factor 4 steps waited 9 ms. From 20 at factor 2 they should have waited 5: 11 of 15 came. From 21 it is 12 of 15.5."""
    trials = failed()
    assert after(trials, *[seen(2, waited)] * 2) == (2, 4), "not seen for long enough"
    assert after(trials, seen(2, waited)) == ((2, 4) if held else None)


def test_at_another_factor_nothing_is_shown() -> None:
    """As where a guard has lowered it further: the model says 30 ms of waiting for factor 1."""
    assert share_gained(seen(1, 30), seen(4, 9)) == pytest.approx(0.7)
    assert after(failed(), *[seen(1, 40)] * 3) == (2, 4)


def test_a_raise_that_was_right_after_all_is_made_again_and_not_doubted() -> None:
    trials = failed()
    after(trials, *[seen(2, 40)] * 3)
    trials.note_raise()
    assert after(trials, *[seen(4, 40)] * 9) is None
    assert trials.before_failed_raise() is None


def test_what_follows_a_raise_that_was_right_after_all_is_looked_at_as_ever() -> None:
    trials = failed()
    after(trials, *[seen(2, 40)] * 3)
    trials.note_raise()
    trials.add(seen(4, 15))
    trials.note_raise()
    assert after(trials, *[seen(8, 15)] * 3) == (4, 8)


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("saved_after", range(12))
def test_it_goes_on_from_its_state(saved_after: int, tmp_path: Any) -> None:
    """Through all that may happen: a raise, a failure, going back, and the raise made again."""
    course = [seen(2, 10), *[seen(4, 9, 300)] * 4, *[seen(2, 40)] * 3, *[seen(4, 15)] * 2, *[seen(8, 15)] * 3]
    raises_after = (0, 7, 9)

    def run(saves: bool) -> list[Any]:
        trials, told = Trials(TARGET), []
        for i, epoch in enumerate(course):
            trials.add(epoch)
            if i in raises_after:
                trials.note_raise()
            told.append((trials.taken_back, trials.before_failed_raise() is not None))
            if saves and i == saved_after:
                torch.save(trials.state_dict(), tmp_path / "state.ckpt")
                trials = Trials(TARGET)
                trials.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True))
        return told

    told = run(saves=False)
    assert [None if held is None else held[0].factor for held, _ in told][4:] == [2, 2, 2, None, None, None, None, None, 4]
    assert run(saves=True) == told


def test_an_empty_state_is_that_of_a_new_run() -> None:
    trials = failed()
    trials.load_state_dict({})
    assert trials.state_dict() == Trials(TARGET).state_dict()
    assert trials.taken_back is None
