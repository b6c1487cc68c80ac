"""What is kept of a run: one CSV row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from learning.reuse.clock import pack_counts, replayed_time, unpack_counts
from learning.reuse.run import ReuseRun
from learning.reuse.studies import ReuseArm, Study
from learning.rules import reached_at

__all__ = ["ReuseRow", "reuse_row"]


@dataclass(frozen=True)
class ReuseRow:
    """One run.

    Attributes:
        task: Its name.
        arm: Its name.
        rate: Learning rate.
        seed: Of split, weights, order and augmentation.
        steps_to_target: Optimizer steps until the target; infinite if it was missed.
        fresh_to_target: Fresh examples until then.
        steps: In the whole run.
        last: The last metric.
        seconds: Of the whole run, on a machine that did other things beside it.
        fresh: Fresh examples of each batch, as `pack_counts` says them.
        values: The metric at each multiple of the spacing, separated by spaces.
    """

    task: str
    arm: str
    rate: float
    seed: int
    steps_to_target: float
    fresh_to_target: float
    steps: int
    last: float
    seconds: float
    fresh: str
    values: str

    @cached_property
    def fresh_counts(self) -> list[int]:
        """Fresh examples of each batch."""
        return unpack_counts(self.fresh)

    def time_to_target(self, batch_size: int, ratio: float) -> float:
        """Time to the target in steps, behind a source that is so many times too slow; infinite if it was missed."""
        if math.isinf(self.steps_to_target):
            return math.inf
        return replayed_time(self.fresh_counts[: int(self.steps_to_target)], batch_size, ratio)


def reuse_row(study: Study, arm: ReuseArm, rate: float, seed: int, run: ReuseRun) -> ReuseRow:
    """What is kept of a run."""
    reached = reached_at(study.task, run.evaluations)
    end = run.evaluations[-1]
    return ReuseRow(
        task=study.task.name,
        arm=arm.name,
        rate=rate,
        seed=seed,
        steps_to_target=math.inf if reached is None else reached.steps,
        fresh_to_target=math.inf if reached is None else reached.fresh,
        steps=end.steps,
        last=round(end.value, 4),
        seconds=round(run.seconds, 1),
        fresh=pack_counts(run.fresh),
        values=" ".join(f"{one.value:.4g}" for one in run.evaluations),
    )
