"""``python -m lightning_echo``: commands that need no model and no data, and not Lightning.

* ``report run_dir`` shows what a training or a stall analysis has left, as text, as a page or as a picture, on any machine.
* ``shared`` shows the processes of this user that read for several trainings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_echo.analysis.report.saved import read_saved
from lightning_echo.sharing.serving import shared_readers

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
    if options.command == "shared":
        print(shared_readers())
        return 0
    try:
        saved = read_saved(options.path)
    except (OSError, ValueError) as error:
        return _fail(error)
    if options.html is None and options.png is None:
        print(saved.text())
        return 0
    for path, save in ((options.html, saved.save_page), (options.png, saved.save_png)):
        if path is None:
            continue
        try:
            save(path)
        except (OSError, ModuleNotFoundError) as error:
            return _fail(error)
        print(f"written: {path}")
    if saved.beside:
        print(saved.beside)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_echo", description="Data echoing for PyTorch Lightning.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    commands.add_parser(
        "shared",
        help="show the processes that read for several trainings",
        description="Shows the readers of this user: name, data, trainings, examples per second, and for whom a reader waits.",
    )
    command = commands.add_parser(
        "report", help="show a run or a stall analysis", description="Shows what a training or a stall analysis has left."
    )
    command.add_argument(
        "path",
        metavar="run_dir",
        help="a run's log directory, its echo_summary.json, or a saved analysis; shown as text, unless --html or --png is given",
    )
    command.add_argument("--html", metavar="FILE", help="write a page to read in a browser")
    command.add_argument("--png", metavar="FILE", help="write a picture of the figures")
    return parser


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
