"""``python -m lightning_echo report analysis.json``: shows a saved stall analysis as text, as a page or as a picture.

It needs no model, no data and not Lightning: an analysis that was made on a training machine can be read anywhere.
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

_FAILED = 2  # argparse ends with this status, too


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The arguments after the program's name; None: those of this process.

    Returns:
        The exit status.
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
    command = commands.add_parser("report", help="show a saved stall analysis", description="Shows a stall analysis.")
    command.add_argument(
        "analysis", help="a file that StallAnalysis.to_json has written; shown as text, unless --html or --png is given"
    )
    command.add_argument("--html", metavar="FILE", help="write a page to read in a browser")
    command.add_argument("--png", metavar="FILE", help="write a picture of the figures")
    return parser


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
