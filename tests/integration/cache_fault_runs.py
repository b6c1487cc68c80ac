"""Programs that test_cache_faults.py starts, as they are killed or limited: ``python cache_fault_runs.py NAME FOLDER``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, StagedDataset

MIB = 2**20


class Blocks(StagedDataset):
    """Large examples whose every byte is known."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size = length, size

    def load(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), index % 251, dtype=torch.uint8)

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return example[::4096]

    def __len__(self) -> int:
        return self.length


def check(batch: torch.Tensor) -> None:
    """Makes sure that every example of a batch is one of `Blocks`."""
    assert bool((batch == batch[:, :1]).all())


def loader(dataset: Any, size: Any, workers: int = 2, **options: Any) -> EchoLoader:
    plain = DataLoader(dataset, batch_size=2, num_workers=workers)
    return EchoLoader(plain, 1, cache={"size": size, **options})


def main_killed(folder: Path) -> None:
    """Fills a cache, tells which file it is, and waits to be killed while its workers work."""
    path = {"path": str(folder / "disk")} if (folder / "disk").exists() else {}
    echoed = loader(Blocks(200, MIB // 4), "100MiB", **path)
    for number, _ in enumerate(echoed):
        if number == 3:
            opened = echoed._setting.cache._opened._arena._file.fd  # type: ignore[union-attr]
            status = os.fstat(opened)
            (folder / "told.tmp").write_text(f"{status.st_dev} {status.st_ino}")
            (folder / "told.tmp").rename(folder / "told")
        if number > 3:
            time.sleep(0.05)


def small_shared_memory(folder: Path) -> None:
    """Holds more than the file system for shared memory has."""
    echoed = loader(Blocks(120, MIB), "200MiB")
    for _ in range(2):
        for batch in echoed:
            check(batch)
    counts = echoed.cache_counts
    assert counts is not None
    print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, counts.bytes, counts.hits)


def limited_memory(folder: Path) -> None:
    """Fills a cache that fits when it is made, and does not any more when something else has taken memory."""
    echoed = loader(Blocks(600, MIB), "500MiB")
    batches, ballast = iter(echoed), []
    next(batches)
    for _ in range(4):
        ballast.append(torch.ones(100 * MIB, dtype=torch.uint8))
    for batch in batches:
        check(batch)
    for batch in echoed:
        check(batch)
    counts = echoed.cache_counts
    assert counts is not None
    print(counts.is_full, counts.bytes, counts.hits, len(ballast))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"main_killed": main_killed, "small_shared_memory": small_shared_memory, "limited_memory": limited_memory}[sys.argv[1]](
        Path(sys.argv[2])
    )
