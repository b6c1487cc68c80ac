"""What these runs say of the package's defaults: how many items are live, and up to which factor `TargetIdle` goes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from learning.arms import FACTORS, LARGE_BUFFER_BATCHES, Arm
from learning.findings import Runs
from learning.rules import Interval

__all__ = ["default_comparisons"]


def default_comparisons(runs: Runs) -> Iterator[tuple[str, str, Interval]]:
    """Default in question, what was divided by what, and the paired ratio of fresh examples; where the runs are there."""
    point = runs.progress.best_point()
    if point is None or not runs.task.full:
        return
    large = [Arm(factor, point, buffer="large") for factor in FACTORS]
    buffer = f"{LARGE_BUFFER_BATCHES} live batches"
    pairs = [(buffer, arm, Arm(arm.factor, point)) for arm in large]
    pairs += [("max_factor", high, low) for low, high in pairwise(large)]
    for question, arm, partner in pairs:
        if runs.is_there(arm, partner):
            yield question, f"{arm.name} / {partner.name}", runs.ratio(arm, partner)
