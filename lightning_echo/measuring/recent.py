"""Short epochs are judged together: `RecentSteps` has the means over about the last hundred steps with one factor.

In an epoch of 16 steps at factor 4, one late batch makes 6 % of idle time. The device's own time varies by as much from one such
epoch to the next. A controller that trusted each of these epochs would change the factor without need. So:

* An epoch of fewer than `ENOUGH_STEPS` steps is joined with the epochs before it. A longer one is judged by itself.
* Steps with different factors are never joined. After waiting, the device's caches are cold, so that even the device's own time
  depends on the factor.
* Fewer than `FEWEST_STEPS` steps tell nothing, no matter how many epochs they took.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from lightning_echo.measuring.control import Observation
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.saved import record

__all__ = [
    "ENOUGH_STEPS",
    "FEWEST_STEPS",
    "RecentSteps",
    "are_of_same_pipeline",
    "mean_over_steps",
    "observation_from_state",
    "observation_state",
    "wait_per_step",
]

FEWEST_STEPS = 4  # fewer say nothing about a factor
ENOUGH_STEPS = 100  # 5 % of idle time are then five steps' worth: more than one late batch


class RecentSteps:
    """The means over the latest steps with one factor.

    Args:
        enough: An epoch of fewer steps is joined with the epochs before it, up to this number of steps in all.

    Example:
        >>> recent = RecentSteps()
        >>> first = recent.joined(Observation(0, 4.0, steps=25, idle_fraction=0.08, step_seconds=0.01))
        >>> both = recent.joined(Observation(1, 4.0, steps=75, idle_fraction=0.0, step_seconds=0.01))
        >>> first.idle_fraction, both.steps, round(both.idle_fraction, 4)
        (0.08, 100, 0.02)
    """

    def __init__(self, enough: int = ENOUGH_STEPS) -> None:
        self._enough = enough
        self._joined: Observation | None = None

    def joined(self, epoch: Observation) -> Observation:
        """Adds an epoch, and returns it joined with the epochs before it that had the same factor.

        An epoch that was not measured is returned as it is, and not added. The result has means over its ``steps``. These are at
        most ``enough``, unless the epoch itself has more. A result with fewer than `FEWEST_STEPS` steps has no means.
        """
        if epoch.idle_fraction is None or epoch.step_seconds is None:
            return epoch
        before, joined = self._joined, epoch
        if before is not None and before.factor == epoch.factor and before.steps and epoch.steps < self._enough:
            joined = mean_over_steps(before, epoch, self._enough)
        self._joined = joined
        return replace(joined, idle_fraction=None, step_seconds=None) if 0 < joined.steps < FEWEST_STEPS else joined

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in plain types; it is empty before the first epoch."""
        return {} if self._joined is None else observation_state(self._joined)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._joined = observation_from_state(state) if state else None  # it may raise a FieldError


_MEASURED = ("epoch", "factor", "steps", "idle_fraction", "step_seconds")


def observation_state(observation: Observation) -> dict[str, Any]:
    """Returns the measured part of an observation, in plain types."""
    costs = observation.costs
    return {**{name: getattr(observation, name) for name in _MEASURED}, "costs": None if costs is None else asdict(costs)}


def observation_from_state(state: dict[str, Any]) -> Observation:
    """Returns the observation that `observation_state` was made of, without its metrics.

    Raises:
        FieldError: A field is missing, wrong or not known.
    """
    return record(Observation, state, required=(*_MEASURED, "costs"))


def are_of_same_pipeline(one: PipelineCosts, other: PipelineCosts) -> bool:
    """Whether two costs have the same insertion point and number of workers."""
    return (one.insertion_point, one.workers) == (other.insertion_point, other.workers)


def mean_over_steps(before: Observation, now: Observation, enough: float = math.inf) -> Observation:
    """Returns the means over the steps of two measured observations. The other fields are those of the later one.

    Args:
        before: The earlier observation.
        now: The later one.
        enough: If both together have more steps than this, the earlier steps count less.
    """
    steps = int(min(before.steps + now.steps, enough))
    share = now.steps / steps
    waited = _mean(wait_per_step(before), wait_per_step(now), share)
    seconds = _mean(before.step_seconds or 0.0, now.step_seconds or 0.0, share)
    costs = now.costs
    if costs is not None and before.costs is not None and are_of_same_pipeline(costs, before.costs):
        costs = _mean_costs(before.costs, costs, share)
    return replace(now, steps=steps, idle_fraction=waited / seconds if seconds else 0.0, step_seconds=seconds, costs=costs)


def wait_per_step(observation: Observation) -> float:
    """Returns the measured waiting per step, in seconds."""
    return (observation.idle_fraction or 0.0) * (observation.step_seconds or 0.0)


def _mean(before: float, now: float, share: float) -> float:
    return (1 - share) * before + share * now


def _mean_costs(before: PipelineCosts, now: PipelineCosts, share: float) -> PipelineCosts:
    return replace(
        now,
        source_seconds=_mean(before.source_seconds, now.source_seconds, share),
        rest_seconds=_mean(before.rest_seconds, now.rest_seconds, share),
        collate_seconds=_mean(before.collate_seconds, now.collate_seconds, share),
        device_seconds=_mean(before.device_seconds, now.device_seconds, share),
    )
