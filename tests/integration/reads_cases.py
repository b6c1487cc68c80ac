"""Data sets whose reads take a time of their own, and loaders with reads in flight over them."""

import hashlib
import itertools
import os
import random
import struct
import threading
import time

import torch
from loader_cases import take
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from lightning_echo import EchoLoader, StagedDataset

LENGTH = 90


class ReadLog:
    """A file with a line for each read: process and index."""

    def __init__(self, path):
        self.path = path

    def add(self, index):
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, struct.pack("qq", os.getpid(), index))
        os.close(file)

    def entries(self):
        with open(self.path, "rb") as file:
            return list(struct.iter_unpack("qq", file.read()))


class Slow(StagedDataset):
    """Each read takes a time of its own, other in each thread: what is ready first has nothing to do with the order."""

    def __init__(self, length=LENGTH, log=None, most_seconds=0.002, bad=None):
        self.length, self.log, self.most_seconds, self.bad = length, log, most_seconds, bad

    def read(self, index):
        if self.log is not None:
            self.log.add(index)
        time.sleep(random.Random((index * 31) ^ threading.get_ident() ^ os.getpid()).random() * self.most_seconds)
        if index == self.bad:
            raise OSError(5, f"no answer for {index}")
        return str(index).encode()

    def decode(self, raw):
        return torch.full((3,), float(raw))

    def augment(self, example):
        return example + torch.rand(3)

    def __len__(self):
        return self.length


class SlowItems(Dataset):
    """No stages: whole examples are read."""

    def __init__(self, length=LENGTH, log=None):
        self.length, self.log = length, log

    def __getitem__(self, index):
        time.sleep(random.Random(index ^ threading.get_ident()).random() * 0.002)
        if self.log is not None:
            self.log.add(index)
        return torch.full((3,), float(index))

    def __len__(self):
        return self.length


class UsersSampler(Sampler):
    """Says how far it was asked, at each batch: a sampler may decide by what the training has learnt."""

    def __init__(self, length):
        self.length, self.asked = length, 0

    def __iter__(self):
        for index in range(self.length):
            self.asked += 1
            yield index * 7 % self.length

    def __len__(self):
        return self.length


ORDERS = {
    "shuffled": lambda dataset: {"shuffle": True},
    "sequential": lambda dataset: {},
    "generator": lambda dataset: {"sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(4))},
    "weighted": lambda dataset: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0] * (len(dataset) // 3), len(dataset))},
    "users": lambda dataset: {"sampler": UsersSampler(len(dataset))},
}


def loader_of(reads, *, order="shuffled", workers=2, batch_size=4, dataset=None, **options):
    dataset = Slow() if dataset is None else dataset
    if order == "batches":
        ordered = {"batch_sampler": BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)}
    else:
        ordered = {"batch_size": batch_size, **ORDERS[order](dataset)}
    factor = options.pop("factor", 1)
    plain = DataLoader(dataset, num_workers=workers, timeout=options.pop("timeout", 0), **ordered)
    return EchoLoader(plain, factor, seed=3, reads_in_flight=reads, **options)


def delivered(loader, count):
    """So many batches, each with its fresh examples, and the state after the last one."""
    batches = []
    while len(batches) < count:
        for batch in itertools.islice(loader, count - len(batches)):
            batches.append((batch.clone(), loader.last_batch_counts.fresh))
    state = loader.state_dict()
    loader.close()
    return batches, state


def take_and_close(loader, count):
    batches = [batch.clone() for batch in take(loader, count)]
    loader.close()
    return batches


def digest(loader, count):
    """The hash of so many batches."""
    found = hashlib.sha256()
    for batch in take(loader, count):
        found.update(batch.numpy().tobytes())
    loader.close()
    return found.hexdigest()
