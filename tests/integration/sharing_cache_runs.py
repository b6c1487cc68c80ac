"""Trainings that share a reader with a cache: data sets whose reads are noted, and what a cache leaves to be read."""

import os
import time
from pathlib import Path

import torch
from sharing_runs import loader_of
from torch.utils.data import Dataset

from lightning_echo import StagedDataset

LENGTH = 240
CACHE = "1MiB"  # of an example of 8 KiB it holds 127
IGNORED = ("log", "maker")


class Shots(StagedDataset):
    """Example ``i`` is read as 8 KiB that follow from ``i``. Its augmentation adds noise. The reads of readers are noted."""

    def __init__(self, length=LENGTH, log=None, seconds=0.0, fails_at=None):
        self.length, self.log, self.seconds, self.fails_at = length, log, seconds, fails_at
        self.maker = os.getpid()

    def __len__(self):
        return self.length

    def read(self, index):
        if self.log is not None and self.maker not in (os.getpid(), os.getppid()):  # not what the training looks at before
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        if self.seconds:
            time.sleep(self.seconds)
        if index == self.fails_at:
            raise ValueError("this example is broken")
        return torch.full((2048,), index, dtype=torch.int32)

    def decode(self, raw):
        return raw + 1

    def augment(self, example):
        index = int(example[0]) - 1
        return {"index": index, "noise": torch.rand(()), "data": torch.full((64,), index % 251, dtype=torch.uint8)}


class Together(Dataset):
    """Reads the examples of a batch in one call, and then augments them one after the other."""

    def __init__(self, log=None):
        self.inside = Shots(log=log)

    def __len__(self):
        return LENGTH

    def load(self, index):
        return self.load_many([index])[0]

    def load_many(self, indices):
        return [self.inside.decode(self.inside.read(index)) for index in indices]

    def augment(self, example):
        return self.inside.augment(example)

    def __getitem__(self, index):
        return self.augment(self.load(index))

    def __getitems__(self, indices):
        return [self.augment(example) for example in self.load_many(indices)]


def reads(log):
    """The indices that readers have read, in order."""
    return [int(line) for line in Path(log).read_text().splitlines()] if Path(log).exists() else []


def cached_loader(dataset, batch_size, cache=CACHE, *, options=None, **share):
    """An `EchoLoader` that shares a reader with this cache (None: without). The reader is about a pass ahead at most."""
    return loader_of(
        dataset, batch_size, options={"cache": cache, **(options or {})}, **{"window": 2**16, "ignore": IGNORED, **share}
    )


def left_to_read(order, held):
    """What one worker reads of a stream of indices, through a cache that ends up with so many examples.

    It holds the first ones that it meets, and reads the 1st, 10th, 100th ... hit once more.
    """
    kept, hits, audit_at, left = set(), 0, 1, []
    for index in order:
        if index in kept:
            hits += 1
            if hits < audit_at:
                continue
            audit_at *= 10
        elif len(kept) < held:
            kept.add(index)
        left.append(index)
    return left
