"""The learning experiments: ``make evidence``. Goes on where it stopped; see README.md beside this file.

Each run is a row in ``benchmarks/results/learning/<task>.csv`` (``--study reuse``: ``<task>_reuse.csv``); the tables and plots
are made of the rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from learning.coco import coco_task
from learning.detection import DETECTION
from learning.digits import DIGITS
from learning.due import Progress
from learning.experiments import run_all, run_reuse
from learning.findings import Runs
from learning.language_model import LANGUAGE_MODEL
from learning.paper import cifar10_task, imagenet_task
from learning.report import write_report
from learning.residual import RESIDUAL
from learning.reuse.due import ReuseProgress
from learning.reuse.report import write_reuse_report
from learning.reuse.rows import ReuseRow
from learning.reuse.rules import AGAIN_SEEDS, FULL_SEEDS, QUICK_SEEDS
from learning.reuse.runs import ReuseRuns
from learning.reuse.studies import AGAIN, STUDIES
from learning.rules import FULL, QUICK
from learning.store import Store
from learning.task import Task

TASKS = {task.name: task for task in (DIGITS, LANGUAGE_MODEL, RESIDUAL, DETECTION)}
DATA = {"cifar10": cifar10_task, "imagenet": imagenet_task, "coco": coco_task}
RESULTS = Path(__file__).parents[1] / "results" / "learning"
DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    options = parse_arguments()
    if options.study == "reuse":
        reuse(options)
    else:
        findings(options)


def findings(options: argparse.Namespace) -> None:
    """The paper's findings."""
    is_evidence = options.out is None and options.data is None and not options.quick
    folder = options.out or (RESULTS if is_evidence else Path("runs/learning-quick" if options.quick else "runs/learning"))
    tasks, seeds = chosen_tasks(options), QUICK if options.quick else FULL
    if not options.tables_only:
        for task in tasks:
            run_all(task, seeds, Store(folder, task.name), options.processes, options.accelerator)
    reported = list(TASKS.values()) if is_evidence else tasks  # the documentation is about all of them, whatever ran now
    runs = [Runs(task, Progress(task, seeds, Store(folder, task.name).rows), seeds.report) for task in reported]
    write_report(runs, DOCS if is_evidence else folder, is_quick=options.quick)


def reuse(options: argparse.Namespace) -> None:
    """Which rule of reuse, how much memory, which factor."""
    if options.data is not None or not set(options.tasks or ()) <= set(STUDIES):
        raise SystemExit(f"--study reuse has the tasks {', '.join(STUDIES)}; got {options.data or ', '.join(options.tasks)}")
    is_evidence = options.out is None and not options.quick
    folder = options.out or (Path("runs/learning-quick") if options.quick else RESULTS)
    every = [study.quick() if options.quick else study for study in STUDIES.values()]
    seeds = QUICK_SEEDS if options.quick else FULL_SEEDS
    stores = {study.task.name: Store(folder, f"{study.task.name}_reuse", ReuseRow) for study in every}
    if not options.tables_only:
        asked_again = [study for name, study in AGAIN.items() if name in (options.tasks or AGAIN)]
        chosen = [study for study in every if study.task.name in (options.tasks or STUDIES)]
        run_reuse([] if options.quick else asked_again, AGAIN_SEEDS, stores, options.processes, options.accelerator)
        run_reuse(chosen, seeds, stores, options.processes, options.accelerator)
    runs = [ReuseRuns(ReuseProgress(study, seeds, stores[study.task.name].rows)) for study in every]
    again = [ReuseRuns(ReuseProgress(study, AGAIN_SEEDS, stores[study.task.name].rows)) for study in AGAIN.values()]
    write_reuse_report(runs, again, DOCS / "evidence.md" if is_evidence else folder / "reuse.md", is_quick=options.quick)


def chosen_tasks(options: argparse.Namespace) -> list[Task]:
    """Those of the bundled data, or the one on data that the user has."""
    if not set(options.tasks or ()) <= set(TASKS):
        raise SystemExit(f"--study findings has the tasks {', '.join(TASKS)}; got {', '.join(options.tasks)}")
    if options.data is None:
        tasks = [TASKS[name] for name in options.tasks or TASKS]
    elif options.root is None:
        raise SystemExit(f"--data {options.data} needs --root: the folder that holds it, as torchvision.datasets reads it")
    else:
        tasks = [DATA[options.data](options.root)]
    return [task.quick() for task in tasks] if options.quick else tasks


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five minutes: every table, no evidence")
    parser.add_argument(
        "--study", choices=("findings", "reuse"), default="findings", help="the paper's findings, or rules of reuse"
    )
    parser.add_argument("--tasks", nargs="+", choices={**TASKS, **STUDIES}, help="these tasks alone (default: all of the study)")
    parser.add_argument("--data", choices=DATA, help="the paper's data; needs --root")
    parser.add_argument("--root", type=Path, help="where these data are")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--accelerator", default="cpu", help="as in Trainer")
    parser.add_argument("--tables-only", action="store_true", help="no runs: tables and plots of those that are there")
    parser.add_argument("--out", type=Path, help="folder of the CSV files (benchmarks/results/learning)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
