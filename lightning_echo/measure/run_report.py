"""A run as text, as a page and as a picture: the verdict first, then the picture, then the tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lightning_echo.measure import page as figure
from lightning_echo.measure.control import busy, number_of, percent, three_digits
from lightning_echo.measure.page import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    HtmlPage,
    Table,
    as_text,
    new_figure,
    verdict_blocks,
)
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary, RunVerdict, seconds_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ---------------------------------------------------------------------- run tables
# The tables of a run as values: text and page show the same figures in the same words. A column without a figure is left out.

_COUNTED = "Examples and passes are counted from the beginning of the run, up to the end of the epoch."
_START = "start s"
_STARTS = f"{_START}: the wait for the first batch of an epoch in which workers had to start, in seconds."
_MILLION, _MOST_DIGITS = 10**6, 10**7  # from ten million on, examples are counted in millions


def headline(summary: RunSummary) -> str:
    """Returns the run in one line.

    >>> headline(RunSummary([EpochReport(0, 10, 1.0, 80, 0, data_wait_seconds=0.01, step_seconds=0.03)]))
    'Training, 1 epoch: the accelerator is busy 75% of the time'
    """
    reports = summary.reports
    if not reports:
        return "Training that ended within its first epoch"
    waited, worked = seconds_of(reports)
    total = waited + worked
    found = busy(waited / total) if total else "how long the accelerator waited for input is not known"
    return f"Training, {number_of(len(reports), 'epoch', 'epochs')}: {found}"


def tables(summary: RunSummary, most_rows: int | None = None) -> list[Table]:
    """Returns the tables of a run. A table longer than ``most_rows`` shows its last rows, with a remark; None shows all."""
    found = []
    for table in (_epochs(summary.reports), _factors(summary.decisions)):
        left_out = 0 if most_rows is None else len(table.rows) - most_rows
        if left_out > 0:
            remark = f"{number_of(left_out, 'earlier row is', 'earlier rows are')} left out here; the page (--html) has all."
            table = Table(table.title, table.columns, table.rows[left_out:], (remark, *table.remarks))
        if table.rows:
            found.append(table)
    return found


def _count(examples: int) -> str:
    return f"{examples:,}" if examples < _MOST_DIGITS else f"{examples / _MILLION:,.0f} M"


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # heading, attribute of `EpochReport`, how it is written
    ("epoch", "epoch", str),
    ("factor", "factor", "{:.4g}".format),
    ("idle", "idle_fraction", percent),
    ("examples/s", "examples_per_second", three_digits),
    ("fresh", "fresh_examples", _count),
    ("echoed", "echoed_examples", _count),
    ("passes", "passes", three_digits),
    (_START, "first_batch_seconds", three_digits),
    ("cache hits", "cache_hit_fraction", percent),
    ("missed", "missed_examples", _count),
)


def _epochs(reports: Sequence[EpochReport]) -> Table:
    columns = {}
    for heading, name, written in _COLUMNS:
        values = [getattr(report, name) for report in reports]
        if any(value is not None for value in values):
            columns[heading] = ["" if value is None else written(value) for value in values]
    remarks = (_COUNTED, _STARTS) if _START in columns else (_COUNTED,)
    return Table("Epochs", tuple(columns), tuple(zip(*columns.values(), strict=True)), remarks)


def _factors(uses: Sequence[FactorUse]) -> Table:
    """Returns the factors with their reasons; no row if the run had only one factor."""
    rows = []
    for use in uses if len(uses) > 1 else ():
        why = use.message or ("at the beginning" if use.step == 0 else use.reason)
        batches = [use.batch] if isinstance(use.batch, int) else use.batch.values()
        first_and_last = " to ".join(f"{batch:,}" for batch in sorted({min(batches), max(batches)}))
        rows.append((why, f"{use.factor:.4g}", "" if use.step is None else f"{use.step:,}", first_and_last))
    remarks = ("A factor counts from the first batch on that was not planned yet when it was decided on.",)
    return Table("Factors", ("why", "factor", "decided after batch", "from batch"), tuple(rows), remarks)


# ---------------------------------------------------------------------- run plot
# Panels one above the other, over the epochs: factor, idle fraction, examples, cache hits, missed examples.
#
# * Epoch ``k`` reaches from ``k`` to ``k + 1``. A value measured over an epoch is a level line over it. A value counted from the
#   beginning of the run rises to its value at the epoch's end.
# * A factor begins at the first batch that was trained with it. A dot marks a factor that was decided on within an epoch, unless
#   there are many epochs.
# * A value that was not measured leaves a gap. A quantity that was never measured has no panel.

_PANEL, _REST, _LINE = 1.5, 0.8, 0.25  # heights in inches: of a panel, of the space around the panels, of a line of the title
_TITLE_COLUMNS = 90
_NOT_MEASURED = float("nan")
_ROOM = 1.25  # an axis reaches up to this number of times the largest value
_MANY_EPOCHS = 100  # with more epochs, there is no room for marks, and only for thin lines
_THIN, _THICK = 1.0, 2.0
_BETWEEN_LABELS = 0.12  # share of the width: labels with less distance would overlap


def draw(summary: RunSummary, title: str = "") -> Figure:
    """Draws a panel for each measured quantity, with ``title`` above the panels."""
    reports = summary.reports
    has_idle = any(report.idle_fraction is not None for report in reports)
    has_hits = any(report.cache_hit_fraction is not None for report in reports)
    has_missed = any(report.missed_examples is not None for report in reports)
    quantities: list[tuple[bool, str, Callable[[Axes, RunSummary], None]]] = [
        (True, "echo factor", _draw_factor),
        (has_idle, "idle: share of the time that was spent waiting for input", partial(_draw_share, "idle_fraction", VERMILION)),
        (bool(reports), "examples in the run so far", _draw_examples),
        (
            has_hits,
            "cache hits: share of the fresh examples that the cache had",
            partial(_draw_share, "cache_hit_fraction", ORANGE),
        ),
        (has_missed, "missed examples in the run so far: other trainings had them", _draw_missed),
    ]
    panels = [(words, panel) for has_data, words, panel in quantities if has_data]
    lines = fill(title, _TITLE_COLUMNS)
    above = _LINE * (lines.count("\n") + 1) if lines else 0.0
    figure = new_figure(8, _PANEL * len(panels) + _REST + above)
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (words, panel) in zip(every, panels, strict=True):
        panel(axes, summary)
        axes.set_title(words, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["right", "top"]].set_visible(False)
        axes.margins(x=0.01)
    every[-1].set_xlabel("epochs" if summary.reports else "batches")
    every[-1].xaxis.get_major_locator().set_params(integer=True)
    if lines:
        figure.suptitle(lines, x=0.01, ha="left", fontsize=11)
    return figure


def _draw_factor(axes: Axes, summary: RunSummary) -> None:
    reports, uses = summary.reports, summary.decisions
    # The number of batches of the run up to the end of each epoch, if all epochs are known.
    is_whole = all(report.steps and report.epoch == number for number, report in enumerate(reports))
    ends = list(accumulate(report.steps for report in reports)) if is_whole else []
    if not reports:  # the run ended in its first epoch
        batches, factors = [_first_batch(use) for use in uses], [use.factor for use in uses]
        axes.step(batches, factors, "o-", where="post", color=BLUE)
    elif not ends or not uses:
        factors = [report.factor for report in reports]
        axes.plot(*_levels(reports, factors), color=BLUE, linewidth=_thickness(reports))
    else:
        # The run may have ended before the first batch with a factor.
        trained_with = [use for use in uses if _first_batch(use) < ends[-1] or (use.step or 0) > ends[-1]]
        seen = [(_place(_first_batch(use), ends), use) for use in trained_with]
        begins, factors = [at for at, _ in seen], [use.factor for _, use in seen]
        end = max(len(reports), begins[-1])
        axes.step([*begins, end], [*factors, factors[-1]], where="post", color=BLUE, linewidth=_thickness(reports))
        if len(reports) <= _MANY_EPOCHS:
            _mark(axes, [(at, use) for at, use in seen if use.step and use.step not in ends], end)
    axes.set_ylim(0, _ROOM * max(factors, default=1.0))


def _place(batch: int, ends: Sequence[int]) -> float:
    """Returns the place of a batch on the x axis. After the last epoch, batches keep the distance of the last epoch."""
    epoch = min(bisect_left(ends, batch), len(ends) - 1)
    begin = ends[epoch - 1] if epoch else 0
    return epoch + (batch - begin) / (ends[epoch] - begin)


def _mark(axes: Axes, within: Sequence[tuple[float, FactorUse]], end: float) -> None:
    """Marks factors that were decided on within an epoch. Of labels that would overlap, only the first one is written."""
    if not within:
        return
    axes.plot([at for at, _ in within], [use.factor for _, use in within], "o", color=BLUE, markersize=5)
    free_from = 0.0
    for at, use in within:
        if at < free_from:
            continue
        is_at_end = at > (1 - _BETWEEN_LABELS) * end
        label, offset, align = f"batch {_first_batch(use):,}", (-5 if is_at_end else 3), ("right" if is_at_end else "left")
        axes.annotate(label, (at, use.factor), (offset, 5), textcoords="offset points", ha=align, fontsize=8)
        free_from = at + _BETWEEN_LABELS * end


def _draw_share(name: str, color: str, axes: Axes, summary: RunSummary) -> None:
    shares = [getattr(report, name) for report in summary.reports]
    percents = [None if share is None else 100 * share for share in shares]
    axes.plot(*_levels(summary.reports, percents), color=color, linewidth=_thickness(summary.reports))
    axes.set_ylim(-4, 104)
    axes.set_yticks([0, 50, 100], ["0%", "50%", "100%"])


def _draw_examples(axes: Axes, summary: RunSummary) -> None:
    at, fresh = _rising(summary.reports, [report.fresh_examples for report in summary.reports])
    _, echoed = _rising(summary.reports, [report.echoed_examples for report in summary.reports])
    axes.stackplot(at, fresh, echoed, labels=("fresh", "echoed"), colors=(GREEN, SKY))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=2, frameon=False)
    _set_counts(axes, [sum(each) for each in zip(fresh, echoed, strict=True)])


def _draw_missed(axes: Axes, summary: RunSummary) -> None:
    at, missed = _rising(summary.reports, [report.missed_examples or 0 for report in summary.reports])
    axes.plot(at, missed, color=PINK, linewidth=_thickness(summary.reports))
    _set_counts(axes, missed)


def _set_counts(axes: Axes, counts: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_ylim(0, _ROOM * max(*counts, 1))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))


def _levels(reports: Sequence[EpochReport], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Returns the points of a line that is level over each epoch, with gaps where a value or an epoch is missing."""
    at, found = [], []
    for number, (report, value) in enumerate(zip(reports, values, strict=True)):
        if number and reports[number - 1].epoch + 1 != report.epoch:
            at.append(float(report.epoch))
            found.append(_NOT_MEASURED)
        at += [float(report.epoch), report.epoch + 1.0]
        found += [_NOT_MEASURED if value is None else value] * 2
    return at, found


def _rising(reports: Sequence[EpochReport], counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Returns the points of a line that rises to the count at each epoch's end, from 0 at the beginning of epoch 0."""
    first = reports[0].epoch
    start = [(0.0, 0.0)] if first == 0 else []
    points = start + [(report.epoch + 1.0, float(count)) for report, count in zip(reports, counts, strict=True)]
    return [at for at, _ in points], [count for _, count in points]


def _first_batch(use: FactorUse) -> int:
    """Returns the first batch with a factor: with several loaders, that of the loader that has it first."""
    return use.batch if isinstance(use.batch, int) else min(use.batch.values())


def _thickness(reports: Sequence[EpochReport]) -> float:
    return _THIN if len(reports) > _MANY_EPOCHS else _THICK


# ---------------------------------------------------------------------- run report

_MOST_ROWS = 40  # of a table in a terminal


def report(summary: RunSummary) -> str:
    """Returns a run as plain text, in lines of at most 100 columns."""
    blocks, verdict = [], summary.verdict
    if verdict is not None:
        blocks += verdict_blocks(verdict.message, verdict.why, [verdict.next_line] if verdict.next_line else [])
    blocks += [headline(summary), *map(as_text, tables(summary, _MOST_ROWS))]
    return "\n\n".join(filter(None, blocks))


def page(summary: RunSummary) -> str:
    """Returns a run as HTML; needs matplotlib."""
    verdict = summary.verdict or RunVerdict("")
    return HtmlPage(
        headline=headline(summary),
        figure=figure.as_svg(draw(summary)),
        figure_words="Factor, idle fraction and examples over the run, as in the tables",
        tables=tables(summary),
        verdict=verdict.message,
        why=verdict.why,
        lines=[verdict.next_line] if verdict.next_line else [],
    ).text()


def picture(summary: RunSummary) -> Figure:
    return draw(summary, headline(summary) if summary.verdict is None else summary.verdict.message)


def save_page(summary: RunSummary, path: str | Path) -> None:
    Path(path).write_text(page(summary), encoding="utf-8")


def save_png(summary: RunSummary, path: str | Path) -> None:
    figure.save(picture(summary), path)
