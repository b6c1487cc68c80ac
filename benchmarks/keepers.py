"""What keeps examples, side by side: a cache of ours, what others have, and a model of the operating system's page cache.

All read the same data set, whose reads sleep and are counted, example by example, in a file that all processes have mapped.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from lightning_echo import CacheConfig, EchoLoader

BATCH_SIZE, WORKERS = 16, 2
EXAMPLE_BYTES = 48 * 1024
RECORD_BYTES = EXAMPLE_BYTES + 256  # an example, and what a cache adds to it


class Books:
    """Numbers that all processes of a run see: how often each example was read, when it was delivered, what is held where.

    Args:
        folder: Where the file is.
        examples: Number of examples.
    """

    _SLOTS = 64  # workers that hold something

    def __init__(self, folder: Path, examples: int) -> None:
        self._path, self._examples = folder / "books", examples
        if not self._path.exists():
            np.zeros(2 * examples + self._SLOTS + 1, np.int64).tofile(self._path)
        self._begin()

    def _begin(self) -> None:
        numbers, count = np.memmap(self._path, np.int64, "r+"), self._examples
        self.reads, self._used = numbers[:count], numbers[count : 2 * count]
        self.held, self._clock = numbers[2 * count : -1], numbers[-1:]
        self._lock = os.open(self._path, os.O_RDWR)
        weakref.finalize(self, os.close, self._lock)

    def touch(self, index: int, capacity: int) -> bool:
        """Uses an example in a cache that throws out what was not used for longest; returns whether it is still in there.

        It is if fewer others than the capacity were used since.
        """
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            last = int(self._used[index])
            is_there = last > 0 and int((self._used > last).sum()) < capacity
            self._clock += 1
            self._used[index] = self._clock[0]
            return is_there
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def __getstate__(self) -> tuple[Path, int]:
        return self._path, self._examples

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self._path, self._examples = state
        self._begin()


class Deliveries:
    """What the ranks of a run get. It is not a part of the data set: an `EchoLoader` follows what changes there between passes.

    Args:
        books: The books of the run.
        folder: Where the file is.
    """

    def __init__(self, books: Books, folder: Path) -> None:
        path = folder / "seen"
        with path.open("ab") as file:  # all ranks make it, with zeros
            os.ftruncate(file.fileno(), books.reads.nbytes)
        self._reads, self._seen = books.reads, np.memmap(path, np.int64, "r+")

    def is_hit(self, index: int) -> bool:
        """Returns whether an example that is delivered now was not read since it was delivered the last time."""
        before, self._seen[index] = self._seen[index], self._reads[index]
        return bool(before == self._reads[index])


class Slow(Dataset[Any]):
    """Each read sleeps and is counted."""

    def __init__(self, books: Books, examples: int, seconds: float) -> None:
        self.books, self.examples, self.seconds = books, examples, seconds

    def __len__(self) -> int:
        return self.examples

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        """Returns an example, slowly."""
        self.books.reads[index] += 1
        time.sleep(self.seconds)
        return torch.full((EXAMPLE_BYTES,), index % 251, dtype=torch.uint8), index

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.read(index)


class LruCached(Slow):
    """``functools.lru_cache`` around the reads: each worker has one of its own, the first time that it reads.

    Args:
        kept: Examples that each of them holds.
        rank: The rank of its workers.
    """

    def __init__(self, *slow: Any, kept: int, rank: int = 0) -> None:
        super().__init__(*slow)
        self.kept, self._rank, self._cached = kept, rank, None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._cached is None:
            self._cached = lru_cache(self.kept)(self.read)
            worker = get_worker_info()
            self._slot = self._rank * WORKERS + (0 if worker is None else worker.id)
        example = self._cached(index)
        self.books.held[self._slot] = self._cached.cache_info().currsize * EXAMPLE_BYTES
        return example


class PageCached(Slow):
    """A model of the page cache: one for all processes, which throws out what was not used for longest.

    Args:
        kept: Examples that there is memory for.
    """

    def __init__(self, *slow: Any, kept: int) -> None:
        super().__init__(*slow)
        self.kept = kept

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.books.touch(index, self.kept):
            return self.read(index)
        return torch.full((EXAMPLE_BYTES,), index % 251, dtype=torch.uint8), index


class Lmdb(Slow):
    """LMDB in shared memory: what is read is written, a transaction each, until the map is full.

    Args:
        folder: Where its file is.
        most_bytes: Size of the map.
    """

    def __init__(self, *slow: Any, folder: Path, most_bytes: int) -> None:
        super().__init__(*slow)
        self.folder, self.most_bytes = folder, most_bytes
        self._environment: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._environment is None:  # one per process: none lives through a fork
            options = {"sync": False, "metasync": False, "max_readers": 512}
            self._environment = import_module("lmdb").open(str(self.folder), self.most_bytes, **options)
            self._is_full = False
        with self._environment.begin() as transaction:
            found = transaction.get(b"%d" % index)
        if found is not None:
            return torch.frombuffer(bytearray(found), dtype=torch.uint8), index
        example = self.read(index)
        if not self._is_full:
            try:
                with self._environment.begin(write=True) as transaction:
                    transaction.put(b"%d" % index, example[0].numpy().tobytes())
            except import_module("lmdb").MapFullError:
                self._is_full = True
        return example


@dataclass(frozen=True)
class Run:
    """What a partner is made for.

    Attributes:
        books: The books of this run.
        folder: In memory, for files.
        examples: Number of examples.
        seconds: What a read takes.
        ranks: Number of ranks.
        rank: Number of this one.
    """

    books: Books
    folder: Path
    examples: int
    seconds: float
    ranks: int = 1
    rank: int = 0

    @property
    def half(self) -> int:
        """Half of the examples: what there is memory for."""
        return self.examples // 2

    @property
    def slow(self) -> tuple[Books, int, float]:
        """What the data sets are made of."""
        return self.books, self.examples, self.seconds


@dataclass(frozen=True)
class Keeper:
    """A partner.

    Attributes:
        name: As it stands in the table.
        make: Makes its loader.
        held: Bytes that all ranks together hold, when it has run on all of them.
        package: What must be installed; empty: nothing more.
    """

    name: str
    make: Callable[[Run], Any]
    held: Callable[[Run, Any], int]
    package: str = ""

    @property
    def version(self) -> str:
        """The version of its package; empty if that is not installed."""
        if not self.package:
            return "-"
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


def plain(run: Run, dataset: Any) -> DataLoader[Any]:
    """A loader as users write it, its data dealt out to the ranks."""
    sampler = DistributedSampler(dataset, run.ranks, run.rank, seed=1)
    return DataLoader(
        dataset, BATCH_SIZE, sampler=sampler, num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork"
    )


def _monai(run: Run, kept: int) -> DataLoader[Any]:
    transform = import_module("monai.transforms").Transform

    class Read(transform):  # type: ignore[misc, valid-type]
        """Deterministic in MONAI's eyes, so that it is what the cache keeps."""

        def __call__(self, index: int) -> tuple[torch.Tensor, int]:
            return slow.read(index)

    slow = Slow(*run.slow)
    cached = import_module("monai.data").CacheDataset
    return plain(run, cached(range(run.examples), Read(), cache_num=kept, num_workers=WORKERS, copy_cache=False, progress=False))


def _ours(run: Run) -> EchoLoader:
    loader = DataLoader(Slow(*run.slow), BATCH_SIZE, shuffle=True, num_workers=WORKERS, multiprocessing_context="fork")
    return EchoLoader(loader, 1, seed=1, cache=CacheConfig(run.half * RECORD_BYTES, hold="whole", ignore=("books",)))


def _lmdb(run: Run) -> DataLoader[Any]:
    dataset = Lmdb(*run.slow, folder=run.folder / "lmdb", most_bytes=run.half * RECORD_BYTES)
    dataset.folder.mkdir(exist_ok=True)
    return plain(run, dataset)


def _counted(run: Run, loader: Any) -> int:
    return int(run.books.held.sum())


KEEPERS = (
    Keeper("bare DataLoader", lambda run: plain(run, Slow(*run.slow)), lambda run, loader: 0),
    Keeper("ours", _ours, lambda run, loader: loader.cache_counts.bytes),
    Keeper(
        "functools.lru_cache, half in each worker",
        lambda run: plain(run, LruCached(*run.slow, kept=run.half, rank=run.rank)),
        _counted,
    ),
    Keeper(
        "functools.lru_cache, half in all workers",
        lambda run: plain(run, LruCached(*run.slow, kept=run.half // (run.ranks * WORKERS), rank=run.rank)),
        _counted,
    ),
    Keeper(
        "MONAI CacheDataset, half in each rank",
        lambda run: _monai(run, run.half),
        lambda run, loader: run.ranks * len(loader.dataset._cache) * EXAMPLE_BYTES,
        "monai",
    ),
    Keeper(
        "MONAI CacheDataset, half in all ranks",
        lambda run: _monai(run, run.half // run.ranks),
        lambda run, loader: run.ranks * len(loader.dataset._cache) * EXAMPLE_BYTES,
        "monai",
    ),
    Keeper(
        "LMDB on /dev/shm",
        _lmdb,
        lambda run, loader: 512 * (run.folder / "lmdb" / "data.mdb").stat().st_blocks,
        "lmdb",
    ),
    Keeper(
        "page cache: a model, least recently used",
        lambda run: plain(run, PageCached(*run.slow, kept=run.half)),
        lambda run, loader: run.half * EXAMPLE_BYTES,
    ),
)
