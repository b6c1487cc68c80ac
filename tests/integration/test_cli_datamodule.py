"""EchoDataModule in a plain LightningCLI: the user's data module records its own hyperparameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from trainer_runs import Data, Recorder, SaveAt

from lightning_echo import EchoDataModule

QUIET = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False}


class Saves(Data):
    """Records its hyperparameters and uses them, as many data modules do."""

    def __init__(self, batch_size: int = 8, path: str = "here") -> None:
        super().__init__(batch_size=batch_size)
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        self.batch_size = self.hparams.batch_size
        return super().train_dataloader()


class SavesQuietly(Data):
    """Records nothing for the logger."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__(batch_size=batch_size)
        self.save_hyperparameters(logger=False)


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])


def saved_by(folder: Path, *arguments: str, data: Any = None) -> tuple[Recorder, dict[str, Any]]:
    """The model that LightningCLI trained, and a checkpoint of its first epoch."""
    folder.mkdir()
    save = SaveAt(folder, [3])
    cli = LightningCLI(
        Recorder,
        data,
        args=["fit", *arguments],
        trainer_defaults={**QUIET, **HIDDEN, "callbacks": [save]},
        save_config_callback=None,
        seed_everything_default=False,
    )
    return cli.model, torch.load(save.path(3), weights_only=True)


def options(hparams: dict[str, Any]) -> dict[str, Any]:
    """Without what newer versions of LightningCLI note for themselves."""
    return {name: value for name, value in hparams.items() if name not in ("_class_path", "_instantiator")}


@pytest.mark.parametrize("user", [Saves, SavesQuietly])
def test_hyperparameters_are_recorded_as_without_echoing(user: type[Saves], tmp_path: Path) -> None:
    path = f"{user.__module__}.{user.__name__}"
    plain, expected = saved_by(tmp_path / "plain", f"--data={path}", "--data.batch_size=4")
    outer = ["--data=lightning_echo.EchoDataModule", "--data.factor=2.5"]
    model, found = saved_by(tmp_path / "echoed", *outer, f"--data.datamodule={path}", "--data.datamodule.batch_size=4")
    assert expected["datamodule_hyper_parameters"]["batch_size"] == 4
    assert options(found["datamodule_hyper_parameters"]) == options(expected["datamodule_hyper_parameters"])
    assert found["datamodule_hparams_name"] == expected["datamodule_hparams_name"]
    assert model.sizes == plain.sizes == [[4, 4, 4, 4, 4, 2]]
    assert model.trainer.datamodule.factor == 2.5  # type: ignore[attr-defined]
    inner = model.trainer.datamodule.datamodule  # type: ignore[attr-defined]
    assert inner.hparams_initial == inner.hparams == found["datamodule_hyper_parameters"]
    assert inner._log_hyperparams is (user is Saves)  # what the user said about the logger
    restored = user.load_from_checkpoint(tmp_path / "echoed" / "step-3.ckpt")
    assert restored.hparams.batch_size == 4


def test_hyperparameters_are_recorded_where_the_script_names_the_echo_data_module(tmp_path: Path) -> None:
    chosen = ["--data.datamodule=test_cli_datamodule.Saves", "--data.datamodule.batch_size=4", "--data.factor=2"]
    model, found = saved_by(tmp_path / "echoed", *chosen, data=EchoDataModule)
    assert found["datamodule_hyper_parameters"] == {"batch_size": 4, "path": "here"}
    assert model.sizes == [[4, 4, 4, 4, 4, 2]]


def test_hyperparameters_of_a_data_module_built_in_code_are_left_alone() -> None:
    user = Saves(batch_size=4, path="there")
    EchoDataModule(user, 2)
    assert dict(user.hparams) == {"batch_size": 4, "path": "there"}


def test_hyperparameters_of_another_class_are_left_alone() -> None:
    """Those of a wrapper of the user's own, which holds another data module in an option of the same name."""
    user = Saves()
    user.hparams.clear()
    node = {"class_path": "elsewhere.Other", "init_args": {"batch_size": 2}}
    user.save_hyperparameters({"datamodule": node, "_instantiator": "lightning.pytorch.cli.instantiate_module"})
    EchoDataModule(user, 2)
    assert user.hparams["datamodule"] == node
