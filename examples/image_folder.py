"""Image classification from a folder of files, as with ImageNet: `auto` takes before_augmentation.

The transforms are cut before the first random one: an echo reuses the image that was read, decoded and resized; it is cropped,
flipped and normalized anew each time. Validation is left alone.
"""

import tempfile
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_echo import EchoLoader

TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=[0.5] * 3, std=[0.25] * 3)]
TRAIN = v2.Compose([v2.Resize(64), v2.RandomResizedCrop(48, scale=(0.4, 1.0)), v2.RandomHorizontalFlip(), *TENSOR])
VAL = v2.Compose([v2.Resize(64), v2.CenterCrop(48), *TENSOR])


def write_images(folder: Path, number: int) -> None:
    """Upright and lying stripes as folder/upright/*.jpg and folder/lying/*.jpg."""
    for name in ("upright", "lying"):
        (folder / name).mkdir(parents=True)
        for index in range(number):
            stripes = 160 * (torch.arange(80) // 10 % 2) + 96 * torch.rand(3, 80, 80)
            image = stripes if name == "upright" else stripes.mT
            v2.functional.to_pil_image(image.byte()).save(folder / name / f"{index}.jpg")


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 8, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

    def training_step(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch):
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


if __name__ == "__main__":
    seed_everything(1)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder, "train"), 128)
        write_images(Path(folder, "val"), 32)
        train_loader = DataLoader(ImageFolder(f"{folder}/train", TRAIN), batch_size=32, shuffle=True, num_workers=2)
        train_loader = EchoLoader(train_loader, factor=4)  # <- the line that changes
        trainer = Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False)
        trainer.fit(Classifier(), train_loader, DataLoader(ImageFolder(f"{folder}/val", VAL), batch_size=32))
    print(f"{train_loader}\n{train_loader.counts}, validation accuracy {trainer.callback_metrics['accuracy']:.2f}")
