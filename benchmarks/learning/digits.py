"""Image classification: scikit-learn's 1,797 scanned digits, random affine augmentation (the paper: ResNet-32 on CIFAR-10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchvision import transforms

from learning.task import Split, Task
from lightning_echo import StagedDataset

__all__ = ["DIGITS", "StagedDigits", "classify", "digits_split"]

HELD_OUT = 600
POINTS = ("before_augmentation", "after_augmentation", "after_batching")


class StagedDigits(StagedDataset):
    """Scans as images; what is random is `augment`.

    Args:
        images: (N, H, W), uint8.
        digits: (N,).
    """

    def __init__(self, images: np.ndarray, digits: np.ndarray) -> None:
        self.images, self.digits = images, digits
        # of torchvision's first kind: on a PIL image of this size a fourth of what v2 costs on a tensor (0.04 ms, 0.15 ms)
        self._affine = transforms.RandomAffine(
            15, translate=(0.1, 0.1), scale=(0.85, 1.15), interpolation=transforms.InterpolationMode.BILINEAR
        )

    def __len__(self) -> int:
        return len(self.digits)

    def load(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.digits[index])

    def augment(self, example: tuple[Image.Image, int]) -> tuple[Tensor, int]:
        image, digit = example
        return _to_tensor(np.array(self._affine(image))), digit


def digits_split(seed: int, pixels: int = 8) -> Split:
    """Digits of ``pixels`` x ``pixels``, 600 of them held out; those are not augmented."""
    scans = load_digits()
    images = np.stack([_enlarged(scan, pixels) for scan in scans.images])
    train_images, held_images, train_digits, held_digits = train_test_split(
        images, scans.target, test_size=HELD_OUT, stratify=scans.target, random_state=seed
    )
    inputs = torch.stack([_to_tensor(image) for image in held_images])
    labels = torch.as_tensor(held_digits)

    def accuracy_percent(model: nn.Module) -> float:
        device = next(model.parameters()).device
        is_right = torch.cat([model(chunk.to(device)).argmax(1).cpu() for chunk in inputs.split(200)]) == labels
        return 100 * is_right.float().mean().item()

    return Split(StagedDigits(train_images, train_digits), accuracy_percent)


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of images (B, C, H, W) and labels (B,)."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def make_cnn() -> nn.Module:
    """Two convolutions and two linear layers, without normalisation: 13,706 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def _enlarged(scan: np.ndarray, pixels: int) -> np.ndarray:
    """A scan holds 0 to 16."""
    image = Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8))
    return np.array(image if pixels == len(scan) else image.resize((pixels, pixels), Image.Resampling.BICUBIC))


def _to_tensor(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image).float().div_(255)[None]


DIGITS = Task(
    name="digits",
    title="image classification, small CNN on scanned digits",
    metric="accuracy (%)",
    is_higher_better=True,
    target=97.0,
    margin=0.5,
    points=POINTS,
    batch_size=32,
    spacing_examples=240,
    window_evaluations=5,
    budget_examples=20_000,
    cached_examples=1797 - HELD_OUT,
    rates=(2.5e-3, 5e-3, 1e-2),
    make_split=digits_split,
    make_model=make_cnn,
    loss=classify,
    quick_target=20.0,
)
