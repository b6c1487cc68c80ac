"""WebDataset, a stream of examples from tar files. `auto` takes after_augmentation.

A stream has no index: its examples are reused as they leave the last step of the pipeline. So what is random belongs behind the
echo: here into the model. An epoch lasts until the stream ends, so that it has about three times the steps. A `WebLoader` that
makes the batches itself is taken, too; then whole batches are reused (after_batching).
"""

import tempfile

import torch
import webdataset
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader


def write(folder):
    with webdataset.ShardWriter(f"{folder}/%d.tar", maxcount=32, verbose=0) as shards:  # four files
        for number in range(128):
            image = (torch.rand(8, 8) + number % 2).numpy()
            shards.write({"__key__": f"{number:03d}", "image.npy": image, "label.cls": number % 2})


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))

    def training_step(self, batch):
        images, labels = batch
        if torch.rand(()) < 0.5:
            images = images.flip(-1)  # anew for each use
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        shards = [f"{folder}/{number}.tar" for number in range(4)]
        stream = webdataset.WebDataset(shards, shardshuffle=4).shuffle(16).decode().to_tuple("image.npy", "label.cls")
        loader = DataLoader(stream, batch_size=16, num_workers=2)
        loader = EchoLoader(loader, factor=3)  # <- the line that changes
        Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Classifier(), loader)
    print(f"{loader}\n{loader.counts}")
