"""What the tests of epochs that keep their steps share: streams that say what was read, and a model of what should be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from trainer_runs import Data

LENGTH, BATCH, OF_PASS = 46, 4, 1000


class Plain(IterableDataset):  # type: ignore[type-arg]
    """Example ``1000 * pass + index``, dealt out to the workers. The pass is the number of times that it has ended here."""

    def __init__(self, lengths: tuple[int, ...] = (LENGTH,)) -> None:
        self.lengths, self.at, self.number = lengths, 0, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        length = self.lengths[self.number % len(self.lengths)]
        for index in islice(range(first, length, step), self.at, None):
            self.at += 1
            noise = torch.rand(3, dtype=torch.float64)
            yield {"index": OF_PASS * self.number + index, "pid": 0, "noise": noise}
        self.at, self.number = 0, self.number + 1


class Stateful(Plain):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.number = state["at"], state["number"]


class Streaming(Data):
    def __init__(self, make: Any = Stateful, workers: int = 0, **options: Any) -> None:
        super().__init__(workers)
        self.make, self.options = make, options

    def train_dataloader(self) -> Any:
        self.asked["train"] += 1
        return DataLoader(self.make(), BATCH, num_workers=self.workers, **self.options)


def without_echoing(workers: int, make: Any = Stateful, **options: Any) -> int:
    """The number of steps of the plain loader's first epoch."""
    return sum(1 for _ in DataLoader(make(), BATCH, num_workers=workers, **options))


def fresh(batches: Any, workers: int) -> list[list[int]]:
    """The examples that each worker read, in the order in which they came, each reading of one once."""
    seen = {noise: index for indices, noises in batches for index, noise in reversed(list(zip(indices, noises, strict=True)))}
    first = {noise: place for place, noise in reversed(list(enumerate(n for _, noises in batches for n in noises)))}
    order = sorted(seen, key=first.__getitem__)
    return [[seen[each] for each in order if seen[each] % OF_PASS % workers == worker] for worker in range(workers)]


def stream_of(worker: int, workers: int, count: int, lengths: tuple[int, ...] = (LENGTH,)) -> list[int]:
    """The first examples of a worker's part: all of the first pass, then of the next one."""
    of_passes = (OF_PASS * n + i for n in range(50) for i in range(worker, lengths[n % len(lengths)], workers))
    return list(islice(of_passes, count))
