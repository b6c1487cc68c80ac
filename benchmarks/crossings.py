"""How often the thread that trains goes from one file of the package to another, for each batch, while a run is under way."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from report import Table, progress, verdict
from torch.utils.data import DataLoader

import lightning_echo
from lightning_echo import EchoLoader, InsertionPoint

_PACKAGE = str(Path(lightning_echo.__file__).parent)
_MOST = 8  # for a loader with workers
_WARM_UP, _BATCHES = 40, 40
_STEP_SECONDS = 0.01  # of a training that leaves the fetching to the thread
_POINTS = (InsertionPoint.after_augmentation, InsertionPoint.after_batching)


def crossings(quick: bool) -> Table:
    del quick  # it is counted, not timed
    progress("files that a batch passes")
    rows = []
    for point in _POINTS:
        for workers in (2, 0):
            most, files = _walk(point, workers)
            judged = (_MOST, verdict(most <= _MOST)) if workers else ("", "")  # without, all is done in the one thread
            rows.append((point.value, workers, most, len(files), " ".join(files), *judged))
    text = f"calls and returns from file to file in the training's thread, the most of {_BATCHES} batches at factor 2"
    columns = ("point", "workers", "crossings", "files", "which", "required", "passed")
    return Table("crossings", text, columns, rows)


def _walk(point: InsertionPoint, workers: int) -> tuple[int, list[str]]:
    """The most crossings of a batch, and the files that are passed."""
    loader = EchoLoader(DataLoader(range(10_000), 4, num_workers=workers), 2, insertion_point=point, seed=0)  # type: ignore[arg-type]
    batches = iter(loader)
    walks = []
    gc.collect()
    gc.disable()  # a loader of before that is collected meanwhile ends its generators in whatever thread runs just then
    try:
        for number in range(_WARM_UP + _BATCHES):
            time.sleep(_STEP_SECONDS)
            walk = Walk(batches)
            if number >= _WARM_UP:
                walks.append(walk)
    finally:
        gc.enable()
    loader.close()
    return max(walk.crossings for walk in walks), sorted({file for walk in walks for file in walk.files})


class Walk:
    """The way of one batch.

    Args:
        batches: Asked for the next one.

    Attributes:
        crossings: Calls and returns from one file of the package to another.
        files: Those that were passed.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self.crossings, self.files = 0, set[str]()
        self._stack: list[str] = []
        sys.setprofile(self._note)
        try:
            next(batches)
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(_PACKAGE):
            return
        file = name[len(_PACKAGE) + 1 :]
        self.files.add(file)
        if event == "call":
            self.crossings += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
        elif self._stack:
            self._stack.pop()
            self.crossings += bool(self._stack) and self._stack[-1] != file
