"""A fresh share that falls from 1 to 1/e: the batches of positions that such a plan would lay down. It is no part of the package.

The share of batch k is ``max(1 / e, 1 / (1 + k (e - 1) / K))``. Echoes are drawn from what memory holds, as
``reuse="memory"`` does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import floor

import torch
from torch.utils.data import Sampler

__all__ = ["FALLING_BATCHES", "FallingSampler", "falling_batches", "fresh_share"]

FALLING_BATCHES = 100  # K: the share is 1/e from this batch on


def fresh_share(batch: int, factor: float, falling: int = FALLING_BATCHES) -> float:
    """Share of batch ``batch`` (from 0) that is fresh.

    Example:
        >>> [fresh_share(batch, 8) for batch in (0, 50, 100, 1000)]
        [1.0, 0.2222222222222222, 0.125, 0.125]
    """
    return max(1 / factor, 1 / (1 + batch * (factor - 1) / falling))


def falling_batches(batch_size: int, factor: float, most_held: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """Yields the positions of each batch, the fresh ones first, and how many are fresh. Without end.

    Args:
        batch_size: Examples in a batch; as many are held at least.
        factor: The fresh share falls to 1 / factor.
        most_held: Examples that memory holds; the oldest leaves first.
        seed: Of the draws.

    Example:
        >>> batches = falling_batches(4, factor=2, most_held=8, seed=0)
        >>> next(batches)
        ([0, 1, 2, 3], 4)
    """
    chance, due, read, batch = random.Random(seed), 0.0, 0, 0
    while True:
        held = min(read, most_held)
        due += batch_size * fresh_share(batch, factor)
        fresh = max(min(floor(due - read + 1e-9), batch_size), batch_size - held)
        echoes = chance.sample(range(read - held, read), batch_size - fresh)
        yield [*range(read, read + fresh), *echoes], fresh
        read, batch = read + fresh, batch + 1


class FallingSampler(Sampler[list[int]]):
    """`falling_batches` as batches of indices: a fresh example is the next one of a random order, pass after pass.

    An echo loads its example again, which gives the same one, as all loads of these tasks are pure. So nothing need be held here;
    what a buffer of ``most_held`` examples could not give is never drawn.

    Args:
        length: Examples in the data set.
        batch_size: Examples in a batch.
        factor: The fresh share falls to 1 / factor.
        most_held: Examples that memory holds.
        seed: Of order and draws.

    Attributes:
        fresh: How many examples of each batch so far were fresh. It may be ahead of what was trained on.
    """

    def __init__(self, length: int, batch_size: int, factor: float, most_held: int, seed: int) -> None:
        self._length, self._arguments, self._seed = length, (batch_size, factor, most_held, seed), seed
        self.fresh: list[int] = []
        self._orders: dict[int, torch.Tensor] = {}

    def __iter__(self) -> Iterator[list[int]]:
        for positions, fresh in falling_batches(*self._arguments):
            self.fresh.append(fresh)
            yield [self._index(position) for position in positions]

    def _index(self, position: int) -> int:
        number, place = divmod(position, self._length)
        if number not in self._orders:
            chance = torch.Generator().manual_seed((self._seed << 16) + number)
            self._orders[number] = torch.randperm(self._length, generator=chance)
        return int(self._orders[number][place])
