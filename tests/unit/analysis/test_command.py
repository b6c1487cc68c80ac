"""The Trainer of ``python train.py analyze``: the same class, and able to analyze. The command itself: test_cli_analyze."""

import inspect
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from lightning_echo.analysis.analyzer import Analyzes, _log_directory, analyzing


class Own(pl.Trainer):
    """A Trainer of the user's."""


def test_the_class_is_called_as_before():
    made = analyzing(Own)
    assert issubclass(made, Own)
    assert issubclass(made, Analyzes)
    assert (made.__name__, made.__module__, made.__doc__) == ("Own", Own.__module__, "A Trainer of the user's.")


def test_a_class_that_can_analyze_is_left_as_it_is():
    made = analyzing(Own)
    assert analyzing(made) is made


def test_its_options_are_those_of_the_users_class():
    assert inspect.signature(analyzing(Own)) == inspect.signature(Own)


def trainer(logger: CSVLogger | bool, root: Path | str) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=logger, default_root_dir=root, enable_checkpointing=False)


def test_the_log_directory_is_the_loggers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs", name="mine", version=3)
    assert _log_directory(trainer(logger, tmp_path)) == tmp_path / "logs" / "mine" / "version_3"


def test_without_a_logger_it_is_the_root_directory_of_the_trainer(tmp_path: Path) -> None:
    assert _log_directory(trainer(False, tmp_path / "runs")) == tmp_path / "runs"


def test_in_place_of_a_remote_storage_it_is_the_working_directory() -> None:
    assert _log_directory(trainer(False, "memory://bucket/runs")) == Path()
