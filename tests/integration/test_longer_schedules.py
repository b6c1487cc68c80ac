"""Schedules of the learning rate that were built for a shorter run than a rising factor makes of it: warned about, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from trainer_runs import Data, Recorder, SetFactor, echoed, fit, trainer

from lightning_echo import EchoCallback, EchoConfig, FactorSchedule

STEPS, EPOCHS = 6, 3  # of an epoch at factor 1


class Decaying(Recorder):
    """Its rate falls to 0 in as many steps as the run is estimated to have, or in those that are given."""

    def __init__(self, steps: int | None = None, interval: str = "step", schedule: Any = LinearLR) -> None:
        super().__init__()
        self.steps_given, self.interval, self.schedule = steps, interval, schedule
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches) if self.steps_given is None else self.steps_given
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.schedule is LinearLR:
            schedule: Any = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
        else:
            schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def callback(factor: float, controller: Any, **options: Any) -> EchoCallback:
    config = EchoConfig(factor, insertion_point="after_augmentation", seed=7, **{"epoch_length": "full_pass", **options})
    return EchoCallback(controller, echo=config, summary=False)


@contextmanager
def warned(*words: str) -> Iterator[None]:
    """One warning of ours with these words, or none at all where there are no words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught if "estimated_stepping_batches" in str(each.message)]
    assert len(said) == bool(words), said
    for word in words:
        assert word in said[0]


WAYS_OUT = ("epoch_length='fixed'", "Trainer(max_epochs=-1, max_steps=...)", "stepped per epoch")


def test_a_schedule_that_ends_before_the_run_is_warned_about_before_training() -> None:
    model = Decaying()
    with warned("LinearLR", f"{STEPS * EPOCHS} steps", "up to 3", *WAYS_OUT):
        fit(Data(), model=model, callbacks=[callback(1, FactorSchedule({0: 1, 1: 2, 2: 3}))])
    assert model.steps == [STEPS, 2 * STEPS, 3 * STEPS]
    assert model.rates.count(0.0) == STEPS * (1 + 2 + 3) - STEPS * EPOCHS, "this is what the warning is about"


@pytest.mark.parametrize("by", ["user", "controller", "controller of any schedule"])
def test_it_is_warned_of_once_by_whom_and_with_what_schedule_ever(by: str) -> None:
    data, schedule = echoed(1, epoch_length="full_pass"), FactorSchedule({1: 2, 2: 3})
    callbacks = [SetFactor(data, {0: 2, 1: 3}) if by == "user" else EchoCallback(schedule, summary=False)]
    kind = LambdaLR if by == "controller of any schedule" else LinearLR
    with warned(kind.__name__, "up to 2" if by == "user" else "up to 3"):
        fit(data, model=Decaying(schedule=kind), callbacks=callbacks)


class Unscheduled(Recorder):
    """Reads the estimate for something else."""

    def __init__(self) -> None:
        super().__init__(reads_stepping=True)


@pytest.mark.parametrize(
    ("model", "start", "factor", "options"),
    [
        (lambda: Decaying(STEPS), 1, 2, {}),  # the estimate was not read
        (lambda: Decaying(interval="epoch"), 1, 2, {}),
        (Unscheduled, 1, 2, {}),
        (Decaying, 3, 1, {}),  # epochs get shorter
        (Decaying, 1, 2, {"epoch_length": "fixed"}),
        (Decaying, 1, 2, {"max_epochs": 100, "max_steps": 20}),
    ],
)
def test_where_the_run_gets_no_longer_than_the_schedule_nothing_is_said(
    model: Any, start: float, factor: float, options: Any
) -> None:
    data = echoed(start, epoch_length=options.get("epoch_length", "full_pass"))
    of_fit = {name: options[name] for name in ("max_epochs", "max_steps") if name in options}
    with warned():
        fit(data, model=model(), callbacks=[EchoCallback(FactorSchedule({1: factor}), summary=False)], **of_fit)


def test_each_fit_of_a_trainer_is_looked_at_anew() -> None:
    """In a later one there are optimizers already, those of the one before."""
    data = echoed(1, epoch_length="full_pass")
    its_trainer = trainer(max_epochs=2, callbacks=[SetFactor(data, {0: 2, 2: 3, 4: 4, 6: 5})])
    for model, words in ((Decaying(), ["LinearLR"]), (Decaying(STEPS), []), (Decaying(), ["LinearLR"])):
        with warned(*words):
            its_trainer.fit(model, datamodule=data)
        assert its_trainer.fit_loop.max_epochs is not None
        its_trainer.fit_loop.max_epochs += 2
