"""Two processes on gloo, in which code of the user's runs on rank 0 alone: ``python one_rank_runs.py FOLDER``, see ddp_runs.py.

Lightning adds logged metrics up over the ranks when they are read. So a callback that reads them on rank 0 makes rank 0 wait for
the others there. A collective of ours must not come in between. A plain run is the first scenario: it shows that Lightning
allows all that the callbacks here do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torchmetrics import MeanMetric
from trainer_runs import Data, Recorder, trainer

from lightning_echo import EchoCallback, FactorSchedule, TargetIdle

WAITS = timedelta(seconds=40)  # for a rank that stands elsewhere


class Logs(Recorder):
    """Logs what Lightning adds up over the ranks: a value, and a torchmetrics object of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(float(batch_idx))
        self.log("rank", float(self.global_rank), on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_rank", float(self.global_rank), on_epoch=True, sync_dist=True)


class ReadsOnRankZero(pl.Callback):
    """Reads in every hook of a training that it can, on rank 0 alone."""

    def __init__(self, hooks: tuple[str, ...]) -> None:
        self.reads = 0
        for name in hooks:
            setattr(self, name, self._read)

    @property
    def state_key(self) -> str:
        return f"reads {id(self)}"

    def _read(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            self.reads += 1
            str((trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics))


AT_ENDS = ("on_train_epoch_end",)
EVERYWHERE = tuple(
    name
    for name in dir(pl.Callback)
    if name.startswith("on_") and not name.startswith(("on_load", "on_save", "on_test", "on_predict", "on_exception"))
)


EPOCHS, STEPS = 2, 6  # of each scenario


def fit(callbacks: list[Any], folder: Path, **options: Any) -> dict[str, Any]:
    model = options.pop("model", None) or Logs()
    strategy = options.pop("strategy", None) or DDPStrategy(process_group_backend="gloo", timeout=WAITS)
    given = {"max_epochs": EPOCHS, "log_every_n_steps": 2, "devices": 2, "default_root_dir": folder, **options}
    run = trainer(strategy=strategy, callbacks=callbacks, **given)
    run.fit(model, datamodule=Data(length=2 * 4 * STEPS))
    readers = [each for each in callbacks if isinstance(each, ReadsOnRankZero)]
    return {
        "metrics": {name: float(value) for name, value in run.callback_metrics.items() if not name.startswith("echo/")},
        "steps": model.steps,
        "reads": [each.reads for each in readers],
    }


def echoes() -> dict[str, EchoCallback]:
    return {
        "alone": EchoCallback(summary=False),
        "factor": EchoCallback(factor=2, summary=False),
        "asks within epochs": EchoCallback(TargetIdle(every_n_steps=3, first_after_steps=2), summary=False),
        "schedule": EchoCallback(FactorSchedule({0: 1, 1: 2}), cache="1MiB", summary=False),
    }


def scenario_plain(folder: Path) -> Any:
    return fit([ReadsOnRankZero(EVERYWHERE), TQDMProgressBar()], folder, enable_progress_bar=True)


def scenario_reads(folder: Path) -> Any:
    found = {}
    for name, echo in echoes().items():
        before, between, after = (ReadsOnRankZero(EVERYWHERE) for _ in range(3))
        checkpoint = ModelCheckpoint(folder / name, monitor="rank_epoch", save_on_train_epoch_end=True)
        found[name] = fit([before, checkpoint, between, echo, after], folder, enable_checkpointing=True)
    return found


class PutsItselfFirst(ReadsOnRankZero):
    """Comes before all other callbacks, also before one that did the same in ``setup``."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))


def scenario_puts_itself_first(folder: Path) -> Any:
    return fit([EchoCallback(factor=2, summary=False), PutsItselfFirst(AT_ENDS)], folder)


class Parallel(Logs):
    def configure_model(self) -> None:
        """The strategy asks for it."""


def scenario_model_parallel(folder: Path) -> Any:
    reads, echo = ReadsOnRankZero(EVERYWHERE), EchoCallback(factor=2, summary=False)
    strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo", timeout=WAITS)
    return fit([reads, echo], folder, strategy=strategy, model=Parallel())


def scenario_bars(folder: Path) -> Any:
    return fit([EchoCallback(summary=False), TQDMProgressBar()], folder, enable_progress_bar=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if sys.version_info < (3, 12):  # see ddp_runs.py
        multiprocessing.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_echo", "trainer_runs"])
        multiprocessing.set_start_method("forkserver")
    scenarios = {name.removeprefix("scenario_"): each for name, each in globals().items() if name.startswith("scenario_")}
    results = {name: scenario(folder) for name, scenario in scenarios.items()}
    torch.save(results, folder / f"rank-{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
