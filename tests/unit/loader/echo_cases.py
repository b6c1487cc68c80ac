"""A data set with noise, and loaders over it."""

import random
from collections import Counter

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_echo import insertion
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.split.staged import StagedDataset

LENGTH, BATCH_SIZE = 43, 6
STEPS = 8  # batches of a pass, the last of one example
POINTS = tuple(point.value for point in insertion.POINTS if not point.on_device)  # that needs a Trainer


class Noisy(StagedDataset):
    """Examples are (index, noise of augment)."""

    def __init__(self, length=LENGTH):
        self.length, self.reads = length, Counter()

    def read(self, index):
        self.reads[index] += 1
        return str(index).encode()

    def decode(self, raw):
        return torch.tensor([float(raw), 0.0])

    def augment(self, example):
        example[1] = torch.rand(()) + float(np.random.rand()) + random.random()
        return example

    def __len__(self):
        return self.length


def plain_loader(dataset=None, **options):
    return DataLoader(Noisy() if dataset is None else dataset, **{"batch_size": BATCH_SIZE, "shuffle": True, **options})


def echo(factor=3, point="after_augmentation", loader=None, **options):
    return EchoLoader(plain_loader() if loader is None else loader, factor, insertion_point=point, **{"seed": 5, **options})


def values(batches):
    return [batch.tolist() for batch in batches]


def indices(batches):
    return [[int(index) for index, _ in batch.tolist()] for batch in batches]


def delivered_indices(loader):
    """The indices of one epoch, in one list."""
    return [index for batch in indices(loader) for index in batch]


def played(loader, epochs):
    return [batch.tolist() for _ in range(epochs) for batch in loader]
