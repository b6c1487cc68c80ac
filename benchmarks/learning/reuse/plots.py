"""The figure of factor, memory and steps: legible on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from learning.plots import GRAY, STYLE, draw_line
from learning.reuse.rules import MOST_STEPS_RATIO
from learning.reuse.runs import ReuseRuns
from learning.reuse.studies import NO_ECHO

__all__ = ["save_reuse_plot"]

COLORS = ("#3b8bd6", "#d9822b", "#3fa35b", "#a06cd5")
LINES = {"memory": "-", "each": "--", "falling": ":"}


def save_reuse_plot(all_runs: Sequence[ReuseRuns], path: Path) -> None:
    """Steps to the target divided by those without echoing, against the factor: a color for each memory, a line for each rule."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(all_runs), figsize=(4.2 * len(all_runs), 4.6), squeeze=False, layout="constrained")
        for axis, runs in zip(axes[0], all_runs, strict=True):
            _draw(axis, runs)
        axes[0, 0].set_ylabel("optimizer steps to target / no echo")
        handles = _legend(axes.flat)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, transparent=True)
        plt.close(figure)


def _draw(axis: Any, runs: ReuseRuns) -> None:
    arms = [arm for arm in runs.study.arms() if arm != NO_ECHO]
    sizes = sorted({arm.batches or math.inf for arm in arms})
    lines = sorted({(sizes.index(arm.batches or math.inf), arm.reuse) for arm in arms})
    for place, (size, reuse) in enumerate(lines):
        line = [arm for arm in arms if (arm.batches or math.inf, arm.reuse) == (sizes[size], reuse) and runs.is_there(arm)]
        points = sorted((arm.factor, runs.step_ratio(arm)) for arm in line)
        label = f"{reuse}, unbounded" if math.isinf(sizes[size]) else f"{reuse}, {sizes[size]} batches"
        look: dict[str, Any] = {"color": COLORS[size % len(COLORS)], "linestyle": LINES[reuse]}
        draw_line(axis, points, place - len(lines) // 2, label=label, **look)
    ticks = sorted(runs.study.factors)
    axis.set_title(runs.study.task.name.replace("_", " "))
    axis.axhline(1, color=GRAY, linewidth=0.8, linestyle="--")
    axis.axhline(MOST_STEPS_RATIO, color=GRAY, linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(factor) for factor in ticks])
    axis.set_xlabel("echo factor")
    axis.set_ylim(bottom=0)
    axis.patch.set_alpha(0)


def _legend(axes: Iterable[Any]) -> dict[str, Any]:
    """Each label once."""
    return {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
