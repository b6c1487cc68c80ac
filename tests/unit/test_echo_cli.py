"""The command line by itself: what its options ask for, and which callback the Trainer gets."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
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
