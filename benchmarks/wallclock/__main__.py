"""Wall-clock: time to the target behind a source R times as slow as the step. ``make wallclock``; goes on where it stopped.

First each stage is measured by itself, and the delay per read chosen; then the runs follow, one at a time, each a row of
``benchmarks/results/wallclock/runs.csv``. Tables and plot are made of the rows. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent))  # the folder is run, but its files are a package beside the other benchmarks

import torch  # noqa: E402
from learning.digits import DIGITS  # noqa: E402
from learning.due import Progress  # noqa: E402
from learning.language_model import LANGUAGE_MODEL  # noqa: E402
from learning.rules import FULL, QUICK  # noqa: E402
from learning.store import Store  # noqa: E402
from learning.task import Task  # noqa: E402
from markdown import replace_section  # noqa: E402
from report import machine, progress  # noqa: E402

from wallclock.plans import Plan, plans_of, points_by_learning  # noqa: E402
from wallclock.plot_times import save_plot  # noqa: E402
from wallclock.speedups import all_tables  # noqa: E402
from wallclock.stages import WORKERS, Stage, measure_basis, measure_stage, points_to_run, usable_cores  # noqa: E402
from wallclock.timed import TimedRow, timed_run  # noqa: E402

_TASKS = {task.name: task for task in (DIGITS, LANGUAGE_MODEL)}
_RESULTS = _HERE.parent / "results"
_PAGE = _HERE.parents[1] / "docs" / "evidence.md"


def main() -> int:
    """Measures, trains and reports; how many goals are missed."""
    options = parse_arguments()
    folder = options.out or (Path("runs/wallclock-quick") if options.quick else _RESULTS / "wallclock")
    load_before = os.getloadavg()[0]
    torch.set_num_threads(1)
    stages, runs = Store(folder, "stages", Stage), Store(folder, "runs", TimedRow)
    tasks = [_TASKS[name].quick() if options.quick else _TASKS[name] for name in options.tasks]
    if not options.report:
        for task in tasks:
            learned = learned_of(task, options)
            measure_missing(task, learned, stages, options)
            run_due(task, plans(task, learned, stages, options), stages, runs)
        machine(f"{'--quick, ' if options.quick else ''}seeds {options.seeds}, R {options.ratios}", load_before).write(folder)
    wanted = [plan for task in tasks for plan in plans(task, learned_of(task, options), stages, options)]
    rows = [row for row in runs.rows if row.plan in wanted]
    if len(rows) < len(runs.rows):
        progress(f"{len(runs.rows) - len(rows)} runs left out: of other seeds or R, or not with the rate that is tuned by now")
    return report(stages.rows, rows, folder, options)


def learned_of(task: Task, options: argparse.Namespace) -> Progress:
    """How far the learning experiments are, which choose insertion point and learning rates."""
    if options.quick:
        return Progress(task, QUICK, [])
    return Progress(task, FULL, Store(options.learning, task.name).rows)


def measure_missing(task: Task, learned: Progress, stages: Store, options: argparse.Namespace) -> None:
    """Measures each stage by itself; on a later call what was measured first goes on to hold."""
    measured = {stage.ratio: stage for stage in stages.rows if stage.task == task.name}
    missing = [ratio for ratio in (0.0, *options.ratios) if ratio not in measured]
    if not missing:
        return
    seed, batches = options.seeds[0], 32 if options.quick else 96
    progress(f"{task.name}: step, reading and what is redone, each by itself")
    basis = measure_basis(task, seed, batches, rounds=1 if options.quick else 3)
    points = points_to_run(points_by_learning(task, learned), basis, WORKERS, usable_cores())
    for ratio in missing:
        progress(f"{task.name}: upstream time at R = {ratio:g}")
        stages.add(measure_stage(task, ratio, basis, points, seed, batches))


def plans(task: Task, learned: Progress, stages: Store, options: argparse.Namespace) -> list[Plan]:
    """The task's runs; none while its stages are not measured."""
    points = [stage.points.split() for stage in stages.rows if stage.task == task.name]
    return plans_of(task, learned, points[0], options.ratios, options.seeds) if points else []


def run_due(task: Task, wanted: Sequence[Plan], stages: Store, runs: Store) -> None:
    """Does the runs that are not done, one at a time."""
    done = {row.plan for row in runs.rows}
    due = [plan for plan in wanted if plan not in done]
    for number, plan in enumerate(due, 1):
        stage = next(one for one in stages.rows if (one.task, one.ratio) == (plan.task, plan.ratio))
        row = timed_run(task, plan, stage)
        runs.add(row)
        progress(
            f"{task.name} {number}/{len(due)}, seed {plan.seed}, R = {plan.ratio:g}, {plan.arm}: target after "
            f"{row.seconds_to_target:.3g} s, {row.steps_to_target:g} steps, {row.fresh_to_target:g} fresh"
        )


def report(stages: Sequence[Stage], rows: Sequence[TimedRow], folder: Path, options: argparse.Namespace) -> int:
    """Tables on the screen and as CSV, the plot, and both in the page, where there is one; how many goals are missed."""
    tables = all_tables(stages, rows)
    for each in tables:
        each.print()
        each.write(folder)
    is_evidence = not (options.quick or options.out)
    plot = (_PAGE.parent if is_evidence else folder) / "wallclock.png"
    save_plot(plot, stages, rows)
    progress(f"rows, tables and machine in {folder}, plot {plot.name}" + (" (--quick: no evidence)" if options.quick else ""))
    if is_evidence and _PAGE.exists():
        picture = f"![Time to the target against R]({plot.name})"
        replace_section(_PAGE, "wallclock", "\n".join([*(each.markdown() for each in tables), picture]))
    return sum(each.failures for each in tables)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks/wallclock", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute: every table, no evidence")
    parser.add_argument("--report", action="store_true", help="no runs: tables and plot of those that are there")
    parser.add_argument("--tasks", nargs="+", choices=_TASKS, default=list(_TASKS), help="these tasks alone")
    parser.add_argument("--ratios", nargs="+", type=float, help="R, each (2 4 6; 4 with --quick)")
    parser.add_argument("--seeds", nargs="+", type=int, help="report seeds, paired (1 2 3 4; 1 with --quick)")
    parser.add_argument("--out", type=Path, help="folder of the CSV files (benchmarks/results/wallclock)")
    parser.add_argument("--learning", type=Path, default=_RESULTS / "learning", help="folder of the learning experiments' rows")
    options = parser.parse_args()
    options.ratios = options.ratios or ([4.0] if options.quick else [2.0, 4.0, 6.0])
    options.seeds = options.seeds or ([1] if options.quick else [1, 2, 3, 4])
    return options


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
