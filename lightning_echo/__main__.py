"""``python -m lightning_echo report analysis.json``: a saved stall analysis, as text, as a page, as a picture.

It needs neither a model nor data, and not Lightning: an analysis that was made on a training machine can be read anywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_echo.analysis.report.page import save_page
from lightning_echo.analysis.report.plot import save_png
from lightning_echo.analysis.report.text import report
from lightning_echo.analysis.result import StallAnalysis

__all__ = ["main"]

_FAILED = 2  # the status with which argparse ends, too


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status.

    Args:
        arguments: Those after the program's name; None: of this process.
    """
    options = _parser().parse_args(arguments)
    try:
        analysis = StallAnalysis.from_json(options.analysis)
    except (OSError, ValueError) as error:
        return _fail(error)
    if options.html is None and options.png is None:
        print(report(analysis))
        return 0
    for path, save in ((options.html, save_page), (options.png, save_png)):
        if path is None:
            continue
        try:
            save(analysis, path)
        except (OSError, ModuleNotFoundError) as error:
            return _fail(error)
        print(f"written: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_echo", description="Data echoing for PyTorch Lightning.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("report", help="a saved stall analysis, to be read", description="Shows a stall analysis.")
    command.add_argument("analysis", help="what StallAnalysis.to_json has written; it is told as text unless a file is asked for")
    command.add_argument("--html", metavar="FILE", help="write a page to read in a browser")
    command.add_argument("--png", metavar="FILE", help="write the figures as a picture")
    return parser


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
