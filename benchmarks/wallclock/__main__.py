"""Wall-clock: time to the target behind a source R times as slow as the step. ``make wallclock``; resumes where it stopped.

First each stage is measured by itself, and the delay per read chosen; then the runs follow, one at a time, each a row of
``benchmarks/results/wallclock/runs.csv``. Tables and plot are made of the rows. Which runs there are, and how they are judged:
``plans.py``, ``rules.py``. The learning rates are those of the study of reuse, which has to run before. Nothing else may run on
the machine. Estimated minutes of all seeds: R = 8 30, R = 4 9, R = 16 22; bursts 30, heavy tail 30. With --quick 5.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent))  # the folder is run, but its files are a package beside the other benchmarks

import torch  # noqa: E402
from learning.reuse.due import ReuseProgress  # noqa: E402
from learning.reuse.rows import ReuseRow  # noqa: E402
from learning.reuse.rules import FULL_SEEDS, HEADLINE_RATIO  # noqa: E402
from learning.reuse.studies import STUDIES, Study  # noqa: E402
from learning.store import Store  # noqa: E402
from markdown import replace_section  # noqa: E402
from report import machine, progress  # noqa: E402

from lightning_echo import EchoConfig  # noqa: E402
from wallclock.goals import all_tables  # noqa: E402
from wallclock.plans import RATIOS, SOURCE_RATIO, SOURCES, STEADY, TASKS, next_plan, rates_of, seeds_of  # noqa: E402
from wallclock.plot_times import save_bars, save_plot  # noqa: E402
from wallclock.rules import demand_tables  # noqa: E402
from wallclock.stages import Stage, measure_basis, measure_stage  # noqa: E402
from wallclock.stopwatch import LATE_STEP  # noqa: E402
from wallclock.timed import TimedRow, timed_run  # noqa: E402

_RESULTS = _HERE.parent / "results"
_BEFORE = _RESULTS / "wallclock_before_demand"
_PAGE = _HERE.parents[1] / "docs" / "evidence.md"


def main() -> int:
    """Measures, trains and reports; how many goals are missed."""
    options = parse_arguments()
    folder = options.out or (Path("runs/wallclock-quick") if options.quick else _RESULTS / "wallclock")
    load_before = os.getloadavg()[0]
    torch.set_num_threads(1)
    stages, runs = Store(folder, "stages", Stage), Store(folder, "runs", TimedRow)
    if not options.report:
        studies = [STUDIES[task].quick() if options.quick else STUDIES[task] for task in options.tasks]
        rates = {study.task.name: learned_rates(study, options) for study in studies}
        for study in studies:
            measure_missing(study, stages, options)
        run_due(studies, rates, stages, runs, options)
        machine(" ".join(sys.argv[1:]) or "none", load_before).write(folder)
    return report(stages.rows, runs.rows, folder, options)


def learned_rates(study: Study, options: argparse.Namespace) -> dict[float, float]:
    """The rates that the study of reuse has tuned, by factor; with --quick the middle of the grid."""
    if options.quick:
        rate = study.task.rates[len(study.task.rates) // 2]
        return {1.0: rate, **{float(ratio): rate for ratio in options.ratios}}
    rows = Store(options.learning, f"{study.task.name}_reuse", ReuseRow).rows
    return rates_of(study, ReuseProgress(study, FULL_SEEDS, rows), EchoConfig().reuse)


def measure_missing(study: Study, stages: Store, options: argparse.Namespace) -> None:
    """Measures each stage by itself; on a later call what was measured first goes on to hold."""
    measured = {(stage.source, stage.ratio) for stage in stages.rows if stage.task == study.task.name}
    missing = [cell for cell in cells_of(options) if cell not in measured]
    if not missing:
        return
    seed, batches = seeds_in(options, *missing[0])[0], 32 if options.quick else 96
    progress(f"{study.task.name}: step and reading, each by itself")
    basis = measure_basis(study.task, seed, batches, rounds=1 if options.quick else 3)
    for source, ratio in missing:
        progress(f"{study.task.name}, {source}: upstream time at R = {ratio:g}")
        stages.add(measure_stage(study.task, ratio, basis, seed, batches, source))


def run_due(
    studies: Sequence[Study], rates: dict[str, dict[float, float]], stages: Store, runs: Store, options: argparse.Namespace
) -> None:
    """Does the runs that are not done, one at a time."""
    for seed, source, ratio, study in _cases(studies, options):
        case = (study.task.name, source, ratio)
        stage = next(one for one in stages.rows if (one.task, one.source, one.ratio) == case)
        while True:
            done = [(row.plan, row.steps, row.last_factor) for row in runs.rows if row.task == study.task.name]
            plan = next_plan(study, rates[study.task.name], ratio, seed, done, source)
            if plan is None:
                break
            row = timed_run(study, plan, stage)
            runs.add(row)
            progress(
                f"{row.task}, seed {seed}, {source}, R = {ratio}, {row.arm}: {row.seconds:.3g} s, {row.steps} steps, "
                f"{sum(row.fresh_counts)} fresh, idle {row.late_idle:.3f} from step {LATE_STEP} on"
            )


def cells_of(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Source and R of what is asked for."""
    ratios = {source: options.ratios if source == STEADY else [SOURCE_RATIO] for source in options.sources}
    return [(source, ratio) for source in options.sources for ratio in ratios[source]]


def seeds_in(options: argparse.Namespace, source: str, ratio: int) -> Sequence[int]:
    """Those that are given, or those of a cell."""
    seeds = seeds_of(source, ratio)
    return options.seeds or (seeds[:1] if options.quick else seeds)


def _cases(studies: Sequence[Study], options: argparse.Namespace) -> Iterator[tuple[int, str, int, Study]]:
    cells = cells_of(options)
    for seed in dict.fromkeys(seed for cell in cells for seed in seeds_in(options, *cell)):
        for source, ratio in cells:
            for study in studies:
                if seed in seeds_in(options, source, ratio):
                    yield seed, source, ratio, study


def report(stages: Sequence[Stage], rows: Sequence[TimedRow], folder: Path, options: argparse.Namespace) -> int:
    """Tables on the screen and as CSV, the plot, and both in the page, where there is one; how many goals are missed."""
    before = Store(_BEFORE, "stages", Stage).rows, Store(_BEFORE, "runs", TimedRow).rows
    tables, of_demand = all_tables(stages, rows), demand_tables(stages, rows, before)
    for each in (*tables, *of_demand):
        if each.rows:
            each.print()
            each.write(folder)
    is_evidence = not (options.quick or options.out)
    plot = (_PAGE.parent if is_evidence else folder) / "wallclock.png"
    save_plot(plot, stages, rows)
    save_bars(plot.with_name("time_to_target.svg"), stages, rows, HEADLINE_RATIO)
    progress(f"rows, tables and machine in {folder}, plot {plot.name}" + (" (--quick: no evidence)" if options.quick else ""))
    if is_evidence and _PAGE.exists():
        picture = f"![Time to the target against R]({plot.name})"
        replace_section(_PAGE, "wallclock_demand", "\n".join(each.markdown() for each in of_demand if each.rows))
        if any(stage.source == STEADY for stage in stages):  # until then those of the `TargetIdle` before stand there
            replace_section(_PAGE, "wallclock", "\n".join([*(each.markdown() for each in tables), picture]))
    return sum(each.failures for each in (*tables, *of_demand))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks/wallclock", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="some minutes: every table, no evidence")
    parser.add_argument("--report", action="store_true", help="no runs: tables and plot of those that are there")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="these tasks alone")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), help="behind these alone")
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=int,
        choices=RATIOS,
        help="R of the steady source (all; 8 with --quick); the others have R = 8",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="paired (8 at R = 8, of which 3 at the other R; one with --quick)")
    parser.add_argument("--out", type=Path, help="folder of the CSV files (benchmarks/results/wallclock)")
    parser.add_argument("--learning", type=Path, default=_RESULTS / "learning", help="folder of the study's rows")
    options = parser.parse_args()
    options.ratios = options.ratios or ([8] if options.quick else list(RATIOS))
    return options


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
