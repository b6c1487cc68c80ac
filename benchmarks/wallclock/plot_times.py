"""The plot: time to the target against R, an arm a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from learning.rules import Interval, interval_of_median
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wallclock.plans import NO_ECHO, NOT_SLOWED, TARGET_IDLE
from wallclock.speedups import Runs
from wallclock.stages import Stage
from wallclock.timed import TimedRow

__all__ = ["save_plot"]

_COLORS = {"e=2": "#4c9bd6", "e=4": "#2ca089", "e=6": "#8f6bb3", "e=8": "#d1841f", TARGET_IDLE: "#d64c5b"}


def save_plot(path: Path, stages: Sequence[Stage], rows: Sequence[TimedRow]) -> None:
    """A panel for each task and point; on white, so that it can be read on a dark page too. Missing: half of the runs and more
    missed the target; an interval without an upper end: some did."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    every = [Runs([one for one in stages if one.task == task], [row for row in rows if row.task == task]) for task in tasks]
    panels = [
        (task, runs, point)
        for task, runs in zip(tasks, every, strict=True)
        if runs.seeds
        for point in dict.fromkeys(point for _, point in runs.cases)
    ]
    if not panels:
        return
    figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained", facecolor="white")
    for (task, runs, point), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        _draw(axes, runs, point)
        axes.set(title=f"{task.replace('_', ' ')}, {point}", xlabel="R: upstream time / step time", ylim=(0, None))
        axes.set_ylabel("time to target (s)")
        axes.set_xticks(sorted({ratio for ratio, _ in runs.cases}))
        axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, runs: Runs, point: str) -> None:
    arms = {NO_ECHO: (NO_ECHO, "#7f7f7f"), **{f"{point}, {name}": (name, color) for name, color in _COLORS.items()}}
    for place, (arm, (label, color)) in enumerate(arms.items()):
        ratios = [ratio for ratio, each in runs.keys if each == arm]
        if not ratios:
            continue
        intervals = [_finite(interval_of_median(runs.seconds(ratio, arm))) for ratio in ratios]
        middles = [interval.middle for interval in intervals]
        around = [[one.middle - one.low for one in intervals], [one.high - one.middle for one in intervals]]
        beside = [ratio + 0.06 * (place - len(arms) / 2) for ratio in ratios]  # so that the intervals do not hide each other
        axes.errorbar(beside, middles, around, marker="o", capsize=2, color=color, label=label)
    base = interval_of_median(runs.seconds(0, NOT_SLOWED)).middle
    axes.axhline(base, color="#555555", linestyle="--", linewidth=1, label=NOT_SLOWED)


def _finite(interval: Interval) -> Interval:
    """What can be drawn of it: no point where the middle is infinite, no upper end where that is."""
    if math.isinf(interval.middle):
        return Interval(math.nan, math.nan, math.nan)
    return interval._replace(high=min(interval.high, interval.middle)) if math.isinf(interval.high) else interval
