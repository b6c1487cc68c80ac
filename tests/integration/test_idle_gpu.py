"""On CUDA the idle fraction is that of the device's own timeline, and no step waits for the device."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset
from trainer_runs import trainer

from lightning_echo import EchoCallback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 60


class Delayed(Dataset[torch.Tensor]):
    """Examples that take a while to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(64)


class Busy(pl.LightningModule):
    """A step that keeps the device busy for some milliseconds, and does not wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4096, 4096))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        value = self.weight
        for _ in range(8):
            value = value @ self.weight
        return value.sum() + batch.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def fit(seconds: float) -> EchoCallback:
    callback = EchoCallback()
    loader = DataLoader(Delayed(seconds), 4, num_workers=2, pin_memory=True)
    trainer(callbacks=[callback], accelerator="gpu", max_epochs=1).fit(Busy(), loader)
    return callback


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
def test_the_idle_fraction_is_that_of_the_gaps_in_a_trace(seconds: float) -> None:
    fit(0.0)  # warms the device up
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        callback = fit(seconds)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    gaps, until = 0.0, spans[0][1]
    for start, end in spans:
        gaps += max(start - until, 0) if start - until > 200 else 0  # microseconds: shorter ones lie between kernels of a step
        until = max(until, end)
    assert callback.reports[0].idle_fraction == pytest.approx(gaps / (until - spans[0][0]), abs=0.02)


def test_no_step_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: calls.append("device"))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: calls.append("event"))
    fit(0.0)
    assert calls in ([], ["event"]), "once, at the end of the epoch"
