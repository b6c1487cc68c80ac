"""What the test of requeueing adds to a program: a callback that writes down every batch, and stands for Slurm's clock."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a hash of the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Ledger(pl.Callback):
    """Writes a line with each batch's hash, and one with that of the weights at the end; sends SIGUSR1 after a step.

    The time of the job is over after ``signal_after`` steps of the run (0: it is not).
    """

    def __init__(self, path: str, signal_after: int = 0) -> None:
        self.path, self.signal_after = Path(path), signal_after

    def _note(self, *words: object) -> None:
        with self.path.open("a") as file:
            print(*words, file=file)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del pl_module, outputs
        self._note(trainer.global_step, trainer.current_epoch, batch_idx, *batch[1].tolist(), digest(batch))
        if trainer.global_step == self.signal_after:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note("weights", digest(pl_module.state_dict().values()))
