"""The tables of a run, as values: text and page show the same figures in the same words.

A column without a figure is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_echo.measuring.echo_summary import FactorUse, RunSummary
from lightning_echo.measuring.report import EpochReport
from lightning_echo.measuring.words import busy, number_of, percent, three_digits
from lightning_echo.reporting.table import Table

__all__ = ["headline", "tables"]

_COUNTED = "Examples and passes are counted from the beginning of the run, up to the end of the epoch."
_START = "start s"
_STARTS = f"{_START}: the wait for the first batch of an epoch in which workers had to start, in seconds."
_MILLION, _MOST_DIGITS = 10**6, 10**7  # from ten millions on, examples are counted in millions


def headline(summary: RunSummary) -> str:
    """Returns the run in one line.

    >>> headline(RunSummary([EpochReport(0, 10, 1.0, 80, 0, data_wait_seconds=0.01, step_seconds=0.03)]))
    'Training, 1 epoch: the accelerator is busy 75 % of the time'
    """
    reports = summary.reports
    if not reports:
        return "Training that ended within its first epoch"
    waited = sum(report.steps * (report.data_wait_seconds or 0) for report in reports)
    total = waited + sum(report.steps * (report.step_seconds or 0) for report in reports)
    found = busy(waited / total) if total else "how long the accelerator waited for input is not known"
    return f"Training, {number_of(len(reports), 'epoch', 'epochs')}: {found}"


def tables(summary: RunSummary, most_rows: int | None = None) -> list[Table]:
    """Returns the tables of a run, in their order.

    Args:
        summary: What the run has left.
        most_rows: Largest number of rows in a table. A longer table shows only its last rows, and says so. None: all rows are
            shown.
    """
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
    """Returns the factors with their reasons. The table has no row if the run had only one factor."""
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
