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


def through_a_checkpoint(state, folder):
    torch.save(state, folder / "state.ckpt")
    return torch.load(folder / "state.ckpt", weights_only=True)


METRICS = [math.nan, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


@given(st.sampled_from(METRICS), st.lists(st.sampled_from([None, *METRICS]), max_size=24), st.integers(1, 3))
def test_the_ceiling_is_that_of_an_independent_count(first, later, patience):
    """Powers of two below the factor in force at the first fall; a window of the last checks decides."""
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


@pytest.mark.parametrize(
    ("options", "values", "factors"),
    [
        pytest.param({"shrink": 0.7}, [1, 1, 1, 0.9, 0.8], [4, 2.8, 1.96, 2.8, 4], id="falls and rises by shrink"),
        pytest.param({"shrink": 0.4}, [1, 1, 1, 0.9, 0.8], [4, 1.6, 1, 2.5, 4], id="rises from the floor by shrink"),
        pytest.param({"shrink": 0.1}, [1, 1, 1], [4, 1, 1], id="never below 1"),
        pytest.param({"mode": "max"}, [0.5, 0.6, 0.6, 0.7, 0.1], [4, 4, 2, 4, 2], id="more is better"),
        # By 0.5, which is not more; by 0.75 on the best; by 0.5.
        pytest.param({"min_delta": 0.5}, [4.0, 3.5, 3.25, 2.75], [4, 2, 4, 2], id="more than min_delta"),
        pytest.param({"min_delta": 0.5, "mode": "max"}, [-4.0, -3.5, -3.25, -2.75], [4, 2, 4, 2], id="the same of mode max"),
        # What was not enough to be an improvement does not become the best value: the row begins anew at 3.25.
        pytest.param({"min_delta": 0.5, "patience": 4}, [4.0, 3.75, 3.5, 3.25, *[3.0] * 4], [4] * 7 + [2], id="steps add up"),
    ],
)
def test_the_ceiling_by_hand(options, values, factors):
    guard = MetricGuard(Wants(4), **{"patience": 1, **options})
    assert factors_of(guard, values) == pytest.approx(factors)


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


def test_the_ceiling_begins_at_the_factor_in_force_and_lets_smaller_ones_pass():
    guard = MetricGuard(Wants(8), patience=1)
    guard.decide(check(0, 1.0, factor=3.0))
    assert guard.decide(check(1, 1.0, factor=3.0)).factor == 1.5
    guard = MetricGuard(Wants(1.5), patience=1)
    decisions = [guard.decide(check(epoch, 1.0, factor=4.0)) for epoch in range(2)]
    assert [(each.factor, each.reason, each.message) for each in decisions] == [(1.5, Reason.custom, "wanted")] * 2
    guard = MetricGuard(FactorSchedule({0: 4.0, 3: 1.5, 5: 4.0}), patience=1)
    assert factors_of(guard, [1.0, 1.0, 1.0, 0.9, 0.8, 0.7]) == [4, 2, 1, 1.5, 4, 4]


def test_the_reason_names_the_metric_and_its_values():
    guard = MetricGuard(Wants(4), monitor="val_acc", mode="max", patience=1)
    guard.decide(check(0, 0.75, name="val_acc"))
    decision = guard.decide(check(1, 0.5, name="val_acc"))
    assert (decision.reason, decision.message) == (Reason.guarded, "val_acc 0.5, best 0.75: at most factor 2 instead of 4")
    later = guard.decide(Observation(2, 2.0, metrics={"val_acc": 0.5}))
    assert later.message == "val_acc 0.5 is not new: at most factor 2 instead of 4"


def test_the_wrapped_controller_is_asked_every_time_and_says_where_to_begin_and_when_to_ask():
    guard = MetricGuard(Wants(3), patience=1)
    assert guard.initial_factor() == 3
    guard.decide(Observation(0, 3.0))
    factors_of(guard, [1.0, None, 1.0])
    assert guard.controller.asked == 4
    guard = MetricGuard(TargetIdle(first_after_steps=30, every_n_steps=200))
    assert (guard.initial_factor(), guard.first_after_steps, guard.every_n_steps, guard.asked_after) == (None, 30, 200, ())
    wants = Wants()
    wants.asked_after = frozenset({7})
    assert MetricGuard(wants).asked_after == {7}


def test_a_metric_that_comes_an_epoch_late_is_waited_for_once_and_an_unknown_one_is_an_error():
    guard = MetricGuard(Wants(4), patience=1)
    assert guard.decide(Observation(0, 4.0)).factor == 4
    assert factors_of(guard, [1.0, 1.0]) == [4, 2]
    guard = MetricGuard(Wants(4), monitor="val_los")
    seen = Observation(0, 4.0, metrics={"val_loss": 1.0, "train_loss": 2.0}, logged=frozenset({"val_loss"}))
    assert guard.decide(seen).factor == 4
    with pytest.raises(ValueError, match=r"monitor='val_los' is not logged\. Logged are: train_loss, val_loss\. .*choose one"):
        guard.decide(seen)
    with pytest.raises(ValueError, match="Logged are: none"):
        guard.decide(Observation(1, 4.0))


@pytest.mark.parametrize("unproven", [{"validated": False}, {"moment": Moment.early}, {"moment": Moment.within_epoch}])
def test_before_the_first_validation_and_within_epochs_it_waits_without_limit(unproven):
    guard = MetricGuard(Wants(4), patience=1)
    for epoch in range(20):
        assert guard.decide(Observation(epoch, 4.0, **unproven)).factor == 4
    guard.decide(Observation(20, 4.0))
    with pytest.raises(ValueError, match="is not logged"):
        guard.decide(Observation(21, 4.0))


def test_the_ceiling_stays_while_the_metric_is_missing_after_a_resume():
    guard, resumed = MetricGuard(Wants(4), patience=1), MetricGuard(Wants(4), patience=1)
    assert factors_of(guard, [0.5, 0.6]) == [4, 2]
    resumed.load_state_dict(guard.state_dict())
    decision = resumed.decide(Observation(2, 2.0, validated=False))
    assert (decision.factor, decision.reason) == (2, Reason.guarded)
    assert "val_loss is not logged yet" in decision.message
    of_another_kind = MetricGuard(TargetIdle(), patience=1)  # whose own state is left alone
    of_another_kind.load_state_dict(guard.state_dict())
    assert of_another_kind.state_dict()["ceiling"] == 2


@pytest.mark.parametrize("cut", [0, 3, 4, 7, 11])
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


SHRINK = "shrink must be a number between 0 and 1, both excluded, got"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"controller": TargetIdle}, TypeError, r"controller must be a Controller to guard, e\.g\. TargetIdle\(\), or None"),
        ({"mode": "auto"}, ValueError, "mode must be 'min' or 'max', got 'auto'"),
        ({"patience": 0}, ValueError, "patience must be a number of checks >= 1, got 0"),
        ({"patience": 1.5}, TypeError, r"patience must be an integer \(a number of checks\), got 1\.5"),
        ({"min_delta": -0.1}, ValueError, r"min_delta must be a finite number >= 0, got -0\.1; 0 counts any improvement"),
        ({"shrink": 0}, ValueError, f"{SHRINK} 0; 0.5 halves the ceiling"),
        ({"shrink": 1}, ValueError, f"{SHRINK} 1"),
    ],
)
def test_an_impossible_option_is_refused_with_its_name_its_value_and_a_hint(options, error, message):
    with pytest.raises(error, match=message):
        MetricGuard(**{"controller": Wants()} | options)
