"""What `TargetIdle` finds from factor 1 on, against the smallest constant factor that is measured to be enough.

`target_idle_out_of_reach`: what comes after the insertion point takes longer than a step, so that no factor is enough. These
rules were fixed before the first run: the last epoch of `TargetIdle`, and that of echo on demand (``factor="auto"``), may take at
most 1.15 times as long as that of the better one of the constant factors 4 and 8 at the same point. The arms take turns.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from report import Cell, Table, progress, verdict
from timing import WARM_UP_BATCHES
from torch.utils.data import DataLoader
from trainer import SleepingModel, fit
from workloads import BATCH_SIZE, WORKERS, Sleeping, loader, sleep_for

from lightning_echo import EchoCallback, EchoLoader, InsertionPoint, TargetIdle

_POINTS = (InsertionPoint.before_augmentation, InsertionPoint.after_augmentation, InsertionPoint.after_batching)
_TARGET, _STEP_SECONDS, _MAX_FACTOR = 0.05, 0.008, 8.0


def target_idle(quick: bool) -> Table:
    steps = 100 if quick else 250
    rows = []
    for ratio in (1.5, 3.0, 6.0):
        for point in _POINTS:
            progress(f"TargetIdle, R = {ratio:g}, {point.value}")
            reports = _run(ratio, point, 1, steps, epochs=4, controlled=True)
            factors = [report.factor for report in reports]
            idle = [report.idle_fraction for report in reports]
            ideal = _ideal(ratio, point, steps)
            found, left = factors[-1], idle[-1]
            decisions = sum(before != after for before, after in pairwise(factors))
            passed = left is not None and left < _TARGET and abs(found / ideal - 1) <= 0.1 and decisions <= 2
            shares = (idle[0] or 0.0, left or 0.0)
            rows.append((ratio, point.value, found, decisions, *shares, ideal, found / ideal, verdict(passed)))
    text = (
        f"step {_STEP_SECONDS * 1e3:g} ms, batch {BATCH_SIZE}, {WORKERS} workers, target {_TARGET:g}, "
        f"max_factor {_MAX_FACTOR:g}, 4 epochs of {steps} steps; ideal: smallest of a 4% grid with idle under target"
    )
    columns = ("R", "point", "factor", "decisions", "idle at 1", "idle at the end", "ideal", "factor / ideal", "passed")
    return Table("target_idle", text, columns, rows)


def _ideal(ratio: float, point: InsertionPoint, steps: int) -> float:
    factor = 0.8 * ratio
    while (idle := _run(ratio, point, factor, steps, epochs=2)[-1].idle_fraction) is None or idle >= _TARGET:
        factor *= 1.04
    return factor


def _run(ratio: float, point: InsertionPoint, factor: float, steps: int, epochs: int, *, controlled: bool = False) -> list:
    per_example = sleep_for(ratio * _STEP_SECONDS * WORKERS / BATCH_SIZE)
    dataset = Sleeping(per_example, length=max(steps, WARM_UP_BATCHES) * BATCH_SIZE)
    echoed = EchoLoader(loader(dataset), max(factor, 1.0), insertion_point=point, seed=0)
    callback = EchoCallback(TargetIdle(_TARGET, max_factor=_MAX_FACTOR) if controlled else None, summary=False)
    fit(SleepingModel(sleep_for(_STEP_SECONDS)), echoed, [callback], max_epochs=epochs)
    return callback.reports


# ---------------------------------------------------------------------- out of reach

_OUT_OF_REACH_STEP, _READ, _AUGMENT = 0.010, 0.020, 0.002  # seconds
_SMALL_BATCH = 16
_MOST_OF_BEST = 1.15
_JPEG_SIDE = 448  # pixels of a square
_ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "factor 4": {"factor": 4},
    "factor 8": {"factor": 8},
    "TargetIdle": {"controller": TargetIdle()},
    "auto": {"factor": "auto"},
    "after augmentation, factor 8": {"factor": 8, "insertion_point": "after_augmentation"},
}


class _Timed(SleepingModel):
    """Notes when its steps end."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.ends: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.ends.append(time.perf_counter())


class _SlowTransform:
    def __init__(self) -> None:
        self.seconds = sleep_for(_AUGMENT)

    def __call__(self, image: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.rand(3, 8, 8)


def _slow_image(path: str, seconds: float) -> Any:
    from PIL import Image

    time.sleep(seconds)
    return Image.open(path).convert("RGB")


def _folder(folder: str, files: int, side: int) -> str:
    """Returns a folder of two classes of JPEG files."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    for number in range(files):
        path = Path(folder, "ab"[number % 2], f"{number}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = drawn.integers(0, 255, (max(side // 8, 1), max(side // 8, 1), 3), np.uint8)
        Image.fromarray(coarse).resize((side, side)).save(path, quality=90)
    return folder


def target_idle_out_of_reach(quick: bool) -> Table:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps, rounds = (20, 1) if quick else (40, 2)
    rows: list[tuple[Cell, ...]] = []
    crops = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        _folder(small, steps * _SMALL_BATCH, 16), _folder(large, steps * _SMALL_BATCH, _JPEG_SIDE)
        sources: dict[str, Any] = {
            "sleeping": ImageFolder(small, _SlowTransform(), loader=partial(_slow_image, seconds=sleep_for(_READ))),
            "JPEG files": ImageFolder(large, v2.Compose(crops)),
        }
        for source, dataset in sources.items():
            found: dict[str, list[float]] = {name: [] for name in _ARMS}
            uses: dict[str, float] = {}
            for number in range(rounds):
                for name, options in _ARMS.items():
                    progress(f"out of reach, {source}, round {number + 1}, {name}")
                    seconds, uses[name] = _last_epoch(dataset, options, steps)
                    found[name].append(1e3 * seconds)
            of = {name: median(each) for name, each in found.items()}
            best = min(of["factor 4"], of["factor 8"])
            ratios = [of[name] / best for name in ("TargetIdle", "auto")]
            passed = verdict(max(ratios) <= _MOST_OF_BEST)
            rows.append((source, *of.values(), uses["TargetIdle"], uses["auto"], *ratios, _MOST_OF_BEST, passed))
    text = (
        f"ms a step in the last of 3 epochs of {steps} steps; batch {_SMALL_BATCH}, {WORKERS} workers, a step of "
        f"{_OUT_OF_REACH_STEP * 1e3:g} ms; sleeping: reading {_READ * 1e3:g} ms, augmenting {_AUGMENT * 1e3:g} ms an example"
    )
    columns = (
        *("source", *(f"{name}, ms" for name in _ARMS), "uses, TargetIdle", "uses, auto"),
        *("TargetIdle / best factor", "auto / best factor", "required", "passed"),
    )
    return Table("target_idle_out_of_reach", text, columns, rows)


def _last_epoch(dataset: Any, options: dict[str, Any] | None, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step in the last of three epochs, and its uses per fresh example."""
    model = _Timed(sleep_for(_OUT_OF_REACH_STEP))
    callback = None if options is None else EchoCallback(summary=False, **options)
    plain = DataLoader(dataset, _SMALL_BATCH, shuffle=True, num_workers=WORKERS)
    fit(model, plain, [] if callback is None else [callback], max_epochs=3)
    ends = model.ends[-steps:]
    report = None if callback is None else callback.reports[-1]
    return (ends[-1] - ends[0]) / (len(ends) - 1), 1.0 if report is None else report.effective_factor or 1.0
