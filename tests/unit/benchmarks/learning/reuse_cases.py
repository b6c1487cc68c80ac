"""Rows of runs that never ran, of a study of a few numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from learning.reuse.clock import pack_counts
from learning.reuse.rows import ReuseRow
from learning.reuse.studies import STUDIES, ReuseArm, Study
from learning_cases import SMALL

BATCH = SMALL.batch_size


def study(name: str = "small", **changes) -> Study:
    """A study whose grid is 0.1, 0.2, 0.4, evaluated each 10 steps."""
    fields = {
        "task": dataclasses.replace(SMALL, name=name, title="image classification, a CNN on Python"),
        "spacing_steps": 10,
        "most_steps": 1000,
        **changes,
    }
    return dataclasses.replace(STUDIES["glyphs"], **fields)


def row(arm: ReuseArm, seed: int, steps: float, *, rate: float = 0.2, task: str = "small", last: float = 90.0) -> ReuseRow:
    """A run that reached the target after so many steps, one in ``arm.factor`` of whose examples were fresh."""
    made = 1000 if math.isinf(steps) else int(steps)
    counts = [BATCH] + [BATCH // arm.factor] * (made - 1)
    fresh = math.inf if math.isinf(steps) else sum(counts)
    return ReuseRow(task, arm.name, rate, seed, steps, fresh, made, last, 1.0, pack_counts(counts), "")


def tuned(arm: ReuseArm, seeds: Sequence[int], steps: float, *, best: float = 0.2, task: str = "small") -> list[ReuseRow]:
    """Tuning runs of which one rate alone reached the target."""
    rates = (0.1, 0.2, 0.4)
    return [row(arm, seed, steps if rate == best else math.inf, rate=rate, task=task) for rate in rates for seed in seeds]
