"""One rank with a process group: NCCL on a GPU, gloo on the processor. Counts and metrics are joined on the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_data import Coded
from gpu_runs import ON_GPU, Moving, loader_of, trainer

from lightning_echo import EchoCallback

STEPS, BATCH_SIZE, EPOCHS = 20, 4, 2


class Plain(Moving):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(100, 1)
        self.backend = ""

    def on_train_start(self) -> None:
        self.backend = torch.distributed.get_backend()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch["values"] / 2**20).mean()


@pytest.fixture
def own_group() -> Iterator[None]:
    """No other test sees the process group, or what Lightning writes to the environment for it."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("point", ["after_augmentation", "after_transfer"])
def test_one_rank_counts_and_logs(point: str, own_group: None) -> None:
    callback, model = EchoCallback(factor=2, insertion_point=point, seed=1, summary=False), Plain()
    fitting = trainer(callbacks=[callback], strategy="ddp", max_epochs=EPOCHS, log_every_n_steps=5)
    fitting.fit(model, loader_of(Coded(STEPS * BATCH_SIZE, 100), BATCH_SIZE, workers=2))
    assert model.backend == ("nccl" if ON_GPU else "gloo")
    assert fitting.global_step == EPOCHS * STEPS
    report, metrics = callback.reports[-1], fitting.callback_metrics
    examples = EPOCHS * STEPS * BATCH_SIZE
    assert report.fresh_examples + report.echoed_examples == examples
    assert abs(report.fresh_examples - examples / 2) <= 4 * BATCH_SIZE
    assert metrics["echo/factor"] == 2
    assert metrics["echo/fresh_examples"] == report.fresh_examples
    assert metrics["echo/echoed_examples"] == report.echoed_examples
    assert 0 <= metrics["echo/idle_fraction"] <= 1
    assert metrics["echo/step_seconds"] > 0
