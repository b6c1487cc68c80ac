"""Samplers of a user, and what a list makes of them: the model that the orders are compared with."""

import math

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


class CountingSampler(Sampler):
    """Draws from a counter that moves on with every pass; keeps it in a ``state_dict``."""

    def __init__(self, length, start):
        self.length, self.count = length, start

    def __iter__(self):
        self.count += 1
        yield from ((i * 7 + self.count) % 31 + 100 * i for i in range(self.length))

    def __len__(self):
        return self.length

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class BucketBatches(Sampler):
    """A batch sampler of its own kind, told the pass by ``set_epoch``."""

    def __init__(self, length, start):
        self.length, self.epoch = length, start

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from ([self.epoch, i] if i % 3 else [self.epoch, i, -i] for i in range(self.length))

    def __len__(self):
        return self.length


# Samplers of a user that a resumed run can find again. Called with 0, it is the one that the run began with; with another number
# one in another state, as a new process may have it.
SAMPLERS = {
    "RandomSampler": lambda start: RandomSampler(range(23), generator=generator(5 + start)),
    "RandomSampler with replacement": lambda start: RandomSampler(
        range(40), replacement=True, num_samples=17, generator=generator(5 + start)
    ),
    "SubsetRandomSampler": lambda start: SubsetRandomSampler(range(0, 40, 2), generator=generator(6 + start)),
    "WeightedRandomSampler": lambda start: WeightedRandomSampler(
        [1.0, 5.0, 1.0, 9.0] * 6, 19, replacement=True, generator=generator(7 + start)
    ),
    "DistributedSampler": lambda start: DistributedSampler(range(37), num_replicas=2, rank=1, shuffle=True, seed=8),
    "SequentialSampler": lambda start: SequentialSampler(range(21)),
    "with state_dict": lambda start: CountingSampler(18, start),
}
BATCH_SAMPLERS = {
    "BatchSampler": lambda start: BatchSampler(RandomSampler(range(23), generator=generator(5 + start)), 4, drop_last=False),
    "of the user": lambda start: BucketBatches(11, start),
}


def passes_of(sampler, number):
    """What a sampler yields in so many passes."""
    passes = []
    for i in range(number):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(i)
        passes.append(list(sampler))
    return passes


def dealt(indices, replicas, rank):
    """``DistributedSampler``'s rule: filled up from the start to a multiple of the ranks, then every so-many-th."""
    total = math.ceil(len(indices) / replicas) * replicas
    filled = (indices * math.ceil(total / len(indices)))[:total]
    return filled[rank::replicas]


def kept_of(length, replicas, batch_size, drop_last):
    here = math.ceil(length / replicas)
    return here // batch_size * batch_size if drop_last else here
