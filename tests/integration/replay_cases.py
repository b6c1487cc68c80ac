"""Sources whose speed no seed decides, and a training that keeps its batches, for tests of replays."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_echo import EchoLoader, Replay, StagedDataset
from lightning_echo.pipeline.journal import journal_path

LENGTH, BATCH_SIZE, STEPS = 43, 4, 60


def noise() -> list[float]:
    return [torch.rand((), dtype=torch.float64).item(), np.random.rand(), random.random()]


class Waits:
    """A source whose reads take a random time, which no seed decides."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return LENGTH

    def wait(self) -> None:
        time.sleep(self.seconds * random.SystemRandom().random())


class Whole(Waits, Dataset[Any]):
    """Augments in ``__getitem__``: an echo is the example as it was."""

    def __getitem__(self, index: int) -> Any:
        self.wait()
        return torch.tensor([index, *noise()], dtype=torch.float64)


class Called(Whole):
    """Reads several examples in one call. Their noise depends on the call, and they are in memory that is used again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.memory = torch.zeros(LENGTH, 4, dtype=torch.float64)

    def __getitems__(self, indices: list[int]) -> Any:
        self.wait()
        for place, index in enumerate(indices):
            self.memory[place] = torch.tensor([index, *noise()], dtype=torch.float64)
        return [self.memory[place] for place in range(len(indices))]


class Staged(Waits, StagedDataset):
    """Augments each use, also of an echo."""

    def read(self, index: int) -> Any:
        self.wait()
        return str(index).encode()

    def decode(self, raw: Any) -> Any:
        return torch.tensor([float(raw), 0, 0, 0], dtype=torch.float64)

    def augment(self, example: Any) -> Any:
        example[1:] = torch.tensor(noise())
        return example


def trained(echo: EchoLoader, steps: int = STEPS, seconds: float = 0.0, changes: Any = None) -> list[list[list[float]]]:
    """Trains, and closes the loader. ``changes``: factors by the number of the step before which they are set."""
    batches: list[list[list[float]]] = []
    while len(batches) < steps:
        for batch in echo:
            batches.append(batch.tolist())
            batch.fill_(-1)  # a training may edit its batch in place
            if changes and len(batches) in changes:
                echo.set_factor(changes[len(batches)])
            time.sleep(seconds)
            if len(batches) == steps:
                break
    echo.close()
    return batches


def epochs_of(echo: EchoLoader, count: int, seconds: float = 0.0) -> list[list[Any]]:
    """Trains for some epochs, and closes the loader."""
    epochs: list[list[Any]] = []
    for _ in range(count):
        epochs.append([])
        for batch in echo:
            epochs[-1].append(batch.tolist())
            batch.fill_(-1)
            time.sleep(seconds)
    echo.close()
    return epochs


def assert_repeated(seeds: range, loader_of: Any, folder: Path) -> None:
    """Runs that are stopped and resumed anywhere are repeated. ``loader_of(draw)`` returns what makes the loaders of one."""
    resumes = 0
    for seed in seeds:
        draw = random.Random(seed)
        make = loader_of(draw)
        run = Lives(folder / str(seed), draw, make)
        epochs = run.train(4)
        assert epochs_of(make(Replay(run.folder)), 4) == epochs, f"seed {seed}"
        resumes += run.resumes
    assert resumes


class Lives:
    """A run that is saved, stopped and resumed anywhere, in the same folder or in a new one."""

    def __init__(self, folder: Path, draw: random.Random, make: Any) -> None:
        self._folders, self._draw, self._make = folder, draw, make
        self.folder, self.resumes = folder / "0", 0
        self.echo = make("demand", journal=self.folder)
        self.epochs: list[list[Any]] = [[]]
        self.saved: tuple[Any, list[list[Any]]] = self.echo.state_dict(), [[]]

    def train(self, count: int) -> list[list[Any]]:
        while len(self.epochs) <= count:
            batches = iter(self.echo)
            while (batch := next(batches, None)) is not None:
                self.epochs[-1].append(batch.tolist())
                time.sleep(self._draw.choice([0.0, 0.001, 0.004]))
                batches = self._maybe_stopped(batches)
            self.epochs.append([])
            if self._draw.random() < 0.3:
                self._save()
        self.echo.close()
        return self.epochs[:count]

    def _save(self) -> None:
        self.saved = self.echo.state_dict(), [list(epoch) for epoch in self.epochs]

    def _maybe_stopped(self, batches: Any) -> Any:
        chance = self._draw.random()
        if chance < 0.1:
            self._save()
        elif chance < 0.15:
            self.echo.close()
        elif chance < 0.22 and self.resumes < 4:
            self.resumes += 1
            self.echo.close()
            self.folder = self._folders / str(self.resumes) if self._draw.random() < 0.5 else self.folder
            self.echo = self._make("demand", journal=self.folder)
            self.echo.load_state_dict(self.saved[0])
            self.epochs = [list(epoch) for epoch in self.saved[1]]
            return iter(self.echo)
        return batches


def journal_in(folder: Path) -> bytes:
    return Path(journal_path(str(folder), "", 0)).read_bytes()
