"""Two runs side by side: speed, idle fraction, examples, cache, and a metric at equal time and at equal fresh examples."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from lightning_echo.measure import page
from lightning_echo.measure.control import percent, three_digits
from lightning_echo.measure.page import BLUE, BROAD, ORANGE, HtmlPage, Table, as_block, as_text, new_figure
from lightning_echo.measure.summary import FILE_NAME, EpochReport, RunSummary, seconds_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---------------------------------------------------------------------- a run
# Seconds are those of the steps and of their waiting, as `EpochReport` has them: without validation and without saving.
#
# A row of Lightning's ``metrics.csv`` has the number of an optimizer step, from 0. `EchoCallback` has logged a row at the end of
# each epoch, with the epoch's number and its count of fresh examples. So the log is known to be that of the run, and it is known
# at which step an epoch ended. Within an epoch, seconds and fresh examples are proportional to the steps.

_LOG, _FRESH = "metrics.csv", "echo/fresh_examples"
_GIB = 2**30


class Point(NamedTuple):
    """A value of a metric, and how long the run had trained by then."""

    seconds: float
    fresh_examples: float
    value: float


@dataclass(frozen=True)
class Run:
    """What a run has left: its name, its summary, and the rows of its CSV log (empty if there is none)."""

    name: str
    summary: RunSummary
    rows: Sequence[dict[str, float]] = ()

    @property
    def reports(self) -> Sequence[EpochReport]:
        return self.summary.reports

    @property
    def last(self) -> EpochReport:
        return self.reports[-1]

    @property
    def seconds(self) -> float:
        return sum(seconds_of(self.reports))

    @property
    def steps_per_second(self) -> float | None:
        steps = sum(report.steps for report in self.reports if report.idle_fraction is not None)
        return steps / self.seconds if self.seconds else None

    @property
    def idle_fraction(self) -> float | None:
        return seconds_of(self.reports)[0] / self.seconds if self.seconds else None

    @property
    def examples_per_step(self) -> float | None:
        steps = sum(report.steps for report in self.reports)
        is_whole = steps and self.reports[0].epoch == 0
        return (self.last.fresh_examples + self.last.echoed_examples) / steps if is_whole else None

    def points(self, metric: str) -> list[Point]:
        """Returns the values of a metric in the run's order; empty if the log has none, or is not that of the whole run."""
        if any(report.epoch != number or not report.steps for number, report in enumerate(self.reports)):
            return []
        ends = [0, *(self._last_step(report) + 1 for report in self.reports)]
        if any(after <= before for before, after in pairwise(ends)):
            return []
        seconds = [0.0, *accumulate(sum(seconds_of([report])) for report in self.reports)]
        fresh = [0.0, *(float(report.fresh_examples) for report in self.reports)]
        found = []
        for place, value in self._places(metric, ends):
            found.append(Point(_at(place, ends, seconds), _at(place, ends, fresh), value))
        return found

    def _last_step(self, report: EpochReport) -> int:
        """Returns the step at which an epoch ended, from 0; -1 if the log has no such row."""
        mine = [row for row in self.rows if row.get("epoch") == report.epoch and row.get(_FRESH) == report.fresh_examples]
        return int(mine[-1].get("step", -1)) if mine else -1

    def _places(self, metric: str, ends: Sequence[int]) -> Iterator[tuple[float, float]]:
        """Yields steps that were over, and the value at that place.

        A program may log ``"step"`` itself, as many do for an axis of epochs. If it then has one value of an epoch, this value is
        that of the epoch's end.
        """
        rows = [row for row in self.rows if metric in row and "step" in row and row.get("epoch", -1) in range(len(ends) - 1)]
        for row in rows:
            epoch, place = int(row["epoch"]), row["step"] + 1
            if ends[epoch] < place <= ends[epoch + 1]:
                yield place, row[metric]
            elif sum(other["epoch"] == epoch for other in rows) == 1 and place <= ends[epoch]:
                yield ends[epoch + 1], row[metric]


def _at(place: float, ends: Sequence[int], values: Sequence[float]) -> float:
    """Returns the value at a place between the ends of epochs."""
    after = min(max(bisect_left(ends, place), 1), len(ends) - 1)
    share = (place - ends[after - 1]) / (ends[after] - ends[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def read_run(path: str | Path) -> Run:
    """Reads a run's ``echo_summary.json``, and the CSV log in its folder if there is one.

    Args:
        path: The run's log directory, or the file.

    Raises:
        OSError: There is no such file.
        ValueError: It is another file, or no epoch of the run has ended.
    """
    folder = Path(path)
    file = folder / FILE_NAME if folder.is_dir() else folder
    if not file.exists():
        raise FileNotFoundError(
            f"a run must be a folder with {FILE_NAME}, got {path}, which has none: EchoCallback writes it at the end of fit, if "
            "the Trainer has a logger that keeps files"
        )
    try:
        text = file.read_text(encoding="utf-8")
        if not text.lstrip().startswith("{"):
            raise ValueError(f"this is not an {FILE_NAME}")
        summary = RunSummary.from_json(text)
        for report in summary.reports:
            _check_figures(report)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not summary.reports:
        raise ValueError(f"{file}: the run ended within its first epoch, so there is nothing to compare")
    return Run(str(path), summary, _read_log(file.parent / _LOG))


def _check_figures(report: EpochReport) -> None:
    for name in ("data_wait_seconds", "step_seconds", "idle_fraction", "fresh_examples", "echoed_examples", "steps"):
        value = getattr(report, name)
        if value is not None and not 0 <= value < 2**63:  # NaN is neither
            raise ValueError(f"{name} of epoch {report.epoch} must be a number >= 0, got {value}")


def _read_log(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [{name: _number(text) for name, text in row.items() if name} for row in csv.DictReader(file)]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return [{name: number for name, number in row.items() if number is not None} for row in rows]


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:  # a text that the user has logged
        return None


# ---------------------------------------------------------------------- comparison


def compare(a: Run, b: Run, metric: str | None = None) -> Comparison:
    """Returns two runs side by side.

    Args:
        a: The run to compare with.
        b: The other run.
        metric: A metric that both CSV logs have. None: the first one whose name begins with ``val``; none is fine.

    Raises:
        ValueError: Both are the same run, or there is no such metric.

    Example:
        >>> from lightning_echo.measure.summary import EpochReport, RunSummary
        >>> def run(name, wait):
        ...     seconds = {"data_wait_seconds": wait, "step_seconds": 0.1, "idle_fraction": wait / (wait + 0.1)}
        ...     report = EpochReport(0, 10, 1.0, 80, 0, **seconds)
        ...     return Run(name, RunSummary([report]))
        >>> compare(run("plain", 0.1), run("echoed", 0.0)).headline
        'echoed takes 2 times as many steps a second as plain; idle 0% in place of 50%'
    """
    if a.summary == b.summary:
        raise ValueError(f"{a.name} and {b.name} are the same run: give two runs")
    names = [name for name in dict.fromkeys(name for row in a.rows for name in row) if any(name in row for row in b.rows)]
    if metric is None:
        metric = next((name for name in names if name.startswith("val")), None)
    elif metric not in names:
        known = ", ".join(name for name in names if name not in ("step", "epoch")) or "none"
        raise ValueError(f"--metric {metric}: it must be in the {_LOG} of both runs, which have in common: {known}")
    return Comparison(a, b, metric)


@dataclass(frozen=True)
class Comparison:
    """Two runs, ``b`` compared with ``a``."""

    a: Run
    b: Run
    metric: str | None = None

    @property
    def speedup(self) -> float | None:
        """Steps a second of ``b`` over those of ``a``; None if one of them is not known."""
        before, after = self.a.steps_per_second, self.b.steps_per_second
        return after / before if before and after else None

    @property
    def same_steps(self) -> bool:
        """Whether a step takes as many examples in both runs, as far as it is known."""
        before, after = self.a.examples_per_step, self.b.examples_per_step
        return before is None or after is None or math.isclose(before, after, rel_tol=0.01)

    @property
    def headline(self) -> str:
        speed = self.speedup
        if speed is None:
            return f"{self.b.name} and {self.a.name}: how long their steps took is not known"
        before, after = self.a.idle_fraction or 0.0, self.b.idle_fraction or 0.0
        return (
            f"{self.b.name} takes {three_digits(speed)} times as many steps a second as {self.a.name}; idle {percent(after)} in "
            f"place of {percent(before)}"
        )

    def missed(self, max_idle: float | None = None, min_speedup: float | None = None) -> list[str]:
        """Returns a sentence for each bound that ``b`` misses.

        Args:
            max_idle: The largest idle fraction of ``b``, 0 to 1.
            min_speedup: The least number of times that ``b`` takes as many steps a second as ``a``.

        Raises:
            ValueError: A bound is impossible, or cannot be checked with these runs.
        """
        if max_idle is not None and not 0 <= max_idle <= 1:
            raise ValueError(f"--max-idle must be a share between 0 and 1, got {max_idle:g}")
        if min_speedup is not None and not 0 < min_speedup < math.inf:
            raise ValueError(f"--min-speedup must be a positive number, got {min_speedup:g}")
        idle, speed, found = self.b.idle_fraction, self.speedup, []
        if max_idle is not None:
            if idle is None:
                raise ValueError(f"--max-idle: the idle fraction of {self.b.name} was not measured")
            if idle > max_idle:
                found.append(f"{self.b.name} is idle {idle:.4g} of the time, and --max-idle is {max_idle:g}")
        if min_speedup is not None:
            if not self.same_steps:
                raise ValueError(f"--min-speedup: {self._other_steps()}")
            if speed is None:
                raise ValueError(f"--min-speedup: how long the steps of {self.a.name} or {self.b.name} took was not measured")
            if speed < min_speedup:
                found.append(
                    f"{self.b.name} takes {speed:.4g} times as many steps a second as {self.a.name}, and --min-speedup is "
                    f"{min_speedup:g}"
                )
        return found

    def table(self) -> Table:
        began = [run.summary.began.replace("T", " ", 1) for run in (self.a, self.b)]
        rows = [("began", *began, ""), *(self._row(words, value, written) for words, value, written in _FIGURES)]
        remarks = ["Seconds are those of steps and of their waiting, without validation."]
        if not self.same_steps:
            remarks.append(self._other_steps())
        points = [run.points(self.metric) for run in (self.a, self.b)] if self.metric else [[], []]
        if all(points):
            seconds = min(run.seconds for run in (self.a, self.b))
            fresh = min(run.last.fresh_examples for run in (self.a, self.b))
            at_time = [_last([point for point in each if point.seconds <= seconds * (1 + 1e-9)]) for each in points]
            at_fresh = [_last([point for point in each if point.fresh_examples <= fresh]) for each in points]
            rows.append(
                (f"{self.metric}, the last one up to {three_digits(seconds)} s", *(_written(each, "s") for each in at_time), "")
            )
            rows.append(
                (f"{self.metric}, the last one up to {fresh:,} fresh examples", *(_written(each, "") for each in at_fresh), "")
            )
        else:
            remarks.append(f"No metric is compared: {self._why_no_metric()}.")
        kept = tuple(row for row in rows if any(row[1:3]))
        return Table("Two runs", ("", self.a.name, self.b.name, "ratio"), kept, tuple(remarks))

    def text(self) -> str:
        return "\n\n".join([as_block("Verdict", [self.headline]), as_text(self.table())])

    def save_page(self, path: str | Path) -> None:
        """Writes a page; a ModuleNotFoundError if matplotlib is not installed."""
        figure, narrow = page.as_svgs(self.draw)
        written = HtmlPage(
            headline="Two runs",
            figure=figure,
            narrow=narrow,
            figure_words="Idle fraction and metric of both runs",
            tables=[self.table()],
            verdict=self.headline,
        )
        Path(path).write_text(written.text(), encoding="utf-8")

    def save_png(self, path: str | Path) -> None:
        """Writes a picture with both curves; a ModuleNotFoundError if matplotlib is not installed."""
        page.save(self.draw(), path)

    def draw(self, width: float = BROAD) -> Figure:
        runs = ((self.a, BLUE), (self.b, ORANGE))
        points = [run.points(self.metric) for run, _ in runs] if self.metric else [[], []]
        columns = page.columns_of(width)
        figure = new_figure(width, 5.5 if all(points) else 3)
        panels = figure.subplots(2 if all(points) else 1, 1, squeeze=False)[:, 0]
        for run, color in runs:
            idle = [math.nan if report.idle_fraction is None else 100 * report.idle_fraction for report in run.reports]
            panels[0].plot(
                [report.epoch + 1 for report in run.reports], idle, "o-", color=color, label=fill(run.name, columns - 12)
            )
        words = "idle: share of the time that was spent waiting for input, %"
        panels[0].set_title(fill(words, columns), loc="left", fontsize=10)
        panels[0].set_xlabel("epochs")
        panels[0].set_ylim(-4, 104)
        panels[0].legend(frameon=False)
        if all(points):
            for (run, color), each in zip(runs, points, strict=True):
                panels[1].plot(
                    [point.seconds for point in each], [point.value for point in each], "o-", color=color, label=run.name
                )
            panels[1].set_title(fill(str(self.metric), columns), loc="left", fontsize=10)
            panels[1].set_xlabel("seconds of training")
        for axes in panels:
            page.add_grid(axes)
        return page.dressed(figure)

    def _row(self, words: str, value: Callable[[Run], float | None], written: Callable[[float], str]) -> tuple[str, ...]:
        before, after = value(self.a), value(self.b)
        texts = ["" if each is None else written(each) for each in (before, after)]
        return (words, *texts, three_digits(after / before) if before and after else "")

    def _why_no_metric(self) -> str:
        for run in (self.a, self.b):
            if not run.rows:
                return f"{run.name} has no {_LOG}, which Lightning's CSVLogger writes"
        if self.metric is None:
            return f"the {_LOG} of both runs have none whose name begins with val; --metric chooses another one"
        run = self.a if not self.a.points(self.metric) else self.b
        if first := run.reports[0].epoch:
            return f"{run.name} was resumed in epoch {first}, and how long the epochs before took is not known"
        return f"the {_LOG} of {run.name} does not have all of its epochs"

    def _other_steps(self) -> str:
        return (
            f"a step takes {three_digits(self.a.examples_per_step or 0)} examples in {self.a.name} and "
            f"{three_digits(self.b.examples_per_step or 0)} in {self.b.name}: steps a second say little"
        )


def _count(examples: float) -> str:
    return f"{examples:,.0f}"


def _gib(size: float) -> str:
    return f"{three_digits(size / _GIB)} GiB"


_FIGURES: tuple[tuple[str, Callable[[Run], float | None], Callable[[float], str]], ...] = (
    ("steps a second", lambda run: run.steps_per_second, three_digits),
    ("idle fraction", lambda run: run.idle_fraction, percent),
    ("epochs", lambda run: len(run.reports), _count),
    ("fresh examples", lambda run: run.last.fresh_examples, _count),
    ("echoed examples", lambda run: run.last.echoed_examples, _count),
    ("factor, last epoch", lambda run: run.last.factor, three_digits),
    ("cache hits, last epoch", lambda run: run.last.cache_hit_fraction, percent),
    ("cache, memory of a node", lambda run: run.last.cache_bytes, _gib),
)


def _last(points: Sequence[Point]) -> Point | None:
    return points[-1] if points else None


def _written(point: Point | None, unit: str) -> str:
    """Returns the value, and where it was logged: the last place up to the one that is asked for."""
    if point is None:
        return ""
    where = f"{three_digits(point.seconds)} {unit}" if unit else f"{point.fresh_examples:,.0f}"
    return f"{point.value:.4g} at {where}"
