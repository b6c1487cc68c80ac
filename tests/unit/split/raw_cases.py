"""Data sets that say how they read and how they decode."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_echo.split.staged import StagedDataset

RANDOM = v2.Compose([v2.Resize(12), v2.RandomHorizontalFlip(), v2.PILToTensor()])


class Letters(StagedDataset):
    def read(self, index):
        return bytes([97 + index]) * 3

    def decode(self, raw):
        return list(raw.decode())

    def augment(self, example):
        return [*example, random.random()]

    def __len__(self):
        return 5


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
    read, decode, augment, __len__ = Words.read, Words.decode, Words.augment, Words.__len__

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))


class NotAugmented(Dataset):
    read, decode, __len__ = Words.read, Words.decode, Words.__len__

    def __getitem__(self, index):
        return self.decode(self.read(index))


class Raws(Dataset):
    def __getitem__(self, index):
        return str(index).encode()

    def __len__(self):
        return 6
