"""Runs that never ran, with times and counts to calculate with by hand."""

from __future__ import annotations

import math
from typing import Any

from wallclock.stages import Stage
from wallclock.timed import TimedRow

POINT = "after_batching"


def stage(ratio: float = 4.0, **changed: Any) -> Stage:
    """A batch of 10 examples takes 40 ms upstream, a step 10 ms."""
    upstream = 0.04 if ratio else 0.005
    values = {"task": "t", "ratio": ratio, "workers": 2, "batch_size": 10, "delay_seconds": 0.008, "step_seconds": 0.01}
    values |= {"upstream_seconds": upstream, "points": POINT, "redone_seconds": "0.001", "epoch_steps": 16}
    return Stage(**{**values, **changed})  # type: ignore[arg-type]


def row(arm: str, seconds: float, *, steps: float = 100, fresh: float = 1000, ratio: float = 4.0, seed: int = 1) -> TimedRow:
    """A run; its arm is ``no echo``, ``e=...`` or ``TargetIdle``, the last two at `POINT`."""
    is_echoed = not arm.startswith("no echo")
    factor = float(arm[2:]) if arm.startswith("e=") else 1.0
    name, point = (f"{POINT}, {arm}", POINT) if is_echoed else (arm, "none")
    found = {"seconds_to_target": seconds, "steps_to_target": steps, "fresh_to_target": fresh}
    rest = {"first_batch_seconds": 0.1, "evaluation_seconds": 1.0, "evaluations": 9, "seconds": 9.0, "fresh": 1000, "steps": 800}
    where = {"task": "t", "ratio": ratio, "arm": name, "factor": factor, "point": point, "rate": 0.01, "rate_from": "tuned"}
    last = {"last": 97.0, "idle": math.nan, "factors": "0:1 1:4.3", "load": 0.0}
    return TimedRow(**where, seed=seed, **found, **rest, **last)  # type: ignore[arg-type]
