"""Which runs are due: a pure function of the runs that are done, so that a call goes on wherever the last one stopped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from learning.arms import Arm, first_arms, further_arms
from learning.rules import Seeds, best_rate
from learning.store import Row
from learning.task import Task

__all__ = ["QUALITY_FACTORS", "Done", "Job", "Progress"]

QUALITY_FACTORS = (1, 2, 4)  # whose report runs go on to the budget (finding 6)


class Run(Protocol):
    """What tells a run from all others: its arm, by name, its learning rate and its seed."""

    @property
    def arm(self) -> str: ...

    @property
    def rate(self) -> float: ...

    @property
    def seed(self) -> int: ...


R = TypeVar("R", bound=Run)


class Done(Generic[R]):
    """The runs of a task that are done.

    Args:
        rows: These runs.
    """

    def __init__(self, rows: Iterable[R]) -> None:
        self._rows = {_key(row.arm, row.rate, row.seed): row for row in rows}

    def rows(self, arm: str, rate: float, seeds: Iterable[int]) -> list[R]:
        """An arm's runs at a rate, by seed; those that are there."""
        keys = [_key(arm, rate, seed) for seed in seeds]
        return [self._rows[key] for key in keys if key in self._rows]

    def missing(self, arm: str, rates: Iterable[float], seeds: Sequence[int]) -> list[tuple[float, int]]:
        """The rates and seeds of an arm that are not done, rate by rate."""
        return [(rate, seed) for rate in rates for seed in seeds if _key(arm, rate, seed) not in self._rows]


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
        self._task, self._seeds, self._done = task, seeds, Done(rows)

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
        return [] if rate is None else self._done.rows(arm.name, rate, seeds)

    def reported(self, arm: Arm) -> list[Row]:
        """The report's runs of an arm, by seed."""
        return self.rows(arm, self._seeds.report)

    def _due(self, arm: Arm) -> list[Job]:
        best, missing = self._chosen(arm)
        if missing:
            return [Job(self._task, arm, rate, seed, ends_at_target=True) for rate, seed in missing]
        to_budget = self._task.full and arm.cached_share == 1 and arm.batch_multiple == 1 and arm.factor in QUALITY_FACTORS
        missing = self._done.missing(arm.name, [best], self._seeds.report)
        return [Job(self._task, arm, rate, seed, ends_at_target=not to_budget) for rate, seed in missing]

    def _chosen(self, arm: Arm) -> tuple[float, list[tuple[float, int]]]:
        """The best rate so far, and the tuning runs without which it is not settled."""
        rates = list(self._task.rates)
        while True:
            if missing := self._done.missing(arm.name, rates, self._seeds.tuning):
                return rates[0], missing
            best, beyond = best_rate(self._task, {rate: self._results(arm, rate) for rate in rates})
            if beyond is None:
                return best, []
            rates = sorted([*rates, beyond])

    def _results(self, arm: Arm, rate: float) -> list[tuple[float, float]]:
        rows = self._done.rows(arm.name, rate, self._seeds.tuning)
        return [(row.fresh_to_target, row.last) for row in rows]


def _key(arm: str, rate: float, seed: int) -> tuple[str, str, int]:
    return arm, f"{rate:.6g}", seed
