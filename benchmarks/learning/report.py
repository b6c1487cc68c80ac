"""The tables of the learning experiments, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from markdown import replace_section, table

from learning.arms import Arm
from learning.defaults import default_comparisons
from learning.findings import CLAIMS, Finding, Runs, findings
from learning.plots import save_plot
from learning.rules import Interval, interval_of_median

__all__ = ["arm_table", "default_table", "finding_table", "headline", "interval_text", "summary_table", "write_report"]

PAGE, PLOT = "evidence.md", "learning.png"


def write_report(all_runs: Sequence[Runs], folder: Path, *, is_quick: bool) -> None:
    """Prints the tables, and writes them and the plot into a folder: into the page that is there, else as one of their own."""
    found = [finding for runs in all_runs for finding in findings(runs)]
    sections = {
        "findings": f"{summary_table(found)}\n\n{finding_table(found)}",
        "defaults": default_table(all_runs),
        **{runs.task.name: f"{headline(runs)}\n\n{arm_table(runs)}" for runs in all_runs},
    }
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    if not page.exists():
        empty = "\n\n".join(f"## {name}\n\n<!-- {name}:begin -->\n<!-- {name}:end -->" for name in sections)
        page.write_text(f"# Learning experiments\n\n![Fresh examples and steps against the factor]({PLOT})\n\n{empty}\n")
    for name, text in sections.items():
        print(f"\n{name}\n\n{text}")
        replace_section(page, name, text)
    full = [runs for runs in all_runs if runs.task.full]
    if full:  # the others have hardly a factor to draw
        save_plot(full, folder / PLOT)
    if is_quick:
        print("\nThese are tables of --quick: they show that everything runs, and say nothing about echoing.")


def finding_table(found: Sequence[Finding]) -> str:
    """What was tested, in which task, with which result."""
    columns = ("finding", "task", "tested", "median [95%]", "verdict")
    rows = [
        (f"({one.number}) {CLAIMS[one.number]}", one.task, one.tested, interval_text(one.interval), f"**{one.verdict}**")
        for one in sorted(found, key=lambda one: one.number)
    ]
    return table(columns, rows)


def summary_table(found: Sequence[Finding]) -> str:
    """One line for each finding: in how many of its tests it was confirmed, contradicted or stayed open."""
    rows = []
    for number, claim in CLAIMS.items():
        verdicts = [one.verdict for one in found if one.number == number]
        counts = [f"{verdicts.count(name)} {name}" for name in ("confirmed", "contradicted", "open") if name in verdicts]
        rows.append((f"({number}) {claim}", ", ".join(counts) or "not tested yet"))
    return table(("finding", "tests"), rows)


def default_table(all_runs: Sequence[Runs]) -> str:
    """What the package's defaults rest on."""
    rows = [
        (question, runs.task.name, tested, interval_text(interval))
        for runs in all_runs
        for question, tested, interval in default_comparisons(runs)
    ]
    return table(("default", "task", "tested", "median [95%]"), rows)


def headline(runs: Runs) -> str:
    """What was trained, and how often training without echoing goes through the data until the target."""
    title = f"{runs.task.title[0].upper()}{runs.task.title[1:]}."
    if not runs.is_there(Arm()):
        return f"{title} Not run yet."
    passes = interval_text(interval_of_median(runs.passes(Arm())))
    return f"{title} Without echoing the target is reached after {passes} passes over the training data."


def arm_table(runs: Runs) -> str:
    """All arms of a task: medians over the report's seeds with their intervals; ratios are paired by seed."""
    columns = (
        "arm",
        "rate",
        "reached",
        "fresh examples to target",
        "ratio to no echo",
        "steps to target",
        "ratio to no echo",
        f"{runs.task.metric} at the budget",
    )
    return table(columns, [_arm_row(runs, arm) for arm in runs.progress.arms() if runs.is_there(arm, Arm())])


def interval_text(interval: Interval) -> str:
    """``0.61 [0.55, 0.68]``; "never" where the target was missed.

    Example:
        >>> interval_text(Interval(0.5, 0.625, math.inf))
        '0.62 [0.50, never]'
    """
    low, middle, high = (_figure(value) for value in interval)
    return f"{middle} [{low}, {high}]"


def _arm_row(runs: Runs, arm: Arm) -> tuple[str, ...]:
    rows = runs.progress.reported(arm)
    reached = sum(math.isfinite(row.fresh_to_target) for row in rows)
    is_baseline = arm == Arm()
    quality = [row.quality for row in rows]
    return (
        arm.name,
        f"{rows[0].rate:g}",
        f"{reached} of {len(rows)}",
        interval_text(interval_of_median(runs.fresh(arm))),
        "1" if is_baseline else interval_text(runs.ratio(arm, Arm())),
        interval_text(interval_of_median(runs.steps(arm))),
        "1" if is_baseline else interval_text(runs.ratio(arm, Arm(), lambda row: row.steps_to_target)),
        "" if any(map(math.isnan, quality)) else interval_text(interval_of_median(quality)),
    )


def _figure(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
