"""Configuration files that LightningCLI saved for the version before ``factor=`` was a keyword of EchoCallback.

The programs were examples/echo_cli.py and examples/plain_cli.py. Lines that only newer versions of Lightning know were taken out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_echo import EchoCallback, EchoCLI, TargetIdle

STORED, EXAMPLES = Path(__file__).parent / "stored", Path(__file__).parents[2] / "examples"
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
SHORT = {"max_epochs": 1, "limit_train_batches": 3, "enable_progress_bar": False}
MODES, SEEDED = ["yaml", "omegaconf"], "--seed_everything=1"  # else Lightning warns that it has found no seed


@pytest.fixture(autouse=True)
def _the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["program"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything leaves is gone afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def started(cli: type[LightningCLI], mode: str, *arguments: str) -> Any:
    from waves import WaveClassifier, WavesDataModule

    options = [f"--trainer.{name}={str(value).lower()}" for name, value in {**QUIET, **SHORT}.items()]
    data = [WavesDataModule] if cli is EchoCLI else []
    parser = {"parser_mode": mode}
    return cli(WaveClassifier, *data, args=["fit", *arguments, *options], save_config_callback=None, parser_kwargs=parser)


def setting(loader: Any) -> tuple[Any, ...]:
    return loader.factor, str(loader.insertion_point), loader.buffer_size, loader.epoch_length, loader.num_workers


def callback_of(cli: Any) -> EchoCallback:
    (found,) = [each for each in cli.trainer.callbacks if isinstance(each, EchoCallback)]
    return found


# The file is older than reuse=, so that a run takes the present default unless it is told.
@pytest.mark.parametrize(
    ("told", "reuse", "live"),
    [
        ([], "memory", (512 - 32) // 2),  # half of what a pass of 512 in batches of 32 allows
        (["--echo.reuse=each"], "each", 512 // 4),  # as when it was saved: a quarter of a short pass
    ],
    ids=["default", "each"],
)
@pytest.mark.parametrize("mode", MODES)
def test_the_group_of_echo_cli_trains_to_the_same_setting(mode: str, told: list[str], reuse: str, live: int) -> None:
    cli = started(EchoCLI, mode, f"--config={STORED / 'echo_group.yaml'}", SEEDED, *told)
    controller = callback_of(cli).controller
    assert type(controller) is TargetIdle
    assert (controller.target, controller.min_factor, controller.max_factor) == (0.1, 1, 4)
    assert callback_of(cli).reports[0].factor == 3
    assert setting(cli.trainer.train_dataloader)[1:] == ("before_augmentation", live, "fixed", 2)
    assert cli.trainer.train_dataloader.reuse == reuse
    assert cli.trainer.train_dataloader.loader.batch_size == 32


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_with_nested_options_trains_to_the_same_setting(mode: str) -> None:
    cli = started(LightningCLI, mode, f"--config={STORED / 'callback.yaml'}")
    assert callback_of(cli).controller is None
    assert setting(cli.trainer.train_dataloader) == (2.5, "before_augmentation", 64, "fixed", 2)
    assert cli.trainer.train_dataloader.seed == 1  # of seed_everything
    again = started(
        LightningCLI,
        mode,
        SEEDED,
        "--data=WavesDataModule",
        "--trainer.callbacks+=lightning_echo.EchoCallback",
        "--trainer.callbacks.factor=2.5",
        "--trainer.callbacks.buffer_size=64",
    )
    assert setting(again.trainer.train_dataloader) == setting(cli.trainer.train_dataloader)
    assert again.model.loss == cli.model.loss


@pytest.mark.parametrize("mode", MODES)
def test_an_echo_data_module_trains_to_the_same_setting(mode: str) -> None:
    cli = started(LightningCLI, mode, f"--config={STORED / 'datamodule.yaml'}")
    assert setting(cli.trainer.train_dataloader) == (2.5, "before_augmentation", 64, "fixed", 2)
    assert cli.trainer.train_dataloader.loader.batch_size == 16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", ["3", "auto"])
@pytest.mark.parametrize("way", ["group", "callback", "data module"])
def test_what_is_printed_today_trains_to_what_was_said(
    way: str, factor: str, mode: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    callback = "--trainer.callbacks+=lightning_echo.EchoCallback"
    chosen = {
        "group": [f"--echo.factor={factor}", "--echo.buffer_size=64"],
        "callback": [
            "--data=WavesDataModule",
            callback,
            f"--trainer.callbacks.factor={factor}",
            "--trainer.callbacks.buffer_size=64",
        ],
        "data module": [
            "--data=lightning_echo.EchoDataModule",
            "--data.datamodule=waves.WavesDataModule",
            f"--data.factor={factor}",
            "--data.buffer_size=64",
            callback,
        ],
    }[way]
    program = EchoCLI if way == "group" else LightningCLI
    with pytest.raises(SystemExit):
        started(program, mode, SEEDED, *chosen, "--print_config")
    printed = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(printed)
    found = str(yaml.safe_load(printed))
    assert f"'factor': {factor!r}" in found or f"'factor': {factor}" in found
    cli = started(program, mode, f"--config={tmp_path / 'config.yaml'}")
    assert callback_of(cli).reports[0].factor == (1 if factor == "auto" else float(factor))
    assert bool(callback_of(cli).reports[0].reason) is (factor == "auto")  # somebody has decided
    assert setting(cli.trainer.train_dataloader)[1:] == ("before_augmentation", 64, "fixed", 2)
