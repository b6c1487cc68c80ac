"""All benchmarks: prints tables while it runs and writes them as CSV. ``make bench``; see README.md.

The comparison partner of each figure runs in the same process, in turn with what is compared.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch
from cache import cache
from claims import claims
from cluster import cluster
from crossings import crossings
from echoes import echoes
from factor_one import factor_one
from keeps_up import keeps_up
from measuring import measuring
from memory import memory
from partitioned import partitioned
from planning import planning, planning_memory, start
from protection import protection
from reads import reads
from report import Table, machine, progress
from scale import scale
from sharing import (
    in_own_folder,
    sharing,
    sharing_controllers,
    sharing_costs,
    sharing_handing_over,
    sharing_memory,
)
from sharing_cache import sharing_cache
from sharing_demand import sharing_demand
from sharing_peers import sharing_peers
from sharing_workers import sharing_workers
from speedup import speedup
from stalls import stalls, stalls_reads
from target_idle import target_idle, target_idle_out_of_reach
from tune import tune
from watching import watching

_RUNS = (
    speedup,
    factor_one,
    keeps_up,
    planning,
    planning_memory,
    start,
    memory,
    protection,
    watching,
    crossings,
    echoes,
    measuring,
    target_idle,
    target_idle_out_of_reach,
    claims,
    stalls,
    stalls_reads,
    tune,
    cache,
    sharing,
    sharing_costs,
    sharing_handing_over,
    sharing_memory,
    sharing_controllers,
    in_own_folder(sharing_demand),
    sharing_cache,
    sharing_workers,
    in_own_folder(sharing_peers),
    partitioned,
    scale,
    reads,
    cluster,
)
_BENCHMARKS = {run.__name__: run for run in _RUNS}
_HERE = Path(__file__).parent


def chosen(only: Iterable[str]) -> list[str]:
    """Returns the names of these benchmarks, and of all that begin so. None are all of them, where Ray is missing but `cluster`.

    Raises:
        SystemExit: If `cluster` is asked for without Ray.
    """
    names = [name for name in _BENCHMARKS if not only or any(name == each or name.startswith(f"{each}_") for each in only)]
    if "cluster" in names and find_spec("ray") is None:
        missing = "`cluster` needs Ray, which is not installed: pip install 'lightning-echo[ray]'"
        if only:
            raise SystemExit(missing)
        progress(f"left out: {missing}")
        names.remove("cluster")
    return names


def main() -> int:
    """Runs what is asked for; the number of figures that miss their requirement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of a quarter of an hour; less exact")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=_BENCHMARKS,
        default=[],
        help="these benchmarks alone, and all whose names begin so: sharing, sharing_costs and so on",
    )
    parser.add_argument("--out", type=Path, help="folder for the CSV files (benchmarks/results, or runs/bench if --quick)")
    options = parser.parse_args()
    names = chosen(options.only)
    folder = options.out or (Path("runs/bench") if options.quick else _HERE / "results")
    logging.getLogger("lightning_echo").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # of the main process: it shares the cores with the workers
    load_before, failures = os.getloadavg()[0], 0
    for name in names:
        found = _BENCHMARKS[name](options.quick)
        for table in [found] if isinstance(found, Table) else found:
            table.print()
            table.write(folder)
            failures += table.failures
    table = machine("--quick" if options.quick else "none", load_before)
    table.print()
    table.write(folder)
    print(f"\nWritten to {folder}/*.csv. " + (f"{failures} requirements MISSED." if failures else "All requirements met."))
    return failures


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
