"""What the tests of collections share: a data module with several loaders, a model that remembers each one's batches."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from trainer_runs import Batch, Data, Recorder, Scans

from lightning_echo import EchoDataModule, EchoLoader
from lightning_echo.plan.plan import named_seed
from lightning_echo.training.loaders import leaves_of, parts_at_leaves

LENGTHS = {"long": 22, "short": 10}  # examples; in batches of 4: 6 and 3
FACTOR, POINT, SEED = 2.5, "after_augmentation", 7


def plain_loader(name: str, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Scans(LENGTHS[name]), 4, shuffle=True, num_workers=workers)


class Several(Data):
    """A data module with two loaders. ``kind``: a type in words, ``"nested"``, or a mode of ``CombinedLoader``."""

    def __init__(self, kind: str = "dict", workers: int = 0) -> None:
        super().__init__(workers)
        self.kind = kind

    def train_dataloader(self) -> Any:
        self.asked["train"] += 1
        long, short = plain_loader("long", self.workers), plain_loader("short", self.workers)
        if self.kind in ("list", "tuple"):
            return [long, short] if self.kind == "list" else (long, short)
        if self.kind == "nested":
            return {"a": [long], "b": {"c": (short,)}}
        loaders = {"long": long, "short": short}
        return loaders if self.kind == "dict" else CombinedLoader(loaders, self.kind)  # type: ignore[arg-type]


class SeveralRecorder(Recorder):
    """Remembers for each step and each loader, in the collection's order, the batch that came, or None."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        loaders = self.trainer.train_dataloader
        self.names = list(leaves_of(loaders))
        self.containers = type(batch), type(loaders)
        parts = parts_at_leaves(loaders, batch)
        assert len(parts) == len(self.names)
        self.batches.append(tuple(None if part is None else seen(part) for part in parts))  # type: ignore[arg-type]
        self.epochs.append(self.current_epoch)
        return sum(self.loss(part) for part in parts if part is not None)

    def of(self, position: int) -> list[Batch]:
        """All batches of one loader."""
        return [step[position] for step in self.batches if step[position] is not None]  # type: ignore[misc]


def seen(batch: Any) -> Batch:
    return tuple(batch["index"].tolist()), tuple(map(tuple, batch["noise"].tolist()))


def echoed(kind: str = "dict", *, workers: int = 0, point: str = POINT, **options: Any) -> EchoDataModule:
    if "loaders" in options:
        return EchoDataModule(Several(kind, workers), **options)
    return EchoDataModule(Several(kind, workers), **{"factor": FACTOR, "insertion_point": point, "seed": SEED, **options})


def alone(length: str, name: str, batches: int, *, factor: float = FACTOR, point: str = POINT, seed: int = SEED) -> list[Batch]:
    """What an `EchoLoader` around one of the loaders delivers by itself, with the seed that its name gives it."""
    loader = EchoLoader(plain_loader(length), factor, insertion_point=point, seed=named_seed(seed, name))
    found: list[Batch] = []
    with torch.random.fork_rng(devices=[]):
        while len(found) < batches:
            found += map(seen, loader)
    return found[:batches]
