"""Makes the plan that a shape asks for."""

from __future__ import annotations

from typing import Any

from lightning_echo.planning.each_plan import EachPlan
from lightning_echo.planning.memory_plan import MemoryPlan
from lightning_echo.planning.plan import Plan
from lightning_echo.planning.shape import PlanShape, Reuse

__all__ = ["make_plan", "plan_from_state"]

_PLANS: dict[Reuse, type[Plan]] = {Reuse.each: EachPlan, Reuse.memory: MemoryPlan}


def make_plan(shape: PlanShape, factor: float) -> Plan:
    """Returns a plan at its beginning.

    Args:
        shape: Sizes, seed and the rule of reuse.
        factor: Echo factor from the first batch on, a real number >= 1.
    """
    return _PLANS[shape.reuse](shape, factor)


def plan_from_state(shape: PlanShape, state: dict[str, Any]) -> Plan:
    """Returns a plan that continues where its `Plan.state` was taken."""
    return _PLANS[shape.reuse].from_state(shape, state)
