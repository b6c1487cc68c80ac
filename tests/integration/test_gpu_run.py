"""``benchmarks/gpu/run.sh`` as it is typed on a GPU machine: in miniature, and what it can import there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.metadata import distribution, requires
from pathlib import Path

import psutil
import pytest
from gpu.images import write_images
from gpu.plan import ALONE, SHARED, STAGES, TENSORSOCKET
from gpu.rows import COLUMNS, read_rows
from gpu.setting import Setting
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

declared_only = pytest.importorskip("declared_only")

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.program, pytest.mark.slow, pytest.mark.own_interpreter]
# What a GPU machine has: torch and what trains with it, and what tests need.
THERE = ("torch", "torchvision", "lightning", "torchmetrics", "cloudpickle", "pytest", "pytest-timeout", "pillow", "pyyaml")


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


@pytest.mark.parametrize("started", [1, 2])  # 1: while the stage is still inside of `Popen`
def test_trainings_that_share_end_with_the_stage_that_is_ended(started: int, tmp_path: Path) -> None:
    setting = Setting(tmp_path / "out", tmp_path / "data", tmp_path / "scratch", is_tiny=True)
    write_images(setting.data / "train", 0, 80, (80, 60), seconds=60)
    setting.note("images", folder=str(setting.data), size=(80, 60), train=80)
    paths = os.pathsep.join(map(str, (ROOT / "benchmarks", ROOT)))
    stage = subprocess.Popen(
        [sys.executable, "-m", "gpu.sharing", ALONE], env={**os.environ, **setting.environment, "PYTHONPATH": paths}
    )
    began = psutil.Process(stage.pid)
    try:
        while len(began.children()) < started:
            assert stage.poll() is None
            time.sleep(0.001)
        stage.terminate()
        assert stage.wait(30) != 0
        (row,) = read_rows(setting.out, "sharing")
        assert (row["how"], row["said"]) == (ALONE, "ended by the driver"), "what is known by then is written all the same"
    finally:
        stage.kill()
    trainings = [process for process in psutil.process_iter() if _works_in(process, setting.scratch)]
    _, alive = psutil.wait_procs(trainings, timeout=10)
    for process in alive:
        process.kill()
    assert alive == []


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(str(folder) in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    environment["GPU_WHEELS"] = str(tmp_path / "none")
    ended = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "run.sh")], env=environment, capture_output=True, text=True, timeout=120
    )
    said = "No GPU here: nothing was measured. --tiny runs all of it on the processor.\n"
    assert (ended.returncode, ended.stdout) == (0, said)
    assert list(tmp_path.iterdir()) == []


def wheels() -> list[Requirement]:
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_what_the_wheels_need_is_a_wheel_too_or_is_there() -> None:
    there = set(declared_only.closure(THERE)) | {canonicalize_name(each.name) for each in wheels()}
    needed = {canonicalize_name(need.name) for each in wheels() for need in declared_only.chosen(requires(each.name) or ())}
    assert needed - there == set()


def test_with_the_wheels_alone_everything_is_imported_in_a_bare_environment(tmp_path: Path) -> None:
    """No index, nothing of this environment but what a GPU machine has, and the wheels."""
    shown = {**declared_only.closure(THERE), **{each.name: distribution(each.name) for each in wheels()}}
    for each in ("lightning-echo", "scikit-learn", "matplotlib", "hypothesis", "rich"):
        shown.pop(each, None)
    declared_only.show(shown.values(), tmp_path / "site")
    lines = [
        "import omegaconf, jsonargparse, tensorsocket.producer, tensorsocket.consumer",
        "import lightning_echo, lightning_echo.cli, lightning_echo.__main__",
        "from lightning_echo import EchoCallback, EchoDataModule, StallAnalyzer, CacheConfig, ShareConfig, EchoCLI",
        "import gpu.checks, gpu.data, gpu.feed, gpu.sharing, gpu.accuracy, gpu.page, gpu.__main__",
        "import importlib.util",
        "assert all(importlib.util.find_spec(name) is None for name in ('sklearn', 'matplotlib', 'hypothesis', 'pip'))",
        "print('imported')",
    ]
    paths = os.pathsep.join(map(str, (tmp_path / "site", ROOT, ROOT / "benchmarks")))
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [sys.executable, "-S", "-c", "\n".join(lines)], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert ended.stdout.split() == ["imported"], ended.stderr[-2000:]


def test_a_wheel_that_does_not_fit_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "none-1.0-cp27-cp27m-win32.whl").write_bytes(b"")
    environment = {**os.environ, "PYTHON": sys.executable, "GPU_WHEELS": str(tmp_path)}
    ended = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0
    assert "not installed" in ended.stdout
    assert re.search(r"--tiny +all of it in miniature", ended.stdout)
