"""``echo_summary.json``: what is in it, where it is written and where not, and a run that replays its decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from test_early_decisions import AHEAD, EPOCH, LENGTH, Scripted, scripted
from trainer_runs import Data, Killed, Recorder, Run, SaveAt, SetFactor, echoed, fit

from lightning_echo import Controller, EchoCallback, EchoConfig, FactorSchedule, MetricGuard, __version__
from lightning_echo.measure.summary import RunSummary

EARLY = 14
TOLD = {EARLY: 3.0, 30: 1.5, EPOCH: 2.0, EPOCH + 30: 4.0}


def logged(folder: Path, callback: EchoCallback, *callbacks: Any, data: Any = None, **options: Any) -> Run:
    data = Data(2, length=LENGTH) if data is None else data
    logger = CSVLogger(folder, name="", version="run")
    return fit(data, callbacks=[callback, *callbacks], **{"max_epochs": 2, "logger": logger, **options})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, EchoCallback]:
    """A run of two epochs with decisions within them, its file, and its callback."""
    folder, callback = tmp_path_factory.mktemp("original"), scripted(Scripted(TOLD, first=7, every=30))
    return logged(folder, callback), folder / "run" / "echo_summary.json", callback


def with_prefetch(factor: int) -> Data:
    return Data(2, length=LENGTH, loader_options={"shuffle": True, "prefetch_factor": factor})


def test_it_tells_the_reports_the_decisions_and_the_versions(original: tuple[Run, Path, EchoCallback]) -> None:
    _, path, callback = original
    found = json.loads(path.read_text())
    assert found.keys() == {"version", "reports", "decisions", "packages", "verdict", "program", "name", "began"}
    assert found["version"] == 2
    assert found["reports"] == json.loads(json.dumps([report.state() for report in callback.reports]))
    decisions = [(use["step"], use["batch"], use["factor"]) for use in found["decisions"]]
    assert decisions == [(0, 0, 1.0), *((step, step + AHEAD, factor) for step, factor in TOLD.items())]
    assert {use["message"] for use in found["decisions"][1:]} == {"told to"}
    assert callback.verdict is not None
    assert found["verdict"]["message"] == callback.verdict.message
    assert len(found["verdict"]["why"]) == 3
    assert found["packages"]["lightning_echo"] == __version__
    assert found["packages"].keys() == {"lightning_echo", CSVLogger.__module__.partition(".")[0], "torch"}


def test_an_interrupted_run_leaves_what_it_has_and_none_if_nothing_was_known_yet(tmp_path: Path) -> None:
    for folder, step in (("late", EPOCH + 5), ("early", 5)):
        saving, data = SaveAt(tmp_path, [step], dies=True), Data(length=LENGTH)
        with pytest.raises(Killed):
            logged(tmp_path / folder, scripted(Scripted({10: 3.0, EPOCH: 2.0}, first=5)), saving, data=data)
    (path,) = tmp_path.rglob("echo_summary.json")
    assert path == tmp_path / "late" / "run" / "echo_summary.json"
    summary = RunSummary.from_json(path.read_text())
    assert len(summary.reports) == 1
    assert [use.step for use in summary.decisions] == [0, 10, EPOCH]


def test_without_a_log_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options in ({"logger": False, "max_epochs": 1}, {"fast_dev_run": 3}):
        logged(tmp_path, scripted(Scripted()), data=Data(), default_root_dir=tmp_path, **options)
    assert list(tmp_path.rglob("echo_summary.json")) == []


@pytest.mark.parametrize(
    ("data", "guarded", "options"),
    [
        (with_prefetch(1), True, {}),
        (Data(2, length=LENGTH), False, {"max_epochs": 4, "limit_train_batches": 25}),
    ],
    ids=["another prefetch factor, guarded", "epochs of another length"],
)
def test_a_run_replays_the_decisions_batch_by_batch(
    original: tuple[Run, Path, EchoCallback], data: Data, guarded: bool, options: Any
) -> None:
    first, path, _ = original
    schedule: Controller = FactorSchedule.from_summary(path)
    callback = scripted(MetricGuard(schedule, patience=9) if guarded else schedule, factor=2)  # it begins with the file's factor
    again = fit(data, callbacks=[callback], **{"max_epochs": 2, **options})
    assert again.model.batches == first.model.batches
    assert [(use.batch, use.factor) for use in callback.decisions] == [(0, 1), *((s + AHEAD, f) for s, f in TOLD.items())]


@pytest.mark.slow
def test_a_replay_is_resumed_in_the_middle(original: tuple[Run, Path, EchoCallback], tmp_path: Path) -> None:
    first, path, _ = original
    steps = [EARLY + 2, EPOCH]
    saving = SaveAt(tmp_path, steps, dies=True)
    with pytest.raises(Killed):
        fit(Data(2, length=LENGTH), callbacks=[scripted(FactorSchedule.from_summary(path)), saving], max_epochs=2)
    for step in steps:
        callback = scripted(FactorSchedule.from_summary(path))
        again = fit(Data(2, length=LENGTH), callbacks=[callback], max_epochs=2, ckpt_path=saving.path(step))
        assert again.model.batches == first.model.batches[step:], step


def test_the_run_that_is_replayed_may_have_been_resumed_itself(original: tuple[Run, Path, EchoCallback], tmp_path: Path) -> None:
    saving = SaveAt(tmp_path, [35], dies=True)
    with pytest.raises(Killed):
        logged(tmp_path, scripted(Scripted(TOLD, first=7, every=30)), saving)
    logged(tmp_path / "rest", scripted(Scripted(TOLD, first=7, every=30)), ckpt_path=saving.path(35))
    replaying = scripted(FactorSchedule.from_summary(tmp_path / "rest" / "run" / "echo_summary.json"))
    assert fit(Data(2, length=LENGTH), callbacks=[replaying], max_epochs=2).model.batches == original[0].model.batches


def test_epochs_as_long_as_a_pass_are_replayed_too(tmp_path: Path) -> None:
    echo = {"epoch_length": "full_pass"}
    schedule = FactorSchedule({1: 2.0, 2: 1.5})
    first = logged(tmp_path, scripted(schedule, **echo), data=Data(length=40), max_epochs=3, log_every_n_steps=5)
    assert first.model.steps == [10, 20, 15]
    replaying = scripted(FactorSchedule.from_summary(tmp_path / "run" / "echo_summary.json"), **echo)
    again = fit(Data(length=40), callbacks=[replaying], max_epochs=3)
    assert again.model.batches == first.model.batches
    assert again.model.steps == first.model.steps


def test_what_cannot_be_replayed_exactly_is_an_error_and_not_another_run(original: tuple[Run, Path, EchoCallback]) -> None:
    _, path, _ = original
    more, replaying = with_prefetch(3), scripted(FactorSchedule.from_summary(path))
    with pytest.raises(ValueError, match=r"not planned yet, here 22 or more, got 20.*smaller prefetch_factor"):
        fit(more, callbacks=[replaying], max_epochs=2)  # two workers with three batches each, and two in the thread: 14 + 8
    replaying = scripted(FactorSchedule.from_summary(path), epoch_length="full_pass")
    with pytest.raises(ValueError, match=r"factor 1.5 from the decision after batch 30 on.*Use the epoch_length"):
        fit(Data(length=LENGTH), callbacks=[replaying], max_epochs=2)


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

    class Both(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches.append(tuple(tuple(part["noise"].flatten().tolist()) for part in batch.values()))
            return self.loss(batch["a"])

    options = EchoConfig(1, insertion_point="after_augmentation", seed=7)
    callback = EchoCallback(Scripted(TOLD, first=7, every=30), echo=options)
    first = logged(tmp_path, callback, data=Two(1, length=LENGTH), model=Both(), max_epochs=1)
    ahead = 2 + 2
    assert [use.batch for use in callback.decisions][:2] == [{"a": 0, "b": 0}, {"a": EARLY + ahead, "b": EARLY + ahead}]
    replaying = EchoCallback(FactorSchedule.from_summary(tmp_path / "run" / "echo_summary.json"), echo=options)
    again = fit(Two(1, length=LENGTH), callbacks=[replaying], model=Both(), max_epochs=1)
    assert again.model.batches == first.model.batches
