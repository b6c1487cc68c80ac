"""A Trainer with a partitioned cache on one of two nodes with a slow link: ``python slow_link_runs.py FOLDER RANK``.

It writes what it saw to ``FOLDER/rank-R.json``; test_slow_link.py compares.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from partitioned_trainer_runs import Net, trainer_of
from torch.utils.data import DataLoader

from lightning_echo import CacheConfig, EchoCallback, StagedDataset

LENGTH, BATCH_SIZE, EPOCHS = 128, 8, 3
EXAMPLE_BYTES = 150_000


class Large(StagedDataset):
    """Examples of 150 KB of which the training sees four numbers."""

    def load(self, index: int) -> torch.Tensor:
        return torch.full((EXAMPLE_BYTES,), index, dtype=torch.uint8)

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return example[:4].float()

    def __len__(self) -> int:
        return LENGTH


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, cache in (("with", CacheConfig("64MiB", hold="loaded", partitioned=True)), ("without", None)):
        seed_everything(7, verbose=False)
        net = Net()
        echo = EchoCallback(factor=1, insertion_point="before_augmentation", cache=cache)
        began = time.perf_counter()
        trainer_of(echo, EPOCHS).fit(net, DataLoader(Large(), batch_size=BATCH_SIZE, shuffle=True, num_workers=1))
        last = echo.reports[-1]
        found[name] = {
            "seen": net.seen,
            "seconds": time.perf_counter() - began,
            "received": last.cache_received_fraction,
            "exchange": last.exchange_fraction,
        }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
