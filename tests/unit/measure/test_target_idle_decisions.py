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


def costs_in_parts(source, rest, collate, device=0.01, workers=1, point="before_augmentation"):
    return PipelineCosts(point, source, rest, collate, device_seconds=device, workers=workers)


UNKNOWN = Observation(0, 1.0)
TOO_SLOW = "idle 86.5%, target 5%: the work after the insertion point takes 14 ms per batch by itself, a step 10 ms; past factor "
# 5% longer than at factor 8 (60 / 8 + 14 = 21.5 ms): 60 / (22.575 - 14). After augmentation: 72 / 8 + 2 = 11, 72 / (11.55 - 2).
TOO_SLOW += "7, echoing gains hardly anything more; about 1.95 times as fast: "
NEEDED = "insertion_point='after_augmentation' with factor 7.54, whose echoes repeat their augmentation, too"
UNLESS = "insertion_point='before_augmentation' if most of that is decoding, else "
FEWER = "idle 0%, target 5%: a factor of 1 is enough; min_factor is 2"
LIMIT = "max_factor is 8"


@pytest.mark.parametrize(
    ("options", "seen", "factor", "reason", "message"),
    [
        # Under the target a change under a tenth is no change: what would be chosen is 3.01, 5.09 and 1.
        ({}, observe(3.3, 0.04, costs_of(0.0296)), 3.3, Reason.fits, "idle 4%, target 5%"),
        ({}, observe(3.3, 0.04, costs_of(0.05)), 3.3, Reason.fits, "idle 4%, target 5%"),
        ({}, observe(1.05, 0.04, costs_of(0.005)), 1.05, Reason.fits, "idle 4%, target 5%"),
        # 2.85 / 1.053 = 2.7075, 7% above it: 2.897
        ({}, observe(3.3, 0.0, costs_of(0.0285)), 2.9, Reason.cheaper_source, "idle 0%, target 5%: a factor of 2.9 is enough"),
        ({"target": 0.25}, observe(2.0, 0.25, costs_of(0.03)), 2, Reason.fits, ""),  # exactly at the target
        ({}, observe(3.0, 0.0, costs_of(0.03, redone=0.02)), 3, Reason.fits, ""),  # though the costs say that it cannot be
        # What the clocks do not show is added: 45 ms instead of 30 per fresh batch; 25 instead of 30.
        ({}, observe(1.0, 1 - 10 / 45, costs_of(0.03), step_seconds=0.045), 4.58, Reason.starved, ""),  # 4.5 * 0.95 * 1.07
        ({}, observe(1.0, 0.6, costs_of(0.03), step_seconds=0.025), 2.55, Reason.starved, ""),
        # Waits that no costs explain raise the factor all the same, as where ranks stall in turn: 3 * 1.07.
        ({}, observe(3.0, 0.3, costs_of(0.028), step_seconds=0.01), 3.21, Reason.starved, ""),
        # As for a plain loader: the device waits two thirds of each step, so three uses feed it.
        ({}, observe(1.0, 2 / 3, PipelineCosts.of_waiting(0.03, 2 / 3, 1.0)), 3.05, Reason.starved, ""),
        # A binding maximum, a factor above it, a binding minimum, a factor below it.
        ({}, observe(1.0, 0.9, costs_of(0.1)), 8, Reason.at_maximum, f"a factor of 10.17 feeds the device; {LIMIT}"),
        ({}, observe(8.0, 0.2, costs_of(0.1)), 8, Reason.at_maximum, LIMIT),  # 100 ms / 8 for a step of 10 ms
        ({"max_factor": 4.07}, observe(1.0, 0.75, costs_of(0.04)), 4.07, Reason.starved, ""),
        ({}, observe(12.0, 0.0, costs_of(0.1)), 8, Reason.at_maximum, LIMIT),
        ({}, observe(12.0, 0.0), 8, Reason.at_maximum, LIMIT),
        ({"min_factor": 2}, observe(4.0, 0.0, costs_of(0.005)), 2, Reason.at_minimum, FEWER),
        ({"min_factor": 2}, observe(2.15, 0.0, costs_of(0.005)), 2.15, Reason.at_minimum, FEWER),  # under a tenth: no change
        ({"min_factor": 2}, observe(2.2, 0.0, costs_of(0.005)), 2, Reason.at_minimum, FEWER),
        ({"min_factor": 2}, observe(1.0, 0.0, costs_of(0.005)), 2, Reason.at_minimum, "min_factor is 2"),
        ({"min_factor": 2}, UNKNOWN, 2, Reason.at_minimum, "min_factor is 2"),
        ({"min_factor": 2, "max_factor": 2}, observe(2.0, 0.8, costs_of(0.1)), 2, Reason.at_maximum, ""),
        # Per batch, all workers on it: augmentation 12 ms, collate 2 ms, reading 60 ms. The first point that works is named.
        (
            *({}, observe(1.0, 1 - 10 / 74, costs_in_parts(0.12, 0.024, 0.004, workers=2)), 7, Reason.downstream_too_slow),
            TOO_SLOW + NEEDED,
        ),
        (
            {},
            observe(1.0, 1 - 10 / 74, costs_in_parts(0.12, 0.024, 0.004, workers=2, point="after_read")),
            *(7, Reason.downstream_too_slow, TOO_SLOW + UNLESS + NEEDED),
        ),
        # Workers say 39 ms and it takes 52: a third more, 9 ms of collate and the like are 12 then.
        (
            *({"max_factor": 100}, observe(1.0, 1 - 10 / 52, costs_of(0.03, redone=0.009), step_seconds=0.052), 39.22),
            *(Reason.downstream_too_slow, "about 1.24 times as fast: insertion_point='after_batching' with factor 4.96"),
        ),
        # Collate alone is too slow: only whole batches can be echoed. And a device that does nothing cannot be fed at all.
        (
            *({}, observe(3.0, 1 - 10 / 42, costs_in_parts(0.06, 0.01, 0.012)), 6.69, Reason.downstream_too_slow),
            "about 2.88 times as fast: insertion_point='after_batching' with factor 7.62, whose echoes repeat their "
            "augmentation, too",
        ),
        (
            *({}, observe(3.0, 1.0, costs_in_parts(0.06, 0.01, 0.012, device=0.0), step_seconds=0.042), 6.69),
            *(Reason.downstream_too_slow, "factor 7.62, whose echoes repeat their augmentation, too"),
        ),
        # Nothing before the point takes time: nothing is gained. About what is in force already is kept.
        (
            *({}, observe(1.0, 0.5, costs_in_parts(0.0, 0.02, 0.0), step_seconds=0.02), 1, Reason.downstream_too_slow),
            "a step 10 ms; echoing gains nothing; about 1.91 times as fast: insertion_point='after_augmentation' with factor "
            "1.91, whose echoes repeat their augmentation, too",
        ),
        ({}, observe(6.3, 1 - 10 / 32, costs_in_parts(0.06, 0.01, 0.012)), 6.3, Reason.downstream_too_slow, ""),
        ({"max_factor": 3}, observe(1.0, 1 - 10 / 82, costs_in_parts(0.06, 0.01, 0.012)), 2.72, Reason.downstream_too_slow, ""),
        # What is not known changes nothing.
        (
            *({}, Observation(4, 2.5, steps=3, costs=costs_of(0.1)), 2.5, Reason.not_measured),
            "only 3 steps were measured with this factor",
        ),
        (
            *({}, observe(2.5, 0.5), 2.5, Reason.not_measured),
            "idle 50%, target 5%, but the cost of the pipeline is not known",
        ),
        ({}, observe(2.5, 0.01), 2.5, Reason.fits, "idle 1%, target 5%; how small a factor is enough is not known"),
    ],
)
def test_the_decision_for_an_epochs_figures(options, seen, factor, reason, message):
    decision = TargetIdle(**options).decide(seen)
    assert (decision.factor, decision.reason) == (pytest.approx(factor, abs=0.006), reason)
    assert decision.message.endswith(message)
    within = TargetIdle(**options).decide(replace(seen, moment=Moment.within_epoch))
    assert within == decision, "within an epoch it decides as at its end"


@pytest.mark.parametrize("idle", [0.0501, 0.08])
@pytest.mark.parametrize("believed", [0.5, 1.0, 1.05])
def test_over_the_target_every_change_upward_counts(idle, believed):
    """Whatever the costs say: the factor was seen not to be enough."""
    decision = TargetIdle(TARGET).decide(observe(3.0, idle, costs_of(0.03 * believed)))
    assert decision.reason is Reason.starved
    assert 3 * (1 - TARGET) / (1 - idle) <= decision.factor < 1.15 * 3  # echoing divides all of the host's time here
    assert decision.factor > 3


def test_the_last_time_that_the_device_waited_says_how_much_slower_the_host_is():
    """First it takes half as long again as its workers say, later, while it takes longer for all to see, a tenth."""
    controller = TargetIdle(TARGET, max_factor=8)
    controller.decide(observe(1.0, 1 - 10 / 45, costs_of(0.03), step_seconds=0.045))
    decision = controller.decide(observe(4.0, 1 - 10 / 16.5, costs_of(0.06), step_seconds=0.0165))
    assert decision.factor == pytest.approx(6.6 * 0.95 * 1.07, abs=0.01)


@pytest.mark.parametrize(("idle", "slowness"), [(0.15, 2.3), (0.4, 3.3)])
def test_much_waiting_does_although_the_costs_tell_of_time_to_spare(idle, slowness):
    """The host takes as long as a step lasts, whatever its clocks say: 5 ms per batch at factor 4."""
    raised = TargetIdle(max_factor=20).decide(observe(4.0, idle, costs_of(0.02)))
    assert raised.factor == pytest.approx(max(2 * slowness * 0.95 * 1.07, 4 * 1.07), rel=0.03)


def test_a_recommendation_is_that_of_a_new_controller():
    seen = observe(1.0, 0.5, costs_of(0.02))
    assert recommend(seen) == TargetIdle().decide(seen)
    assert recommend(seen, target=0.3).factor < recommend(seen).factor


IDLE, SMALLEST, LARGEST = (
    "target must be an idle fraction",
    "min_factor must be a finite number >= 1, got",
    "max_factor must be",
)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": 0}, ValueError, f"{IDLE} between 0 and 1, both excluded, got 0; 0.05 is usual"),
        ({"target": 1}, ValueError, f"{IDLE} .*, got 1;"),
        ({"target": "0.05"}, TypeError, "target must be a number, got '0.05'"),
        ({"min_factor": 0.5}, ValueError, rf"{SMALLEST} 0\.5; 1 lets echoing be switched off"),
        ({"min_factor": 9}, ValueError, f"{LARGEST} a finite number >= min_factor=9, got 8.0; 8 is the default"),
        ({"max_factor": math.inf}, ValueError, f"{LARGEST} a finite number .*, got inf"),
        ({"first_after_steps": 0}, ValueError, "first_after_steps must be a number of steps >= 1, got 0"),
        ({"every_n_steps": 0}, ValueError, "every_n_steps must be a number of steps >= 1, got 0"),
    ],
)
def test_an_impossible_option_is_refused_with_its_name_its_value_and_a_hint(options, error, message):
    with pytest.raises(error, match=message):
        TargetIdle(**options)


def early(idle, low, costs=None, factor=1.0, steps=50):
    return replace(observe(factor, idle, costs, steps=steps), moment=Moment.early, idle_low=low)


@pytest.mark.parametrize(
    ("options", "seen", "factor", "reason", "message"),
    [
        ({}, early(2 / 3, 0.6, costs_of(0.03)), 3.05, Reason.starved, ""),  # 3 * 0.95 = 2.85, 7% above it
        # While the waiting may be chance, it waits.
        ({}, early(2 / 3, None, costs_of(0.03)), 1, Reason.not_measured, "not known"),
        ({}, early(2 / 3, 0.05, costs_of(0.03)), 1, Reason.not_measured, "at least 5%"),
        ({}, early(2 / 3, 0.6, None), 1, Reason.not_measured, "not known"),
        # It never lowers the factor, and raises it to no minimum without need.
        ({}, early(0.0, 0.0, costs_of(0.001), factor=3.0), 3, Reason.not_measured, "at least"),
        ({"max_factor": 2}, early(0.5, 0.4, costs_of(0.08), factor=3.0), 3, Reason.at_maximum, ""),
        ({"min_factor": 2}, early(0.0, 0.0, costs_of(0.001)), 1, Reason.not_measured, ""),
        # No factor is enough, and 6.69 gains: the factor in force was chosen by slower steps. At 6.5 there is nothing to gain.
        (
            {},
            early(32 / 42, None, costs_in_parts(0.06, 0.01, 0.012), factor=3.0),
            6.69,
            Reason.downstream_too_slow,
            "past factor",
        ),
        ({}, early(21 / 31, None, costs_in_parts(0.06, 0.01, 0.012), factor=6.5), 6.5, Reason.not_measured, "more will tell"),
    ],
)
def test_early_it_only_raises_the_factor_and_only_if_the_waiting_is_no_chance(options, seen, factor, reason, message):
    decision = TargetIdle(**options).decide(seen)
    assert (decision.factor, decision.reason) == (factor, reason)
    assert message in decision.message


def test_steps_that_were_seen_early_are_judged_with_those_that_follow():
    """50 steps that waited, and 50 that did not: together they are over the target."""
    controller = TargetIdle()
    assert controller.decide(early(0.5, 0.0, costs_of(0.02))).factor == 1
    assert "idle 33.3%" in controller.decide(observe(1.0, 0.0, costs_of(0.02), steps=50)).message


def test_an_early_raise_is_judged_like_any_other():
    """Its steps before are those that the raise is compared with: it brought nothing, and is taken back."""
    controller = TargetIdle()
    factor = controller.decide(early(2 / 3, 0.6, costs_of(0.03))).factor
    decisions = [controller.decide(observe(factor, 2 / 3, costs_of(0.03), steps=400)) for _ in range(3)]
    assert decisions[-1].factor == 1
    assert decisions[-1].reason is Reason.no_gain
