"""The command line by itself: what its options ask for, and which callback the Trainer gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_echo import CacheConfig, EchoCallback, EchoCLI, EchoConfig, FactorSchedule, StagedDataset, TargetIdle
from lightning_echo.cli import EchoOptions

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]


def callbacks_of(*arguments: str, **options: Any) -> list[EchoCallback]:
    """The `EchoCallback`s of the Trainer that a program makes, without a run."""
    with patch("sys.argv", ["train.py", *QUIET, *arguments]):
        cli = EchoCLI(BoringModel, run=False, seed_everything_default=False, **options)
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, EchoCallback)]


# ---------------------------------------------------------------------- options


def test_with_nothing_but_defaults_it_is_only_measured() -> None:
    for options in (EchoOptions(), EchoOptions(enabled=False, factor=4), EchoOptions(enabled=False, controller=TargetIdle())):
        callback = options.callback()
        assert callback.controller is None
        assert callback.attachment.echo.factor == 1


def test_the_command_line_can_set_whatever_the_callback_can() -> None:
    of_callback = {"loaders" if name == "echo" else name for name in signature(EchoCallback).parameters}
    assert {each.name for each in fields(EchoOptions)} == of_callback | {"enabled"}


@pytest.mark.parametrize("more", [[], ["--echo.factor=2"], ["--echo.enabled=false"], ["--echo.loaders={a: {factor: 2}}"]])
@pytest.mark.parametrize("summary", [True, False])
def test_the_summary_can_be_left_out(more: list[str], summary: bool) -> None:
    (callback,) = callbacks_of(*more, f"--echo.summary={str(summary).lower()}")
    assert callback.summary is summary


# An argument in a file, and how it is seen in the callback that is built from it.
IN_A_FILE: dict[str, tuple[dict[str, Any], Callable[[EchoCallback], Any], Any]] = {
    "controller": (
        {"controller": {"class_path": "lightning_echo.TargetIdle", "init_args": {"max_factor": 6}}},
        lambda callback: (type(callback.controller), vars(callback.controller)["max_factor"]),
        (TargetIdle, 6.0),
    ),
    "factor": ({"factor": 2.5}, lambda callback: config_of(callback).factor, 2.5),
    "insertion_point": (
        {"insertion_point": "after_batching"},
        lambda callback: str(config_of(callback).insertion_point),
        "after_batching",
    ),
    "buffer_size": ({"buffer_size": "4GiB"}, lambda callback: config_of(callback).buffer_size, "4GiB"),
    "reuse": ({"reuse": "each"}, lambda callback: config_of(callback).reuse, "each"),
    "epoch_length": ({"epoch_length": "full_pass"}, lambda callback: config_of(callback).epoch_length, "full_pass"),
    "seed": ({"seed": 7}, lambda callback: config_of(callback).seed, 7),
    "cache": ({"cache": "8GiB"}, lambda callback: config_of(callback).cache, "8GiB"),
    "share": ({"share": "sweep"}, lambda callback: config_of(callback).share, "sweep"),
    "echo": ({"echo": {"factor": 3.0, "seed": 1}}, lambda callback: config_of(callback), EchoConfig(3.0, seed=1)),
    "summary": ({"summary": False}, lambda callback: callback.summary, False),
    "plot": ({"plot": True}, lambda callback: callback.plot, True),
}


def config_of(callback: EchoCallback) -> EchoConfig:
    """The options that the callback has for a loader."""
    return callback.attachment.echo._wrapping.configs[""]


def test_a_file_has_a_case_for_each_argument() -> None:
    assert set(IN_A_FILE) == set(signature(EchoCallback).parameters)


@pytest.mark.parametrize("name", IN_A_FILE)
def test_a_callback_in_a_file_takes_each_argument(name: str, tmp_path: Path) -> None:
    arguments, seen, expected = IN_A_FILE[name]
    callbacks = [{"class_path": "lightning_echo.EchoCallback", "init_args": arguments}]
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    (callback,) = callbacks_of("--config", str(tmp_path / "train.yaml"))
    assert seen(callback) == expected


def test_options_are_those_of_the_callback() -> None:
    controller = FactorSchedule({0: 2})
    assert EchoOptions(factor=4).callback().attachment.echo.factor == 4
    assert EchoOptions(controller=controller).callback().controller is controller
    assert type(EchoOptions(factor="auto").callback().controller) is TargetIdle
    named: Any = {"a": {"factor": 2}, "b": EchoConfig(3)}
    assert EchoOptions(loaders=named).callback().attachment.echo.factors == {"a": 2, "b": 3}


@pytest.mark.parametrize("cache", ["8MiB", {"size": "8MiB"}, CacheConfig("8MiB")])
def test_a_cache_alone_is_an_option_with_factor_one(cache: Any) -> None:
    data: Any = StagedDataset.of(list(range(16)), augment=float, decode=int)  # type: ignore[arg-type]
    loader = EchoOptions(cache=cache).callback().attachment.echo.train_dataloader(lambda: DataLoader(data, batch_size=4))
    assert (loader.factor, loader.cache) == (1, CacheConfig("8MiB"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "8GiB", "loaders": {"a": EchoConfig(2)}}, "loaders has the options of each loader: leave factor"),
        ({"factor": 4, "loaders": {"a": EchoConfig(2)}}, "loaders has the options of each loader: leave factor"),
        ({"factor": "auto", "controller": TargetIdle()}, "factor='auto' stands for a controller"),
        ({"loaders": {}}, "loaders is empty"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EchoOptions(**options)


# ---------------------------------------------------------------------- the Trainer


def test_a_trainer_gets_a_callback_with_the_options() -> None:
    (callback,) = callbacks_of("--echo.factor=4")
    assert callback.attachment.echo.factor == 4
    (callback,) = callbacks_of()
    assert callback.attachment.echo.factor == 1


def test_a_callback_that_is_configured_already_stays_the_only_one() -> None:
    configured = ["--trainer.callbacks+=lightning_echo.EchoCallback", "--trainer.callbacks.factor=3"]
    (callback,) = callbacks_of(*configured)
    assert callback.attachment.echo.factor == 3
    (callback,) = callbacks_of(trainer_defaults={"callbacks": EchoCallback(factor=5)})
    assert callback.attachment.echo.factor == 5


def test_options_in_two_places_end_in_the_parsers_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        callbacks_of("--echo.factor=4", trainer_defaults={"callbacks": EchoCallback(factor=5)})
    assert end.value.code == 2
    assert "echo: options are given here and in an EchoCallback that is configured already" in capsys.readouterr().err


def test_a_bad_value_ends_in_the_parsers_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        callbacks_of("--echo.factor=0.5")
    assert end.value.code == 2
    assert "factor must be a finite number >= 1, got 0.5" in capsys.readouterr().err
