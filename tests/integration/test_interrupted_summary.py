"""After Ctrl-C, the summary is printed as at a normal end, with the epoch that was interrupted."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from trainer_runs import Data, Recorder, fit

from lightning_echo import EchoCallback

pytestmark = pytest.mark.usefixtures("read_here", "one_thread")
LENGTH, BATCH, STEPS = 18, 3, 6


class Interrupts(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            raise KeyboardInterrupt


def interrupted(step: int, folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[EchoCallback, str]:
    """Returns the callback of a run that was interrupted in a step, and what it has logged."""
    callback, before = EchoCallback(**options), signal.getsignal(signal.SIGINT)
    callbacks = [callback, Interrupts(step), OnExceptionCheckpoint(str(folder))]
    caplog.set_level(logging.INFO)
    try:
        with pytest.raises(SystemExit):
            fit(
                Data(2, length=LENGTH, batch_size=BATCH),
                model=Recorder(),
                callbacks=callbacks,
                max_epochs=3,
                enable_checkpointing=True,
            )
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores any further one
    return callback, "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path")
@pytest.mark.parametrize("options", [{"factor": 2}, {"factor": "demand"}], ids=str)
@pytest.mark.parametrize("step", [4, STEPS + 4])
def test_it_has_the_steps_until_then_and_the_checkpoint_is_as_without_it(
    step: int, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, said = interrupted(step, tmp_path, caplog, **options)
    epochs = step // STEPS
    assert len(callback.reports) == epochs, "the epoch that was interrupted is not one of them: it is resumed"
    assert said.count("fresh and") == 1
    assert f"{step} steps in " in said
    assert f"epoch {epochs}: " in said or f"epochs 0 to {epochs}: " in said
    (path,) = tmp_path.iterdir()
    again = EchoCallback(**options)
    fit(Data(2, length=LENGTH, batch_size=BATCH), callbacks=[again], max_epochs=3, ckpt_path=path)
    assert [report.fresh_examples + report.echoed_examples for report in again.reports] == [LENGTH, 2 * LENGTH, 3 * LENGTH]
    assert again.reports[epochs].steps == STEPS


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path")
def test_without_a_summary_or_before_the_first_step_nothing_is_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (step, options) in enumerate([(4, {"factor": 2, "summary": False}), (0, {"factor": 2})]):
        _, said = interrupted(step, tmp_path / str(number), caplog, **options)
        assert "fresh and" not in said


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path")
def test_a_run_that_was_only_measured_has_one_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, said = interrupted(4, tmp_path, caplog)
    assert "4 steps in " in said
    assert "12 fresh and 0 echoed examples" in said
