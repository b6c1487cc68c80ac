"""How much of our own code a run calls: at its start, and for each batch in the training's thread.

    python benchmarks/calls.py          # prints a table; compare two states of the repository by running it in both

A call is one of a Python function whose file is in ``lightning_echo/``. Workers and the thread that fetches ahead do not count.
The seconds are those of the start without counting, medians of five runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_echo
from lightning_echo import EchoLoader

PACKAGE = str(Path(lightning_echo.__file__).parent)
SETTINGS: dict[str, dict[str, Any]] = {
    "factor 1": {"factor": 1},
    "factor 4": {"factor": 4, "insertion_point": "after_augmentation"},
    "factor 4, after_batching": {"factor": 4, "insertion_point": "after_batching"},
}
BATCHES, RUNS = 200, 5


class Calls:
    """Counts calls of the package's functions in this thread."""

    def __init__(self) -> None:
        self.total, self.functions = 0, set[Any]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.total += 1
            self.functions.add(frame.f_code)

    def counted(self, function: Callable[[], Any]) -> Any:
        sys.setprofile(self)
        try:
            return function()
        finally:
            sys.setprofile(None)


def loader(options: dict[str, Any], workers: int) -> EchoLoader:
    plain = DataLoader(TensorDataset(torch.arange(3200.0)), batch_size=16, shuffle=True, num_workers=workers)
    return EchoLoader(plain, seed=0, buffer_size=64 if options["factor"] > 1 else None, **options)


def first_batch(options: dict[str, Any], workers: int) -> Any:
    batches = iter(loader(options, workers))
    next(batches)
    return batches


def main() -> None:
    print("| setting | workers | files at start | functions | calls | ms at start | calls per batch |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, options in SETTINGS.items():
        for workers in (0, 2):
            seconds = []
            for _ in range(RUNS):
                began = time.perf_counter()
                first_batch(options, workers)
                seconds.append(time.perf_counter() - began)
            start, steady = Calls(), Calls()
            batches = start.counted(lambda options=options, workers=workers: first_batch(options, workers))
            for _ in range(20):  # the buffer is filled
                next(batches)
            steady.counted(lambda batches=batches: [next(batches) for _ in range(BATCHES - 40)])
            files = {code.co_filename for code in start.functions}
            print(
                f"| {name} | {workers} | {len(files)} | {len(start.functions)} | {start.total} | "
                f"{1e3 * statistics.median(seconds):.0f} | {steady.total / (BATCHES - 40):.1f} |"
            )


if __name__ == "__main__":
    main()
