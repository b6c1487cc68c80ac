"""`TargetIdle`: chooses the smallest echo factor that feeds the device.

It predicts with the cost model, measures, and corrects the prediction. If the device waits although the model says that it should
not, the controller takes the host to be as slow as it was measured. So the first decision is close, and the second one is right.

* In the first epoch it decides early, so that the epoch is not lost. Little has been measured at that time. So it only raises the
  factor, and only if the waiting is more than chance.
* Epochs that are too short to be judged alone are joined (`RecentSteps`).
* If a larger factor brought far less than predicted, the controller goes back to the factor before (`Trials`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightning_echo.insertion import STAGES, InsertionPoint
from lightning_echo.measuring.control import Controller, Decision, Moment, Observation, Reason, as_count, as_number
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.measuring.recent import RecentSteps
from lightning_echo.measuring.trials import TakenBack, Trials, share_gained
from lightning_echo.measuring.words import percent
from lightning_echo.saved import entry, inside, state_of

__all__ = ["AIM", "LARGE_FACTOR", "NO_GAIN_HELPS", "TARGET", "TargetIdle", "recommend", "round_up"]

TARGET = 0.05  # idle fraction to stay under
LARGE_FACTOR = 8.0  # with larger ones not all tasks of docs/evidence.md learn as much from a step, see `TargetIdle`
# The factor that just feeds the device is multiplied by this, so that a little jitter does not bring idle over the target again.
# With 1.1, rounding up could bring the factor more than 10 % over the smallest one that is enough.
AIM = 1.07
FIRST_AFTER_STEPS = 50  # enough to see a starved device, and little time compared with an epoch in which a new factor pays
_CHANGE = 1.1  # while idle is under the target, the factor is not lowered by less than this
_NEAR_TARGET = 2.0  # up to this many times the target is a little waiting
_LATELY = 16  # steps in which a device that waits can be seen to wait, also if several batches come at once
NO_GAIN_HELPS = "if single reads are far slower than the others, a larger prefetch_factor or more workers help"


class TargetIdle(Controller):
    """Chooses the smallest echo factor that brings the idle fraction under a target.

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
        first_after_steps: In the first epoch, the controller decides after this number of steps, see
            `Controller.first_after_steps`. It then only raises the factor, and only if the lower end of the 95 % interval of the
            idle fraction is above the target. Fewer than ten steps have no interval. None: it does not decide early.
        every_n_steps: The controller also decides each time after this number of batches of an epoch, as at the end of an epoch.
            An epoch that never ends needs this: otherwise the early decision is the only one. None: it does not do so.

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

    def __init__(
        self,
        target: float = TARGET,
        *,
        min_factor: float = 1.0,
        max_factor: float = LARGE_FACTOR,
        first_after_steps: int | None = FIRST_AFTER_STEPS,
        every_n_steps: int | None = None,
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
        self._recent, self._lately, self._trials = RecentSteps(), RecentSteps(_LATELY), Trials(self.target)

    def __repr__(self) -> str:
        options = f"min_factor={self.min_factor:g}, max_factor={self.max_factor:g}"
        if self.first_after_steps != FIRST_AFTER_STEPS:
            options += f", first_after_steps={self.first_after_steps}"
        if self.every_n_steps is not None:
            options += f", every_n_steps={self.every_n_steps}"
        return f"TargetIdle({self.target:g}, {options})"

    def largest_factor(self) -> float | None:
        return self.max_factor

    def decide(self, observation: Observation) -> Decision:
        is_early, low = observation.moment is Moment.early, observation.idle_low
        lately, joined = self._note(observation)
        if is_early and (low is None or low <= self.target):
            seen = "not known" if low is None else f"at least {low * 100:.3g} %"
            message = f"idle of the first {observation.steps} steps is {seen}, target {self.target * 100:.3g} %: more will tell"
            return Decision(observation.factor, Reason.not_measured, message)
        decision = self._decide(lately, joined)
        return replace(decision, factor=max(decision.factor, observation.factor)) if is_early else decision

    def _note(self, observation: Observation) -> tuple[Observation, Observation]:
        """Adds an observation. Returns it joined with the last few steps, and joined with all steps that are judged together."""
        if observation.idle_fraction is not None and observation.steps:
            self._trials.add(observation)
        return self._lately.joined(observation), self._recent.joined(observation)

    def _decide(self, lately: Observation, observation: Observation) -> Decision:
        idle, factor, costs = observation.idle_fraction, observation.factor, observation.costs
        if idle is None or observation.step_seconds is None:
            return self._within_bounds(
                factor, Reason.not_measured, f"only {observation.steps} steps were measured with this factor"
            )
        measured = f"idle {idle * 100:.3g} %, target {self.target * 100:.3g} %"
        if (taken_back := self._trials.taken_back) is not None:
            is_fed = idle <= self.target and factor == taken_back.before.factor
            return self._within_bounds(factor, Reason.fits, measured) if is_fed else self._back(measured, taken_back)
        if idle <= self.target:
            return self._lower(factor, measured, costs)
        if costs is None:
            return self._within_bounds(factor, Reason.not_measured, f"{measured}, but the cost of the pipeline is not known")
        if (lately.idle_fraction or 0.0) > self.target:
            self._note_waiting(costs, factor, idle, observation.step_seconds)
        decision = self._raise(factor, measured, costs)
        if decision.factor > factor:
            if self._trials.is_doubtful:
                doubt = "the larger factor has brought far less than predicted so far; it is tried for some more steps"
                return self._within_bounds(factor, Reason.no_gain, f"{measured}: {doubt}")
            self._trials.note_raise()
        return decision

    def _back(self, measured: str, taken_back: TakenBack) -> Decision:
        """Decides to go back to the factor before, because a larger one has brought too little."""
        before, tried = taken_back.before, taken_back.tried
        share = percent(max(0.0, share_gained(before, tried) or 0.0))
        why = f"factor {tried.factor:g} instead of {before.factor:g} brought {share} of the predicted gain; {NO_GAIN_HELPS}"
        return self._within_bounds(before.factor, Reason.no_gain, f"{measured}: {why}")

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
        """Notes how many times slower than its measured costs the host is, while the device waits.

        Call it only if the device has also waited lately. The source may have become cheaper in the meantime, for example because
        a cache now holds what is read again. Then the means over more steps show both: a cheap host, and waiting for it.

        If the host has much time to spare by its measured costs, a little waiting does not show how slow it is. The hand-over of
        a batch may have been late, and that takes as long at any factor. If this counted as the speed of the host, the factor
        would never be lowered.
        """
        if costs.workers and (host := costs.host_seconds(factor)):
            # While the device waits, the host takes as long as a step lasts; at the target it would take less.
            enough = costs.device_seconds / (1 - self.target)
            if idle <= _NEAR_TARGET * self.target and host * self._slowness * _CHANGE**2 < enough:
                return
            self._slowness = step_seconds / host
            self._least_slowness = max(self._least_slowness, min(enough / host, self._slowness))

    def _raise(self, factor: float, measured: str, costs: PipelineCosts) -> Decision:
        """Decides while idle is over the target: for a larger factor, if that helps."""
        wanted = max(self._aim(costs), round_up(factor * AIM))
        if wanted > self.max_factor and (not costs.workers or not math.isfinite(wanted)):
            return self._within_bounds(factor, *_why_not(costs.slower(self._slowness), self.target, measured))
        return self._within_bounds(wanted, Reason.starved, f"{measured}: a factor of {wanted:g} feeds the device")

    def _aim(self, costs: PipelineCosts) -> float:
        """Returns a factor slightly above the one that just feeds the device. It is 1 if fresh examples alone feed the device."""
        balance = costs.slower(self._slowness).feeding_factor(self.target)
        return round_up(balance * AIM) if balance > 1 else 1.0

    def _within_bounds(self, factor: float, reason: Reason, message: str) -> Decision:
        """Returns a decision for the factor. If the factor is beyond a bound, the decision is for that bound."""
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
            "trials": self._trials.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with state_of("TargetIdle"):
            self._slowness, self._least_slowness = (entry(state_dict, name, float) for name in ("slowness", "least_slowness"))
            for name, part in (("recent", self._recent), ("lately", self._lately), ("trials", self._trials)):
                with inside(name):
                    part.load_state_dict(entry(state_dict, name, dict, {}))  # older checkpoints have none


def recommend(observation: Observation, target: float = TARGET) -> Decision:
    """Returns what a new `TargetIdle` decides first."""
    return TargetIdle(target).decide(observation)


def _why_not(costs: PipelineCosts, target: float, measured: str) -> tuple[Reason, str]:
    """Returns why no factor is large enough, and what would help."""
    if not costs.workers:
        return (
            Reason.no_workers,
            f"{measured}: with num_workers=0 loading and training take turns; set num_workers to 1 or more first",
        )
    redone, step = 1e3 * costs.redone_seconds / costs.workers, 1e3 * costs.device_seconds
    problem = f"{measured}: the work after the insertion point takes {redone:.3g} ms per batch by itself, a step {step:.3g} ms"
    for later in costs.at_later_points():
        if math.isfinite(factor := later.feeding_factor(target)):
            return (
                Reason.downstream_too_slow,
                f"{problem}; echo at {_unless_most_of_it(costs)}{InsertionPoint(later.insertion_point).option} "
                f"with factor {factor:.3g}",
            )
    return Reason.downstream_too_slow, problem


def _unless_most_of_it(costs: PipelineCosts) -> str:
    """Returns words about the later points whose cost is not known, each with the stages that it would also reuse."""
    redone = InsertionPoint(costs.insertion_point).properties.redone
    words = ""
    for point in costs.later_points_of_unknown_cost():
        more = " and ".join(STAGES[stage] for stage in point.properties.reused if stage in redone)
        words += f"{point.option} if most of that is {more}, else at "
    return words


def round_up(factor: float) -> float:
    """Rounds a factor up to two decimals, so that the factor in a message is the factor in use."""
    return math.ceil(round(factor * 100, 6)) / 100 if math.isfinite(factor) else factor
