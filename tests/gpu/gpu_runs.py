"""What the tests on a GPU share: the device, data whose truth is known, a model that remembers, a quiet Trainer, traces.

With ``LIGHTNING_ECHO_GPU_STAND_IN=cpu`` the tests run on the processor, as far as they can: so a machine without a GPU executes
all but a handful of their lines. Those few, which measure CUDA itself, stand after ``if ON_GPU:``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_echo import EchoDataModule

STAND_IN = os.environ.get("LIGHTNING_ECHO_GPU_STAND_IN", "")
if STAND_IN not in ("", "cpu"):
    raise ValueError(f"LIGHTNING_ECHO_GPU_STAND_IN must be cpu, or not be set, got {STAND_IN!r}")
ON_GPU = STAND_IN == ""
DEVICE, ACCELERATOR = ("cuda", "gpu") if ON_GPU else ("cpu", "cpu")

POINTS = ("after_read", "before_augmentation", "after_augmentation", "after_batching", "after_transfer")
EDITED = "lightning_echo: a batch was edited in place on the device"
MS = 1e-3
CLOCKS_UP_SECONDS = 1.0  # after 70 ms of work an H100 was still 13% slower than a second later
T = TypeVar("T")


# ---------------------------------------------------------------------- the device


def is_possible() -> bool:
    """Whether the tests can run: on a GPU, or on the processor in its stead."""
    return not ON_GPU or torch.cuda.is_available()


def synchronize() -> None:
    """Waits until the device has done all that was asked of it."""
    if ON_GPU:
        torch.cuda.synchronize()


def warm_up() -> None:
    """Starts CUDA, cuBLAS and the profiler, which takes seconds."""
    square = torch.ones(2048, 2048, device=DEVICE)
    traced(lambda: (square @ square).sum().item())
    synchronize()


class Load:
    """Work that keeps the device busy, and that the host does not wait for. On the processor there is none.

    Args:
        size: Of the squares that are multiplied. A product of 4,096 takes some three milliseconds, of 2,048 a third of one.
    """

    def __init__(self, size: int = 2048) -> None:
        size = size if ON_GPU else 2
        self._square = torch.ones(size, size, device=DEVICE)
        self._product = torch.empty_like(self._square)

    def queue(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._square, self._square, out=self._product)

    def products_in(self, seconds: float) -> int:
        """How many products take so long, measured between two events. On the processor: one."""
        if not ON_GPU:
            return 1
        until = time.perf_counter() + CLOCKS_UP_SECONDS
        while time.perf_counter() < until:
            self.queue(200)
            torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.queue(200)
        end.record()
        end.synchronize()
        return max(1, round(seconds / (begin.elapsed_time(end) * MS / 200)))


# ---------------------------------------------------------------------- traces


def traced(run: Callable[[], T]) -> tuple[T, list[dict[str, Any]]]:
    """What a function returns, and the events of its trace: of the device and of CUDA's calls, on the processor of operators."""
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as trace:
        found = run()
        synchronize()
    return found, events_of(trace)


def events_of(trace: profile) -> list[dict[str, Any]]:
    """The events of a finished trace that have a beginning and a duration, both in microseconds (``ts``, ``dur``)."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"lightning_echo-trace-{os.getpid()}.json"
    trace.export_chrome_trace(str(path))
    try:
        events = json.loads(path.read_text(errors="replace"), strict=False)["traceEvents"]
    finally:
        path.unlink()
    return [event for event in events if event.get("ph") == "X"]


def copies_to_the_device(events: list[dict[str, Any]], nbytes: int) -> int:
    """How often memory of this size went from the host to the device. Only a trace of CUDA shows it."""
    found = [event for event in events if event["name"].startswith("Memcpy HtoD")]
    return sum(event["args"]["bytes"] == nbytes for event in found)


def device_spans(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When the device worked, in microseconds, in order: kernels, copies and fills. Only a trace of CUDA shows it."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((float(each["ts"]), float(each["ts"]) + float(each["dur"])) for each in events if each.get("cat") in kinds)


# ---------------------------------------------------------------------- loaders


def loader_of(dataset: Any, batch_size: int = 4, workers: int = 0, **options: Any) -> DataLoader[Any]:
    """A shuffled loader with pinned memory, which needs a device."""
    return DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, pin_memory=ON_GPU, **options)


def echoing(loader: Any, factor: float, point: str, **options: Any) -> EchoDataModule:
    return EchoDataModule.from_dataloaders(loader, factor=factor, insertion_point=point, seed=1, **options)


# ---------------------------------------------------------------------- models and Trainers


class Moving(pl.LightningModule):
    """Counts how often it moves a batch to the device. On the processor, a copy stands for the batch on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers = 0

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.transfers += 1
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        if ON_GPU:
            return moved
        return torch.utils._pytree.tree_map(lambda part: part.clone() if isinstance(part, torch.Tensor) else part, moved)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer(**options: Any) -> pl.Trainer:
    """A Trainer on the device that writes and shows nothing, unless told to."""
    quiet: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**quiet, **options})


def warns_of_edits(expected: bool) -> AbstractContextManager[Any]:
    """Expects the warning about batches that were edited in place on the device, or no warning of ours."""
    return pytest.warns(UserWarning, match=EDITED) if expected else nullcontext()
