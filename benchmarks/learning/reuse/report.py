"""The tables of this study, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown import replace_section, table

from learning.report import interval_text
from learning.reuse import rules
from learning.reuse.clock import cached_reads, replayed_time
from learning.reuse.plots import save_reuse_plot
from learning.reuse.rows import ReuseRow
from learning.reuse.rules import DECIDING_BATCHES, DECIDING_RATIOS, Cell
from learning.reuse.runs import ReuseRuns
from learning.reuse.studies import NO_ECHO, ReuseArm, Study
from learning.rules import Interval, interval_of_median, ratios, verdict

__all__ = ["again_table", "cell_table", "decision_table", "reuse_table", "write_reuse_report"]

PLOT, SECTION = "reuse.png", "reuse"
NOT_YET = "not run yet"


def write_reuse_report(all_runs: Sequence[ReuseRuns], again: Sequence[ReuseRuns], page: Path, *, is_quick: bool) -> None:
    """Prints the tables, and writes them and the plot into a page and beside it; the page is made if it is not there.

    Args:
        all_runs: Of each study.
        again: Of what rule 9 asks again.
        page: The page.
        is_quick: Whether these are runs of ``--quick``.
    """
    text = "\n\n".join([decision_table(all_runs, again), cell_table(all_runs), again_table(again), *map(reuse_table, all_runs)])
    print(f"\n{text}")
    page.parent.mkdir(parents=True, exist_ok=True)
    if not page.exists():
        page.write_text(f"# Reuse\n\n![Steps against the factor]({PLOT})\n\n<!-- {SECTION}:begin -->\n<!-- {SECTION}:end -->\n")
    replace_section(page, SECTION, text)
    drawn = [runs for runs in all_runs if runs.is_there(NO_ECHO)]
    if drawn:
        save_reuse_plot(drawn, page.parent / PLOT)
    if is_quick:
        print("\nThese are tables of --quick: they show that everything runs, and say nothing about echoing.")


def decision_table(all_runs: Sequence[ReuseRuns], again: Sequence[ReuseRuns]) -> str:
    """What the rules decide (rules 6 to 9)."""
    deciding = [runs for runs in all_runs if runs.study.decides]
    pairs = [("memory", "each"), ("falling", "each"), ("falling", "memory")]
    cells = {pair: list(_cells(deciding, *pair, DECIDING_BATCHES)) for pair in pairs}
    rows = []
    if any(cell is None for some in cells.values() for cell in some):
        rows += [("rule of reuse", NOT_YET), ("falling share", NOT_YET)]
    else:
        known = {pair: [cell for cell in some if cell is not None] for pair, some in cells.items()}
        reuse = rules.default_reuse(*(known[pair] for pair in pairs))
        winner = "memory" if rules.wins(known["memory", "each"]) else "each"
        stays = reuse == "falling" or rules.falling_stays(known["falling", winner])
        rows += [("rule of reuse, with e up to 16", reuse), ("falling share", "stays" if stays else "goes")]
    asked = _cells_again(again)
    is_known = bool(asked) and None not in asked
    wins = is_known and rules.wins([cell for cell in asked if cell is not None])
    winner = "memory" if wins or not is_known else "each"
    rows += [
        ("rule of reuse, as a training has it by default", f"**{winner}**" if is_known else NOT_YET),
        (f"max_factor, of {winner}", _max_factor(deciding, winner)),
        (f"expected of the headline, of {winner}", _headline(deciding, winner)),
    ]
    return table(("what", "by the rules"), rows)


def cell_table(all_runs: Sequence[ReuseRuns]) -> str:
    """One rule of reuse against another at equal memory, e = R; those at other memory than the deciding one decide nothing."""
    columns = ("task", "memory", "tested", *(f"time at R = e = {ratio}" for ratio in DECIDING_RATIOS))
    lines = []
    for runs in all_runs:
        sizes = sorted({arm.batches for arm in runs.study.arms() if arm.batches is not None})
        for size in sizes:
            for one, other in (("memory", "each"), ("falling", "each"), ("falling", "memory")):
                cells = list(_cells([runs], one, other, size))
                texts = ["" if cell is None else f"{interval_text(cell.interval)}, {verdict(cell.interval)}" for cell in cells]
                if any(texts):
                    lines.append((runs.study.task.name, f"{size} batches", f"{one} / {other}", *texts))
    return table(columns, lines)


def again_table(again: Sequence[ReuseRuns]) -> str:
    """The cells of rule 9."""
    columns = (
        "task, asked again",
        "memory",
        "tested",
        *(f"time at R = {ratio}, e = {_factor_again(ratio)}" for ratio in DECIDING_RATIOS),
    )
    lines = []
    for runs in again:
        cells = _cells_again([runs])
        if None not in cells:
            texts = [f"{interval_text(cell.interval)}, {verdict(cell.interval)}" for cell in cells if cell is not None]
            lines.append((runs.study.task.name, f"{DECIDING_BATCHES} batches", "memory / each", *texts))
    return table(columns, lines)


def _factor_again(ratio: int) -> int:
    return min(ratio, rules.AGAIN_MOST_FACTOR)


def _cells_again(again: Sequence[ReuseRuns]) -> list[Cell | None]:
    cells: list[Cell | None] = []
    for runs in again:
        for ratio in DECIDING_RATIOS:
            one, other = (ReuseArm(rule, _factor_again(ratio), DECIDING_BATCHES) for rule in ("memory", "each"))
            is_there = runs.is_there(one, other)
            cells.append(Cell(runs.study.task.name, ratio, runs.time_ratio(one, other, ratio)) if is_there else None)
    return cells


def reuse_table(runs: ReuseRuns) -> str:
    """All arms of a task: medians over the report's seeds with their intervals; ratios are paired by seed."""
    times = [f"time at R = {ratio} / no echo" for ratio in DECIDING_RATIOS]
    columns = ("arm", "rate", "reached", "fresh examples to target", "steps to target", "steps / no echo", *times)
    lines = [_arm_line(runs, arm) for arm in runs.study.arms() if runs.is_there(arm, NO_ECHO)]
    kind = "" if runs.study.decides else " Many passes; decides nothing."
    title = runs.study.task.title
    return f"{title[0].upper()}{title[1:]}.{kind}\n\n" + table(columns, [*lines, *_cache_lines(runs)])


def _cells(all_runs: Sequence[ReuseRuns], reuse: str, partner: str, batches: int) -> Iterator[Cell | None]:
    """The cells of two rules at equal memory; None where a run of them is missing."""
    for runs in all_runs:
        for ratio in DECIDING_RATIOS:
            one, other = (ReuseArm(rule, ratio, batches) for rule in (reuse, partner))
            is_there = runs.is_there(one, other)
            yield Cell(runs.study.task.name, ratio, runs.time_ratio(one, other, ratio)) if is_there else None


def _most_memory(runs: ReuseRuns, reuse: str, factor: int) -> ReuseArm | None:
    """The arm of a rule and factor with the most memory; None if there is none."""
    arms = [arm for arm in runs.study.arms() if (arm.reuse, arm.factor) == (reuse, factor)]
    return max(arms, key=lambda arm: math.inf if arm.batches is None else arm.batches, default=None)


def _max_factor(all_runs: Sequence[ReuseRuns], reuse: str) -> str:
    step_ratios: dict[int, list[Interval]] = {}
    for factor in sorted({factor for runs in all_runs for factor in runs.study.factors}):
        arms = [(runs, _most_memory(runs, reuse, factor)) for runs in all_runs]
        if any(arm is None or not runs.is_there(arm, NO_ECHO) for runs, arm in arms):
            return NOT_YET
        step_ratios[factor] = [runs.step_ratio(arm) for runs, arm in arms if arm is not None]
    said = "; ".join(f"e={factor}: {', '.join(map(interval_text, some))}" for factor, some in step_ratios.items())
    return f"**{rules.largest_factor(step_ratios)}** (steps / no echo at {said})" if step_ratios else NOT_YET


def _headline(all_runs: Sequence[ReuseRuns], reuse: str) -> str:
    arms = [(runs, _most_memory(runs, reuse, rules.HEADLINE_RATIO)) for runs in all_runs]
    if not arms or any(arm is None or not runs.is_there(arm, NO_ECHO) for runs, arm in arms):
        return NOT_YET
    found = [runs.time_ratio(arm, NO_ECHO, rules.HEADLINE_RATIO) for runs, arm in arms if arm is not None]
    said, place = ", ".join(map(interval_text, found)), f"R = e = {rules.HEADLINE_RATIO}"
    return f"{'reached' if rules.is_headline(found) else 'missed'}: time / no echo at {place}, replayed: {said}"


def _arm_line(runs: ReuseRuns, arm: ReuseArm) -> tuple[str, ...]:
    rows = runs.progress.reported(arm)
    reached = sum(math.isfinite(row.steps_to_target) for row in rows)
    return (
        arm.name,
        f"{rows[0].rate:g}",
        f"{reached} of {len(rows)}",
        interval_text(interval_of_median(runs.figures(arm, lambda row: row.fresh_to_target))),
        interval_text(interval_of_median(runs.figures(arm, lambda row: row.steps_to_target))),
        "1" if arm == NO_ECHO else interval_text(runs.step_ratio(arm)),
        *("1" if arm == NO_ECHO else interval_text(runs.time_ratio(arm, NO_ECHO, ratio)) for ratio in DECIDING_RATIOS),
    )


def _cache_lines(runs: ReuseRuns) -> Iterator[tuple[str, ...]]:
    """The runs without echoing again, as if so many batches of the data were cached: the same batches, less to read."""
    rows = runs.progress.reported(NO_ECHO)
    for batches in runs.study.cached_batches if rows else ():
        times = [
            interval_of_median(
                ratios([_cached_time(runs.study, row, batches, ratio) for row in rows], runs.times(NO_ECHO, ratio))
            )
            for ratio in DECIDING_RATIOS
        ]
        yield (f"no echo, cache of {batches} batches", f"{rows[0].rate:g}", "", "", "", "1", *map(interval_text, times))


def _cached_time(study: Study, row: ReuseRow, batches: int, ratio: int) -> float:
    if math.isinf(row.steps_to_target):
        return math.inf
    size = study.task.batch_size
    pass_length = study.task.cached_examples // size * size  # the loader drops what is left of a pass
    reads = cached_reads(row.fresh_counts[: int(row.steps_to_target)], pass_length, batches * size)
    return replayed_time(reads, size, ratio)
