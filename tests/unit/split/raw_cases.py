"""Data sets that say how they read and how they decode, and images in files."""

import pickle
import random

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import StagedDataset

RANDOM = v2.Compose([v2.Resize(12), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def proved(dataset):
    """The split after reading, and the stages as a worker makes them."""
    split = find_split(dataset, raw=True)
    assert split.raw
    return split, make_stages(dataset, pickle.loads(pickle.dumps(split.conventions)), raw=split.raw)


class Words(StagedDataset):
    """Raw items are bytes; decoding drops a random letter, augmenting adds noise."""

    def read(self, index):
        return f"word number {index}".encode()

    def decode(self, raw):
        word = raw.decode()
        place = random.randrange(len(word))
        return word[:place] + word[place + 1 :]

    def augment(self, example):
        return example, torch.rand(()).item() + np.random.rand()

    def __len__(self):
        return 7


class ShapeOfWords(Dataset):
    """The same without the base class."""

    read, decode, augment, __len__ = Words.read, Words.decode, Words.augment, Words.__len__

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))


class NotAugmented(Dataset):
    read, decode, __len__ = Words.read, Words.decode, Words.__len__

    def __getitem__(self, index):
        return self.decode(self.read(index))


class Loads(StagedDataset):
    """Has nothing to read."""

    def load(self, index):
        return index

    def augment(self, example):
        return example

    def __len__(self):
        return 3


class Raws(Dataset):
    """A data set of bytes."""

    def __getitem__(self, index):
        return str(index).encode()

    def __len__(self):
        return 6


class BatchedRaws(Raws):
    def __init__(self):
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


def noisy(example):
    return example + np.random.rand()
