"""What a reader of the documentation has: a model, a data module, its loaders and data set. Small, for the CPU."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class ImageData(Dataset[tuple[Tensor, int]]):
    """256 images of 3x32x32 with labels 0 to 9, by torchvision's convention: ``transform`` is random."""

    def __init__(self) -> None:
        self.images = torch.rand(256, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        self.transform = noisy

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.transform(self.images[index]), index % 10


def noisy(image: Tensor) -> Tensor:
    return image + 0.1 * torch.randn_like(image)


class Images(pl.LightningDataModule):
    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def _loader(self, shuffle: bool = False) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(ImageData(), batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader()

    def test_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader()

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader()


class Classifier(pl.LightningModule):
    def __init__(self, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        self.layers(torch.zeros(1, 3, 32, 32))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(images), labels))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)
