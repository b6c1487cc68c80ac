"""The learning experiments: ``make evidence``. Goes on where it stopped; see README.md beside this file.

Each run is a row in ``benchmarks/results/learning/<task>.csv``; the tables and plots are made of the rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from digits import DIGITS
from due import Progress
from experiments import run_all
from findings import Runs
from language_model import LANGUAGE_MODEL
from report import write_report
from residual import RESIDUAL
from rules import FULL, QUICK
from store import Store

TASKS = {task.name: task for task in (DIGITS, LANGUAGE_MODEL, RESIDUAL)}
RESULTS = Path(__file__).parents[1] / "results" / "learning"


def main() -> None:
    options = parse_arguments()
    folder = options.out or (Path("runs/learning-quick") if options.quick else RESULTS)
    tasks = [TASKS[name].quick() if options.quick else TASKS[name] for name in options.tasks]
    seeds = QUICK if options.quick else FULL
    if not options.tables_only:
        for task in tasks:
            run_all(task, seeds, Store(folder, task.name), options.processes, options.accelerator)
    runs = [Runs(task, Progress(task, seeds, Store(folder, task.name).rows), seeds.report) for task in tasks]
    write_report(runs, folder, is_quick=options.quick)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five minutes: every table, no evidence")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="these tasks alone")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--accelerator", default="cpu", help="as in Trainer")
    parser.add_argument("--tables-only", action="store_true", help="no runs: tables and plots of those that are there")
    parser.add_argument("--out", type=Path, help="folder of the CSV files (benchmarks/results/learning)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
