"""The rules of the learning experiments, fixed before the first run: pure functions.

1. An arm is evaluated at the same spacing of fresh examples as every other one, and has reached the target when the mean of the
   last evaluations over a fixed window of fresh examples is there. (At equal steps an arm at factor e would have e times as many
   chances.)
2. The learning rate comes from one grid, chosen on tuning seeds (with splits of their own) that the report does not use; where
   the best is at the grid's edge, the grid is extended. Constant rate after warm-up.
3. Eight report seeds, paired: the same split and the same initial weights in every arm.
4. A run that misses the target counts as infinite, never dropped.
5. A finding is confirmed when the bootstrap 95% interval of the median paired ratio lies below 0.95, contradicted when it lies
   above 1, else open. Which variant is tested is chosen on the tuning seeds.
6. Beside each figure stand optimizer steps, the baseline's passes over the data, and an arm on a fixed 1/e of the data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from learning.task import Task

__all__ = [
    "CONFIRMED_BELOW",
    "CONTRADICTED_ABOVE",
    "FULL",
    "QUICK",
    "Evaluation",
    "Interval",
    "Seeds",
    "best_rate",
    "interval_of_median",
    "is_tuning",
    "quality_at_end",
    "ratios",
    "reached_at",
    "verdict",
]

RATE_STEP = 2.0
MOST_EXTENSIONS = 4  # to each side of the grid
CONFIRMED_BELOW, CONTRADICTED_ABOVE = 0.95, 1.0
RESAMPLES = 10_000


class Seeds(NamedTuple):
    """Seeds on which the rate is chosen, and those that the report uses; none is in both."""

    tuning: tuple[int, ...]
    report: tuple[int, ...]


FULL = Seeds((101, 102), (1, 2, 3, 4, 5, 6, 7, 8))
QUICK = Seeds((101,), (1, 2))


def is_tuning(seed: int) -> bool:
    """Whether a seed is one of those on which rates are chosen."""
    return seed in FULL.tuning


class Evaluation(NamedTuple):
    """The metric when so many fresh examples had been used in so many optimizer steps."""

    fresh: int
    steps: int
    value: float


class Interval(NamedTuple):
    """A figure and its bootstrap 95% interval."""

    low: float
    middle: float
    high: float


def reached_at(task: Task, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation at which the target was reached: the end of the first window whose mean is there (rule 1)."""
    for end in range(task.window_evaluations, len(evaluations) + 1):
        window = evaluations[end - task.window_evaluations : end]
        if task.is_reached(statistics.fmean(one.value for one in window)):
            return window[-1]
    return None


def quality_at_end(task: Task, evaluations: Sequence[Evaluation], budget_examples: int) -> float | None:
    """The mean over the last window within the budget; None where the run ended before it."""
    if not evaluations or evaluations[-1].fresh < budget_examples:
        return None
    return statistics.fmean(one.value for one in evaluations[-task.window_evaluations :])


def best_rate(task: Task, by_rate: dict[float, Sequence[tuple[float, float]]]) -> tuple[float, float | None]:
    """The best rate, and the one to try next where the best is at the edge (None: nowhere to go) (rule 2).

    Args:
        task: For the grid and the direction of the metric.
        by_rate: For each rate tried and each tuning seed: fresh examples until the target (infinite: missed), and the last
            metric, which decides between rates that both miss on all seeds.
    """
    sign = -1 if task.is_higher_better else 1

    def order(rate: float) -> tuple[int, float, float]:
        runs = by_rate[rate]
        hits = [fresh for fresh, _ in runs if math.isfinite(fresh)]
        return len(runs) - len(hits), sum(hits), sign * sum(last for _, last in runs)

    tried = sorted(by_rate)
    best = min(tried, key=order)
    beyond = {tried[0]: best / RATE_STEP, tried[-1]: best * RATE_STEP}.get(best)
    if len(task.rates) == 1:  # --quick
        return best, None
    reach = RATE_STEP**MOST_EXTENSIONS
    if beyond is None or not task.rates[0] / reach <= beyond <= task.rates[-1] * reach:
        return best, None
    return best, beyond


def ratios(arm: Sequence[float], partner: Sequence[float]) -> list[float]:
    """Paired ratios; where both missed the target (infinite) the pair counts against the arm (rule 4)."""
    return [math.inf if math.isinf(ours) else ours / theirs for ours, theirs in zip(arm, partner, strict=True)]


def interval_of_median(values: Sequence[float]) -> Interval:
    """The median and its bootstrap 95% interval over the seeds (percentiles; the same resamples each time)."""
    chance = np.random.default_rng(0)
    drawn = np.sort(np.asarray(values, dtype=float)[chance.integers(len(values), size=(RESAMPLES, len(values)))], axis=1)
    medians = np.sort(_middle(drawn))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return Interval(float(low), float(_middle(np.sort(np.asarray([values], dtype=float), axis=1))[0]), float(high))


def verdict(interval: Interval, below: float = CONFIRMED_BELOW, above: float = CONTRADICTED_ABOVE) -> str:
    """``confirmed``, ``contradicted`` or ``open`` (rule 5)."""
    if interval.high < below:
        return "confirmed"
    return "contradicted" if interval.low > above else "open"


def _middle(rows: np.ndarray) -> np.ndarray:
    """The median of each sorted row; the mean of a finite and an infinite value is infinite."""
    count = rows.shape[1]
    return (rows[:, (count - 1) // 2] + rows[:, count // 2]) / 2
