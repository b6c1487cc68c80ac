"""A controller of `EchoCallback`: what it is asked, when its factors count, what it is refused for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_cases import Falling, Recording, echo, factors, guarded
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_trainer_epochs import OneCycle
from trainer_runs import Data, Recorder, Run, SaveAt, SetFactor, echoed, fit

from lightning_echo import EchoCallback, EchoDataModule, EchoLoader, FactorSchedule, MetricGuard, TargetIdle


def driven(where: str, schedule: FactorSchedule, factor: float, *, max_epochs: int, **options: Any) -> Run:
    """A run with a controller, echoed by what stands there."""
    echo: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 7, **options}
    if where == "callback":
        return fit(Data(), callbacks=[EchoCallback(schedule, factor=factor, **echo)], max_epochs=max_epochs)
    data = EchoDataModule(Data(), factor, **echo) if where == "module" else EchoLoader(Data().train_dataloader(), factor, **echo)
    return fit(data, callbacks=[EchoCallback(schedule)], max_epochs=max_epochs)


@pytest.mark.parametrize("where", ["callback", "module", "loader"])
def test_a_schedule_does_what_setting_the_factor_by_hand_does(where: str) -> None:
    by_hand = echoed(1)
    expected = fit(by_hand, max_epochs=5, callbacks=[SetFactor(by_hand, {0: 4, 2: 2})])
    run = driven(where, FactorSchedule({0: 1.0, 1: 4.0, 3: 2.0}), 1, max_epochs=5)
    assert run.model.batches == expected.model.batches


@pytest.mark.parametrize("where", ["callback", "module", "loader"])
def test_with_full_pass_a_decision_changes_the_length_of_the_next_epoch(where: str) -> None:
    run = driven(where, FactorSchedule({1: 3.0, 2: 1.5}), 2, epoch_length="full_pass", max_epochs=4)
    assert run.model.steps == [12, 18, 9, 9]
    assert run.model.validated_at == [12, 30, 39, 48]
    assert run.trainer.reload_dataloaders_every_n_epochs == 0  # type: ignore[attr-defined]


def test_a_controller_sees_everything_that_was_logged_and_whether_it_is_new() -> None:
    class Logging(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", torch.tensor(float(self.current_epoch)), on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("late", float(self.current_epoch))

    recording = Recording()
    run = fit(Data(), model=Logging(), callbacks=[echo(2, controller=recording)], check_val_every_n_epoch=2, max_epochs=4)
    assert [seen.epoch for seen in recording.seen] == [0, 1, 2, 3]
    assert [seen.metrics.get("train_loss") for seen in recording.seen] == [0, 1, 2, 3]
    assert [seen.metrics.get("late") for seen in recording.seen] == [None, 0, 1, 2], "fact 33: one epoch late"
    assert ["val_loss" in seen.metrics for seen in recording.seen] == [False, True, True, True]
    assert ["val_loss" in seen.logged for seen in recording.seen] == [False, True, False, True]
    assert all("train_loss" in seen.logged for seen in recording.seen)
    assert [seen.validated for seen in recording.seen] == [False, True, True, True]
    assert run.model.validated_at == [12, 24]


def test_a_guard_waits_for_what_the_module_logs_late_but_not_for_ever() -> None:
    class Late(Recorder):
        def on_train_epoch_end(self) -> None:
            self.log("late", float(self.current_epoch))

    for monitor in ("late", "lat"):
        callback = echo(4, controller=MetricGuard(FactorSchedule({0: 4}), monitor=monitor, patience=1))
        message = r"monitor='lat' is not logged. Logged are: late, val_loss"
        with nullcontext() if monitor == "late" else pytest.raises(ValueError, match=message):
            fit(Data(), model=Late(), callbacks=[callback], max_epochs=6)
            assert factors(callback) == [4, 4, 4, 2, 1, 1], "worse from the third decision on: seen 0, 1, 2"


def test_too_small_a_buffer_for_the_largest_factor_is_found_before_training() -> None:
    model = Recorder()
    with pytest.raises(ValueError, match=r"buffer_size=2 is too small for factor=8"):  # the default of max_factor
        fit(Data(), model=model, callbacks=[echo(1.5, controller=TargetIdle(), buffer_size=2)])
    assert model.batches == []


def test_longer_epochs_than_a_schedule_of_the_learning_rate_expects_are_refused_before_training() -> None:
    for controller in (TargetIdle(), FactorSchedule({2: 3.0})):
        model = OneCycle()
        with pytest.raises(MisconfigurationException, match=r"full_pass.*OneCycleLR.*epoch_length='fixed'"):
            fit(Data(), model=model, callbacks=[echo(1, controller=controller, epoch_length="full_pass")])
        assert model.batches == []
    falling = fit(Data(), model=OneCycle(), callbacks=[echo(3, controller=FactorSchedule({1: 1}), epoch_length="full_pass")])
    assert falling.model.steps == [18, 6, 6]


def test_a_resumed_run_makes_the_same_decisions(tmp_path: Path) -> None:
    whole, save = guarded(), SaveAt(tmp_path, (16, 31))
    expected = fit(Data(), model=Falling(), callbacks=[whole, save], max_epochs=10)
    assert len(set(factors(whole))) > 2, "the test tests something"
    for step in save.steps:
        resumed = guarded()
        run = fit(Data(), model=Falling(), callbacks=[resumed], max_epochs=10, ckpt_path=save.path(step))
        assert factors(resumed) == factors(whole), step
        assert run.model.batches == expected.model.batches[step:], step
        for ours, theirs in zip(resumed.reports, whole.reports, strict=True):
            for name in ("epoch", "fresh_examples", "echoed_examples", "passes", "effective_factor", "steps", "next_factor"):
                assert getattr(ours, name) == getattr(theirs, name), (step, name)
            assert ours.message == theirs.message


class Late(Recorder):
    values = (5.0, 4.0, 6.0, 7.0, 3.0, 2.0)

    def on_train_epoch_end(self) -> None:
        self.log("loss", self.values[self.current_epoch])


class Rare(Late):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.values[self.current_epoch])

    def on_train_epoch_end(self) -> None:
        """Logs nothing late."""


@pytest.mark.parametrize(("model", "every"), [(Rare, 2), (Late, 1)])
def test_a_resumed_run_remembers_what_was_logged_before(tmp_path: Path, model: type[Recorder], every: int) -> None:
    """Lightning forgets it, and the guard would not know the metric, or hear of it an epoch too late."""

    def run(*callbacks: Any, **options: Any) -> tuple[EchoCallback, Run]:
        guard = echo(4, controller=MetricGuard(FactorSchedule({0: 4}), monitor="loss", patience=1))
        options |= {"max_epochs": 6, "check_val_every_n_epoch": every}
        return guard, fit(Data(), model=model(), callbacks=[guard, *callbacks], **options)

    save = SaveAt(tmp_path, (7, 22))  # no epoch's last: Lightning would go on without its validation
    whole, expected = run(save)
    assert len(set(factors(whole))) > 1, "the test tests something"
    for step in save.steps:
        resumed, again = run(ckpt_path=save.path(step))
        assert [report.message for report in resumed.reports] == [report.message for report in whole.reports], step
        assert again.model.batches == expected.model.batches[step:], step
