"""`examples/hydra` as a user would start it, and what `instantiate` makes of nodes that hold options of echoing."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Data, fit

from lightning_echo import CacheConfig, EchoCallback, EchoConfig, FactorSchedule, MetricGuard, ShareConfig

pytest.importorskip("hydra.utils", reason="hydra-core is not installed")  # `hydra` alone might be the folder of the example

HERE, EXAMPLE = Path(__file__).parent, Path(__file__).parents[2] / "examples" / "hydra"
EXAMPLES_OF_A_PASS, EPOCHS = 256, 2
NOTED = "data._target_=hydra_runs.NotedDataModule"


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    modules = os.pathsep.join(map(str, (HERE.parents[1], HERE)))
    environment = {**os.environ, "PYTHONPATH": modules, "LIGHTNING_ECHO_SHARED": str(cwd / "shared")}
    command = [sys.executable, str(EXAMPLE / "train.py"), *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*programs: subprocess.Popen[str]) -> None:
    try:
        for program in programs:
            printed, _ = program.communicate(timeout=120)
            assert program.returncode == 0, printed[-3000:]
    finally:
        for program in programs:
            program.kill()


def reports(folder: Path) -> list[dict[str, Any]]:
    """What echo_summary.json in Hydra's output folder says, epoch by epoch."""
    found: list[dict[str, Any]] = json.loads((folder / "lightning_logs" / "version_0" / "echo_summary.json").read_text())[
        "reports"
    ]
    return found


def losses(folder: Path) -> list[str]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file) if row["loss"]]


@pytest.mark.program
def test_a_run_echoes_by_its_overrides_and_the_saved_config_reproduces_it(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    finish(start("echo=factor", "echo.factor=4", f"hydra.run.dir={first}", cwd=tmp_path))
    assert [report["factor"] for report in reports(first)] == [4, 4]
    last = reports(first)[-1]
    assert last["fresh_examples"] + last["echoed_examples"] == EPOCHS * EXAMPLES_OF_A_PASS
    assert "factor 4" in (first / "train.log").read_text(), "Hydra's log has what lightning_echo says"
    finish(start(f"--config-path={first / '.hydra'}", f"hydra.run.dir={again}", cwd=tmp_path))
    assert len(losses(first)) == EPOCHS * EXAMPLES_OF_A_PASS // 32 // 4
    assert losses(again) == losses(first)


@pytest.mark.program
def test_the_jobs_of_a_sweep_each_have_their_factor_and_their_folder(tmp_path: Path) -> None:
    finish(start("--multirun", "echo=factor,auto", "trainer.max_epochs=1", f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path))
    constant, auto = (reports(tmp_path / "sweep" / job)[0] for job in ("0", "1"))
    assert (constant["factor"], constant["max_factor"]) == (2.5, None)
    assert auto["max_factor"] == 8, "auto is on demand"


@pytest.mark.program
def test_trainings_side_by_side_read_their_data_once(tmp_path: Path) -> None:
    reads = tmp_path / "reads.txt"
    options = [NOTED, f"+data.path={reads}", "echo=shared", "echo.share.linger_seconds=0", "+echo.share.window=16KiB"]
    finish(
        *(start(*options, f"model.rate={rate}", f"hydra.run.dir={tmp_path / rate}", cwd=tmp_path) for rate in ("0.01", "0.003"))
    )
    for rate in ("0.01", "0.003"):
        assert reports(tmp_path / rate)[-1]["fresh_examples"] == EPOCHS * EXAMPLES_OF_A_PASS
    assert max(report["shared_trainings"] for rate in ("0.01", "0.003") for report in reports(tmp_path / rate)) == 2
    count = len(reads.read_text().splitlines())
    # with what the reader has read ahead, and the few examples at which each training looks, to see whether the data is the same
    assert EPOCHS * EXAMPLES_OF_A_PASS <= count < 2 * EPOCHS * EXAMPLES_OF_A_PASS


def made(node: dict[str, Any], convert: str) -> Any:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    return instantiate(OmegaConf.create({**node, "_convert_": convert}))


CONVERT = pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
CACHE, SHARE = {"size": "8MiB", "hold": "loaded"}, {"name": "sweep", "wait_for": 2}
SCHEDULE = {"_target_": "lightning_echo.FactorSchedule", "factors": {0: 2, 2: 3}}


@CONVERT
def test_objects_of_the_package_are_made_in_whatever_way_hydra_converts_their_options(convert: str) -> None:
    both: dict[str, Any] = {"factor": 2, "cache": CACHE, "share": SHARE}
    assert made({"_target_": "lightning_echo.EchoConfig", **both}, convert) == EchoConfig(**both)
    assert made({"_target_": "lightning_echo.CacheConfig", **CACHE}, convert) == CacheConfig("8MiB", hold="loaded")
    assert made({"_target_": "lightning_echo.ShareConfig", **SHARE}, convert) == ShareConfig("sweep", wait_for=2)
    guard = {"_target_": "lightning_echo.MetricGuard", "controller": SCHEDULE, "patience": 2}
    callback = made({"_target_": "lightning_echo.EchoCallback", "controller": guard, "factor": 2}, convert)
    assert repr(callback.controller) == repr(MetricGuard(FactorSchedule({0: 2, 2: 3}), patience=2))
    loaders = {"labelled": {"factor": 2}, "rest": {"factor": 3, "cache": {"size": "8MiB"}}}
    module = {"_target_": "lightning_echo.EchoDataModule", "datamodule": {"_target_": "trainer_runs.Data"}, "loaders": loaders}
    assert str(made(module, convert)) == "EchoDataModule(Data, labelled factor 2, rest factor 3)"


@pytest.mark.parametrize("convert", ["none", "all"])
def test_a_trainer_with_its_callbacks_trains_as_one_that_is_made_by_hand(convert: str) -> None:
    options: dict[str, Any] = {"factor": 2, "insertion_point": "after_augmentation", "seed": 7, "buffer_size": 5, "cache": CACHE}
    by_hand = fit(Data(), callbacks=[EchoCallback(**options)], max_epochs=2)
    node = {"_target_": "lightning_echo.EchoCallback", "echo": options}
    quiet = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "num_sanity_val_steps": 0}
    hidden = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = made({"_target_": "lightning.Trainer", "callbacks": [node], **quiet, **hidden}, convert)
    model = made({"_target_": "trainer_runs.Recorder"}, convert)
    trainer.fit(model, datamodule=made({"_target_": "trainer_runs.Data"}, convert))
    loader = trainer.train_dataloader
    assert (loader.factor, loader.buffer_size, loader.cache) == (2, 5, CacheConfig("8MiB", hold="loaded"))
    assert model.batches == by_hand.model.batches
