"""The pictures: time to the target against R, an arm a line; and bars at one R for the README."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from string import Template

from learning.rules import Interval, interval_of_median
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wallclock.goals import Case
from wallclock.plans import DEMAND, FIXED, NO_ECHO, STEADY, TARGET_IDLE
from wallclock.stages import Stage
from wallclock.timed import TimedRow

__all__ = ["save_bars", "save_plot"]

_COLORS = {NO_ECHO: "#7f7f7f", FIXED: "#2ca089", TARGET_IDLE: "#d64c5b", DEMAND: "#3b6fb5"}

_TASKS = {"language_model": "a small language model", "glyphs": "a small CNN"}
_WIDTH, _LEFT, _SCALE, _ROW, _TOP, _BETWEEN = 760, 150, 480, 26, 64, 44  # pixels of the bars' picture
_SVG = Template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" role="img" aria-labelledby="title about"
     font-family="system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif" font-size="15" fill="#1f2328">
  <title id="title">$title</title>
  <desc id="about">$about</desc>
  <!-- Written by `make wallclock`. It has its own background, so that it can be read on a light and on a dark page. -->
  <rect x="1" y="1" width="$inner_width" height="$inner_height" rx="14" fill="#ffffff" stroke="#d0d7de" stroke-width="2"/>
  <text x="24" y="34" font-size="17">$title</text>
$groups
</svg>
""")


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


def save_bars(path: Path, stages: Sequence[Stage], rows: Sequence[TimedRow], ratio: int) -> None:
    """Draws a bar for the median time to the target of each arm behind the steady source, a group for each task.

    Nothing is drawn unless each task has such times: a picture on the first page never shows a half of the runs.
    """
    arms = {NO_ECHO: "plain", FIXED: f"factor {ratio}", DEMAND: "on demand"}
    found = {stage.task: Case(stage, rows, tuple(arms)) for stage in stages if (stage.source, stage.ratio) == (STEADY, ratio)}
    if not all(task in found and found[task].seeds for task in _TASKS):
        return
    seconds = {(task, arm): interval_of_median(found[task].seconds(arm)).middle for task in _TASKS for arm in arms}
    longest, groups, words, y = max(seconds.values()), list[str](), list[str](), _TOP
    if math.isinf(longest):
        return
    for task, name in _TASKS.items():
        groups.append(f'  <text x="24" y="{y}" font-weight="600">{name}</text>')
        words.append(f"{name}: " + ", ".join(f"{words_of} {seconds[task, arm]:.3g} s" for arm, words_of in arms.items()))
        for arm, label in arms.items():
            y += _ROW
            width = _SCALE * seconds[task, arm] / longest
            times = "" if arm == NO_ECHO else f", {seconds[task, NO_ECHO] / seconds[task, arm]:.1f} times as fast"
            groups += [
                f'  <text x="{_LEFT - 12}" y="{y}" text-anchor="end">{label}</text>',
                f'  <rect x="{_LEFT}" y="{y - 15}" width="{width:.1f}" height="19" fill="{_COLORS[arm]}"/>',
                f'  <text x="{_LEFT + width + 8:.1f}" y="{y}">{seconds[task, arm]:.3g} s{times}</text>',
            ]
        y += _BETWEEN
    height, runs = y - _BETWEEN + 26, len(found["glyphs"].seeds)
    text = _SVG.substitute(
        width=_WIDTH,
        height=height,
        inner_width=_WIDTH - 2,
        inner_height=height - 2,
        title=f"Time to the target, if reading takes {ratio} times as long as a step (medians of {runs} runs)",
        about="; ".join(words),
        groups="\n".join(groups),
    )
    path.write_text(text, encoding="utf-8")


def _draw(axes: Axes, cases: Sequence[Case]) -> None:
    cases = sorted(cases, key=lambda case: case.stage.ratio)
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
