"""One rank of a job in which a rank is killed: ``python elastic_runs.py FOLDER NODES DEVICES RANK``, started by torchrun.

First the job trains undisturbed. Then it trains again and saves a checkpoint every few steps, and rank ``RANK`` kills itself.
torchrun starts the program anew on all ranks, and each goes on from the last checkpoint. Each rank writes what it saw, see
nodes_runs.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from nodes_runs import Job, set_up

EVERY, DIES_AT = 3, 8  # steps


class Dies(pl.Callback):
    """Kills this process after a step, as a machine does that fails."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, nodes: str, devices: str, rank: str) -> None:
    set_up()
    job = Job(Path(folder), "ddp", int(nodes), int(devices))
    dies: list[Any] = []
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        job.fit("whole", workers=1)
        dies = [Dies()] if os.environ["RANK"] == rank else []
    save = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_last=True)
    job.fit("restarted", *dies, save, ckpt_path="last", workers=1, cache="1MiB", enable_checkpointing=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
