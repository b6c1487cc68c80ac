"""`TargetIdle`: chooses the smallest echo factor that feeds the accelerator, and takes back one that did not help."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from lightning_echo.insertion import STAGES, InsertionPoint
from lightning_echo.measure.control import (
    ENOUGH_STEPS,
    FEWEST_STEPS,
    GAINS_LITTLE,
    Controller,
    Decision,
    Moment,
    Observation,
    PipelineCosts,
    Reason,
    RecentSteps,
    are_of_same_pipeline,
    as_count,
    as_number,
    idle_low,
    mean_over_steps,
    observation_from_state,
    observation_state,
    percent,
    three_digits,
    wait_per_step,
)
from lightning_echo.schema import entry, inside, rows, state_of

# ---------------------------------------------------------------------- trials
# `Trials`: has a larger factor brought the predicted gain? If not, the factor before it is the better one.
#
# The cost model knows only means. If single reads take far longer than the others, or if a source hangs at times, one worker
# delivers nothing for a while. Batches come in order, so the device waits, although the workers are fast enough on average. A
# larger factor makes slow reads a little rarer, and does nothing against a source that hangs: it brings far less than predicted,
# while training still gets fewer fresh examples. So each raise of the factor is judged:
#
#     before ---- raised ----> tried ---- too little gained ----> back at the factor before, and kept there
#                                                                             |
#         going back lost as much as the model predicts: the raise was right after all, and is made again
#
# A source that has become slower in the meantime does not count as a failure of the factor:
#
# * If the workers have measured it, their costs explain the waiting.
# * If it was slow for one epoch, that epoch is in the worst of the compared stretches, which is left out.
# * If it stays slower, but the measured costs do not show it, the return to the factor before does.
#
# A raise that was taken back is not repeated until the costs have changed.

_STRETCH_STEPS = ENOUGH_STEPS // 2  # steps of a stretch, whose idle fractions are compared; a longer epoch is one stretch
# Stretches and steps that a verdict needs. With fewer, it would depend on a few slow reads.
_STRETCHES, _STEPS = 3, 10 * ENOUGH_STEPS
# A smaller share of the predicted gain is too little: at factor 4, learning takes 1.57 to 1.75 times the steps
# (docs/evidence.md), so about half of the gain of a larger factor is lost again.
_ENOUGH_GAINED = 0.5
_ALL_GAINED = 0.75  # this share of the predicted gain counts as all of it: measurements jitter
_RAISED = 1.25  # a raise is judged only if the factor was multiplied by at least this
_RAISED_NEAR_TARGET = 1.5  # the same while idle is near the target, where small raises overcome jitter
_NEAR_TARGET = 2.0  # near the target is up to this many times the target
_EXPLAINED = 1.5  # waiting up to this many times the prediction of the present costs counts as explained: no clock sees all of it
_CHANGED = 1.5  # costs that differ by less than this factor count as equal


class TakenBack(NamedTuple):
    """A raise of the factor that brought too little."""

    before: Observation
    tried: Observation
    is_refuted: bool = False  # going back has shown that the raise was right


class Trials:
    """The raises of the factor, and the gain of each. ``target`` is the idle fraction to stay under."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._before_raises: list[Observation] = []  # observations before the raises that are still judged
        self._taken_back: TakenBack | None = None
        self._stretches: list[Observation] = []  # with the factor in force; the last one may still grow

    @property
    def taken_back(self) -> TakenBack | None:
        """The raise that was taken back; None also if it was right after all."""
        return None if self._taken_back is None or self._taken_back.is_refuted else self._taken_back

    def add(self, epoch: Observation) -> None:
        """Adds a measured epoch, not joined with others, before the next decision."""
        stretches = self._stretches
        if stretches and stretches[-1].factor != epoch.factor:
            stretches.clear()
        if stretches and stretches[-1].steps < _STRETCH_STEPS:
            stretches[-1] = mean_over_steps(stretches[-1], epoch)
        else:
            stretches.append(epoch)
        while len(stretches) > _STRETCHES and sum(stretch.steps for stretch in stretches[1:]) >= _STEPS:
            del stretches[0]
        self._before_raises = [before for before in self._before_raises if before.factor < epoch.factor]
        if len(stretches) < _STRETCHES or sum(stretch.steps for stretch in stretches) < _STEPS:
            return
        now = _without_worst(stretches)
        if (back := self._taken_back) is not None:
            costs = [_relative_cost(each) for each in (back.before, back.tried)]
            lost = share_gained(now, back.tried) if now.factor == back.before.factor else None
            if not min(costs) / _CHANGED < _relative_cost(now) < max(costs) * _CHANGED:
                self._taken_back = None  # the costs have changed
            elif lost is not None and lost >= _ALL_GAINED:
                self._taken_back = back._replace(is_refuted=True)
        if (before := self.before_failed_raise()) is not None:
            self._taken_back = TakenBack(before, now)
        self._before_raises.clear()

    def note_raise(self) -> None:
        """Notes that the factor is raised now, unless this repeats a raise that was found to be right."""
        if not self._stretches or (self._taken_back is not None and self._stretches[-1].factor < self._taken_back.tried.factor):
            return
        before = _without_worst(self._stretches)
        if (before.idle_fraction or 0.0) > self._target:  # else only the worst stretch waited
            self._before_raises.append(before)

    def before_failed_raise(self) -> Observation | None:
        """Returns the observation before the first raise that has brought too little so far; None if there is none."""
        now = _without_worst(self._stretches) if self._stretches else None
        if now is None or now.steps < _STRETCH_STEPS:
            return None
        is_near_target = (now.idle_fraction or 0.0) <= _NEAR_TARGET * self._target
        largest = now.factor / (_RAISED_NEAR_TARGET if is_near_target else _RAISED)
        for before in self._before_raises:
            if before.factor > largest or before.steps < FEWEST_STEPS:
                continue
            gained, explained = share_gained(before, now), _predicted_wait(before, now.costs, now.factor)
            if gained is None or explained is None:
                continue
            if gained < _ENOUGH_GAINED and explained * _EXPLAINED < wait_per_step(now):
                return before
        return None

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        back = self._taken_back
        return {
            "raised": [observation_state(before) for before in self._before_raises],
            "held": None if back is None else [observation_state(back.before), observation_state(back.tried), back.is_refuted],
            "stretches": [observation_state(stretch) for stretch in self._stretches],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before_raises = rows(state, "raised", observation_from_state)
        held = entry(state, "held", tuple[Any, Any, bool] | None)
        with inside("held"):
            self._taken_back = held and TakenBack(observation_from_state(held[0]), observation_from_state(held[1]), held[2])
        self._stretches = rows(state, "stretches", observation_from_state)


def share_gained(before: Observation, now: Observation) -> float | None:
    """Returns the share of the predicted gain (waiting saved per step) that a larger factor has brought.

    The result is None if the model predicts no gain, or knows too little.

    Example:
        >>> costs = PipelineCosts("after_augmentation", 0.06, 0.0, 0.0, device_seconds=0.01, workers=2)
        >>> before = Observation(epoch=0, factor=1.0, steps=100, idle_fraction=2 / 3, step_seconds=0.03, costs=costs)
        >>> now = Observation(epoch=1, factor=2.0, steps=100, idle_fraction=0.6, step_seconds=0.025, costs=costs)
        >>> round(share_gained(before, now), 2)  # 15 ms of waiting in place of 20, where 5 were expected
        0.33
    """
    at_smaller = _predicted_wait(before, before.costs, before.factor)
    at_larger = _predicted_wait(before, before.costs, now.factor)
    if at_smaller is None or at_larger is None or at_smaller <= at_larger:
        return None
    return (at_smaller - wait_per_step(now)) / (at_smaller - at_larger)


def _predicted_wait(before: Observation, costs: PipelineCosts | None, factor: float) -> float | None:
    """Returns the predicted waiting per step, in seconds, for a host that is still as much slower than its costs."""
    if costs is None or before.costs is None or before.step_seconds is None or not are_of_same_pipeline(before.costs, costs):
        return None
    host = before.costs.host_seconds(before.factor)
    if not costs.workers or not host:
        return None
    return costs.slower(before.step_seconds / host).step_seconds(factor) - costs.device_seconds


def _relative_cost(observation: Observation) -> float:
    """Returns the host time per batch at factor 1, as a multiple of the device time; 0 if unknown."""
    costs = observation.costs
    return costs.host_seconds(1.0) / costs.device_seconds if costs is not None and costs.device_seconds else 0.0


def _without_worst(stretches: list[Observation]) -> Observation:
    """Returns the mean over all stretches but the one with the most idle time. A single stretch is returned as it is."""
    worst = max(range(len(stretches)), key=lambda i: stretches[i].idle_fraction or 0.0) if len(stretches) > 1 else -1
    return reduce(mean_over_steps, [stretch for i, stretch in enumerate(stretches) if i != worst])


# ---------------------------------------------------------------------- evidence
# `Evidence`: does the device wait for certain, or by chance?
#
# The controller looks often, and a few steps may wait by chance. If each look could raise the factor, some look would. So a raise
# needs the lower end of the idle fraction's interval. Stretches of a few steps have none, or a wide one. Then the interval over
# several stretches tells more, with each stretch in the place of a step.

_STRETCHES_KEPT = 40


class Evidence:
    """The stretches with one factor, and the idle fraction that they prove."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._stretches: list[tuple[float, float]] = []  # seconds waited, and seconds in all

    def idle_low(self, stretch: Observation) -> float | None:
        """Adds a stretch. Returns the higher of two lower ends, of this stretch and over several; None if there is neither."""
        if stretch.idle_fraction is None or stretch.step_seconds is None or not stretch.steps:
            return None
        if stretch.factor != self._factor:
            self._factor, self._stretches = stretch.factor, []
        self._stretches.append((wait_per_step(stretch) * stretch.steps, stretch.step_seconds * stretch.steps))
        del self._stretches[:-_STRETCHES_KEPT]
        waited, seconds = zip(*self._stretches, strict=True)
        lows = stretch.idle_low, idle_low(waited, seconds)
        return max((low for low in lows if low is not None), default=None)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self._factor, "stretches": [list(each) for each in self._stretches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._factor = entry(state, "factor", float)
        self._stretches = entry(state, "stretches", list[tuple[float, float]])


# ---------------------------------------------------------------------- target idle
# `TargetIdle` predicts with the cost model, measures, and corrects the prediction. If the device waits although the model
# predicts that it should not, the controller takes the host to be as slow as measured. So the first decision is close, and the
# second one is right.
#
# * It looks soon and again: after 10, 20, 40, 80, ... steps of the run. Each look is at the steps since the look before, which
#   are half of all: the first ones may be slow because devices and caches are cold. A look at few steps only raises the factor.
# * It switches echoing on only if the waiting is more than chance (`Evidence`). Then the source is known to be slow, so that the
#   mean over enough steps is enough for a larger factor, or that over a few steps if the costs predict the waiting.
# * Epochs that are too short to be judged alone are joined (`RecentSteps`).
# * If a larger factor brought far less than predicted, it goes back to the factor before (`Trials`).

TARGET = 0.05  # idle fraction to stay under
LARGE_FACTOR = 8.0  # with larger ones not all tasks of docs/evidence.md learn as much from a step, see `TargetIdle`
# The factor that just feeds the device is multiplied by this, so a little jitter does not bring idle over the target again. With
# 1.1, rounding up could bring the factor more than 10% over the smallest one that is enough.
AIM = 1.07
FIRST_AFTER_STEPS = 10  # with two workers that have just started, eight of them count: the fewest that have an interval
EVERY_N_STEPS = 500
_CHANGE = 1.1  # while idle is under the target, the factor is not lowered by less than this
_LATELY = 16  # steps in which a device that waits can be seen to wait, also if several batches come at once
_NO_WORKERS = "with num_workers=0 loading and training take turns; set num_workers to 1 or more first"
NO_GAIN_HELPS = "if single reads are far slower than the others, a larger prefetch_factor or more workers help"


class TargetIdle(Controller):
    """Chooses the smallest echo factor that brings the idle fraction under a target, or comes as near to it as echoing can.

    The default maximum is 8, because every further use of the same data teaches less. The paper finds an upper bound of the echo
    factor. Above this bound, training needs more fresh examples again, not fewer. The bound differs between tasks, and grows with
    the batch size (Choi et al. 2019, arXiv 1907.05550, experiments on the upper bound of the echo factor). In this project's own
    small runs with ``reuse="memory"`` (docs/evidence.md), training took this many times the optimizer steps of training without
    echoing:

    * factor 8: 1.10 times in a language model, 0.86 times with rendered characters;
    * factor 16: 2.6 times in the language model, 1.12 times with the characters.

    A larger factor does not help if single reads are far slower than the others. If a larger factor brought less than half of the
    predicted gain, the controller goes back to the factor before. It keeps that factor until the measured costs have changed.

    Args:
        target: Idle fraction to stay under, in (0, 1).
        min_factor: Smallest factor to choose, >= 1.
        max_factor: Largest factor to choose, >= ``min_factor``.
        first_after_steps: The controller looks after this number of steps of the run, and again each time their number has
            doubled, see `Controller.first_after_steps`. As long as fewer than 100 steps were measured with the factor in force,
            it then only raises the factor, and only if the lower end of the 99% interval of the idle fraction is above the
            target, or if a larger factor is in force and the costs of these steps say that it is too small. Fewer than eight
            measured steps have no interval. None: it does not look early.
        every_n_steps: The controller decides each time after this number of batches of an epoch, as at the end of an epoch.
            From this number of steps on, the number of steps between looks does not double any more. None: it always does.

    Raises:
        TypeError: An option is not a number, or a number of steps is not an integer.
        ValueError: An option has an impossible value.

    Example:
        >>> costs = PipelineCosts("after_augmentation", 0.06, 0.0, 0.0, device_seconds=0.01, workers=2)
        >>> seen = Observation(epoch=0, factor=1.0, steps=100, idle_fraction=0.67, step_seconds=0.03, costs=costs)
        >>> decision = TargetIdle().decide(seen)
        >>> decision.factor, decision.reason.value
        (3.05, 'starved')
    """

    why_not_on_demand = "it chooses the factor at which nothing waits, and on demand nothing waits as long as max_factor allows"

    def __init__(
        self,
        target: float = TARGET,
        *,
        min_factor: float = 1.0,
        max_factor: float = LARGE_FACTOR,
        first_after_steps: int | None = FIRST_AFTER_STEPS,
        every_n_steps: int | None = EVERY_N_STEPS,
    ) -> None:
        self.target = as_number("target", target)
        self.min_factor, self.max_factor = as_number("min_factor", min_factor), as_number("max_factor", max_factor)
        if not 0 < self.target < 1:
            raise ValueError(f"target must be an idle fraction between 0 and 1, both excluded, got {target!r}; 0.05 is usual")
        if not 1 <= self.min_factor < math.inf:
            raise ValueError(f"min_factor must be a finite number >= 1, got {min_factor!r}; 1 lets echoing be switched off")
        if not self.min_factor <= self.max_factor < math.inf:
            raise ValueError(
                f"max_factor must be a finite number >= min_factor={min_factor!r}, got {max_factor!r}; {LARGE_FACTOR:g} is the "
                "default"
            )
        self.first_after_steps = as_count("first_after_steps", first_after_steps)
        self.every_n_steps = as_count("every_n_steps", every_n_steps)
        # How many times slower than its measured costs the host was when the device last waited, and the smallest such number
        # that explains every wait so far.
        self._slowness = self._least_slowness = 1.0
        self._recent, self._lately = RecentSteps(), RecentSteps(_LATELY)
        self._evidence, self._trials = Evidence(), Trials(self.target)

    def __repr__(self) -> str:
        options = f"min_factor={self.min_factor:g}, max_factor={self.max_factor:g}"
        if self.first_after_steps != FIRST_AFTER_STEPS:
            options += f", first_after_steps={self.first_after_steps}"
        if self.every_n_steps != EVERY_N_STEPS:
            options += f", every_n_steps={self.every_n_steps}"
        return f"TargetIdle({self.target:g}, {options})"

    def largest_factor(self) -> float | None:
        return self.max_factor

    def decide(self, observation: Observation) -> Decision:
        if observation.idle_fraction is not None and observation.steps:
            self._trials.add(observation)
        low = self._evidence.idle_low(observation)
        lately, joined = self._lately.joined(observation), self._recent.joined(observation)
        is_certain, are_enough = low is not None and low > self.target, joined.steps >= ENOUGH_STEPS
        if observation.moment is not Moment.early or are_enough:
            is_proved = is_certain or (are_enough and (low is None or observation.factor > 1))
            return self._decide(joined, lately, is_proved=is_proved)
        if is_certain or self._is_foreseen(observation):
            # By this look alone: the steps before it may have been slow because devices and caches were cold.
            decision = self._decide(observation, observation)
            return replace(decision, factor=max(decision.factor, observation.factor))
        seen = "not known" if low is None else f"at least {low * 100:.3g}%"
        message = f"idle of {observation.steps} steps is {seen}, target {self.target * 100:.3g}%: more will tell"
        return Decision(observation.factor, Reason.not_measured, message)

    def _is_foreseen(self, observation: Observation) -> bool:
        """Whether the device waits and the costs predict that: the first steps, by which the factor was chosen, were slower.

        A few steps with this factor prove little alone, but both together are not chance. That the source is slow is known.
        """
        if observation.factor == 1 or observation.costs is None or (observation.idle_fraction or 0.0) <= self.target:
            return False
        aim = self._aim(observation.costs)
        if not math.isfinite(aim):
            aim = observation.costs.slower(self._slowness).gaining_factor(self.max_factor)
        return min(aim, self.max_factor) >= observation.factor * _CHANGE

    def _decide(self, observation: Observation, lately: Observation, *, is_proved: bool = True) -> Decision:
        """Decides on all steps to judge together; ``lately`` are the last few of them.

        ``is_proved``: whether it is certain that the device waits, if these steps say so.
        """
        idle, factor, costs = observation.idle_fraction, observation.factor, observation.costs
        if idle is None or observation.step_seconds is None:
            return self._within_bounds(
                factor, Reason.not_measured, f"only {observation.steps} steps were measured with this factor"
            )
        measured = f"idle {idle * 100:.3g}%, target {self.target * 100:.3g}%"
        if (taken_back := self._trials.taken_back) is not None:
            before, tried = taken_back.before, taken_back.tried
            if idle <= self.target and factor == before.factor:
                return self._within_bounds(factor, Reason.fits, measured)
            share = percent(max(0.0, share_gained(before, tried) or 0.0))
            why = f"factor {tried.factor:g} instead of {before.factor:g} brought {share} of the predicted gain; {NO_GAIN_HELPS}"
            return self._within_bounds(before.factor, Reason.no_gain, f"{measured}: {why}")
        if idle <= self.target:
            return self._lower(factor, measured, costs)
        if costs is None:
            return self._within_bounds(factor, Reason.not_measured, f"{measured}, but the cost of the pipeline is not known")
        if costs.keeps_up:
            return self._within_bounds(
                factor, Reason.fits, f"{measured}, but the workers had nothing to do for a part of the time"
            )
        if not is_proved:
            return self._within_bounds(factor, Reason.not_measured, f"{measured}, which may be chance: more steps will tell")
        # Only if the device has also waited lately: if the source has become cheaper, for example because a cache now holds the
        # examples, the means over more steps show both a cheap host and waiting for it.
        if (lately.idle_fraction or 0.0) > self.target:
            self._note_waiting(costs, factor, idle, observation.step_seconds)
        wanted = max(self._aim(costs), round_up(factor * AIM))
        if wanted > self.max_factor and not costs.workers:
            return self._within_bounds(factor, Reason.no_workers, f"{measured}: {_NO_WORKERS}")
        if math.isfinite(wanted):
            decision = self._within_bounds(wanted, Reason.starved, f"{measured}: a factor of {wanted:g} feeds the device")
        else:
            decision = self._out_of_reach(costs.slower(self._slowness), factor, measured)
        if decision.factor > factor:
            if self._trials.before_failed_raise() is not None:
                doubt = "the larger factor has brought far less than predicted so far; it is tried for some more steps"
                return self._within_bounds(factor, Reason.no_gain, f"{measured}: {doubt}")
            self._trials.note_raise()
        return decision

    def _out_of_reach(self, costs: PipelineCosts, factor: float, measured: str) -> Decision:
        """Decides where no factor feeds the device: for the one past which hardly anything more is gained."""
        wanted = max(self.min_factor, round_up(costs.gaining_factor(self.max_factor)))
        if factor / _CHANGE < wanted < factor * _CHANGE:
            wanted = factor
        gain = "echoing gains nothing" if wanted == 1 else f"past factor {wanted:g}, echoing gains hardly anything more"
        work, step = 1e3 * costs.redone_seconds / costs.workers, 1e3 * costs.device_seconds
        why = f"the work after the insertion point takes {work:.3g} ms per batch by itself, a step {step:.3g} ms"
        message = f"{measured}: {why}; {gain}{later_point(costs, wanted, self.max_factor)}"
        return self._within_bounds(wanted, Reason.downstream_too_slow, message)

    def _lower(self, factor: float, measured: str, costs: PipelineCosts | None) -> Decision:
        """Decides while idle is under the target: for a smaller factor, if a much smaller one is enough."""
        if costs is None:
            return self._within_bounds(factor, Reason.fits, f"{measured}; how small a factor is enough is not known")
        if self._slowness >= _CHANGE**2 * self._least_slowness:  # the host may have been slow for a while only: halfway back
            self._slowness = math.sqrt(self._slowness * self._least_slowness)
        wanted = self._aim(costs)
        if wanted * _CHANGE > factor:
            return self._within_bounds(factor, Reason.fits, measured)
        enough = f"{measured}: a factor of {wanted:g} is enough"
        if self.min_factor <= factor < self.min_factor * _CHANGE:
            return Decision(factor, Reason.at_minimum, f"{enough}; min_factor is {self.min_factor:g}")
        return self._within_bounds(wanted, Reason.cheaper_source, enough)

    def _note_waiting(self, costs: PipelineCosts, factor: float, idle: float, step_seconds: float) -> None:
        """Notes how many times slower than its measured costs the host is, while the device waits."""
        if costs.workers and (host := costs.host_seconds(factor)):
            # While the device waits, the host takes as long as a step lasts; at the target it would take less.
            enough = costs.device_seconds / (1 - self.target)
            # If the host has much time to spare by its measured costs, a little waiting does not show its speed: the hand-over of
            # a batch may have been late, which takes as long at any factor. If that counted, the factor would never be lowered.
            if idle <= _NEAR_TARGET * self.target and host * self._slowness * _CHANGE**2 < enough:
                return
            self._slowness = step_seconds / host
            self._least_slowness = max(self._least_slowness, min(enough / host, self._slowness))

    def _aim(self, costs: PipelineCosts) -> float:
        """Returns a factor slightly above the one that just feeds the device; 1 if fresh examples alone feed it."""
        balance = costs.slower(self._slowness).feeding_factor(self.target)
        return round_up(balance * AIM) if balance > 1 else 1.0

    def _within_bounds(self, factor: float, reason: Reason, message: str) -> Decision:
        if factor < self.min_factor:
            return Decision(self.min_factor, Reason.at_minimum, f"{message}; min_factor is {self.min_factor:g}")
        if factor > self.max_factor:
            return Decision(self.max_factor, Reason.at_maximum, f"{message}; max_factor is {self.max_factor:g}")
        return Decision(factor, reason, message)

    def state_dict(self) -> dict[str, Any]:
        return {
            "slowness": self._slowness,
            "least_slowness": self._least_slowness,
            "recent": self._recent.state_dict(),
            "lately": self._lately.state_dict(),
            "evidence": self._evidence.state_dict(),
            "trials": self._trials.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with state_of("TargetIdle"):
            self._slowness, self._least_slowness = (entry(state_dict, name, float) for name in ("slowness", "least_slowness"))
            parts: dict[str, Any] = {
                "recent": self._recent,
                "lately": self._lately,
                "evidence": self._evidence,
                "trials": self._trials,
            }
            for name, part in parts.items():
                with inside(name):
                    part.load_state_dict(entry(state_dict, name, dict))


def recommend(observation: Observation, target: float = TARGET) -> Decision:
    joined = RecentSteps().joined(observation)
    return TargetIdle(target)._decide(joined, joined)


def later_point(costs: PipelineCosts, factor: float, most: float) -> str:
    """Returns words on a later insertion point where training is faster with a factor up to ``most``; empty if there is none.

    It is the first one that gains about as much as any other.

    >>> costs = PipelineCosts("before_augmentation", 0.06, 0.014, 0.0, device_seconds=0.01, workers=1)
    >>> print(later_point(costs, 8.0, 8.0).strip("; "))  # 74 / 7.05 ms in place of 60 / 8 + 14
    about 2.05 times as fast: insertion_point='after_augmentation' with factor 7.05, whose echoes repeat their augmentation, too
    """
    choices = [(later, round_up(later.gaining_factor(most))) for later in costs.at_later_points()]
    now, seconds = costs.step_seconds(factor), [later.step_seconds(wanted) for later, wanted in choices]
    if not seconds or now <= GAINS_LITTLE * min(seconds):
        return ""
    chosen = next(number for number, each in enumerate(seconds) if now - each >= _ALL_GAINED * (now - min(seconds)))
    (later, wanted), redone, unless = choices[chosen], InsertionPoint(costs.insertion_point).properties.redone, ""
    for between in costs.later_points():
        if "augment" in between.properties.redone:  # it reuses a part of ``rest_seconds`` that is not measured by itself
            more = " and ".join(STAGES[stage] for stage in between.properties.reused if stage in redone)
            unless += f"{between.option} if most of that is {more}, else "
    gain, repeats = three_digits(now / seconds[chosen]), "augment" in redone
    point = f"{unless}{InsertionPoint(later.insertion_point).option} with factor {wanted:.3g}"
    return f"; about {gain} times as fast: {point}{', whose echoes repeat their augmentation, too' if repeats else ''}"


def round_up(factor: float) -> float:
    """Rounds up to two decimals, so the factor in a message is the factor in use."""
    return math.ceil(round(factor * 100, 6)) / 100 if math.isfinite(factor) else factor
