"""Augmentation on the device: batches are flipped, cropped and mixed up by the model, after their transfer.

`auto` knows nothing of the model, so that `after_transfer` is asked for by name: the batch that lies on the device is reused, not
transferred again, and `on_after_batch_transfer` augments it anew for each use.
"""

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from lightning_echo import EchoCallback

AUGMENT = [v2.RandomCrop(40), v2.RandomHorizontalFlip(), v2.RandomChoice([v2.MixUp(num_classes=2), v2.CutMix(num_classes=2)])]


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.augment = v2.Compose([v2.ToDtype(torch.float32, scale=True), *AUGMENT])
        self.network = nn.Sequential(nn.Conv2d(3, 8, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

    def train_dataloader(self):
        labels = torch.arange(256) % 2
        stripes = (torch.arange(48) // 6 % 2 * 150).expand(256, 3, 48, 48) + torch.randint(100, (256, 3, 48, 48))
        images = torch.where(labels[:, None, None, None] == 0, stripes, stripes.mT).byte()
        return DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, num_workers=2)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.augment(*batch) if self.trainer.training else batch

    def training_step(self, batch):
        images, targets = batch
        loss = nn.functional.cross_entropy(self.network(images), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


if __name__ == "__main__":
    seed_everything(1)
    echo = EchoCallback(factor=4, insertion_point="after_transfer")  # <- the line that is new
    trainer = Trainer(max_epochs=4, devices=1, callbacks=[echo], logger=False, enable_checkpointing=False)
    trainer.fit(Classifier())
    loader = trainer.train_dataloader
    print(f"{loader}\n{loader.counts}, loss {trainer.callback_metrics['loss']:.2f}")
