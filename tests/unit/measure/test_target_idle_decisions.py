"""`TargetIdle` asked once: the decision for an epoch's figures, its limits, its reason, its options."""

import math
from dataclasses import replace

import pytest
from pipeline import TARGET, Pipeline, World, costs_of, ideal_factor, observe, train

from lightning_echo.measure.control import Moment, Observation, PipelineCosts, Reason
from lightning_echo.measure.target_idle import TargetIdle, recommend


def test_without_workers_it_echoes_as_far_as_that_feeds_the_device():
    world = World(point="after_augmentation", source=0.2, workers=0)
    ideal = ideal_factor(world, TARGET)
    seen, decided = train(Pipeline(world), TargetIdle(TARGET, max_factor=8), epochs=3)
    assert ideal <= decided[1].factor <= 1.1 * ideal
    assert seen[2].idle_fraction <= TARGET


@pytest.mark.parametrize(("source", "collate"), [(3.0, 0.0), (0.2, 0.2)])
def test_without_workers_a_device_that_cannot_be_fed_needs_workers_first(source, collate):
    world = World(point="after_augmentation", source=source, collate=collate, workers=0)
    _, (decision,) = train(Pipeline(world), TargetIdle(TARGET, max_factor=8), epochs=1)
    assert (decision.factor, decision.reason) == (1, Reason.no_workers)
    assert "set num_workers to 1 or more first" in decision.message


# ---------------------------------------------------------------- one decision at a time


@pytest.mark.parametrize(("factor", "source"), [(3.3, 0.0296), (3.3, 0.033), (3.3, 0.05), (1.05, 0.005), (1.0, 0.005)])
def test_under_the_target_a_change_under_a_tenth_is_no_change(factor, source):
    """What would be chosen today: 3.01, 3.36, 5.09 and twice 1."""
    decision = TargetIdle().decide(observe(factor, 0.04, costs_of(source)))
    assert (decision.factor, decision.reason) == (factor, Reason.fits)
    assert decision.message == "idle 4%, target 5%"


def test_under_the_target_a_change_of_more_than_a_tenth_is_one():
    decision = TargetIdle().decide(observe(3.3, 0.0, costs_of(0.0285)))
    assert (decision.factor, decision.reason) == (2.9, Reason.cheaper_source)  # 2.85 / 1.053 = 2.7075, 7% above it: 2.897
    assert decision.message == "idle 0%, target 5%: a factor of 2.9 is enough"


def test_exactly_at_the_target_it_is_met():
    assert TargetIdle(0.25).decide(observe(2.0, 0.25, costs_of(0.03))).reason is Reason.fits


@pytest.mark.parametrize("idle", [0.0501, 0.06, 0.08])
@pytest.mark.parametrize("believed", [0.5, 1.0, 1.05])
def test_over_the_target_every_change_upward_counts(idle, believed):
    """Whatever the costs say: the factor was seen not to be enough."""
    factor = 3.0
    decision = TargetIdle(TARGET).decide(observe(factor, idle, costs_of(0.03 * believed)))
    assert decision.reason is Reason.starved
    assert factor < decision.factor < 1.15 * factor
    needed = factor * (1 - TARGET) / (1 - idle)  # echoing divides all of the host's time here
    assert decision.factor >= needed


def test_the_seconds_that_costs_do_not_show_are_added_to_them():
    """The host takes half as long again as its workers say: 45 ms instead of 30 per fresh batch, for a step of 10 ms."""
    decision = TargetIdle(TARGET, max_factor=8).decide(observe(1.0, 1 - 10 / 45, costs_of(0.03), step_seconds=0.045))
    assert decision.factor == pytest.approx(4.5 * 0.95 * 1.07, abs=0.01)


def test_the_last_time_that_the_device_waited_says_how_much_slower_the_host_is():
    """First it takes half as long again as its workers say, later, while it takes longer for all to see, a tenth."""
    controller = TargetIdle(TARGET, max_factor=8)
    controller.decide(observe(1.0, 1 - 10 / 45, costs_of(0.03), step_seconds=0.045))
    decision = controller.decide(observe(4.0, 1 - 10 / 16.5, costs_of(0.06), step_seconds=0.0165))
    assert decision.factor == pytest.approx(6.6 * 0.95 * 1.07, abs=0.01)


def test_a_host_that_is_faster_than_its_costs_needs_less():
    decision = TargetIdle(TARGET, max_factor=8).decide(observe(1.0, 0.6, costs_of(0.03), step_seconds=0.025))
    assert decision.factor == pytest.approx(2.5 * 0.95 * 1.07, abs=0.01)


def test_waits_that_no_costs_explain_raise_the_factor_nevertheless():
    """As where ranks stall in turn: the job waits, and no rank's own time says why."""
    decision = TargetIdle(TARGET, max_factor=8).decide(observe(3.0, 0.3, costs_of(0.028), step_seconds=0.01))
    assert (decision.factor, decision.reason) == (pytest.approx(3 * 1.07, abs=0.01), Reason.starved)


def test_a_binding_maximum_is_a_reason_of_its_own():
    decision = TargetIdle().decide(observe(1.0, 0.9, costs_of(0.1)))
    assert (decision.factor, decision.reason) == (8, Reason.at_maximum)
    assert decision.message == "idle 90%, target 5%: a factor of 10.17 feeds the device; max_factor is 8"
    stays = TargetIdle().decide(observe(8.0, 0.2, costs_of(0.1)))  # 100 ms / 8 for a step of 10 ms
    assert (stays.factor, stays.reason) == (8, Reason.at_maximum)
    just = TargetIdle(max_factor=4.07).decide(observe(1.0, 0.75, costs_of(0.04)))
    assert (just.factor, just.reason) == (4.07, Reason.starved)


def test_a_factor_above_the_maximum_is_brought_down_to_it():
    for idle, costs in ((0.0, costs_of(0.1)), (0.5, costs_of(0.24)), (0.0, None), (0.5, None)):
        decision = TargetIdle().decide(observe(12.0, idle, costs))
        assert (decision.factor, decision.reason) == (8, Reason.at_maximum)
        assert decision.message.endswith("max_factor is 8")


def test_a_binding_minimum_is_a_reason_of_its_own():
    controller = TargetIdle(min_factor=2)
    decision = controller.decide(observe(4.0, 0.0, costs_of(0.005)))
    assert (decision.factor, decision.reason) == (2, Reason.at_minimum)
    assert decision.message == "idle 0%, target 5%: a factor of 1 is enough; min_factor is 2"
    stays = controller.decide(observe(2.0, 0.0, costs_of(0.005)))
    assert (stays.factor, stays.reason) == (2, Reason.at_minimum)
    assert stays.message == decision.message
    little = controller.decide(observe(2.15, 0.0, costs_of(0.005)))
    assert (little.factor, little.reason) == (2.15, Reason.at_minimum), "a change under a tenth is no change"
    assert controller.decide(observe(2.2, 0.0, costs_of(0.005))).factor == 2


def test_a_factor_below_the_minimum_is_brought_up_to_it():
    unknown = Observation(0, 1.0)
    for seen in (observe(1.0, 0.0, costs_of(0.005)), observe(1.0, 0.0), observe(1.0, 0.3), unknown):
        decision = TargetIdle(min_factor=2).decide(seen)
        assert (decision.factor, decision.reason) == (2, Reason.at_minimum)
        assert decision.message.endswith("min_factor is 2")
    assert TargetIdle(min_factor=2).decide(observe(1.0, 0.6, costs_of(0.025))).reason is Reason.starved


def test_the_minimum_may_be_the_maximum():
    controller = TargetIdle(min_factor=2, max_factor=2)
    assert [controller.decide(observe(2.0, idle, costs_of(0.1))).factor for idle in (0.0, 0.8)] == [2, 2]


def test_what_follows_the_echo_may_be_too_slow_then_the_first_later_point_that_works_is_named():
    """A step takes 10 ms. Per batch, all workers on it: augmentation 12 ms, collate 2 ms, reading 60 ms."""
    costs = PipelineCosts("before_augmentation", 0.12, 0.024, 0.004, device_seconds=0.01, workers=2)
    decision = TargetIdle(max_factor=8).decide(observe(1.0, 1 - 10 / 74, costs))
    assert (decision.factor, decision.reason) == (1, Reason.downstream_too_slow)
    needed = 72 / (10 / 0.95 - 2)
    assert decision.message == (
        "idle 86.5%, target 5%: the work after the insertion point takes 14 ms per batch by itself, a step 10 ms; "
        f"echo at insertion_point='after_augmentation' with factor {needed:.3g}"
    )


def test_where_decoding_and_augmenting_are_too_slow_the_point_between_is_named_though_its_cost_is_not_known():
    """A step takes 10 ms. Per batch, all workers on it: decoding and augmentation 12 ms, collate 2 ms, reading 60 ms."""
    costs = PipelineCosts("after_read", 0.12, 0.024, 0.004, device_seconds=0.01, workers=2)
    decision = TargetIdle(max_factor=8).decide(observe(1.0, 1 - 10 / 74, costs))
    assert (decision.factor, decision.reason) == (1, Reason.downstream_too_slow)
    assert decision.message.endswith(
        "echo at insertion_point='before_augmentation' if most of that is decoding, else at "
        f"insertion_point='after_augmentation' with factor {72 / (10 / 0.95 - 2):.3g}"
    )


def test_seconds_that_costs_do_not_show_may_make_what_follows_the_echo_too_slow():
    """Workers say 39 ms and it takes 52: a third more, 9 ms of collate and the like are 12 then."""
    decision = TargetIdle(max_factor=100).decide(observe(1.0, 1 - 10 / 52, costs_of(0.03, redone=0.009), step_seconds=0.052))
    assert (decision.factor, decision.reason) == (1, Reason.downstream_too_slow)
    assert "takes 12 ms per batch by itself, a step 10 ms" in decision.message
    assert decision.message.endswith("insertion_point='after_batching' with factor 4.94")


def test_where_collate_alone_is_too_slow_only_whole_batches_can_be_echoed():
    costs = PipelineCosts("before_augmentation", 0.06, 0.01, 0.012, device_seconds=0.01, workers=1)
    decision = TargetIdle().decide(observe(3.0, 1 - 10 / 42, costs))
    assert (decision.factor, decision.reason) == (3, Reason.downstream_too_slow)
    assert decision.message.endswith("echo at insertion_point='after_batching' with factor 7.79")


def test_a_device_that_does_nothing_cannot_be_fed_at_any_point():
    costs = PipelineCosts("after_augmentation", 0.06, 0.01, 0.012, device_seconds=0.0, workers=1)
    decision = TargetIdle().decide(observe(3.0, 1.0, costs, step_seconds=0.042))
    assert (decision.factor, decision.reason) == (3, Reason.downstream_too_slow)
    assert "insertion_point" not in decision.message


def test_a_factor_under_the_target_stays_where_the_costs_say_that_it_cannot_be():
    assert TargetIdle().decide(observe(3.0, 0.0, costs_of(0.03, redone=0.02))).reason is Reason.fits


def test_what_is_not_known_changes_nothing():
    controller = TargetIdle()
    unmeasured = controller.decide(Observation(4, 2.5, steps=3, costs=costs_of(0.1)))
    assert (unmeasured.factor, unmeasured.reason) == (2.5, Reason.not_measured)
    assert unmeasured.message == "only 3 steps were measured with this factor"
    starved = controller.decide(observe(2.5, 0.5))
    assert (starved.factor, starved.reason) == (2.5, Reason.not_measured)
    assert starved.message == "idle 50%, target 5%, but the cost of the pipeline is not known"
    fed = controller.decide(observe(2.5, 0.01))
    assert (fed.factor, fed.reason) == (2.5, Reason.fits)
    assert fed.message == "idle 1%, target 5%; how small a factor is enough is not known"


@pytest.mark.parametrize("idle", [0.051, 0.07, 0.1])
@pytest.mark.parametrize("times", [1, 3])
def test_a_little_waiting_while_the_factor_is_larger_than_needed_does_not_keep_it_there(idle, times):
    """A cache has made the source half as dear. The epochs after that wait a little, as on a busy machine; later ones do not."""
    controller = TargetIdle(max_factor=8)
    controller.decide(observe(4.0, 0.0, costs_of(0.04)))
    factor = 4.0
    for _ in range(times):
        factor = controller.decide(observe(factor, idle, costs_of(0.02))).factor
    for _ in range(4):
        factor = controller.decide(observe(factor, 0.02, costs_of(0.02))).factor
    assert 2 * 0.95 < factor < 2 * 0.95 * 1.07 * 1.1


@pytest.mark.parametrize(("idle", "slowness"), [(0.15, 2.3), (0.4, 3.3)])
def test_much_waiting_does_although_the_costs_tell_of_time_to_spare(idle, slowness):
    """The host takes as long as a step lasts, whatever its clocks say: 5 ms per batch at factor 4."""
    controller = TargetIdle(max_factor=20)
    raised = controller.decide(observe(4.0, idle, costs_of(0.02)))
    assert 0.01 / (1 - idle) / 0.005 == pytest.approx(slowness, abs=0.06)
    assert raised.factor == pytest.approx(max(2 * slowness * 0.95 * 1.07, 4 * 1.07), rel=0.03)


def test_a_pipeline_known_only_by_its_waiting_gets_a_factor_too():
    """As for a plain loader: the device waits two thirds of each step, so three uses feed it."""
    decision = recommend(observe(1.0, 2 / 3, PipelineCosts.of_waiting(0.03, 2 / 3, 1.0)))
    assert (decision.factor, decision.reason) == (pytest.approx(3 * 0.95 * 1.07, abs=0.01), Reason.starved)


def test_a_recommendation_is_that_of_a_new_controller():
    seen = observe(1.0, 0.5, costs_of(0.02))
    assert recommend(seen) == TargetIdle().decide(seen)
    assert recommend(seen, target=0.3).factor < recommend(seen).factor
    assert recommend(observe(1.0, 0.2, costs_of(0.0125)), target=0.3).reason is Reason.fits


def test_the_state_is_made_of_plain_numbers():
    controller = TargetIdle()
    controller.decide(observe(3.0, 0.5, costs_of(0.03)))
    state = controller.state_dict()
    recent, lately, trials = (state.pop(name) for name in ("recent", "lately", "trials"))
    assert {type(value) for value in state.values()} == {float}
    for seen in (recent, lately):
        assert {type(value) for value in (seen | seen.pop("costs")).values()} == {float, int, str}
    assert {type(value) for value in trials.values()} <= {list, type(None)}


def test_defaults_and_printing():
    controller = TargetIdle()
    assert (controller.target, controller.min_factor, controller.max_factor) == (0.05, 1, 8)
    assert repr(TargetIdle(0.1, min_factor=2, max_factor=6)) == "TargetIdle(0.1, min_factor=2, max_factor=6)"
    assert controller.initial_factor() is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": 0}, ValueError, "target must be an idle fraction between 0 and 1, both excluded, got 0; 0.05 is usual"),
        ({"target": 1}, ValueError, "target must be an idle fraction .*, got 1;"),
        ({"target": 5}, ValueError, "target must be an idle fraction .*, got 5;"),
        ({"target": -0.1}, ValueError, r"target must be an idle fraction .*, got -0\.1;"),
        ({"target": math.nan}, ValueError, "target must be an idle fraction .*, got nan;"),
        ({"target": "0.05"}, TypeError, "target must be a number, got '0.05'"),
        ({"min_factor": 0.5}, ValueError, r"min_factor must be a finite number >= 1, got 0\.5; 1 lets echoing be switched off"),
        ({"min_factor": math.nan}, ValueError, "min_factor must be a finite number >= 1, got nan"),
        ({"min_factor": math.inf}, ValueError, "min_factor must be a finite number >= 1, got inf"),
        ({"min_factor": None}, TypeError, "min_factor must be a number, got None"),
        ({"min_factor": 9}, ValueError, "max_factor must be a finite number >= min_factor=9, got 8.0; 8 is the default"),
        ({"max_factor": 0.5}, ValueError, r"max_factor must be a finite number >= min_factor=1\.0, got 0\.5"),
        ({"max_factor": math.inf}, ValueError, "max_factor must be a finite number .*, got inf"),
        ({"max_factor": math.nan}, ValueError, "max_factor must be a finite number .*, got nan"),
        ({"max_factor": True}, TypeError, "max_factor must be a number, got True"),
    ],
)
def test_an_impossible_option_is_refused_with_its_name_its_value_and_the_way_out(options, error, message):
    with pytest.raises(error, match=message):
        TargetIdle(**options)


# ---------------------------------------------------------------- early, in the first epoch


def early(idle, low, costs=None, factor=1.0, steps=50):
    return replace(observe(factor, idle, costs, steps=steps), moment=Moment.early, idle_low=low)


def test_early_it_raises_the_factor_as_at_an_epoch_s_end_if_the_waiting_is_no_chance():
    decision = TargetIdle().decide(early(2 / 3, 0.6, costs_of(0.03)))
    assert (decision.factor, decision.reason) == (3.05, Reason.starved)  # 3 * 0.95 = 2.85, 7% above it


@pytest.mark.parametrize("low", [None, 0.0, 0.04, 0.05])
def test_early_it_waits_while_the_waiting_may_be_chance(low):
    controller = TargetIdle()
    decision = controller.decide(early(2 / 3, low, costs_of(0.03)))
    assert (decision.factor, decision.reason) == (1.0, Reason.not_measured)
    assert ("not known" if low is None else "at least") in decision.message
    assert controller.decide(observe(1.0, 2 / 3, costs_of(0.03), steps=50)).factor == 3.05


def test_early_it_never_lowers_the_factor():
    assert TargetIdle().decide(early(0.0, 0.0, costs_of(0.001), factor=3.0)).factor == 3
    beyond = TargetIdle(max_factor=2).decide(early(0.5, 0.4, costs_of(0.08), factor=3.0))
    assert (beyond.factor, beyond.reason) == (3, Reason.at_maximum)


def test_early_it_does_not_raise_to_the_smallest_factor_without_need():
    assert TargetIdle(min_factor=2).decide(early(0.0, 0.0, costs_of(0.001))).factor == 1
    assert TargetIdle(min_factor=2).decide(observe(1.0, 0.0, costs_of(0.001))).factor == 2


def test_early_it_leaves_the_factor_where_the_costs_are_not_known():
    decision = TargetIdle().decide(early(2 / 3, 0.6, None))
    assert (decision.factor, decision.reason) == (1, Reason.not_measured)


def test_steps_that_were_seen_early_are_judged_with_those_that_follow():
    """50 steps that waited, and 50 that did not: together they are over the target."""
    controller = TargetIdle()
    assert controller.decide(early(0.5, 0.0, costs_of(0.02))).factor == 1
    assert "idle 33.3%" in controller.decide(observe(1.0, 0.0, costs_of(0.02), steps=50)).message


def test_within_an_epoch_it_decides_as_at_its_end():
    for idle, source in ((0.67, 0.03), (0.0, 0.0285)):
        seen = observe(3.3, idle, costs_of(source))
        assert TargetIdle().decide(replace(seen, moment=Moment.within_epoch)) == TargetIdle().decide(seen)


def test_an_early_raise_is_judged_like_any_other():
    """Its steps before are those that the raise is compared with: it brought nothing, and is taken back."""
    controller = TargetIdle()
    factor = controller.decide(early(2 / 3, 0.6, costs_of(0.03))).factor
    decisions = [controller.decide(observe(factor, 2 / 3, costs_of(0.03), steps=400)) for _ in range(3)]
    assert decisions[-1].factor == 1
    assert decisions[-1].reason is Reason.no_gain


def test_it_says_after_how_many_steps_it_wants_to_be_asked():
    assert (TargetIdle().first_after_steps, TargetIdle().every_n_steps) == (50, None)
    assert repr(TargetIdle()) == "TargetIdle(0.05, min_factor=1, max_factor=8)"
    told = TargetIdle(first_after_steps=None, every_n_steps=500)
    assert repr(told) == "TargetIdle(0.05, min_factor=1, max_factor=8, first_after_steps=None, every_n_steps=500)"
    for name in ("first_after_steps", "every_n_steps"):
        with pytest.raises(ValueError, match=f"{name} must be a number of steps >= 1, got 0"):
            TargetIdle(**{name: 0})
