"""A training program without a line about echoing, for test_run_command.py: ``python run_command_program.py FOLDER WHAT``.

It writes the examples of each batch on each rank, and which callbacks the Trainers had.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

if os.environ.get("TEST_PACKAGE") == "pytorch_lightning":
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl  # type: ignore[no-redef]
from torch import Tensor
from torch.utils.data import DataLoader

LENGTH, BATCH, EPOCHS = 48, 4, 2


class Model(pl.LightningModule):
    """Writes what it is trained on."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layer, self.path = torch.nn.Linear(1, 1), path

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with open(f"{self.path}-{self.trainer.global_rank}", "a", encoding="utf-8") as file:
            file.write(json.dumps(batch.flatten().tolist()) + "\n")
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)

    def train_dataloader(self) -> DataLoader[Any]:
        data = [torch.tensor([float(number)]) for number in range(LENGTH)]
        return DataLoader(data, BATCH, shuffle=True)  # type: ignore[arg-type]  # torch takes any sequence


def trainer(folder: str, callbacks: Any = None, **options: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=pl.loggers.CSVLogger(folder, name="", version=""),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=folder,
        **{"enable_checkpointing": False, **options},
    )


def main(folder: str, what: str) -> None:
    pl.seed_everything(7, verbose=False)
    model = Model(f"{folder}/batches")
    if what == "fails":
        raise ValueError("the program's own error")
    if what == "no Trainer":
        sys.exit(3)
    callbacks: list[Any] = []
    if what == "one list":
        callbacks.append(pl.Callback())  # Lightning does not take over an empty list
    if what == "own callback":
        from lightning_echo import EchoCallback

        callbacks.append(EchoCallback(factor=3))
    strategies = {"ddp": {"strategy": "ddp", "devices": 2}, "spawn": {"strategy": "ddp_spawn", "devices": 2}}
    run = trainer(folder, callbacks, **strategies.get(what, {"devices": 1} if "WORLD_SIZE" not in os.environ else {"devices": 2}))
    if what == "no fit":
        return
    second = None
    if what in ("one list", "two Trainers"):
        second = trainer(f"{folder}/second", callbacks if what == "one list" else [])
    run.fit(model)
    if second is not None:
        second.fit(Model(f"{folder}/second-batches"))
    if what == "saves":
        run.save_checkpoint(f"{folder}/saved.ckpt")
    names = [[type(callback).__name__ for callback in each.callbacks] for each in (run, second) if each is not None]
    print(json.dumps({"main": __name__, "argv": sys.argv[1:], "callbacks": names}))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
