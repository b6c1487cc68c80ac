"""The same training plain, with a fixed echo factor, echoing on demand, and with a cache: `make demo`.

The 1,797 scanned digits bundled with scikit-learn are written once as image files, then read through a stated
delay per file, which stands for network storage. Two workers cannot read as fast as the model trains: it
waits. With a factor (`before_augmentation`) each image that was read and decoded is augmented and trained on
so many times. On demand an image is used again only if no fresh one has arrived. With a cache each image is
read once, and all are fresh. All runs start from the same weights, take the same number of optimizer steps and
are evaluated at the same steps; only the `EchoCallback` differs. The result is one table and one plot.
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

from lightning_echo import EchoCallback
from lightning_echo.measure.summary import EpochReport

FILE_PIXELS = 96  # width and height of the image files; the scans themselves are 8 x 8
BATCH_SIZE = 32
WORKERS = 2
QUICK_EPOCHS, QUICK_BATCHES = 2, 4
MEASURED_STEPS = 20
DETERMINISTIC = [v2.Grayscale(), v2.Resize(56)]
RANDOM = [v2.RandomAffine(degrees=15, translate=(0.1, 0.1), scale=(0.8, 1.2), fill=255)]
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
CACHE = "64MiB"  # more than the data needs
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

    def __init__(self, echo: EchoCallback | None = None) -> None:
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
        loader = None if self.echo is None else self.echo.attachment.echo.loader
        fresh = self.delivered if loader is None else loader.counts.fresh
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


class Run(NamedTuple):
    """What is left of a run."""

    evaluations: list[Evaluation]
    reports: list[EpochReport]

    @property
    def end(self) -> Evaluation:
        """The last evaluation, which is at the run's end."""
        return self.evaluations[-1]

    @property
    def files_read(self) -> float:
        """Fresh examples that no cache had."""
        fresh = [0, *(report.fresh_examples for report in self.reports)]
        missed = (1 - (report.cache_hit_fraction or 0) for report in self.reports)
        return sum((now - before) * share for (before, now), share in zip(pairwise(fresh), missed, strict=True))


def train(name: str, echo: EchoCallback, datamodule: LightningDataModule, args: argparse.Namespace) -> Run:
    """One run. Nothing but `echo` differs between them."""
    print(f"\n{name}", flush=True)
    seed_everything(args.seed, workers=True)
    recorder = Recorder(echo)
    trainer = Trainer(
        max_epochs=QUICK_EPOCHS if args.quick else args.epochs,
        limit_train_batches=QUICK_BATCHES if args.quick else 1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        logger=[TensorBoardLogger(args.root / "tensorboard", name), CSVLogger(args.root / "csv", name)],
        callbacks=[recorder, echo],
        **TRAINER,
    )
    trainer.fit(DigitsModel(), datamodule=datamodule)
    return Run(recorder.evaluations, echo.reports)


def print_table(runs: dict[str, Run], pass_examples: int, bound: float) -> None:
    """Print how the runs ended."""
    plain, *_ = runs.values()
    rows: dict[str, Callable[[Run], str]] = {
        "wall-clock, with evaluations (s)": lambda run: f"{run.end.seconds:.1f}",
        "optimizer steps": lambda run: f"{run.end.steps:,}",
        "fresh examples": lambda run: f"{run.end.fresh:,}",
        "echoed examples": lambda run: f"{run.end.delivered - run.end.fresh:,}",
        "passes over the data": lambda run: f"{run.end.fresh / pass_examples:.2f}",
        "files read": lambda run: f"{run.files_read:,.0f}",
        "uses per fresh example": lambda run: f"{run.end.delivered / run.end.fresh:.2f}",
        "idle in the last epoch (%)": lambda run: f"{100 * (run.reports[-1].idle_fraction or 0):.0f}",
        "accuracy at the end (%)": lambda run: f"{run.end.accuracy_percent:.1f}",
        "speed-up": lambda run: f"{plain.end.seconds / run.end.seconds:.2f}",
    }
    print(f"\n{'':34}" + "".join(f"{name:>18}" for name in runs))
    for label, value in rows.items():
        print(f"{label:34}" + "".join(f"{value(run):>18}" for run in runs.values()))
    fixed = list(runs)[1]
    print(f"The bound on the speed-up with {fixed} is {bound:.2f}.")


def save_plot(runs: dict[str, Run], path: Path, title: str) -> None:
    """Accuracy over time and over fresh examples; under it uses per fresh example and idle fraction, per epoch."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), height_ratios=[2, 1], layout="constrained")
    (over_time, over_fresh), (uses, idle) = axes
    for name, (evaluations, reports) in runs.items():
        accuracies, epochs = [run.accuracy_percent for run in evaluations], [report.epoch + 1 for report in reports]
        over_time.plot([run.seconds for run in evaluations], accuracies, marker="o", label=name)
        over_fresh.plot([run.fresh for run in evaluations], accuracies, marker="o")
        uses.plot(epochs, [report.effective_factor or 1 for report in reports], marker="o")
        idle.plot(epochs, [100 * (report.idle_fraction or 0) for report in reports], marker="o")
    over_time.set(xlabel="wall-clock time (s)", ylabel="validation accuracy (%)", xlim=(0, None))
    over_fresh.set(xlabel="fresh examples", xlim=(0, None))
    uses.set(xlabel="epoch", ylabel="uses per fresh example", ylim=(0, None))
    idle.set(xlabel="epoch", ylabel="idle (%)", ylim=(0, 100))
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
    datamodule = DigitsDataModule(args.root / "images", args.delay_ms / 1000)
    bound = measure_bound(datamodule, args.factor)
    point = "before_augmentation"
    callbacks = {
        "plain": EchoCallback(),
        f"factor {args.factor:g}": EchoCallback(factor=args.factor, insertion_point=point),
        "on demand": EchoCallback(factor="demand", insertion_point=point),
        "cache": EchoCallback(cache=CACHE),
    }
    runs = {name: train(name, callback, datamodule, args) for name, callback in callbacks.items()}
    print_table(runs, len(datamodule.train_set), bound)
    plot = args.root / "digits.png"
    save_plot(runs, plot, f"Digits, {args.delay_ms:g} ms per file, {point}")
    print(f"\nPlot: {plot}\nCurves: tensorboard --logdir {args.root / 'tensorboard'}")


if __name__ == "__main__":
    main()
