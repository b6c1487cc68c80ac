"""A checkpoint that is saved within a step, as Slurm's signal and ``OnExceptionCheckpoint`` save it: that step is done again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from test_trainer_streams import Saves as Place  # noqa: F401 (test_trainer_steps.py has it from here)
from test_trainer_streams import Stateful, StatefulBatches
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, SaveAt, Scans, trainer

from lightning_echo import EchoCallback, EchoLoader, FactorSchedule

pytestmark = pytest.mark.usefixtures("read_here")
BATCH, LENGTH, EPOCHS = 3, 17, 2


KINDS: dict[str, Any] = {
    "by index": lambda: DataLoader(Scans(LENGTH), BATCH, shuffle=True),
    "by index, workers": lambda: DataLoader(Scans(LENGTH), BATCH, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stateful(LENGTH), BATCH),
    "stream, workers": lambda: DataLoader(Stateful(LENGTH), BATCH, num_workers=2),
    "batches": lambda: StatefulBatches(5),
}
# A bare `EchoLoader` without a length does not hear which batch is in use.
CASES = [(kind, True) for kind in KINDS] + [("by index", False), ("by index, workers", False)]
HOOKS = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]


class Saves(pl.Callback):
    """Saves a checkpoint in a hook of each step."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder, self.steps = folder, 0
        setattr(self, hook, self._save)

    def _save(self, runner: pl.Trainer, *_: Any) -> None:
        runner.save_checkpoint(self.folder / f"{self.steps}.ckpt")

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1


def fit(
    kind: str,
    with_callback: bool,
    *callbacks: Any,
    ckpt_path: Any = None,
    model: Any = None,
    controller: Any = None,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    echo: dict[str, Any] = {"insertion_point": "auto" if kind == "batches" else "after_augmentation", "seed": 3}
    loader, model = KINDS[kind](), model or Recorder()
    if with_callback:
        callbacks = (EchoCallback(controller, factor=2, **echo), *callbacks)
    else:
        loader = EchoLoader(loader, 2, **echo)
    running = trainer(max_epochs=EPOCHS, callbacks=list(callbacks), **options)
    running.fit(model, loader, Data().val_dataloader(), ckpt_path=ckpt_path)
    return model


@pytest.mark.grid
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("kind", "with_callback"), CASES)
def test_the_resumed_run_begins_with_the_batch_of_that_step(tmp_path: Path, kind: str, hook: str, with_callback: bool) -> None:
    whole = fit(kind, with_callback, Saves(tmp_path, hook))
    first = whole.steps[0]
    for at in (first // 2, first):
        resumed = fit(kind, with_callback, ckpt_path=tmp_path / f"{at}.ckpt")
        assert resumed.batches == whole.batches[at:], at
        assert resumed.weights == whole.weights, at


class Fails(Recorder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 4:
            raise KeyError("a step that fails")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path")
@pytest.mark.parametrize(("kind", "with_callback"), [("by index, workers", False), ("stream", True)])
def test_a_step_that_fails_is_done_again(tmp_path: Path, kind: str, with_callback: bool) -> None:
    whole = fit(kind, with_callback)
    with pytest.raises(KeyError, match="a step that fails"):
        fit(kind, with_callback, OnExceptionCheckpoint(str(tmp_path)), model=Fails(), enable_checkpointing=True)
    (path,) = tmp_path.iterdir()
    assert fit(kind, with_callback, ckpt_path=path).batches == whole.batches[4:]


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path")
@pytest.mark.parametrize("factor", [2, "demand"])
def test_the_batch_of_a_step_that_ended_a_run_is_counted_once(tmp_path: Path, factor: Any) -> None:
    def run(model: Recorder, *callbacks: Any, ckpt_path: Any = None) -> EchoCallback:
        echo = EchoCallback(factor=factor, insertion_point="after_augmentation", seed=3)
        running = trainer(max_epochs=EPOCHS, callbacks=[echo, *callbacks], enable_checkpointing=bool(callbacks))
        running.fit(model, KINDS["by index, workers"](), Data().val_dataloader(), ckpt_path=ckpt_path)
        return echo

    with pytest.raises(KeyError):
        run(Fails(), OnExceptionCheckpoint(str(tmp_path)))
    (path,) = tmp_path.iterdir()
    model = Recorder()
    reports = run(model, ckpt_path=path).reports
    assert [report.fresh_examples + report.echoed_examples for report in reports] == [LENGTH, 2 * LENGTH]
    assert len(model.batches) == 2 * -(-LENGTH // BATCH) - 4


def test_a_factor_that_changes_at_an_epochs_end_counts_from_the_same_batch_after_a_resume_from_its_last_step(
    tmp_path: Path,
) -> None:
    def run(*callbacks: Any, ckpt_path: Any = None) -> Any:
        schedule = FactorSchedule({0: 1.5, 1: 2.0})
        return fit("stream, workers", True, *callbacks, ckpt_path=ckpt_path, controller=schedule)

    save = SaveAt(tmp_path, range(30))
    whole = run(save)
    first, _ = whole.steps
    resumed = run(ckpt_path=save.path(first))
    assert resumed.batches == whole.batches[first:]
    assert resumed.weights == whole.weights
