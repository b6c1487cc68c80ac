"""Options for each of several loaders in configuration files, on command lines and in OmegaConf."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from collection_runs import SEED, Several, SeveralRecorder, alone
from lightning.pytorch.cli import LightningCLI
from trainer_runs import SaveAt

from lightning_echo import EchoCLI

QUIET = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False}
LOADERS = {
    "long": {"factor": 2, "insertion_point": "after_augmentation", "seed": SEED},
    "short": {"factor": 4, "insertion_point": "after_augmentation", "seed": SEED},
}


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])


def run(
    cli: type[LightningCLI],
    config: dict[str, Any],
    folder: Path,
    *arguments: str,
    data: Any = None,
    ckpt_path: Any = None,
    **defaults: Any,
) -> Any:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    made = cli(
        SeveralRecorder,
        data,
        args=["--config", str(path), *arguments],
        run=False,  # the parser of subcommands takes four times as long to make
        trainer_defaults={**QUIET, **HIDDEN, **defaults},
        save_config_callback=None,
        seed_everything_default=False,
    )
    made.trainer.fit(made.model, datamodule=made.datamodule, ckpt_path=ckpt_path)
    return made


def assert_echoed(model: Any) -> None:
    assert model.of(0) == alone("long", "long", 12, factor=2)
    assert model.of(1) == alone("short", "short", 12, factor=4)


def test_an_echo_data_module_takes_options_by_name_from_a_yaml_file_and_resumes(tmp_path: Path) -> None:
    inner = {"class_path": "collection_runs.Several", "init_args": {"kind": "max_size_cycle"}}
    config = {"data": {"class_path": "lightning_echo.EchoDataModule", "init_args": {"datamodule": inner, "loaders": LOADERS}}}
    save = SaveAt(tmp_path, [8])
    whole = run(LightningCLI, config, tmp_path, callbacks=[save]).model
    assert_echoed(whole)
    torch.load(save.path(8), weights_only=True)
    resumed = run(LightningCLI, config, tmp_path, ckpt_path=save.path(8)).model
    assert resumed.batches == whole.batches[8:]


def test_the_callback_takes_options_by_name_in_an_unchanged_script(tmp_path: Path) -> None:
    callback = {"class_path": "lightning_echo.EchoCallback", "init_args": {"echo": LOADERS}}
    cli = run(LightningCLI, {"trainer": {"callbacks": [callback]}, "data": {"kind": "dict"}}, tmp_path, data=Several)
    assert_echoed(cli.model)


def test_echo_cli_takes_options_by_name_in_its_group(tmp_path: Path) -> None:
    assert_echoed(run(EchoCLI, {"echo": {"loaders": LOADERS}}, tmp_path, data=Several).model)


def test_echo_cli_takes_options_by_name_on_the_command_line(tmp_path: Path) -> None:
    cli = run(EchoCLI, {}, tmp_path, '--echo.loaders={"short": {"factor": 4}}', "--echo.controller=null", data=Several)
    loaders = cli.trainer.train_dataloader
    assert loaders["short"].factor == 4
    assert not hasattr(loaders["long"], "factor")
