"""The same training without and with data echoing, side by side: `make demo`.

The 1,797 scanned digits bundled with scikit-learn are written once as image files, then read through a stated
delay per file, which stands for network storage. Two workers cannot read as fast as the model trains: it
waits. With echoing (`before_augmentation`) each image that was read and decoded is augmented and trained on
`factor` times. Both runs start from the same weights, take the same number of optimizer steps and are
evaluated at the same steps; only the data module differs. The result is one table and one plot.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_echo import EchoDataModule

FILE_PIXELS = 96  # width and height of the image files; the scans themselves are 8 x 8
BATCH_SIZE = 32
WORKERS = 2
QUICK_EPOCHS, QUICK_BATCHES = 2, 4
MEASURED_STEPS = 20
DETERMINISTIC = [v2.Grayscale(), v2.Resize(56)]
RANDOM = [v2.RandomAffine(degrees=15, translate=(0.1, 0.1), scale=(0.8, 1.2), fill=255)]
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
THREADS = 1  # for the model, so that a core is left for the workers
TRAINER = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "enable_model_summary": False}


def write_images(folder: Path) -> None:
    """Write the digits as `folder/train|val/<digit>/<number>.png`, unless that was done before."""
    if folder.exists():
        return
    print(f"Writing the digits as image files to {folder} ...")
    folder.parent.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        for number, (scan, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            gray = np.round(255 - scan * (255 / 16)).astype(np.uint8)  # a scan holds 0 (white) to 16 (black)
            split = "val" if number % 5 == 0 else "train"
            path = Path(unfinished, "images", split, str(digit), f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(gray).resize((FILE_PIXELS, FILE_PIXELS), Image.Resampling.BICUBIC)
            image.save(path)
        Path(unfinished, "images").rename(folder)


def read_image(path: str, delay_seconds: float = 0.0) -> Image.Image:
    """Read and decode one file of a storage that answers after `delay_seconds`."""
    time.sleep(delay_seconds)
    with Image.open(path) as image:
        return image.convert("RGB")


class DigitsDataModule(LightningDataModule):
    """An ordinary data module; only training reads through the delay, so that evaluation is short."""

    def __init__(self, folder: Path, delay_seconds: float) -> None:
        super().__init__()
        self.folder = folder
        self.delay_seconds = delay_seconds

    def prepare_data(self) -> None:
        write_images(self.folder)

    def setup(self, stage: str) -> None:
        self.train_set = ImageFolder(
            str(self.folder / "train"),
            transform=v2.Compose([*DETERMINISTIC, *RANDOM, *TO_TENSOR]),
            loader=partial(read_image, delay_seconds=self.delay_seconds),
        )
        evaluation = v2.Compose([*DETERMINISTIC, *TO_TENSOR])
        self.val_set = ImageFolder(str(self.folder / "val"), transform=evaluation, loader=read_image)

    def train_dataloader(self) -> DataLoader[Any]:
        options = {"num_workers": WORKERS, "persistent_workers": True}
        return DataLoader(self.train_set, BATCH_SIZE, shuffle=True, **options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, 60, num_workers=WORKERS, persistent_workers=True)


class DigitsModel(LightningModule):
    """An ordinary module: a small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self.network(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        is_right = self.network(images).argmax(1) == digits
        self.log("val_accuracy", is_right.float().mean(), prog_bar=True, batch_size=len(digits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Evaluation(NamedTuple):
    """How far a run was when its accuracy was evaluated."""

    seconds: float  # wall-clock time since the start of `fit`, evaluations included
    steps: int
    fresh: int
    delivered: int
    accuracy_percent: float


class Recorder(Callback):
    """Notes how far a run was at each evaluation, and when its steps ended."""

    def __init__(self, echo: EchoDataModule | None = None) -> None:
        self.echo = echo
        self.delivered = 0
        self.step_ends: list[float] = []
        self.evaluations: list[Evaluation] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: list[Tensor], batch_idx: int
    ) -> None:
        self.delivered += len(batch[1])
        self.step_ends.append(time.perf_counter())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.perf_counter() - self.start
        fresh = self.delivered if self.echo is None else self.echo.loader.counts.fresh
        accuracy_percent = 100 * trainer.callback_metrics["val_accuracy"].item()
        so_far = Evaluation(seconds, trainer.global_step, fresh, self.delivered, accuracy_percent)
        self.evaluations.append(so_far)


def timed(function: Callable[[Any], Any], inputs: list[Any]) -> tuple[float, list[Any]]:
    """Median seconds per call, and the results."""
    ticks, results = [time.perf_counter()], []
    for value in inputs:
        results.append(function(value))
        ticks.append(time.perf_counter())
    return statistics.median(end - start for start, end in pairwise(ticks)), results


def measure_bound(datamodule: DigitsDataModule, factor: float) -> float:
    """The bound on the speed-up, from each stage's time for one batch and steps on a batch already there."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    print("Measuring source, rest, collate and step, each alone", flush=True)
    train_set = datamodule.train_set
    load, redo = v2.Compose(DETERMINISTIC), v2.Compose([*RANDOM, *TO_TENSOR])
    files = train_set.samples[:: len(train_set) // BATCH_SIZE][:BATCH_SIZE]
    source, images = timed(lambda file: (load(train_set.loader(file[0])), file[1]), files)
    rest, examples = timed(lambda image: (redo(image[0]), image[1]), images)
    collate, batches = timed(default_collate, [examples] * MEASURED_STEPS)
    clock, loader = Recorder(), DataLoader(batches, batch_size=None)
    trainer = Trainer(max_epochs=1, limit_val_batches=0, callbacks=[clock], logger=False, **TRAINER)
    trainer.fit(DigitsModel(), train_dataloaders=loader, val_dataloaders=loader)
    step = statistics.median(end - start for start, end in pairwise(clock.step_ends))

    def host(factor: float) -> float:
        """Seconds that the workers together need per batch."""
        return (BATCH_SIZE / factor * source + BATCH_SIZE * rest + collate) / WORKERS

    print(f"Source {1000 * source:.1f} ms and rest {1000 * rest:.2f} ms per example,")
    print(f"collate {1000 * collate:.2f} ms and step {1000 * step:.1f} ms per batch of {BATCH_SIZE}.")
    print(f"The workers' time per batch: {host(1) / step:.1f} steps, with echoing {host(factor) / step:.1f}.")
    return max(host(1), step) / max(host(factor), step)


def train(name: str, datamodule: LightningDataModule, args: argparse.Namespace) -> list[Evaluation]:
    """One run. Nothing but `datamodule` differs between the two."""
    print(f"\n{name}", flush=True)
    seed_everything(args.seed, workers=True)
    recorder = Recorder(datamodule if isinstance(datamodule, EchoDataModule) else None)
    trainer = Trainer(
        max_epochs=QUICK_EPOCHS if args.quick else args.epochs,
        limit_train_batches=QUICK_BATCHES if args.quick else 1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        logger=[TensorBoardLogger(args.root / "tensorboard", name), CSVLogger(args.root / "csv", name)],
        callbacks=[recorder],
        **TRAINER,
    )
    trainer.fit(DigitsModel(), datamodule=datamodule)
    return recorder.evaluations


def print_table(plain: Evaluation, echoed: Evaluation, factor: float, pass_examples: int, bound: float) -> None:
    """Print the last evaluations of both runs, which are at the runs' ends."""
    print(f"\n{'':34}without echoing{f'factor {factor:g}':>18}")
    rows: dict[str, Callable[[Evaluation], str]] = {
        "wall-clock, with evaluations (s)": lambda run: f"{run.seconds:.1f}",
        "optimizer steps": lambda run: f"{run.steps:,}",
        "fresh examples": lambda run: f"{run.fresh:,}",
        "echoed examples": lambda run: f"{run.delivered - run.fresh:,}",
        "passes over the data": lambda run: f"{run.fresh / pass_examples:.2f}",
        "accuracy at the end (%)": lambda run: f"{run.accuracy_percent:.1f}",
        "speed-up": lambda run: f"{plain.seconds / run.seconds:.2f}",
    }
    for label, value in rows.items():
        print(f"{label:34}{value(plain):>15}{value(echoed):>18}")
    print(f"{'bound on the speed-up':34}{'':15}{bound:18.2f}")


def save_plot(runs: dict[str, list[Evaluation]], path: Path, title: str) -> None:
    figure, (over_time, over_fresh) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for name, evaluations in runs.items():
        accuracies = [run.accuracy_percent for run in evaluations]
        over_time.plot([run.seconds for run in evaluations], accuracies, marker="o", label=name)
        over_fresh.plot([run.fresh for run in evaluations], accuracies, marker="o", label=name)
    over_time.set(xlabel="wall-clock time (s)", ylabel="validation accuracy (%)", xlim=(0, None))
    over_fresh.set(xlabel="fresh examples", xlim=(0, None))
    over_time.legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--factor", type=float, default=4.0, help="uses per fresh example")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="per training file, for network storage")
    parser.add_argument("--epochs", type=int, default=9, help="of each run")
    parser.add_argument("--root", type=Path, default=Path("runs/digits"), help="for all files")
    parser.add_argument("--seed", type=int, default=1, help="of each run")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that everything works")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(THREADS)
    datamodule, to_echo = (DigitsDataModule(args.root / "images", args.delay_ms / 1000) for _ in range(2))
    bound = measure_bound(datamodule, args.factor)
    plain = train("without echoing", datamodule, args)
    name = f"factor {args.factor:g}"
    echoed = train(name, EchoDataModule(to_echo, args.factor, insertion_point="before_augmentation"), args)
    print_table(plain[-1], echoed[-1], args.factor, len(datamodule.train_set), bound)
    plot = args.root / "digits.png"
    title = f"Digits, {args.delay_ms:g} ms per file, before_augmentation"
    save_plot({"without echoing": plain, name: echoed}, plot, title)
    print(f"\nPlot: {plot}\nCurves: tensorboard --logdir {args.root / 'tensorboard'}")


if __name__ == "__main__":
    main()
