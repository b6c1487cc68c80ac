"""Plots of the learning experiments: legible on light and on dark pages (transparent, mid-tones)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from learning.arms import FACTORS, Arm
from learning.findings import Runs
from learning.rules import Interval
from learning.store import Row

__all__ = ["draw_line", "save_plot"]

GRAY = "#808080"
LARGE = "best point, large buffer"
APART = 1.03  # between the lines of one factor, or their intervals hide each other
COLORS = {
    "before_augmentation": "#3b8bd6",
    "after_augmentation": "#d9822b",
    "after_batching": "#3fa35b",
    "fixed share": "#a06cd5",
}
STYLE = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), GRAY)


def save_plot(all_runs: Sequence[Runs], path: Path) -> None:
    """Fresh examples (above) and steps (below) until the target, divided by the baseline's, against the factor."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(all_runs), figsize=(4.2 * len(all_runs), 7), squeeze=False, layout="constrained")
        for column, runs in zip(axes.T, all_runs, strict=True):
            column[0].set_title(runs.task.name.replace("_", " "))
            _draw(column[0], runs, lambda row: row.fresh_to_target)
            _draw(column[1], runs, lambda row: row.steps_to_target)
            column[1].set_xlabel("echo factor")
        axes[0, 0].set_ylabel("fresh examples to target / no echo")
        axes[1, 0].set_ylabel("optimizer steps to target / no echo")
        figure.legend(*_legend(axes.flat), loc="outside lower center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, transparent=True)
        plt.close(figure)


def draw_line(axis: Any, points: Sequence[tuple[float, Interval]], place: int, **look: Any) -> None:
    """Draws medians with their intervals over the echo factor; what never reached the target is not drawn (the table says so).

    Args:
        axis: Where.
        points: Echo factors, each with what is drawn there.
        place: Number of the line beside that in the middle, so that intervals do not hide each other.
        **look: Label, color and line style.
    """
    drawn = [(factor, interval) for factor, interval in points if math.isfinite(interval.middle)]
    if not drawn:
        return
    middles = [interval.middle for _, interval in drawn]
    below = [interval.middle - interval.low for _, interval in drawn]
    above = [interval.high - interval.middle if math.isfinite(interval.high) else 0 for _, interval in drawn]
    factors = [factor * APART**place for factor, _ in drawn]
    axis.errorbar(factors, middles, [below, above], marker="o", capsize=3, **look)


def _draw(axis: Any, runs: Runs, figure: Callable[[Row], float]) -> None:
    for place, ((name, label), arms) in enumerate(_series(runs).items()):
        points = [(arm.uses_per_fresh, runs.ratio(arm, Arm(), figure)) for arm in arms if runs.is_there(arm, Arm())]
        look: dict[str, Any] = {"color": COLORS[name], "linestyle": "--" if label == LARGE else "-"}
        draw_line(axis, points, place - 2, label=label.replace("_", " "), **look)
    axis.axhline(1, color=GRAY, linewidth=0.8, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.set_xticks(FACTORS, [str(factor) for factor in FACTORS])
    axis.set_ylim(bottom=0)
    axis.patch.set_alpha(0)


def _legend(axes: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """Each label once: with a large buffer the best point's color differs from task to task."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    return list(found.values()), list(found)


def _series(runs: Runs) -> dict[tuple[str, str], list[Arm]]:
    """The arms of each line, by color and label."""
    arms = [arm for arm in runs.progress.arms() if arm.batch_multiple == 1]
    usual = [arm for arm in arms if arm.buffer == "usual"]
    series = {(point, point): [arm for arm in usual if arm.point == point] for point in runs.task.points}
    large = [arm for arm in arms if arm.buffer == "large"]
    if large:
        series[large[0].point, LARGE] = large
    series["fixed share", "fixed share"] = [arm for arm in usual if arm.cached_share < 1]
    return series
