"""A program that several processes run: ``python same_program_runs.py FOLDER RANKS`` trains, and writes its verdict there.

Tests run a copy of it, so that no other test runs the same file: it imports nothing that is beside it.
``python same_program_runs.py wait`` stands for another training: it runs until its input ends.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def train(folder: Path, ranks: int) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel
    from torch.utils.data import DataLoader, Dataset

    from lightning_echo import EchoCallback

    class Slow(Dataset[torch.Tensor]):
        """A read takes 10 ms: 40 for a batch, in steps that take a few."""

        def __len__(self) -> int:
            return 160 * ranks

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.01)
            return torch.full((32,), float(index))

    callback = EchoCallback()
    several: dict[str, Any] = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0, "logger": False}
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    fitted = pl.Trainer(**{**options, **quiet, **several}, callbacks=[callback])
    fitted.fit(BoringModel(), DataLoader(Slow(), 4, num_workers=1))
    verdict = callback.verdict
    assert verdict is not None
    found = {"world": fitted.world_size, "said": [verdict.message, verdict.next_line, *verdict.others]}
    (folder / f"{fitted.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        print("runs", flush=True)
        sys.stdin.read()
    else:
        train(Path(sys.argv[1]), int(sys.argv[2]))
