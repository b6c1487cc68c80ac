"""A training program without a line about echoing, for test_run_tune.py: ``python run_tune_program.py FOLDER WHAT``.

It writes the examples that each of its own trainings sees, in their order. An analysis trains copies, which write nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sized
from pathlib import Path
from threading import Lock
from typing import Any

import lightning.pytorch as pl
import torch
from run_command_program import trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

LENGTH, BATCH, READ_SECONDS = 160, 4, 0.004


class Sleeping(Dataset[Tensor], Sized):
    """Reads of so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.tensor([float(index)])


class Loaded(Sleeping):
    """A cache can hold what ``load`` returns."""

    def load(self, index: int) -> Tensor:
        return super().__getitem__(index)

    def augment(self, example: Tensor) -> Tensor:
        return example

    def __getitem__(self, index: int) -> Tensor:
        return self.augment(self.load(index))


class Batches:
    """A loader of the user's own kind."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(BATCH, 1)] * (LENGTH // BATCH))


class Model(pl.LightningModule):
    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.layer, self.loader = torch.nn.Linear(1, 1), loader
        self.seen: dict[int, list[list[float]]] = {}  # by Trainer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = torch.cat(list(batch.values())) if isinstance(batch, dict) else batch
        self.seen.setdefault(id(self.trainer), []).append(batch.flatten().tolist())
        loss: Tensor = self.layer(batch + torch.rand(1)).sum()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Validates nothing: only its loader counts."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


class Asked(Model):
    def train_dataloader(self) -> Any:
        return self.loader


class Needy(Model):
    """Its steps need what a trial lacks."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert isinstance(self.trainer.datamodule.loader, DataLoader)  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


class Uncopied(Model):
    def on_fit_start(self) -> None:
        self.lock = Lock()  # it cannot be copied


class Data(pl.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


class Transferring(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def main(folder: str, what: str) -> None:
    pl.seed_everything(7, verbose=False)
    seconds = 0.0 if "fast" in what else READ_SECONDS
    data = (Loaded if "loaded" in what else Sleeping)(seconds)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=0 if "fast" in what else 1)
    run = trainer(folder, devices=1, **({"strategy": "ddp"} if "ddp" in what else {}))
    if "once" in what:
        run.fit_loop.max_epochs = 1
    loader = {"one": loader, "other": loader} if "several" in what else loader
    plain = Needy() if "needs" in what else Uncopied() if "lock" in what else Model()
    model, given = (Asked(loader), None) if "asked" in what else (plain, loader)
    if "module" in what:
        run.fit(model, datamodule=Transferring(loader) if "transfer" in what else Data(loader))
    elif "resumes" in what:
        run.fit(model, given, ckpt_path=f"{folder}/saved.ckpt")
    elif "own loader" in what:
        run.fit(model, Batches())
    elif "validates" in what:  # the Trainer asks for this loader first
        run.fit(model, given, val_dataloaders=DataLoader(Sleeping(0.0), BATCH))
    else:
        run.fit(model, given)
    if "saves" in what:
        run.save_checkpoint(f"{folder}/saved.ckpt")
    if "twice" in what:
        trainer(f"{folder}/second", devices=1).fit(Model(), loader)
    if "analyzes" in what:
        from lightning_echo import StallAnalyzer

        StallAnalyzer(Model(), loader, trainer_kwargs={"accelerator": "cpu"}, say=str).run(8, 5)
    facts = {
        "seen": model.seen.get(id(run), []),
        "weight": model.layer.weight.item(),
        "workers": getattr(loader, "num_workers", None),
        "trainers": len(model.seen),
        "drawn": torch.rand(1).item(),
    }
    Path(folder, "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
