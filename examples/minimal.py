"""A plain Lightning program, and the one line that makes it echo its data."""

import time

import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader


def add_noise(wave):
    return wave + torch.randn_like(wave)


class SlowWaves(Dataset):  # sine and cosine waves, each of which takes 2 ms to read
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.002)
        label = index % 2
        return self.transform(torch.sin(torch.linspace(0, 6.28, 64) + 1.57 * label)), label


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 2)

    def training_step(self, batch):
        waves, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(waves), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    loader = DataLoader(SlowWaves(transform=add_noise), batch_size=32, shuffle=True, num_workers=2)
    loader = EchoLoader(loader, 2)  # <- the one line that changes
    Trainer(max_epochs=4, logger=False, enable_checkpointing=False).fit(Classifier(), loader)
    print(loader.counts)
