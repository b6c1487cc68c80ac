"""A batch of a worker has a descriptor for each tensor. Live batches do not keep more of them open than a process may have."""

import os
import resource

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from trainer_runs import trainer

from lightning_echo import EchoCallback, EchoConfig

TENSORS, LIVE, LIMIT = 8, 100, 512


class Many(Dataset):
    """Examples of several tensors."""

    def __getitem__(self, index):
        return {f"tensor_{number}": torch.tensor([float(index), number]) for number in range(TENSORS)}

    def __len__(self):
        return 300


class Model(pl.LightningModule):
    """Notes what it gets, and how many descriptors are open."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.batches, self.open = False, [], []

    def training_step(self, batch, batch_idx):
        self.batches.append({name: tensor.tolist() for name, tensor in batch.items()})
        self.open.append(len(os.listdir("/proc/self/fd")))

    def configure_optimizers(self):
        return []


def test_many_live_batches_of_workers_need_no_more_descriptors_than_a_process_may_have():
    before, model = resource.getrlimit(resource.RLIMIT_NOFILE), Model()
    echo = EchoCallback(echo=EchoConfig(factor=2, insertion_point="after_transfer", buffer_size=LIVE, seed=1), summary=False)
    at_start = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
        trainer(max_epochs=1, callbacks=[echo]).fit(model, DataLoader(Many(), 1, num_workers=1, shuffle=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(model.batches) == 300
    for batch in model.batches:
        index = batch["tensor_0"][0][0]
        assert list(batch.values()) == [[[index, number]] for number in range(TENSORS)]
    assert max(model.open) < at_start + LIMIT // 2
