"""``python train.py analyze``: the same configuration as fit, a report, and files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock

import lightning.pytorch as pl
import pytest
import torch
import yaml
from analyses import ANALYSIS
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_echo import CacheConfig, EchoCallback, EchoCLI, StagedDataset
from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.command import Analyzes
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import CheckedSetting, StallAnalysis, promising

FEW_STEPS = ("--trainer.max_steps=2", "--trainer.limit_val_batches=0")
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Model(BoringModel):
    """Its optimizer and its width come from the command line."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.width = width


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        examples = StagedDataset.of([torch.ones(32)] * 400, augment=torch.neg)
        return DataLoader(examples, self.batch_size, num_workers=1)

    def val_dataloader(self) -> None:
        pytest.fail("an analysis does not validate")


class Own(pl.Trainer):
    """A user's Trainer, with an option of its own."""

    def __init__(self, *, mood: str = "good", accelerator: str = "cpu", **kwargs: Any) -> None:
        super().__init__(accelerator=accelerator, **kwargs)


@pytest.fixture(autouse=True)
def _a_program_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything leaves is gone afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def run(*arguments: str, model: type = Model, data: type = Data, **options: Any) -> EchoCLI:
    defaults = {"trainer_defaults": QUIET, "save_config_callback": None, "seed_everything_default": False}
    return EchoCLI(model, data, args=list(arguments), **{**defaults, **options})


def test_it_prints_a_report_saves_the_analysis_and_does_not_train_the_users_trainer(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    files = ("--html=page.html", "--png=new/picture.png", "--apply=advice.yaml")
    with caplog.at_level("INFO"):
        cli = run("analyze", "--data.batch_size=50", "--verify", "--trainer.precision=64-true", *files, trainer_class=Own)
    assert "lightning_echo: analyzing: 8 steps in each phase: the training loader has no more batches" in caplog.messages
    assert len([message for message in caplog.messages if message.endswith(" s left)")]) > 8
    analysis = StallAnalysis.from_json(tmp_path / "analysis.json")
    assert (analysis.stages.batch_size, analysis.stages.workers) == (50, 1)
    assert (
        [each.setting for each in analysis.checked]
        == [each.setting for each in analysis.proved]
        == list(promising(analysis.verdict))
    )
    said = capsys.readouterr().out
    assert "Tried: predicted against measured" in said
    verdict, *_, written = said.removeprefix("Verdict\n").split("\n\n")
    assert " ".join(verdict.split()) == analysis.verdict.message
    assert written == f"Written: {tmp_path / 'analysis.json'}, page.html, new/picture.png, advice.yaml\n"
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((tmp_path / "advice.yaml").read_text()).get("echo", {}) == analysis.verdict.setting.options
    assert isinstance(cli.trainer, Own)
    assert isinstance(cli.trainer, Analyzes)
    assert (cli.trainer.global_step, cli.trainer.analyzed_kwargs["precision"]) == (0, "64-true")
    assert any(isinstance(callback, EchoCallback) for callback in cli.trainer.callbacks)


@pytest.mark.usefixtures("analyzed_at_once")
@pytest.mark.filterwarnings("ignore:.*configure_optimizers. will be overridden")
def test_a_configuration_saved_by_fit_is_accepted(tmp_path: Path) -> None:
    trainer = {**QUIET, "logger": True, "fast_dev_run": False, "max_steps": 1}
    fitted = ("fit", "--trainer.limit_val_batches=0", "--trainer.default_root_dir=log", "--optimizer=Adam", "--echo.factor=4")
    run(*fitted, save_config_callback=SaveConfigCallback, trainer_defaults=trainer)
    (config,) = tmp_path.rglob("config.yaml")
    run("analyze", f"--config={config}", "--steps=10", "--json=other.json")
    assert StallAnalysis.from_json(tmp_path / "other.json") == ANALYSIS
    assert not (tmp_path / "analysis.json").exists()


def test_a_trainer_class_that_is_a_function_has_no_such_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    def build(accelerator: str = "cpu") -> pl.Trainer:
        return pl.Trainer(accelerator=accelerator)

    with pytest.raises(SystemExit):
        run("analyze", trainer_class=build, trainer_defaults={})
    assert "analyze" in capsys.readouterr().err


@pytest.fixture
def analyzed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: the analysis is there."""
    tried = CheckedSetting(ANALYSIS.verdict.setting, ANALYSIS.real)
    monkeypatch.setattr(StallAnalyzer, "run", lambda *args: ANALYSIS)
    monkeypatch.setattr(StallAnalyzer, "prove", lambda self, analysis, seconds: analysis.with_check(tried))


@pytest.mark.usefixtures("analyzed_at_once")
@pytest.mark.parametrize(("flag", "tried"), [(["--verify"], 1), (["--verify", "false"], 0)])
def test_the_advice_is_tried_where_the_flag_is_given(
    flag: list[str], tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "analyze", "--steps=4", *flag])
    said = list(sys.argv)
    EchoCLI(Model, Data, trainer_defaults=QUIET, save_config_callback=None, seed_everything_default=False)
    assert len(StallAnalysis.from_json(tmp_path / "analysis.json").checked) == tried
    assert sys.argv == said


@pytest.mark.usefixtures("analyzed_at_once")
def test_the_analysis_is_saved_whatever_happens_when_its_advice_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, seconds: float) -> None:
        raise ValueError("a second storage is missing here")

    monkeypatch.setattr(StallAnalyzer, "prove", refuse)
    with caplog.at_level("INFO"):
        run("analyze", "--verify=true")
    assert "nothing was proved: a second storage is missing here" in caplog.text
    monkeypatch.setattr(StallAnalyzer, "prove", lambda *args, seconds: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("analyze", "--verify")
    for name in ("analysis.json", "analysis_1.json"):  # no other is overwritten
        assert StallAnalysis.from_json(tmp_path / name) == ANALYSIS


def test_a_file_that_exists_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StallAnalyzer, "run", lambda *args: pytest.fail("it was measured"))
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="apply must be a new file, got 'mine', which exists"):
        run("analyze", "--apply=mine")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.usefixtures("analyzed_at_once")
def test_fit_takes_the_advice_beside_its_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {"cached_fraction": 0.5, "hold": "loaded", "cache_size": "2MiB"}
    setting = TrainingSetting(workers=3, factor=2.5, insertion_point="before_augmentation", **cached)
    verdict = PropertyMock(return_value=replace(ANALYSIS.verdict, setting=setting))
    monkeypatch.setattr(StallAnalysis, "verdict", verdict)
    own = {"data": {"batch_size": 10}, "echo": {"factor": 4, "buffer_size": 20}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(own))
    run("analyze", "--config=base.yaml", "--apply=advice.yaml")
    loader = run("fit", "--config=base.yaml", "--config=advice.yaml", *FEW_STEPS).trainer.train_dataloader
    assert (loader.factor, loader.insertion_point) == (2.5, "before_augmentation")
    assert loader.cache == CacheConfig("2MiB", hold="loaded")
    assert (loader.buffer_size, loader.loader.batch_size) == (20, 10)  # what the advice does not speak of
    assert "Set num_workers=3 where your program sets it" in (tmp_path / "advice.yaml").read_text()
