"""JPEG files like photographs, made on the spot, and a data set that really decodes and crops them."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from lightning_echo import StagedDataset

__all__ = ["Jpegs", "write_jpegs"]


class Jpegs(StagedDataset):
    """Reads and decodes a file; crops, flips and makes it a tensor.

    Args:
        files: JPEG.
        crop: Pixels at the edge of what is cropped; examples are (3, crop, crop), uint8.
        classes: Labels are drawn from so many, by the index.
    """

    def __init__(self, files: list[Path], crop: int, classes: int = 1000) -> None:
        self.files, self.classes = files, classes
        self._redone = v2.Compose([v2.RandomResizedCrop(crop, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> tuple[Image.Image, int]:
        with Image.open(self.files[index]) as image:
            return image.convert("RGB"), index % self.classes

    def augment(self, example: tuple[Image.Image, int]) -> tuple[Tensor, int]:
        image, label = example
        return self._redone(image), label


def write_jpegs(folder: Path, count: int, width: int, height: int) -> list[Path]:
    """Files that are not there yet, on all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number:06}.jpg" for number in range(count)]
    missing = [file for file in files if not file.exists()]
    if missing:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(_write, width=width, height=height), missing, chunksize=16))
    return files


def _write(file: Path, width: int, height: int) -> None:
    """Large soft areas and some grain: compressed about as a photograph is."""
    chance = np.random.default_rng(int(file.stem))
    areas = Image.fromarray(chance.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    grain = chance.normal(0, 8, (height, width, 3))
    Image.fromarray((np.asarray(areas) + grain).clip(0, 255).astype(np.uint8)).save(file, quality=90)
