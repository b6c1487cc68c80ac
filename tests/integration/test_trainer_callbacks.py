"""What runs beside the training: callbacks, a look at the data, and every way in which a run can end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from trainer_runs import Data, Killed, Recorder, echoed, fit

from lightning_echo import EchoCallback, EchoDataModule


class Scheduled(Recorder):
    """Has a schedule to monitor and batch normalisation to update."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "noise": self.norm(batch["noise"].float())})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def test_early_stopping_ends_the_run_after_whole_epochs() -> None:
    stop = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    run = fit(echoed(), callbacks=[stop], max_epochs=9)
    assert run.model.steps == [6, 6]
    assert stop.stopped_epoch == 1


class PutsItselfFirst(pl.Callback):
    """Notes which callback comes first at the end of each epoch."""

    def __init__(self) -> None:
        self.first: list[type] = []

    def on_train_start(self, trainer: Any, model: Any) -> None:
        trainer.callbacks.insert(0, trainer.callbacks.pop(trainer.callbacks.index(self)))
        assert trainer.callbacks[0] is self

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        self.first.append(type(trainer.callbacks[0]))


def test_the_callback_comes_before_one_that_puts_itself_first_since_ranks_might_wait_for_each_other() -> None:
    others = PutsItselfFirst()
    fit(Data(), callbacks=[others, EchoCallback(factor=2, seed=7)], max_epochs=2)
    assert others.first == [EchoCallback] * 2


def test_model_checkpoint_saves_within_epochs_at_their_ends_and_for_the_best(tmp_path: Path) -> None:
    save = [
        ModelCheckpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=4, save_top_k=-1),
        ModelCheckpoint(tmp_path / "epochs", filename="{epoch}", monitor="val_loss", save_top_k=-1, save_last=True),
    ]
    run = fit(echoed(), callbacks=save, enable_checkpointing=True)
    assert run.model.batches == fit(echoed()).model.batches
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {f"step={step}.ckpt" for step in (4, 8, 12, 16)}
    epochs = {path.name for path in (tmp_path / "epochs").iterdir()}
    assert epochs == {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"}


def test_the_learning_rate_monitor_logs_what_it_logs_without_echoing(tmp_path: Path) -> None:
    logged = []
    for data in (Data(), echoed()):
        folder = tmp_path / type(data).__name__
        options = {"logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 1}
        fit(data, model=Scheduled(), callbacks=[LearningRateMonitor("step")], **options)
        rows = (folder / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("lr-SGD")
        logged.append([row.split(",")[column] for row in rows[1:] if row.split(",")[column]])
    assert logged[0] == logged[1]
    assert len(logged[0]) == 18


@pytest.mark.filterwarnings("ignore:Swapping scheduler", "ignore:Found unsupported keys in the lr scheduler")
def test_stochastic_weight_averaging_takes_its_extra_epoch_over_the_data() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    run = fit(echoed(), model=Scheduled(), callbacks=[averaging], max_epochs=4)
    assert run.model.steps == [6] * 5  # the last one is without steps of the optimizer, for the batch normalisation
    assert run.model.batches == fit(echoed(), max_epochs=5).model.batches
    assert int(run.model.norm.num_batches_tracked) == 6
    assert run.trainer.max_epochs == 4


def said_by(data: Any, folder: Path) -> set[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"default_root_dir": folder, "log_every_n_steps": 1, "logger": CSVLogger(folder)}
        pl.Trainer(max_epochs=2, accelerator="cpu", **options).fit(Recorder(), datamodule=data)
    return {str(each.message) for each in said}


@pytest.mark.parametrize(("point", "workers"), [("before_augmentation", 2), ("after_transfer", 0)])
def test_a_default_run_warns_of_nothing_that_a_plain_one_does_not_warn_of(point: str, workers: int, tmp_path: Path) -> None:
    plain = said_by(Data(workers), tmp_path / "plain")
    assert said_by(echoed(2, point=point, workers=workers), tmp_path / "echoed") <= plain


BEFORE: list[Any] = []  # processes and threads that were there before the test: another one may have left some


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No child process and no thread is there that was not there before."""
    gc.collect()
    processes = set(psutil.Process().children(recursive=True))
    threads = set(threading.enumerate())
    BEFORE[:] = [*processes, *threads]
    yield
    gc.collect()
    deadline = time.monotonic() + 10  # a worker that was told to end takes a moment to be gone
    while time.monotonic() < deadline and set(psutil.Process().children(recursive=True)) - processes:
        psutil.wait_procs(set(psutil.Process().children(recursive=True)) - processes, timeout=0.1)
    assert not set(psutil.Process().children(recursive=True)) - processes
    for thread in set(threading.enumerate()) - threads:  # so does the thread that torch's queue wrote with
        thread.join(max(deadline - time.monotonic(), 0))
    assert not set(threading.enumerate()) - threads


def running() -> bool:
    """Whether a worker and the fetching thread of this test are there: what the tests below are about."""
    names = [thread.name for thread in threading.enumerate() if thread not in BEFORE]
    workers = [process for process in psutil.Process().children() if process not in BEFORE]
    return bool(workers) and any("lightning_echo" in name for name in names)


class EndsBy(pl.Callback):
    """Ends the run within the second epoch, in the way given."""

    def __init__(self, action: Any) -> None:
        self.action, self.was_running = action, False

    def on_train_batch_end(self, runner: pl.Trainer, *args: Any) -> None:
        if runner.global_step == 8:
            self.was_running = running()
            self.action(runner)


def raises(error: type[BaseException]) -> Any:
    def act(runner: pl.Trainer) -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("action", "options", "steps"),
    [
        (raises(Killed), {}, None),
        (lambda runner: signal.raise_signal(signal.SIGINT), {}, None),
        (lambda runner: None, {"max_epochs": 2}, 12),
        (lambda runner: setattr(runner, "should_stop", True), {}, 8),
    ],
    ids=["exception", "signal", "epochs", "stop"],
)
def test_however_a_run_ends_it_leaves_no_process_and_no_thread_and_goes_on_in_the_next_fit(
    action: Any, options: dict[str, Any], steps: int | None, nothing_left: None
) -> None:
    end, data, before = EndsBy(action), echoed(workers=1), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((Killed, KeyboardInterrupt, SystemExit)) if steps is None else nullcontext():
            assert fit(data, callbacks=[end], **{"max_epochs": 100, **options}).trainer.global_step == steps
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores any further one
    assert end.was_running
    assert not running()  # although the data module is still there
    if steps is None:
        again = fit(data, max_epochs=1).model
        assert again.batches == fit(echoed(), max_epochs=3).model.batches[8 : 8 + 6]


@pytest.mark.parametrize("hook", ["teardown", "on_exception"])
def test_a_hook_of_the_users_that_fails_leaves_no_process_and_no_thread(hook: str, nothing_left: None) -> None:
    user = Data(1)

    def fails(*args: Any) -> None:
        raise RuntimeError(f"in {hook}")

    setattr(user, hook, fails)
    data = EchoDataModule(user, 2)
    with pytest.raises(RuntimeError, match=f"in {hook}"):
        fit(data, callbacks=[EndsBy(raises(Killed))] if hook == "on_exception" else [])
    assert not running()
    assert data.loader.counts.delivered > 0


@pytest.mark.program
@pytest.mark.own_interpreter  # its workers are looked for
def test_ctrl_c_at_the_terminal_ends_training_and_all_its_workers(tmp_path: Path) -> None:
    """A terminal sends the signal to every process of the group, workers included."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lightning.pytorch as pl
from trainer_runs import echoed, fit

class Tell(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 8:
            print("ready", flush=True)

if __name__ == "__main__":
    fit(echoed(workers=2, delay=0.02), callbacks=[Tell()], max_epochs=100000)
""")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        gone, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
        assert len(gone) == len(workers)
        assert "Detected KeyboardInterrupt" in said
        assert process.returncode == 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
