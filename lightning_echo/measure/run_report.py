"""A run as text, as a page and as a picture: the verdict first, then the picture, then the tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

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
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary

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
    waited = sum(report.steps * (report.data_wait_seconds or 0) for report in reports)
    total = waited + sum(report.steps * (report.step_seconds or 0) for report in reports)
    found = busy(waited / total) if total else "how long the accelerator waited for input is not known"
    return f"Training, {number_of(len(reports), 'epoch', 'epochs')}: {found}"


def tables(summary: RunSummary, most_rows: int | None = None) -> list[Table]:
    """Returns the tables of a run. A table longer than ``most_rows`` shows its last rows, with a remark; None shows all."""
    return [_last_of(table, most_rows) for table in (_epochs(summary.reports), _factors(summary.decisions)) if table.rows]


def _epochs(reports: Sequence[EpochReport]) -> Table:
    columns: list[tuple[str, Callable[[EpochReport], str]]] = [
        ("epoch", lambda report: f"{report.epoch}"),
        ("factor", lambda report: f"{report.factor:.4g}"),
        ("idle", lambda report: _percent(report.idle_fraction)),
        ("examples/s", lambda report: _digits(report.examples_per_second)),
        ("fresh", lambda report: _count(report.fresh_examples)),
        ("echoed", lambda report: _count(report.echoed_examples)),
        ("passes", lambda report: _digits(report.passes)),
        (_START, lambda report: _digits(report.first_batch_seconds)),
        ("cache hits", lambda report: _percent(report.cache_hit_fraction)),
        ("missed", lambda report: _count(report.missed_examples)),
    ]
    cells = [[cell(report) for report in reports] for _, cell in columns]
    kept = [number for number, column in enumerate(cells) if any(column)]
    rows = tuple(zip(*(cells[number] for number in kept), strict=True))
    headings = tuple(columns[number][0] for number in kept)
    return Table("Epochs", headings, rows, (_COUNTED, _STARTS) if _START in headings else (_COUNTED,))


def _factors(uses: Sequence[FactorUse]) -> Table:
    """Returns the factors with their reasons; no row if the run had only one factor."""
    rows = tuple((_reason(use), f"{use.factor:.4g}", _step(use), _batch(use)) for use in uses)
    remarks = ("A factor counts from the first batch on that was not planned yet when it was decided on.",)
    return Table("Factors", ("why", "factor", "decided after batch", "from batch"), rows if len(rows) > 1 else (), remarks)


def _reason(use: FactorUse) -> str:
    return use.message or ("at the beginning" if use.step == 0 else use.reason)


def _step(use: FactorUse) -> str:
    return "" if use.step is None else f"{use.step:,}"


def _batch(use: FactorUse) -> str:
    if isinstance(use.batch, int):
        return f"{use.batch:,}"
    batches = sorted(set(use.batch.values()))
    return " to ".join(f"{batch:,}" for batch in dict.fromkeys((batches[0], batches[-1])))


def _last_of(table: Table, most_rows: int | None) -> Table:
    left_out = 0 if most_rows is None else len(table.rows) - most_rows
    if left_out <= 0:
        return table
    remark = f"{number_of(left_out, 'earlier row is', 'earlier rows are')} left out here; the page (--html) has all."
    return Table(table.title, table.columns, table.rows[left_out:], (remark, *table.remarks))


def _count(examples: int | None) -> str:
    if examples is None:
        return ""
    return f"{examples:,}" if examples < _MOST_DIGITS else f"{examples / _MILLION:,.0f} M"


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


def _digits(number: float | None) -> str:
    return "" if number is None else three_digits(number)


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


@dataclass(frozen=True)
class _Places:
    """The places of a run's batches on the x axis.

    ``ends`` has the number of batches of the run up to the end of each epoch; empty if some epoch's number is unknown.
    """

    ends: tuple[int, ...]

    @classmethod
    def of(cls, reports: Sequence[EpochReport]) -> _Places:
        is_whole = all(report.steps and report.epoch == number for number, report in enumerate(reports))
        return cls(tuple(accumulate(report.steps for report in reports)) if is_whole else ())

    def of_batch(self, batch: int) -> float:
        """Returns the place of a batch. After the last epoch, batches keep the distance of the last epoch."""
        epoch = min(bisect_left(self.ends, batch), len(self.ends) - 1)
        begin = self.ends[epoch - 1] if epoch else 0
        return epoch + (batch - begin) / (self.ends[epoch] - begin)

    def is_within_epoch(self, use: FactorUse) -> bool:
        """Whether a factor was decided on before the end of an epoch and after the beginning of the run."""
        return bool(use.step) and use.step not in self.ends

    def is_seen(self, use: FactorUse) -> bool:
        """Whether the run trained with the factor, as far as is known: it may have ended before the first such batch."""
        return _first_batch(use) < self.ends[-1] or (use.step or 0) > self.ends[-1]


def draw(summary: RunSummary, title: str = "") -> Figure:
    """Draws a panel for each measured quantity, with ``title`` above the panels."""
    panels = _panels(summary)
    lines = fill(title, _TITLE_COLUMNS)
    above = _LINE * (lines.count("\n") + 1) if lines else 0.0
    figure = new_figure(8, _PANEL * len(panels) + _REST + above)
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(every, panels, strict=True):
        panel(axes, summary)
        axes.grid(alpha=0.3)
        axes.spines[["right", "top"]].set_visible(False)
        axes.margins(x=0.01)
    every[-1].set_xlabel("epochs" if summary.reports else "batches")
    every[-1].xaxis.get_major_locator().set_params(integer=True)
    if lines:
        figure.suptitle(lines, x=0.01, ha="left", fontsize=11)
    return figure


def _panels(summary: RunSummary) -> list[Callable[[Axes, RunSummary], None]]:
    reports = summary.reports
    has_data = {
        _draw_factor: True,
        _draw_idle: any(report.idle_fraction is not None for report in reports),
        _draw_examples: bool(reports),
        _draw_hits: any(report.cache_hit_fraction is not None for report in reports),
        _draw_missed: any(report.missed_examples is not None for report in reports),
    }
    return [panel for panel, has in has_data.items() if has]


def _draw_factor(axes: Axes, summary: RunSummary) -> None:
    reports, uses, places = summary.reports, summary.decisions, _Places.of(summary.reports)
    if not reports:  # the run ended in its first epoch
        batches, factors = [_first_batch(use) for use in uses], [use.factor for use in uses]
        axes.step(batches, factors, "o-", where="post", color=BLUE)
    elif not places.ends or not uses:
        factors = [report.factor for report in reports]
        axes.plot(*_levels(reports, factors), color=BLUE, linewidth=_thickness(reports))
    else:
        seen = [(places.of_batch(_first_batch(use)), use) for use in uses if places.is_seen(use)]
        begins, factors = [at for at, _ in seen], [use.factor for _, use in seen]
        end = max(len(reports), begins[-1])
        axes.step([*begins, end], [*factors, factors[-1]], where="post", color=BLUE, linewidth=_thickness(reports))
        if len(reports) <= _MANY_EPOCHS:
            _mark(axes, [(at, use) for at, use in seen if places.is_within_epoch(use)], end)
    _title(axes, "echo factor")
    axes.set_ylim(0, _ROOM * max(factors, default=1.0))


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


def _draw_idle(axes: Axes, summary: RunSummary) -> None:
    _draw_shares(axes, summary.reports, [report.idle_fraction for report in summary.reports], VERMILION)
    _title(axes, "idle: share of the time that was spent waiting for input")


def _draw_hits(axes: Axes, summary: RunSummary) -> None:
    _draw_shares(axes, summary.reports, [report.cache_hit_fraction for report in summary.reports], ORANGE)
    _title(axes, "cache hits: share of the fresh examples that the cache had")


def _draw_shares(axes: Axes, reports: Sequence[EpochReport], shares: Sequence[float | None], color: str) -> None:
    axes.plot(
        *_levels(reports, [None if share is None else 100 * share for share in shares]),
        color=color,
        linewidth=_thickness(reports),
    )
    axes.set_ylim(-4, 104)
    axes.set_yticks([0, 50, 100], ["0%", "50%", "100%"])


def _draw_examples(axes: Axes, summary: RunSummary) -> None:
    at, fresh = _rising(summary.reports, [report.fresh_examples for report in summary.reports])
    _, echoed = _rising(summary.reports, [report.echoed_examples for report in summary.reports])
    axes.stackplot(at, fresh, echoed, labels=("fresh", "echoed"), colors=(GREEN, SKY))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=2, frameon=False)
    _title(axes, "examples in the run so far")
    _set_counts(axes, [sum(each) for each in zip(fresh, echoed, strict=True)])


def _draw_missed(axes: Axes, summary: RunSummary) -> None:
    at, missed = _rising(summary.reports, [report.missed_examples or 0 for report in summary.reports])
    axes.plot(at, missed, color=PINK, linewidth=_thickness(summary.reports))
    _title(axes, "missed examples in the run so far: other trainings had them")
    _set_counts(axes, missed)


def _set_counts(axes: Axes, counts: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_ylim(0, _ROOM * max(*counts, 1))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10)


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
    verdict = summary.verdict
    return HtmlPage(
        headline=headline(summary),
        figure=figure.as_svg(draw(summary)),
        figure_words="Factor, idle fraction and examples over the run, as in the tables",
        tables=tables(summary),
        verdict="" if verdict is None else verdict.message,
        why=() if verdict is None else verdict.why,
        lines=[verdict.next_line] if verdict is not None and verdict.next_line else [],
    ).text()


def picture(summary: RunSummary) -> Figure:
    """Returns a run as a figure that stands alone: its title is the verdict, if there is one."""
    return draw(summary, headline(summary) if summary.verdict is None else summary.verdict.message)


def save_page(summary: RunSummary, path: str | Path) -> None:
    Path(path).write_text(page(summary), encoding="utf-8")


def save_png(summary: RunSummary, path: str | Path) -> None:
    figure.save(picture(summary), path)
