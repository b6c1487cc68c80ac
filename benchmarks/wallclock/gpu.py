"""ResNet-50 on a GPU, fed with JPEG files: images per second with and without echoing, against the bound; idle time twice.

bf16 autocast, channels last, real decoding and ``RandomResizedCrop``; the files are made on the machine. For R of about 2, 4 and
6 the number of workers is chosen from what a batch costs one of them and what a step takes; R as measured is a column. Images
per second are those of a second epoch (the first fills queues and buffer). The bound is that of the cost model, from the costs of
the stages (`PipelineCosts`). A further run of the same goes under ``torch.profiler``: the share of time without a kernel running,
beside the idle fraction that `EchoCallback` measures in the same epoch.

    PYTHONPATH=. python3 benchmarks/wallclock/gpu.py

Without a GPU it says so and ends. ``--device cpu --tiny`` runs all of it on a processor, to see that it works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_BENCHMARKS))

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import torchvision  # noqa: E402
from report import Table, machine, progress  # noqa: E402
from timing import seconds_per_batch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler, default_collate  # noqa: E402
from trainer import Ready, be_quiet, quiet_trainer  # noqa: E402

from lightning_echo import EchoCallback, EchoDataModule  # noqa: E402
from lightning_echo.measuring.cost import PipelineCosts  # noqa: E402
from wallclock.busy import idle_share, kernel_intervals  # noqa: E402
from wallclock.jpegs import Jpegs, write_jpegs  # noqa: E402

_NO_ECHO = "no echo"
_POINTS = ("before_augmentation", "after_batching", "after_transfer")


_SMALL = "one convolution"


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    network: str
    batch_size: int
    files: int
    width: int
    height: int
    crop: int
    steps: int  # in an epoch
    ratios: tuple[float, ...]


_FULL = Scale("resnet50", 128, 4000, 500, 375, 224, 120, (2.0, 4.0, 6.0))
_TINY = Scale(_SMALL, 4, 16, 60, 45, 32, 6, (2.0,))


class Classifier(pl.LightningModule):
    """Batches are images (B, 3, H, W), uint8, and labels (B,)."""

    def __init__(self, network: str) -> None:
        super().__init__()
        self.network = _network(network).to(memory_format=torch.channels_last)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        scaled = images.to(memory_format=torch.channels_last).float() / 255
        return nn.functional.cross_entropy(self.network(scaled), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class SecondEpoch(pl.Callback):
    """Times the second epoch, from its first batch's arrival to its last step's end on the device.

    Args:
        is_profiled: Whether ``torch.profiler`` runs meanwhile.
    """

    def __init__(self, is_profiled: bool = False) -> None:
        self._profile = torch.profiler.profile() if is_profiled else None
        self.seconds = 0.0
        self.idle = float("nan")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0:
            _synchronize(pl_module)
            if self._profile is not None:
                self._profile.start()
            self.seconds = -time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            _synchronize(pl_module)
            self.seconds += time.perf_counter()
            if self._profile is not None:
                self._profile.stop()
                self.idle = idle_share(kernel_intervals(self._profile))


class Experiment:
    """All measurements at one scale on one device."""

    def __init__(self, scale: Scale, device: str, folder: Path) -> None:
        self._scale, self._device = scale, device
        progress(f"{scale.files} JPEG files of {scale.width} x {scale.height}")
        self._data = Jpegs(write_jpegs(folder, scale.files, scale.width, scale.height), scale.crop)

    def rows(self) -> list[tuple[Any, ...]]:
        """For each R: without echoing, then at each point."""
        source, rest, collate = self._stages()
        progress("a step alone")
        step = self._run(Ready(self._scale.steps, self._ready())).seconds / self._scale.steps
        costs = PipelineCosts("before_augmentation", source, rest, collate, device_seconds=step, workers=1)
        wanted = {
            max(1, min(round(costs.host_seconds(1) / (ratio * step)), (os.cpu_count() or 2) - 1)) for ratio in self._scale.ratios
        }
        return [row for workers in sorted(wanted, reverse=True) for row in self._at(workers, costs)]

    def _at(self, workers: int, alone: PipelineCosts) -> list[tuple[Any, ...]]:
        """With so many workers; what they are slower by than one alone is known from their time for a batch."""
        progress(f"{workers} workers: a batch")
        upstream = seconds_per_batch(self._loader(workers), self._scale.steps)
        ratio = upstream / alone.device_seconds
        factor = max(round(ratio, 2), 1.0)
        rows, plain = [], 0.0
        for point in (_NO_ECHO, *_POINTS):
            costs = PipelineCosts(
                _POINTS[0] if point == _NO_ECHO else point,
                alone.source_seconds,
                alone.rest_seconds,
                alone.collate_seconds,
                device_seconds=alone.device_seconds,
                workers=workers,
            )
            costs = costs.slower(upstream / costs.host_seconds(1))
            uses = 1.0 if point == _NO_ECHO else factor
            progress(f"{workers} workers, R = {ratio:.3g}: {point}")
            echo = EchoCallback(summary=False)
            timed = self._run(self._data_of(point, uses, workers)).seconds
            profiled = self._run(self._data_of(point, uses, workers), echo, is_profiled=True)
            images = self._scale.batch_size * self._scale.steps / timed
            plain = plain or images
            bound, idle = costs.speedup(uses), echo.reports[1].idle_fraction
            shares = (images / plain, bound, images / plain / bound)
            rows.append((workers, ratio, point, uses, images, *shares, float("nan") if idle is None else idle, profiled.idle))
        return rows

    def _data_of(self, point: str, factor: float, workers: int) -> EchoDataModule:
        first = _POINTS[0] if point == _NO_ECHO else point
        return EchoDataModule.from_dataloaders(self._loader(workers), factor=factor, insertion_point=first, seed=0)

    def _run(self, data: Any, echo: EchoCallback | None = None, *, is_profiled: bool = False) -> SecondEpoch:
        clock = SecondEpoch(is_profiled)
        options = {"accelerator": self._device, "devices": 1, "precision": "bf16-mixed", "limit_train_batches": self._scale.steps}
        trainer = quiet_trainer([clock] if echo is None else [echo, clock], max_epochs=2, **options)
        trainer.fit(
            Classifier(self._scale.network), **{"datamodule" if isinstance(data, EchoDataModule) else "train_dataloaders": data}
        )
        return clock

    def _loader(self, workers: int) -> DataLoader[Any]:
        size = self._scale.batch_size
        endless = RandomSampler(self._data, replacement=True, num_samples=10_000 * size)
        return DataLoader(self._data, size, sampler=endless, num_workers=workers, pin_memory=self._device != "cpu")

    def _ready(self) -> list[Any]:
        batch = default_collate([self._data[i % len(self._data)] for i in range(self._scale.batch_size)])
        return [[part.pin_memory() for part in batch] if self._device != "cpu" else batch]

    def _stages(self) -> tuple[float, float, float]:
        """Source, rest and collate of a batch, seconds, in one process."""
        size = self._scale.batch_size
        progress("reading, augmenting and collating alone")

        def median(call: Callable[[int], Any]) -> tuple[float, list[Any]]:
            seconds, results = [], []
            for index in range(size):
                begin = time.perf_counter()
                results.append(call(index))
                seconds.append(time.perf_counter() - begin)
            return size * statistics.median(seconds), results

        source, loaded = median(lambda index: self._data.load(index % len(self._data)))
        rest, examples = median(lambda index: self._data.augment(loaded[index]))
        begin = time.perf_counter()
        default_collate(examples)
        return source, rest, time.perf_counter() - begin


def main() -> int:
    """Measures, prints and writes; without a GPU it says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that the script works")
    parser.add_argument("--tiny", action="store_true", help="a small network and few files: no evidence")
    parser.add_argument("--files", type=Path, default=Path("runs/jpegs"), help="folder for the JPEG files")
    parser.add_argument("--out", type=Path, default=_BENCHMARKS / "results" / "wallclock", help="folder for the CSV files")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No GPU here: nothing was measured. --device cpu --tiny shows that the script works.")
        return 0
    be_quiet()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    load_before, scale = os.getloadavg()[0], _TINY if options.tiny else _FULL
    rows = Experiment(scale, options.device, options.files / f"{scale.width}x{scale.height}").rows()
    columns = ("workers", "R", "point", "factor", "images per second", "speed-up", "bound", "speed-up / bound",
               "idle, EchoCallback", "idle, profiler")  # fmt: skip
    text = (
        f"{scale.network}, batch {scale.batch_size}, bf16, channels last, JPEG {scale.width} x {scale.height}, {options.device}"
    )
    place = machine("--tiny: no evidence" if options.tiny else "none", load_before)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    described = Table(
        "gpu_machine", place.text, place.columns, [("gpu", name), ("torchvision", torchvision.__version__), *place.rows]
    )
    for table in (Table("gpu", text, columns, rows), described):
        table.print()
        table.write(options.out)
    return 0


def _network(name: str) -> nn.Module:
    if name == _SMALL:
        return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000))
    return torchvision.models.get_model(name, weights=None)


def _synchronize(pl_module: pl.LightningModule) -> None:
    if pl_module.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
