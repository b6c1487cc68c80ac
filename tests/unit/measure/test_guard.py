"""`MetricGuard` against a run of epochs written down by hand, and against a ceiling kept by an independent count."""

import math
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.measure.control import Controller, Decision, Moment, Observation, Reason
from lightning_echo.measure.guard import FactorSchedule, MetricGuard
from lightning_echo.measure.target_idle import TargetIdle


class Wants(Controller):
    """Always wants the same factor, and keeps count."""

    def __init__(self, factor=4.0):
        self.factor, self.asked = factor, 0

    def decide(self, observation):
        self.asked += 1
        return Decision(self.factor, Reason.custom, "wanted")

    def initial_factor(self):
        return self.factor

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state_dict):
        self.asked = state_dict["asked"]


def check(epoch, value, factor=4.0, name="val_loss", **options):
    """An observation before which the metric was logged anew."""
    return Observation(epoch, factor, metrics={name: value}, logged=frozenset({name}), **options)


def factors_of(guard, values, factor=4.0):
    """Epoch by epoch, each with the factor that was decided before it; None: the metric is not logged anew."""
    decided, last = [], math.nan
    for epoch, value in enumerate(values):
        if value is None:
            seen = Observation(epoch, factor, metrics={guard.monitor: last}, logged=frozenset({"other"}))
        else:
            seen, last = check(epoch, value, factor, guard.monitor), value
        factor = guard.decide(seen).factor
        decided.append(factor)
    return decided


def test_the_ceiling_is_multiplied_by_shrink_after_patience_checks_without_improvement():
    guard = MetricGuard(Wants(4), patience=2)
    assert factors_of(guard, [1.0, 1.0, 1.1, 0.9, 1.0, 1.0, 1.0, 1.0]) == [4, 4, 2, 2, 2, 1, 1, 1]


def test_the_ceiling_is_divided_by_shrink_after_as_many_checks_with_improvement_until_it_is_gone():
    guard = MetricGuard(Wants(4), patience=2)
    falling = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    assert factors_of(guard, [1.0] * 5 + falling) == [4, 4, 2, 2, 1, 1, 2, 2, 4, 4, 4]
    guard.controller.factor = 16.0
    assert factors_of(guard, [0.2]) == [16], "a ceiling that is gone holds nothing back"


@pytest.mark.parametrize("resumes", [False, True])
def test_a_ceiling_that_has_risen_to_where_it_began_holds_nothing_back(resumes):
    guard = MetricGuard(Wants(4), patience=1)
    assert factors_of(guard, [1.0, 1.0]) == [4, 2]
    if resumes:
        state, guard = guard.state_dict(), MetricGuard(Wants(4), patience=1)
        guard.load_state_dict(state)
    assert factors_of(guard, [0.9], factor=2.0) == [4]
    guard.controller.factor = 16.0
    assert guard.decide(Observation(3, 4.0, metrics={"val_loss": 0.9})).factor == 16


def test_checks_have_to_be_in_a_row():
    guard = MetricGuard(Wants(4), patience=3)
    assert factors_of(guard, [5, 6, 6, 4, 5, 5, 3, 4, 4]) == [4] * 9


def test_after_a_change_the_count_begins_anew():
    guard = MetricGuard(Wants(8), patience=3, shrink=0.5)
    assert factors_of(guard, [1] + [2] * 8, factor=8.0) == [8, 8, 8, 4, 4, 4, 2, 2, 2]


def test_shrink_says_how_far_the_ceiling_falls_and_rises():
    guard = MetricGuard(Wants(4), patience=1, shrink=0.7)
    assert factors_of(guard, [1, 1, 1, 0.9, 0.8]) == pytest.approx([4, 2.8, 1.96, 2.8, 4])


def test_the_ceiling_is_never_below_1():
    guard = MetricGuard(Wants(3), patience=1, shrink=0.1)
    assert factors_of(guard, [1.0] * 6, factor=3.0) == [3, 1, 1, 1, 1, 1]


def test_from_the_floor_it_rises_by_shrink():
    guard = MetricGuard(Wants(4), patience=1, shrink=0.4)
    assert factors_of(guard, [1, 1, 1, 0.9, 0.8], factor=4.0) == pytest.approx([4, 1.6, 1, 2.5, 4])


def test_the_ceiling_begins_at_the_factor_in_force_not_at_the_one_that_is_wanted():
    guard = MetricGuard(Wants(8), patience=1)
    guard.decide(check(0, 1.0, factor=3.0))
    assert guard.decide(check(1, 1.0, factor=3.0)).factor == 1.5


def test_a_ceiling_above_what_is_wanted_changes_nothing():
    guard = MetricGuard(Wants(1.5), patience=1)
    decisions = [guard.decide(check(epoch, 1.0, factor=4.0)) for epoch in range(2)]
    assert [(decision.factor, decision.reason, decision.message) for decision in decisions] == [
        (1.5, Reason.custom, "wanted"),
        (1.5, Reason.custom, "wanted"),
    ]


def test_with_mode_max_more_is_better():
    guard = MetricGuard(Wants(4), monitor="val_acc", mode="max", patience=1)
    assert factors_of(guard, [0.5, 0.6, 0.6, 0.7, 0.1]) == [4, 4, 2, 4, 2]


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_an_improvement_has_to_exceed_min_delta(mode, sign):
    guard = MetricGuard(Wants(8), mode=mode, patience=1, min_delta=0.5)
    values = [sign * value for value in (4.0, 3.5, 3.25, 2.75)]  # by 0.5, not more; by 0.75 on the best; by 0.5
    assert factors_of(guard, values, factor=8.0) == [8, 4, 8, 4]


def test_small_steps_add_up_to_an_improvement_on_the_best():
    """What was not enough to be one does not become the best value."""
    guard = MetricGuard(Wants(8), patience=4, min_delta=0.5)
    factors_of(guard, [4.0, 3.75, 3.5], factor=8.0)
    assert guard.decide(check(3, 3.25, factor=8.0)).factor == 8
    assert factors_of(guard, [3.0, 3.0, 3.0], factor=8.0) == [8, 8, 8], "the row began anew at 3.25"
    assert factors_of(guard, [3.0], factor=8.0) == [4]


def test_not_a_number_is_no_improvement_and_never_the_best():
    guard = MetricGuard(Wants(4), patience=1)
    assert factors_of(guard, [math.nan, 1.0, math.nan, 0.9, 0.95]) == [2, 4, 2, 4, 2]


def test_a_metric_that_was_not_logged_anew_is_no_check():
    guard = MetricGuard(Wants(4), patience=2)
    assert factors_of(guard, [1.0, None, 1.0, None, None, 1.0, None, 0.9, None, 0.8]) == [4, 4, 4, 4, 4, 2, 2, 2, 2, 4]


def test_a_check_is_counted_while_the_factor_is_below_the_ceiling():
    guard = MetricGuard(Wants(1), patience=2)
    factors_of(guard, [1.0, 1.0, 1.0], factor=1.0)
    guard.controller.factor = 4.0
    assert guard.decide(check(3, 1.0, factor=1.0)).factor == 1, "the factor in force was 1 already: nothing above it"


def test_the_reason_names_the_metric_and_its_values():
    guard = MetricGuard(Wants(4), monitor="val_acc", mode="max", patience=1)
    guard.decide(check(0, 0.75, name="val_acc"))
    decision = guard.decide(check(1, 0.5, name="val_acc"))
    assert decision.reason is Reason.guarded
    assert decision.message == "val_acc 0.5, best 0.75: at most factor 2 instead of 4"
    later = guard.decide(Observation(2, 2.0, metrics={"val_acc": 0.5}))
    assert later.message == "val_acc 0.5 is not new: at most factor 2 instead of 4"


def test_the_wrapped_controller_is_asked_every_time_and_says_where_to_begin():
    guard = MetricGuard(Wants(3), patience=1)
    assert guard.initial_factor() == 3
    guard.decide(Observation(0, 3.0))
    factors_of(guard, [1.0, None, 1.0])
    assert guard.controller.asked == 4
    assert MetricGuard(TargetIdle()).initial_factor() is None


def test_a_metric_that_comes_an_epoch_late_is_waited_for_once():
    guard = MetricGuard(Wants(4), patience=1)
    late = guard.decide(Observation(0, 4.0))
    assert (late.factor, late.reason) == (4, Reason.custom)
    assert factors_of(guard, [1.0, 1.0]) == [4, 2]


def test_an_unknown_monitor_is_an_error_at_the_second_decision_which_lists_the_known_ones():
    guard = MetricGuard(Wants(4), monitor="val_los")
    seen = Observation(0, 4.0, metrics={"val_loss": 1.0, "train_loss": 2.0}, logged=frozenset({"val_loss"}))
    assert guard.decide(seen).factor == 4
    with pytest.raises(ValueError, match=r"monitor='val_los' is not logged\. Logged are: train_loss, val_loss\. .*choose one"):
        guard.decide(seen)


def test_where_nothing_is_logged_the_error_says_none():
    guard = MetricGuard(Wants(4))
    guard.decide(Observation(0, 4.0))
    with pytest.raises(ValueError, match="Logged are: none"):
        guard.decide(Observation(1, 4.0))


def test_before_the_first_validation_it_waits_without_limit():
    guard = MetricGuard(Wants(4), patience=1)
    for epoch in range(20):
        assert guard.decide(Observation(epoch, 4.0, validated=False)).factor == 4
    guard.decide(Observation(20, 4.0))
    with pytest.raises(ValueError, match="is not logged"):
        guard.decide(Observation(21, 4.0))


def test_a_metric_seen_once_may_be_missing_again_for_a_while():
    """As after a resume: Lightning begins with empty metrics, and the late one is an epoch late again."""
    guard = MetricGuard(Wants(4), patience=1)
    guard.decide(Observation(0, 4.0))
    factors_of(guard, [1.0])
    assert guard.decide(Observation(2, 4.0)).factor == 4


@pytest.mark.parametrize("epochs_before", [1, 2])
def test_a_late_metric_is_waited_for_again_after_a_resume(tmp_path, epochs_before):
    guard = MetricGuard(Wants(4), patience=1)
    guard.decide(Observation(0, 4.0))
    factors_of(guard, [1.0] * (epochs_before - 1))
    resumed = MetricGuard(Wants(4), patience=1)
    resumed.load_state_dict(through_a_checkpoint(guard.state_dict(), tmp_path))
    assert resumed.decide(Observation(epochs_before, 4.0)).factor == 4


def through_a_checkpoint(state, folder):
    torch.save(state, folder / "state.ckpt")
    return torch.load(folder / "state.ckpt", weights_only=True)


METRICS = [math.nan, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


@given(st.sampled_from(METRICS), st.lists(st.sampled_from([None, *METRICS]), max_size=24), st.integers(1, 3))
def test_the_ceiling_is_that_of_an_independent_count(first, later, patience):
    """Powers of two below the factor in force at the first fall; a window of the last checks decides.

    The first epoch has a value: the cases above are those in which nothing is known yet.
    """
    values = [first, *later]
    guard = MetricGuard(Wants(8), patience=patience)
    halvings, best, row, expected = 0, math.inf, deque(), []
    for value in values:
        if value is not None:
            better = value < best
            best = value if better else best
            row.append(better)
            if row[-1] != row[0]:
                row = deque([better])
            if len(row) == patience:
                halvings = max(halvings - 1, 0) if better else min(halvings + 1, 3)
                row.clear()
        expected.append(8 / 2**halvings)
    assert factors_of(guard, values, factor=8.0) == expected


@pytest.mark.parametrize("cut", range(12))
def test_a_guard_that_goes_on_from_its_state_decides_the_same(tmp_path, cut):
    values = [1.0, 1.1, 1.2, None, 0.9, 0.8, math.nan, 1.0, 0.7, 0.6, 0.5, 0.5]

    def new():
        return MetricGuard(MetricGuard(Wants(8), monitor="val_loss", patience=3), patience=2)

    whole = factors_of(new(), values, factor=8.0)
    guard = new()
    first = factors_of(guard, values[:cut], factor=8.0)
    resumed = new()
    resumed.load_state_dict(through_a_checkpoint(guard.state_dict(), tmp_path))
    assert first + factors_of(resumed, values[cut:], factor=first[-1] if first else 8.0) == whole
    assert resumed.controller.controller.asked == len(values)


def test_a_guard_of_a_schedule_lets_the_schedule_have_its_way_below_the_ceiling():
    guard = MetricGuard(FactorSchedule({0: 4.0, 3: 1.5, 5: 4.0}), patience=1)
    assert factors_of(guard, [1.0, 1.0, 1.0, 0.9, 0.8, 0.7]) == [4, 2, 1, 1.5, 4, 4]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"controller": None}, TypeError, r"controller must be a Controller to guard, e\.g\. TargetIdle\(\), got None"),
        ({"controller": TargetIdle}, TypeError, "controller must be a Controller to guard"),
        ({"mode": "auto"}, ValueError, "mode must be 'min' or 'max', got 'auto'"),
        ({"patience": 0}, ValueError, "patience must be a number of checks >= 1, got 0"),
        ({"patience": 1.5}, TypeError, r"patience must be an integer \(a number of checks\), got 1\.5"),
        ({"patience": True}, TypeError, "patience must be an integer .*, got True"),
        ({"min_delta": -0.1}, ValueError, r"min_delta must be a finite number >= 0, got -0\.1; 0 counts any improvement"),
        ({"min_delta": math.nan}, ValueError, "min_delta must be a finite number >= 0, got nan"),
        ({"min_delta": math.inf}, ValueError, "min_delta must be a finite number >= 0, got inf"),
        ({"min_delta": "0"}, TypeError, "min_delta must be a number, got '0'"),
        ({"shrink": 0}, ValueError, "shrink must be a number between 0 and 1, both excluded, got 0; 0.5 halves the ceiling"),
        ({"shrink": 1}, ValueError, "shrink must be a number between 0 and 1, both excluded, got 1"),
        ({"shrink": math.nan}, ValueError, "shrink must be a number between 0 and 1, both excluded, got nan"),
        ({"shrink": None}, TypeError, "shrink must be a number, got None"),
    ],
)
def test_an_impossible_option_is_refused_with_its_name_its_value_and_the_way_out(options, error, message):
    with pytest.raises(error, match=message):
        MetricGuard(**{"controller": Wants()} | options)


def test_it_is_printed_with_all_its_options():
    guard = MetricGuard(TargetIdle(0.1), monitor="val_acc", mode="max", patience=2, min_delta=0.01, shrink=0.7)
    expected = "MetricGuard(TargetIdle(0.1, min_factor=1, max_factor=8), monitor='val_acc', mode='max', patience=2, "
    assert repr(guard) == expected + "min_delta=0.01, shrink=0.7)"
    assert eval(repr(guard)).state_dict() == guard.state_dict()


def test_the_ceiling_stays_while_the_metric_is_missing():
    """As after a resume, until validation has run again: the uninterrupted run would keep it."""
    guard, resumed = MetricGuard(Wants(4), patience=1), MetricGuard(Wants(4), patience=1)
    assert factors_of(guard, [0.5, 0.6]) == [4, 2]
    resumed.load_state_dict(guard.state_dict())
    decision = resumed.decide(Observation(2, 2.0, validated=False))
    assert (decision.factor, decision.reason) == (2, Reason.guarded)
    assert "val_loss is not logged yet" in decision.message


def test_the_state_of_another_kind_of_wrapped_controller_is_left_alone():
    before, resumed = MetricGuard(FactorSchedule({0: 4.0}), patience=1), MetricGuard(TargetIdle(), patience=1)
    factors_of(before, [0.5, 0.6])
    resumed.load_state_dict(before.state_dict())
    assert resumed.state_dict()["ceiling"] == 2


# ---------------------------------------------------------------------- within epochs


def test_it_is_asked_when_the_controller_wants_to_be():
    guard = MetricGuard(TargetIdle(first_after_steps=30, every_n_steps=200))
    assert (guard.first_after_steps, guard.every_n_steps, guard.asked_after) == (30, 200, ())
    assert (MetricGuard(Wants()).first_after_steps, MetricGuard(Wants()).every_n_steps) == (None, None)
    wants = Wants()
    wants.asked_after = frozenset({7})
    assert MetricGuard(wants).asked_after == {7}


@pytest.mark.parametrize("moment", [Moment.early, Moment.within_epoch])
def test_a_metric_of_the_end_of_an_epoch_may_be_missing_within_it(moment):
    guard = MetricGuard(Wants())
    for _ in range(5):
        assert guard.decide(Observation(0, 4.0, moment=moment)).factor == 4
    guard.decide(Observation(0, 4.0))
    with pytest.raises(ValueError, match="monitor='val_loss' is not logged"):
        guard.decide(Observation(1, 4.0))


def test_a_check_within_an_epoch_counts_and_the_ceiling_holds_there():
    guard = MetricGuard(Wants(4), patience=1)
    decided = [guard.decide(check(0, value, moment=Moment.within_epoch)).factor for value in (1.0, 2.0)]
    assert decided == [4, 2]
    assert guard.decide(Observation(1, 4.0, metrics={"val_loss": 2.0}, moment=Moment.early)).reason is Reason.guarded
