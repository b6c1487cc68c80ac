"""``python train.py analyze``: the same configuration as fit, a report, and files."""

from __future__ import annotations

import sys
import time
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
from lightning_echo.analysis.analyzer import Analyzes, StallAnalyzer
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.analysis.verdict import VerdictKind

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


def test_it_prints_a_report_and_saves_the_analysis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = ("--html=page.html", "--png=new/picture.png", "--apply=advice.yaml")
    run("analyze", "--steps=10", "--data.batch_size=8", "--verify", *files)
    analysis = StallAnalysis.from_json(tmp_path / "analysis.json")
    assert (analysis.stages.batch_size, analysis.stages.workers) == (8, 1)
    assert [each.setting for each in analysis.checked] == [analysis.verdict.setting]
    said = capsys.readouterr().out
    assert "Tried: predicted against measured" in said
    verdict, *_, written = said.removeprefix("Verdict\n").split("\n\n")
    assert " ".join(verdict.split()) == analysis.verdict.message
    assert written == f"Written: {tmp_path / 'analysis.json'}, page.html, new/picture.png, advice.yaml\n"
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((tmp_path / "advice.yaml").read_text()).get("echo", {}) == analysis.verdict.setting.options


class SlowlyRead(StagedDataset):
    """A read takes 10 ms, and gives 40 kB. Half of it is enough for a step of 20 ms."""

    def __len__(self) -> int:
        return 400

    def read(self, index: int) -> bytes:
        time.sleep(0.01)
        return bytes(40_000)

    def decode(self, raw: bytes) -> torch.Tensor:
        return torch.ones(len(raw))

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return -example[:32]


class SlowData(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(SlowlyRead(), self.batch_size, num_workers=1)


class SlowModel(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_where_a_cache_is_advised_the_cache_is_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_echo.analysis.analyzer._cores_of_rank", lambda: 1)  # more workers would be enough
    run("analyze", "--steps=8", "--verify", "--apply=advice.yaml", model=SlowModel, data=SlowData)
    analysis = StallAnalysis.from_json(tmp_path / "analysis.json")
    setting = analysis.verdict.setting
    assert (analysis.verdict.kind, setting.hold) == (VerdictKind.cache, "raw")
    assert [each.setting for each in analysis.checked] == [setting]
    assert analysis.checked[0].step_seconds.median < 0.9 * analysis.step_seconds
    said = capsys.readouterr().out
    tried = said.split("Tried: predicted against measured")[1].split("\n\n")[0]
    assert f"{100 * setting.cached_fraction:.0f}% of the data set in a cache of raw items" in " ".join(tried.split())
    assert setting.line in " ".join(said.split())
    loader = run("fit", "--config=advice.yaml", *FEW_STEPS, model=SlowModel, data=SlowData).trainer.train_dataloader
    assert (loader.factor, loader.cache) == (1, CacheConfig(setting.cache_size, hold="raw"))


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. will be overridden")
@pytest.mark.parametrize("echo", [(), ("--echo.factor=4", "--echo.insertion_point=after_batching")])
def test_a_configuration_saved_by_fit_is_accepted(tmp_path: Path, echo: tuple[str, ...]) -> None:
    trainer = {**QUIET, "logger": True, "fast_dev_run": False, "max_steps": 1}
    fitted = ("fit", "--trainer.limit_val_batches=0", "--trainer.default_root_dir=log", "--optimizer=Adam", *echo)
    run(*fitted, save_config_callback=SaveConfigCallback, trainer_defaults=trainer)
    (config,) = tmp_path.rglob("config.yaml")
    run("analyze", f"--config={config}", "--steps=10", "--json=other.json")
    assert StallAnalysis.from_json(tmp_path / "other.json").stages.workers == 1
    assert not (tmp_path / "analysis.json").exists()


@pytest.mark.parametrize(
    ("flag", "tried"),
    [(["--verify"], 1), (["--verify", "true"], 1), (["--verify", "false"], 0), (["--verify=false"], 0), ([], 0)],
)
def test_the_advice_is_tried_where_the_flag_is_given(
    flag: list[str], tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "analyze", "--steps=4", *flag])
    said = list(sys.argv)
    EchoCLI(Model, Data, trainer_defaults=QUIET, save_config_callback=None, seed_everything_default=False)
    assert len(StallAnalysis.from_json(tmp_path / "analysis.json").checked) == tried
    assert sys.argv == said


def test_the_users_trainer_stays_what_it_is_and_is_not_trained() -> None:
    cli = run("analyze", "--steps=10", trainer_class=Own)
    assert isinstance(cli.trainer, Own)
    assert isinstance(cli.trainer, Analyzes)
    assert (type(cli.trainer).__name__, type(cli.trainer).__module__) == ("Own", Own.__module__)
    assert cli.trainer.global_step == 0
    assert any(isinstance(callback, EchoCallback) for callback in cli.trainer.callbacks)


def test_options_of_the_trainer_are_those_of_the_analysis() -> None:
    cli = run("analyze", "--steps=10", "--trainer.precision=64-true", "--trainer.gradient_clip_val=0.5")
    assert cli.trainer.analyzed_kwargs["precision"] == "64-true"
    assert cli.trainer.analyzed_kwargs["gradient_clip_val"] == 0.5


def test_a_trainer_class_that_is_a_function_has_no_such_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    def build(accelerator: str = "cpu") -> pl.Trainer:
        return pl.Trainer(accelerator=accelerator)

    with pytest.raises(SystemExit):
        run("analyze", trainer_class=build, trainer_defaults={})
    assert "analyze" in capsys.readouterr().err


def test_what_cannot_be_tried_is_said_and_the_report_comes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_echo.analysis.analyzer.try_setting", refuse)
    with caplog.at_level("INFO"):
        run("analyze", "--steps=10", "--verify=true")
    assert "the recommended setting was not tried: there is no second storage here" in caplog.text
    assert StallAnalysis.from_json(tmp_path / "analysis.json").checked == ()


def test_the_analysis_is_saved_whatever_happens_when_its_advice_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_echo.analysis.analyzer.try_setting", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("analyze", "--steps=4", "--verify")
    assert StallAnalysis.from_json(tmp_path / "analysis.json").stages.workers == 1


def test_the_time_it_may_take_is_said_on_the_command_line() -> None:
    with pytest.raises(ValueError, match="seconds must be > 0, got 0"):
        run("analyze", "--seconds=0")


def refuse(*args: Any) -> None:
    raise ValueError("there is no second storage here")


def test_without_a_number_there_are_as_many_steps_as_batches_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run("analyze", "--data.batch_size=50")
    assert "lightning_echo: analyzing: 8 steps in each phase: the training loader has no more batches" in caplog.messages
    phases = [message for message in caplog.messages if message.endswith(" s left)")]
    assert len(phases) > 8
    assert all(message.startswith("lightning_echo: analyzing: ") for message in phases)


def test_a_number_of_steps_that_is_given_and_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="steps must be at most 8, the batches of the training loader, got 9: give fewer steps"):
        run("analyze", "--data.batch_size=50", "--steps=9")


@pytest.fixture
def analyzed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: the analysis is there."""
    monkeypatch.setattr(StallAnalyzer, "run", lambda *args: ANALYSIS)


@pytest.mark.usefixtures("analyzed_at_once")
def test_an_analysis_overwrites_no_other(tmp_path: Path) -> None:
    first = tmp_path / "analysis.json"
    first.write_text("mine")
    for _ in range(2):
        run("analyze")
    assert first.read_text() == "mine"
    for name in ("analysis_1.json", "analysis_2.json"):
        assert StallAnalysis.from_json(tmp_path / name) == ANALYSIS


@pytest.mark.usefixtures("analyzed_at_once")
def test_it_lies_in_the_log_directory_of_the_configuration(tmp_path: Path) -> None:
    logger = (
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        "--trainer.logger.save_dir=logs",
        "--trainer.logger.name=run",
    )
    for _ in range(2):
        run("analyze", *logger)
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert found == ["logs/run/version_0/analysis.json", "logs/run/version_1/analysis.json"]


@pytest.mark.parametrize("option", ["json", "html", "png", "apply"])
def test_a_file_that_exists_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StallAnalyzer, "run", lambda *args: pytest.fail("it was measured"))
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match=f"{option} must be a new file, got 'mine', which exists"):
        run("analyze", f"--{option}=mine")
    assert (tmp_path / "mine").read_text() == "mine"


def advise(setting: TrainingSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the analysis that is there advise a setting."""
    verdict = replace(ANALYSIS.verdict, setting=setting)
    monkeypatch.setattr(StallAnalysis, "verdict", PropertyMock(return_value=verdict))


@pytest.mark.usefixtures("analyzed_at_once")
def test_fit_takes_the_advice_beside_its_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {"cached_fraction": 0.5, "hold": "loaded", "cache_size": "2MiB"}
    advise(TrainingSetting(workers=3, factor=2.5, insertion_point="before_augmentation", **cached), monkeypatch)
    own = {"data": {"batch_size": 10}, "echo": {"factor": 4, "buffer_size": 20}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(own))
    run("analyze", "--config=base.yaml", "--apply=advice.yaml")
    loader = run("fit", "--config=base.yaml", "--config=advice.yaml", *FEW_STEPS).trainer.train_dataloader
    assert (loader.factor, loader.insertion_point) == (2.5, "before_augmentation")
    assert loader.cache == CacheConfig("2MiB", hold="loaded")
    assert (loader.buffer_size, loader.loader.batch_size) == (20, 10)  # what the advice does not speak of
    assert "Set num_workers=3 where your program sets it" in (tmp_path / "advice.yaml").read_text()


@pytest.mark.usefixtures("analyzed_at_once")
def test_fit_takes_the_file_if_there_is_nothing_to_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advise(TrainingSetting(), monkeypatch)
    run("analyze", "--apply=advice.yaml")
    assert "There is nothing to set" in (tmp_path / "advice.yaml").read_text()
    loader = run("fit", "--echo.factor=4", "--config=advice.yaml", *FEW_STEPS).trainer.train_dataloader
    assert loader.factor == 4
