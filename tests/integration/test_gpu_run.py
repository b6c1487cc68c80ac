"""``benchmarks/gpu/run.sh`` as it is typed on a GPU machine, in miniature."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.plan import ALONE, SHARED, STAGES, TENSORSOCKET
from gpu.rows import COLUMNS, read_rows

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.program, pytest.mark.slow, pytest.mark.own_interpreter]


@pytest.mark.alone  # a dozen processes that import torch, with limits of their own
@pytest.mark.timeout(410)
def test_all_of_it_runs_in_miniature(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "GPU_SECONDS": "370", "OMP_NUM_THREADS": "1"}
    environment["GPU_WHEELS"] = str(tmp_path / "no-wheels")
    ended = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--tiny"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    log = (out / "log.txt").read_text()
    assert ended.returncode == 0, ended.stdout + log[-3000:]
    assert {file.name for file in out.iterdir()} == {*(f"{name}.csv" for name in COLUMNS), "gpu.md", "log.txt"}
    ran = {(row["stage"], row["part"]) for row in read_rows(out, "stages") if row["outcome"] == "ran"}
    assert ran == {(stage.name, part) for stage in STAGES for part in stage.parts if not part.endswith("seed 2")}
    tests = read_rows(out, "tests")
    assert len(tests) > 30
    assert [row for row in tests if row["outcome"] not in ("passed", "skipped")] == []
    measured = [row for row in read_rows(out, "feed") if row["how"] == "measured" and row["arm"] != "loader alone"]
    assert [float(row["images per second"]) > 0 for row in measured] == [True] * 9
    shared = {row["how"]: row for row in read_rows(out, "sharing")}
    assert {how: row["said"] for how, row in shared.items()} == dict.fromkeys((SHARED, TENSORSOCKET, ALONE), "")
    assert (shared[SHARED]["lost"], shared[SHARED]["twice"]) == ("0", "0")
    assert int(shared[SHARED]["passes"]) >= 2
    assert {row["arm"] for row in read_rows(out, "accuracy")} == {
        part.removesuffix(", seed 1") for _, part in ran if "seed" in part
    }
    assert "**No evidence**" in (out / "gpu.md").read_text()
    assert not (tmp_path / "runs").exists()
