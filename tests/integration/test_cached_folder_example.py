"""The example with a cache runs as a user would start it, and what it prints is right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "cached_folder.py"
EXAMPLES = 512


@pytest.mark.program
def test_half_of_the_folder_is_read_in_each_later_epoch(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [int(epoch) for epoch in re.findall(r"^epoch (\d): \d+\.\d\d s$", done.stdout, re.MULTILINE)] == [0, 1, 2]
    counts = dict(re.findall(r"(\w+)=(\d+)", re.search(r"CacheCounts\(.*\)", done.stdout)[0]))
    held = int(counts["examples"])
    assert EXAMPLES * 0.45 < held < EXAMPLES * 0.55
    assert (int(counts["hits"]), int(counts["misses"])) == (2 * held, EXAMPLES + 2 * (EXAMPLES - held))
    assert not list(tmp_path.iterdir())


def test_it_is_short_and_says_at_its_top_what_is_held() -> None:
    lines = PROGRAM.read_text().splitlines()
    assert len(lines) <= 60
    assert "a cache that holds half" in lines[0]
