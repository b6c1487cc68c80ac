"""A partitioned cache when a node ends, dies, or cannot read what it holds (partitioned_fault_runs.py)."""

from __future__ import annotations

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


def ranks_of(fault: str, folder: Path) -> list[tuple[int, str]]:
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


def test_nodes_that_end_at_different_moments_end_in_peace(tmp_path: Path) -> None:
    for status, printed in ranks_of("different ends", tmp_path):
        assert (status, printed.count(ENDED)) == (0, 1), printed
        assert "do not exchange examples any more" not in printed


def test_a_node_that_dies_ends_the_other_one_as_ddp_ends_it(tmp_path: Path) -> None:
    (status, printed), (killed, _) = ranks_of("killed", tmp_path)
    assert killed == -signal.SIGKILL
    assert status > 0
    assert "in all_reduce" in printed, "the error is that of the training's own collective"
    assert printed.rstrip().splitlines()[-1].split(": ")[-1], "and says what happened"


def test_a_node_that_is_stopped_for_a_while_holds_up_the_other_one_and_both_go_on(tmp_path: Path) -> None:
    for status, printed in ranks_of("stopped for a while", tmp_path):
        assert (status, printed.count(ENDED)) == (0, 1), printed
        assert "do not exchange examples any more" not in printed


def test_a_node_that_hangs_ends_the_other_one_within_the_time_out_of_its_own_collectives(tmp_path: Path) -> None:
    began = time.monotonic()
    (status, printed), _ = ranks_of("stopped", tmp_path)
    assert status > 0
    assert "in all_reduce" in printed, "the error is that of the training's own collective"
    assert TIME_OUT_SECONDS < time.monotonic() - began < TIME_OUT_SECONDS + 60, "not the two minutes of the exchange's own"


def test_an_exception_on_one_node_ends_both(tmp_path: Path) -> None:
    (other, printed), (own, said) = ranks_of("exception", tmp_path)
    assert own > 0
    assert other > 0
    assert "ValueError: this rank has had enough" in said
    assert "in all_reduce" in printed


def test_where_a_node_cannot_read_what_it_holds_both_go_on_without_an_exchange_and_say_so(tmp_path: Path) -> None:
    ranks = ranks_of("unreadable", tmp_path)
    for status, printed in ranks:
        assert (status, printed.count(ENDED)) == (0, 1), printed
    said = "the nodes do not exchange examples any more, and each reads what it does not hold: RuntimeError: another node cannot"
    assert said in ranks[0][1]
