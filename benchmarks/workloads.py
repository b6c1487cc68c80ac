"""Simulated sources and steps, and data sets that are counted."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from timing import median_seconds
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from lightning_echo import EchoLoader, InsertionPoint, StagedDataset
from lightning_echo.pipeline.batches import BatchUse

POINTS = tuple(point.value for point in InsertionPoint if point is not InsertionPoint.auto)
STREAM = "after_augmentation, stream"
CASES = (*POINTS, STREAM)

BATCH_SIZE, WORKERS = 32, 2
IMAGE_BYTES = 150_528  # a 224x224 RGB image
_EXAMPLE = (torch.zeros(3, 32, 32, dtype=torch.uint8), 0)


class Sleeping(StagedDataset):
    """Reading takes a while in which the processor is free, as from a network; augmenting takes no time."""

    def __init__(self, seconds: float, length: int = 1_000_000) -> None:
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def read(self, index: Any) -> Any:
        time.sleep(self.seconds)
        return index

    def decode(self, raw: Any) -> Any:
        return _EXAMPLE[0].clone(), raw

    def augment(self, example: Any) -> Any:
        return example


class Stream(IterableDataset[Any]):
    """The same as a stream, of which each worker has its share."""

    def __init__(self, dataset: Sleeping) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.dataset.load, range(first, len(self.dataset), step))


class Busy(Sleeping):
    """Reading is work for the processor: as many turns of a loop as take the seconds of processor time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.turns = round(1000 * seconds / median_seconds(lambda: _spin(1000), 1000, clock=time.thread_time))

    def read(self, index: Any) -> Any:
        _spin(self.turns)
        return index


class Images(Dataset[torch.Tensor]):
    """Examples of 150 KB that take a while: sleeping, or of processor time."""

    def __init__(self, sleep_seconds: float = 0.0, work_seconds: float = 0.0, length: int = 100_000) -> None:
        self.sleep_seconds, self.work_seconds, self.length = sleep_seconds, work_seconds, length
        self.image = torch.zeros(IMAGE_BYTES, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sleep_seconds:
            time.sleep(self.sleep_seconds)
        end = time.thread_time() + self.work_seconds
        while time.thread_time() < end:
            pass
        return self.image.clone()


def loader(dataset: Dataset[Any], workers: int = WORKERS, collate_fn: Any = None) -> DataLoader[Any]:
    """The comparison partner: a plain ``DataLoader``, not shuffled, so that no list of indices is drawn up."""
    return DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=workers, collate_fn=collate_fn, multiprocessing_context=_context(workers)
    )


def plain_loader(case: str, dataset: Sleeping) -> DataLoader[Any]:
    """The comparison partner in one of `CASES`."""
    return loader(Stream(dataset) if case == STREAM else dataset)


def echoed_loader(case: str, dataset: Sleeping, factor: float) -> Any:
    """The same, echoed."""
    point = InsertionPoint.after_augmentation if case == STREAM else InsertionPoint(case)
    echoed = EchoLoader(plain_loader(case, dataset), factor, insertion_point=point, seed=0)
    return Transferred(echoed) if point is InsertionPoint.after_transfer else echoed


class Transferred:
    """Does with each use of a batch what the Trainer's hooks do, on a device that is the host."""

    def __init__(self, loader: EchoLoader) -> None:
        self._loader = loader
        loader.is_transferred = True

    def __iter__(self) -> Iterator[Any]:
        for use in self._loader:
            assert isinstance(use, BatchUse)
            use.live.prepare(use.host, lambda batch: batch)
            use.live.let_go_if_edited()
            yield use.live.transfer(lambda batch: batch, is_last=use.is_last)

    def close(self) -> None:
        self._loader.close()


def real_sleep(seconds: float) -> float:
    """What a sleep of ``seconds`` really takes."""
    return median_seconds(lambda: time.sleep(seconds), max(int(0.2 / seconds), 20))


def sleep_for(seconds: float) -> float:
    """The argument for ``time.sleep`` that really takes about ``seconds``."""
    return max(2 * seconds - real_sleep(seconds), 0.0)


def _context(workers: int) -> str | None:
    return "fork" if workers else None


def _spin(turns: int) -> None:
    for _ in range(turns):
        pass


class Tracked:
    """Something that is counted while it is alive, and copies of it as well.

    Args:
        value: Anything.
        alive: All that are.
    """

    def __init__(self, value: Any, alive: weakref.WeakSet[Tracked]) -> None:
        self.value, self._alive = value, alive
        alive.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tracked:
        return Tracked(self.value, self._alive)


class Counted(Dataset[Tracked]):
    """Knows which of the examples it returned, and of the copies of them, are still alive in this process."""

    def __init__(self, length: int = 100_000) -> None:
        self.length = length
        self.alive: weakref.WeakSet[Tracked] = weakref.WeakSet()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tracked:
        return Tracked(index, self.alive)

    def collate(self, examples: list[Tracked]) -> torch.Tensor:
        """The number of examples that are kept for later: alive, but not handed over for good in this batch."""
        handed_over = sum(example in self.alive for example in examples)
        return torch.tensor([[len(self.alive) - handed_over]] * len(examples))


class CountedBatches:
    """Makes batches that can be counted, in the process that calls it."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Tracked] = weakref.WeakSet()

    def __call__(self, examples: list[Any]) -> Tracked:
        return Tracked(default_collate(examples), self.alive)
