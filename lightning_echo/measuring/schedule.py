"""`FactorSchedule`: a fixed echo factor for each epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from lightning_echo.measuring.control import Controller, Decision, Observation, Reason, as_number

__all__ = ["FactorSchedule"]


class FactorSchedule(Controller):
    """Sets the factor of each epoch: an entry counts from its epoch on, until the next entry.

    Args:
        factors: Epoch -> echo factor. Before the first entry the factor is not changed.

    Raises:
        TypeError: ``factors`` is not a mapping, an epoch is not an integer, or a factor is not a number.
        ValueError: There is no entry, an epoch is negative, or a factor is below 1.

    Example:
        >>> schedule = FactorSchedule({0: 1.0, 2: 4.0, 8: 1.0})
        >>> [schedule.decide(Observation(epoch, factor=1.0)).factor for epoch in (0, 1, 6, 7)]
        [1.0, 4.0, 4.0, 1.0]
    """

    def __init__(self, factors: dict[int, float]) -> None:
        self.factors = _check_schedule(factors)

    def __repr__(self) -> str:
        return f"FactorSchedule({self.factors})"

    def initial_factor(self) -> float | None:
        return self.factors.get(0)

    def largest_factor(self) -> float | None:
        return max(self.factors.values())

    def decide(self, observation: Observation) -> Decision:
        following = observation.epoch + 1
        entries = [epoch for epoch in self.factors if epoch <= following]
        if not entries:
            return Decision(observation.factor, Reason.scheduled, f"no entry up to epoch {following}")
        return Decision(self.factors[entries[-1]], Reason.scheduled, f"scheduled from epoch {entries[-1]} on")


def _check_schedule(factors: Any) -> dict[int, float]:
    if not isinstance(factors, Mapping):
        raise TypeError(f"factors must map epochs to echo factors, e.g. {{0: 1.0, 2: 4.0}}, got {factors!r}")
    if not factors:
        raise ValueError("factors must have at least one entry, e.g. {0: 1.0, 2: 4.0}, got {}")
    for epoch, factor in factors.items():
        if isinstance(epoch, bool) or not isinstance(epoch, Integral):
            raise TypeError(f"factors must have epochs (integers) as keys, got {epoch!r}")
        if epoch < 0:
            raise ValueError(f"factors must have epochs from 0 on as keys, got {epoch}; 0 is the first epoch")
        if not 1 <= as_number(f"factors[{epoch}]", factor) < math.inf:
            raise ValueError(f"factors[{epoch}] must be a finite number >= 1, got {factor!r}; 1 switches echoing off")
    return {int(epoch): float(factors[epoch]) for epoch in sorted(factors)}
