"""Sharing on a Ray cluster that asks for a token (ray_token_runs.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

PROGRAM = Path(__file__).with_name("ray_token_runs.py")


def test_on_a_cluster_with_tokens_one_node_reads_for_both_and_nothing_is_warned_of(tmp_path):
    paths = [str(PROGRAM.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(sorted(indices), warned) for indices, warned in found["results"]] == [(list(range(48)), [])] * 2
    first, second = found["logs"]
    assert "this node reads for all nodes" in first
    assert "reads for this node" in second
