"""The picture of a run, at its end. `log_picture` gives it to the loggers that take figures, with their own methods.

Lightning closes loggers after the hooks of callbacks. This is also so if a training was interrupted, so a figure still arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_echo.measuring.echo_summary import RunSummary
from lightning_echo.monitoring.logged import steps_taken
from lightning_echo.reporting.figure import check_matplotlib
from lightning_echo.reporting.run_report import picture
from lightning_echo.training.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_can_plot", "log_picture"]

_NAME = "echo/run"


def check_can_plot(plot: bool) -> None:
    """Makes sure, before a training, that its picture can be drawn at its end.

    Args:
        plot: Whether to draw a picture.

    Raises:
        ModuleNotFoundError: A picture is to be drawn, and matplotlib is not installed.
    """
    if plot:
        check_matplotlib("plot=True: figures")


def log_picture(trainer: pl.Trainer, summary: RunSummary) -> None:
    """Logs the picture through TensorBoard, Weights & Biases and MLflow. Rank 0 calls it, and no rank waits for it.

    If a logger fails, it only warns: no training may fail because of a picture. It says which loggers take no pictures.

    Args:
        trainer: The Trainer, which has the loggers.
        summary: What to draw.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    step = max(steps_taken(trainer) - 1, 0)  # Lightning's own number of the step, counted from 0
    taken = [(logger, give) for logger in trainer.loggers for kind, give in _TAKERS.items() if isinstance(logger, kind)]
    takers = [logger for logger, _ in taken]
    others = sorted({type(logger).__name__ for logger in trainer.loggers if logger not in takers})
    if others or not taken:
        which = f"{', '.join(others)} takes no figure" if others else "the Trainer has no logger"
        rank_zero_info(f"lightning_echo: plot=True logs to TensorBoard, W&B and MLflow; {which}")
    for logger, give in taken:
        try:
            give(logger, picture(summary), step)
        except Exception as error:  # whatever a logger's client raises: a lost connection, a full disk
            rank_zero_warn(f"lightning_echo: {type(logger).__name__} did not take the picture of the run: {error!r}")


def _to_tensorboard(logger: Any, figure: Figure, step: int) -> None:
    logger.experiment.add_figure(_NAME, figure, step)


def _to_wandb(logger: Any, figure: Figure, step: int) -> None:
    logger.log_image(_NAME, [figure], step=step)


def _to_mlflow(logger: Any, figure: Figure, step: int) -> None:
    logger.experiment.log_figure(logger.run_id, figure, f"{_NAME}.png")  # MLflow's artifacts belong to no step


_TAKERS: dict[type, Callable[[Any, Figure, int], None]] = {
    TensorBoardLogger: _to_tensorboard,
    WandbLogger: _to_wandb,
    MLFlowLogger: _to_mlflow,
}
