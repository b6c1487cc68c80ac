"""Stage "data": measures R with a few files, chooses their size by it, and makes all of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

from torch.utils.data import RandomSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from gpu.plan import NO_ECHO_BELOW
from gpu.setting import Setting, run_parts
from gpu.training import Classifier, EpochClock, Repeated, loader_of, random_batch, trainer_of

__all__ = ["ENOUGH", "augmented_folder", "held_out_folder", "held_out_images", "training_images"]

ENOUGH = 3.0  # R, below which larger files are taken
_SECONDS, _HELD_OUT_SECONDS = 40.0, 15.0  # that files may take
_HELD_OUT = 1_000_000  # number of the first held-out file


def training_images(setting: Setting, count: int | None = None) -> Subset[object]:
    """The files of this run, or the first of them in an order that is always the same."""
    folder = Path(setting.noted("images")["folder"])
    whole = augmented_folder(folder / "train", setting.scale.resize, setting.scale.crop)
    # ImageFolder sorts by class. By number, the first files are of all classes.
    order = sorted(range(len(whole)), key=lambda index: Path(whole.samples[index][0]).name)
    return Subset(whole, order[:count])


def held_out_images(setting: Setting) -> ImageFolder:
    """The files to evaluate on."""
    folder = Path(setting.noted("images")["folder"])
    return held_out_folder(folder / "held_out", setting.scale.resize, setting.scale.crop)


def augmented_folder(folder: Path, resize: int, crop: int) -> ImageFolder:
    """A plain torchvision data set: images (3, crop, crop), uint8, and labels."""
    redone = [v2.RandomCrop(crop), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return ImageFolder(str(folder), v2.Compose([v2.Resize(resize), *redone]))


def held_out_folder(folder: Path, resize: int, crop: int) -> ImageFolder:
    """The same without anything random."""
    return ImageFolder(str(folder), v2.Compose([v2.Resize(resize), v2.CenterCrop(crop), v2.PILToTensor()]))


def measure(setting: Setting) -> None:
    """Finds R, and the size of the files."""
    scale = setting.scale
    step = _step_seconds(setting)
    for size in scale.sizes:
        folder = setting.images_of(size)
        found = _made(folder / "train", 0, scale.sample, size, _SECONDS)
        setting.note("images", folder=str(folder), size=size, train=found)
        batch_seconds = _batch_seconds(setting)
        ratio = batch_seconds / step
        setting.note("R", R=ratio, batch_seconds=batch_seconds, step_seconds=step)
        setting.add(
            "feed",
            network=scale.small,
            arm="loader alone",
            how="measured",
            workers=setting.workers,
            R=ratio,
            images_per_second=scale.batch_size / batch_seconds,
            said=f"{found} files of {size[0]} x {size[1]}; a step alone takes {1e3 * step:.1f} ms",
        )
        if ratio >= ENOUGH:
            return
    if ratio < NO_ECHO_BELOW:
        print(f"do not echo here: R is {ratio:.3g}, the card hardly waits", flush=True)


def make(setting: Setting) -> None:
    """Makes the files that are missing."""
    scale, noted = setting.scale, setting.noted("images")
    folder, (width, height) = Path(noted["folder"]), noted["size"]
    began = time.monotonic()
    held_out = _made(folder / "held_out", _HELD_OUT, scale.held_out, (width, height), _HELD_OUT_SECONDS)
    train = _made(folder / "train", 0, scale.train, (width, height), _SECONDS)
    setting.note("images", folder=str(folder), size=(width, height), train=train)
    print(f"{train} files to train on and {held_out} to evaluate on, {time.monotonic() - began:.1f} s", flush=True)


def _made(folder: Path, first: int, count: int, size: tuple[int, int], seconds: float) -> int:
    """Makes files in a process of their own, and returns how many are there."""
    numbers = map(str, (first, count, *size, seconds))
    command = [sys.executable, "-m", "gpu.images", str(folder), *numbers]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _step_seconds(setting: Setting) -> float:
    """Of a step whose batch is on the device."""
    clock, steps = EpochClock(), setting.scale.steps // 2
    trainer = trainer_of(setting, [clock], max_epochs=2)
    trainer.fit(Classifier(setting.scale.small), Repeated(random_batch(setting), steps))
    return (clock.ends[1] - clock.ends[0]) / steps


def _batch_seconds(setting: Setting) -> float:
    """Of a batch, all workers working and nobody waiting for them."""
    data = training_images(setting)
    endless = RandomSampler(data, replacement=True, num_samples=1000 * setting.scale.batch_size)
    loader = loader_of(setting, data, shuffle=False, sampler=endless, persistent_workers=False)
    # All workers begin together, so that their batches come in bursts: whole rounds are timed.
    batches, rounds = iter(loader), 2 * setting.workers
    _take(batches, setting.workers)
    began = time.perf_counter()
    _take(batches, rounds)
    return (time.perf_counter() - began) / rounds


def _take(batches: object, count: int) -> None:
    for _ in itertools.islice(batches, count):  # type: ignore[call-overload]
        pass


if __name__ == "__main__":
    _setting = Setting.of_environment()
    run_parts(_setting, {"R": lambda: measure(_setting), "files": lambda: make(_setting)}, sys.argv[1:])
