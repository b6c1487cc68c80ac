"""EchoCallback measures, logs, decides and reports; what it says is compared with what the model and the data set saw."""

from __future__ import annotations

import csv
import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import SHARING_NOISE, At, Data, Killed, Recorder, Run, SaveAt, SetFactor, echoed, first_uses, fit, trainer

from lightning_echo import (
    Controller,
    EchoCallback,
    EchoConfig,
    EchoDataModule,
    EchoLoader,
    FactorSchedule,
    IdleFraction,
    MetricGuard,
    TargetIdle,
)
from lightning_echo.measuring.control import Decision, Observation, Reason
from lightning_echo.measuring.timing import StepTimer

STEPS = 6  # of an epoch of Data: 22 examples in batches of 4
PER_EPOCH = {
    "factor",
    "fresh_examples",
    "echoed_examples",
    "passes",
    "effective_factor",
    "idle_fraction",
    "slowest_rank",
    "data_wait_seconds",
    "step_seconds",
    "upstream_seconds",
    "examples_per_second",
    "recommended_factor",
    "first_batch_seconds",
}


def echo(factor: float = 2, *, controller: Controller | None = None, **options: Any) -> EchoCallback:
    config = EchoConfig(factor, **{"insertion_point": "after_augmentation", "seed": 7, **options})
    return EchoCallback(controller, echo=config)


class Remembering(Logger):
    """Remembers every call."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.params: list[Any] = []

    name = "remembering"
    version = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(key.startswith("echo/") for key in metrics):
            self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params.append(params)


class Recording(Controller):
    """Keeps the factor, and what it was shown."""

    def __init__(self, factors: dict[int, float] | None = None) -> None:
        self.factors, self.seen = factors or {}, []  # type: ignore[var-annotated]

    def decide(self, observation: Observation) -> Decision:
        self.seen.append(observation)
        return Decision(self.factors.get(observation.epoch, observation.factor), Reason.custom, "told to")


def factors(callback: EchoCallback) -> list[float]:
    return [report.factor for report in callback.reports]


# ---------------------------------------------------------------------- logging


@pytest.mark.parametrize("workers", [0, 2])
def test_every_logger_gets_the_same_sequence_of_calls(workers: int) -> None:
    loggers = [Remembering(), Remembering()]
    run = fit(Data(workers), callbacks=[echo(2)], logger=loggers, log_every_n_steps=5)
    cheap = {"echo/factor", "echo/fresh_examples", "echo/echoed_examples"}
    expected = [(4, cheap), (5, "epoch"), (9, cheap), (11, "epoch"), (14, cheap), (17, "epoch")]
    for logger in loggers:
        assert [step for step, _ in logger.metrics] == [step for step, _ in expected]
        for (step, values), (_, keys) in zip(logger.metrics, expected, strict=True):
            # Too few steps show factor 2, once the buffer is full, to recommend a factor; and there is one rank.
            needed = {f"echo/{key}" for key in PER_EPOCH - {"recommended_factor", "slowest_rank"}} if keys == "epoch" else keys
            if step != 5:  # only in the first epoch there is a first batch to wait for
                needed -= {"echo/first_batch_seconds"}
            assert needed <= values.keys() <= {f"echo/{key}" for key in PER_EPOCH}
            assert all(type(value) in (int, float) and math.isfinite(value) for value in values.values())
    assert loggers[0].metrics == loggers[1].metrics
    fresh = [len(new) for new in first_uses(run.model.batches)]
    sizes = [len(indices) for indices, _ in run.model.batches]
    for step, values in loggers[0].metrics:
        assert step is not None
        assert values["echo/fresh_examples"] == sum(fresh[: step + 1])
        assert values["echo/echoed_examples"] == sum(sizes[: step + 1]) - sum(fresh[: step + 1])


def test_values_of_an_epoch_are_those_of_that_epoch() -> None:
    logger = Remembering()
    run = fit(Data(), callbacks=[echo(2.5)], logger=logger, log_every_n_steps=5, max_epochs=5)
    fresh = [sum(map(len, first_uses(run.model.batches)[start : start + STEPS])) for start in range(0, 30, STEPS)]
    for epoch, values in enumerate(values for _, values in logger.metrics if "echo/passes" in values):
        assert values["echo/passes"] == pytest.approx(sum(fresh[: epoch + 1]) / 22)
        assert values["echo/effective_factor"] == pytest.approx(22 / fresh[epoch])
        assert values["echo/factor"] == 2.5
        seconds = values["echo/data_wait_seconds"] + values["echo/step_seconds"]
        assert values["echo/idle_fraction"] == pytest.approx(values["echo/data_wait_seconds"] / seconds)
        assert values["echo/examples_per_second"] == pytest.approx(22 / (STEPS * seconds), rel=1e-3)


def test_steps_of_accumulated_gradients_are_logged_once() -> None:
    logger = Remembering()
    fit(Data(), callbacks=[echo(2)], logger=logger, log_every_n_steps=1, accumulate_grad_batches=3, max_epochs=2)
    assert [step for step, values in logger.metrics if "echo/passes" not in values] == [0, 1, 2, 3]


class TwoOptimizers(Recorder):
    """Steps both of its optimizers for every batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.05) for parameter in self.layer.parameters()]


def test_with_two_optimizers_the_values_stand_beside_what_the_model_logs(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    fit(Data(), model=TwoOptimizers(), callbacks=[echo(2)], logger=logger, log_every_n_steps=2, max_epochs=2)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for column in ("loss", "echo/fresh_examples"):
        assert sorted({int(row["step"]) for row in rows if row[column]}) == [1, 3, 5, 7, 9, 11], column


@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval")
@pytest.mark.parametrize("every", [0, 50])
def test_without_steps_to_log_at_only_epochs_are_logged(every: int) -> None:
    logger = Remembering()
    fit(Data(), callbacks=[echo(2)], logger=logger, log_every_n_steps=every)
    assert [step for step, _ in logger.metrics] == [5, 11, 17]


def test_a_csv_file_has_the_values_beside_the_models_own(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    fit(Data(), callbacks=[echo(2)], logger=logger, log_every_n_steps=2)
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    column, steps = rows[0].index("echo/fresh_examples"), rows[0].index("step")
    logged = {int(row[steps]): float(row[column]) for row in rows[1:] if row[column]}
    assert sorted(logged) == [1, 3, 5, 7, 9, 11, 13, 15, 17]
    assert "val_loss" in rows[0]


def test_logging_each_step_adds_the_epochs_steps_up_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to a metric is copied: at each step that would cost more the longer the epoch is."""
    added: list[int] = []
    monkeypatch.setattr(IdleFraction, "update", lambda self, waited, seconds: added.append(len(waited)))
    fit(Data(), callbacks=[echo(2)], log_every_n_steps=1)
    assert added == [STEPS] * 3


def test_other_callbacks_find_the_values_among_the_logged_metrics() -> None:
    found = []
    look = At({1: lambda trainer: found.append(dict(trainer.callback_metrics))})
    callback = echo(2)
    fit(Data(), callbacks=[callback, look])
    assert found[0]["echo/fresh_examples"] == callback.reports[1].fresh_examples
    assert isinstance(found[0]["echo/idle_fraction"], torch.Tensor)


def test_hyperparameters_say_what_echoing_amounts_to_in_plain_types() -> None:
    logger = Remembering()
    fit(Data(), callbacks=[EchoCallback(TargetIdle(0.1), echo=EchoConfig(2, seed=3))], logger=logger, log_every_n_steps=5)
    (params,) = [params["echo"] for params in logger.params if "echo" in params]
    assert params == {
        "factor": 2.0,
        "insertion_point": "before_augmentation",
        "buffer_size": 8,
        "epoch_length": "fixed",
        "seed": 3,
        "controller": "TargetIdle(0.1, min_factor=1, max_factor=4)",
    }
    assert all(type(value) in (int, float, str) for value in params.values())


def test_the_progress_bar_shows_factor_and_idle_fraction_and_is_left_as_it_was() -> None:
    shown = []

    class Bar(TQDMProgressBar):
        def get_metrics(self, *args: Any, **kwargs: Any) -> Any:
            return {"own": 1}

    bar, callback = Bar(refresh_rate=0), echo(2)
    look = At({epoch: lambda trainer: shown.append(bar.get_metrics(trainer, trainer.lightning_module)) for epoch in range(3)})
    fit(Data(), callbacks=[callback, bar, look], enable_progress_bar=True)
    idle = [report.idle_fraction for report in callback.reports]
    assert shown == [{"own": 1, "echo": f"2.0x idle {share:.0%}"} for share in idle]
    assert "get_metrics" not in vars(bar)


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_the_profiler_is_left_as_it_was_also_by_an_error(profiler: Any) -> None:
    runner = trainer(callbacks=[echo(2)], profiler=profiler)
    with pytest.raises(LookupError):
        runner.fit(Recorder(), datamodule=Data(fail_at=3))
    assert not {"start", "stop"} & vars(runner.profiler).keys()  # type: ignore[attr-defined]
    assert "train_dataloader" not in vars(runner.datamodule)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- measuring without echoing


@pytest.mark.parametrize("workers", [0, 1])
def test_alone_it_changes_nothing_and_counts_everything_as_fresh(workers: int) -> None:
    plain, callback = [], EchoCallback()
    for callbacks in ([], [callback]):
        pl.seed_everything(3, verbose=False)
        plain.append(fit(Data(workers), callbacks=callbacks, log_every_n_steps=2))
    assert plain[0].model.batches == plain[1].model.batches
    assert plain[0].model.weights == plain[1].model.weights
    assert [(report.fresh_examples, report.echoed_examples) for report in callback.reports] == [(22, 0), (44, 0), (66, 0)]
    assert factors(callback) == [1, 1, 1]
    assert {type(report.passes) for report in callback.reports} == {type(None)}


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step", "ignore:Found `dataloader_iter` argument")
def test_alone_it_counts_what_a_model_fetches_by_itself() -> None:
    class Fetching(Recorder):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    callback = EchoCallback()
    run = fit(Data(), model=Fetching(), callbacks=[callback], max_epochs=2)
    assert run.model.steps == [6, 6]
    assert [report.fresh_examples for report in callback.reports] == [22, 44]


def test_alone_it_goes_on_and_counts_on_where_a_reload_brings_a_new_echo_loader() -> None:
    class Own(Recorder):
        def train_dataloader(self) -> Any:
            return EchoLoader(Data().train_dataloader(), 2, insertion_point="after_augmentation", seed=7)

        def val_dataloader(self) -> Any:
            return Data().val_dataloader()

    callback, model = EchoCallback(), Own()
    trainer(callbacks=[callback], reload_dataloaders_every_n_epochs=1).fit(model)
    reports = callback.reports
    assert [report.fresh_examples + report.echoed_examples for report in reports] == [22, 44, 66]
    whole = fit(echoed(2)).model
    assert model.batches == whole.batches
    assert [report.fresh_examples for report in reports] == [
        sum(map(len, first_uses(whole.batches)[:end])) for end in (6, 12, 18)
    ]


def test_a_loader_that_never_waits_has_no_upstream_time_rather_than_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, now = Remembering(), [0.0]
    monkeypatch.setattr("lightning_echo.monitoring.meter.StepTimer", lambda: StepTimer(clock=lambda: now[0]))

    class Ready:
        """Batches that cost nothing to fetch."""

        def __len__(self) -> int:
            return 30

        def __iter__(self) -> Any:
            return iter([{"index": torch.arange(4), "noise": torch.rand(4, 3), "pid": torch.zeros(4)}] * 30)

    class Timed(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 0.01
            return super().training_step(batch, batch_idx)

    fit(Ready(), model=Timed(), callbacks=[EchoCallback()], logger=logger, log_every_n_steps=2)
    epochs = [values for _, values in logger.metrics if "echo/idle_fraction" in values]
    assert len(epochs) == 3
    assert all("echo/upstream_seconds" not in values for _, values in logger.metrics)
    assert all(values["echo/recommended_factor"] == 1 for values in epochs)


@pytest.mark.parametrize(("kind", "waits_for"), [("resumed", 0), ("resumed from an older checkpoint", 3)])
def test_epochs_of_one_step_are_advised_on_once_there_are_four_of_them(kind: str, waits_for: int, tmp_path: Path) -> None:
    def recommended(max_epochs: int, ckpt_path: str | None = None, *callbacks: Any) -> list[bool]:
        callback = EchoCallback()
        fit(Data(), callbacks=[callback, *callbacks], max_epochs=max_epochs, limit_train_batches=1, ckpt_path=ckpt_path)
        return [report.recommended_factor is not None for report in callback.reports]

    save = SaveAt(tmp_path, [4])
    assert recommended(5, None, save) == [False, False, False, True, True]
    path = save.path(4)
    if kind != "resumed":
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["callbacks"]["EchoCallback"]["recent"]
        torch.save(checkpoint, path)
    assert recommended(9, path) == [False] * 3 + [False] * waits_for + [True] * (6 - waits_for)


@pytest.mark.parametrize("make", ["module", "loader"])
def test_beside_echoing_that_the_user_has_set_up_it_reports_that(make: str) -> None:
    data = (
        echoed(2) if make == "module" else EchoLoader(Data().train_dataloader(), 2, insertion_point="after_augmentation", seed=7)
    )
    callback = EchoCallback()
    run = fit(data, callbacks=[callback])
    counts = run.loader.counts
    assert (callback.reports[-1].fresh_examples, callback.reports[-1].echoed_examples) == (counts.fresh, counts.echoed)
    assert run.model.batches == fit(echoed(2)).model.batches


class Closing(pl.Callback):
    """Ends the workers after the second epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.train_dataloader.close()


@pytest.mark.parametrize(
    ("workers", "options", "callbacks", "expected"),
    [
        (1, {}, [], [True, False, False, False]),
        (1, {"reload_dataloaders_every_n_epochs": 2}, [], [True, False, True, False]),
        (0, {"reload_dataloaders_every_n_epochs": 2}, [], [True, False, False, False]),
        (1, {}, [Closing()], [True, False, True, False]),
    ],
)
def test_a_first_batch_is_waited_for_where_workers_start(
    workers: int, options: Any, callbacks: Any, expected: list[bool]
) -> None:
    callback = echo(2)
    fit(Data(workers), callbacks=[callback, *callbacks], max_epochs=4, **options)
    assert [report.first_batch_seconds is not None for report in callback.reports] == expected


@pytest.mark.parametrize(("workers", "expected"), [(1, [True, True, True]), (0, [True, False, False])])
def test_unechoed_loaders_with_workers_begin_anew_in_each_epoch(workers: int, expected: list[bool]) -> None:
    callback = EchoCallback()
    fit(Data(workers), callbacks=[callback])
    assert [report.first_batch_seconds is not None for report in callback.reports] == expected


def test_a_resumed_run_has_a_first_batch_of_its_own(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [STEPS + 3])
    fit(Data(1), callbacks=[echo(2), save])
    callback = echo(2)
    fit(Data(1), callbacks=[callback], ckpt_path=save.path(STEPS + 3))
    assert [report.first_batch_seconds is not None for report in callback.reports] == [True, True, False]


def test_a_full_pass_of_another_length_starts_no_workers() -> None:
    callback = echo(1, controller=FactorSchedule({0: 1, 1: 2}), epoch_length="full_pass")
    fit(Data(1), callbacks=[callback])
    assert [report.steps for report in callback.reports] == [STEPS, 2 * STEPS, 2 * STEPS]
    assert [report.first_batch_seconds is not None for report in callback.reports] == [True, False, False]


def test_the_summary_is_said_once_and_ends_in_advice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(Data(), callbacks=[echo(2, controller=FactorSchedule({0: 1, 1: 3}))])
    said = [record.message for record in caplog.records if record.message.startswith("lightning_echo: 18 steps in")]
    assert len(said) == 1
    assert "epoch 0: factor 1" in said[0]
    assert "scheduled from epoch 1 on" in said[0]
    assert "epochs 1 to 2: factor 3" in said[0]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(Data(), callbacks=[EchoCallback(summary=False)])
    assert not [record for record in caplog.records if "18 steps in" in record.message]


# ---------------------------------------------------------------------- deciding


@pytest.mark.parametrize("where", ["callback", "module", "loader"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_schedule_does_what_setting_the_factor_by_hand_does(where: str, workers: int) -> None:
    schedule = FactorSchedule({0: 1.0, 1: 4.0, 3: 2.0})
    by_hand = echoed(1, workers=workers)
    expected = fit(by_hand, max_epochs=5, callbacks=[SetFactor(by_hand, {0: 4, 2: 2})])
    if where == "callback":
        run = fit(Data(workers), max_epochs=5, callbacks=[echo(1, controller=schedule)])
    elif where == "module":
        run = fit(echoed(1, workers=workers), max_epochs=5, callbacks=[EchoCallback(schedule)])
    else:
        loader = EchoLoader(Data(workers).train_dataloader(), 1, insertion_point="after_augmentation", seed=7)
        run = fit(loader, max_epochs=5, callbacks=[EchoCallback(schedule)])
        loader.close()
    assert run.model.batches == expected.model.batches


@pytest.mark.parametrize("where", ["callback", "module", "loader"])
def test_with_full_pass_a_decision_changes_the_length_of_the_next_epoch(where: str) -> None:
    schedule = FactorSchedule({1: 3.0, 2: 1.5})
    options = {"epoch_length": "full_pass", "seed": 7, "insertion_point": "after_augmentation"}
    if where == "callback":
        run = fit(Data(), max_epochs=4, callbacks=[EchoCallback(schedule, echo=EchoConfig(2, **options))])
    elif where == "module":
        run = fit(EchoDataModule(Data(), 2, **options), max_epochs=4, callbacks=[EchoCallback(schedule)])
    else:
        run = fit(EchoLoader(Data().train_dataloader(), 2, **options), max_epochs=4, callbacks=[EchoCallback(schedule)])
    assert run.model.steps == [12, 18, 9, 9]
    assert run.model.validated_at == [12, 30, 39, 48]
    assert run.trainer.reload_dataloaders_every_n_epochs == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["callback", "module"])
def test_the_first_factor_of_a_schedule_is_known_before_the_model_asks_for_the_number_of_steps(where: str) -> None:
    schedule, steps = FactorSchedule({0: 3.0}), []

    class Asking(Recorder):
        def configure_optimizers(self) -> Any:
            steps.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    if where == "callback":
        fit(Data(), model=Asking(), callbacks=[echo(1, controller=schedule, epoch_length="full_pass")])
    else:
        fit(EchoDataModule(Data(), 1, epoch_length="full_pass"), model=Asking(), callbacks=[EchoCallback(schedule)])
    assert steps == [3 * 18]


def test_a_first_factor_that_comes_too_late_for_a_loader_passed_to_fit_is_refused() -> None:
    loader = EchoLoader(Data().train_dataloader(), 1, epoch_length="full_pass")
    with pytest.raises(MisconfigurationException, match=r"begins with factor 3.*EchoLoader\(loader, 3"):
        fit(loader, callbacks=[EchoCallback(FactorSchedule({0: 3.0}))])


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


def test_what_was_delivered_does_not_depend_on_the_epochs_of_a_change() -> None:
    """No batch is lost or repeated: the fresh examples are those of whole passes, in any run of decisions."""
    told = {0: 3.0, 1: 1.0, 2: 2.5, 3: 1.5, 4: 4.0}
    for point in SHARING_NOISE:
        run = fit(Data(2), callbacks=[echo(2, controller=Recording(told), insertion_point=point)], max_epochs=8)
        stream = [index for new in first_uses(run.model.batches) for index in new]
        for start in range(0, len(stream) - 21, 22):
            assert len(set(stream[start : start + 22])) == 22


def test_too_small_a_buffer_for_the_largest_factor_is_found_before_training() -> None:
    model = Recorder()
    with pytest.raises(ValueError, match=r"buffer_size=2 is too small for factor=4"):
        fit(Data(), model=model, callbacks=[echo(1.5, controller=TargetIdle(), buffer_size=2)])
    assert model.batches == []


def test_longer_epochs_than_a_schedule_of_the_learning_rate_expects_are_refused_before_training() -> None:
    class OneCycle(Recorder):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    for controller in (TargetIdle(), FactorSchedule({2: 3.0})):
        model = OneCycle()
        with pytest.raises(MisconfigurationException, match=r"full_pass.*OneCycleLR.*epoch_length='fixed'"):
            fit(Data(), model=model, callbacks=[echo(1, controller=controller, epoch_length="full_pass")])
        assert model.batches == []
    falling = fit(Data(), model=OneCycle(), callbacks=[echo(3, controller=FactorSchedule({1: 1}), epoch_length="full_pass")])
    assert falling.model.steps == [18, 6, 6]


# ---------------------------------------------------------------------- state


class Falling(Recorder):
    """Its val_loss falls and rises as it is told."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", [5.0, 4.0, 6.0, 7.0, 3.0, 2.0, 1.0, 9.0, 9.0, 9.0][self.current_epoch])


def guarded() -> EchoCallback:
    schedule = FactorSchedule({0: 4, 2: 3, 5: 4})
    return echo(4, controller=MetricGuard(schedule, patience=2))


def test_a_resumed_run_makes_the_same_decisions(tmp_path: Path) -> None:
    whole, steps = guarded(), range(1, 10 * STEPS, 15)
    expected = fit(Data(2), model=Falling(), callbacks=[whole], max_epochs=10)
    assert len(set(factors(whole))) > 2, "the test tests something"
    fit(Data(2), model=Falling(), callbacks=[guarded(), SaveAt(tmp_path, steps)], max_epochs=10)
    for step in steps:
        resumed = guarded()
        run = fit(Data(2), model=Falling(), callbacks=[resumed], max_epochs=10, ckpt_path=SaveAt(tmp_path, []).path(step))
        assert factors(resumed) == factors(whole), step
        assert run.model.batches == expected.model.batches[step:], step
        for ours, theirs in zip(resumed.reports, whole.reports, strict=True):
            for name in (
                "epoch",
                "fresh_examples",
                "echoed_examples",
                "passes",
                "effective_factor",
                "steps",
                "next_factor",
                "message",
            ):
                assert getattr(ours, name) == getattr(theirs, name), (step, name)


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

    whole, steps = guarded(), (2, 7, 11, 15, 22, 27, 33)  # no epoch's last: Lightning would go on without its validation
    expected = run(whole, SaveAt(tmp_path, steps))
    assert len(set(factors(whole))) > 1, "the test tests something"
    for step in steps:
        resumed = guarded()
        again = run(resumed, ckpt_path=SaveAt(tmp_path, []).path(step))
        assert [report.message for report in resumed.reports] == [report.message for report in whole.reports], step
        assert again.model.batches == expected.model.batches[step:], step


def test_the_end_of_an_epoch_that_a_checkpoint_came_before_is_made_up_for(tmp_path: Path) -> None:
    """Lightning goes on with the next epoch, without the hooks of the end."""

    def scheduled() -> EchoCallback:
        return echo(4, controller=FactorSchedule({0: 4, 2: 3}))

    whole, resumed = scheduled(), scheduled()
    expected = fit(Data(2), callbacks=[whole, SaveAt(tmp_path, [2 * STEPS])], max_epochs=5)
    run = fit(Data(2), callbacks=[resumed], max_epochs=5, ckpt_path=SaveAt(tmp_path, []).path(2 * STEPS))
    assert [report.next_factor for report in resumed.reports] == [4, 3, 3, 3, 3]
    assert [report.epoch for report in resumed.reports] == [0, 1, 2, 3, 4]
    assert run.model.batches == expected.model.batches[2 * STEPS :]


@pytest.mark.parametrize("step", [3, STEPS, STEPS + 2])
def test_a_checkpoint_loads_with_weights_only(tmp_path: Path, step: int) -> None:
    fit(Data(), callbacks=[guarded(), SaveAt(tmp_path, [step])])
    checkpoint = torch.load(SaveAt(tmp_path, []).path(step), weights_only=True)
    state = checkpoint["callbacks"]["EchoCallback"]
    assert set(state) == {"epoch", "attached", "wrapped", "loader", "meter", "controller", "recent", "metrics", "reports"}
    assert len(state["reports"]) == (step - 1) // STEPS


class Stateful(Data):
    """A data module with a state of its own."""

    def __init__(self, value: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def data(kind: str, value: int) -> tuple[Any, Stateful, list[EchoCallback]]:
    """Data of a run that is not echoed, echoed by the callback, or by a data module beside a callback."""
    inner = Stateful(value)
    if kind == "module":
        return EchoDataModule(inner, 2, seed=7, insertion_point="after_augmentation"), inner, [EchoCallback()]
    return inner, inner, [echo(2) if kind == "callback" else EchoCallback()]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")  # a plain loader
@pytest.mark.parametrize("after", ["plain", "callback", "module"])
@pytest.mark.parametrize("before", ["plain", "callback", "module"])
@pytest.mark.parametrize("step", [4, STEPS])
def test_a_run_resumes_with_and_without_echoing_the_data_modules_state_included(
    tmp_path: Path, before: str, after: str, step: int
) -> None:
    first, _, callbacks = data(before, 5)
    with pytest.raises(Killed):
        fit(first, callbacks=[*callbacks, SaveAt(tmp_path, [step], dies=True)])
    second, inner, callbacks = data(after, 0)
    run = fit(second, callbacks=callbacks, ckpt_path=SaveAt(tmp_path, []).path(step))
    assert inner.value == 5
    assert run.trainer.global_step == 3 * STEPS
    assert [report.epoch for report in callbacks[0].reports] == [0, 1, 2]
    assert (callbacks[0].reports[-1].echoed_examples > 0) == (before != "plain" or after != "plain"), "counts go on"


@pytest.mark.parametrize("after", [None, FactorSchedule({0: 2})])
@pytest.mark.parametrize("before", [None, FactorSchedule({0: 2})])
def test_a_loader_that_the_user_echoes_goes_on_whatever_the_callback_does(tmp_path: Path, before: Any, after: Any) -> None:
    def loader() -> EchoLoader:
        return EchoLoader(Data().train_dataloader(), 2, insertion_point="after_augmentation", seed=7)

    whole = fit(loader(), callbacks=[EchoCallback(before), SaveAt(tmp_path, [8])])
    resumed = fit(loader(), callbacks=[EchoCallback(after)], ckpt_path=SaveAt(tmp_path, []).path(8))
    assert resumed.model.batches == whole.model.batches[8:]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
def test_without_the_callback_lightning_refuses_the_loaders_state(tmp_path: Path) -> None:
    """README says so; if this fails, the README can say something better."""
    fit(Data(), callbacks=[echo(2), SaveAt(tmp_path, [4])])
    with pytest.raises(RuntimeError, match="0 stateful loaders, but found 1 states"):
        fit(Data(), ckpt_path=SaveAt(tmp_path, []).path(4))


@pytest.mark.parametrize("reads_stepping", [False, True])
def test_what_is_saved_when_fit_is_over_resumes_like_any_other_checkpoint(tmp_path: Path, reads_stepping: bool) -> None:
    path = str(tmp_path / "end.ckpt")
    whole = fit(Data(), callbacks=[echo(2)], max_epochs=2)
    fit(Data(), callbacks=[echo(2)], max_epochs=1).trainer.save_checkpoint(path, weights_only=False)
    run = fit(Data(), model=Recorder(reads_stepping), callbacks=[echo(2)], max_epochs=2, ckpt_path=path)
    assert run.model.batches == whole.model.batches[STEPS:]
    assert fit(Data(), callbacks=[EchoCallback()], max_epochs=2, ckpt_path=path).model.steps == [STEPS], "echoing switched off"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")  # a plain loader
@pytest.mark.parametrize("reads_stepping", [False, True])
def test_what_is_saved_on_an_exception_resumes_like_any_other_checkpoint(tmp_path: Path, reads_stepping: bool) -> None:
    path = str(tmp_path / "on-exception.ckpt")

    class SaveOnException(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(path, weights_only=False)

    whole = fit(Data(), model=Recorder(reads_stepping), callbacks=[echo(2)], max_epochs=2)
    model = Recorder(reads_stepping)
    with pytest.raises(Killed):
        fit(Data(), model=model, callbacks=[echo(2), SaveAt(tmp_path, [4], dies=True), SaveOnException()], max_epochs=2)
    run = fit(Data(), model=Recorder(reads_stepping), callbacks=[echo(2)], max_epochs=2, ckpt_path=path)
    assert run.model.batches == whole.model.batches[4:]
    assert fit(Data(), callbacks=[EchoCallback()], max_epochs=2, ckpt_path=path).trainer.global_step > STEPS


def test_a_second_fit_begins_its_report_anew() -> None:
    callback = echo(2)
    runner = trainer(callbacks=[callback], max_epochs=2)
    runner.fit(Recorder(), datamodule=Data())
    first = list(callback.reports)
    runner.fit_loop.max_epochs = 4
    runner.fit(Recorder(), datamodule=Data())
    assert [report.epoch for report in first] == [0, 1]
    assert [report.epoch for report in callback.reports] == [2, 3]


# ---------------------------------------------------------------------- misuse


def test_a_controller_for_loaders_passed_to_fit_is_refused_with_the_way_out() -> None:
    for model in (Recorder(), type("Own", (Recorder,), {"train_dataloader": lambda self: Data().train_dataloader()})()):
        with pytest.raises(MisconfigurationException, match=r"EchoLoader\(loader, 1\)"):
            fit(DataLoader(range(8)), model=model, callbacks=[EchoCallback(TargetIdle())])


def test_overfitting_on_few_batches_is_neither_echoed_nor_controlled() -> None:
    callback = EchoCallback(TargetIdle())
    run = fit(Data(loader_options={}), callbacks=[callback], overfit_batches=2)
    assert run.model.steps == [2, 2, 2]
    assert [report.echoed_examples for report in callback.reports] == [0, 0, 0]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_are_left_alone(stage: str) -> None:
    class Every(Data):
        test_dataloader = predict_dataloader = Data.val_dataloader

    class Model(Recorder):
        def test_step(self, batch: Any, batch_idx: int) -> None: ...

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch["index"]

    callback, module = EchoCallback(TargetIdle()), Every()
    getattr(trainer(callbacks=[callback]), stage)(Model(), datamodule=module)
    assert callback.reports == []
    assert "train_dataloader" not in vars(module)


def test_run_is_a_run() -> None:
    """Data modules that the helpers make are those of `Run`: guards the tests above."""
    run = fit(echoed(1))
    assert isinstance(run, Run)
    assert run.model.steps == [STEPS] * 3
