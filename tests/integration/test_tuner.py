"""Lightning's Tuner beside echoing: what it tries takes effect, and nothing of it is left in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset
from trainer_runs import Data, Recorder, echoed, fit, trainer

from lightning_echo import EchoCallback

LENGTH = 200
FINDS: dict[str, Any] = {"early_stop_threshold": None, "update_attr": False}


class Rated(Recorder):
    """Has the learning rate that the finder looks for; a loss that never diverges."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05


def sizes(model: Recorder) -> list[int]:
    return [len(indices) for indices, _ in model.batches]


def tune(data: Any, model: Recorder, folder: Path) -> tuple[Tuner, dict[str, Any]]:
    return Tuner(trainer(default_root_dir=folder, max_epochs=1)), {"model": model, "datamodule": data}


@pytest.mark.slow
@pytest.mark.parametrize(("point", "mode"), [("after_batching", "power"), ("before_augmentation", "binsearch")])
def test_every_batch_size_that_is_tried_takes_effect(point: str, mode: str, tmp_path: Path) -> None:
    tried, data = [], echoed(2, point=point, length=LENGTH)
    for attached in (Data(length=LENGTH), data):
        model = Recorder()
        tuner, what = tune(attached, model, tmp_path)
        found = tuner.scale_batch_size(**what, mode=mode, steps_per_trial=2, init_val=2, max_trials=3)
        tried.append((found, attached.batch_size, sizes(model)))
    assert tried[0] == tried[1]
    assert {4, 8} <= set(sizes(model))  # the first trial is with the size that the data module had, as without echoing
    assert found is not None
    assert data.loader.counts.delivered == 0
    run, expected = fit(data, max_epochs=1), fit(echoed(2, point=point, length=LENGTH, batch_size=found), max_epochs=1)
    assert run.model.batches == expected.model.batches
    assert run.loader.counts == expected.loader.counts


def test_the_learning_rate_finder_leaves_counts_as_they_were_beside_a_callback(tmp_path: Path) -> None:
    runs = []
    for finds in (True, False):
        callback, model = EchoCallback(factor=2, seed=7, summary=False), Rated()
        running, data = trainer(default_root_dir=tmp_path, max_epochs=1, callbacks=[callback]), Data(length=LENGTH)
        if finds:
            Tuner(running).lr_find(model, datamodule=data, num_training=10, **FINDS)
            assert len(model.batches) == 10
            model.batches.clear()
        running.fit(model, datamodule=data)
        (report,) = callback.reports
        assert report.fresh_examples + report.echoed_examples == LENGTH
        runs.append((model.batches, report.fresh_examples, report.steps))
    assert runs[0] == runs[1]


def test_the_learning_rate_finder_goes_back_to_the_middle_of_a_run(tmp_path: Path) -> None:
    data, whole = echoed(2, length=LENGTH), fit(echoed(2, length=LENGTH), max_epochs=2)
    first = fit(data, max_epochs=-1, max_steps=50)
    counts = data.loader.counts
    tuner, what = tune(data, Rated(), tmp_path)
    tuner.lr_find(**what, num_training=10, **FINDS)
    assert data.loader.counts == counts
    assert first.model.batches + fit(data, max_epochs=1).model.batches == whole.model.batches


def test_a_learning_rate_finder_at_the_start_of_fit_disturbs_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": tmp_path}
    plain, run = (
        fit(data, model=Rated(), callbacks=[LearningRateFinder(num_training_steps=5, **FINDS)], **options)
        for data in (Data(length=LENGTH), echoed(2, length=LENGTH))
    )
    steps = len(plain.model.batches) - 5  # all of the epoch, but in Lightning 2.5.0 the trial's steps are taken off it
    assert steps >= 45
    expected = fit(echoed(2, length=LENGTH), max_epochs=1)
    assert run.model.batches[5:] == expected.model.batches[:steps]
    assert run.loader.counts.delivered == sum(sizes(expected.model)[:steps])


class Validates(Rated):
    """Makes its loaders itself, each time newly. Of validation, it knows the order."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.validated = 2, list[list[float]]()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(64.0)), self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(100.0, 124.0)), self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0].reshape(-1, 1).expand(-1, 3)).sum() * 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch[0].tolist())


@pytest.mark.slow
def test_validation_is_plain_while_batch_sizes_are_tried_beside_a_callback(tmp_path: Path) -> None:
    seen = []
    for callbacks in ([], [EchoCallback(factor=2, summary=False)]):
        model = Validates()
        tuner = Tuner(trainer(default_root_dir=tmp_path, max_epochs=1, limit_val_batches=1.0, callbacks=callbacks))
        found = tuner.scale_batch_size(model, steps_per_trial=2, init_val=2, max_trials=3)
        seen.append((found, model.batch_size, model.validated))
    assert seen[0] == seen[1]
    assert {example for batch in seen[1][2] for example in batch} <= set(range(100, 124))
