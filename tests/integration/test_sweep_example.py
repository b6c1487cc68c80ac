"""The example of a sweep runs as a user would start it, and prints three times."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep.py"


@pytest.mark.program
@pytest.mark.timeout(410)  # nine processes, each of which imports torch and Lightning
def test_the_sweep_prints_the_time_alone_apart_and_shared(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=400, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^(.*): (\d+\.\d) s each$", done.stdout, flags=re.MULTILINE)
    assert [what for what, _ in found] == [
        "one training",
        "three trainings, each reads for itself",
        "three trainings, one reads for all",
    ]
    assert all(float(seconds) > 0 for _, seconds in found)
