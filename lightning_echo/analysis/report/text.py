"""A report for a terminal: verdict, why, and what to paste; then tables in columns. No line has more than 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill, wrap

from lightning_echo.analysis.report.tables import Table, figures, headline, tables
from lightning_echo.analysis.result import StallAnalysis

__all__ = ["report"]

_COLUMNS = 100
_INDENT = "  "
_GAP = "  "
_BAR = 30  # width of a bar for the whole step time
_NARROWEST = 12  # least width of the first column; longer text goes on in the next line


def report(analysis: StallAnalysis) -> str:
    """Returns a report as plain text."""
    verdict = analysis.verdict
    first = [("Verdict", [verdict.message]), ("Why", figures(analysis)), ("Next", verdict.setting.lines)]
    last = [("Notes", analysis.notes)]
    return "\n\n".join([*_texts(first), headline(analysis), *map(_table, tables(analysis)), *_texts(last)])


def _texts(titled: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Returns a block for each title under which there is something to say."""
    return ["\n".join([title, *map(_sentence, sentences)]) for title, sentences in titled if sentences]


def _table(table: Table) -> str:
    rows = [table.columns, *table.rows]
    bars = ["", *(_bar(share) for share in table.shares)] if table.shares else [""] * len(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    others = len(_INDENT) + sum(len(_GAP) + width for width in widths[1:]) + max(map(len, bars))
    widths[0] = max(_NARROWEST, min(widths[0], _COLUMNS - others))
    lines = [line for row, bar in zip(rows, bars, strict=True) for line in _row(row, widths, bar)]
    return "\n".join([table.title, *lines, *map(_sentence, table.remarks)])


def _row(cells: tuple[str, ...], widths: list[int], bar: str) -> list[str]:
    """Returns the lines of a row: the figures stand at the right, beside the first line of the words."""
    words = wrap(cells[0], widths[0], subsequent_indent=_INDENT) or [""]
    figures = "".join(_GAP + cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    lines = [f"{words[0].ljust(widths[0])}{figures}{bar}", *words[1:]]
    return [f"{_INDENT}{line}".rstrip() for line in lines]


def _bar(share: float) -> str:
    return _GAP + "#" * round(_BAR * share)


def _sentence(text: str) -> str:
    return fill(text, _COLUMNS, initial_indent=_INDENT, subsequent_indent=2 * _INDENT, break_on_hyphens=False)
