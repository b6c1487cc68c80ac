"""Batches in pinned memory, copied while the device is busy with something else, arrive whole: no buffer is reused too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_data import Coded, coded
from gpu_runs import DEVICE, ON_GPU, POINTS, Load, Moving, echoing, loader_of, trainer

from lightning_echo import EchoLoader
from lightning_echo.data.copies import copy_example

STEPS, BATCH_SIZE = 200 if ON_GPU else 60, 8
WIDTH = 2**17 if ON_GPU else 2**11  # four MiB a batch
LENGTH = STEPS * BATCH_SIZE


def hash_weights() -> torch.Tensor:
    """A weight for each place, so that numbers in a wrong place show. Sums stay under 2**58: they are exact."""
    return (torch.arange(WIDTH) * 40_503).remainder_(2**20) + 1


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    """The hash of each example before its augmentation, computed on the host."""
    weights = hash_weights()
    return torch.stack([(coded(index, WIDTH) * weights).sum() for index in range(LENGTH)])


class Hashes(Moving):
    """Hashes each batch on the device, behind work that was queued before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.hashes: list[torch.Tensor] = []
        self.indices: list[torch.Tensor] = []
        self.shifts: list[torch.Tensor] = []
        self.behind = 0  # steps after which the device still had work

    def on_train_start(self) -> None:
        self.weights, self.load = hash_weights().to(DEVICE), Load(4096)
        self.load.queue(100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.load.queue(2)
        self.hashes.append((batch["values"] * self.weights).sum(dim=1))
        self.indices.append(batch["index"].clone())
        self.shifts.append(batch["shift"].clone())
        if ON_GPU:
            self.behind += not torch.cuda.current_stream().query()
        return self.weight.sum() * batch["values"][0, 0]


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("point", ["before_augmentation", "after_batching", "after_transfer"])
def test_each_batch_on_the_device_is_that_of_the_host(point: str, factor: int, truth: torch.Tensor) -> None:
    data = echoing(loader_of(Coded(LENGTH, WIDTH), BATCH_SIZE, workers=4 if ON_GPU else 2), factor, point)
    model = Hashes()
    trainer().fit(model, datamodule=data)
    hashes, indices, shifts = (torch.cat(each).cpu() for each in (model.hashes, model.indices, model.shifts))
    assert len(hashes) == LENGTH
    assert torch.equal(hashes, truth[indices] + shifts.long() * hash_weights().sum())
    counts = data.loader.counts
    assert counts.fresh + counts.echoed == LENGTH
    assert abs(counts.fresh - LENGTH // factor) <= 8 * BATCH_SIZE
    assert len(set(indices.tolist())) == counts.fresh
    assert model.transfers == (counts.fresh // BATCH_SIZE if point == "after_transfer" else STEPS)
    if ON_GPU:
        assert model.behind > STEPS // 2, (
            "the device was not behind the host, so a buffer that is reused too early would not show"
        )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", [point for point in POINTS if point != "after_transfer"])
def test_pinned_tensors_are_pinned_in_every_use(point: str, workers: int) -> None:
    loader = EchoLoader(loader_of(Coded(48, 4), workers=workers), 4, insertion_point=point)
    batches = list(loader)
    assert len(batches) == 12
    for batch in batches:
        assert [batch[name].is_pinned() for name in ("values", "shift")] == [ON_GPU] * 2


def test_a_copy_of_a_pinned_batch_is_pinned() -> None:
    pinned = torch.rand(2, 3).pin_memory() if ON_GPU else torch.rand(2, 3)
    handed_out = copy_example({"x": pinned, "y": torch.zeros(2)})
    assert handed_out["x"].is_pinned() == ON_GPU
    assert not handed_out["y"].is_pinned()
    assert torch.equal(handed_out["x"], pinned)
    assert handed_out["x"].data_ptr() != pinned.data_ptr()
