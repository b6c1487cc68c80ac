"""Several loaders: semi-supervised training on a few labelled and many unlabelled images, each echoed in its own way.

Each has a point (here `auto` takes before_augmentation), a factor and counts of its own. One that is not named is left alone.
"""

import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lightning_echo import EchoConfig, EchoDataModule


class Stripes(Dataset):
    def __init__(self, number, transform):
        self.number, self.transform = number, transform

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        stripes = (torch.arange(48) // 6 % 2).float().expand(3, 48, 48)  # drawn here, where yours is read and decoded
        return self.transform(stripes.mT if index % 2 else stripes), index % 2


class Images(LightningDataModule):
    def train_dataloader(self):
        transform = v2.Compose([v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.RandomErasing(p=0.5)])
        return {
            "labelled": DataLoader(Stripes(64, transform), batch_size=16, shuffle=True),
            "unlabelled": DataLoader(Stripes(512, transform), batch_size=64, shuffle=True, num_workers=2),
        }


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 8, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

    def training_step(self, batch):
        (images, labels), (unlabelled, _) = batch["labelled"], batch["unlabelled"]
        guesses = self.network(unlabelled).detach().softmax(1)
        distorted = self.network(unlabelled + 0.3 * torch.randn_like(unlabelled))
        loss = nn.functional.cross_entropy(self.network(images), labels) + nn.functional.cross_entropy(distorted, guesses)
        self.log("loss", loss, batch_size=len(labels))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


if __name__ == "__main__":
    seed_everything(1)
    options = {"labelled": EchoConfig(factor=2), "unlabelled": EchoConfig(factor=4)}
    datamodule = EchoDataModule(Images(), loaders=options)  # <- the line that changes
    trainer = Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), datamodule=datamodule)
    for name, loader in datamodule.loader.items():
        print(f"{name}: {loader}\n{loader.counts}, loss {trainer.callback_metrics['loss']:.2f}")
