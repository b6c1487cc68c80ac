"""`TargetIdle`: the smallest echo factor that feeds the device.

It predicts with the cost model, measures, and corrects: where the device waits although the model says that it should not, the
host is taken for as slow as it was measured. So the first decision is close, and the second one right.
"""

from __future__ import annotations

import math
from typing import Any

from lightning_echo.measuring.control import Controller, Decision, Observation, Reason
from lightning_echo.measuring.cost import PipelineCosts

__all__ = ["TargetIdle", "recommend"]

_MARGIN = 1.1  # aimed at above the balance point, where jitter still costs; a change below it is none


class TargetIdle(Controller):
    """The smallest echo factor that brings the idle fraction under a target.

    The default maximum is 4. Every further use of the same data teaches less, and the paper finds an upper bound, which differs
    between tasks and grows with the batch size: beyond it training needs more fresh examples again, not fewer (Choi et al. 2019,
    arXiv 1907.05550, experiments on the upper bound of the echo factor). Up to 4 is the range in which it saw gains throughout.

    Args:
        target: Idle fraction to stay under, in (0, 1).
        min_factor: Smallest factor to choose, >= 1.
        max_factor: Largest factor to choose.

    Raises:
        ValueError: An option has an impossible value.

    Example:
        >>> costs = PipelineCosts("after_augmentation", 0.06, 0.0, 0.0, device_seconds=0.01, workers=2)
        >>> seen = Observation(epoch=0, factor=1.0, steps=100, idle_fraction=0.67, step_seconds=0.03, costs=costs)
        >>> decision = TargetIdle().decide(seen)
        >>> decision.factor, decision.reason.value
        (3.14, 'starved')
    """

    def __init__(self, target: float = 0.05, *, min_factor: float = 1.0, max_factor: float = 4.0) -> None:
        if not 0 < target < 1:
            raise ValueError(f"target must be an idle fraction between 0 and 1, both excluded, got {target!r}; 0.05 is usual")
        if not 1 <= min_factor <= max_factor < math.inf:
            raise ValueError(
                "min_factor and max_factor must be numbers with 1 <= min_factor <= max_factor, got "
                f"min_factor={min_factor!r} and max_factor={max_factor!r}"
            )
        self.target, self.min_factor, self.max_factor = float(target), float(min_factor), float(max_factor)
        # The largest factor at which the device was seen waiting too long, relative to what the costs said was enough.
        self._too_small = 0.0

    def __repr__(self) -> str:
        return f"TargetIdle({self.target:g}, min_factor={self.min_factor:g}, max_factor={self.max_factor:g})"

    def largest_factor(self) -> float | None:
        return self.max_factor

    def decide(self, observation: Observation) -> Decision:
        idle, factor, costs = observation.idle_fraction, observation.factor, observation.costs
        if idle is None or observation.step_seconds is None:
            return self._keep(factor, Reason.not_measured, f"only {observation.steps} steps were measured with this factor")
        if idle <= self.target:
            return self._lower(factor, idle, costs)
        if costs is None:
            return self._keep(factor, Reason.not_measured, f"idle {idle:.0%}, but the pipeline's costs are not known")
        return self._raise(factor, idle, costs, observation.step_seconds)

    def _lower(self, factor: float, idle: float, costs: PipelineCosts | None) -> Decision:
        """Idle is under the target: less, if much less is enough."""
        if costs is None:
            return self._keep(factor, Reason.fits, f"idle {idle:.0%}; how much faster the source could be is not known")
        balance = costs.feeding_factor(self.target)
        wanted = _round_up(balance * _MARGIN)
        if (too_small := self._too_small * balance) < factor:  # halfway to what was seen not to be enough, no nearer
            wanted = max(wanted, _round_up(math.sqrt(too_small * factor)))
        wanted = max(wanted, self.min_factor)
        if wanted * _MARGIN > factor:
            return self._keep(factor, Reason.fits, f"idle {idle:.0%}, target {self.target:.0%}")
        reason = Reason.at_minimum if wanted == self.min_factor > balance * _MARGIN else Reason.cheaper_source
        return Decision(wanted, reason, f"idle {idle:.0%}, target {self.target:.0%}: a factor of {wanted:g} is enough")

    def _raise(self, factor: float, idle: float, costs: PipelineCosts, step_seconds: float) -> Decision:
        """Idle is over the target: more, if that helps."""
        balance = costs.feeding_factor(self.target)
        if math.isfinite(balance):
            self._too_small = max(self._too_small, factor / balance)
        host = costs.host_seconds(factor)
        if costs.workers and 0 < host < step_seconds:  # while the device waits, the host takes as long as a step lasts
            costs = costs.slower(step_seconds / host)
        balance = costs.feeding_factor(self.target)
        what = f"idle {idle:.0%}, target {self.target:.0%}"
        if not math.isfinite(balance):
            return self._keep(factor, *_why_not(costs, self.target, what))
        wanted = _round_up(balance * _MARGIN)
        if wanted > self.max_factor:
            largest = max(factor, self.max_factor)
            return Decision(largest, Reason.at_maximum, f"{what}: that takes {wanted:g}, max_factor is {self.max_factor:g}")
        wanted = max(wanted, self.min_factor, factor)
        return Decision(wanted, Reason.starved, f"{what}: a factor of {wanted:g} feeds the device")

    def _keep(self, factor: float, reason: Reason, message: str) -> Decision:
        if factor < self.min_factor:
            return Decision(self.min_factor, Reason.at_minimum, f"{message}; min_factor is {self.min_factor:g}")
        return Decision(factor, reason, message)

    def state_dict(self) -> dict[str, Any]:
        return {"too_small": self._too_small}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._too_small = state_dict["too_small"]


def recommend(observation: Observation, target: float = 0.05) -> Decision:
    """What `TargetIdle` would choose, were it asked for the first time."""
    return TargetIdle(target).decide(observation)


def _why_not(costs: PipelineCosts, target: float, what: str) -> tuple[Reason, str]:
    """No factor is large enough: why, and what would help."""
    if not costs.workers:
        return (
            Reason.no_workers,
            f"{what}: with num_workers=0 loading and training take turns; set num_workers to 1 or more first",
        )
    redone, room = costs.redone_seconds / costs.workers, costs.device_seconds
    problem = f"{what}: what comes after the echo takes {redone * 1e3:.3g} ms per batch by itself, a step {room * 1e3:.3g} ms"
    for later in costs.later_points():
        if math.isfinite(factor := later.feeding_factor(target)):
            return (
                Reason.downstream_too_slow,
                f"{problem}; echo at insertion_point='{later.insertion_point}' with factor {factor:.3g}",
            )
    return Reason.downstream_too_slow, problem


def _round_up(factor: float) -> float:
    """Two decimals: what is said is what is used."""
    return max(1.0, math.ceil(round(factor * 100, 6)) / 100)
