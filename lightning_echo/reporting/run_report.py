"""A run as text, as a page and as a picture: the verdict first, then the picture, then the tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_echo.measuring.echo_summary import RunSummary
from lightning_echo.reporting import figure
from lightning_echo.reporting.html_page import HtmlPage
from lightning_echo.reporting.run_plot import draw
from lightning_echo.reporting.run_tables import headline, tables
from lightning_echo.reporting.table import as_text, verdict_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["page", "picture", "report", "save_page", "save_png"]

_MOST_ROWS = 40  # of a table in a terminal


def report(summary: RunSummary) -> str:
    """Returns a run as plain text, in lines of at most 100 columns."""
    blocks, verdict = [], summary.verdict
    if verdict is not None:
        blocks += verdict_blocks(verdict.message, verdict.why, [verdict.next_line] if verdict.next_line else [])
    blocks += [headline(summary), *map(as_text, tables(summary, _MOST_ROWS))]
    return "\n\n".join(filter(None, blocks))


def page(summary: RunSummary) -> str:
    """Returns a run as HTML.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
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
    """Returns a run as a figure that stands by itself: the verdict, if there is one, is its title.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return draw(summary, headline(summary) if summary.verdict is None else summary.verdict.message)


def save_page(summary: RunSummary, path: str | Path) -> None:
    """Writes a run as HTML.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    Path(path).write_text(page(summary), encoding="utf-8")


def save_png(summary: RunSummary, path: str | Path) -> None:
    """Writes a run as PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure.save(picture(summary), path)
