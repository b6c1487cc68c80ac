"""Image classification with batch normalisation: ResNet-20 on digits of 32 x 32 (the paper: ResNet-32 on CIFAR-10).

The network is that of He et al. 2016, section 4.2: three stages of n blocks, 6 n + 2 layers, shortcuts without parameters.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from learning.digits import POINTS, classify, digits_split
from learning.task import Task

__all__ = ["RESIDUAL", "ResidualNetwork"]

WIDTH = 8  # the original's is 16: four times the time of a step on a processor
PIXELS = 32


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation; the input is added, at half the size where the stage begins."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride, self.grown = (1 if before == width else 2), width - before
        self.first = nn.Sequential(nn.Conv2d(before, width, 3, self.stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grown))
        return torch.relu(self.second(self.first(x)) + shortcut)


class ResidualNetwork(nn.Sequential):
    """Images (B, C, H, W) to scores (B, classes).

    Args:
        blocks: In each stage (n); 3 for ResNet-20, 5 for ResNet-32.
        width: Channels of the first stage.
        channels: Of the images.
        classes: To tell apart.
    """

    def __init__(self, blocks: int, width: int, channels: int, classes: int = 10) -> None:
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for stage in range(3):
            now = width * 2**stage
            before = now if stage == 0 else now // 2
            layers += [ResidualBlock(before if block == 0 else now, now) for block in range(blocks)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


RESIDUAL = Task(
    name="residual",
    title="image classification, ResNet-20 (half the width) with batch normalisation on digits of 32 x 32",
    metric="accuracy (%)",
    is_higher_better=True,
    target=95.0,
    margin=0.5,
    points=POINTS,
    batch_size=16,
    spacing_examples=320,
    window_evaluations=4,
    budget_examples=9_600,
    cached_examples=1197,
    rates=(1e-3, 2e-3, 4e-3),
    make_split=partial(digits_split, pixels=PIXELS),
    make_model=partial(ResidualNetwork, 3, WIDTH, 1),
    loss=classify,
    quick_target=20.0,
    full=False,
)
