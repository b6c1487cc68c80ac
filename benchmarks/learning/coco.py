"""Detection on COCO itself, for who has it: the same experiment as `detection`, with torchvision's data set and its SSD300.

``root`` holds what COCO unpacks: ``train2017/``, ``val2017/`` and ``annotations/instances_{train,val}2017.json``.
Nobody ran this to the end: rates, target and budget are first guesses, to be set on the tuning seeds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import CocoDetection
from torchvision.models.detection import ssd300_vgg16
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes

from learning.detection import POINTS, Example, collate, detection_loss, mean_average_precision_percent
from learning.task import Split, Task
from lightning_echo import StagedDataset

__all__ = ["StagedCoco", "coco_task"]

SIDE = 300  # pixels; what SSD300 takes
HELD_OUT = 500  # of the 5,000 images of val2017
BATCH_SIZE = 32
IMAGES = 118_287  # in train2017

_to_pixels = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


class StagedCoco(StagedDataset):
    """COCO's images, read, decoded and resized in `load`; SSD's random crop and flip are `augment`.

    Args:
        root: COCO's folder.
        part: ``"train2017"`` or ``"val2017"``.
    """

    def __init__(self, root: Path, part: str) -> None:
        annotations = root / "annotations" / f"instances_{part}.json"
        for path in (root / part, annotations):
            if not path.exists():
                raise FileNotFoundError(f"root must hold COCO's {path.relative_to(root)}, got {root}; unpack it there")
        self._source = CocoDetection(root / part, str(annotations))
        self._augment = v2.Compose(
            [v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.Resize((SIDE, SIDE)), v2.SanitizeBoundingBoxes(), _to_pixels]
        )

    def __len__(self) -> int:
        return len(self._source)

    def load(self, index: int) -> tuple[Image.Image, Tensor, Tensor]:
        """An image of 300 x 300, its boxes (n, 4) as x1, y1, x2, y2 in pixels of it, and their categories (n,): n may be 0."""
        image, annotations = self._source[index]
        # no crowds, which are regions, and no empty boxes, which torchvision's SSD refuses
        kept = [one for one in annotations if not one.get("iscrowd") and min(one["bbox"][2:]) >= 1]
        boxes = torch.tensor([one["bbox"] for one in kept], dtype=torch.float32).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]  # COCO has corner and size
        boxes *= SIDE / torch.tensor((*image.size, *image.size))
        labels = torch.tensor([one["category_id"] for one in kept], dtype=torch.int64)
        return image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), boxes, labels

    def augment(self, example: tuple[Image.Image, Tensor, Tensor]) -> Example:
        """A random crop that keeps boxes by their centre, enlarged again, and mirrored or not."""
        image, boxes, labels = example
        found = BoundingBoxes(boxes, format="XYXY", canvas_size=(SIDE, SIDE))
        image, target = self._augment((image, {"boxes": found, "labels": labels}))
        return image.as_subclass(Tensor), {"boxes": target["boxes"].as_subclass(Tensor), "labels": target["labels"]}


class _Plain(StagedCoco):
    """Not augmented, to evaluate on."""

    def augment(self, example: tuple[Image.Image, Tensor, Tensor]) -> Example:
        image, boxes, labels = example
        return _to_pixels(image).as_subclass(Tensor), {"boxes": boxes, "labels": labels}


def make_ssd300() -> nn.Module:
    """Without pretrained weights, which saw COCO or ImageNet; at most as many detections as COCO's mAP takes."""
    return ssd300_vgg16(weights=None, weights_backbone=None, detections_per_img=100)


def coco_split(root: Path, seed: int) -> Split:
    """All of train2017; `HELD_OUT` images of val2017, others for each seed."""
    held_out = _Plain(root, "val2017")
    chosen = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(seed))[:HELD_OUT].tolist()
    batches: DataLoader[Any] = DataLoader(Subset(held_out, chosen), BATCH_SIZE, collate_fn=collate)
    return Split(StagedCoco(root, "train2017"), lambda model: mean_average_precision_percent(model, batches), collate)


def coco_task(root: Path) -> Task:
    """The supporting detection task on COCO; mAP is that of the resized images.

    Raises:
        FileNotFoundError: from ``make_split``, if ``root`` lacks a folder or annotations of COCO 2017.
    """
    return Task(
        name="coco",
        title="detection, SSD300 on COCO",
        metric="mAP (%)",
        is_higher_better=True,
        target=15.0,
        margin=0.5,
        points=POINTS,
        batch_size=BATCH_SIZE,
        spacing_examples=IMAGES,
        window_evaluations=3,
        budget_examples=40 * IMAGES,
        cached_examples=IMAGES,
        rates=(1e-3, 2e-3, 4e-3),
        make_split=partial(coco_split, root),
        make_model=make_ssd300,
        loss=detection_loss,
        quick_target=0.0,
        make_optimizer=_sgd,
        full=False,
    )


def _sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=5e-4)
