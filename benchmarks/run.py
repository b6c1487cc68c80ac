"""All benchmarks: prints tables while it runs and writes them as CSV. ``make bench``; see README.md.

The comparison partner of each figure runs in the same process, in turn with what is compared.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch
from cache import cache
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
from report import Table, machine
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
from target_idle import target_idle
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
    stalls,
    stalls_reads,
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
)
_BENCHMARKS = {run.__name__: run for run in _RUNS}
_HERE = Path(__file__).parent


def main() -> int:
    """Runs what is asked for; the number of figures that miss their requirement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of a quarter of an hour; less exact")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=_BENCHMARKS,
        default=list(_BENCHMARKS),
        help="these benchmarks alone, and all whose names begin so: sharing, sharing_costs and so on",
    )
    parser.add_argument("--out", type=Path, help="folder for the CSV files (benchmarks/results, or runs/bench if --quick)")
    options = parser.parse_args()
    folder = options.out or (Path("runs/bench") if options.quick else _HERE / "results")
    logging.getLogger("lightning_echo").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # of the main process: it shares the cores with the workers
    load_before, failures = os.getloadavg()[0], 0
    for name in [name for name in _BENCHMARKS if any(name == only or name.startswith(f"{only}_") for only in options.only)]:
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
