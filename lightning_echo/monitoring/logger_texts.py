"""`log_text` gives a text to the loggers that take texts. Each has its own method: the one common to all takes only numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

__all__ = ["log_text"]


@rank_zero_only
def log_text(trainer: pl.Trainer, name: str, text: str, step: int) -> None:
    """Logs a text through the loggers that take texts: TensorBoard, Weights & Biases, MLflow and Comet.

    Args:
        trainer: The Trainer, which has the loggers.
        name: Name of the text, such as ``"echo/summary"``.
        text: The text, in lines.
        step: The step that it belongs to.
    """
    for logger in trainer.loggers:
        for kind, give in _TAKERS.items():
            if isinstance(logger, kind):
                give(logger, name, text, step)


def _to_tensorboard(logger: Any, name: str, text: str, step: int) -> None:
    code = "\n".join(f"    {line}" for line in text.splitlines())  # TensorBoard shows Markdown, in which this keeps the lines
    logger.experiment.add_text(name, code, step)


def _to_wandb(logger: Any, name: str, text: str, step: int) -> None:
    logger.log_text(name, columns=["summary"], data=[[text]], step=step)


def _to_mlflow(logger: Any, name: str, text: str, step: int) -> None:
    logger.experiment.log_text(logger.run_id, text, f"{name}.txt")


def _to_comet(logger: Any, name: str, text: str, step: int) -> None:
    logger.experiment.log_text(text, step=step, metadata={"name": name})


_TAKERS: dict[type, Callable[[Any, str, str, int], None]] = {
    TensorBoardLogger: _to_tensorboard,
    WandbLogger: _to_wandb,
    MLFlowLogger: _to_mlflow,
    CometLogger: _to_comet,
}
