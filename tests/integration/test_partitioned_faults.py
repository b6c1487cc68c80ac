"""A partitioned cache when a node ends, dies, or cannot read what it holds (partitioned_fault_runs.py)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import partitioned_fault_runs
import pytest
from partitioned_fault_runs import TIME_OUT_SECONDS

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 240
ENDED = "ended, with threads ['MainThread']"


def ranks_of(fault, folder):
    """Runs both ranks. Returns for each its exit status, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, partitioned_fault_runs.__file__, str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), fault], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for rank in range(2)
    ]
    try:
        first = started[0].communicate(timeout=MOST_SECONDS)[0]
        if fault == "stopped":
            started[1].kill()
        printed = [first, started[1].communicate(timeout=MOST_SECONDS)[0]]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, printed, strict=True)]


@pytest.mark.parametrize("fault", ["different ends", "stopped for a while", "unreadable"])
def test_nodes_go_on_to_the_end_and_say_if_it_is_without_an_exchange(fault, tmp_path):
    ranks = ranks_of(fault, tmp_path)
    for status, printed in ranks:
        assert (status, printed.count(ENDED)) == (0, 1), printed
    said = "the nodes do not exchange examples any more, and each reads what it does not hold: RuntimeError: another node cannot"
    assert (said in ranks[0][1]) == (fault == "unreadable")


def test_a_node_that_dies_ends_the_other_one_as_ddp_ends_it(tmp_path):
    (status, printed), (killed, _) = ranks_of("killed", tmp_path)
    assert killed == -signal.SIGKILL
    assert status > 0
    assert "in all_reduce" in printed, "the error is that of the training's own collective"
    assert printed.rstrip().splitlines()[-1].split(": ")[-1], "and says what happened"


def test_a_node_that_hangs_ends_the_other_one_within_the_time_out_of_its_own_collectives(tmp_path):
    began = time.monotonic()
    (status, printed), _ = ranks_of("stopped", tmp_path)
    assert status > 0
    assert "in all_reduce" in printed, "the error is that of the training's own collective"
    assert TIME_OUT_SECONDS < time.monotonic() - began < TIME_OUT_SECONDS + 60, "not the two minutes of the exchange's own"
