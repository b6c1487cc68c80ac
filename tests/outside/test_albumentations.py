"""Albumentations: transforms that are called by name, with generators of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project_runs import BATCH, LENGTH, STEPS, WAYS, assert_resumes_exactly, assert_right, said, train
from torch.utils.data import DataLoader, Dataset

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else it asks the network for a newer version when imported
albumentations = pytest.importorskip(
    "albumentations", reason="albumentations is not installed: pip install 'lightning-echo[test-outside]'"
)


def image(number: int) -> Any:
    """Bright and dark, and its number in the middle of each channel's range."""
    return np.full((8, 8, 3), 5 * number + 60, np.uint8)


class Images(Dataset[Any]):
    """As its documentation has it."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.transform(image=image(index))["image"], index


def noise() -> Any:
    noisy = albumentations.GaussNoise(std_range=(0.02, 0.03), p=1.0)
    return albumentations.Compose([albumentations.HorizontalFlip(p=0.5), noisy])


def see(batch: Any) -> Any:
    images, numbers = batch
    return [(number, tuple(one)) for number, one in zip(numbers.tolist(), images.flatten(1).tolist(), strict=True)]


def make(workers: int = 2) -> Any:
    return DataLoader(Images(noise()), BATCH, shuffle=True, num_workers=workers)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_it_is_redone_for_each_use(workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = train(lambda: make(workers), see, way=way)
    assert "reuse [load], redo [Compose]; " in said(caplog)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS, noise="redone")


@pytest.mark.parametrize(("point", "workers"), [("auto", 2), ("after_augmentation", 0)])
def test_a_killed_run_goes_on_with_the_same_noise(point: str, workers: int, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: make(workers), see, tmp_path, (1, 9), epochs=2, insertion_point=point)
