"""A run that was killed within an epoch goes on bit by bit, with its weights on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gpu_data import Coded
from gpu_runs import Moving, echoing, loader_of, trainer

STEPS, EPOCHS, KILLED_AFTER, WIDTH = 12, 2, 17, 64


class Killed(Exception):
    """The end of a run that was meant to be killed."""


class KilledAfter(pl.Callback):
    """Saves a checkpoint after a step of the run, and ends the run."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise Killed


class Linear(Moving):
    """A linear model without a matrix product, so that its sums have one order. Remembers its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH))
        self.batches: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append({name: part.clone() for name, part in batch.items()})
        return ((batch["values"] / 2**20 * self.weight).sum(dim=1) - batch["index"]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def fit(point: str, *callbacks: pl.Callback, path: Path | None = None) -> Linear:
    model = Linear()
    data = echoing(loader_of(Coded(4 * STEPS, WIDTH), 4, workers=2), 2.5, point)
    trainer(max_epochs=EPOCHS, callbacks=list(callbacks)).fit(model, datamodule=data, ckpt_path=path)
    return model


@pytest.mark.parametrize("point", ["before_augmentation", "after_transfer"])
def test_a_killed_run_goes_on_exactly(point: str, tmp_path: Path) -> None:
    path = tmp_path / "killed.ckpt"
    whole = fit(point)
    assert len(whole.batches) == EPOCHS * STEPS
    with pytest.raises(Killed):
        fit(point, KilledAfter(KILLED_AFTER, path))
    resumed = fit(point, path=path)
    for batch, expected in zip(resumed.batches, whole.batches[KILLED_AFTER:], strict=True):
        assert batch.keys() == expected.keys()
        for name, part in batch.items():
            assert torch.equal(part, expected[name])
    assert torch.equal(resumed.weight, whole.weight)
    assert whole.weight.abs().sum() > 0
