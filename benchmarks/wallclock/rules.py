"""Rules of echo on demand, and of the `TargetIdle` that looks sooner, fixed before their first run.

A figure is the median over the seeds, paired by seed, with its bootstrap 95% interval; it meets its bound by the median. A run
that misses the target takes infinitely long. Behind a steady source (`CELLS`), on demand with the default ``max_factor``, or with
16 at R = 16 (`judged_arm`):

1. *At equal steps* at most `AT_MOST_SLOWER` times as long as factor R from the start.
2. *Headline.* At R = 8 at most `OF_NO_ECHO` of the time to the target without echoing, from factor 1 on, not told R.
3. *Idle.* From step 20 on, the share of the time in which it waits is at most `MORE_IDLE` above that at factor 4 R, which the
   source never starves. `WaitProfiler` times the fetching of each batch.
4. *TargetIdle* at most ``1 + 16 (h - s) / T + 0.03`` times as long as the factor that it ends with, at equal steps. h is the
   upstream time of a batch, s the step and T the run with that factor. Before a first decision at 10 counted steps 16 batches are
   under way. So no controller that looks at 10 steps can be below the floor, ``1 + 16 (h - s) / T``.

In bursts and behind a heavy tail, with the same reads in flight:

5. *Constants.* With ``max_factor=16`` at most `OF_BEST` of the time to the target of the best constant factor. The best is the
   one with the smallest median. The default ``max_factor`` is shown with it, without a bound.
6. *Torch's prefetching.* In bursts, with ``max_factor=16``, at most `OF_TORCH` of the time of factor 8 with one read at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from learning.reuse.rules import HEADLINE_RATIO
from learning.rules import interval_of_median, ratios
from report import Cell, Table, verdict

from wallclock.goals import MEDIAN, Case, text_of
from wallclock.plans import (
    AT_MOST_SLOWER,
    BURSTS,
    CELLS,
    CONSTANTS,
    DEMAND,
    DEMAND_16,
    EQUAL,
    FIXED,
    HEAVY_TAIL,
    NO_ECHO,
    SETTLED,
    SOURCE_ARMS,
    SOURCE_RATIO,
    STEADY,
    STEP,
    TARGET_IDLE,
    TASKS,
    TORCH,
    judged_arm,
)
from wallclock.stages import Stage
from wallclock.stopwatch import LATE_STEP
from wallclock.timed import TimedRow

__all__ = ["arms_of", "best_constant", "demand_tables", "rules_of", "target_idle_floor"]

OF_NO_ECHO, MORE_IDLE, OF_BEST, OF_TORCH = 0.18, 0.02, 1.0, 0.75
UNDER_WAY, ALLOWANCE = 16, 0.03  # batches; of the time
NOT_YET, SHOWN = "not measured yet", "shown only"
_ORDER = (verdict(False), NOT_YET, verdict(True), SHOWN)


@dataclass(frozen=True)
class Rule:
    """A goal of a cell.

    Attributes:
        goal: In words.
        values: Its figure, by seed.
        at_most: Its bound; None: it is only shown.
        floor: By seed; the bound is so much more.
        note: Stands after the figure.
    """

    goal: str
    values: Callable[[Case], list[float]]
    at_most: float | None
    floor: Callable[[Case], list[float]] | None = None
    note: Callable[[Case], str] = lambda case: ""


_CellOf: TypeAlias = tuple[str, str, int]
"""Task, source and R."""


def demand_tables(
    stages: Sequence[Stage], rows: Sequence[TimedRow], before: tuple[Sequence[Stage], Sequence[TimedRow]]
) -> list[Table]:
    """The rules, failures first, and the times.

    Args:
        stages: That were measured.
        rows: Runs.
        before: Stages and runs of the `TargetIdle` before.
    """
    cases = {(stage.task, stage.source, stage.ratio): Case(stage, rows, arms_of(stage.source, stage.ratio)) for stage in stages}
    measured = {cell: case for cell, case in cases.items() if case.seeds}
    found_before = {(stage.task, stage.source, stage.ratio): Case(stage, before[1]) for stage in before[0]}
    return [_judged(measured), _times(measured, found_before)]


def arms_of(source: str, ratio: int) -> tuple[str, ...]:
    """Those of a cell."""
    if source != STEADY:
        return tuple(SOURCE_ARMS)
    return NO_ECHO, STEP, FIXED, TARGET_IDLE, SETTLED, *dict.fromkeys((DEMAND, judged_arm(ratio))), EQUAL


def rules_of(source: str, ratio: int) -> list[Rule]:
    """Those of a cell."""
    if source != STEADY:
        return _of_unsteady(source)
    arm = judged_arm(ratio)
    rules = [
        Rule(
            f"`{arm}` / `{FIXED}`, at equal steps",
            lambda case: ratios(_seconds(case, arm), _seconds(case, EQUAL)),
            AT_MOST_SLOWER,
        ),
        Rule(
            f"idle from step {LATE_STEP} on, `{arm}` less `{STEP}`",
            lambda case: [
                ours.late_idle - theirs.late_idle for ours, theirs in zip(case.runs(arm), case.runs(STEP), strict=True)
            ],
            MORE_IDLE,
        ),
        Rule(
            f"`{TARGET_IDLE}` / the factor that it ends with, at equal steps",
            lambda case: ratios(_seconds(case, TARGET_IDLE), _seconds(case, SETTLED)),
            ALLOWANCE,
            floor=target_idle_floor,
            note=lambda case: f"; floor {text_of(target_idle_floor(case))}",
        ),
    ]
    if ratio == HEADLINE_RATIO:
        rules.insert(
            0,
            Rule(
                f"`{arm}` / `{NO_ECHO}`, to the target",
                lambda case: ratios(case.seconds(arm), case.seconds(NO_ECHO)),
                OF_NO_ECHO,
            ),
        )
    return rules


def target_idle_floor(case: Case) -> list[float]:
    """``1 + 16 (h - s) / T``, by seed."""
    runs = case.runs(SETTLED)
    steps = [(row.seconds - row.first_batch_seconds) / row.steps for row in runs]
    upstream = case.stage.upstream_seconds
    return [1 + UNDER_WAY * max(upstream - step, 0.0) / row.seconds for row, step in zip(runs, steps, strict=True)]


def best_constant(case: Case) -> str:
    """The constant factor with the smallest median time; of equal ones the smallest."""
    return min(CONSTANTS, key=lambda arm: interval_of_median(case.seconds(arm)).middle)


def _of_unsteady(source: str) -> list[Rule]:
    def to_best(arm: str) -> Callable[[Case], list[float]]:
        return lambda case: ratios(case.seconds(arm), case.seconds(best_constant(case)))

    def best(case: Case) -> str:
        return f" of {best_constant(case)}"

    rules = [
        Rule(f"`{DEMAND_16}` / best constant, to the target", to_best(DEMAND_16), OF_BEST, note=best),
        Rule(f"`{DEMAND}` (default) / best constant, to the target", to_best(DEMAND), None, note=best),
    ]
    if source == BURSTS:
        rules.append(
            Rule(
                f"`{DEMAND_16}` / `{TORCH}`, to the target",
                lambda case: ratios(case.seconds(DEMAND_16), case.seconds(TORCH)),
                OF_TORCH,
            )
        )
    return rules


def _seconds(case: Case, arm: str) -> list[float]:
    """Time of the runs, whether or not they reach the target: for equal steps."""
    return [row.seconds for row in case.runs(arm)]


# ---------------------------------------------------------------------- tables


def _judged(measured: Mapping[_CellOf, Case]) -> Table:
    lines: list[Sequence[Cell]] = []
    for cell in _cells():
        for rule in rules_of(*cell[1:]):
            lines.append((*cell, rule.goal, *_judgement(rule, measured.get(cell))))
    columns = ("task", "source", "R", "goal", "bound", "measured", "seeds", "met")
    text = f"Each rule of echo on demand that was fixed before the runs, failures first; {MEDIAN}"
    return Table("wallclock_demand_rules", text, columns, sorted(lines, key=lambda line: _ORDER.index(str(line[-1]))))


def _cells() -> list[_CellOf]:
    steady = [(task, STEADY, ratio) for task, ratio in CELLS]
    return [*steady, *((task, source, SOURCE_RATIO) for source in (BURSTS, HEAVY_TAIL) for task in TASKS)]


def _judgement(rule: Rule, case: Case | None) -> tuple[str, str, int, str]:
    """Bound, figure, number of seeds, and whether the bound is met."""
    bound = "none" if rule.at_most is None else f"<= {'' if rule.floor is None else 'floor + '}{rule.at_most:g}"
    if case is None:
        return bound, NOT_YET, 0, NOT_YET
    values = rule.values(case)
    figure = text_of(values) + rule.note(case)
    if rule.at_most is None:
        return bound, figure, len(values), SHOWN
    floors = [0.0] * len(values) if rule.floor is None else rule.floor(case)
    above = [value - floor for value, floor in zip(values, floors, strict=True)]
    return bound, figure, len(values), verdict(interval_of_median(above).middle <= rule.at_most)


def _times(measured: Mapping[_CellOf, Case], before: Mapping[_CellOf, Case]) -> Table:
    lines: list[Sequence[Cell]] = []
    for cell, case in measured.items():
        for arm in arms_of(*cell[1:]):
            lines.append((*cell, arm, *_figures(case, arm)))
            if arm == FIXED and cell in before and before[cell].seeds:
                lines.append((*cell, f"{TARGET_IDLE} before, in a session of its own", *_figures(before[cell], TARGET_IDLE)))
    columns = ("task", "source", "R", "arm", "time (s)", "time / no echo", f"idle from step {LATE_STEP} on", "steps",
               "uses per fresh example", "missed")  # fmt: skip
    text = (
        f"Times of echo on demand and of what it is compared with: to the target, or for as many steps as the arm says; {MEDIAN}"
    )
    return Table("wallclock_demand_times", text, columns, lines)


def _figures(case: Case, arm: str) -> tuple[str, ...]:
    runs, seconds = case.runs(arm), case.seconds(arm)
    to_target = case.stage.source == STEADY and not runs[0].wanted_steps
    late = [row.late_idle for row in runs]
    return (
        text_of(seconds),
        text_of(ratios(seconds, case.seconds(NO_ECHO))) if to_target else "",
        "" if any(map(math.isnan, late)) else text_of(late),
        text_of([row.steps for row in runs]),
        text_of([row.steps * case.stage.batch_size / sum(row.fresh_counts) for row in runs]),
        f"{sum(map(math.isinf, seconds))} of {len(seconds)}",
    )
