"""The plot: time to the target against R, an arm a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from learning.rules import Interval, interval_of_median
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wallclock.goals import Case
from wallclock.plans import DEMAND, FIXED, NO_ECHO, STEADY, TARGET_IDLE
from wallclock.stages import Stage
from wallclock.timed import TimedRow

__all__ = ["save_plot"]

_COLORS = {NO_ECHO: "#7f7f7f", FIXED: "#2ca089", TARGET_IDLE: "#d64c5b", DEMAND: "#3b6fb5"}


def save_plot(path: Path, stages: Sequence[Stage], rows: Sequence[TimedRow]) -> None:
    """A panel for each task; on white, so that it can be read on a dark page too. Missing: half of the runs and more missed the
    target; an interval without an upper end: some did."""
    cases = [case for stage in stages if stage.source == STEADY and (case := Case(stage, rows, tuple(_COLORS))).seeds]
    tasks = list(dict.fromkeys(case.stage.task for case in cases))
    if not tasks:
        return
    figure = Figure(figsize=(4.6 * len(tasks), 4.2), layout="constrained", facecolor="white")
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        _draw(axes, [case for case in cases if case.stage.task == task])
        axes.set(title=task.replace("_", " "), xlabel="R: upstream time / step time", ylim=(0, None))
        axes.set_ylabel("time to target (s)")
        axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, cases: Sequence[Case]) -> None:
    ratios = [case.stage.ratio for case in cases]
    for place, (arm, color) in enumerate(_COLORS.items()):
        intervals = [_finite(interval_of_median(case.seconds(arm))) for case in cases]
        middles = [interval.middle for interval in intervals]
        around = [[one.middle - one.low for one in intervals], [one.high - one.middle for one in intervals]]
        beside = [ratio + 0.1 * (place - 1) for ratio in ratios]  # so that the intervals do not hide each other
        axes.errorbar(beside, middles, around, marker="o", capsize=2, color=color, label=arm)
    axes.set_xticks(sorted(ratios))


def _finite(interval: Interval) -> Interval:
    """What can be drawn of it: no point where the middle is infinite, no upper end where that is."""
    if math.isinf(interval.middle):
        return Interval(math.nan, math.nan, math.nan)
    return interval._replace(high=min(interval.high, interval.middle)) if math.isinf(interval.high) else interval
