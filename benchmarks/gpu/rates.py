"""Chooses the learning rates of stage "accuracy", before it, on a processor and in miniature: ``python -m gpu.rates``.

The same pictures at 48 pixels, a ResNet with an eighth of ResNet-18's channels, batches of 256. The plain training gets as many
steps as 45 s give it on a GPU that waits for its data (`PLAIN_STEPS`), the echoed one `FACTOR` times as many from as many fresh
images. A row is one rate; the rate with the highest mean accuracy of the last three evaluations is taken, for each arm by itself.
About half an hour on two cores. Rows: ``benchmarks/results/gpu/learning_rates.csv``.
"""

from __future__ import annotations

import csv
import itertools
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import v2

from gpu.images import CLASSES, draw
from gpu.plan import FACTOR as ECHOED
from gpu.plan import PLAIN
from lightning_echo import EchoLoader, StagedDataset

__all__ = ["FILE", "RATES_TRIED", "best_rates"]

FILE = Path(__file__).parents[1] / "results" / "gpu" / "learning_rates.csv"
PLAIN_STEPS, FACTOR, BATCH_SIZE = 264, 5, 256  # 45 s at 1,500 images a second
TRAIN, HELD_OUT, SEED = 14_000, 2_000, 11
RATES_TRIED = (0.02, 0.05, 0.1, 0.2, 0.4)
_SIZE, _RESIZE, _CROP = (80, 60), 48, 42
_COLUMNS = ("arm", "learning rate", "steps", "fresh images", "accuracy, last three evaluations")


class Pictures(StagedDataset):
    """In memory; cropping and flipping are redone."""

    def __init__(self, images: list[Image.Image], labels: list[int]) -> None:
        self.images, self.labels = images, labels
        self._redone = v2.Compose([v2.RandomCrop(_CROP), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> tuple[Image.Image, int]:
        return self.images[index], self.labels[index]

    def augment(self, example: tuple[Image.Image, int]) -> tuple[Tensor, int]:
        return self._redone(example[0]), example[1]


def picture(number: int) -> Image.Image:
    """Drawn small, and resized as the large ones are."""
    resized: Image.Image = v2.Resize(_RESIZE)(draw(number, _SIZE))
    return resized


def small_resnet(channels: int = 8) -> nn.Module:
    """ResNet-18's blocks with few channels; images (B, 3, H, W)."""

    def stage(inner: int, outer: int, stride: int) -> nn.Module:
        down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)) if inner != outer else None
        return nn.Sequential(BasicBlock(inner, outer, stride, down), BasicBlock(outer, outer))

    widths = [channels * 2**i for i in range(4)]
    stem = [nn.Conv2d(3, channels, 5, 2, 2, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    stages = [stage(inner, outer, 1 + (i > 0)) for i, (inner, outer) in enumerate(zip([channels, *widths], widths, strict=False))]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], len(CLASSES)))


def accuracy_at(rate: float, arm: str, data: Pictures, held_out: tuple[Tensor, Tensor]) -> float:
    """Trains with a rate; returns the mean of the last three of ten evaluations."""
    torch.manual_seed(SEED)
    factor = FACTOR if arm == ECHOED else 1
    steps, network = PLAIN_STEPS * factor, small_resnet()
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    plain: DataLoader[Any] = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)
    found = []
    with closing(EchoLoader(plain, factor, seed=SEED, insertion_point="before_augmentation")) as loader:
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        for step, (images, labels) in enumerate(itertools.islice(endless, steps), 1):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / 20)
            loss = nn.functional.cross_entropy(network(images.float() / 127.5 - 1), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % (steps // 10) == 0:
                found.append(_evaluate(network, *held_out))
    return float(np.mean(found[-3:]))


def best_rates(rows: list[dict[str, str]]) -> dict[str, float]:
    """Returns the rate of each arm that learned most.

    Args:
        rows: Of the file.
    """
    score = _COLUMNS[-1]
    return {
        arm: float(max((row for row in rows if row["arm"] == arm), key=lambda row: float(row[score]))["learning rate"])
        for arm in (PLAIN, ECHOED)
    }


def main() -> None:
    """Tries all rates, and writes each as soon as it is known."""
    torch.set_num_threads(1)
    with ProcessPoolExecutor(2) as pool:
        images = list(pool.map(picture, range(TRAIN + HELD_OUT), chunksize=100))
    labels = [number % len(CLASSES) for number in range(TRAIN + HELD_OUT)]
    data = Pictures(images[:TRAIN], labels[:TRAIN])
    center = v2.Compose([v2.CenterCrop(_CROP), v2.PILToTensor()])
    held_out = torch.stack([center(image) for image in images[TRAIN:]]), torch.tensor(labels[TRAIN:])
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with FILE.open("w", newline="") as file, ProcessPoolExecutor(2, initializer=partial(torch.set_num_threads, 1)) as pool:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        tried = [(arm, rate) for arm in (PLAIN, ECHOED) for rate in RATES_TRIED]
        pending = [pool.submit(accuracy_at, rate, arm, data, held_out) for arm, rate in tried]
        for (arm, rate), each in zip(tried, pending, strict=True):
            steps = PLAIN_STEPS * (FACTOR if arm == ECHOED else 1)
            writer.writerow((arm, rate, steps, PLAIN_STEPS * BATCH_SIZE, f"{each.result():.4g}"))
            file.flush()


@torch.no_grad()
def _evaluate(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    network.eval()
    right = [
        (network(some.float() / 127.5 - 1).argmax(1) == those).sum()
        for some, those in zip(images.split(250), labels.split(250), strict=True)
    ]
    network.train()
    return float(torch.stack(right).sum()) / len(labels)


if __name__ == "__main__":
    main()
