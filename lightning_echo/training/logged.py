"""The output of a run about echoing: metrics, texts and pictures in loggers, a text in the progress bar, a file at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

import lightning_echo
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.measure.control import Controller, Decision, Observation
from lightning_echo.measure.page import check_matplotlib
from lightning_echo.measure.run_report import picture
from lightning_echo.measure.summary import FILE_NAME, EpochReport, RunSummary
from lightning_echo.training.counts import together
from lightning_echo.training.loaders import Echoed
from lightning_echo.training.meters import EpochMeasures, RunMeter
from lightning_echo.training.trainer import rank_zero_info

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ---------------------------------------------------------------------- logger figures
# Lightning closes loggers after the hooks of callbacks, also if a training was interrupted. So a figure logged at the end
# arrives.

_NAME = "echo/run"


def check_can_plot(plot: bool) -> None:
    """Raises a ModuleNotFoundError, before a training, if its picture could not be drawn at its end."""
    if plot:
        check_matplotlib("plot=True: figures")


def log_picture(trainer: pl.Trainer, summary: RunSummary) -> None:
    """Logs the picture through TensorBoard, Weights & Biases and MLflow. Rank 0 calls it, and no rank waits for it.

    If a logger fails, it only warns: no training may fail because of a picture. It names the loggers that take no pictures.
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


# ---------------------------------------------------------------------- logger texts
# Each logger takes texts by its own method: the one common to all takes only numbers.


@rank_zero_only
def log_text(trainer: pl.Trainer, name: str, text: str, step: int) -> None:
    """Logs a text through the loggers that take texts: TensorBoard, Weights & Biases, MLflow and Comet."""
    for logger in trainer.loggers:
        for kind, give in _TAKERS_OF_TEXT.items():
            if isinstance(logger, kind):
                give(logger, name, text, step)


def _text_to_tensorboard(logger: Any, name: str, text: str, step: int) -> None:
    code = "\n".join(f"    {line}" for line in text.splitlines())  # TensorBoard shows Markdown, in which this keeps the lines
    logger.experiment.add_text(name, code, step)


def _text_to_wandb(logger: Any, name: str, text: str, step: int) -> None:
    logger.log_text(name, columns=["summary"], data=[[text]], step=step)


def _text_to_mlflow(logger: Any, name: str, text: str, step: int) -> None:
    logger.experiment.log_text(logger.run_id, text, f"{name}.txt")


def _to_comet(logger: Any, name: str, text: str, step: int) -> None:
    logger.experiment.log_text(text, step=step, metadata={"name": name})


_TAKERS_OF_TEXT: dict[type, Callable[[Any, str, str, int], None]] = {
    TensorBoardLogger: _text_to_tensorboard,
    WandbLogger: _text_to_wandb,
    MLFlowLogger: _text_to_mlflow,
    CometLogger: _to_comet,
}


# ---------------------------------------------------------------------- logged


def steps_taken(trainer: pl.Trainer) -> int:
    """Returns the number of steps as Lightning counts them for its loggers.

    Under manual optimization every batch is one step, no matter how many optimizers step.
    """
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.total_batch_idx + 1


def last_step(trainer: pl.Trainer) -> int:
    """Returns the number of the last step, from 0. Lightning gives it to loggers for values logged after that step."""
    return max(steps_taken(trainer) - 1, 0)


def log_metrics(trainer: pl.Trainer, values: dict[str, float], epoch: int | None = None) -> None:
    """Logs values through every logger, at Lightning's step and with the number of the epoch, as ``self.log`` does.

    ``epoch`` is the epoch that they belong to; None: the present one.
    """
    step = last_step(trainer)
    of_epoch = {"epoch": trainer.current_epoch if epoch is None else epoch}
    for logger in trainer.loggers:
        logger.log_metrics({**values, **of_epoch}, step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})


def log_hyperparameters(trainer: pl.Trainer, loader: Echoed | None, controller: Controller | None) -> None:
    """Logs the options of echoing, in plain types: checkpoints with them load with ``weights_only=True``.

    The options of several loaders stand under the loaders' names.
    """
    if loader is None:
        return
    options = _options(loader) if isinstance(loader, EchoLoader) else {name: _options(part) for name, part in loader.items()}
    for logger in trainer.loggers:
        logger.log_hyperparams({"echo": {**options, "controller": None if controller is None else repr(controller)}})


def _options(loader: EchoLoader) -> dict[str, Any]:
    return {
        "factor": loader.factor,
        "insertion_point": loader.insertion_point.value,
        "buffer_size": loader.buffer_size,
        "reuse": loader.reuse,
        "epoch_length": loader.epoch_length,
        "seed": loader.seed,
        "cache": None if loader.cache is None else {"size": loader.cache.size, "hold": loader.cache.hold},
        "share": None if loader.sharing is None else loader.sharing.config.name,
    }


def log_directory(trainer: pl.Trainer) -> str | None:
    """Returns the folder in which loggers keep the files of this run. All ranks must call this together.

    It is None without a logger, if the first logger keeps no files, and in a ``fast_dev_run``. If the logger has one folder for
    all runs (W&B, MLflow), it is the run's own folder in there, as Lightning's ``ModelCheckpoint`` chooses it.
    """
    if trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
        return None
    directory, logger = trainer.log_dir, trainer.loggers[0]
    if directory is None or isinstance(logger, TensorBoardLogger | CSVLogger):
        return directory
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return trainer.strategy.broadcast(os.path.join(directory, str(logger.name), version))


def package_versions() -> dict[str, str]:
    return {"lightning_echo": lightning_echo.__version__, "lightning": lightning.__version__, "torch": str(torch.__version__)}


def write_summary(directory: str | None, summary: RunSummary) -> None:
    """Writes ``echo_summary.json``, local or remote, if there is a place for it.

    If that is impossible, it only warns: no training may fail because of this file.
    """
    if directory is None:
        return
    path = os.path.join(directory, FILE_NAME)
    try:
        files = get_filesystem(directory)
        files.makedirs(directory, exist_ok=True)  # as Lightning's own callbacks do: a logger may not have written yet
        with files.open(path, "w", encoding="utf-8") as file:
            file.write(summary.to_json())
    except (OSError, ImportError, ValueError) as error:  # the last two: there is no package, or no file system, for such a URL
        rank_zero_warn(f"lightning_echo: {path} could not be written: {error}")


def report_of(
    meter: RunMeter,
    measures: EpochMeasures,
    loader: Echoed | None,
    observation: Observation,
    recommended: Decision,
    decision: Decision | None,
) -> EpochReport:
    """Returns the report of an epoch that is over. ``meter`` must have counted the examples.

    Args:
        loader: The echoed loaders; None: nothing is echoed.
        observation: The epoch, joined with the epochs before it if it is short.
        recommended: The factor that follows from the measurements.
        decision: The controller's decision; None without a controller.
    """
    whole, costs, cache, shared = measures.whole, measures.costs, together(measures.caches.values()), measures.shared
    fresh, echoed = meter.totals
    factor, exchanged = 1.0 if loader is None else loader.factor_in_force, None if cache is None else cache.exchange_seconds
    seconds = whole.steps * (whole.wait_seconds + whole.step_seconds) if whole is not None else 0
    is_one_factor = observation.idle_fraction is not None and (
        loader is None or isinstance(loader, EchoLoader) or loader.has_one_factor
    )
    slowest_rank = None if whole is None or meter.world_size == 1 else whole.slowest_rank
    return EpochReport(
        epoch=observation.epoch,
        steps=0 if whole is None else whole.steps,
        factor=factor,
        fresh_examples=fresh,
        echoed_examples=echoed,
        passes=None if loader is None else loader.passes,
        effective_factor=(measures.fresh + measures.echoed) / measures.fresh if measures.fresh else None,
        idle_fraction=None if whole is None else whole.idle_fraction,
        slowest_rank=slowest_rank,
        slowest_node=None if slowest_rank is None else meter.node_of(slowest_rank),
        data_wait_seconds=None if whole is None else whole.wait_seconds,
        step_seconds=None if whole is None else whole.step_seconds,
        upstream_seconds=None if costs is None else costs.upstream_seconds,
        examples_per_second=(measures.fresh + measures.echoed) / seconds if seconds else None,
        recommended_factor=recommended.factor if is_one_factor else None,
        first_batch_seconds=measures.first_batch_seconds,
        cache_hit_fraction=None if cache is None else cache.hit_fraction,
        cached_examples=None if cache is None else cache.examples,
        cache_bytes=None if cache is None else cache.bytes,
        cache_received_fraction=None if cache is None else cache.received_fraction,
        exchange_fraction=exchanged / seconds if exchanged is not None and seconds else None,
        cache_hold="" if cache is None else cache.hold,
        cache_is_full=cache is not None and cache.is_full,
        shared_trainings=None if shared is None else shared.trainings,
        peer_wait_fraction=shared.waited_seconds / seconds if shared is not None and seconds else None,
        missed_examples=None if shared is None else shared.missed,
        saved_cpu_seconds=None if shared is None else shared.saved_cpu_seconds,
        slowest_training="" if shared is None else shared.slowest_training,
        speedup=None if costs is None else costs.speedup(factor),
        next_factor=None if decision is None else decision.factor,
        reason="" if decision is None else decision.reason.value,
        message="" if decision is None else decision.message,
    )


class ProgressText:
    """Adds ``echo=2.0x idle 3%`` to the items of the progress bar.

    ``text`` is called each time that the bar is drawn. If it returns an empty text, nothing is displayed.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._bar: Any = None
        self._get_metrics: Any = None

    def show(self, trainer: pl.Trainer) -> None:
        self.hide()
        if (bar := trainer.progress_bar_callback) is not None:
            self._bar, self._get_metrics = bar, bar.get_metrics
            vars(bar)["get_metrics"] = self.get_metrics

    def hide(self) -> None:
        """Leaves the bar as it was. You may call it at any time."""
        if self._bar is not None:
            del vars(self._bar)["get_metrics"]
            if getattr(self._get_metrics, "__func__", None) is not getattr(type(self._bar), "get_metrics", None):
                vars(self._bar)["get_metrics"] = self._get_metrics  # other code had put it on the instance
            self._bar = None

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        text = self._text()
        return {**self._get_metrics(*args, **kwargs), **({"echo": text} if text else {})}
