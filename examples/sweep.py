"""A sweep over three learning rates: the trainings read their data three times, or share one process that reads it once.

Printed is the time that the steps of a training take, with their waiting for data, but not the start of processes.
"""

import logging
import multiprocessing
import statistics

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lightning_echo import EchoCallback

RATES = (0.01, 0.003, 0.001)


class Stripes(Dataset):
    transform = v2.Compose([v2.RandomResizedCrop(96), v2.GaussianBlur(9), v2.RandomRotation(20), v2.RandomHorizontalFlip()])

    def __len__(self):
        return 640

    def __getitem__(self, index):
        stripes = (torch.arange(256) // 16 % 2).float().expand(3, 256, 256)  # drawn here, where yours is read and decoded
        return self.transform(stripes.mT if index % 2 else stripes), index % 2


class Classifier(LightningModule):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.network = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

    def training_step(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.rate)


def train(rate, share, results):
    for name in ("lightning.pytorch", "lightning_echo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    echo = EchoCallback(share=share, summary=False)  # <- the line that changes; share=None: this training reads for itself
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=3, accelerator="cpu", callbacks=[echo], **quiet)
    trainer.fit(Classifier(rate), DataLoader(Stripes(), batch_size=16, shuffle=True, num_workers=2))
    results.put(sum(report.steps * (report.data_wait_seconds + report.step_seconds) for report in echo.reports))


def sweep(what, rates, share=None):
    context = multiprocessing.get_context("spawn")  # as from so many terminals
    results = context.Queue()
    trainings = [context.Process(target=train, args=(rate, share, results)) for rate in rates]
    for training in trainings:
        training.start()
    seconds = [results.get(timeout=120) for _ in trainings]
    for training in trainings:
        training.join()
    print(f"{what}: {statistics.mean(seconds):.1f} s each")


if __name__ == "__main__":
    sweep("one training", RATES[:1])
    sweep("three trainings, each reads for itself", RATES)
    sweep("three trainings, one reads for all", RATES, {"name": "sweep", "wait_for": 3, "linger_seconds": 0})
