"""Data sets and a ledger for echo on demand: which reads were delivered, and how often, by what the batches hold."""

import itertools
import json
import os
import random
import time
from collections import Counter

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.pipeline.demand import DemandRequests


class Serials(Dataset):
    """An example is its index and a number that no other read of it has. Reads take a random time, up to ``slowest`` seconds."""

    def __init__(self, length, slowest=0.0, seed=0):
        self.length, self.slowest, self.seed, self.reads = length, slowest, seed, itertools.count()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.wait(index)
        return torch.tensor([index, time.monotonic_ns(), os.getpid()])

    def wait(self, index):
        if self.slowest:
            chance = random.Random(f"{self.seed} {index} {next(self.reads)}").random()
            time.sleep(self.slowest * chance**3)


class ManySerials(Serials):
    """Reads whole batches, into the same memory each time."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.memory = torch.zeros(64, 3, dtype=torch.int64)

    def __getitems__(self, indices):
        for place, index in enumerate(indices):
            self.memory[place] = self[index]
        return list(self.memory[: len(indices)])


class ReadAndDecode(StagedDataset):
    """Split: ``read`` waits, ``decode`` adds the index to itself, ``augment`` draws a number."""

    def __init__(self, length, slowest=0.0, seed=0):
        self.length, self.slow = length, Serials(length, slowest, seed)

    def __len__(self):
        return self.length

    def read(self, index):
        self.slow.wait(index)
        return index

    def decode(self, raw):
        return torch.tensor([raw, 2 * raw])

    def augment(self, example):
        return torch.cat([example, torch.randint(1_000_000, (1,))])


class Sleepy(ReadAndDecode):
    """Example ``blocks_at`` is not read before a file exists."""

    def __init__(self, length, blocks_at, until):
        super().__init__(length)
        self.blocks_at, self.until = blocks_at, until

    def read(self, index):
        while index == self.blocks_at and not os.path.exists(self.until):
            time.sleep(0.002)
        return super().read(index)


def on_demand(dataset, *, workers=2, batch_size=4, shuffle=False, drop_last=False, context=None, timeout=0, **options):
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=workers,
        drop_last=drop_last,
        multiprocessing_context=context if workers else None,
        timeout=timeout,
    )
    options = {"insertion_point": "after_augmentation", "seed": 0, **options}
    return EchoLoader(loader, "demand", **options)


def batches_of(loader):
    """Yields batches without end, epoch after epoch."""
    while True:
        yield from loader


def booked(state):
    """The positions that a state says were delivered."""
    demand = json.loads(json.dumps(state))["demand"]
    if demand is None:
        return []
    return [*range(demand["frontier"]), *(first + i for first, size in demand["ahead"] for i in range(size))]


class Recorder:
    """Records the fresh positions of each batch where the main process notes them, for data whose reads cannot be told apart."""

    def __init__(self, monkeypatch):
        self.fresh, deliver = [], DemandRequests.deliver

        def recording(requests, number, fresh):
            self.fresh += fresh
            deliver(requests, number, fresh)

        monkeypatch.setattr(DemandRequests, "deliver", recording)

    def check(self, loader):
        assert sorted(self.fresh) == sorted(booked(loader.state_dict()))
        assert loader.counts.fresh == len(self.fresh)


class Ledger:
    """Enters batches of `Serials`, of an unshuffled data set. A read that is delivered for the first time is fresh."""

    def __init__(self, length):
        self.length, self.fresh, self.examples = length, [], 0
        self.seen = set()

    def enter(self, batch):
        rows = [tuple(row) for row in batch.tolist()]
        assert len({index for index, *_ in rows}) == len(rows), f"an index twice in a batch: {rows}"
        self.fresh += [row[0] for row in rows if row not in self.seen]
        self.seen |= set(rows)
        self.examples += len(rows)

    def check(self, loader):
        """Each position that the state says was delivered was fresh once; the counts are those of what came."""
        positions = booked(loader.state_dict())
        assert Counter(self.fresh) == Counter(position % self.length for position in positions)
        assert loader.counts.fresh == len(self.fresh) == len(positions)
        assert loader.counts.delivered == self.examples
