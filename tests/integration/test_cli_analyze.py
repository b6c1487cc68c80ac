"""``python train.py analyze``: the same configuration as fit, a report, and files."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_echo import EchoCallback, EchoCLI, StagedDataset
from lightning_echo.analysis.command import Analyzes
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.analysis.verdict import VerdictKind

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
    run("analyze", "--steps=10", "--data.batch_size=8", "--verify", "--html=page.html", "--png=picture.png")
    analysis = StallAnalysis.from_json(tmp_path / "analysis.json")
    assert (analysis.stages.batch_size, analysis.stages.workers) == (8, 1)
    assert [each.setting for each in analysis.checked] == [analysis.verdict.setting]
    said = capsys.readouterr().out
    assert "Tried: predicted against measured" in said
    verdict, *_, written = said.removeprefix("Verdict\n").split("\n\n")
    assert " ".join(verdict.split()) == analysis.verdict.message
    assert written == "Written: analysis.json, page.html, picture.png\n"
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


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
    run("analyze", "--steps=8", "--verify", model=SlowModel, data=SlowData)
    analysis = StallAnalysis.from_json(tmp_path / "analysis.json")
    setting = analysis.verdict.setting
    assert (analysis.verdict.kind, setting.hold) == (VerdictKind.cache, "raw")
    assert [each.setting for each in analysis.checked] == [setting]
    assert analysis.checked[0].step_seconds.median < 0.9 * analysis.step_seconds
    said = capsys.readouterr().out
    tried = said.split("Tried: predicted against measured")[1].split("\n\n")[0]
    assert f"{100 * setting.cached_fraction:.0f} % of the data set in a cache of raw items" in " ".join(tried.split())
    assert setting.line in " ".join(said.split())


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
