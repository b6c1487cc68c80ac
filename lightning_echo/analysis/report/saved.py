"""What is saved at a path: a run's ``echo_summary.json`` or a stall analysis. The path is a file, or the folder that contains it.

If a folder has both, the run is shown, and a sentence says that there is an analysis.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lightning_echo.analysis.report import page, plot, text
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.measuring.echo_summary import FILE_NAME, RunSummary
from lightning_echo.reporting import run_report

__all__ = ["Saved", "read_saved"]

_ANALYSIS = "analysis.json"
_NAMED = 3  # most other folders that an error names


@dataclass(frozen=True)
class Saved:
    """What was found.

    Attributes:
        content: The run or the analysis.
        beside: A sentence on what else was found; empty if there is nothing.
    """

    content: RunSummary | StallAnalysis
    beside: str = ""

    def text(self) -> str:
        """Returns the content as plain text."""
        if isinstance(self.content, StallAnalysis):
            return text.report(self.content)
        return run_report.report(self.content) + (f"\n\n{self.beside}" if self.beside else "")

    def save_page(self, path: str | Path) -> None:
        """Writes the content as HTML.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            OSError: The file cannot be written.
        """
        if isinstance(self.content, StallAnalysis):
            page.save_page(self.content, path)
        else:
            run_report.save_page(self.content, path)

    def save_png(self, path: str | Path) -> None:
        """Writes the figure of the content as PNG.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            OSError: The file cannot be written.
        """
        if isinstance(self.content, StallAnalysis):
            plot.save_png(self.content, path)
        else:
            run_report.save_png(self.content, path)


def read_saved(path: str | Path) -> Saved:
    """Reads a file, or the run or analysis in a folder.

    Raises:
        OSError: The file cannot be read, or the folder has neither.
        ValueError: The file is neither a run nor an analysis, or it has a later version.
    """
    path = Path(path)
    if not path.is_dir():
        return Saved(_read_run(path) if _is_run(path) else StallAnalysis.from_json(path))
    run, analysis = path / FILE_NAME, path / _ANALYSIS
    if run.exists():
        beside = f"There is a stall analysis, too: lightning-echo report {analysis}" if analysis.exists() else ""
        return Saved(_read_run(run), beside)
    if analysis.exists():
        return Saved(StallAnalysis.from_json(analysis))
    raise FileNotFoundError(f"run_dir must be a folder with {FILE_NAME} or {_ANALYSIS}, got {path}, {_where_else(path)}")


def _is_run(path: Path) -> bool:
    """Whether a file is that of a run, by its name or by its contents."""
    if path.name == FILE_NAME:
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON: the function that reads an analysis raises the error
        return False
    return isinstance(found, dict) and "decisions" in found and "reports" in found


def _read_run(path: Path) -> RunSummary:
    try:
        return RunSummary.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _where_else(path: Path) -> str:
    """Returns, in words, folders below that have such a file, the latest first. A user may have given the folder of all runs."""
    below = [found for pattern in ("*", "*/*") for name in (FILE_NAME, _ANALYSIS) for found in path.glob(f"{pattern}/{name}")]
    latest = sorted(below, key=lambda found: found.stat().st_mtime, reverse=True)
    folders = list(dict.fromkeys(str(found.parent) for found in latest))
    if not folders:
        return "which has neither; a training with EchoCallback writes the first at the end of fit, if it has a logger"
    more = "" if len(folders) <= _NAMED else f" and {len(folders) - _NAMED} more"
    return f"which has neither; these below have: {', '.join(folders[:_NAMED])}{more}"
