"""CSV, TensorBoard, MLflow and W&B (offline) hold what `EchoCallback` logs: their own files are read back.

What is expected is counted from the batches that reached the model: with noise that no two fresh examples share, it is seen there
which of them are used for the first time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from logger_files import KINDS, Logged, close, skip_unless_installed, staying_here
from trainer_runs import Batch, Data, Killed, SaveAt, first_uses, fit

from lightning_echo import EchoCallback

STEPS, EPOCHS = 6, 3  # 22 examples in batches of 4
EVERY = 2
DIES_AFTER = 8  # in the middle of an epoch, at a step that is logged


@pytest.fixture(autouse=True)
def _loggers_that_stay_here(tmp_path: Path) -> Iterator[None]:
    with staying_here(tmp_path):
        yield


def callback() -> EchoCallback:
    return EchoCallback(factor=2.5, insertion_point="after_augmentation", seed=7)


def train(loggers: Any, **options: Any) -> Any:
    run = fit(Data(), logger=loggers, max_epochs=EPOCHS, log_every_n_steps=EVERY, **options)
    for logger in run.trainer.loggers:
        close(logger)
    return run


def assert_as_trained(logged: Logged, batches: list[Batch]) -> None:
    """The counts of every second step, the measures of each epoch's end, and the options are those of the run."""
    delivered = list(accumulate(len(indices) for indices, _ in batches))
    fresh = list(accumulate(map(len, first_uses(batches))))
    of_steps = {step: fresh[step] for step in range(EVERY - 1, STEPS * EPOCHS, EVERY)}
    assert logged.of("echo/fresh_examples") == of_steps
    assert logged.of("echo/echoed_examples") == {step: delivered[step] - fresh[step] for step in of_steps}
    assert logged.of("echo/factor") == dict.fromkeys(of_steps, 2.5)

    assert logged.of("epoch") == {step: step // STEPS for step in logged.of("epoch")}
    assert set(of_steps) <= set(logged.of("epoch"))

    ends = [STEPS * epoch - 1 for epoch in range(1, EPOCHS + 1)]
    passes = {end: fresh[end] / 22 for end in ends}
    assert logged.of("echo/passes") == pytest.approx(passes)
    of_epochs = {"echo/idle_fraction", "echo/data_wait_seconds", "echo/step_seconds", "echo/effective_factor"}
    assert {name: list(logged.of(name)) for name in of_epochs} == dict.fromkeys(of_epochs, ends)
    assert all(0 <= share <= 1 for share in logged.of("echo/idle_fraction").values())
    chosen = {"factor": "2.5", "insertion_point": "after_augmentation", "reuse": "memory", "seed": "7", "cache": "None"}
    assert logged.options | chosen == logged.options


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_what_is_logged_is_in_the_loggers_files(name: str, tmp_path: Path) -> None:
    """Also of a run that is killed, and resumed where it ended."""
    skip_unless_installed(name)
    whole = fit(Data(), logger=False, max_epochs=EPOCHS, callbacks=[callback()])
    saving = SaveAt(tmp_path, [DIES_AFTER], dies=True)
    first = KINDS[name].make(tmp_path, 0)
    with pytest.raises(Killed):
        train(first, callbacks=[callback(), saving])
    close(first)
    train(KINDS[name].make(tmp_path, 1), callbacks=[callback()], ckpt_path=saving.path(DIES_AFTER))
    assert_as_trained(KINDS[name].read(tmp_path), whole.model.batches)


@pytest.mark.slow
def test_several_loggers_of_one_run_say_the_same(tmp_path: Path) -> None:
    names = ("CSV", "TensorBoard", "MLflow", "W&B")
    for name in names:
        skip_unless_installed(name)
    run = train([KINDS[name].make(tmp_path, 0) for name in names], callbacks=[callback()])
    logged = {name: KINDS[name].read(tmp_path) for name in names}
    for each in logged.values():
        assert_as_trained(each, run.model.batches)
    for metric in ("echo/idle_fraction", "echo/step_seconds", "echo/recommended_factor"):
        exact = logged["MLflow"].of(metric)
        assert len(exact) == EPOCHS
        assert all(each.of(metric) == pytest.approx(exact) for each in logged.values()), metric


@pytest.mark.slow
def test_the_summary_is_a_text_in_the_files_of_mlflow_and_wandb(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("MLflow", "W&B"):
        skip_unless_installed(name)
    with caplog.at_level("INFO"):
        train([KINDS[name].make(tmp_path, 0) for name in ("MLflow", "W&B")], callbacks=[callback()])
    (said,) = [each.getMessage() for each in caplog.records if "\n  18 steps in" in each.getMessage()]
    (of_mlflow,) = tmp_path.glob("mlruns/*/*/artifacts/echo/summary.txt")
    assert of_mlflow.read_text() == said
    (of_wandb,) = tmp_path.glob("start-0/wandb/offline-run-*/files/media/table/echo/summary_*.table.json")
    assert json.loads(of_wandb.read_text()) == {"columns": ["summary"], "data": [[said]]}
