"""The example with a cache runs as a user would start it, is short, and what it prints is right."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "cached_folder.py"


@pytest.mark.program
def test_half_of_the_folder_is_read_in_each_later_epoch(tmp_path):
    assert len(PROGRAM.read_text().splitlines()) <= 60
    done = subprocess.run([sys.executable, str(PROGRAM)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [int(epoch) for epoch in re.findall(r"^epoch (\d): \d+\.\d\d s$", done.stdout, re.MULTILINE)] == [0, 1, 2]
    counts = dict(re.findall(r"(\w+)=(\d+)", re.search(r"CacheCounts\(.*\)", done.stdout)[0]))
    held, examples = int(counts["examples"]), 512
    assert examples * 0.45 < held < examples * 0.55
    assert (int(counts["hits"]), int(counts["misses"])) == (2 * held, examples + 2 * (examples - held))
    assert not list(tmp_path.iterdir())
