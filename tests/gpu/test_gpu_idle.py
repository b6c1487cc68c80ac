"""The idle fraction is that of the device's own timeline, for loads that are known, and no step waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_runs import MS, ON_GPU, Load, Moving, device_spans, loader_of, traced, trainer
from torch.utils.data import Dataset

from lightning_echo import EchoCallback

STEPS = 20
BUSY_SECONDS = (30 if ON_GPU else 20) * MS  # of the device in a step
TOLERANCE = 0.03
LONG_US = 30  # only the products take longer
BETWEEN_KERNELS_US = 200  # gaps within a step are shorter


class Delayed(Dataset[torch.Tensor]):
    """Examples that take a while to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(64)


class Stamped:
    """A loader that notes when it was asked for a batch, and when it had it."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.num_workers = loader, loader.num_workers
        self.asked: list[float] = []
        self.arrived: list[float] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        for _ in range(len(self)):
            self.asked.append(time.perf_counter())
            batch = next(batches)
            self.arrived.append(time.perf_counter())
            yield batch


class Busy(Moving):
    """A step that keeps the device busy for a known time, and does not wait for it. On the processor it sleeps."""

    def __init__(self, load: Load, products: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64))
        self.load, self.products = load, products
        self.ended: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.load.queue(self.products)
        if not ON_GPU:
            time.sleep(BUSY_SECONDS)
        return (self.weight * batch).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended.append(time.perf_counter())


@pytest.fixture(scope="module")
def load() -> tuple[Load, int]:
    """Work for the device, and how many products of it take as long as they should."""
    work = Load()
    return work, work.products_in(BUSY_SECONDS)


def idle_in(events: list[dict[str, Any]]) -> float:
    """The share of the time from the first product's begin to the last one's end in which the device had nothing to do."""
    spans = device_spans(events)
    products = [span for span in spans if span[1] - span[0] > LONG_US]
    begin, last = products[0][0], max(end for _, end in products)
    until, idle = begin, 0.0
    for start, end in spans:
        if begin <= start < last:
            idle += start - until if start - until > BETWEEN_KERNELS_US else 0
            until = max(until, end)
    return idle / (last - begin)


def idle_by_stamps(loader: Stamped, model: Busy) -> float:
    """The same on the processor: the waits after the first batch, of the time from its arrival to the last step's end."""
    waits = [arrived - asked for asked, arrived in zip(loader.asked, loader.arrived, strict=True)]
    return sum(waits[1:]) / (model.ended[-1] - loader.arrived[0])


@pytest.mark.parametrize(("idle", "workers"), [(0.0, 2), (0.5, 1), (0.2, 0), (0.5, 0), (0.8, 0)])
def test_the_idle_fraction_is_that_of_a_known_load(idle: float, workers: int, load: tuple[Load, int]) -> None:
    """Reading and step overlap if there are workers, or a device that the host does not wait for."""
    overlaps = ON_GPU or workers > 0
    per_batch = BUSY_SECONDS / (1 - idle) if overlaps else BUSY_SECONDS * idle / (1 - idle)
    seconds = max(workers, 1) * per_batch if idle else 0.0
    loader, model, callback = Stamped(loader_of(Delayed(seconds), 1, workers)), Busy(*load), EchoCallback(summary=False)
    _, events = traced(lambda: trainer(callbacks=[callback]).fit(model, loader))
    assert len(model.ended) == STEPS
    truth = idle_in(events) if ON_GPU else idle_by_stamps(loader, model)
    assert callback.reports[0].idle_fraction == pytest.approx(truth, abs=TOLERANCE)
    if ON_GPU:
        assert truth == pytest.approx(idle, abs=0.1), "the load is as calibrated, but for overhead and the clocks"


def test_no_step_calls_for_a_synchronisation(load: tuple[Load, int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    monkeypatch.setattr(torch.cuda, "synchronize", noted("device", torch.cuda.synchronize))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", noted("event", torch.cuda.Event.synchronize))
    callback = EchoCallback(summary=False)
    trainer(callbacks=[callback]).fit(Busy(load[0], 1), loader_of(Delayed(0.0), 1))
    assert calls in ([], ["event"]), "once, at the end of the epoch"
    assert len(callback.reports) == 1
