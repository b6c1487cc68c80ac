"""Which runs are due: a pure function of the runs that are done, so that a call goes on wherever the last one stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learning.arms import Arm, first_arms, further_arms
from learning.rules import Seeds, best_rate
from learning.store import Row
from learning.task import Task

__all__ = ["QUALITY_FACTORS", "Job", "Progress"]

QUALITY_FACTORS = (1, 2, 4)  # whose report runs go on to the budget (finding 6)


@dataclass(frozen=True)
class Job:
    """A run to do."""

    task: Task
    arm: Arm
    rate: float
    seed: int
    ends_at_target: bool


class Progress:
    """How far a task is.

    Args:
        task: The task.
        seeds: For tuning and for the report.
        rows: The runs that are done.
    """

    def __init__(self, task: Task, seeds: Seeds, rows: Sequence[Row]) -> None:
        self._task, self._seeds = task, seeds
        self._done = {(row.arm, f"{row.rate:.6g}", row.seed): row for row in rows}

    def arms(self) -> list[Arm]:
        """All arms that can be told by now: some stand at the point that was best."""
        point = self.best_point()
        return first_arms(self._task) + ([] if point is None else further_arms(self._task, point))

    def due(self) -> list[Job]:
        """The runs that are due now, in order; more may follow from their results."""
        return [job for arm in self.arms() for job in self._due(arm)]

    def best_point(self) -> str | None:
        """The insertion point with the fewest fresh examples at e = 4 on the tuning seeds; None while that is not known."""
        arms = [arm for arm in first_arms(self._task) if arm.factor == 4]
        if any(self.rate(arm) is None for arm in arms):
            return None
        return min(arms, key=self.tuned).point

    def rate(self, arm: Arm) -> float | None:
        """The rate chosen for an arm; None while it is not known."""
        best, missing = self._chosen(arm)
        return None if missing else best

    def tuned(self, arm: Arm) -> float:
        """Mean fresh examples until the target on the tuning seeds, at the chosen rate."""
        rows = self.rows(arm, self._seeds.tuning)
        return sum(row.fresh_to_target for row in rows) / len(rows)

    def rows(self, arm: Arm, seeds: Sequence[int]) -> list[Row]:
        """An arm's runs at its rate, by seed; those that are there."""
        rate = self.rate(arm)
        keys = [] if rate is None else [_key(arm, rate, seed) for seed in seeds]
        return [self._done[key] for key in keys if key in self._done]

    def reported(self, arm: Arm) -> list[Row]:
        """The report's runs of an arm, by seed."""
        return self.rows(arm, self._seeds.report)

    def _due(self, arm: Arm) -> list[Job]:
        best, missing = self._chosen(arm)
        if missing:
            return [Job(self._task, arm, rate, seed, ends_at_target=True) for rate, seed in missing]
        to_budget = self._task.full and arm.cached_share == 1 and arm.batch_multiple == 1 and arm.factor in QUALITY_FACTORS
        seeds = [seed for seed in self._seeds.report if _key(arm, best, seed) not in self._done]
        return [Job(self._task, arm, best, seed, ends_at_target=not to_budget) for seed in seeds]

    def _chosen(self, arm: Arm) -> tuple[float, list[tuple[float, int]]]:
        """The best rate so far, and the tuning runs without which it is not settled."""
        rates = list(self._task.rates)
        while True:
            missing = [(rate, seed) for rate in rates for seed in self._seeds.tuning if _key(arm, rate, seed) not in self._done]
            if missing:
                return rates[0], missing
            best, beyond = best_rate(self._task, {rate: self._results(arm, rate) for rate in rates})
            if beyond is None:
                return best, []
            rates = sorted([*rates, beyond])

    def _results(self, arm: Arm, rate: float) -> list[tuple[float, float]]:
        rows = [self._done[_key(arm, rate, seed)] for seed in self._seeds.tuning]
        return [(row.fresh_to_target, row.last) for row in rows]


def _key(arm: Arm, rate: float, seed: int) -> tuple[str, str, int]:
    return arm.name, f"{rate:.6g}", seed
