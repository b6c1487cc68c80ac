"""The programs in examples/ run as a user would start them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(program: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_smallest_program_uses_every_example_twice(tmp_path: Path) -> None:
    output = run("minimal.py", cwd=tmp_path)
    fresh, echoed = map(int, re.search(r"EchoCounts\(fresh=(\d+), echoed=(\d+)", output).groups())  # type: ignore[union-attr]
    assert fresh + echoed == 4 * 512
    assert abs(fresh - (fresh + echoed) / 2) <= 2 * 2 * 32  # within the buffer: two batches for each of two workers


def test_the_demo_prints_its_table_and_saves_its_plot(tmp_path: Path) -> None:
    output = run("digits.py", "--quick", "--root", str(tmp_path), cwd=tmp_path)
    assert "speed-up" in output.lower()
    assert "bound" in output.lower()
    plots = list(tmp_path.rglob("*.png"))
    assert any(plot.read_bytes()[:4] == b"\x89PNG" and plot.stat().st_size > 10_000 for plot in plots)
