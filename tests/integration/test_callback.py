"""EchoCallback measures, logs, decides and reports; what it says is compared with what the model and the data set saw."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from callback_cases import PER_EPOCH, STEPS, Remembering, echo, factors
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_runs import At, Data, Recorder, first_uses, fit, trainer

from lightning_echo import EchoCallback, FactorSchedule


def test_every_logger_gets_the_same_sequence_of_calls() -> None:
    loggers = [Remembering(), Remembering()]
    run = fit(Data(1), callbacks=[echo(2)], logger=loggers, log_every_n_steps=5)
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


@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval")
def test_steps_of_accumulated_gradients_are_logged_once_and_without_steps_to_log_at_only_epochs() -> None:
    for every, expected in ((1, [0, 1, 2, 3]), (0, [])):
        logger = Remembering()
        fit(Data(), callbacks=[echo(2)], logger=logger, log_every_n_steps=every, accumulate_grad_batches=3, max_epochs=2)
        assert [step for step, values in logger.metrics if "echo/passes" not in values] == expected
        assert [step for step, values in logger.metrics if "echo/passes" in values] == [1, 3]


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


def test_alone_it_changes_nothing_and_counts_everything_as_fresh() -> None:
    plain, callback = [], EchoCallback()
    for callbacks in ([], [callback]):
        pl.seed_everything(3, verbose=False)
        plain.append(fit(Data(1), callbacks=callbacks, log_every_n_steps=2))
    assert plain[0].model.batches == plain[1].model.batches
    assert plain[0].model.weights == plain[1].model.weights
    assert [(report.fresh_examples, report.echoed_examples) for report in callback.reports] == [(22, 0), (44, 0), (66, 0)]
    assert factors(callback) == [1, 1, 1]
    assert {type(report.passes) for report in callback.reports} == {type(None)}


@pytest.mark.parametrize(
    ("options", "callbacks"),
    [({"reload_dataloaders_every_n_epochs": 2}, []), ({}, [At({1: lambda trainer: trainer.train_dataloader.close()})])],
)
def test_a_first_batch_is_waited_for_where_workers_start(options: Any, callbacks: Any) -> None:
    callback = echo(2)
    fit(Data(1), callbacks=[callback, *callbacks], max_epochs=4, **options)
    assert [report.first_batch_seconds is not None for report in callback.reports] == [True, False, True, False]


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


def test_a_second_fit_begins_its_report_anew() -> None:
    callback = echo(2)
    runner = trainer(callbacks=[callback], max_epochs=2)
    runner.fit(Recorder(), datamodule=Data())
    first = list(callback.reports)
    runner.fit_loop.max_epochs = 4
    runner.fit(Recorder(), datamodule=Data())
    assert [report.epoch for report in first] == [0, 1]
    assert [report.epoch for report in callback.reports] == [2, 3]
