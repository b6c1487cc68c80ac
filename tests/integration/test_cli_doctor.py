"""``train.py doctor`` and ``lightning-echo doctor`` on the data of real programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from loaders_with_traps import Examples, Unreadable
from torch.utils.data import DataLoader

from lightning_echo import EchoCLI

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]


class Numbers(pl.LightningDataModule):
    """Data that asks its Trainer how many ranks there are, as many do."""

    def __init__(self, size: int = 8, readable: bool = True) -> None:
        super().__init__()
        self.size, self.readable = size, readable

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.ranks = self.trainer.world_size

    def train_dataloader(self) -> Any:
        data: Any = Examples(self.size) if self.readable else Unreadable()
        return DataLoader(data, 4 // self.ranks, shuffle=True)


class WithData(BoringModel):
    """A model with its own data."""

    def train_dataloader(self) -> Any:
        return DataLoader(Examples(13), 4, shuffle=True)  # type: ignore[arg-type]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, model: Any = BoringModel, data: Any = Numbers) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", arguments[0], *QUIET, *arguments[1:]])
    EchoCLI(model, data, seed_everything_default=False)


def names(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document = json.loads(capsys.readouterr().out)
    return {finding["name"]: finding for finding in document["findings"] if finding["about"] == "data"}


def test_the_data_module_of_the_configuration_is_examined_with_its_trainer_or_the_models_own_loader(monkeypatch, capsys) -> None:
    run(monkeypatch, "doctor", "--json", "--data.size=8")
    found = names(capsys)
    assert found["loader"]["figures"]["examples"] == 8
    assert "last_batch_of_one" not in found
    run(monkeypatch, "doctor", "--json", model=WithData, data=None)
    assert names(capsys)["loader"]["figures"]["examples"] == 13


def test_an_error_ends_the_program_with_status_1(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "doctor", "--data.readable=false")
    assert ended.value.code == 1
    assert "FileNotFoundError: image 0" in " ".join(capsys.readouterr().out.split())


def test_the_configuration_of_fit_is_taken_also_with_what_only_fit_has(monkeypatch, capsys, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "fit", "--data.size=13", "--echo.factor=2", "--print_config")
    assert ended.value.code == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert "ckpt_path:" in (tmp_path / "config.yaml").read_text()
    run(monkeypatch, "doctor", f"--config={tmp_path / 'config.yaml'}", "--json=true")
    found = names(capsys)
    assert found["loader"]["figures"]["examples"] == 13
    assert "last_batch_of_one" in found


@pytest.mark.program
def test_the_command_builds_the_data_of_a_configuration_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text("""
import lightning.pytorch as pl
from torch.utils.data import DataLoader
class Numbers(pl.LightningDataModule):
    def __init__(self, size: int):
        super().__init__()
        self.size = size
    def setup(self, stage):
        print("setting up")
    def train_dataloader(self):
        return DataLoader(range(self.size), 4, shuffle=True, num_workers=1, persistent_workers=True)
""")
    (tmp_path / "train.yaml").write_text("trainer: {}\ndata:\n  class_path: my_data.Numbers\n  init_args:\n    size: 13\n")
    program = [sys.executable, "-m", "lightning_echo", "doctor", "--config", "train.yaml", "--json"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    document = json.loads(ended.stdout)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert ended.returncode == (1 if document["status"] == "error" else 0)
    assert found["loader"]["figures"] == {"kind": "DataLoader", "examples": 13, "batch_size": 4, "batches": 4}
    assert found["first_batch"]["status"] == "ok"
    assert "setting up" in ended.stderr
