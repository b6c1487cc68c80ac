"""A report for a terminal: tables in columns; the verdict, and the line to paste, last. No line has more than 100 columns."""

from __future__ import annotations

from lightning_echo.analysis.report.tables import headline, tables
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.reporting.table import as_sentence, as_text

__all__ = ["report"]


def report(analysis: StallAnalysis) -> str:
    """Returns a report as plain text."""
    blocks = [headline(analysis), *map(as_text, tables(analysis))]
    if analysis.notes:
        blocks.append("\n".join(["Notes", *map(as_sentence, analysis.notes)]))
    verdict = analysis.verdict
    blocks.append("\n".join(["Verdict", as_sentence(verdict.message)]))
    if verdict.setting.line:
        blocks.append("\n".join(["For the Trainer", as_sentence(verdict.setting.line)]))
    return "\n\n".join(blocks)
