"""A study of Optuna, whose trainings share one reader."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sharing_runs import wait_until

from lightning_echo.share.config import log_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "optuna_sweep.py"


pytestmark = pytest.mark.usefixtures("own_folder")


def trainings_served(name):
    """How many trainings have left the reader of a name; a second reader begins a log of its own."""
    return len(re.findall("has left$", Path(log_of(name)).read_text(), flags=re.MULTILINE))


@pytest.mark.program
def test_the_study_of_the_example_has_one_reader_in_processes_and_in_threads():
    pytest.importorskip("optuna")
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"8 trials, best loss \S+", done.stdout.strip())
    wait_until(lambda: trainings_served("study") == 8, "the reader has seen the last one leave")
