"""Albumentations: transforms that are called by name, with generators of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project_runs import BATCH, LENGTH, STEPS, WAYS, assert_resumes_exactly, assert_right, said, train
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else it asks the network for a newer version when imported
albumentations = pytest.importorskip(
    "albumentations", reason="albumentations is not installed: pip install 'lightning-echo[test-outside]'"
)


def image(number: int) -> Any:
    """Bright and dark, and its number in the middle of each channel's range."""
    return np.full((8, 8, 3), 5 * number + 60, np.uint8)


class Images(Dataset[Any]):
    """As its documentation has it."""

    def __init__(self, transform: Any, start: int = 0, length: int = LENGTH) -> None:
        self.transform, self.start, self.length = transform, start, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        number = self.start + index
        return self.transform(image=image(number))["image"], number


class Masks(Images):
    """An image and its mask, augmented alike."""

    def __getitem__(self, index: int) -> Any:
        both = self.transform(image=image(index), mask=image(index)[:, :, 0])
        return both["image"], both["mask"], index


def noise() -> Any:
    noisy = albumentations.GaussNoise(std_range=(0.02, 0.03), p=1.0)
    return albumentations.Compose([albumentations.HorizontalFlip(p=0.5), noisy])


def see(batch: Any) -> Any:
    images, *_, numbers = batch
    return [(number, tuple(one)) for number, one in zip(numbers.tolist(), images.flatten(1).tolist(), strict=True)]


def make(workers: int = 2) -> Any:
    return DataLoader(Images(noise()), BATCH, shuffle=True, num_workers=workers)


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("nested", [False, True])
def test_it_is_redone_for_each_use(nested: bool, workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    def halves() -> Any:
        parts = ConcatDataset([Images(noise(), length=10), Images(noise(), start=10, length=14)])
        return DataLoader(Subset(parts, range(LENGTH)), BATCH, shuffle=True, num_workers=workers)

    with caplog.at_level("INFO"):
        run = train(halves if nested else lambda: make(workers), see, way=way)
    assert "reuse [load], redo [Compose]; " in said(caplog)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS, noise="redone")


def test_image_and_mask_are_augmented_alike() -> None:
    """What is cut out leaves a trace in both at the same place."""

    def see_both(batch: Any) -> Any:
        images, masks, _ = batch
        assert ((images[..., 0] == 0) == (masks == 0)).all()
        return see(batch)

    cut_out = albumentations.Compose([albumentations.CoarseDropout(fill=0, fill_mask=0, p=1.0), albumentations.RandomCrop(6, 6)])
    run = train(lambda: DataLoader(Masks(cut_out), BATCH, shuffle=True, num_workers=2), see_both)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS)
    assert any((np.array(use.value) == 0).any() for use in run.uses)


@pytest.mark.parametrize(("point", "workers"), [("auto", 2), ("after_augmentation", 0)])
def test_a_killed_run_goes_on_with_the_same_noise(point: str, workers: int, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: make(workers), see, tmp_path, (1, 9), epochs=2, insertion_point=point)
