"""One rank of a job in which a rank is killed: ``python elastic_runs.py FOLDER NODES DEVICES RANK``, started by torchrun.

First the job trains undisturbed. Then it trains again and saves a checkpoint every few steps, and rank ``RANK`` kills itself.
torchrun starts the program anew on all ranks, and each goes on from the last checkpoint. Each rank writes what it saw, see
nodes_runs.py. There are no workers: those that a forkserver has made outlive a rank that is killed, of any ``DataLoader``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from nodes_runs import Job

EVERY, DIES_AT = 3, 8  # steps


class Dies(pl.Callback):
    """Kills this process after a step, as a machine does that fails."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == DIES_AT:
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, nodes: str, devices: str, rank: str) -> None:
    torch.set_num_threads(1)
    job = Job(Path(folder), "ddp", int(nodes), int(devices))
    dies: list[Any] = []
    # Not TORCHELASTIC_RESTART_COUNT: it is still 0 on a node on which no rank has failed.
    if not (job.folder / f"whole-rank-{os.environ['RANK']}.pt").exists():
        job.fit("whole")
        dies = [Dies(job.folder / "died")] if os.environ["RANK"] == rank else []
    save = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_last=True)
    job.fit("restarted", *dies, save, ckpt_path="last", cache="1MiB", enable_checkpointing=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
