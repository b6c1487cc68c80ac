"""A task of a few numbers, and rows of runs that never ran."""

from __future__ import annotations

import dataclasses
import math

from learning.arms import Arm
from learning.digits import DIGITS
from learning.store import Row

SMALL = dataclasses.replace(
    DIGITS,
    name="small",
    target=90.0,
    spacing_examples=100,
    window_evaluations=2,
    budget_examples=1000,
    rates=(0.1, 0.2, 0.4),
)


def row(arm: Arm, seed: int, fresh: float, *, rate: float = 0.2, quality: float = 90.0, last: float = 90.0) -> Row:
    """A run that reached the target after so many fresh examples."""
    steps = fresh * arm.uses_per_fresh / (32 * arm.batch_multiple)
    return Row("small", arm.name, rate, seed, fresh, steps, quality, 1000, 100, last, 1.0, "")


def tuned(arm: Arm, seeds: tuple[int, ...], fresh: float) -> list[Row]:
    """Tuning runs after which rate 0.2 is chosen for an arm: the others miss."""
    tried = {0.1: math.inf, 0.2: fresh, 0.4: math.inf}
    return [row(arm, seed, result, rate=rate) for rate, result in tried.items() for seed in seeds]
