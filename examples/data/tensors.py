"""A `TensorDataset`: nothing in it is random. `auto` takes after_augmentation, and what is reused are the examples.

The noise is drawn in the model, behind the echo, anew for each use. A training seldom waits for tensors that lie in memory: there
factor 1 is the best one, and `EchoCallback()` measures and says so. These lie in a file that is mapped into memory (`mmap=True`),
which on a slow disk is worth echoing.
"""

import tempfile

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_echo import EchoLoader


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch):
        values, labels = batch
        noisy = values + 0.1 * torch.randn_like(values)
        return torch.nn.functional.cross_entropy(self.network(noisy), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        labels = torch.arange(192) % 2
        torch.save({"values": torch.randn(192, 32) + labels[:, None], "labels": labels}, f"{folder}/data.pt")
        tensors = torch.load(f"{folder}/data.pt", mmap=True, weights_only=True)
        data = TensorDataset(tensors["values"], tensors["labels"])
        loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=2)
        loader = EchoLoader(loader, factor=3)  # <- the line that changes
        Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)
    print(f"{loader}\n{loader.counts}")
