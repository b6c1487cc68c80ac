"""A partitioned cache in a Trainer on two simulated nodes (partitioned_trainer_runs.py)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import partitioned_trainer_runs
import pytest
from partitioned_trainer_runs import LENGTH, results_of

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], str]]:
    """What each node has seen, and what it printed."""
    folder = tmp_path_factory.mktemp("nodes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, partitioned_trainer_runs.__file__, str(folder)]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for rank in range(2)
    ]
    return results_of(started, folder)


def test_a_training_sees_the_same_and_learns_the_same_as_without_a_cache(nodes: list[tuple[dict[str, Any], str]]) -> None:
    for node, _ in nodes:
        assert node["with"]["seen"] == node["without"]["seen"]
        assert node["with"]["weights"] == node["without"]["weights"]
        assert node["with"]["seen"]


def test_the_two_nodes_read_the_data_once(nodes: list[tuple[dict[str, Any], str]]) -> None:
    assert sum(node["with"]["examples"] for node, _ in nodes) == LENGTH
    reads = sum(node["with"]["reads"] for node, _ in nodes)
    repeated = 3 * len(nodes)  # the audits of a worker: the 1st, 10th and 100th hit
    assert LENGTH <= reads <= LENGTH + repeated
    assert reads < sum(node["without"]["reads"] for node, _ in nodes)


def test_what_came_from_other_nodes_is_in_the_reports_and_in_the_summary(nodes: list[tuple[dict[str, Any], str]]) -> None:
    (first, printed), (second, _) = nodes
    assert first["with"]["received"] == second["with"]["received"], "it is that of the job"
    assert 0 < first["with"]["received"] < 1
    assert first["with"]["exchange"] > 0
    assert first["without"]["received"] is first["without"]["exchange"] is None
    text = " ".join(printed.split())
    assert (
        f"100% of the last epoch's fresh examples came from it, {first['with']['received'] * 100:.0f}% from other nodes" in text
    )
