"""Short epochs are judged together: means over the last hundred steps or so with one factor.

In an epoch of 16 steps at factor 4 one late batch makes 6 % of idle time, and the device's own time varies by as much from one
such epoch to the next: a controller that believed each would change the factor for nothing. So an epoch of fewer than
`ENOUGH_STEPS` counts together with those before it; one that has as many stands for itself. A new factor begins anew: what
waited has cold caches, so even the device's own time is not quite the same with another one. Until there are `FEWEST_STEPS`
nothing is known, however many epochs they take.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from lightning_echo.measuring.control import Observation
from lightning_echo.measuring.cost import PipelineCosts

__all__ = ["ENOUGH_STEPS", "FEWEST_STEPS", "Recent", "are_alike", "mean_of", "observation_of", "state_of"]

FEWEST_STEPS = 4  # fewer say nothing about a factor
ENOUGH_STEPS = 100  # 5 % of idle time are then five steps' worth: more than one late batch


class Recent:
    """What was measured of late.

    Example:
        >>> recent = Recent()
        >>> first = recent.joined(Observation(0, 4.0, steps=25, idle_fraction=0.08, step_seconds=0.01))
        >>> both = recent.joined(Observation(1, 4.0, steps=75, idle_fraction=0.0, step_seconds=0.01))
        >>> first.idle_fraction, both.steps, round(both.idle_fraction, 4)
        (0.08, 100, 0.02)
    """

    def __init__(self) -> None:
        self._seen: Observation | None = None

    def joined(self, seen: Observation) -> Observation:
        """The epoch, together with what was measured before with the same factor; unchanged where it was not measured.

        Its ``steps`` are those that its means are over, at most `ENOUGH_STEPS` unless it has more itself. Where these are fewer
        than `FEWEST_STEPS`, the means are left out.
        """
        if seen.idle_fraction is None or seen.step_seconds is None:
            return seen
        before = self._seen
        if before is not None and before.factor == seen.factor and before.steps and seen.steps < ENOUGH_STEPS:
            seen = mean_of(before, seen, ENOUGH_STEPS)
        self._seen = seen
        return replace(seen, idle_fraction=None, step_seconds=None) if 0 < seen.steps < FEWEST_STEPS else seen

    def state_dict(self) -> dict[str, Any]:
        """Plain types; empty before the first epoch."""
        return {} if self._seen is None else state_of(self._seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self._seen = observation_of(state) if state else None


def state_of(seen: Observation) -> dict[str, Any]:
    """What was measured of the pipeline, as plain types."""
    names = ("epoch", "factor", "steps", "idle_fraction", "step_seconds")
    return {**{name: getattr(seen, name) for name in names}, "costs": None if seen.costs is None else asdict(seen.costs)}


def observation_of(state: dict[str, Any]) -> Observation:
    """What `state_of` has said."""
    costs = state["costs"]
    return Observation(**{**state, "costs": None if costs is None else PipelineCosts(**costs)})


def are_alike(one: PipelineCosts, other: PipelineCosts) -> bool:
    """Whether costs are those of the same pipeline."""
    return (one.insertion_point, one.workers) == (other.insertion_point, other.workers)


def mean_of(before: Observation, now: Observation, enough: float = math.inf) -> Observation:
    """Over the steps of both, which were measured; where these are more than ``enough``, the older ones count less."""
    steps = int(min(before.steps + now.steps, enough))
    share = now.steps / steps
    waited = _mean(_waited(before), _waited(now), share)
    seconds = _mean(before.step_seconds or 0.0, now.step_seconds or 0.0, share)
    costs = now.costs
    if costs is not None and before.costs is not None and are_alike(costs, before.costs):
        costs = _mean_costs(before.costs, costs, share)
    return replace(now, steps=steps, idle_fraction=waited / seconds if seconds else 0.0, step_seconds=seconds, costs=costs)


def _waited(seen: Observation) -> float:
    return (seen.idle_fraction or 0.0) * (seen.step_seconds or 0.0)


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
