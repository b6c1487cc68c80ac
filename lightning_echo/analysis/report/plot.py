"""A report as a picture: the parts of the step time, and the speed-up by echo factor at each insertion point.

Each line is thinner than the one before, so that lines at the same place can still be seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.predict import TrainingSetting, predict
from lightning_echo.analysis.report.tables import milliseconds, shares_of_step
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.insertion import POINTS
from lightning_echo.measuring.words import percent
from lightning_echo.reporting import figure as figures
from lightning_echo.reporting.figure import BLUE, GREEN, ORANGE, PINK, SKY, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["as_svg", "draw", "save_png"]

_PART_COLORS = (BLUE, SKY, ORANGE, VERMILION)
_POINT_COLORS = dict(  # one colour is spare
    zip((point.value for point in POINTS), (ORANGE, VERMILION, GREEN, BLUE, PINK, SKY), strict=False)
)
_LARGEST_FACTOR = 8.0
_STEPS = 56  # points of a line: one for each eighth of a factor, so that its bend is at the right place


def draw(analysis: StallAnalysis) -> Figure:
    """Draws a bar of the step time above the speed-up by echo factor.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = figures.new_figure(8, 6.4)
    above, below = figure.subplots(2, 1, height_ratios=(1, 5))
    _draw_parts(above, analysis)
    _draw_speedups(below, analysis)
    return figure


def save_png(analysis: StallAnalysis, path: str | Path) -> None:
    """Writes the figure as PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figures.save(draw(analysis), path)


def as_svg(analysis: StallAnalysis) -> str:
    """Returns the figure as an SVG element for a page."""
    return figures.as_svg(draw(analysis))


def _draw_parts(axes: Axes, analysis: StallAnalysis) -> None:
    begin = 0.0
    for (words, share), color in zip(shares_of_step(analysis), _PART_COLORS, strict=False):
        seconds = share * analysis.step_seconds
        label = f"{words}: {milliseconds(seconds)} ms ({percent(share)})"
        axes.barh([0], [1000 * seconds], left=[1000 * begin], color=color, edgecolor="white", label=label)
        begin += seconds
    axes.set(xlabel="step time of the real run (ms)", yticks=[], xlim=(0, 1000 * begin))
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=2, frameon=False)


def _draw_speedups(axes: Axes, analysis: StallAnalysis) -> None:
    measured = _measured(analysis)
    largest = max([_LARGEST_FACTOR, *(factor for _, factor, _ in measured)])
    factors = [1 + (largest - 1) * step / _STEPS for step in range(_STEPS + 1)]
    points = analysis.stages.points
    for place, point in enumerate(points):
        speedups = [predict(analysis.stages, TrainingSetting(factor=factor, insertion_point=point)).speedup for factor in factors]
        thickness = 1.6 + 1.1 * (len(points) - 1 - place)
        axes.plot(factors, speedups, label=point, color=_POINT_COLORS[point], linewidth=thickness)
    real = analysis.step_seconds
    for point, factor, spread in measured:
        speedup, color = real / spread.median, _POINT_COLORS[point]
        around = [[speedup - real / spread.high], [real / spread.low - speedup]]
        axes.errorbar([factor], [speedup], around, capsize=3, ecolor="black", zorder=3)
        axes.plot([factor], [speedup], "o", color=color, markeredgecolor="black", markersize=8, zorder=4)
    axes.plot([1], [1], "o", color="white", markeredgecolor="black", markersize=8, zorder=3, label="measured")
    axes.set(xlabel="echo factor", ylabel="speed-up (steps per second,\ntimes those without echoing)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.spines[["right", "top"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, title="insertion point")


def _measured(analysis: StallAnalysis) -> list[tuple[str, float, Spread]]:
    """Returns the tried settings that belong to a line: only the echoing differs from the measured setting."""
    stages, found = analysis.stages, []
    for each in analysis.checked:
        setting = each.setting
        only_echoing = TrainingSetting(setting.workers, setting.factor, setting.insertion_point)
        if setting == only_echoing and setting.workers in (None, stages.workers) and setting.insertion_point in stages.points:
            found.append((setting.insertion_point, setting.factor, each.step_seconds))
    return found
