"""Data sets and loaders of which each has one trap, and one that has none."""

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo import StagedDataset


class Examples(StagedDataset):
    """Eight examples of three floats, which can be cut after reading and before their augmentation."""

    def __init__(self, size=8):
        self.size = size

    def read(self, index):
        return bytes([index])

    def decode(self, raw):
        return torch.full((3,), float(raw[0]))

    def augment(self, example):
        return example + 0.5

    def __len__(self):
        return self.size


class Stream(IterableDataset):
    """A stream that does not ask which worker it is in."""

    def __iter__(self):
        yield from torch.zeros(8, 3)


class Unreadable(Dataset):
    """A data set whose file is not there."""

    def __getitem__(self, index):
        raise FileNotFoundError(f"image {index}")

    def __len__(self):
        return 8


class Holding(Examples):
    """The examples, with an attribute."""

    def __init__(self, held):
        super().__init__()
        self.held = held


class OwnIteration(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Batches:
    """An iterable of batches, with the attribute that Lightning overwrites."""

    _iterator = None

    def __iter__(self):
        return iter(torch.zeros(4, 2, 3))

    def __len__(self):
        return 4


def good_loader(dataset=None, **options):
    """A loader without a trap, where there is no CUDA device; ``options`` are those of its ``DataLoader``."""
    plain = {"batch_size": 4, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    return DataLoader(Examples() if dataset is None else dataset, **{**plain, **options})
