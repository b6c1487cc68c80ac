"""EchoCallback measures, logs, decides and reports; what it says is compared with what the model and the data set saw."""

from __future__ import annotations

import csv
import logging
import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callback_cases import PER_EPOCH, STEPS, Remembering, echo, factors
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_runs import At, Data, Recorder, Run, SaveAt, echoed, first_uses, fit, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoLoader, FactorSchedule, IdleFraction, TargetIdle
from lightning_echo.measure.timing import StepTimer

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
            assert needed | {"epoch"} <= values.keys() <= {f"echo/{key}" for key in PER_EPOCH} | {"epoch"}
            assert values["epoch"] == step // STEPS
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
    epochs = {int(row[steps]): row[rows[0].index("epoch")] for row in rows[1:] if row[column]}
    assert epochs == {step: str(step // STEPS) for step in logged}
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
        "buffer_size": (22 - 4) // 2,  # of 22 examples a pass allows all but a batch of 4, and the default is half of that
        "reuse": "memory",
        "epoch_length": "fixed",
        "seed": 3,
        "cache": None,
        "share": None,
        "controller": "TargetIdle(0.1, min_factor=1, max_factor=8)",
    }
    assert all(type(value) in (int, float, str, type(None)) for value in params.values())


def test_the_progress_bar_shows_factor_and_idle_fraction_and_is_left_as_it_was() -> None:
    shown = []

    class Bar(TQDMProgressBar):
        def get_metrics(self, *args: Any, **kwargs: Any) -> Any:
            return {"own": 1}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            shown.append(bar.get_metrics(trainer, pl_module))

    bar, callback = Bar(refresh_rate=0), echo(2)
    fit(Data(length=48), callbacks=[callback, bar, Look()], enable_progress_bar=True, max_epochs=2)  # of 12 steps
    for of_epoch, report in zip((shown[:12], shown[12:]), callback.reports, strict=True):
        assert of_epoch[:9] == [{"own": 1, "echo": "2.0x"}] * 9
        assert all(each["echo"].startswith("2.0x idle ") for each in of_epoch[9:])
        assert of_epoch[11]["echo"] == f"2.0x idle {report.idle_fraction:.0%}"
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
    monkeypatch.setattr("lightning_echo.training.meters.StepTimer", lambda: StepTimer(clock=lambda: now[0]))

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


def test_the_summary_is_said_once_and_begins_with_the_verdict(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(Data(), callbacks=[echo(2, controller=FactorSchedule({0: 1, 1: 3}))])
    said = [record.message for record in caplog.records if "\n  18 steps in" in record.message]
    assert len(said) == 1
    assert said[0].startswith("lightning_echo: ")
    assert "\n  why: idle " in said[0].split("\n  18 steps in")[0]
    assert "epoch 0: factor 1" in said[0]
    assert "scheduled from epoch 1 on" in said[0]
    assert "epochs 1 to 2: factor 3" in said[0]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(Data(), callbacks=[EchoCallback(summary=False)])
    assert not [record for record in caplog.records if "18 steps in" in record.message]


def test_tensorboard_has_the_summary_as_a_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(Data(), callbacks=[echo(2)], logger=TensorBoardLogger(tmp_path, name="", version=""), log_every_n_steps=5)
    (said,) = [record.message for record in caplog.records if "\n  18 steps in" in record.message]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (found,) = events.Tensors("echo/summary/text_summary")
    assert found.step == 17  # as what the last epoch has logged
    shown = found.tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in shown.splitlines()] == said.splitlines()
    assert {event.value for event in events.Scalars("epoch")} == {0.0, 1.0, 2.0}


def test_without_workers_the_verdict_is_as_many_as_cores_if_reading_takes_many_times_as_long_as_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_echo.training.meters.usable_cores", lambda: 3)
    callback = EchoCallback()
    fit(Data(0, delay=0.04), callbacks=[callback], max_epochs=2)
    assert callback.verdict is not None
    assert callback.verdict.next_line == "num_workers=3"
    assert callback.verdict.message.startswith("Set num_workers to 3 or more first, ")


def test_the_line_to_paste_keeps_the_options_of_the_callback() -> None:
    callback = EchoCallback(reuse="each", buffer_size=16)
    fit(Data(1, delay=0.02), callbacks=[callback], max_epochs=2)
    assert callback.verdict is not None
    assert re.fullmatch(r'EchoCallback\(factor=[\d.]+, buffer_size=16, reuse="each"\)', callback.verdict.next_line)


def test_a_second_fit_begins_its_report_anew() -> None:
    callback = echo(2)
    runner = trainer(callbacks=[callback], max_epochs=2)
    runner.fit(Recorder(), datamodule=Data())
    first = list(callback.reports)
    runner.fit_loop.max_epochs = 4
    runner.fit(Recorder(), datamodule=Data())
    assert [report.epoch for report in first] == [0, 1]
    assert [report.epoch for report in callback.reports] == [2, 3]


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
