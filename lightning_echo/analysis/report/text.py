"""A report for a terminal: the verdict, why, and what to paste; then the tables."""

from __future__ import annotations

from lightning_echo.analysis.report.tables import figures, headline, tables
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.reporting.table import as_block, as_text, verdict_blocks

__all__ = ["report"]


def report(analysis: StallAnalysis) -> str:
    """Returns a report as plain text."""
    verdict = analysis.verdict
    first = verdict_blocks(verdict.message, figures(analysis), verdict.setting.lines)
    blocks = [*first, headline(analysis), *map(as_text, tables(analysis)), as_block("Notes", analysis.notes)]
    return "\n\n".join(filter(None, blocks))
