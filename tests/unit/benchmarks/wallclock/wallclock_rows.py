"""Runs that never ran, with times and counts to calculate with by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from learning.reuse.clock import pack_counts
from wallclock.plans import (
    BURSTS,
    CONSTANTS,
    DEMAND,
    DEMAND_16,
    EQUAL,
    FIXED,
    HEAVY_TAIL,
    NO_ECHO,
    SETTLED,
    STEP,
    STEP_STEPS,
    TARGET_IDLE,
    TORCH,
)
from wallclock.stages import Stage
from wallclock.timed import TimedRow

BATCH = 8
WANTED = {STEP: STEP_STEPS, SETTLED: 100, EQUAL: 100}


def stage(ratio: int = 8, task: str = "glyphs", source: str = "steady") -> Stage:
    """A batch takes 80 ms upstream, a step alone 10 ms."""
    return Stage(task, ratio, 2, BATCH, 0.02, 0.01, 0.01 * ratio, source)


def row(arm: str, seconds: float, steps: int = 100, *, fresh: int = 1, seed: int = 1, **changed: Any) -> TimedRow:
    """A run of an arm behind `stage`, with so many fresh examples in each batch."""
    values: dict[str, Any] = {
        **{"task": "glyphs", "ratio": 8, "arm": arm, "factor": 1.0, "rate": 0.01, "seed": seed, "is_reached": True},
        **{"wanted_steps": WANTED.get(arm, 0), "seconds": seconds, "steps": steps, "fresh": pack_counts([fresh] * steps)},
        **{"first_batch_seconds": 0.1, "idle_seconds": 0.02, "evaluation_seconds": 1.0, "last_factor": 6.0},
        **{"factors": "0:1 1:6", "buffer_size": 512, "load": 0.0},
    }
    return TimedRow(**{**values, **changed})


def seed_rows(seed: int = 1, **seconds: float) -> list[TimedRow]:
    """The five runs of a seed. A step takes 11 ms at 4 R. `FIXED` needs 110 of them: learning allows 1.21 s."""
    times = {"base": 8.0, "step": 0.1 + 0.011 * STEP_STEPS, "fixed": 1.25, "idle": 1.6, "settled": 1.5, **seconds}
    return [
        row(NO_ECHO, times["base"], fresh=BATCH, seed=seed),
        row(STEP, times["step"], STEP_STEPS, seed=seed, is_reached=False),
        row(FIXED, times["fixed"], 110, seed=seed),
        row(TARGET_IDLE, times["idle"], seed=seed),
        row(SETTLED, times["settled"], seed=seed, is_reached=False),
    ]


def demand_rows(seed: int = 1, *, late_idle: float = 0.01, **seconds: float) -> list[TimedRow]:
    """Those of `seed_rows`, and two more: on demand 100 steps take 1.2 s, and 1.2 s with factor R."""
    times = {"demand": 1.2, "equal": 1.2, **seconds}
    return [
        *(replace(each, late_idle=0.014) for each in seed_rows(seed, **seconds)),
        row(DEMAND, times["demand"], seed=seed, factor=8.0, late_idle=late_idle),
        row(EQUAL, times["equal"], seed=seed, is_reached=False),
    ]


def unsteady_rows(source: str, seed: int = 1, *, best: float = 2.0, torch: float = 4.0, demand: float = 1.9) -> list[TimedRow]:
    """Behind a source that is not steady factor 4 is the best constant; the default of ``max_factor`` takes 2.5 s."""
    assert source in (BURSTS, HEAVY_TAIL)
    times = {**dict.fromkeys(CONSTANTS, 3.0), "factor 4": best, TORCH: torch, DEMAND_16: demand, DEMAND: 2.5}
    return [row(arm, seconds, seed=seed, source=source, late_idle=0.1) for arm, seconds in times.items()]
