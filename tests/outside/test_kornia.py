"""Kornia: augmentation on the device, in the model's or the data module's hook, and in a data set's transform."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from project_runs import BATCH, LENGTH, STEPS, WAYS, Run, assert_right, train
from torch.utils.data import DataLoader, Dataset

kornia = pytest.importorskip("kornia", reason="kornia is not installed: pip install 'lightning-echo[test-outside]'")

from kornia import augmentation as aug  # noqa: E402

# Lightning says so of a model with this hook beside any data module.
pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule`")


def image(number: int) -> torch.Tensor:
    return torch.full((3, 4, 4), number / 32) + torch.arange(48).reshape(3, 4, 4) / 1024


class Images(Dataset[Any]):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        picture = image(index)
        return picture if self.transform is None else self.transform(picture), index


def make(workers: int, transform: Any = None) -> DataLoader[Any]:
    return DataLoader(Images(transform), BATCH, shuffle=True, num_workers=workers)


def noise() -> Any:
    return aug.AugmentationSequential(aug.RandomGaussianNoise(std=0.01, p=1.0, keepdim=True), data_keys=["input"])


def on_device(batch: Any) -> Any:
    return noise()(batch[0]), batch[1]


def see(batch: Any) -> Any:
    images, numbers = batch
    return [(number, tuple(one)) for number, one in zip(numbers.tolist(), images.flatten(1).tolist(), strict=True)]


def assert_near_plain(run: Run) -> None:
    for use in run.uses:
        assert (torch.tensor(use.value) - image(use.index).flatten()).abs().max() < 0.1


class AugmentingData(pl.LightningDataModule):
    """Augmentation in the data module's hook."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers, self.augment = workers, noise()

    def train_dataloader(self) -> Any:
        return make(self.workers)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        del dataloader_idx
        return (self.augment(batch[0]), batch[1]) if self.trainer.training else batch


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("point", ["auto", "after_batching", "after_transfer"])
def test_augmentation_in_the_models_hook_is_redone_for_each_use_at_any_point(point: str, workers: int, way: str) -> None:
    run = train(lambda: make(workers), see, way=way, on_device=on_device, insertion_point=point)
    taken = "before_augmentation" if point == "auto" else point
    assert_right(run, range(LENGTH), point=taken, steps=STEPS, noise="redone")
    assert_near_plain(run)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_augmentation_in_the_data_modules_hook_is_redone(workers: int, way: str) -> None:
    run = train(AugmentingData(workers), see, way=way, insertion_point="after_transfer")
    assert_right(run, range(LENGTH), steps=STEPS, noise="redone")


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_in_a_data_sets_transform_it_is_redone_in_the_workers(workers: int, way: str) -> None:
    run = train(lambda: make(workers, noise()), see, way=way)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS, noise="redone")
