"""One run: a real Trainer, evaluated at equal spacing of steps, with the fresh examples of each batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from trainer import be_quiet, quiet_trainer

from learning.reuse.falling import FallingSampler
from learning.reuse.studies import ReuseArm, Study
from learning.rules import Evaluation, reached_at
from learning.run import ENDLESS, Module
from learning.task import Split
from lightning_echo import EchoCallback, EchoDataModule

__all__ = ["ReuseRun", "train"]


@dataclass
class ReuseRun:
    """How a run went.

    Attributes:
        evaluations: In the order in which they were made.
        fresh: Fresh examples of each batch.
        seconds: Of the whole fit.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    seconds: float = 0.0


class StepEvaluator(pl.Callback):
    """Evaluates every so many steps; ends the run at the target, or when it has missed it.

    Args:
        study: Task, spacing and end.
        evaluate: The metric of a model.
        fresh_so_far: How many fresh examples were in the first so many batches of a trainer. Default: what its `EchoLoader` says.
    """

    def __init__(self, study: Study, evaluate: Any, fresh_so_far: Callable[[pl.Trainer, int], int] | None = None) -> None:
        self._study, self._evaluate, self._fresh_so_far = study, evaluate, fresh_so_far or _fresh_of_loader
        self.run = ReuseRun()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        run, study = self.run, self._study
        steps = trainer.global_step
        fresh = self._fresh_so_far(trainer, steps)
        run.fresh.append(fresh - sum(run.fresh))
        if steps % study.spacing_steps:
            return
        run.evaluations.append(Evaluation(fresh, steps, self.evaluated(trainer, pl_module)))
        trainer.should_stop = reached_at(study.task, run.evaluations) is not None or steps >= study.most_steps

    def evaluated(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        """The metric now."""
        pl_module.eval()
        with torch.no_grad():
            value: float = self._evaluate(pl_module.model)
        pl_module.train()
        return value


def train(study: Study, arm: ReuseArm, rate: float, seed: int, accelerator: str = "cpu") -> ReuseRun:
    """Trains until the target is reached or missed.

    Args:
        study: What is trained.
        arm: How.
        rate: Learning rate after the warm-up.
        seed: Of split, initial weights, order and augmentation: split and weights are the same for each arm.
        accelerator: As in ``Trainer``.
    """
    be_quiet()
    pl.seed_everything(seed, verbose=False)
    module = Module(study.task, rate)  # first of all: the same weights in each arm
    split = study.task.make_split(seed)
    begin = time.perf_counter()
    fit = _fit_falling if arm.reuse == "falling" else _fit_echoed
    run = fit(study, arm, split, module, seed, {"accelerator": accelerator, **ENDLESS})
    run.seconds = time.perf_counter() - begin
    return run


def _fit_echoed(study: Study, arm: ReuseArm, split: Split, module: Module, seed: int, options: dict[str, Any]) -> ReuseRun:
    """Through the package, also where nothing is echoed."""
    loader = DataLoader(split.train, study.task.batch_size, shuffle=True, drop_last=True, num_workers=0, collate_fn=split.collate)
    echoed = EchoDataModule.from_dataloaders(
        loader,
        factor=arm.factor,
        insertion_point=study.point,
        buffer_size=arm.buffer_size(study.task.batch_size, len(loader)),
        reuse="each" if arm.reuse == "none" else arm.reuse,
        seed=seed,
    )
    evaluator = StepEvaluator(study, split.evaluate)
    quiet_trainer([evaluator, EchoCallback(summary=False)], **options).fit(module, datamodule=echoed)
    return evaluator.run


def _fit_falling(study: Study, arm: ReuseArm, split: Split, module: Module, seed: int, options: dict[str, Any]) -> ReuseRun:
    """Through a plain loader: the plan is not the package's."""
    length, batch_size = len(split.train), study.task.batch_size  # type: ignore[arg-type]
    sampler = FallingSampler(length, batch_size, arm.factor, arm.buffer_size(batch_size, length // batch_size), seed)
    loader = DataLoader(split.train, batch_sampler=sampler, num_workers=0, collate_fn=split.collate)
    evaluator = StepEvaluator(study, split.evaluate, lambda trainer, steps: sum(sampler.fresh[:steps]))
    quiet_trainer([evaluator], **options).fit(module, loader)
    return evaluator.run


def _fresh_of_loader(trainer: pl.Trainer, steps: int) -> int:
    fresh: int = trainer.datamodule.loader.counts.fresh  # type: ignore[attr-defined]
    return fresh
