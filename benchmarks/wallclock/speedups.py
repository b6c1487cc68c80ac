"""Tables of the timed runs: times, what learning allows, and the two goals.

Everything is paired by seed; a figure is the median over the seeds with its bootstrap 95 % interval; ``passed`` compares the
median with what is required, and the interval says how sure that is. A run that misses the target takes infinitely long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from learning.rules import interval_of_median, ratios
from report import Cell, Table, verdict

from wallclock.bound import best_factor, speedup_bound
from wallclock.plans import NO_ECHO, NOT_SLOWED, TARGET_IDLE
from wallclock.stages import EPOCH_STEPS, Stage
from wallclock.timed import TimedRow

__all__ = ["AT_MOST_SLOWER", "OF_BOUND", "Runs", "all_tables", "compensated", "speedups"]

OF_BOUND = 0.92
AT_MOST_SLOWER = 1.10
_MEDIAN = "median over the seeds [bootstrap 95 % interval]"


class Runs:
    """The runs of one task that can be paired: those of seeds for which every arm has run.

    Args:
        stages: One for each R, and one for 0.
        rows: The runs, of one task.
    """

    def __init__(self, stages: Sequence[Stage], rows: Sequence[TimedRow]) -> None:
        self.stages = {stage.ratio: stage for stage in stages}
        self._rows = {(row.ratio, row.arm, row.seed): row for row in rows}
        self.keys = list(dict.fromkeys((row.ratio, row.arm) for row in rows))
        seeds = sorted({row.seed for row in rows})
        self.seeds = [seed for seed in seeds if all((*key, seed) in self._rows for key in self.keys)]

    @property
    def cases(self) -> list[tuple[float, str]]:
        """Each R with each insertion point at which there are arms."""
        rows = sorted(self._rows.values(), key=lambda row: row.ratio)
        return list(dict.fromkeys((row.ratio, row.point) for row in rows if row.point != "none"))

    def of(self, ratio: float, arm: str) -> list[TimedRow]:
        """Runs of an arm, by seed."""
        return [self._rows[ratio, arm, seed] for seed in self.seeds]

    def seconds(self, ratio: float, arm: str) -> list[float]:
        """Time to the target, by seed."""
        return [row.seconds_to_target for row in self.of(ratio, arm)]

    def fixed(self, ratio: float, point: str) -> dict[float, str]:
        """The arms at a point whose factor is fixed, by factor; without echoing too."""
        arms = {self.of(ratio, arm)[0].factor: arm for each, arm in self.keys if each == ratio and arm.startswith(f"{point}, e=")}
        return {1.0: NO_ECHO, **arms}

    def best_fixed(self, ratio: float, point: str) -> str:
        """The one that is fastest."""
        arms = self.fixed(ratio, point).values()
        return min(arms, key=lambda arm: interval_of_median(self.seconds(ratio, arm)).middle)

    def bounds(self, ratio: float, point: str) -> dict[float, list[float]]:
        """The bound on the speed-up at each fixed factor, by seed; nan where the baseline misses the target."""
        stage = self.stages[ratio]
        costs = {
            "upstream_seconds": stage.upstream_seconds / stage.batch_size,
            "step_seconds": stage.step_seconds,
            "batch_size": stage.batch_size,
        }
        fresh = [row.fresh_to_target if math.isfinite(row.fresh_to_target) else math.nan for row in self.of(ratio, NO_ECHO)]
        return {
            factor: [
                speedup_bound(base, row.steps_to_target, factor, **costs)
                for base, row in zip(fresh, self.of(ratio, arm), strict=True)
            ]
            for factor, arm in self.fixed(ratio, point).items()
        }


def all_tables(stages: Sequence[Stage], rows: Sequence[TimedRow]) -> list[Table]:
    """Those of all tasks that have a seed for which every arm has run."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    by_task = {
        task: Runs([stage for stage in stages if stage.task == task], [row for row in rows if row.task == task]) for task in tasks
    }
    runs = {task: each for task, each in by_task.items() if each.seeds}
    return [_stages(stages), _times(runs), _of_bound(runs), _of_best(runs)]


def speedups(base: Sequence[float], arm: Sequence[float]) -> list[float]:
    """Of times, by seed; 0 where the arm misses the target.

    Example:
        >>> speedups([6.0, 6.0, float("inf")], [2.0, float("inf"), float("inf")])
        [3.0, 0.0, 0.0]
    """
    return [0.0 if math.isinf(theirs) else ours / theirs for ours, theirs in zip(base, arm, strict=True)]


def compensated(base: float, arm: float, not_slowed: float) -> float:
    """Share of what the slow source costs that an arm makes up for: 0 as slow as without echoing, 1 as fast as with a source
    that is not slowed.

    Example:
        >>> compensated(base=10.0, arm=4.0, not_slowed=2.0)
        0.75
    """
    if math.isinf(arm) or math.isinf(not_slowed):
        return -math.inf if math.isinf(arm) else math.nan
    return 1.0 if math.isinf(base) else (base - arm) / (base - not_slowed)


def _stages(stages: Sequence[Stage]) -> Table:
    columns = ("task", "R", "workers", "batch", "delay per read (ms)", "step d (ms)", "upstream per batch (ms)", "R measured",
               "points", "redone per batch (ms)")  # fmt: skip
    rows = [
        (stage.task, _ratio(stage.ratio), stage.workers, stage.batch_size, stage.delay_seconds * 1e3, stage.step_seconds * 1e3,
         stage.upstream_seconds * 1e3, stage.measured_ratio, stage.points,
         " ".join(f"{1e3 * float(seconds):.3g}" for seconds in stage.redone_seconds.split()))
        for stage in stages
    ]  # fmt: skip
    text = (
        "What the stages take, each measured by itself; redone: one worker's time for a batch at factor 8, source not slowed. "
        "Of a step of the digits 10 ms are slept, as if spent on a device"
    )
    return Table("wallclock_stages", text, columns, rows)


def _times(runs: dict[str, Runs]) -> Table:
    columns = ("task", "R", "arm", "time to target (s)", "of it first batch (s)", "steps", "fresh examples", "speed-up",
               "of the slowdown compensated", "times the source not slowed", "idle", "missed")  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for task, each in runs.items():
        not_slowed = each.seconds(0, NOT_SLOWED)
        for ratio, arm in each.keys:
            own, seconds = each.of(ratio, arm), each.seconds(ratio, arm)
            counts = [_text([getattr(row, f"{what}_to_target") for row in own]) for what in ("steps", "fresh")]
            shares = ["", ""]
            if ratio:
                base = each.seconds(ratio, NO_ECHO)
                shares = [_text(speedups(base, seconds)), _text(list(map(compensated, base, seconds, not_slowed)))]
            first = _text([row.first_batch_seconds for row in own])
            idle = _text([row.idle for row in own])
            missed = f"{sum(map(math.isinf, seconds))} of {len(seconds)}"
            rows.append(
                (
                    task,
                    _ratio(ratio),
                    arm,
                    _text(seconds),
                    first,
                    *counts,
                    *shares,
                    _text(ratios(seconds, not_slowed)),
                    idle,
                    missed,
                )
            )
    text = f"Time to the target from the first batch's request, evaluations taken out; {_MEDIAN}"
    return Table("wallclock_times", text, columns, rows)


def _of_bound(runs: dict[str, Runs]) -> Table:
    columns = (
        "task",
        "R",
        "point",
        "seeds",
        "best e by the bound",
        "bound",
        "speed-up",
        "speed-up / bound",
        "required",
        "passed",
    )
    rows: list[Sequence[Cell]] = []
    for task, each in runs.items():
        for ratio, point in each.cases:
            bounds = each.bounds(ratio, point)
            factor = best_factor(bounds)
            reached = speedups(each.seconds(ratio, NO_ECHO), each.seconds(ratio, each.fixed(ratio, point)[factor]))
            # where this arm misses both are 0: nothing was made of what learning allows, which is nothing
            shares = [ours / most if most else 0.0 for ours, most in zip(reached, bounds[factor], strict=True)]
            goal = (f">= {OF_BOUND:g}", verdict(interval_of_median(shares).middle >= OF_BOUND))
            figures = [_text(values) for values in (bounds[factor], reached, shares)]
            rows.append((task, _ratio(ratio), point, len(each.seeds), f"{factor:g}", *figures, *goal))
    text = f"Speed-up over no echo against what learning allows (bound.py), at the factor whose bound is the largest; {_MEDIAN}"
    return Table("wallclock_bound", text, columns, rows)


def _of_best(runs: dict[str, Runs]) -> Table:
    columns = ("task", "R", "point", "seeds", "best fixed", "its time (s)", "TargetIdle (s)", "TargetIdle / best", "required",
               "passed", "decisions in the first tenth", "first seed's factors (epoch:factor)")  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for task, each in runs.items():
        for ratio, point in each.cases:
            best, arm = each.best_fixed(ratio, point), f"{point}, {TARGET_IDLE}"
            theirs, ours = each.seconds(ratio, best), each.seconds(ratio, arm)
            shares = ratios(ours, theirs)
            goal = (f"<= {AT_MOST_SLOWER:g}", verdict(interval_of_median(shares).middle <= AT_MOST_SLOWER))
            decisions = _text([row.steps // (10 * EPOCH_STEPS) for row in each.of(ratio, arm)])
            figures = [_text(values) for values in (theirs, ours, shares)]
            found = each.of(ratio, arm)[0].factors
            best = best.removeprefix(f"{point}, ")
            rows.append((task, _ratio(ratio), point, len(each.seeds), best, *figures, *goal, decisions, found))
    text = (
        "TargetIdle from factor 1 on, not told R, against the fixed factor that is fastest; "
        f"it decides every {EPOCH_STEPS} steps; {_MEDIAN}"
    )
    return Table("wallclock_target_idle", text, columns, rows)


def _ratio(ratio: float) -> str:
    return f"{ratio:g}" if ratio else "not slowed"


def _text(values: Sequence[float]) -> str:
    """``median [low, high]``."""
    low, middle, high = map(_figure, interval_of_median(values))
    return f"{middle} [{low}, {high}]"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.3g}"
