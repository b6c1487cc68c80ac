"""``echo_summary.json``: what is in it, where it is written and where not, and a run that replays its decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from test_early_decisions import AHEAD, EPOCH, LENGTH, Scripted, scripted
from trainer_runs import Data, Killed, Run, SaveAt, SetFactor, echoed, fit

from lightning_echo import Controller, EchoCallback, EchoConfig, FactorSchedule, MetricGuard, __version__
from lightning_echo.measure.summary import RunSummary

EARLY = AHEAD + 10 + 5
TOLD = {EARLY: 3.0, 30: 1.5, EPOCH: 2.0, EPOCH + 30: 4.0}


def logged(folder: Path, callback: EchoCallback, *callbacks: Any, data: Any = None, **options: Any) -> Run:
    data = Data(2, length=LENGTH) if data is None else data
    logger = CSVLogger(folder, name="", version="run")
    return fit(data, callbacks=[callback, *callbacks], **{"max_epochs": 2, "logger": logger, **options})


def original(folder: Path, **options: Any) -> tuple[Run, Path]:
    found = logged(folder, scripted(Scripted(TOLD, first=5, every=30)), **options)
    return found, folder / "run" / "echo_summary.json"


def with_prefetch(factor: int) -> Data:
    return Data(2, length=LENGTH, loader_options={"shuffle": True, "prefetch_factor": factor})


def test_it_tells_the_reports_the_decisions_and_the_versions(tmp_path: Path) -> None:
    callback = scripted(Scripted(TOLD, first=5, every=30))
    logged(tmp_path, callback)
    found = json.loads((tmp_path / "run" / "echo_summary.json").read_text())
    assert found.keys() == {"version", "reports", "decisions", "packages", "verdict"}
    assert found["version"] == 1
    assert found["reports"] == [report.state() for report in callback.reports]
    decisions = [(use["step"], use["batch"], use["factor"]) for use in found["decisions"]]
    assert decisions == [(0, 0, 1.0), *((step, step + AHEAD, factor) for step, factor in TOLD.items())]
    assert {use["message"] for use in found["decisions"][1:]} == {"told to"}
    assert found["packages"]["lightning_echo"] == __version__
    assert callback.verdict is not None
    assert found["verdict"]["message"] == callback.verdict.message
    assert len(found["verdict"]["why"]) == 3
    assert found["packages"].keys() == {"lightning_echo", "lightning", "torch"}


def test_an_interrupted_run_leaves_what_it_has(tmp_path: Path) -> None:
    callback = scripted(Scripted(TOLD, first=5))
    with pytest.raises(Killed):
        logged(tmp_path, callback, SaveAt(tmp_path, [EPOCH + 5], dies=True))
    summary = RunSummary.from_json((tmp_path / "run" / "echo_summary.json").read_text())
    assert len(summary.reports) == 1
    assert [use.step for use in summary.decisions] == [0, EARLY, EPOCH]


def test_a_run_that_ended_before_anything_was_known_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        logged(tmp_path, scripted(Scripted()), SaveAt(tmp_path, [5], dies=True))
    assert list(tmp_path.rglob("echo_summary.json")) == []


def test_without_a_log_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logged(tmp_path, scripted(Scripted()), default_root_dir=tmp_path, logger=False, max_epochs=1)
    logged(tmp_path, scripted(Scripted()), default_root_dir=tmp_path, fast_dev_run=3)
    assert list(tmp_path.rglob("echo_summary.json")) == []


def test_a_file_that_cannot_be_written_is_a_warning_and_no_error(tmp_path: Path) -> None:
    class Occupies(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            (Path(trainer.log_dir or "") / "echo_summary.json").mkdir(parents=True)

    with pytest.warns(UserWarning, match=r"echo_summary.json could not be written: .*directory"):
        found = logged(tmp_path, scripted(Scripted()), Occupies())
    assert found.model.steps == [EPOCH, EPOCH]


@pytest.mark.parametrize(
    ("data", "guarded", "options"),
    [
        (Data(2, length=LENGTH), False, {}),
        (with_prefetch(1), False, {}),
        (Data(2, length=LENGTH), False, {"max_epochs": 4, "limit_train_batches": 25}),
        (Data(2, length=LENGTH), True, {}),
    ],
    ids=["the same", "another prefetch factor", "epochs of another length", "guarded"],
)
def test_a_run_replays_the_decisions_batch_by_batch(tmp_path: Path, data: Data, guarded: bool, options: Any) -> None:
    first, path = original(tmp_path)
    schedule: Controller = FactorSchedule.from_summary(path)
    callback = scripted(MetricGuard(schedule, patience=9) if guarded else schedule, factor=2)  # it begins with the file's factor
    again = fit(data, callbacks=[callback], **{"max_epochs": 2, **options})
    assert again.model.batches == first.model.batches
    assert [(use.batch, use.factor) for use in callback.decisions] == [(0, 1), *((s + AHEAD, f) for s, f in TOLD.items())]


def test_a_replay_is_resumed_in_the_middle(tmp_path: Path) -> None:
    first, path = original(tmp_path)
    steps = [EARLY, EARLY + 2, 29, EPOCH, EPOCH + 30]
    saving = SaveAt(tmp_path, steps)
    fit(Data(2, length=LENGTH), callbacks=[scripted(FactorSchedule.from_summary(path)), saving], max_epochs=2)
    for step in steps:
        callback = scripted(FactorSchedule.from_summary(path))
        again = fit(Data(2, length=LENGTH), callbacks=[callback], max_epochs=2, ckpt_path=saving.path(step))
        assert again.model.batches == first.model.batches[step:], step


def test_the_run_that_is_replayed_may_have_been_resumed_itself(tmp_path: Path) -> None:
    first, _ = original(tmp_path / "whole", max_epochs=3)
    with pytest.raises(Killed):
        logged(tmp_path, scripted(Scripted(TOLD, first=5, every=30)), SaveAt(tmp_path, [35], dies=True), max_epochs=3)
    checkpoint = SaveAt(tmp_path, []).path(35)
    logged(tmp_path / "rest", scripted(Scripted(TOLD, first=5, every=30)), max_epochs=3, ckpt_path=checkpoint)
    replaying = scripted(FactorSchedule.from_summary(tmp_path / "rest" / "run" / "echo_summary.json"))
    again = fit(Data(2, length=LENGTH), callbacks=[replaying], max_epochs=3)
    assert again.model.batches == first.model.batches


def test_epochs_as_long_as_a_pass_are_replayed_too(tmp_path: Path) -> None:
    echo = {"epoch_length": "full_pass"}
    schedule = FactorSchedule({1: 2.0, 2: 1.5})
    first = logged(tmp_path, scripted(schedule, **echo), max_epochs=3)
    assert first.model.steps == [50, 100, 75]
    path = tmp_path / "run" / "echo_summary.json"
    again = fit(Data(2, length=LENGTH), callbacks=[scripted(FactorSchedule.from_summary(path), **echo)], max_epochs=3)
    assert again.model.batches == first.model.batches
    assert again.model.steps == first.model.steps


def test_what_cannot_be_replayed_exactly_is_an_error_and_not_another_run(tmp_path: Path) -> None:
    _, path = original(tmp_path)
    more, replaying = with_prefetch(3), scripted(FactorSchedule.from_summary(path))
    with pytest.raises(ValueError, match=r"not planned yet, here 29 or more, got 27.*smaller prefetch_factor"):
        fit(more, callbacks=[replaying], max_epochs=2)  # two workers with three batches each, and two in the thread: 21 + 8
    replaying = scripted(FactorSchedule.from_summary(path), epoch_length="full_pass")
    with pytest.raises(ValueError, match=r"factor 1.5 from the decision after batch 30 on.*Use the epoch_length"):
        fit(Data(2, length=LENGTH), callbacks=[replaying], max_epochs=2)


def test_a_factor_that_the_controller_did_not_set_is_told_and_cannot_be_replayed(tmp_path: Path) -> None:
    data = echoed(2, workers=0, length=LENGTH)
    logged(tmp_path, EchoCallback(), SetFactor(data, {0: 3.0}), data=data)
    path = tmp_path / "run" / "echo_summary.json"
    uses = RunSummary.from_json(path.read_text()).decisions
    assert [(use.step, use.batch, use.factor) for use in uses] == [(0, 0, 2), (None, EPOCH, 3)]
    with pytest.raises(ValueError, match=r"factor 3 from batch 50 on was not decided on by the controller"):
        FactorSchedule.from_summary(path)


def test_several_loaders_are_replayed_together(tmp_path: Path) -> None:
    class Two(Data):
        def train_dataloader(self) -> Any:
            return {name: super(Two, self).train_dataloader() for name in "ab"}

    class Both(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layer = torch.nn.Linear(1, 1)
            self.batches: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.batches.append({name: part["noise"].tolist() for name, part in batch.items()})

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """The data module has a loader for it."""

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = EchoConfig(1, insertion_point="after_augmentation", seed=7)
    callback = EchoCallback(Scripted(TOLD, first=5, every=30), echo=options)
    first = logged(tmp_path, callback, data=Two(2, length=LENGTH), model=Both(), limit_val_batches=0)
    assert [use.batch for use in callback.decisions][:2] == [{"a": 0, "b": 0}, {"a": EARLY + AHEAD, "b": EARLY + AHEAD}]
    replaying = EchoCallback(FactorSchedule.from_summary(tmp_path / "run" / "echo_summary.json"), echo=options)
    again = fit(Two(2, length=LENGTH), callbacks=[replaying], model=Both(), max_epochs=2, limit_val_batches=0)
    assert again.model.batches == first.model.batches
