"""Detection: scanned digits on small canvases, found by a small SSD (the paper: SSD on COCO).

Own code is the data: a canvas is composed when it is read, and cropped at random, boxes included, when it is augmented. Anchors,
matching, hard negatives, losses and suppression are torchvision's SSD on a small backbone; the metric is COCO's, of torchmetrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD

from learning.task import Split, Task
from lightning_echo import StagedDataset

__all__ = ["DETECTION", "Backbone", "StagedCanvases", "collate", "detection_loss", "make_ssd", "mean_average_precision_percent"]

SIDE = 40  # pixels of a canvas
HEIGHTS = (10, 20)  # pixels of a digit on it
MOST_DIGITS = 4
PLACES_TRIED = 10
CANVASES, HELD_OUT_CANVASES = 200, 100
HELD_OUT_SCANS = 600
ZOOM, SHIFT = (0.8, 1.2), 0.15  # of the crop, in sides of the canvas
CONTRAST = (0.6, 1.0)
POINTS = ("before_augmentation", "after_augmentation", "after_batching")

Example = tuple[Tensor, dict[str, Tensor]]


class StagedCanvases(StagedDataset):
    """Canvases of 1 to `MOST_DIGITS` digits that do not overlap: a function of seed and index. What is random is `augment`.

    Args:
        scans: (N, 8, 8), 0 to 16, of which digits are drawn.
        digits: (N,), 0 to 9; their labels are 1 to 10, for 0 is the background's.
        count: Canvases.
        seed: Of all canvases.
    """

    def __init__(self, scans: np.ndarray, digits: np.ndarray, count: int, seed: int) -> None:
        images = [Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8)) for scan in scans]
        self._digits = [image.crop(image.getbbox()) for image in images]  # without margin: a box ends where its digit does
        self._labels = [int(digit) + 1 for digit in digits]
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def load(self, index: int) -> tuple[Image.Image, Tensor, Tensor]:
        """A canvas, its boxes (n, 4) as x1, y1, x2, y2 in pixels, and their labels (n,)."""
        chance = np.random.default_rng((self._seed, index))
        canvas, boxes, labels = Image.new("L", (SIDE, SIDE)), [], []
        for _ in range(chance.integers(1, MOST_DIGITS + 1)):
            which = int(chance.integers(len(self._digits)))
            digit, height = self._digits[which], int(chance.integers(HEIGHTS[0], HEIGHTS[1] + 1))
            width = max(1, round(height * digit.width / digit.height))
            box = _free_box(chance, width, height, boxes)
            if box is not None:
                canvas.paste(digit.resize((width, height), Image.Resampling.BILINEAR), box[:2])
                boxes.append(box)
                labels.append(self._labels[which])
        return canvas, torch.tensor(boxes, dtype=torch.float32), torch.tensor(labels)

    def augment(self, example: tuple[Image.Image, Tensor, Tensor]) -> Example:
        """A random square of the canvas and its surroundings, enlarged to a canvas, at random contrast.

        A box whose centre is out of sight is dropped, which is SSD's own rule: n may become 0.
        """
        canvas, boxes, labels = example
        zoom, right, down, contrast = torch.rand(4).tolist()
        side = SIDE * (ZOOM[0] + zoom * (ZOOM[1] - ZOOM[0]))
        left, top = ((SIDE - side) / 2 + SIDE * SHIFT * (2 * part - 1) for part in (right, down))
        square = (left, top, left + side, top + side)
        image = canvas.transform((SIDE, SIDE), Image.Transform.EXTENT, square, Image.Resampling.BILINEAR)
        moved = (boxes - torch.tensor((left, top, left, top))) * (SIDE / side)
        middle = (moved[:, :2] + moved[:, 2:]) / 2
        is_kept = ((middle > 0) & (middle < SIDE)).all(1)
        pixels = _to_tensor(image).mul_(CONTRAST[0] + contrast * (CONTRAST[1] - CONTRAST[0]))
        return pixels, {"boxes": moved[is_kept].clamp_(0, SIDE), "labels": labels[is_kept]}


class Backbone(nn.Module):
    """Images (B, 1, S, S) to features of a fourth and of an eighth of the side, for small and for large digits."""

    out_channels = (32, 48)  # as torchvision's SSD asks for them

    def __init__(self) -> None:
        super().__init__()
        fine, coarse = self.out_channels
        first = (_convolution(1, 16, 2), _convolution(16, 24, 2))
        self.fine = nn.Sequential(*first, _convolution(24, fine), _convolution(fine, fine))
        self.coarse = _convolution(fine, coarse, 2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        fine = self.fine(images)
        return {"fine": fine, "coarse": self.coarse(fine)}


def make_ssd() -> nn.Module:
    """SSD with 250 square anchors of 9, 11, 14 and 16 pixels, matched from an IoU of 0.5; three negatives for each match."""
    anchors = DefaultBoxGenerator([[], []], scales=[0.22, 0.34, 0.5], steps=[4, 8])
    return SSD(
        *(Backbone(), anchors, (SIDE, SIDE), 11),
        image_mean=[0.1],
        image_std=[0.25],
        score_thresh=0.05,
        topk_candidates=20,
        detections_per_img=20,
    )


def detection_split(seed: int) -> Split:
    """Canvases of two thirds of the scans, and, not augmented, of the others."""
    scans = load_digits()
    train_scans, held_scans, train_digits, held_digits = train_test_split(
        scans.images, scans.target, test_size=HELD_OUT_SCANS, stratify=scans.target, random_state=seed
    )
    held_out = StagedCanvases(held_scans, held_digits, HELD_OUT_CANVASES, seed)
    examples = [held_out.load(index) for index in range(len(held_out))]
    images = [_to_tensor(canvas) for canvas, _, _ in examples]
    targets = [{"boxes": boxes, "labels": labels} for _, boxes, labels in examples]

    def evaluate(model: nn.Module) -> float:
        return mean_average_precision_percent(model, [collate([*zip(images, targets, strict=True)])])

    return Split(StagedCanvases(train_scans, train_digits, CANVASES, seed), evaluate, collate)


def collate(examples: Sequence[Example]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Images (B, C, H, W), and boxes (n, 4) and labels (n,) of each."""
    images, targets = zip(*examples, strict=True)
    return torch.stack(images), list(targets)


def detection_loss(model: nn.Module, batch: Any) -> Tensor:
    """Of classes and boxes together, per matched anchor; a model of torchvision's gives both in training mode."""
    images, targets = batch
    losses = model(images, targets)
    return torch.stack(list(losses.values())).sum()


def mean_average_precision_percent(model: nn.Module, batches: Any) -> float:
    """COCO's mAP: the mean over classes and the IoU thresholds 0.50 to 0.95."""
    metric = MeanAveragePrecision()
    device = next(model.parameters()).device
    for images, targets in batches:
        detections = [{name: value.cpu() for name, value in found.items()} for found in model(images.to(device))]
        metric.update(detections, targets)
    return 100 * metric.compute()["map"].item()


def _free_box(chance: np.random.Generator, width: int, height: int, boxes: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """A box that touches no other one; None where none was found in `PLACES_TRIED` places."""
    for x, y in chance.integers(0, (SIDE - width + 1, SIDE - height + 1), (PLACES_TRIED, 2)).tolist():
        if all(x + width < left or right < x or y + height < top or bottom < y for left, top, right, bottom in boxes):
            return x, y, x + width, y + height
    return None


def _convolution(channels_in: int, channels_out: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, np.float32)).div_(255)[None]


DETECTION = Task(
    name="detection",
    title="detection, small SSD on scanned digits on canvases",
    metric="mAP (%)",
    is_higher_better=True,
    target=45.0,
    margin=1.0,
    points=POINTS,
    batch_size=8,
    spacing_examples=240,
    window_evaluations=5,
    budget_examples=4_800,
    cached_examples=CANVASES,
    rates=(4e-3, 8e-3, 1.6e-2),
    make_split=detection_split,
    make_model=make_ssd,
    loss=detection_loss,
    quick_target=1.0,
    full=False,
)
