"""Sharing with the workers of all: k trainings with two workers each, behind a source that sleeps.

The reader has as many workers as the trainings ask for together (``workers="sum"``), so each of them should get examples k times
as fast as one that shares alone with its two workers. What is read should not grow: one read for each example that a training
gets. These rules were fixed before the first run:

* The source sleeps 20 ms an example, of 150 KB. So two cores are enough for eight workers and four trainings.
* k = 1, 2, 4 in turn, several rounds. A run has 64 k batches of 32 examples for each training (``--quick``: 16 k), after a few to
  warm up, so that all runs take about the same time.
* The rate of a run is that of the slowest of its trainings. It is divided by that of k = 1 in the same round. The median of the
  rounds must be at least 0.9 k.
* Reads are counted by the data set, while the trainings are measured, and divided by the examples that one training gets. The
  median must be at most 1.1.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from report import Table, progress, verdict
from sharing import _run, in_own_folder
from workloads import BATCH_SIZE, IMAGE_BYTES, WORKERS, Images

_SLEEP_SECONDS = 0.02
_TRAININGS = (1, 2, 4)
_LEAST, _MOST_READS = 0.9, 1.1
_COLUMNS = ("k", "workers", "examples/s", "of k = 1", "lowest", "highest", "required", "reads per example", "at most", "passed")


class Counted(Images):
    """Each read adds a byte to a file, whichever process reads."""

    def __init__(self, path: str, sleep_seconds: float) -> None:
        super().__init__(sleep_seconds=sleep_seconds)
        self.path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        os.close(file)
        return super().__getitem__(index)


class Round(NamedTuple):
    """A run: the rate of the slowest training, in examples/s, and the reads for each example that one of them got."""

    rate: float
    reads: float


@in_own_folder
def sharing_workers(quick: bool) -> Table:
    rounds, batches = (1, 16) if quick else (3, 64)
    found: dict[int, list[Round]] = {count: [] for count in _TRAININGS}
    for number in range(rounds):
        for count in _TRAININGS:
            progress(f"sharing, workers of all, round {number + 1}: k = {count}")
            found[count].append(_round(count, batches * count))
    text = (
        f"k trainings with {WORKERS} workers each, batch {BATCH_SIZE}, examples of {IMAGE_BYTES:,} bytes; a source that sleeps "
        f"{1e3 * _SLEEP_SECONDS:g} ms; examples/s of the slowest of the k, and divided by those of one that shares alone; reads "
        "divided by the examples of a training; medians of the rounds"
    )
    return Table("sharing_workers", text, _COLUMNS, rows_of(found))


def rows_of(found: Mapping[int, Sequence[Round]]) -> list[tuple[Any, ...]]:
    """Returns the rows of the table, from the rounds of each number of trainings."""
    rows = []
    for count, several in found.items():
        ratios = sorted(mine.rate / alone.rate for mine, alone in zip(several, found[1], strict=True))
        ratio, reads = statistics.median(ratios), statistics.median(each.reads for each in several)
        passed = ratio >= _LEAST * count and reads <= _MOST_READS
        rate = statistics.median(each.rate for each in several)
        spread = (ratio, ratios[0], ratios[-1], f">= {_LEAST * count:g}")
        rows.append((count, WORKERS * count, rate, *spread, reads, f"<= {_MOST_READS}", verdict(passed)))
    return rows


def _round(count: int, batches: int) -> Round:
    with tempfile.NamedTemporaryFile() as file:
        dataset, before = Counted(file.name, _SLEEP_SECONDS), list[int]()

        def reads() -> int:
            return os.stat(file.name).st_size

        runs = _run(
            *(count, WORKERS, batches),
            shares=True,
            dataset=dataset,
            reader_workers="sum",
            begin=lambda: before.append(reads()),
            look=lambda trainings, reader: before.append(reads()),
        )
    examples = batches * BATCH_SIZE
    return Round(min(examples / seconds for seconds, _ in runs), (before[1] - before[0]) / examples)
