"""The Ray programs of examples/: trials that share one reader, and a training with workers on other nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sharing_runs import wait_until

from lightning_echo.share.config import log_of

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(320), pytest.mark.usefixtures("own_folder")]

ROOT = Path(__file__).parents[2]


def last_line(program: str) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own_cluster = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = {**own_cluster, "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled"}  # else Ray writes a token
    command = [sys.executable, str(ROOT / "examples" / program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_all_trials_of_the_example_have_one_reader():
    assert re.fullmatch(r"4 trials, best loss \S+", last_line("ray_tune.py"))
    log = Path(log_of("tune"))  # a second reader begins another log
    wait_until(lambda: log.read_text().count(" has left\n") == 4, "the reader has seen the last one leave")


def test_the_training_of_the_example_has_six_workers_on_other_nodes():
    assert re.fullmatch(r"2 workers: \d+ s; and 6 on three other nodes: \d+ s, .*", last_line("ray_workers.py"))
    log = Path(log_of("ray_workers_6")).read_text()
    assert len(re.findall(r"a worker on (.*) has begun\n", log)) == 6
    assert len(set(re.findall(r"a worker on (.*) has begun\n", log))) == 3
