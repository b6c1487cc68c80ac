"""What the tests of Hydra put in the place of the example's data: each read leaves a line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from spirals import Spirals, SpiralsDataModule, add_noise
from torch.utils.data import DataLoader


class Noted(Spirals):  # type: ignore[misc]
    """Appends index and process of each read to a file."""

    def __init__(self, path: str) -> None:
        super().__init__(add_noise)
        self.path = path

    def __getitem__(self, index: int) -> Any:
        with Path(self.path).open("a") as file:
            file.write(f"{index} {os.getpid()}\n")
        return super().__getitem__(index)


class NotedDataModule(SpiralsDataModule):  # type: ignore[misc]
    """``path``: the file."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path

    def train_dataloader(self) -> Any:
        return DataLoader(Noted(self.path), batch_size=self.batch_size, num_workers=self.num_workers, shuffle=True)
