"""Albumentations: transforms that are called by name, with generators of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project_runs import (
    WAYS,
    assert_epochs,
    assert_exact,
    assert_noise_redone,
    assert_noise_reused,
    assert_repeatable,
    assert_resumes_exactly,
    said,
    train,
)
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else it asks the network for a newer version when imported
albumentations = pytest.importorskip(
    "albumentations", reason="albumentations is not installed: pip install 'lightning-echo[test-outside]'"
)

LENGTH, BATCH = 22, 4


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
        number = self.start + index
        both = self.transform(image=image(number), mask=image(number)[:, :, 0])
        return both["image"], both["mask"], number


def noise() -> Any:
    noisy = albumentations.GaussNoise(std_range=(0.02, 0.03), p=1.0)
    return albumentations.Compose([albumentations.HorizontalFlip(p=0.5), noisy])


def cut_out() -> Any:
    """Leaves a trace in image and mask at the same place."""
    return albumentations.Compose([albumentations.CoarseDropout(fill=0, fill_mask=0, p=1.0), albumentations.RandomCrop(6, 6)])


def see(batch: Any) -> Any:
    images, *_, numbers = batch
    return [(number, tuple(one)) for number, one in zip(numbers.tolist(), images.flatten(1).tolist(), strict=True)]


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("nested", [False, True])
def test_it_is_redone_for_each_use(nested: bool, workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        data: Any = Images(noise())
        if nested:
            halves = [Images(noise(), length=10), Images(noise(), start=10, length=14)]
            data = Subset(ConcatDataset(halves), range(LENGTH))
        return DataLoader(data, BATCH, shuffle=True, num_workers=workers)

    with caplog.at_level("INFO"):
        run = train(make, see, way=way)
    assert run.loader.insertion_point == "before_augmentation"
    assert "reuse [load], redo [Compose]; " in said(caplog)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_redone(run)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_image_and_mask_are_augmented_alike(workers: int, way: str) -> None:
    def see_both(batch: Any) -> Any:
        images, masks, _ = batch
        assert ((images[..., 0] == 0) == (masks == 0)).all()
        return see(batch)

    run = train(lambda: DataLoader(Masks(cut_out()), BATCH, shuffle=True, num_workers=workers), see_both, way=way)
    assert run.loader.insertion_point == "before_augmentation"
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert any((np.array(use.value) == 0).any() for use in run.uses)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_runs_with_the_same_seed_draw_the_same_noise(workers: int) -> None:
    """Its generators are seeded anew for each use."""

    def once(seed: int) -> Any:
        return train(lambda: DataLoader(Images(noise()), BATCH, num_workers=workers), see, epochs=2, seed=seed)

    assert_repeatable(once)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", ["auto", "after_augmentation"])
def test_a_killed_run_goes_on_with_the_same_noise(point: str, workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Images(noise()), BATCH, shuffle=True, num_workers=workers)

    assert_resumes_exactly(make, see, tmp_path, (1, 6, 9), epochs=2, insertion_point=point)


def test_examples_that_are_reused_keep_their_noise() -> None:
    run = train(lambda: DataLoader(Images(noise()), BATCH, num_workers=2), see, insertion_point="after_augmentation")
    assert_exact(run, range(LENGTH))
    assert_noise_reused(run)
