"""The output of a run about echoing: metrics, texts and pictures in loggers, a text in the progress bar, a file at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

import lightning_echo
from lightning_echo.config import DEMAND
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.measure.control import Controller, Decision, Observation
from lightning_echo.measure.report import from_journal, picture
from lightning_echo.measure.summary import FILE_NAME, EpochReport, RunSummary, fresh_step_seconds, speedup_of, stalls_bridged
from lightning_echo.pipeline.journal import fresh_counts
from lightning_echo.training.counts import Examples, together
from lightning_echo.training.loaders import Echoed, parts_of
from lightning_echo.training.meters import EpochMeasures, RunMeter
from lightning_echo.training.package import classes, package_of
from lightning_echo.training.trainer import rank_zero_info

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ---------------------------------------------------------------------- logger figures
# Lightning closes loggers after the hooks of callbacks, also if a training was interrupted. So a figure logged at the end
# arrives.

_NAME = "echo/run"


def log_picture(trainer: pl.Trainer, summary: RunSummary, directory: str | None) -> None:
    """Logs the picture through the loggers that take pictures, and names the others. Only rank 0 calls it.

    ``directory``: the folder in which journals of the run may be.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    step = last_step(trainer)
    taken = [(logger, give) for logger in trainer.loggers for name, give in _TAKERS.items() if _is(logger, name)]
    takers = [logger for logger, _ in taken]
    others = sorted({type(logger).__name__ for logger in trainer.loggers if logger not in takers})
    if others or not taken:
        which = f"{', '.join(others)} takes no figure" if others else "the Trainer has no logger"
        rank_zero_info(f"lightning_echo: plot=True logs to TensorBoard, W&B and MLflow; {which}")
    journal = None
    for logger, give in taken:
        try:
            if journal is None and directory is not None:
                journal = from_journal(summary, partial(fresh_counts, directory))
            give(logger, picture(summary, journal), step)
        except Exception as error:  # whatever a logger's client raises: a lost connection, a full disk
            # No training may fail because of a picture, or of a journal of another version.
            rank_zero_warn(f"lightning_echo: {type(logger).__name__} did not take the picture of the run: {error!r}")


_TAKERS: dict[str, Callable[[Any, Figure, int], Any]] = {
    "TensorBoardLogger": lambda logger, figure, step: logger.experiment.add_figure(_NAME, figure, step),
    "WandbLogger": lambda logger, figure, step: logger.log_image(_NAME, [figure], step=step),
    # MLflow's artifacts belong to no step.
    "MLFlowLogger": lambda logger, figure, step: logger.experiment.log_figure(logger.run_id, figure, f"{_NAME}.png"),
}


def _is(logger: Any, name: str) -> bool:
    return isinstance(logger, classes(f"loggers.{name}"))


# ---------------------------------------------------------------------- logger texts
# Each logger takes texts by its own method: the one common to all takes only numbers.


@rank_zero_only
def log_text(trainer: pl.Trainer, name: str, text: str, step: int) -> None:
    for logger in trainer.loggers:
        for kind, give in _TAKERS_OF_TEXT.items():
            if _is(logger, kind):
                give(logger, name, text, step)


_TAKERS_OF_TEXT: dict[str, Callable[[Any, str, str, int], Any]] = {
    # TensorBoard shows Markdown, in which the indent keeps the lines.
    "TensorBoardLogger": lambda logger, name, text, step: logger.experiment.add_text(
        name, "\n".join(f"    {line}" for line in text.splitlines()), step
    ),
    "WandbLogger": lambda logger, name, text, step: logger.log_text(name, columns=["summary"], data=[[text]], step=step),
    "MLFlowLogger": lambda logger, name, text, step: logger.experiment.log_text(logger.run_id, text, f"{name}.txt"),
    "CometLogger": lambda logger, name, text, step: logger.experiment.log_text(text, step=step, metadata={"name": name}),
}


# ---------------------------------------------------------------------- logged


def steps_taken(trainer: pl.Trainer) -> int:
    """Returns the number of steps as Lightning counts them for its loggers: with manual optimization, each batch is one step."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.total_batch_idx + 1


def last_step(trainer: pl.Trainer) -> int:
    """Returns the number of the last step, from 0. Lightning gives it to loggers for values logged after that step."""
    return max(steps_taken(trainer) - 1, 0)


def log_metrics(trainer: pl.Trainer, values: dict[str, float], epoch: int | None = None) -> None:
    """Logs values of an epoch (None: the present one) through every logger, at Lightning's step, as ``self.log`` does."""
    step = last_step(trainer)
    of_epoch = {"epoch": trainer.current_epoch if epoch is None else epoch}
    for logger in trainer.loggers:
        logger.log_metrics({**values, **of_epoch}, step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})


def log_hyperparameters(trainer: pl.Trainer, loader: Echoed | None, controller: Controller | None) -> None:
    """Logs the options of echoing, in plain types: checkpoints with them load with ``weights_only=True``."""
    if loader is None:
        return
    of_parts = {
        name: {
            **({"factor": DEMAND, "max_factor": part.factor} if part.on_demand else {"factor": part.factor}),
            "insertion_point": part.insertion_point.value,
            "buffer_size": part.buffer_size,
            "reuse": part.reuse,
            "epoch_length": part.epoch_length,
            "seed": part.seed,
            "cache": None if part.cache is None else {"size": part.cache.size, "hold": part.cache.hold},
            "share": None if part.sharing is None else part.sharing.config.name,
        }
        for name, part in parts_of(loader).items()
    }
    options = of_parts[""] if isinstance(loader, EchoLoader) else of_parts
    for logger in trainer.loggers:
        logger.log_hyperparams({"echo": {**options, "controller": None if controller is None else repr(controller)}})


def log_directory(trainer: pl.Trainer) -> str | None:
    """Returns the folder in which loggers keep the files of this run. All ranks must call this together.

    It is None without a logger, if the first logger keeps no files, and in a ``fast_dev_run``. If the logger has one folder for
    all runs (W&B, MLflow), it is the run's own folder in there, as Lightning's ``ModelCheckpoint`` chooses it.
    """
    if trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
        return None
    directory, logger = trainer.log_dir, trainer.loggers[0]
    if directory is None or _is(logger, "TensorBoardLogger") or _is(logger, "CSVLogger"):
        return directory
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return trainer.strategy.broadcast(os.path.join(directory, str(logger.name), version))


def run_name(trainer: pl.Trainer) -> str:
    """Returns the run as its first logger names it; empty without a logger, and on all ranks but the first."""
    if not trainer.loggers or not trainer.is_global_zero:
        return ""
    name, version = trainer.loggers[0].name, trainer.loggers[0].version
    return "/".join(filter(None, (name, f"version_{version}" if isinstance(version, int) else version)))


def program_name() -> str:
    """Returns the file of the program that runs, without its folder; of a package that runs as a module, the package."""
    path = Path(sys.argv[0] or "python")
    return path.parent.name if path.name == "__main__.py" and path.parent.name else path.name


def local_time(seconds: float | None = None) -> str:
    """Returns a time in the zone of this machine, as ISO 8601 has it. ``seconds``: since 1970, UTC; None: now."""
    now = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(now, timezone.utc).astimezone().isoformat(timespec="seconds")


def package_versions(trainer: pl.Trainer) -> dict[str, str]:
    package = package_of(trainer)
    of_trainer = {package.distribution: package.version}
    return {"lightning_echo": lightning_echo.__version__, **of_trainer, "torch": str(torch.__version__)}


def write_summary(directory: str | None, summary: RunSummary) -> None:
    """Writes ``echo_summary.json``, local or remote. It only warns of an error: no training may fail because of this file."""
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
    before: Sequence[EpochReport] = (),
) -> EpochReport:
    """Returns the report of an epoch that is over, and that is observed joined with those ``before`` it if it is short."""
    whole, costs, cache, shared = measures.whole, measures.costs, together(measures.caches.values()), measures.shared
    totals, exchanged = meter.counts.totals, None if cache is None else cache.exchange_seconds
    factor = factor_shown(loader, totals)
    on_demand = {name: part for name, part in parts_of(loader).items() if part.on_demand}
    seconds = whole.steps * (whole.wait_seconds + whole.busy_seconds) if whole is not None else 0
    is_one_factor = observation.idle_fraction is not None and (
        loader is None or isinstance(loader, EchoLoader) or loader.has_one_factor
    )
    slowest_rank = None if whole is None or meter.world_size == 1 else whole.slowest_rank
    is_measured = not any(part.reads_ahead or part.sharing is not None for part in on_demand.values())
    report = EpochReport(
        epoch=observation.epoch,
        steps=0 if whole is None else whole.steps,
        factor=factor,
        fresh_examples=totals.fresh,
        echoed_examples=totals.echoed,
        fresh_in_epoch=measures.fresh if measures.is_counted else None,
        echoed_in_epoch=measures.echoed if measures.is_counted else None,
        passes=None if loader is None else loader.passes,
        effective_factor=(measures.fresh + measures.echoed) / measures.fresh if measures.fresh else None,
        idle_fraction=None if whole is None else whole.idle_fraction,
        slowest_rank=slowest_rank,
        slowest_node=None if slowest_rank is None else meter.node_of(slowest_rank),
        data_wait_seconds=None if whole is None else whole.wait_seconds,
        step_seconds=None if whole is None else whole.busy_seconds,
        slices=tuple((round(waited, 6), round(seconds, 6)) for waited, seconds in measures.slices),
        upstream_seconds=None
        if costs is None or any(part.reads_ahead for part in on_demand.values())
        else costs.upstream_seconds,
        examples_per_second=(measures.fresh + measures.echoed) / seconds if seconds else None,
        recommended_factor=recommended.factor if is_one_factor and not on_demand else None,
        first_batch_seconds=measures.first_batch_seconds,
        fresh_batches=_fresh_batches(measures, on_demand) if on_demand and seconds else None,
        fresh_batch_seconds=None if not on_demand or costs is None or not is_measured else costs.host_seconds(1.0),
        cache_hit_fraction=None if cache is None else cache.hit_fraction,
        cached_examples=None if cache is None else cache.examples,
        cache_bytes=None if cache is None else cache.bytes,
        cache_received_fraction=None if cache is None else cache.received_fraction,
        exchange_fraction=exchanged / seconds if exchanged is not None and seconds else None,
        reads_in_flight=measures.reads_in_flight,
        worker_wait_fraction=measures.worker_wait_fraction,
        taken_fraction=None if measures.load is None else measures.load.slowed_fraction,
        load="" if measures.load is None else measures.load.sentence,
        cache_hold="" if cache is None else cache.hold,
        cache_is_full=cache is not None and cache.is_full,
        shared_trainings=None if shared is None else shared.trainings,
        peer_wait_fraction=shared.waited_seconds / seconds if shared is not None and seconds else None,
        missed_examples=None if shared is None else shared.missed,
        read_again_examples=None if shared is None else shared.read_again,
        saved_cpu_seconds=None if shared is None else shared.saved_cpu_seconds,
        slowest_training="" if shared is None else shared.slowest_training,
        fresh_step_seconds=_fresh_step_seconds(measures, loader, observation, meter.cores),
        max_factor=max((part.factor_in_force for part in on_demand.values()), default=None),
        next_factor=None if decision is None else decision.factor,
        reason="" if decision is None else decision.reason.value,
        message="" if decision is None else decision.message,
    )
    report = replace(report, speedup=speedup_of([*before, report]))
    if report.fresh_batches is None:
        return report
    return replace(report, stalls_bridged_seconds=stalls_bridged([*before, report]))


def _fresh_step_seconds(
    measures: EpochMeasures, loader: Echoed | None, observation: Observation, cores: int
) -> tuple[float, float] | None:
    """Returns what a step of an epoch would have taken with fresh examples alone; None where the workers' time does not tell.

    At factor 1 a cache would have had other examples by then, and threads that read ahead, or a reader, work beside the workers.
    """
    parts = parts_of(loader).values()
    if measures.whole is not None and not measures.echoed and parts:
        seconds = measures.whole.wait_seconds + measures.whole.busy_seconds
        return seconds, seconds
    if any(part.on_demand or part.reads_ahead or part.sharing is not None or part.cache is not None for part in parts):
        return None
    if not parts or not all(part.seconds.batches for part in parts):
        return None
    return fresh_step_seconds(observation, cores)


def factor_shown(loader: Echoed | None, totals: Examples) -> float:
    """Returns the factor that is logged: the one in force; on demand the uses per fresh example in the run so far."""
    if loader is None:
        return 1.0
    return totals.uses if loader.on_demand else loader.factor_in_force


def _fresh_batches(measures: EpochMeasures, on_demand: Iterable[str]) -> float:
    """Returns the fresh batches of an epoch. Each step takes a batch of each loader, so the slowest source decides."""
    steps = 0 if measures.whole is None else measures.whole.steps
    whole = Examples(measures.fresh, measures.echoed)
    counts = [measures.parts.get(name, whole) for name in on_demand]
    return min((steps * each.fresh / (each.fresh + each.echoed) for each in counts if each.fresh + each.echoed), default=0.0)


class ProgressText:
    """Adds ``echo=2.0x idle 3%`` to the items of the progress bar, each time that the bar is drawn."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text  # if it returns an empty text, nothing is displayed
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
