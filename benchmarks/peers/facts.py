"""What one peer does: its loader by itself, in a Trainer, interrupted and resumed, on two ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from trainer import fit
from workloads import BATCH_SIZE

from peers.arithmetic import duplicates_per_batch, resumed_at, steps_between_uses
from peers.data import CountedReads
from peers.loaders import SEED, Peer

EPOCHS = 2


class Recorder(pl.LightningModule):
    """Takes real optimizer steps, and remembers the examples of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, examples = batch
        self.batches.append(examples.tolist())
        return self.weight * images[0, 0, 0, 0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps(pl.Callback):
    """Optimizer steps at the end of each epoch; saves a checkpoint after a chosen one."""

    def __init__(self, save_at: int | None = None, path: Path | None = None) -> None:
        self.save_at, self.path = save_at, path
        self.ends = [0]

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(str(self.path))

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.ends.append(trainer.global_step)


def alone(peer: Peer, examples: int, folder: Path) -> dict[str, Any]:
    """The facts of one process: plain types."""
    return {**by_itself(peer, examples, folder), **in_trainer(peer, examples, folder)}


def by_itself(peer: Peer, examples: int, folder: Path) -> dict[str, Any]:
    """What the loader says of its length, and delivers in two epochs; how often it reads for that; what edits do to it."""
    data = CountedReads(folder / "reads.txt", examples)
    pl.seed_everything(SEED, verbose=False)
    loader = peer.loader(data)
    length = _length(loader)
    batches: list[list[int]] = []
    ends, edited = [0], 0
    for epoch in range(EPOCHS):
        if callable(set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None)):
            set_epoch(epoch)
        for images, ids in loader:
            batches.append(ids.tolist())
            edited += int(images.flatten(1).any(1).sum())
            images.fill_(1)  # as a training step may: images are black when they are read
        ends.append(len(batches))
    if callable(close := getattr(loader, "close", None)):
        close()
    return {
        "length": length,
        "delivered": [end - begin for begin, end in pairwise(ends)],
        "reads_per_example": len(data.reads()) / sum(map(len, batches)),
        "duplicates_per_batch": duplicates_per_batch(batches),
        "steps_between_uses": steps_between_uses(batches),
        "edited": edited / sum(map(len, batches)),
    }


def in_trainer(peer: Peer, examples: int, folder: Path) -> dict[str, Any]:
    """How many steps Lightning takes, and how it goes on from a checkpoint in the middle of the first epoch."""
    saved_at = examples // BATCH_SIZE // 2 + 5  # in the middle of the repeats of a batch, too
    path = folder / "middle.ckpt"

    def run(steps: Steps, ckpt_path: Path | None = None) -> list[list[int]]:
        pl.seed_everything(SEED, verbose=False)
        model, data = Recorder(), peer.data_module(CountedReads(folder / "reads.txt", examples))
        fit(model, data, [steps], max_epochs=EPOCHS, devices=1, ckpt_path=ckpt_path, **peer.trainer)
        return model.batches

    steps = Steps(saved_at, path)
    whole = run(steps)
    resumed = run(Steps(), path)
    return {"steps": [end - begin for begin, end in pairwise(steps.ends)], "resume": resumed_at(whole, saved_at, resumed)}


def on_rank(peer: Peer, examples: int, folder: Path) -> tuple[int, dict[str, Any]]:
    """This rank, and what it sees while the job uses as many examples as a pass with all its echoes has."""
    pl.seed_everything(SEED, verbose=False)
    model, data = Recorder(), peer.data_module(CountedReads(folder / "reads.txt", examples))
    steps = peer.factor * examples // (2 * BATCH_SIZE)
    trainer = fit(model, data, [], strategy="ddp", devices=2, max_steps=steps, max_epochs=-1, **peer.trainer)
    return trainer.global_rank, {"batches": model.batches}


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # what `len` raises where there is none
        return None
