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
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from trainer_runs import POINTS, Data, Killed, Recorder, echoed, fit

from lightning_echo import EchoDataModule, EchoLoader


def bare(workers: int = 2, **options: Any) -> EchoLoader:
    return EchoLoader(Data(workers, **options).train_dataloader(), 2.5, insertion_point="after_augmentation", seed=7)


# ---------------------------------------------------------------------- callbacks of Lightning


class Scheduled(Recorder):
    """Has a schedule to monitor and batch normalisation to update."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "noise": self.norm(batch["noise"].float())})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def test_early_stopping_ends_the_run_after_whole_epochs() -> None:
    stop = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    run = fit(echoed(workers=2), callbacks=[stop], max_epochs=9)
    assert run.model.steps == [6, 6]
    assert stop.stopped_epoch == 1


def test_model_checkpoint_saves_within_epochs_at_their_ends_and_for_the_best(tmp_path: Path) -> None:
    save = [
        ModelCheckpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=4, save_top_k=-1),
        ModelCheckpoint(tmp_path / "epochs", filename="{epoch}", monitor="val_loss", save_top_k=-1, save_last=True),
    ]
    undisturbed = fit(echoed(workers=2)).model
    run = fit(echoed(workers=2), callbacks=save, enable_checkpointing=True)
    assert run.model.batches == undisturbed.batches
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {f"step={step}.ckpt" for step in (4, 8, 12, 16)}
    epochs = {path.name for path in (tmp_path / "epochs").iterdir()}
    assert epochs == {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"}


def test_the_learning_rate_monitor_logs_what_it_logs_without_echoing(tmp_path: Path) -> None:
    logged = []
    for data in (Data(2), echoed(workers=2)):
        folder = tmp_path / type(data).__name__
        fit(
            data,
            model=Scheduled(),
            callbacks=[LearningRateMonitor("step")],
            logger=CSVLogger(folder, name="", version=""),
            log_every_n_steps=1,
        )
        rows = (folder / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("lr-SGD")
        logged.append([row.split(",")[column] for row in rows[1:] if row.split(",")[column]])
    assert logged[0] == logged[1]
    assert len(logged[0]) == 18


@pytest.mark.filterwarnings("ignore:Swapping scheduler", "ignore:Found unsupported keys in the lr scheduler")
def test_stochastic_weight_averaging_takes_its_extra_epoch_over_the_data() -> None:
    run = fit(
        echoed(workers=2),
        model=Scheduled(),
        callbacks=[StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)],
        max_epochs=4,
    )
    undisturbed = fit(echoed(workers=2), max_epochs=5).model
    assert run.model.steps == [6] * 5  # the last one is without steps of the optimizer, for the batch normalisation
    assert run.model.batches == undisturbed.batches
    assert int(run.model.norm.num_batches_tracked) == 6
    assert run.trainer.max_epochs == 4


# ---------------------------------------------------------------------- a look at the data


class Look(pl.Callback):
    """Looks at a batch of the training data in one hook, as a user's callback would."""

    def __init__(self, hook: str, *, inside: bool = False) -> None:
        self.inside, self.looked = inside, 0
        setattr(self, hook, self.look)

    def look(self, trainer: pl.Trainer, *args: Any) -> None:
        loader: Any = trainer.train_dataloader
        next(iter(loader.loader if self.inside else loader))
        self.looked += 1


HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end")


@pytest.mark.grid
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", ["module", "bare"])
@pytest.mark.filterwarnings("ignore:lightning_echo. only a training is echoed")
def test_a_second_iteration_during_training_gets_the_plain_loader_and_moves_nothing(hook: str, kind: str) -> None:
    data = echoed() if kind == "module" else bare(0)
    undisturbed, look = fit(echoed()), Look(hook)
    run = fit(data, callbacks=[look])
    assert look.looked == {"on_train_start": 1, "on_train_batch_end": 18}.get(hook, 3)
    assert run.model.batches == undisturbed.model.batches
    assert run.loader.counts == undisturbed.loader.counts


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_inside_may_be_looked_at_at_any_time(workers: int) -> None:
    undisturbed, looks = fit(echoed(workers=workers)), [Look(hook, inside=True) for hook in HOOKS if "batch" not in hook]
    run = fit(echoed(workers=workers), callbacks=looks)
    assert [look.looked for look in looks] == [1, 3, 3, 3]
    assert run.model.batches == undisturbed.model.batches
    assert run.loader.counts == undisturbed.loader.counts


# ---------------------------------------------------------------------- warnings


def said_by(data: Any, folder: Path) -> set[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runner = pl.Trainer(
            max_epochs=2, accelerator="cpu", default_root_dir=folder, log_every_n_steps=1, logger=CSVLogger(folder)
        )
        runner.fit(Recorder(), datamodule=data)
    return {str(each.message) for each in said}


@pytest.mark.grid
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_default_run_warns_of_nothing_that_a_plain_one_does_not_warn_of(point: str, workers: int, tmp_path: Path) -> None:
    plain = said_by(Data(workers), tmp_path / "plain")
    assert said_by(echoed(2, point=point, workers=workers), tmp_path / "echoed") <= plain


# ---------------------------------------------------------------------- ways to end


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
    """Whether workers and the fetching thread of this test are there: what the tests below are about."""
    names = [thread.name for thread in threading.enumerate() if thread not in BEFORE]
    workers = [process for process in psutil.Process().children() if process not in BEFORE]
    return len(workers) >= 2 and any("lightning_echo" in name for name in names)


class EndsBy(pl.Callback):
    """Ends the run within the second epoch, in the way given."""

    def __init__(self, action: Any) -> None:
        self.action, self.was_running = action, False

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 8:
            self.was_running = running()
            self.action(trainer)


def fail(trainer: pl.Trainer) -> None:
    raise Killed


def stop(trainer: pl.Trainer) -> None:
    trainer.should_stop = True


def let_time_run_out(trainer: pl.Trainer) -> None:
    (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, Timer))  # type: ignore[attr-defined]
    timer.load_state_dict({"time_elapsed": {"train": 2 * 3600}})


def go_on(trainer: pl.Trainer) -> None: ...


@pytest.mark.parametrize("point", POINTS)
def test_an_exception_in_training_leaves_no_process_and_no_thread(point: str, nothing_left: None) -> None:
    end = EndsBy(fail)
    data = echoed(point=point, workers=2)
    with pytest.raises(Killed):
        fit(data, callbacks=[end])
    assert end.was_running
    assert not running()  # although the data module is still there
    assert data.loader.counts.delivered > 0


def test_the_end_of_a_run_leaves_no_process_and_no_thread(nothing_left: None) -> None:
    end = EndsBy(lambda trainer: None)
    run = fit(echoed(workers=2), callbacks=[end])
    assert end.was_running
    assert not running()
    assert run.loader.counts.delivered == 3 * 22


@pytest.mark.parametrize(
    ("action", "options"), [(stop, {}), (go_on, {"max_steps": 9}), (let_time_run_out, {"max_time": {"hours": 1}})]
)
def test_a_run_that_ends_within_an_epoch_leaves_no_process_and_no_thread(
    action: Any, options: dict[str, Any], nothing_left: None
) -> None:
    end = EndsBy(action)
    run = fit(echoed(workers=2), callbacks=[end], max_epochs=100, **options)
    assert end.was_running
    assert not running()
    assert run.trainer.global_step in (8, 9)


def test_an_exception_in_the_data_set_arrives_as_it_is_and_leaves_nothing(nothing_left: None) -> None:
    data = echoed(workers=2, fail_at=13, point="before_augmentation")
    with pytest.raises(LookupError, match="unreadable") as caught:
        fit(data)
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "13" in told
    assert not running()


@pytest.mark.parametrize("action", ["raise", "signal"])
def test_an_interrupt_leaves_no_process_and_no_thread(action: str, nothing_left: None) -> None:
    def interrupt(trainer: pl.Trainer) -> None:
        if action == "raise":
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    end, before = EndsBy(interrupt), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(echoed(workers=2), callbacks=[end])
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores any further one
    assert end.was_running
    assert not running()


@pytest.mark.parametrize("action", [fail, lambda trainer: None])
def test_a_bare_loader_leaves_nothing_once_it_is_dropped(action: Any, nothing_left: None) -> None:
    loader, end = bare(), EndsBy(action)
    try:
        fit(loader, callbacks=[end])
    except Killed as killed:
        killed.__traceback__ = None
    assert end.was_running
    del loader, end  # Lightning gives callbacks a method of the model, and that leads to the Trainer
    gc.collect()
    assert not running()


@pytest.mark.parametrize("hook", ["teardown", "on_exception"])
def test_a_hook_of_the_users_that_fails_leaves_no_process_and_no_thread(hook: str, nothing_left: None) -> None:
    user = Data(2)

    def fails(*args: Any) -> None:
        raise RuntimeError(f"in {hook}")

    setattr(user, hook, fails)
    data = EchoDataModule(user, 2)
    with pytest.raises(RuntimeError, match=f"in {hook}"):
        fit(data, callbacks=[EndsBy(fail)] if hook == "on_exception" else [])
    assert not running()
    assert data.loader.counts.delivered > 0


def test_a_run_that_failed_can_be_fitted_again() -> None:
    data = echoed(workers=2)
    with pytest.raises(Killed):
        fit(data, callbacks=[EndsBy(fail)])
    whole = fit(echoed(workers=2), max_epochs=5).model
    again = fit(data).model
    assert again.steps == [6, 6, 6]
    assert again.batches == whole.batches[8 : 8 + 18]


@pytest.mark.own_interpreter  # its workers are looked for
@pytest.mark.parametrize("kind", ["module", pytest.param("bare", marks=pytest.mark.slow)])
def test_ctrl_c_at_the_terminal_ends_training_and_all_its_workers(kind: str, tmp_path: Path) -> None:
    """A terminal sends the signal to every process of the group, workers included."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lightning.pytorch as pl
from test_trainer_callbacks import bare, echoed, fit

class Tell(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 8:
            print("ready", flush=True)

if __name__ == "__main__":
    data = echoed(workers=2, delay=0.02) if {kind!r} == "module" else bare(2, delay=0.02)
    fit(data, callbacks=[Tell()], max_epochs=100000)
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
