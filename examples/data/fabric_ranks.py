"""`Fabric` on two ranks: `EchoLoader` takes the place of `fabric.setup_dataloaders`. `auto` takes after_augmentation here.

`EchoLoader` divides the data among the ranks as a `DistributedSampler` does, once `fabric.launch` has started them, and each rank
echoes its part. `setup_dataloaders` takes nothing but a `DataLoader`, so that `fabric.to_device` puts the batches on the device.
"""

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_echo import EchoLoader

EPOCHS = 4


def train(fabric):
    seed_everything(1)  # the same on all ranks: they agree on the order
    labels = torch.arange(192) % 2
    loader = DataLoader(TensorDataset(torch.randn(192, 32) + labels[:, None], labels), batch_size=8, shuffle=True, num_workers=1)
    loader = EchoLoader(loader, factor=3)  # <- the line that changes
    network = torch.nn.Linear(32, 2)
    network, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.01))
    steps = 0
    for _ in range(EPOCHS):
        for batch in loader:
            values, labels = fabric.to_device(batch)
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(network(values), labels))
            optimizer.step()
            steps += 1
    total = [
        int(fabric.all_reduce(torch.tensor(count), reduce_op="sum")) for count in (loader.counts.fresh, loader.counts.echoed)
    ]
    if fabric.is_global_zero:
        print(
            f"{loader}\n{loader.counts}\n{steps} steps on each of {fabric.world_size} ranks, {total[0]} fresh, {total[1]} echoed"
        )


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    train(fabric)
