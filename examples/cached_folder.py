"""An image folder behind a slow read, and a cache that holds half of it: from the second epoch on, half is read.

What is held are the images as they are before the first random transform: read, decoded and resized. They are cropped and flipped
anew each time, so a batch is the same with and without the cache.
"""

import tempfile
import time
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from lightning_echo import EchoLoader

TRAIN = v2.Compose([v2.Resize(64), v2.RandomCrop(48), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, True)])


def slow_read(path):
    time.sleep(0.01)  # as from a storage in the network
    return default_loader(path)


class EpochTimes(Callback):
    def on_train_epoch_start(self, trainer, module):
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        print(f"epoch {trainer.current_epoch}: {time.perf_counter() - self.start:.2f} s")


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 8, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 2))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


if __name__ == "__main__":
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(512):
            file = Path(folder, f"class-{number % 2}", f"{number}.jpg")
            file.parent.mkdir(exist_ok=True)
            v2.functional.to_pil_image(torch.rand(3, 80, 80)).save(file)
        data = ImageFolder(folder, TRAIN, loader=slow_read)
        loader = EchoLoader(DataLoader(data, 32, shuffle=True, num_workers=2), factor=1, cache="3MiB")  # <- the line that changes
        trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, callbacks=[EpochTimes()], enable_checkpointing=False)
        trainer.fit(Classifier(), loader)
        print(loader.cache_counts)
