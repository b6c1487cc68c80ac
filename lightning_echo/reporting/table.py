"""A table as a value, and as text. A terminal and a page show the same cells.

Only a line to paste has more than 100 columns. The first cell of a row has words, the other cells have figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill, wrap

__all__ = ["Table", "as_block", "as_sentence", "as_text", "verdict_blocks"]

_COLUMNS = 100
_INDENT = "  "
_GAP = "  "
_BAR = 30  # width of a bar for the whole
_NARROWEST = 12  # least width of the first column; longer text goes on in the next line


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: Text above the table.
        columns: Heading of each column.
        rows: Cells of each row, one for each column.
        remarks: Sentences below the table.
        shares: The share of each row in the whole, for a bar beside the row; empty if the rows are not parts of a whole.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()


def as_text(table: Table) -> str:
    """Returns a table in columns, with its title above and its remarks below.

    >>> print(as_text(Table("Rates", ("", "examples/s"), (("the real run", "100"),), ("Each is a median.",))))
    Rates
                    examples/s
      the real run         100
      Each is a median.
    """
    rows = [table.columns, *table.rows]
    bars = ["", *(_bar(share) for share in table.shares)] if table.shares else [""] * len(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    others = len(_INDENT) + sum(len(_GAP) + width for width in widths[1:]) + max(map(len, bars))
    widths[0] = min(widths[0], max(_NARROWEST, _COLUMNS - others))
    lines = [line for row, bar in zip(rows, bars, strict=True) for line in _row(row, widths, bar)]
    return "\n".join([table.title, *lines, *map(as_sentence, table.remarks)])


def as_block(title: str, sentences: Sequence[str]) -> str:
    """Returns sentences under a title; an empty text if there is none.

    >>> print(as_block("Why", ["idle 40 % of the time", "6 of 8 cores are free"]))
    Why
      idle 40 % of the time
      6 of 8 cores are free
    """
    return "\n".join([title, *map(as_sentence, sentences)]) if sentences else ""


def verdict_blocks(message: str, why: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Returns the first blocks of a report: what to do, why, and the lines to paste. Empty blocks are left out.

    Lines to paste are not wrapped.

    >>> verdict_blocks("Echo.", [], ["EchoCallback(factor=2)"])
    ['Verdict\\n  Echo.', 'Next\\n  EchoCallback(factor=2)']
    """
    after = "\n".join(["Next", *(f"{_INDENT}{line}" for line in lines)]) if lines else ""
    return [block for block in (as_block("Verdict", [message]), as_block("Why", why), after) if block]


def as_sentence(text: str) -> str:
    """Returns a text in indented lines. The lines after the first are indented further."""
    return fill(text, _COLUMNS, initial_indent=_INDENT, subsequent_indent=2 * _INDENT, break_on_hyphens=False)


def _row(cells: tuple[str, ...], widths: list[int], bar: str) -> list[str]:
    """Returns the lines of a row. The figures are at the right, beside the first line of the words."""
    words = wrap(cells[0], widths[0], subsequent_indent=_INDENT) or [""]
    figures = "".join(_GAP + cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    lines = [f"{words[0].ljust(widths[0])}{figures}{bar}", *words[1:]]
    return [f"{_INDENT}{line}".rstrip() for line in lines]


def _bar(share: float) -> str:
    return _GAP + "#" * round(_BAR * share)
