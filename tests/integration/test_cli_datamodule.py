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


def saved_by(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, data: Any = None) -> tuple[Recorder, dict[str, Any]]:
    """The model that LightningCLI trained, and a checkpoint of its first epoch."""
    monkeypatch.setattr(sys, "argv", ["program"])
    save = SaveAt(folder, [3])
    cli = LightningCLI(
        Recorder,
        data,
        args=["fit", *arguments],
        trainer_defaults={**QUIET, **HIDDEN, "callbacks": [save]},
        save_config_callback=None,
        seed_everything_default=False,
    )
    found = torch.load(save.path(3), weights_only=True)
    for name in ("_class_path", "_instantiator"):  # what newer versions of LightningCLI note for themselves
        found["datamodule_hyper_parameters"].pop(name, None)
    return cli.model, found


@pytest.mark.parametrize("user", [Saves, SavesQuietly])
def test_hyperparameters_are_recorded_as_without_echoing(
    user: type[Saves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{user.__module__}.{user.__name__}"
    plain, expected = saved_by(tmp_path, monkeypatch, f"--data={path}", "--data.batch_size=4")
    outer = ["--data=lightning_echo.EchoDataModule", "--data.factor=2.5", f"--data.datamodule={path}"]
    model, found = saved_by(tmp_path, monkeypatch, *outer, "--data.datamodule.batch_size=4")
    assert expected["datamodule_hyper_parameters"]["batch_size"] == 4
    for name in ("datamodule_hyper_parameters", "datamodule_hparams_name"):
        assert found[name] == expected[name]
    assert model.sizes == plain.sizes == [[4, 4, 4, 4, 4, 2]]
    assert model.trainer.datamodule.factor == 2.5  # type: ignore[attr-defined]
    inner = model.trainer.datamodule.datamodule  # type: ignore[attr-defined]
    assert inner.hparams_initial == inner.hparams
    assert inner.hparams.batch_size == user.load_from_checkpoint(tmp_path / "step-3.ckpt").hparams.batch_size == 4
    assert inner._log_hyperparams is (user is Saves)  # what the user said about the logger


def test_hyperparameters_are_recorded_where_the_script_names_the_echo_data_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["--data.datamodule=test_cli_datamodule.Saves", "--data.datamodule.batch_size=4", "--data.factor=2"]
    model, found = saved_by(tmp_path, monkeypatch, *chosen, data=EchoDataModule)
    assert found["datamodule_hyper_parameters"] == {"batch_size": 4, "path": "here"}
    assert model.sizes == [[4, 4, 4, 4, 4, 2]]


@pytest.mark.parametrize(
    "given",
    [{}, {"class_path": "elsewhere.Other", "init_args": {"batch_size": 2}}],
    ids=["of a module built in code", "of a wrapper of the user's own, with an option of the same name"],
)
def test_other_hyperparameters_are_left_alone(given: dict[str, Any]) -> None:
    user = Saves(batch_size=4, path="there")
    if given:
        user.hparams.clear()
        user.save_hyperparameters({"datamodule": given, "_instantiator": "lightning.pytorch.cli.instantiate_module"})
    EchoDataModule(user, 2)
    assert user.hparams["datamodule"] == given if given else dict(user.hparams) == {"batch_size": 4, "path": "there"}
