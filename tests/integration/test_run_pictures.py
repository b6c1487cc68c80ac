"""``EchoCallback(plot=True)``: the picture of a run is in the loggers' own files, never unasked, and no training fails for it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from logger_files import staying_here
from trainer_runs import Data, Killed, SaveAt, fit

from lightning_echo import EchoCallback
from lightning_echo.__main__ import main

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

STEPS = 6  # of an epoch: 22 examples in batches of 4
SIZE = (960, 846)  # 8 inches of 120 dots; the strip of 1.75 inches, three panels of 1.5, 0.8 around them; and its title


@pytest.fixture(autouse=True)
def _loggers_that_stay_here(tmp_path: Path) -> Iterator[None]:
    with staying_here(tmp_path):
        yield


def train(loggers: Any, *callbacks: Any, plot: bool = True, **options: Any) -> Any:
    callback = EchoCallback(factor=2, insertion_point="after_augmentation", plot=plot)
    return fit(Data(), logger=loggers, callbacks=[callback, *callbacks], **{"max_epochs": 2, "log_every_n_steps": 2, **options})


def of_tensorboard(folder: Path) -> list[tuple[int, bytes]]:
    """The step and the PNG of each picture of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run")).Reload()
    if "echo/run" not in events.Tags()["images"]:
        return []
    return [(event.step, event.encoded_image_string) for event in events.Images("echo/run")]


def tensorboard(folder: Path) -> TensorBoardLogger:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    return TensorBoardLogger(folder, name="", version="run")


def assert_is_the_picture(png: bytes) -> None:
    """A PNG of the picture's width, with its title, in which the colours of the lines of three panels are seen."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    assert image.width == SIZE[0]
    assert image.height >= SIZE[1]
    colors = {color for _, color in image.getcolors(maxcolors=2**20) or []}
    assert {(0x00, 0x60, 0xA0), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73), (0x3D, 0x9A, 0xD0)} <= colors


def pixels(png: bytes) -> tuple[tuple[int, int], bytes]:
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    return image.size, image.tobytes()


def test_tensorboard_has_it_at_the_last_step(tmp_path: Path) -> None:
    train(tensorboard(tmp_path))
    ((step, png),) = of_tensorboard(tmp_path)
    assert step == 2 * STEPS - 1
    assert_is_the_picture(png)


def test_it_is_the_picture_that_the_command_draws_of_the_same_run_on_demand(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="", version="csv"), tensorboard(tmp_path)]
    callback = EchoCallback(factor="demand", insertion_point="after_augmentation", plot=True)
    fit(Data(2, delay=0.01), logger=loggers, callbacks=[callback], max_epochs=2, log_every_n_steps=2)
    assert main(["report", str(tmp_path / "csv"), "--png", str(tmp_path / "run.png")]) == 0
    ((_, png),) = of_tensorboard(tmp_path)
    assert pixels(png) == pixels((tmp_path / "run.png").read_bytes())


@pytest.mark.slow
def test_mlflow_has_it_among_the_artifacts(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    artifacts = (tmp_path / "artifacts").as_uri()
    logger = MLFlowLogger("digits", tracking_uri=f"file:{tmp_path}/mlruns", artifact_location=artifacts)
    train(logger)
    found = logger.experiment.list_artifacts(logger.run_id, "echo")
    assert [each.path for each in found if each.path.endswith(".png")] == ["echo/run.png"]
    assert_is_the_picture((tmp_path / "artifacts" / str(logger.run_id) / "artifacts" / "echo" / "run.png").read_bytes())


@pytest.mark.slow
def test_weights_and_biases_has_it_among_the_files_that_it_would_send(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    logger = WandbLogger(project="digits", save_dir=tmp_path, offline=True)
    train(logger)
    logger.experiment.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/images/echo/run_*.png")
    assert_is_the_picture(path.read_bytes())


def test_it_is_said_once_which_loggers_take_none_and_an_interrupted_training_leaves_it_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loggers = [CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b"), tensorboard(tmp_path)]
    with caplog.at_level("INFO"), pytest.raises(Killed):
        train(loggers, SaveAt(tmp_path, [STEPS + 2], dies=True))
    said = [record.getMessage() for record in caplog.records if "plot=True" in record.getMessage()]
    assert said == ["lightning_echo: plot=True logs to TensorBoard, W&B and MLflow; CSVLogger takes no figure"]
    ((step, png),) = of_tensorboard(tmp_path)
    assert step == STEPS + 2 - 1
    assert_is_the_picture(png)


def test_a_logger_that_fails_is_a_warning_and_the_next_one_has_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ConnectionError("no route to host")

    first, second = TensorBoardLogger(tmp_path / "first"), tensorboard(tmp_path)
    monkeypatch.setattr(first.experiment, "add_figure", fails)
    said = r"TensorBoardLogger did not take the picture of the run: ConnectionError\('no route to host'\)"
    with pytest.warns(UserWarning, match=said):
        run = train([first, second])
    assert run.trainer.state.finished
    assert len(of_tensorboard(tmp_path)) == 1


def test_unasked_or_on_another_rank_or_without_a_logger_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(pl.Callback):
        def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            monkeypatch.setattr(type(trainer), "is_global_zero", False)

    train(False, default_root_dir=tmp_path)
    train(tensorboard(tmp_path), plot=False)
    train(tensorboard(tmp_path), Second())
    assert of_tensorboard(tmp_path) == list(tmp_path.rglob("*.png")) == []


def test_without_matplotlib_it_is_refused_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"plot=True.* matplotlib.*pip install 'lightning-echo\[report\]'"):
        EchoCallback(plot=True)
    assert not EchoCallback().plot
