"""``lightning-echo``, also ``python -m lightning_echo``: the commands that need no training program.

* ``doctor`` finds problems of this machine, or of a data module.
* ``report run_dir`` shows the saved results of a training or of a stall analysis, as text, as a page or as a picture, on any
  machine.
* ``shared`` shows the processes of this user that read for several trainings.
* ``run train.py`` runs a training program, and measures or echoes its training.
* ``compare run_a run_b`` compares what two trainings have saved.

Each command makes its own imports when it runs: ``--help`` and ``--version`` import neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lightning_echo import __version__

_FAILED = 2  # the same exit status as argparse uses
_EXAMPLES = """examples:
  lightning-echo doctor                             what on this machine would go wrong
  lightning-echo doctor --config train.yaml         the same, and of the data of a configuration
  lightning-echo report lightning_logs/version_0    what a training has left: verdict, figures, epochs
  lightning-echo shared                             the processes that read for several trainings
  lightning-echo run --factor auto train.py         a training without an edit: measured, echoed, cached, shared
  lightning-echo run --tune train.py                the same, with what is proved to be faster
  lightning-echo compare runs/plain runs/echoed     two trainings side by side
"""
_DOCTOR_EXAMPLES = """examples:
  lightning-echo doctor                        this machine and what is installed
  lightning-echo doctor --config train.yaml    and the data module under data: in a LightningCLI's file
  lightning-echo doctor my_data:ImageData      and a LightningDataModule, its class, or a function that returns a DataLoader
  lightning-echo doctor my_data:ImageData --json > doctor.json

A program with EchoCLI has the same command: python train.py doctor --config train.yaml

The exit status is 1 if there is an error, 0 if there is none, and 2 if the command itself is wrong.
"""
_REPORT_EXAMPLES = """examples:
  lightning-echo report lightning_logs/version_0                   a run, by its echo_summary.json
  lightning-echo report lightning_logs/version_0 --html run.html --png run.png
  lightning-echo report analysis.json                              a saved stall analysis
"""
_COMPARE_EXAMPLES = """examples:
  lightning-echo compare runs/plain runs/echoed
  lightning-echo compare runs/plain runs/echoed --html compared.html --png compared.png
  lightning-echo compare runs/last_release runs/today --max-idle 0.05 --min-speedup 0.95

The exit status is 1 if RUN_B misses a bound, 0 if not, and 2 if the runs cannot be compared.
"""
_SHARED_EXAMPLES = """examples:
  lightning-echo shared
  watch lightning-echo shared
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit status. Without arguments, those of this process are used."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"]:  # the options after the program's name are its own
        from lightning_echo.run import main as run_program

        return run_program(given[1:])
    options = _parser().parse_args(given)
    if options.command == "compare":
        return _compare(options)
    if options.command == "report":
        return _report(options)
    if options.command == "shared":
        from lightning_echo.share.sharing import shared_readers

        print(shared_readers())
        return 0
    from lightning_echo.doctor.command import run

    try:
        return run(options.data, config=options.config, as_json=options.json)
    except ValueError as error:
        return _fail(error)


def _report(options: argparse.Namespace) -> int:
    from lightning_echo.analysis.report import read_saved

    try:
        saved = read_saved(options.path)
    except (OSError, ValueError) as error:
        return _fail(error)
    if options.html is None and options.png is None:
        print(saved.text())
        return 0
    if status := _write(options, saved):
        return status
    if saved.beside:
        print(saved.beside)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from lightning_echo.measure.compare import compare, read_run

    try:
        comparison = compare(read_run(options.run_a), read_run(options.run_b), options.metric)
        missed = comparison.missed(options.max_idle, options.min_speedup)
    except (OSError, ValueError) as error:
        return _fail(error)
    print(comparison.text())
    if status := _write(options, comparison):
        return status
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return 1 if missed else 0


def _write(options: argparse.Namespace, shown: Any) -> int:
    """Writes the page and the picture that are asked for. Returns the exit status: 0, or that of a failure."""
    for path, save in ((options.html, shown.save_page), (options.png, shown.save_png)):
        if path is None:
            continue
        try:
            save(path)
        except (OSError, ModuleNotFoundError) as error:
            return _fail(error)
        print(f"written: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    as_written = argparse.RawDescriptionHelpFormatter  # for the examples
    parser = argparse.ArgumentParser(
        prog="lightning-echo", description="Data echoing for PyTorch Lightning.", epilog=_EXAMPLES, formatter_class=as_written
    )
    parser.add_argument("--version", action="version", version=f"lightning-echo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    command = commands.add_parser(
        "doctor",
        help="say what would go wrong on this machine, or with a data module",
        description="Say what would go wrong on this machine, or with a data module.",
        epilog=_DOCTOR_EXAMPLES,
        formatter_class=as_written,
    )
    command.add_argument(
        "data", nargs="?", metavar="module:name", help="a LightningDataModule, its class, or a function that returns a DataLoader"
    )
    command.add_argument("--config", metavar="FILE", help="a YAML file of a LightningCLI, of which data: is built")
    command.add_argument("--json", action="store_true", help="print a document for programs")
    commands.add_parser(
        "shared",
        help="show the processes that read for several trainings",
        description="Shows the readers of this user: name, data, trainings, examples per second, and for whom a reader waits.",
        epilog=_SHARED_EXAMPLES,
        formatter_class=as_written,
    )
    command = commands.add_parser(
        "report",
        help="show a run or a stall analysis",
        description="Shows what a training or a stall analysis has left.",
        epilog=_REPORT_EXAMPLES,
        formatter_class=as_written,
    )
    command.add_argument(
        "path",
        metavar="run_dir",
        help="a run's log directory, its echo_summary.json, or a saved analysis; shown as text, unless --html or --png is given",
    )
    command.add_argument("--html", metavar="FILE", help="write a page to read in a browser")
    command.add_argument("--png", metavar="FILE", help="write a picture of the figures")
    commands.add_parser("run", help="run a training program, measured or echoed, without an edit", add_help=False)
    command = commands.add_parser(
        "compare",
        help="compare two runs",
        description="Compares what two trainings have saved: speed, idle fraction, examples, cache, and a metric.",
        epilog=_COMPARE_EXAMPLES,
        formatter_class=as_written,
    )
    command.add_argument("run_a", metavar="RUN_A", help="the run to compare with: its log directory, or its echo_summary.json")
    command.add_argument("run_b", metavar="RUN_B", help="the other run")
    command.add_argument("--metric", metavar="NAME", help="a metric of the CSV logs; default: the first one that begins with val")
    command.add_argument("--max-idle", type=float, metavar="SHARE", help="the largest idle fraction that RUN_B may have, 0 to 1")
    command.add_argument(
        "--min-speedup", type=float, metavar="TIMES", help="steps per second of RUN_B over those of RUN_A, at least"
    )
    command.add_argument("--html", metavar="FILE", help="write a page to read in a browser")
    command.add_argument("--png", metavar="FILE", help="write a picture with the curves of both runs")
    return parser


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
