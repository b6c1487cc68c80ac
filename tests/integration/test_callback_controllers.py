"""A controller of `EchoCallback`: what it is asked, when its factors count, what it is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from callback_cases import Falling, Recording, echo, factors, guarded
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_trainer_epochs import OneCycle
from trainer_runs import Data, Recorder, Run, SaveAt, SetFactor, echoed, fit

from lightning_echo import EchoCallback, EchoDataModule, EchoLoader, FactorSchedule, MetricGuard, TargetIdle

WHERE = ("callback", "passed", "module", "loader")


def driven(where: str, schedule: FactorSchedule, factor: float, *, workers: int = 0, model: Any = None, **options: Any) -> Run:
    """A run with a controller, echoed by what stands there."""
    of_fit = {name: options.pop(name) for name in ("max_epochs",) if name in options}
    echo: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 7, **options}
    data: Any = Data(workers) if where in ("callback", "module") else Data(workers).train_dataloader()
    if where == "module":
        data = EchoDataModule(data, factor, **echo)
    elif where == "loader":
        data = EchoLoader(data, factor, **echo)
    callback = EchoCallback(schedule, **({"factor": factor, **echo} if where in ("callback", "passed") else {}))
    return fit(data, model=model, callbacks=[callback], **of_fit)


@pytest.mark.grid
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_schedule_does_what_setting_the_factor_by_hand_does(where: str, workers: int) -> None:
    by_hand = echoed(1, workers=workers)
    expected = fit(by_hand, max_epochs=5, callbacks=[SetFactor(by_hand, {0: 4, 2: 2})])
    run = driven(where, FactorSchedule({0: 1.0, 1: 4.0, 3: 2.0}), 1, workers=workers, max_epochs=5)
    assert run.model.batches == expected.model.batches
    if where == "loader":
        run.loader.close()


@pytest.mark.parametrize("where", WHERE)
def test_with_full_pass_a_decision_changes_the_length_of_the_next_epoch(where: str) -> None:
    run = driven(where, FactorSchedule({1: 3.0, 2: 1.5}), 2, epoch_length="full_pass", max_epochs=4)
    assert run.model.steps == [12, 18, 9, 9]
    assert run.model.validated_at == [12, 30, 39, 48]
    assert run.trainer.reload_dataloaders_every_n_epochs == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["callback", "passed", "module"])
def test_the_first_factor_of_a_schedule_is_known_before_the_model_asks_for_the_number_of_steps(where: str) -> None:
    steps = []

    class Asking(Recorder):
        def configure_optimizers(self) -> Any:
            steps.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    driven(where, FactorSchedule({0: 3.0}), 1, model=Asking(), epoch_length="full_pass", max_epochs=1)
    assert steps == [18]


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

    def guard(monitor: str) -> EchoCallback:
        return echo(4, controller=MetricGuard(FactorSchedule({0: 4}), monitor=monitor, patience=1))

    callback = guard("late")
    fit(Data(), model=Late(), callbacks=[callback], max_epochs=6)
    assert factors(callback) == [4, 4, 4, 2, 1, 1], "worse from the third decision on: seen 0, 1, 2"
    with pytest.raises(ValueError, match=r"monitor='lat' is not logged. Logged are: late, val_loss"):
        fit(Data(), model=Late(), callbacks=[guard("lat")], max_epochs=6)


def test_a_guard_counts_a_validation_only_once() -> None:
    class Rising(Recorder):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.current_epoch))

    callback = echo(4, controller=MetricGuard(FactorSchedule({0: 4}), patience=2))
    fit(Data(), model=Rising(), callbacks=[callback], max_epochs=10, check_val_every_n_epoch=2)
    assert factors(callback) == [4] * 6 + [2] * 4, "validated after epochs 1, 3, 5, 7, 9: worse at 3 and 5, then at 7 and 9"


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
    whole, steps = guarded(), (16, 31)
    expected = fit(Data(2), model=Falling(), callbacks=[whole], max_epochs=10)
    assert len(set(factors(whole))) > 2, "the test tests something"
    fit(Data(2), model=Falling(), callbacks=[guarded(), SaveAt(tmp_path, steps)], max_epochs=10)
    for step in steps:
        resumed = guarded()
        run = fit(Data(2), model=Falling(), callbacks=[resumed], max_epochs=10, ckpt_path=SaveAt(tmp_path, []).path(step))
        assert factors(resumed) == factors(whole), step
        assert run.model.batches == expected.model.batches[step:], step
        for ours, theirs in zip(resumed.reports, whole.reports, strict=True):
            for name in ("epoch", "fresh_examples", "echoed_examples", "passes", "effective_factor", "steps", "next_factor"):
                assert getattr(ours, name) == getattr(theirs, name), (step, name)
            assert ours.message == theirs.message


@pytest.mark.parametrize("kind", ["every second epoch", "late"])
def test_a_resumed_run_remembers_what_was_logged_before(tmp_path: Path, kind: str) -> None:
    """Lightning forgets it, and the guard would not know the metric, or hear of it an epoch too late."""
    values = [5.0, 4.0, 6.0, 7.0, 3.0, 2.0]

    class Late(Recorder):
        def on_train_epoch_end(self) -> None:
            self.log("loss", values[self.current_epoch])

    class Rare(Recorder):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", values[self.current_epoch])

    def run(callback: EchoCallback, *others: Any, **options: Any) -> Run:
        model, every = (Late(), 1) if kind == "late" else (Rare(), 2)
        return fit(Data(), model=model, callbacks=[callback, *others], max_epochs=6, check_val_every_n_epoch=every, **options)

    def guarded() -> EchoCallback:
        return echo(4, controller=MetricGuard(FactorSchedule({0: 4}), monitor="loss", patience=1))

    whole, steps = guarded(), (7, 22, 33)  # no epoch's last: Lightning would go on without its validation
    expected = run(whole, SaveAt(tmp_path, steps))
    assert len(set(factors(whole))) > 1, "the test tests something"
    for step in steps:
        resumed = guarded()
        again = run(resumed, ckpt_path=SaveAt(tmp_path, []).path(step))
        assert [report.message for report in resumed.reports] == [report.message for report in whole.reports], step
        assert again.model.batches == expected.model.batches[step:], step
