"""An HDF5 file that each worker opens for itself. `auto` takes before_augmentation: read once, flipped anew for each use.

An open HDF5 file must not be inherited by workers: they would share its place in the file, and a started worker cannot get it at
all (it cannot be pickled). So `read` opens the file at the first example, and this process never does.
"""

import tempfile

import h5py
import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, StagedDataset


class Images(StagedDataset):
    def __init__(self, path):
        self.path, self.file = path, None
        with h5py.File(path) as file:
            self.length = len(file["images"])

    def __len__(self):
        return self.length

    def read(self, index):
        if self.file is None:
            self.file = h5py.File(self.path)
        return self.file["images"][index], int(self.file["labels"][index])

    def decode(self, raw):
        return torch.from_numpy(raw[0]).float() / 255, raw[1]

    def augment(self, example):
        image, label = example
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), label


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 2))

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        with h5py.File(f"{folder}/images.h5", "w") as file:
            file["images"], file["labels"] = torch.randint(256, (192, 16, 16), dtype=torch.uint8), torch.arange(192) % 2
        data = Images(f"{folder}/images.h5")
        loader = EchoLoader(DataLoader(data, 16, shuffle=True, num_workers=2), factor=3)  # <- the line that changes
        Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)
        print(f"{loader}\n{loader.counts}\nopened by this process: {data.file is not None}")
