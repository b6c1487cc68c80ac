"""A stall analysis on the device: copies take time, steps are waited for, and its random numbers are put back."""

from __future__ import annotations

from typing import Any

import torch
from gpu_runs import ACCELERATOR, DEVICE, ON_GPU, loader_of
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

from lightning_echo import StallAnalyzer

WIDTH, PRODUCTS, SIZE = (2**18, 20, 2048) if ON_GPU else (2**10, 1, 64)
BATCH_SIZE = 16


class Large(Dataset[torch.Tensor]):
    """A mebibyte each, so that copying takes a while."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(WIDTH)


class Model(BoringModel):
    """Works on the device for longer than it takes to say so, and draws random numbers there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch.is_cuda == ON_GPU
        factor = torch.rand(SIZE, SIZE, device=self.device)
        for _ in range(PRODUCTS):
            factor = factor @ factor / 1000
        return super().training_step(batch[:, :32] + factor.mean(), batch_idx)


def random_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if ON_GPU else [torch.get_rng_state()]


def test_copies_steps_and_random_numbers_of_a_device() -> None:
    model, loader = Model(), loader_of(Large(), BATCH_SIZE, workers=1)
    torch.rand(2, device=DEVICE)
    before = random_states()
    trainer_options = {"accelerator": ACCELERATOR, "devices": 1}
    analyzer = StallAnalyzer(model, loader, trainer_kwargs=trainer_options, say=lambda message: None)
    found = analyzer.run(20)
    # Faster than any bus of today, and than any device: 100 GB/s, 1e15 operations a second.
    if ON_GPU:
        assert found.stages.copy.median > BATCH_SIZE * WIDTH * 4 / 100e9
        assert found.ingestion_seconds > PRODUCTS * 2 * SIZE**3 / 1e15
    assert found.step_seconds >= 0.9 * found.ingestion_seconds
    assert analyzer.check(found, factor=2, insertion_point="after_transfer").checked[0].step_seconds.median > 0
    for state, after in zip(before, random_states(), strict=True):
        assert torch.equal(state, after)


def test_copies_from_pinned_memory_are_measured_where_the_loader_does_not_pin() -> None:
    loader = DataLoader(Large(), BATCH_SIZE, num_workers=1)
    trainer_options = {"accelerator": ACCELERATOR, "devices": 1}
    analyzer = StallAnalyzer(Model(), loader, trainer_kwargs=trainer_options, say=lambda message: None)
    found = analyzer.run(20)
    if ON_GPU:
        pinning = found.stages.pinning
        assert pinning is not None
        assert pinning.copy.median > BATCH_SIZE * WIDTH * 4 / 100e9  # as above
        assert pinning.pin.median > 0
        assert found.predict(pin_memory=True).step_seconds <= found.predict().step_seconds + pinning.pin.median
        assert analyzer.check(found, pin_memory=True).checked[0].step_seconds.median > 0
    else:
        assert (found.stages.pinning, "device 'cpu'" in found.stages.no_pinning) == (None, True)
