"""Which runs there are: arms by source and seed, each with the insertion point and learning rate of the learning experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learning.arms import FACTORS, Arm
from learning.due import Progress
from learning.task import Task

__all__ = ["NOT_SLOWED", "NO_ECHO", "TARGET_IDLE", "Plan", "plans_of", "points_by_learning", "tuned_rate"]

NO_ECHO, TARGET_IDLE, NOT_SLOWED = "no echo", "TargetIdle", "no echo, source not slowed"


@dataclass(frozen=True)
class Plan:
    """A run to do.

    Attributes:
        task: Name of the task.
        ratio: R as wanted; 0: the source is not slowed.
        arm: In tables.
        factor: Echo factor, at the start.
        point: Insertion point; without echoing it changes nothing.
        rate: Learning rate.
        rate_from: Where that comes from.
        seed: Of split, weights, order and augmentation.
    """

    task: str
    ratio: float
    arm: str
    factor: float
    point: str
    rate: float
    rate_from: str
    seed: int

    @property
    def is_controlled(self) -> bool:
        """Whether `TargetIdle` chooses the factor."""
        return self.arm.endswith(TARGET_IDLE)


def plans_of(task: Task, progress: Progress, points: Sequence[str], ratios: Sequence[float], seeds: Sequence[int]) -> list[Plan]:
    """All runs of a task. Partners follow each other, so that what else the machine does reaches all of them."""
    return [
        plan
        for seed in seeds
        for ratio in (0, *ratios)
        for plan in _partners(task, progress, points if ratio else (), ratio, seed)
    ]


def _partners(task: Task, progress: Progress, points: Sequence[str], ratio: float, seed: int) -> list[Plan]:
    """The arms behind one source."""

    def plan(arm: str, factor: float, point: str, tuned_at: float) -> Plan:
        return Plan(task.name, ratio, arm, factor, point, *tuned_rate(task, progress, tuned_at, point), seed)

    arms = [plan(NO_ECHO if ratio else NOT_SLOWED, 1, "none", 1)]
    for point in points:
        arms += [plan(f"{point}, e={factor:g}", factor, point, factor) for factor in sorted({*FACTORS, ratio} - {1})]
        arms.append(plan(f"{point}, {TARGET_IDLE}", 1, point, ratio))
    return arms


def tuned_rate(task: Task, progress: Progress, factor: float, point: str) -> tuple[float, str]:
    """The rate chosen on the tuning seeds for the arm of the nearest factor, and a word on where it comes from.

    Those with a large buffer come first: that is the package's default.
    """
    large = [arm for arm in (Arm(each, point, buffer="large") for each in FACTORS) if progress.rate(arm) is not None]
    arms = [Arm()] if factor == 1 else large or [Arm(each, point) for each in FACTORS]
    nearest = min(arms, key=lambda arm: abs(math.log(arm.factor / factor)))
    rate = progress.rate(nearest)
    if rate is None:
        return task.rates[len(task.rates) // 2], "middle of the grid"
    return rate, f"tuned for {nearest.name}"


def points_by_learning(task: Task, progress: Progress) -> tuple[str, ...]:
    """The task's points, best for learning at e = 4 on the tuning seeds first; the earliest first while that is not known."""
    if progress.best_point() is None:
        return task.points
    return tuple(sorted(task.points, key=lambda point: progress.tuned(Arm(4, point))))
