"""Tests that run side by side: a process that dies in a test is reported, also if a process that the test has forked lives on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.own_interpreter  # runs pytest
@pytest.mark.program
def test_a_process_that_dies_in_a_test_is_reported_while_its_children_live(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(
        "import multiprocessing, os, signal, time\n"
        "def test_that_dies():\n"
        "    multiprocessing.get_context('fork').Process(target=time.sleep, args=(100,)).start()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def test_after_it():\n"
        "    pass\n"
    )
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "unit" / "helpers")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=80, check=False)
    assert "crashed while running 'test_dies.py::test_that_dies'" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
