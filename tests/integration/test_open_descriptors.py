"""A batch of a worker has a descriptor for each tensor. Live batches do not keep more of them open than a process may have."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoCallback, EchoConfig

TENSORS, LIVE, LIMIT = 8, 100, 512


class Many(Dataset[dict[str, torch.Tensor]]):
    """Examples of several tensors."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {f"tensor_{number}": torch.tensor([float(index), number]) for number in range(TENSORS)}

    def __len__(self) -> int:
        return 300


class Model(pl.LightningModule):
    """Notes what it gets, and how many descriptors are open."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.batches: list[dict[str, torch.Tensor]] = []
        self.open: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.batches.append({name: tensor.clone() for name, tensor in batch.items()})
        self.open.append(len(os.listdir("/proc/self/fd")))
        loss: torch.Tensor = self.layer(batch["tensor_0"]).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_many_live_batches_of_workers_need_no_more_descriptors_than_a_process_may_have(tmp_path: Path) -> None:
    before, model = resource.getrlimit(resource.RLIMIT_NOFILE), Model()
    echo = EchoCallback(echo=EchoConfig(factor=2, insertion_point="after_transfer", buffer_size=LIVE, seed=1), summary=False)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[echo], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    at_start = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
        trainer.fit(model, DataLoader(Many(), 1, num_workers=1, shuffle=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(model.batches) == 300
    for batch in model.batches:
        index = batch["tensor_0"][0, 0]
        assert [tensor.tolist() for tensor in batch.values()] == [[[index, number]] for number in range(TENSORS)]
    assert max(model.open) < at_start + LIMIT // 2
