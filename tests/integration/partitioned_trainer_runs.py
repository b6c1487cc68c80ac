"""A Trainer on one of two simulated nodes: ``python partitioned_trainer_runs.py FOLDER RANK``.

It writes what it saw to ``FOLDER/rank-R.json``; test_partitioned_trainer.py compares.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from partitioned_runs import Numbers
from torch.utils.data import DataLoader

from lightning_echo import CacheConfig, EchoCallback

LENGTH, EPOCHS = 64, 4


class Net(pl.LightningModule):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += batch.tolist()
        return self.layer(batch / 100).square().mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Node(LightningEnvironment):
    """As a launcher says it on each of two nodes of one process."""

    @property
    def creates_processes_externally(self) -> bool:
        return True


def trainer_of(echo: EchoCallback, epochs: int) -> pl.Trainer:
    """The Trainer of one of the two nodes."""
    return pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=2,
        plugins=[Node()],
        max_epochs=epochs,
        callbacks=[echo],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def results_of(started: Sequence[subprocess.Popen[str]], folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Waits for both nodes. Returns what each has seen, and what it printed."""
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)[-6000:]
    return [(json.loads((folder / f"rank-{rank}.json").read_text()), printed[rank]) for rank in range(2)]


def train(cache: CacheConfig | None) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    dataset, net = Numbers(LENGTH), Net()
    echo = EchoCallback(factor=1.5, insertion_point="before_augmentation", cache=cache, reuse="each")
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
    trainer_of(echo, EPOCHS).fit(net, loader, DataLoader(Numbers(16), batch_size=4))
    last = echo.reports[-1]
    return {
        "seen": net.seen,
        "reads": int(dataset.reads.sum()),
        "received": last.cache_received_fraction,
        "exchange": last.exchange_fraction,
        "examples": last.cached_examples,
        "weights": [parameter.tolist() for parameter in net.parameters()],
    }


def main(folder: Path, rank: int) -> None:
    port = (folder / "port").read_text()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=str(rank), LOCAL_RANK="0", GROUP_RANK=str(rank))
    torch.set_num_threads(1)
    found = {"with": train(CacheConfig("1MiB", hold="loaded", partitioned=True))}
    found["without"] = train(None)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
