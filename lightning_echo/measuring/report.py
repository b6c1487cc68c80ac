"""What is known of an epoch when it is over: logged, kept in the checkpoint, and told at the end."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["LOGGED", "EpochReport"]

LOGGED = (
    "factor",
    "fresh_examples",
    "echoed_examples",
    "passes",
    "effective_factor",
    "idle_fraction",
    "slowest_rank",
    "data_wait_seconds",
    "step_seconds",
    "upstream_seconds",
    "examples_per_second",
    "recommended_factor",
    "first_batch_seconds",
)


@dataclass(frozen=True)
class EpochReport:
    """One epoch of a job. What could not be measured is None.

    Attributes:
        epoch: Its number, from 0.
        steps: Its steps that were measured.
        factor: Echo factor in force at its end.
        fresh_examples: In the run so far, all ranks.
        echoed_examples: In the run so far, all ranks.
        passes: Passes over the data in the run so far.
        effective_factor: Uses per fresh example in this epoch.
        idle_fraction: Share of the epoch's time in which the job waited for input.
        slowest_rank: The rank that the others waited for most often; None if there is only one.
        data_wait_seconds: Waiting per step.
        step_seconds: Time per step without waiting.
        upstream_seconds: Host time per fresh batch, before the insertion point.
        examples_per_second: Delivered on all ranks, fresh and echoed.
        recommended_factor: What was measured to be right.
        first_batch_seconds: Wait for the epoch's first batch where workers had to start for it, of the rank that waited longest.
        speedup: Estimated steps per second, relative to factor 1.
        next_factor: The factor decided on.
        reason: Why, for programs: a value of `Reason`, or empty without a controller.
        message: Why, for people.

    Example:
        >>> EpochReport(epoch=0, steps=10, factor=2.0, fresh_examples=8, echoed_examples=8, idle_fraction=0.25).logged()
        {'echo/factor': 2.0, 'echo/fresh_examples': 8.0, 'echo/echoed_examples': 8.0, 'echo/idle_fraction': 0.25}
    """

    epoch: int
    steps: int
    factor: float
    fresh_examples: int
    echoed_examples: int
    passes: float | None = None
    effective_factor: float | None = None
    idle_fraction: float | None = None
    slowest_rank: int | None = None
    data_wait_seconds: float | None = None
    step_seconds: float | None = None
    upstream_seconds: float | None = None
    examples_per_second: float | None = None
    recommended_factor: float | None = None
    first_batch_seconds: float | None = None
    speedup: float | None = None
    next_factor: float | None = None
    reason: str = ""
    message: str = ""

    def logged(self) -> dict[str, float]:
        """What goes to loggers, under ``echo/...``; nothing that could not be measured."""
        values = {name: getattr(self, name) for name in LOGGED}
        return {f"echo/{name}": float(value) for name, value in values.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
