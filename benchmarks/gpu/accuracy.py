"""Stage "accuracy": what a training has learned after so many seconds, plain, echoed, and echoed beside a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from timing import Stopwatch
from torch import Tensor
from torch.utils.data import DataLoader

from gpu.data import held_out_images, training_images
from gpu.plan import AUTO, FACTOR, PLAIN, RATES
from gpu.setting import Setting, run_parts
from gpu.training import Classifier, loader_of, synchronize, trainer_of
from lightning_echo import CacheConfig, EchoCallback, EchoLoader

__all__ = ["Evaluates", "accuracy_of", "parts"]


class Evaluates(pl.Callback):
    """Evaluates every few seconds of the training's clock, which stands meanwhile, and ends the training in time.

    The clock runs from the request for the first batch: the start of the workers counts. While it stands, the workers go on for
    what an evaluation takes.

    Args:
        setting: The run's.
        held_out: Images and labels on the device.
        echo: Told of an evaluation as of a validation, which it does not count.
        write: Gets seconds, steps and accuracy.
    """

    def __init__(
        self,
        setting: Setting,
        held_out: tuple[Tensor, Tensor],
        echo: EchoCallback,
        write: Callable[[float, int, float], None],
    ) -> None:
        self._scale, self._held_out, self._echo, self._write = setting.scale, held_out, echo, write
        self._watch = Stopwatch()
        self._next = self._scale.evaluate_seconds

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._watch.is_started:
            self._watch.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._watch.seconds < self._next:
            return
        synchronize(pl_module.device)
        seconds = self._watch.seconds
        with self._watch.standing_still():
            self._echo.on_validation_start(trainer, pl_module)
            self._write(seconds, trainer.global_step, accuracy_of(pl_module, *self._held_out))
            self._echo.on_validation_end(trainer, pl_module)
        while self._next <= seconds:
            self._next += self._scale.evaluate_seconds
        if seconds >= self._scale.clock_seconds:
            trainer.should_stop = True


@torch.no_grad()
def accuracy_of(model: Any, images: Tensor, labels: Tensor) -> float:
    """Returns the share of the images that the model names rightly; it trains on afterwards."""
    was_training = model.training
    model.eval()
    with torch.autocast(images.device.type, torch.bfloat16):
        right = [(model(some).argmax(1) == those).sum() for some, those in zip(images.split(250), labels.split(250), strict=True)]
    model.train(was_training)
    return float(torch.stack(right).sum()) / len(labels)


def train(setting: Setting, arm: str, seed: int) -> None:
    """One training; a row for each evaluation."""
    pl.seed_everything(seed, verbose=False)
    scale, factor = setting.scale, max(round(float(setting.noted("R")["R"]), 2), 1.0)
    width, height = setting.noted("images")["size"]
    quarter = scale.train // 4 * (3 * scale.resize * round(scale.resize * width / height) + 512)
    cache = CacheConfig(max(quarter, 2**20), hold="loaded")
    options: dict[str, Any] = {PLAIN: {}, FACTOR: {"factor": factor}, AUTO: {"factor": "auto", "cache": cache}}[arm]
    echo = EchoCallback(**options, summary=False)

    def write(seconds: float, steps: int, accuracy: float) -> None:
        used = trainer.train_dataloader
        is_echoed = isinstance(used, EchoLoader)
        setting.add(
            "accuracy",
            arm=arm,
            seed=seed,
            learning_rate=RATES[arm],
            factor=used.factor_in_force if is_echoed else 1.0,
            clock_s=seconds,
            steps=steps,
            fresh_images=used.counts.fresh if is_echoed else steps * scale.batch_size,
            accuracy=accuracy,
        )

    trainer = trainer_of(setting, [echo, Evaluates(setting, _held_out(setting), echo, write)], max_epochs=1_000_000)
    trainer.fit(Classifier(scale.small, RATES[arm]), loader_of(setting, training_images(setting)))


def parts(setting: Setting) -> dict[str, Callable[[], None]]:
    """By name, as in ``plan.py``."""
    arms = (PLAIN, FACTOR, AUTO)
    return {f"{arm}, seed {seed}": partial(train, setting, arm, seed) for seed in setting.scale.seeds for arm in arms}


def _held_out(setting: Setting) -> tuple[Tensor, Tensor]:
    """All held-out images on the device."""
    data = held_out_images(setting)
    found = list(DataLoader(data, 50, num_workers=setting.workers))
    images, labels = (torch.cat(each).to(setting.device) for each in zip(*found, strict=True))
    return images, labels


if __name__ == "__main__":
    _setting = Setting.of_environment()
    run_parts(_setting, parts(_setting), sys.argv[1:])
