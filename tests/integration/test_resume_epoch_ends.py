"""Resuming at the ends of epochs, and where a run stopped within one: the loader is where the Trainer is."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callback_cases import Remembering
from trainer_runs import Data, Recorder, Run, echoed, fit, fresh_stream

from lightning_echo import EchoCallback, EchoConfig, FactorSchedule

pytestmark = pytest.mark.usefixtures("read_here")
SCHEDULES = [{0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 1.0, 2: 3.0}]


class SaveIn(pl.Callback):
    """Saves in chosen hooks, each time; knows after how many steps."""

    def __init__(self, folder: Path, *hooks: str) -> None:
        self.folder = folder
        self.saved: list[tuple[str, int, str]] = []

        for hook in hooks:
            setattr(self, hook, partial(self._save, hook))

    def _save(self, hook: str, runner: pl.Trainer, *args: Any) -> None:
        if runner.is_last_batch:
            path = str(self.folder / f"{len(self.saved)}.ckpt")
            runner.save_checkpoint(path)
            self.saved.append((path, runner.global_step, hook))


def scheduled(schedule: dict[int, float], callback: bool, epoch_length: str, *callbacks: Any, **options: Any) -> Run:
    """A run whose factor a schedule decides, echoed by a data module or by the callback."""
    if not callback:
        data: Any = echoed(schedule[0], epoch_length=epoch_length)
        echo = EchoCallback(FactorSchedule(schedule), summary=False)
    else:
        config = EchoConfig(schedule[0], insertion_point="after_augmentation", seed=7, epoch_length=epoch_length)
        data, echo = Data(), EchoCallback(FactorSchedule(schedule), echo=config, summary=False)
    return fit(data, callbacks=[echo, *callbacks], **options)


@pytest.mark.parametrize(
    ("schedule", "callback", "epoch_length"), [(SCHEDULES[0], False, "fixed"), (SCHEDULES[1], True, "full_pass")]
)
def test_a_run_resumes_exactly_at_an_epochs_end_whatever_the_factor_does_there(
    schedule: dict[int, float], callback: bool, epoch_length: str, tmp_path: Path
) -> None:
    save = SaveIn(tmp_path, "on_train_batch_end", "on_validation_end", "on_train_epoch_end")
    whole = scheduled(schedule, callback, epoch_length, save).model
    assert len(save.saved) == 9
    for path, step, hook in save.saved[:3]:
        resumed = scheduled(schedule, callback, epoch_length, ckpt_path=path).model
        assert resumed.batches == whole.batches[step:], f"saved in {hook}, step {step}"
        assert resumed.epochs == whole.epochs[step:], f"saved in {hook}, step {step}"


def test_an_epoch_whose_end_lightning_leaves_out_after_resuming_is_logged_with_its_own_number(tmp_path: Path) -> None:
    save = SaveIn(tmp_path, "on_train_batch_end")
    scheduled(SCHEDULES[0], True, "fixed", save)
    path, step, _ = save.saved[1]  # after the last step of epoch 1, and before its end
    logger = Remembering()
    scheduled(SCHEDULES[0], True, "fixed", ckpt_path=path, logger=logger, log_every_n_steps=5)
    ends = [(at, values["epoch"]) for at, values in logger.metrics if "echo/passes" in values]
    assert ends == [(step - 1, 1), (17, 2)]


class SetWithin(pl.Callback):
    """Sets the factor before a step."""

    def __init__(self, data: Any, factors: dict[int, float]) -> None:
        self.data, self.factors = data, factors

    def on_train_batch_start(self, runner: pl.Trainer, *args: Any) -> None:
        self.data.factor = self.factors.get(runner.global_step, self.data.factor)


def test_a_factor_that_was_set_within_an_epoch_makes_the_next_one_as_long_as_without_resuming(tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Run:
        data = echoed(1, epoch_length="full_pass")
        its = [SetWithin(data, {3: 3.0, 9: 1.0}), *callbacks]
        return fit(data, model=Recorder(reads_stepping=True), callbacks=its, **options)

    save = SaveIn(tmp_path, "on_train_batch_end", "on_train_epoch_end")
    whole = make(save).model
    for path, step, hook in save.saved[:4]:
        resumed = make(ckpt_path=path).model
        assert resumed.batches == whole.batches[step:], f"saved in {hook}, step {step}"
        assert resumed.epochs == whole.epochs[step:], f"saved in {hook}, step {step}"


class Untold:
    """A loader without a state: Lightning alone decides how many batches an epoch has."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        numbers = torch.zeros(4, dtype=torch.long)
        return iter([{"index": numbers, "pid": numbers, "noise": torch.zeros(4, 3, dtype=torch.float64)}] * 6)

    def state_dict(self) -> dict[str, Any]:  # without one, Lightning warns
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StopAfter(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.step


STOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "should_stop": ({"callbacks": [StopAfter(4)]}, {}),
    "max_steps": ({"max_steps": 4}, {}),
    "max_steps in a later epoch": ({"max_steps": 10}, {}),
    "max_steps without epochs": ({"max_steps": 4, "max_epochs": -1}, {"max_steps": 20, "max_epochs": -1}),
    "max_steps in a limited epoch": ({"max_steps": 6, "limit_train_batches": 4}, {"limit_train_batches": 4}),
    "a share of an epoch": ({"max_steps": 2, "limit_train_batches": 0.5}, {"limit_train_batches": 0.5}),
}


@pytest.mark.parametrize(
    ("stop", "kind"), list(zip(STOPS, itertools.cycle(["data module", "callback", "full_pass"]), strict=False))
)
def test_a_run_that_stopped_within_an_epoch_goes_on_with_the_epochs_that_lightning_makes(
    stop: str, kind: str, tmp_path: Path
) -> None:
    first, second = STOPS[stop]
    path = str(tmp_path / "stopped.ckpt")

    def make(with_echo: bool, **options: Any) -> Run:
        options = {"max_epochs": 4, **options}
        if not with_echo:
            return fit(Untold(), **options)
        if kind == "callback":
            echo = EchoCallback(echo=EchoConfig(2, insertion_point="after_augmentation", seed=7), summary=False)
            return fit(Data(), **{**options, "callbacks": [*options.get("callbacks", []), echo]})
        return fit(echoed(1, epoch_length="full_pass") if kind == "full_pass" else echoed(2), **options)

    make(False, **first).trainer.save_checkpoint(path)
    expected = make(False, ckpt_path=path, **second)
    stopped = make(True, **first)
    stopped.trainer.save_checkpoint(path)
    resumed = make(True, ckpt_path=path, **second)
    assert Counter(resumed.model.epochs) == Counter(expected.model.epochs)
    assert resumed.model.validated_at == expected.model.validated_at
    assert resumed.trainer.global_step == expected.trainer.global_step
    stream = fresh_stream(stopped.model.batches + resumed.model.batches)
    assert sorted(stream[:22]) == list(range(22))  # the pass goes on, nothing is left out and nothing comes twice
