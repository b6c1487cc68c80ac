"""The paper's findings (Choi et al. 2019, section 3), each tested by these runs: runs in, verdicts with intervals out.

1. e = 2 needs fewer fresh examples, in every task, for at least one variant.
2. Earlier insertion points need fewer.
3. The benefit ends at some factor.
4. Larger batches bear larger factors.
5. More shuffling helps.
6. Under a fixed budget of fresh examples the final quality is not worse.
7. Not the paper's, but Fischetti's (2026, arXiv 2609.13922): reuse saves data, not steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from learning.arms import FACTORS, LARGE_BATCH, Arm, first_arms
from learning.due import QUALITY_FACTORS, Progress
from learning.rules import CONFIRMED_BELOW, Interval, interval_of_median, ratios, verdict
from learning.store import Row
from learning.task import Task

__all__ = ["CLAIMS", "Finding", "Runs", "findings"]

CLAIMS = {
    1: "e = 2 needs fewer fresh examples",
    2: "earlier insertion points need fewer",
    3: "the benefit ends at some factor",
    4: "larger batches bear larger factors",
    5: "more shuffling helps",
    6: "final quality under a fixed budget of fresh data is not worse",
    7: "reuse saves data, not steps",
}


@dataclass(frozen=True)
class Finding:
    """One test of one finding.

    Attributes:
        number: Of the finding, see above.
        task: Name of the task.
        tested: What was divided by what (of finding 6: subtracted from what).
        interval: Of the paired figure.
        verdict: ``confirmed``, ``contradicted`` or ``open``.
    """

    number: int
    task: str
    tested: str
    interval: Interval
    verdict: str


class Runs:
    """What the report needs of a task's runs.

    Args:
        task: The task.
        progress: Its runs.
        seeds: Of the report.
    """

    def __init__(self, task: Task, progress: Progress, seeds: Sequence[int]) -> None:
        self.task, self.progress = task, progress
        self._seeds = seeds

    def is_there(self, *arms: Arm) -> bool:
        """Whether all of the report's runs of these arms are done."""
        return all(len(self.progress.reported(arm)) == len(self._seeds) for arm in arms)

    def fresh(self, arm: Arm) -> list[float]:
        """Fresh examples until the target, by seed."""
        return [row.fresh_to_target for row in self.progress.reported(arm)]

    def steps(self, arm: Arm) -> list[float]:
        """Optimizer steps until the target, by seed."""
        return [row.steps_to_target for row in self.progress.reported(arm)]

    def quality(self, arm: Arm) -> list[float]:
        """Mean metric over the last window of the budget, by seed."""
        return [row.quality for row in self.progress.reported(arm)]

    def passes(self, arm: Arm) -> list[float]:
        """Passes over the training data until the target, by seed."""
        sizes = [len(self.task.make_split(row.seed).train) for row in self.progress.reported(arm)]  # type: ignore[arg-type]
        return [fresh / size for fresh, size in zip(self.fresh(arm), sizes, strict=True)]

    def ratio(self, arm: Arm, partner: Arm, figure: Callable[[Row], float] = lambda row: row.fresh_to_target) -> Interval:
        """Of an arm's figure to its partner's, paired by seed."""
        ours, theirs = ([figure(row) for row in self.progress.reported(one)] for one in (arm, partner))
        return interval_of_median(ratios(ours, theirs))


def findings(runs: Runs) -> list[Finding]:
    """All that a task's runs can say by now."""
    tests = (_helps, _earlier, _ends, _batches, _shuffling, _quality, _steps)
    return [finding for test in tests for finding in test(runs)]


def _helps(runs: Runs) -> Iterator[Finding]:
    arm = _best_at(runs, 2)
    if arm is not None and runs.is_there(arm, Arm()):
        interval = runs.ratio(arm, Arm())
        yield Finding(1, runs.task.name, f"{arm.name} / no echo", interval, verdict(interval))


def _earlier(runs: Runs) -> Iterator[Finding]:
    """At the factor where the tuning seeds say that the points differ most."""
    for earlier, later in pairwise(runs.task.points):
        pairs = [(arm, Arm(arm.factor, later)) for arm in _echoed(runs.task, earlier)]
        pairs = [pair for pair in pairs if pair[1] in _echoed(runs.task, later)]
        if not runs.is_there(*(arm for pair in pairs for arm in pair)):
            continue
        arm, partner = min(pairs, key=lambda pair: runs.progress.tuned(pair[0]) / runs.progress.tuned(pair[1]))
        interval = runs.ratio(arm, partner)
        yield Finding(2, runs.task.name, f"{arm.name} / {partner.name}", interval, verdict(interval))


def _ends(runs: Runs) -> Iterator[Finding]:
    """Confirmed at the first factor from which doubling saves no further 5%; contradicted where each doubling does."""
    for point in runs.task.points if runs.task.full else ():
        arms = [Arm(), *_echoed(runs.task, point)]
        if not runs.is_there(*arms):
            continue
        doublings = [(high, low, runs.ratio(high, low)) for low, high in pairwise(arms)]
        last = next((one for one in doublings if verdict(one[2]) != "confirmed"), doublings[-1])
        high, low, interval = last
        said = {"confirmed": "contradicted"}.get(verdict(interval), "confirmed" if interval.low > CONFIRMED_BELOW else "open")
        yield Finding(3, runs.task.name, f"{point}: e={high.factor} / e={low.factor}", interval, said)


def _batches(runs: Runs) -> Iterator[Finding]:
    point = runs.progress.best_point()
    if point is None or not runs.task.full:
        return
    small, large = ([Arm(batch_multiple=multiple), Arm(8, point, batch_multiple=multiple)] for multiple in (1, LARGE_BATCH))
    if runs.is_there(*small, *large):
        gains = [ratios(runs.fresh(echoed), runs.fresh(plain)) for plain, echoed in (small, large)]
        interval = interval_of_median(ratios(gains[1], gains[0]))
        tested = f"(e=8 / no echo, batch x{LARGE_BATCH}) / (e=8 / no echo), {point}"
        yield Finding(4, runs.task.name, tested, interval, verdict(interval))


def _shuffling(runs: Runs) -> Iterator[Finding]:
    point = runs.progress.best_point()
    if point is None or not runs.task.full:
        return
    large, small = (Arm(4, point, buffer=buffer) for buffer in ("large", "small"))
    if runs.is_there(large, small):
        interval = runs.ratio(large, small)
        yield Finding(5, runs.task.name, f"large buffer / small buffer, {point}, e=4", interval, verdict(interval))


def _quality(runs: Runs) -> Iterator[Finding]:
    """How much worse, in the metric's unit: below the margin is not worse."""
    for factor in QUALITY_FACTORS[1:] if runs.task.full else ():
        arm = _best_at(runs, factor)
        if arm is None or not runs.is_there(arm, Arm()):
            continue
        sign = -1 if runs.task.is_higher_better else 1
        worse = [sign * (ours - plain) for ours, plain in zip(runs.quality(arm), runs.quality(Arm()), strict=True)]
        interval, margin = interval_of_median(worse), runs.task.margin
        tested = f"{arm.name}: worse than no echo, {runs.task.metric} (margin {margin:g})"
        yield Finding(6, runs.task.name, tested, interval, verdict(interval, margin, margin))


def _steps(runs: Runs) -> Iterator[Finding]:
    """The baseline's steps divided by the arm's: below 1, echoing takes more steps."""
    for factor in FACTORS:
        arm = _best_at(runs, factor)
        if arm is not None and runs.is_there(arm, Arm()):
            interval = runs.ratio(Arm(), arm, lambda row: row.steps_to_target)
            yield Finding(7, runs.task.name, f"steps: no echo / {arm.name}", interval, verdict(interval))


def _best_at(runs: Runs, factor: int) -> Arm | None:
    """The point that was best at a factor on the tuning seeds; None while that is not known."""
    arms = [arm for arm in _echoed(runs.task) if arm.factor == factor]
    known = bool(arms) and all(runs.progress.rate(arm) is not None for arm in arms)
    return min(arms, key=runs.progress.tuned) if known else None


def _echoed(task: Task, point: str | None = None) -> list[Arm]:
    return [arm for arm in first_arms(task) if arm.factor > 1 and point in (None, arm.point)]
