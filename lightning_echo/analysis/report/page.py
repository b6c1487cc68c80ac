"""A stall analysis as one HTML page."""

from __future__ import annotations

from pathlib import Path

from lightning_echo.analysis.report.plot import as_svg
from lightning_echo.analysis.report.tables import figures, headline, tables
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.reporting.html_page import HtmlPage

__all__ = ["page", "save_page"]


def page(analysis: StallAnalysis) -> str:
    """Returns a report as HTML.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return HtmlPage(
        headline=headline(analysis),
        figure=as_svg(analysis),
        figure_words="Parts of the step time, and speed-up by echo factor, as in the tables",
        tables=tables(analysis),
        verdict=analysis.verdict.message,
        why=figures(analysis),
        lines=analysis.verdict.setting.lines,
        notes=analysis.notes,
    ).text()


def save_page(analysis: StallAnalysis, path: str | Path) -> None:
    """Writes a report as HTML.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    Path(path).write_text(page(analysis), encoding="utf-8")
