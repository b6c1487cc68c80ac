"""The paper's own data, for users who have them: ``--data cifar10 --root DIR`` and ``--data imagenet --root DIR``.

Read through torchvision's data sets, from the files as their authors pack them. Tuning seeds are evaluated on a part of the
training set, which is left out of training; report seeds on the official held-out set. Targets, rates and budgets are meant for a
constant learning rate, and were not tried: where these were written there were no such data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import datasets, models
from torchvision.transforms import v2

from learning.digits import POINTS, classify
from learning.residual import ResidualNetwork
from learning.rules import is_tuning
from learning.task import Split, Task

__all__ = ["cifar10_task", "image_split", "imagenet_task"]

TUNING_SHARE = 0.1  # of the training set, held out for tuning seeds
EVALUATED_AT_ONCE = 250
WORKERS = 8

_TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]


def cifar10_task(root: Path) -> Task:
    """ResNet-32 on CIFAR-10 (paper, section 3), random crop and flip."""
    return _image_task(
        name="cifar10",
        title="image classification, ResNet-32 on CIFAR-10",
        target=88.0,
        batch_size=128,
        spacing_examples=12_800,
        budget_examples=3_000_000,
        cached_examples=45_000,
        rates=(0.05, 0.1, 0.2),
        make_split=partial(image_split, partial(_cifar10, root)),
        make_model=partial(ResidualNetwork, 5, 16, 3),
    )


def imagenet_task(root: Path) -> Task:
    """ResNet-50 on ImageNet (paper, section 3), random resized crop and flip."""
    return _image_task(
        name="imagenet",
        title="image classification, ResNet-50 on ImageNet",
        target=60.0,
        batch_size=256,
        spacing_examples=256_000,
        budget_examples=40_000_000,
        cached_examples=1_153_051,
        rates=(0.05, 0.1, 0.2),
        make_split=partial(image_split, partial(_imagenet, root)),
        make_model=models.resnet50,
    )


def image_split(open_data: Callable[[bool, bool], Dataset[Any]], seed: int) -> Split:
    """The data set's own split, or for tuning seeds one of its training set.

    Args:
        open_data: From whether it is for training, and from whether it is augmented, to the data set.
        seed: Of the run.
    """
    augmented, held_out = open_data(True, True), open_data(False, False)
    if is_tuning(seed):
        order = torch.randperm(len(augmented), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[arg-type]
        count = round(TUNING_SHARE * len(order))
        augmented, held_out = Subset(augmented, order[count:]), Subset(open_data(True, False), order[:count])
    loader = DataLoader(held_out, EVALUATED_AT_ONCE, num_workers=WORKERS)
    return Split(augmented, partial(_accuracy_percent, loader))


def sgd(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Nesterov momentum and weight decay, as is usual for these networks."""
    return torch.optim.SGD(parameters, rate, momentum=0.9, nesterov=True, weight_decay=1e-4)


def _image_task(**fields: Any) -> Task:
    return Task(
        metric="accuracy (%)",
        is_higher_better=True,
        margin=0.5,
        points=POINTS,
        window_evaluations=5,
        loss=classify,
        quick_target=2 * fields["target"] / 3,
        make_optimizer=sgd,
        workers=WORKERS,
        **fields,
    )


def _cifar10(root: Path, is_train: bool, is_augmented: bool) -> Dataset[Any]:
    random = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()] if is_augmented else []
    return datasets.CIFAR10(root, train=is_train, transform=v2.Compose([*random, *_TO_TENSOR]))


def _imagenet(root: Path, is_train: bool, is_augmented: bool) -> Dataset[Any]:
    first = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()] if is_augmented else [v2.Resize(256), v2.CenterCrop(224)]
    return datasets.ImageNet(root, split="train" if is_train else "val", transform=v2.Compose([*first, *_TO_TENSOR]))


def _accuracy_percent(loader: DataLoader[Any], model: nn.Module) -> float:
    device, right, count = next(model.parameters()).device, 0, 0
    for images, labels in loader:
        right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
        count += len(labels)
    return 100 * right / count
