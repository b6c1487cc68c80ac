"""A fit that echoes on demand goes on from a checkpoint: no example is lost, none comes twice, whatever the Trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from collection_runs import Several, SeveralRecorder
from demand_runs import LENGTH, STEPS, assert_fresh_once_per_pass, killed_and_resumed, on_demand, run_on_demand
from trainer_runs import Killed, Run, SaveAt, fit

from lightning_echo import EchoLoader

pytestmark = pytest.mark.usefixtures("read_here", "one_thread")

TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited": {"limit_train_batches": 5},
    "validates in mid-epoch": {"val_check_interval": 3},
    "accumulates": {"accumulate_grad_batches": 3},
    "reloads": {"reload_dataloaders_every_n_epochs": 1},
    "reloads and is limited": {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 5, "val_check_interval": 2},
    "counts steps": {"max_steps": 20, "max_epochs": -1},
}


def loader_of(run: Run) -> EchoLoader:
    loader = run.trainer.train_dataloader
    assert isinstance(loader, EchoLoader)
    return loader


def steps_of(options: dict[str, Any]) -> list[int]:
    steps = options.get("limit_train_batches", STEPS)
    return [STEPS, STEPS, 20 - 2 * STEPS] if "max_steps" in options else [steps] * 3


@pytest.mark.parametrize("kind", TRAINERS)
def test_each_example_is_fresh_once_per_pass(kind: str) -> None:
    callback, options = on_demand(), TRAINERS[kind]
    run = run_on_demand(callback, delay=0.06, **options)
    assert run.model.steps == steps_of(options)
    report = callback.reports[-1]
    assert report.fresh_examples + report.echoed_examples == sum(len(indices) for indices, _ in run.model.batches)
    assert report.echoed_examples > 0, "the test tests something"
    assert_fresh_once_per_pass(run.model.batches, loader_of(run))
    assert report.passes == pytest.approx(report.fresh_examples / LENGTH)


@pytest.mark.grid
@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("step", [4, 5, 8, 11])
def test_after_a_kill_and_a_resume_too(tmp_path: Path, kind: str, step: int) -> None:
    options = TRAINERS[kind]
    batches, run, callback = killed_and_resumed(tmp_path, step, **options)
    assert len(batches) == sum(steps_of(options))
    assert run.model.epochs == [epoch for epoch, steps in enumerate(steps_of(options)) for _ in range(steps)][step:]
    assert [report.epoch for report in callback.reports] == [0, 1, 2]
    assert_fresh_once_per_pass(batches, loader_of(run))


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["dict", "max_size"])
@pytest.mark.parametrize("step", [2, 3, 5])
def test_each_of_two_loaders_goes_on_by_itself(tmp_path: Path, kind: str, step: int) -> None:
    first = SeveralRecorder()
    with pytest.raises(Killed):
        fit(Several(kind, 1), model=first, callbacks=[on_demand(), SaveAt(tmp_path, [step], dies=True)])
    callback = on_demand()
    run = fit(Several(kind, 1), model=SeveralRecorder(), callbacks=[callback], ckpt_path=SaveAt(tmp_path, []).path(step))
    steps = first.batches[:step] + run.model.batches
    for position, name in enumerate(("long", "short")):
        batches: Any = [step[position] for step in steps if step[position] is not None]
        loader: Any = run.trainer.train_dataloader[name]  # type: ignore[index]
        assert_fresh_once_per_pass(batches, loader)
        assert run.trainer.callback_metrics[f"echo/{name}/fresh_examples"] == loader.counts.fresh
