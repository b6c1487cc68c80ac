"""Ranks that echo on demand and read at different speeds: ``python demand_ranks_runs.py FOLDER``, under torchrun.

An example is its index and a number that each read draws anew. So an example is fresh if its number has not been seen before,
whatever the package says of it. Each rank writes what it saw to ``FOLDER/ranks-N-rank-R.pt``.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from trainer_runs import Killed, SaveAt, trainer

from lightning_echo import EchoCallback, EchoLoader

LENGTH, BATCH_SIZE = 66, 4  # as many as two, three and six ranks can share evenly
SLOW, QUICK = 0.03, 0.002  # seconds of a read
STEP = 0.02  # seconds
BEFORE, AFTER = 50, 40  # batches before and after a resume


class Tokens(Dataset[Any]):
    """Each read of an example takes a while and draws another number."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.tensor([index, random.SystemRandom().getrandbits(62)])


class Shuffles(Sampler[int]):
    """A user's sampler: each pass is another draw of its generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH, generator=self.generator).tolist())


def loader(seconds: float) -> EchoLoader:
    data = DataLoader(Tokens(seconds), BATCH_SIZE, sampler=Shuffles(), num_workers=1)
    return EchoLoader(data, "demand", insertion_point="after_augmentation", seed=7)


def train(echoed: EchoLoader, batches: int, *, together: bool = True) -> list[Any]:
    """Takes batches, across epochs; each step is one of all ranks, unless this one goes on alone."""
    taken: list[Any] = []
    while True:
        for batch in echoed:
            taken.append(batch.tolist())
            time.sleep(STEP)
            if together and torch.distributed.is_initialized():
                torch.distributed.all_reduce(torch.ones(1))
            if len(taken) == batches:
                return taken


def saved(echoed: EchoLoader) -> dict[str, Any]:
    """A state, and what saving it took and said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.monotonic()
        state = echoed.state_dict()
        seconds = time.monotonic() - started
    return {"state": state, "seconds": seconds, "said": [str(each.message) for each in caught]}


def resumed(folder: Path, name: str, seconds: float, batches: int) -> dict[str, Any]:
    """A run from the state that rank 0 has saved, as Lightning hands it to all ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        echoed = loader(seconds)
        echoed.load_state_dict(torch.load(folder / name, weights_only=True))
        taken = train(echoed, batches)
    found = {"batches": taken, "counts": [echoed.counts.fresh, echoed.counts.echoed], **saved(echoed)}
    found["said"] += [str(each.message) for each in caught]
    echoed.close()
    return found


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch.tolist())
        time.sleep(STEP)
        return self.layer(batch[:, :1].float() / LENGTH).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Plain(pl.LightningDataModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def train_dataloader(self) -> Any:
        return DataLoader(Tokens(self.seconds), BATCH_SIZE, num_workers=1)


def fitted(seconds: float, *callbacks: Any, ckpt_path: Any = None) -> dict[str, Any]:
    module, echo = Module(), EchoCallback(factor="demand", insertion_point="after_augmentation", seed=7, summary=False)
    run = trainer(strategy="ddp", devices=2, max_steps=BEFORE + AFTER, max_epochs=-1, callbacks=[echo, *callbacks])
    found: dict[str, Any] = {"died": False}
    try:
        run.fit(module, datamodule=Plain(seconds), ckpt_path=ckpt_path)
        found |= saved(run.train_dataloader)  # type: ignore[arg-type]
        found["report"] = [echo.reports[-1].fresh_examples, echo.reports[-1].echoed_examples]
    except Killed:
        found["died"] = True
    return {**found, "batches": module.batches}


def scenarios_of_two(folder: Path, rank: int) -> dict[str, Any]:
    meet = torch.distributed.barrier
    save = SaveAt(folder, [BEFORE], dies=True)
    found: dict[str, Any] = {"killed": fitted((QUICK, SLOW)[rank], save)}
    meet()
    found["resumed by the Trainer"] = fitted((SLOW, QUICK)[rank], ckpt_path=save.path(BEFORE))
    # By hand, with a sampler of the user's whose passes must be gone through again.
    echoed = loader((QUICK, SLOW)[rank])
    found["whole"] = {"batches": train(echoed, BEFORE), "counts": [echoed.counts.fresh, echoed.counts.echoed], **saved(echoed)}
    if rank == 0:
        torch.save(found["whole"]["state"], folder / "whole.pt")
    for alone in (0, 1):  # one rank saves while the other is elsewhere
        meet()
        if rank == alone:
            found["alone"] = saved(echoed)
    meet()
    more = train(echoed, 5, together=False) if rank == 0 else []  # the other rank has not come so far
    if rank == 0:
        found["ahead"] = {"batches": more, **saved(echoed)}
        torch.save(found["ahead"]["state"], folder / "ahead.pt")
    meet()
    echoed.close()
    found["resumed"] = resumed(folder, "whole.pt", (SLOW, QUICK)[rank], AFTER)
    if rank == 0:
        torch.save(found["resumed"]["state"], folder / "resumed.pt")
    found["resumed from ahead"] = resumed(folder, "ahead.pt", QUICK, AFTER)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ranks == 2:
        found = scenarios_of_two(folder, rank)
    else:
        found = {"resumed": resumed(folder, "resumed.pt", (SLOW, QUICK, 2 * QUICK)[rank], AFTER)}
        if rank == 0:
            torch.save(found["resumed"]["state"], folder / "of-three.pt")
    torch.save(found, folder / f"ranks-{ranks}-rank-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ, "start it by torchrun"
    main(Path(sys.argv[1]))
