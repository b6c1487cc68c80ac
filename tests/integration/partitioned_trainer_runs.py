"""A Trainer on one of two simulated nodes, which writes what it saw: ``python partitioned_trainer_runs.py FOLDER RANK DATA``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from partitioned_runs import Numbers
from torch.utils.data import DataLoader

from lightning_echo import CacheConfig, EchoCallback

ROOT = Path(__file__).parents[2]
LENGTH = 64
LARGE_LENGTH, LARGE_BYTES, BATCH_SIZE, EPOCHS = 128, 150_000, 8, 3  # where the link between the nodes is slow


class Large(Numbers):
    """Examples of 150 KB of which the training sees four numbers."""

    size = LARGE_BYTES

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return example[:4].float()


class Net(pl.LightningModule):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += batch.tolist()
        return self.layer(batch / 100).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Node(LightningEnvironment):
    """As a launcher says it on each of two nodes of one process."""

    @property
    def creates_processes_externally(self) -> bool:
        return True


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(
    folder: Path, data: str, variables: Sequence[dict[str, str]], before: Sequence[Sequence[str]] = ((), ())
) -> list[tuple[dict[str, Any], str]]:
    """Runs both nodes, by the commands ``before`` the program. Returns what each has seen, and what it printed."""
    started = []
    for rank, (own, prefix) in enumerate(zip(variables, before, strict=True)):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **own}
        environment |= {"NODE_RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
        command = [*prefix, sys.executable, __file__, str(folder), str(rank), data]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        started.append(subprocess.Popen(command, **options))
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)[-6000:]
    return [(json.loads((folder / f"rank-{rank}.json").read_text()), printed[rank]) for rank in range(2)]


def train(data: str, cache: CacheConfig | None) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    dataset, batch_size, factor = (Numbers(LENGTH), 4, 1.5) if data == "usual" else (Large(LARGE_LENGTH), BATCH_SIZE, 1.0)
    net, echo = Net(), EchoCallback(factor=factor, insertion_point="before_augmentation", cache=cache, reuse="each")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=2,
        plugins=[Node()],
        max_epochs=EPOCHS + (data == "usual"),
        callbacks=[echo],
        **quiet,
    )
    began = time.perf_counter()
    trainer.fit(net, DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=1))
    last = echo.reports[-1]
    return {
        "seen": net.seen,
        "seconds": time.perf_counter() - began,
        "reads": int(dataset.reads.sum()),
        "received": last.cache_received_fraction,
        "exchange": last.exchange_fraction,
        "examples": last.cached_examples,
        "weights": [parameter.tolist() for parameter in net.parameters()],
    }


def main(folder: Path, rank: int, data: str) -> None:
    torch.set_num_threads(1)
    size = "1MiB" if data == "usual" else "64MiB"
    found = {"with": train(data, CacheConfig(size, hold="loaded", partitioned=True)), "without": train(data, None)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
