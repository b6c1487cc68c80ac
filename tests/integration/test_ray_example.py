"""The Ray Tune program of examples/: one reader reads for all trials."""

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


def test_all_trials_of_the_example_have_one_reader():
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own_cluster = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = {**own_cluster, "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled"}  # else Ray writes a token
    command = [sys.executable, str(ROOT / "examples" / "ray_tune.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"4 trials, best loss \S+", done.stdout.strip().splitlines()[-1])
    log = Path(log_of("tune"))  # a second reader begins another log
    wait_until(lambda: log.read_text().count(" has left\n") == 4, "the reader has seen the last one leave")
