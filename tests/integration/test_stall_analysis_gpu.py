"""A stall analysis on a CUDA device: copies take time, steps are waited for, and its random numbers are put back."""

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

from lightning_echo import StallAnalyzer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Large(Dataset):
    """A mebibyte each, so that copying takes a while."""

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return torch.zeros(2**18)


class Model(BoringModel):
    """Works on the device for longer than it takes to say so, and draws random numbers there."""

    def training_step(self, batch, batch_idx):
        assert batch.is_cuda
        factor = torch.rand(2048, 2048, device=self.device)
        for _ in range(20):
            factor = factor @ factor / 1000
        return super().training_step(batch[:, :32] + factor.mean(), batch_idx)


def test_copies_steps_and_random_numbers_of_a_device():
    loader = DataLoader(Large(), batch_size=16, num_workers=1, pin_memory=True)
    before = torch.cuda.get_rng_state_all()
    analyzer = StallAnalyzer(Model(), loader, trainer_kwargs={"accelerator": "gpu", "devices": 1}, say=lambda message: None)
    found = analyzer.run(20)
    # 16 MiB at 100 GB/s, faster than any bus of today; 20 products of 2 * 2048**3 operations at 1e15 a second
    assert found.stages.copy.median > 16 * 2**20 / 100e9
    assert found.ingestion_seconds > 20 * 2 * 2048**3 / 1e15
    assert found.step_seconds >= 0.9 * found.ingestion_seconds
    assert analyzer.check(found, factor=2, insertion_point="after_transfer").checked[0].step_seconds.median > 0
    for state, after in zip(before, torch.cuda.get_rng_state_all(), strict=True):
        assert torch.equal(state, after)
