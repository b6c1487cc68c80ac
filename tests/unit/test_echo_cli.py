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
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.cli import _gains_within, _set_on
from lightning_echo.config import EchoOptions

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]


def callback_of(*arguments: str) -> EchoCallback:
    """The `EchoCallback` of the Trainer that a program makes, without a run."""
    with patch("sys.argv", ["train.py", *QUIET, *arguments]):
        cli = EchoCLI(BoringModel, run=False, seed_everything_default=False)
    (callback,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, EchoCallback))
    return callback


def test_with_nothing_but_defaults_it_is_only_measured() -> None:
    for options in (EchoOptions(), EchoOptions(enabled=False, factor=4), EchoOptions(enabled=False, controller=TargetIdle())):
        callback = EchoCallback(**options.callback_arguments())
        assert callback.controller is None
        assert callback.attachment.echo.factor == 1


def test_options_are_those_of_the_callback() -> None:
    of_callback = {"loaders" if name == "echo" else name for name in signature(EchoCallback).parameters}
    assert {each.name for each in fields(EchoOptions)} == of_callback | {"enabled"}
    controller = FactorSchedule({0: 2})
    assert EchoCallback(**EchoOptions(factor=4).callback_arguments()).attachment.echo.factor == 4
    assert EchoCallback(**EchoOptions(controller=controller).callback_arguments()).controller is controller
    assert type(EchoCallback(**EchoOptions(factor="auto").callback_arguments()).controller) is TargetIdle
    named: Any = {"a": {"factor": 2}, "b": EchoConfig(3)}
    assert EchoCallback(**EchoOptions(loaders=named).callback_arguments()).attachment.echo.factors == {"a": 2, "b": 3}


def controller(callback: EchoCallback) -> tuple[type, float]:
    return type(callback.controller), vars(callback.controller)["max_factor"]


def config(callback: EchoCallback) -> EchoConfig:
    """The options that the callback has for a loader."""
    return callback.attachment.echo._wrapping.configs[""]


TARGET_IDLE = {"class_path": "lightning_echo.TargetIdle", "init_args": {"max_factor": 6}}
OF_A_LOADER = {
    **{"factor": 2.5, "insertion_point": "after_batching", "buffer_size": "4GiB", "reuse": "each"},
    **{"epoch_length": "full_pass", "seed": 7, "cache": "8GiB"},
}
# Arguments in a file, how they are seen in the callback that is built from it, and as what.
IN_A_FILE: list[tuple[dict[str, Any], Callable[[EchoCallback], Any], Any]] = [
    ({"controller": TARGET_IDLE, "summary": False}, controller, (TargetIdle, 6.0)),
    ({**OF_A_LOADER, "plot": True}, config, EchoConfig(**OF_A_LOADER)),
    ({"share": "sweep"}, config, EchoConfig(share="sweep")),
    ({"reads_in_flight": 32}, config, EchoConfig(reads_in_flight=32)),
    ({"factor": "demand", "max_factor": 6}, config, EchoConfig("demand", max_factor=6)),
    ({"echo": {"factor": 3.0, "seed": 1}}, config, EchoConfig(3.0, seed=1)),
]


@pytest.mark.parametrize(("arguments", "seen", "expected"), IN_A_FILE)
def test_a_callback_in_a_file_takes_each_argument(arguments: dict[str, Any], seen: Any, expected: Any, tmp_path: Path) -> None:
    assert {name for given, *_ in IN_A_FILE for name in given} == set(signature(EchoCallback).parameters)
    callbacks = [{"class_path": "lightning_echo.EchoCallback", "init_args": arguments}]
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    callback = callback_of("--config", str(tmp_path / "train.yaml"))
    assert seen(callback) == expected
    assert (callback.summary, callback.plot) == (arguments.get("summary", True), arguments.get("plot", False))


def test_a_cache_alone_is_an_option_with_factor_one() -> None:
    data: Any = StagedDataset.of(list(range(16)), augment=float, decode=int)  # type: ignore[arg-type]
    options: Any = {"cache": {"size": "8MiB"}}
    callback = EchoCallback(**EchoOptions(**options).callback_arguments())
    loader = callback.attachment.echo.train_dataloader(lambda: DataLoader(data, batch_size=4))
    assert (loader.factor, loader.cache) == (1, CacheConfig("8MiB"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "8GiB", "loaders": {"a": EchoConfig(2)}}, "loaders has the options of each loader: leave factor"),
        ({"factor": "auto", "controller": TargetIdle()}, "factor='auto' chooses between"),
        ({"loaders": {}}, "loaders is empty"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EchoOptions(**options)


@pytest.mark.parametrize(
    ("workers", "setting", "options"),
    [
        (0, TrainingSetting(), (0, None, False)),
        (0, TrainingSetting(2), (2, 2, False)),  # torch's own
        (0, TrainingSetting(2, prefetch_factor=8), (2, 8, False)),
        (1, TrainingSetting(prefetch_factor=8), (1, 8, False)),
        (1, TrainingSetting(pin_memory=True), (1, 2, True)),
    ],
)
def test_tuning_sets_the_options_of_the_loader_that_were_found(
    workers: int, setting: TrainingSetting, options: tuple[int, int | None, bool]
) -> None:
    loader = DataLoader(range(8), num_workers=workers)  # type: ignore[arg-type]
    _set_on(loader, setting)
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == options


@pytest.mark.parametrize(
    ("passes", "factor", "gains"), [(1.0, 1.0, False), (1.5, 1.0, True), (3.0, 4.0, False), (4.0, 4.0, False), (5.0, 4.0, True)]
)
def test_a_cache_gains_from_the_second_pass_on_which_comes_later_where_it_echoes(
    passes: float, factor: float, gains: bool
) -> None:
    point = {} if factor == 1 else {"insertion_point": "before_augmentation"}
    cached = TrainingSetting(factor=factor, cached_fraction=1.0, hold="loaded", cache_size="1MiB", **point)
    assert _gains_within(passes, cached) is gains
    assert _gains_within(passes, TrainingSetting(factor=factor, **point))
