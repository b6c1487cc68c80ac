"""Tables of the timed runs: times, what learning allows, the replay, the controller, the headline.

Everything is paired by seed; a figure is the median over the seeds with its bootstrap 95% interval; ``passed`` compares the
median with what is required, and the interval says how sure that is. A run that misses the target takes infinitely long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from learning.reuse.clock import replayed_time
from learning.reuse.rules import HEADLINE_RATIO, HEADLINE_SPEEDUP
from learning.rules import interval_of_median, ratios
from report import Cell, Table, verdict

from wallclock.plans import (
    AT_MOST_SLOWER,
    CELLS,
    FIXED,
    NO_ECHO,
    OF_ALLOWED,
    REPLAY_WITHIN,
    SETTLED,
    STEADY,
    STEP,
    STEP_STEPS,
    TARGET_IDLE,
)
from wallclock.stages import Stage
from wallclock.timed import TimedRow

__all__ = ["MEDIAN", "Case", "all_tables", "text_of"]

ARMS = (NO_ECHO, STEP, FIXED, TARGET_IDLE, SETTLED)
MEDIAN = "median over the seeds [bootstrap 95% interval]"


class Case:
    """The runs of one task behind one source: of the seeds for which every arm has run.

    Args:
        stage: Task and source.
        rows: Runs, also of other cases.
        arms: Every arm.
    """

    def __init__(self, stage: Stage, rows: Sequence[TimedRow], arms: Sequence[str] = ARMS) -> None:
        self.stage = stage
        case = (stage.task, stage.ratio, stage.source)
        self._rows = {(row.arm, row.seed): row for row in rows if (row.task, row.ratio, row.source) == case}
        seeds = sorted({seed for _, seed in self._rows})
        self.seeds = [seed for seed in seeds if all((arm, seed) in self._rows for arm in arms)]

    def runs(self, arm: str) -> list[TimedRow]:
        """Those of an arm, by seed."""
        return [self._rows[arm, seed] for seed in self.seeds]

    def seconds(self, arm: str) -> list[float]:
        """Time to the target; where the run was to end otherwise, its time."""
        return [row.seconds if row.is_reached or row.wanted_steps else math.inf for row in self.runs(arm)]

    @property
    def step_seconds(self) -> list[float]:
        """d: of a step beside workers that read as slowly, and that have always a batch ready."""
        return [(row.seconds - row.first_batch_seconds) / row.steps for row in self.runs(STEP)]

    def allowed(self, step_seconds: Sequence[float]) -> list[float]:
        """Share of the time of `FIXED` that its steps take at least, if one takes so long.

        Args:
            step_seconds: Of a step, by seed.
        """
        reading = self.stage.upstream_seconds / self.stage.ratio
        return [
            row.steps * max(reading, step) / seconds
            for row, step, seconds in zip(self.runs(FIXED), step_seconds, self.seconds(FIXED), strict=True)
        ]

    def replayed(self, arm: str) -> list[float]:
        """Time of an arm by the replay of its fresh examples, seconds."""
        return [
            replayed_time(row.fresh_counts, self.stage.batch_size, self.stage.upstream_seconds / step, step)
            for row, step in zip(self.runs(arm), self.step_seconds, strict=True)
        ]

    def _first_read_seconds(self, row: TimedRow) -> float:
        return self.stage.upstream_seconds * row.fresh_counts[0] / self.stage.batch_size

    def missing(self) -> dict[str, list[float]]:
        """Shares of the time of `FIXED` that are beyond its steps, by seed."""
        reading, runs, steps = self.stage.upstream_seconds / self.stage.ratio, self.runs(FIXED), self.step_seconds
        filling = [  # the replay reads the first batch, too, which is a part of its own here
            max(replayed - row.steps * max(reading, step) - self._first_read_seconds(row), 0.0)
            for row, replayed, step in zip(runs, self.replayed(FIXED), steps, strict=True)
        ]
        first = [row.first_batch_seconds for row in runs]
        idle = [max(row.idle_seconds - filled, 0.0) for row, filled in zip(runs, filling, strict=True)]
        total = [1 - share for share in self.allowed(steps)]
        shares = {
            name: [part / row.seconds for part, row in zip(parts, runs, strict=True)]
            for name, parts in (("first batch", first), ("filling", filling), ("idle", idle))
        }
        shares["longer steps"] = [whole - sum(each[place] for each in shares.values()) for place, whole in enumerate(total)]
        return shares


def all_tables(stages: Sequence[Stage], rows: Sequence[TimedRow]) -> list[Table]:
    """Those of all tasks and sources that have a seed for which every arm has run."""
    cases = [case for stage in stages if stage.source == STEADY and (case := Case(stage, rows)).seeds]
    return [_stages(stages), _times(cases), _of_allowed(cases), _replay(cases), _controller(cases), _headline(cases)]


def _stages(stages: Sequence[Stage]) -> Table:
    columns = (
        "task",
        "source",
        "R",
        "workers",
        "batch",
        "delay per read (ms)",
        "step alone (ms)",
        "upstream per batch (ms)",
        "R measured",
    )
    rows = [
        (
            stage.task,
            stage.source,
            stage.ratio,
            stage.workers,
            stage.batch_size,
            stage.delay_seconds * 1e3,
            stage.step_seconds * 1e3,
            stage.upstream_seconds * 1e3,
            stage.measured_ratio,
        )
        for stage in stages
    ]
    return Table("wallclock_stages", "What the stages take, each measured by itself", columns, rows)


def _times(cases: Sequence[Case]) -> Table:
    columns = ("task", "R", "arm", "time (s)", "of it first batch (s)", "of it idle (s)", "steps", "fresh examples",
               "time / no echo", "live examples", "missed", "first seed's factors (epoch:factor)")  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for case in cases:
        for arm in ARMS:
            runs, seconds = case.runs(arm), case.seconds(arm)
            rows.append((
                case.stage.task, case.stage.ratio, arm, text_of(seconds),
                _of(runs, lambda row: row.first_batch_seconds), _of(runs, lambda row: row.idle_seconds),
                _of(runs, lambda row: row.steps), _of(runs, lambda row: sum(row.fresh_counts)),
                "" if arm in (STEP, SETTLED) else text_of(ratios(seconds, case.seconds(NO_ECHO))),
                runs[0].buffer_size, f"{sum(map(math.isinf, seconds))} of {len(seconds)}", runs[0].factors,
            ))  # fmt: skip
    text = (
        f"Time from the first batch's request, evaluations taken out: to the target; of `{STEP}` for {STEP_STEPS} steps, of the "
        f"last arm for as many steps as TargetIdle needed; {MEDIAN}"
    )
    return Table("wallclock_times", text, columns, rows)


def _of_allowed(cases: Sequence[Case]) -> Table:
    columns = ("task", "R", "seeds", "steps", "step alone (ms)", "d (ms)", "of what learning allows", "by the step alone",
               "first batch", "filling", "idle", "longer steps", "required", "passed")  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for case in cases:
        steps, alone = case.step_seconds, [case.stage.step_seconds] * len(case.seeds)
        shares = case.allowed(steps)
        passed = interval_of_median(shares).middle >= OF_ALLOWED
        rows.append((
            case.stage.task, case.stage.ratio, len(case.seeds), _of(case.runs(FIXED), lambda row: row.steps),
            case.stage.step_seconds * 1e3, text_of([1e3 * step for step in steps]), text_of(shares), text_of(case.allowed(alone)),
            *map(text_of, case.missing().values()), f">= {OF_ALLOWED}", verdict(passed),
        ))  # fmt: skip
    text = (
        f"`{FIXED}`: its steps, each the longer of d and its share of reading, divided by its time. d is the mean step at 4 R, "
        f"after the first batch, in the same session. Then what is missing, as shares of the time; {MEDIAN}"
    )
    return Table("wallclock_allowed", text, columns, rows)


def _replay(cases: Sequence[Case]) -> Table:
    columns = ("task", "R", "time / no echo", "replayed", "measured / replayed", "no echo: measured / replayed", "required",
               "passed")  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for case in cases:
        if (case.stage.task, case.stage.ratio) not in CELLS:
            continue
        measured = ratios(case.seconds(FIXED), case.seconds(NO_ECHO))
        replayed = ratios(case.replayed(FIXED), case.replayed(NO_ECHO))
        found = ratios(measured, replayed)
        passed = abs(interval_of_median(found).middle - 1) <= REPLAY_WITHIN
        base = ratios(case.seconds(NO_ECHO), case.replayed(NO_ECHO))
        cells = map(text_of, (measured, replayed, found, base))
        rows.append((case.stage.task, case.stage.ratio, *cells, f"1 +- {REPLAY_WITHIN}", verdict(passed)))
    text = f"`{FIXED}` divided by `{NO_ECHO}`, by the clock and by the replay of both runs' fresh examples; {MEDIAN}"
    return Table("wallclock_replay", text, columns, rows)


def _controller(cases: Sequence[Case]) -> Table:
    columns = ("task", "R", "seeds", "steps", "settled on", "TargetIdle (s)", "that factor from the start (s)", "ratio",
               "required", "passed")  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for case in cases:
        runs = case.runs(TARGET_IDLE)
        own, fixed = ([row.seconds for row in case.runs(arm)] for arm in (TARGET_IDLE, SETTLED))
        found = ratios(own, fixed)
        passed = interval_of_median(found).middle <= AT_MOST_SLOWER
        rows.append((
            case.stage.task, case.stage.ratio, len(case.seeds), _of(runs, lambda row: row.steps),
            _of(runs, lambda row: row.last_factor), *map(text_of, (own, fixed, found)), f"<= {AT_MOST_SLOWER}", verdict(passed),
        ))  # fmt: skip
    text = f"TargetIdle from factor 1 on, not told R, and the factor that it ended with, for the same number of steps; {MEDIAN}"
    return Table("wallclock_target_idle", text, columns, rows)


def _headline(cases: Sequence[Case]) -> Table:
    columns = ("task", "R", "no echo (s)", "TargetIdle (s)", "TargetIdle / no echo", "required", "passed")
    rows: list[Sequence[Cell]] = []
    for case in cases:
        if case.stage.ratio == HEADLINE_RATIO:
            found = ratios(case.seconds(TARGET_IDLE), case.seconds(NO_ECHO))
            passed = interval_of_median(found).middle <= 1 / HEADLINE_SPEEDUP
            times = map(text_of, (case.seconds(NO_ECHO), case.seconds(TARGET_IDLE), found))
            rows.append((case.stage.task, case.stage.ratio, *times, f"<= 1 / {HEADLINE_SPEEDUP:g}", verdict(passed)))
    text = f"Default settings, the factor found by itself: time to the target; {MEDIAN}"
    return Table("wallclock_headline", text, columns, rows)


def _of(runs: Sequence[TimedRow], figure: Callable[[TimedRow], float]) -> str:
    return text_of([figure(row) for row in runs])


def text_of(values: Sequence[float]) -> str:
    """``median [low, high]``."""
    low, middle, high = map(_figure, interval_of_median(values))
    return f"{middle} [{low}, {high}]"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.3g}"
