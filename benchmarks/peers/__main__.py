"""Side by side with what people use instead: prints the tables, writes them as CSV and Markdown. ``make peers``."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent))  # the folder is run, but its files are a package beside the other benchmarks
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}  # a quiet TensorFlow, which MONAI imports, too

import torch  # noqa: E402
from markdown import replace_section  # noqa: E402
from trainer import be_quiet  # noqa: E402

from peers.loaders import PEERS  # noqa: E402
from peers.speed import FULL, QUICK, speed  # noqa: E402
from peers.tables import correctness, failures, place  # noqa: E402

_PAGE = _HERE.parents[1] / "docs" / "evidence.md"


def main() -> int:
    """Measures what is asked for; how often ours is not right, or slower than a peer."""
    parser = argparse.ArgumentParser("benchmarks/peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes instead of five; less exact, docs are left alone")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="these alone")
    parser.add_argument("--out", type=Path, help="folder for the files (benchmarks/results, or runs/peers if --quick)")
    options = parser.parse_args()
    folder = options.out or (Path("runs/peers") if options.quick else _HERE.parent / "results")
    be_quiet()
    warnings.simplefilter("ignore")  # of the peers, too
    torch.set_num_threads(1)  # it shares the cores with the workers
    load_before = os.getloadavg()[0]
    facts = correctness(options.only, 2048 if options.quick else 4096)
    facts.print()
    rates = speed([name for name in options.only if PEERS[name].version], QUICK if options.quick else FULL)
    rates.print()
    machine = place("--quick" if options.quick else "none", load_before)
    machine.print()
    tables = [rates, facts, machine]
    for table in tables:
        table.write(folder)
    text = "\n".join(each.markdown() for each in tables)
    (folder / "peers.md").write_text(text)
    is_complete = not options.quick and options.out is None and options.only == list(PEERS)
    if is_complete:
        replace_section(_PAGE, "peers", text)
    behind = [row[0] for row in rates.rows if row[-1] == "behind"]
    missed = failures(facts) + len(behind)
    print(f"\nWritten to {folder}/peers*" + (f" and {_PAGE.name}." if is_complete else "."))
    print(f"Ours is not right in {failures(facts)} rows, and slower than: {', '.join(map(str, behind)) or 'none'}.")
    return missed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
