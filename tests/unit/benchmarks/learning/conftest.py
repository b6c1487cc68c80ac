"""The modules of a benchmark import each other by plain names, as in the program that runs them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "learning"))
