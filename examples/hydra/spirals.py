"""Data and model of train.py: two spirals, of which each point takes 2 ms to read. Nothing here knows of Hydra or of echoing."""

import time

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset


def add_noise(point):
    return point + 0.05 * torch.randn_like(point)


class Spirals(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.002)
        label, turn = index % 2, torch.tensor(index / 40)
        point = turn / 6 * torch.stack([torch.cos(turn + 3.14 * label), torch.sin(turn + 3.14 * label)])
        return self.transform(point), label


class SpiralsDataModule(LightningDataModule):
    def __init__(self, batch_size=32, num_workers=1):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self):
        return DataLoader(Spirals(add_noise), batch_size=self.batch_size, num_workers=self.num_workers, shuffle=True)


class SpiralsClassifier(LightningModule):
    def __init__(self, rate=0.01, width=32):
        super().__init__()
        self.rate = rate
        self.network = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch):
        points, labels = batch
        loss = nn.functional.cross_entropy(self.network(points), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.rate)
