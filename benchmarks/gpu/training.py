"""The training that all stages measure: a ResNet in bf16, and the clock beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as F
from trainer import be_quiet, quiet_trainer

from gpu.busy import idle_share, kernel_intervals
from gpu.images import CLASSES
from gpu.setting import Setting

__all__ = ["Classifier", "DecodesOnDevice", "EpochClock", "Repeated", "loader_of", "random_batch", "trainer_of"]


class Classifier(pl.LightningModule):
    """Batches are images (B, 3, H, W), uint8, and labels (B,), int64.

    Args:
        network: A name of torchvision's, or ``"tiny"``.
        learning_rate: Of SGD with momentum 0.9, constant after a linear warm-up.
        warm_up_steps: Of the rate.
    """

    def __init__(self, network: str, learning_rate: float = 0.01, warm_up_steps: int = 20) -> None:
        super().__init__()
        self.network = _network(network).to(memory_format=torch.channels_last)
        self.learning_rate, self.warm_up_steps = learning_rate, warm_up_steps

    def forward(self, images: Tensor) -> Tensor:
        scaled = images.to(memory_format=torch.channels_last).float() / 127.5 - 1
        return self.network(scaled)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=5e-4)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warm_up_steps))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


class DecodesOnDevice(Classifier):
    """The same, fed with the bytes of files: decoded, resized, cropped and flipped on the device.

    Batches are the bytes of all files in a row, (N,), uint8, their lengths, (B,), and labels. All images must have the same size:
    the device resizes them together, which is more than many data sets allow.

    Args:
        network: As of `Classifier`.
        resize: Pixels of the shorter edge.
        crop: Pixels of an edge of what is trained on.
    """

    def __init__(self, network: str, resize: int, crop: int) -> None:
        super().__init__(network)
        self.resize, self.crop = resize, crop

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        content, lengths, labels = batch
        files = list(content.split(lengths.tolist()))  # the decoder wants them on the host
        decoded = torchvision.io.decode_jpeg(files, mode=torchvision.io.ImageReadMode.RGB, device=device)
        images = F.resize(torch.stack(decoded), [self.resize], antialias=True)
        return self._cropped(images), labels.to(device, non_blocking=True)

    def _cropped(self, images: Tensor) -> Tensor:
        """Each image at a place of its own, and half of them flipped."""
        count, _, height, width = images.shape
        at = images.device
        rows = torch.randint(height - self.crop + 1, (count, 1), device=at) + torch.arange(self.crop, device=at)
        columns = torch.randint(width - self.crop + 1, (count, 1), device=at) + torch.arange(self.crop, device=at)
        columns = torch.where(torch.rand(count, 1, device=at) < 0.5, columns, columns.flip(1))
        each = torch.arange(count, device=at)[:, None, None]
        # Indices beside the slice come first in the result: (B, H, W, 3).
        return images[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Encoded(Dataset[tuple[bytes, int]]):
    """The bytes of files, and labels.

    Args:
        samples: Paths and labels.
    """

    def __init__(self, samples: Sequence[tuple[str, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, label = self.samples[index]
        return Path(path).read_bytes(), label

    @staticmethod
    def collate(examples: Sequence[tuple[bytes, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """One tensor for all files: a tensor each would cost a shared-memory segment each on the way to the training."""
        content = torch.frombuffer(bytearray(b"".join(file for file, _ in examples)), dtype=torch.uint8)
        return content, torch.tensor([len(file) for file, _ in examples]), torch.tensor([label for _, label in examples])


class EpochClock(pl.Callback):
    """When each epoch ended on the device; profiles one epoch, from its first batch's arrival on.

    Args:
        profiled_epoch: Its number; None: none is profiled.

    Attributes:
        ends: Seconds, by epoch.
        without_kernel: Share of the profiled time; None if it is not known.
    """

    def __init__(self, profiled_epoch: int | None = None) -> None:
        self.ends: list[float] = []
        self.without_kernel: float | None = None
        self._profiled_epoch = profiled_epoch
        self._profile: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self._profiled_epoch and batch_idx == 0:
            synchronize(pl_module.device)
            on_device = pl_module.device.type == "cuda"
            kinds = torch.profiler.ProfilerActivity
            self._profile = torch.profiler.profile(activities=[kinds.CUDA if on_device else kinds.CPU])
            self._profile.start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        synchronize(pl_module.device)
        self.ends.append(time.perf_counter())
        if self._profile is not None:
            self._profile.stop()
            intervals = kernel_intervals(self._profile)
            self.without_kernel = idle_share(intervals) if intervals else None
            self._profile = None


class Repeated:
    """One batch, again and again.

    Args:
        batch: On the device, so that nothing has to be copied.
        steps: Of an epoch.
    """

    def __init__(self, batch: Any, steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Any:
        return iter([self._batch] * self._steps)


def random_batch(setting: Setting) -> list[Tensor]:
    """Images and labels on the device."""
    scale = setting.scale
    shape = (scale.batch_size, 3, scale.crop, scale.crop)
    images = torch.randint(256, shape, dtype=torch.uint8, device=setting.device)
    return [images, torch.randint(len(CLASSES), shape[:1], device=setting.device)]


def loader_of(setting: Setting, data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """A plain shuffled loader as a careful user writes it."""
    usual = {"shuffle": True, "drop_last": True, "num_workers": setting.workers, "pin_memory": setting.device == "cuda"}
    usual["persistent_workers"] = True
    return DataLoader(data, setting.scale.batch_size, **{**usual, **options})


def trainer_of(setting: Setting, callbacks: Sequence[pl.Callback], **options: Any) -> pl.Trainer:
    """A quiet Trainer in bf16 on the run's device."""
    be_quiet()
    if setting.is_tiny:
        torch.set_num_threads(1)  # threads of so small a network wait for each other
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    accelerator = "gpu" if setting.device == "cuda" else "cpu"
    usual = {"accelerator": accelerator, "devices": 1, "precision": "bf16-mixed"}
    return quiet_trainer(list(callbacks), **{**usual, **options})


def synchronize(device: torch.device | str) -> None:
    """Waits for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _network(name: str) -> nn.Module:
    if name == "tiny":
        convolution = nn.Conv2d(3, 8, 3, stride=4)
        return nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, len(CLASSES)))
    return torchvision.models.get_model(name, weights=None, num_classes=len(CLASSES))
