"""One run: a real Trainer with `EchoDataModule` and `EchoCallback`, evaluated at equal spacing of fresh examples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from trainer import be_quiet, quiet_trainer

from learning.arms import Arm
from learning.rules import Evaluation, reached_at
from learning.task import Split, Task
from lightning_echo import EchoCallback, EchoDataModule

__all__ = ["ENDLESS", "Evaluator", "Module", "Run", "echoed", "train"]

WARM_UP_STEPS = 20
ENDLESS: dict[str, Any] = {"max_epochs": -1, "devices": 1}  # a callback ends the run


@dataclass
class Run:
    """How a run went.

    Attributes:
        evaluations: In the order in which they were made.
        seconds: Of the whole fit.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    seconds: float = 0.0


class Module(pl.LightningModule):
    """The task's model, trained at a constant rate after a warm-up."""

    def __init__(self, task: Task, rate: float) -> None:
        super().__init__()
        self.model = task.make_model()
        self._task, self._rate = task, rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._task.loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self._task.make_optimizer(self.parameters(), self._rate)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


class Evaluator(pl.Callback):
    """Evaluates when so many fresh examples more were used, however many steps that took; ends the run."""

    def __init__(self, task: Task, arm: Arm, evaluate: Any, ends_at_target: bool) -> None:
        self._task, self._evaluate, self._ends_at_target = task, evaluate, ends_at_target
        self._share, self._budget = arm.cached_share, arm.budget_examples(task)
        self.evaluations: list[Evaluation] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        # of a fixed share of the data e times as many examples are delivered for the same count
        fresh = int(trainer.datamodule.loader.counts.fresh * self._share)  # type: ignore[attr-defined]
        if fresh < self._task.spacing_examples * (len(self.evaluations) + 1):
            return
        self.evaluations.append(Evaluation(fresh, trainer.global_step, self.evaluated(trainer, pl_module)))
        is_reached = self._ends_at_target and reached_at(self._task, self.evaluations) is not None
        trainer.should_stop = is_reached or fresh >= self._budget

    def evaluated(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        """The metric now."""
        pl_module.eval()
        with torch.no_grad():
            value: float = self._evaluate(pl_module.model)
        pl_module.train()
        return value


def train(task: Task, arm: Arm, rate: float, seed: int, *, ends_at_target: bool, accelerator: str = "cpu") -> Run:
    """Trains until the budget is used, or until the target is reached.

    Args:
        task: What is trained.
        arm: How.
        rate: Learning rate after the warm-up.
        seed: Of split, initial weights, order and augmentation: the same for each arm.
        ends_at_target: Whether to stop there; else the run goes on to the task's budget.
        accelerator: As in ``Trainer``.
    """
    be_quiet()
    pl.seed_everything(seed, verbose=False)
    module = Module(task, rate)  # first of all: the same weights in each arm
    split = task.make_split(seed)
    evaluator = Evaluator(task, arm, split.evaluate, ends_at_target)
    trainer = quiet_trainer([evaluator, EchoCallback(summary=False)], accelerator=accelerator, **ENDLESS)
    begin = time.perf_counter()
    trainer.fit(module, datamodule=echoed(task, arm, split, seed))
    return Run(evaluator.evaluations, time.perf_counter() - begin)


def echoed(task: Task, arm: Arm, split: Split, seed: int) -> EchoDataModule:
    """The training data of an arm."""
    batch_size = task.batch_size * arm.batch_multiple
    data = split.train
    if arm.cached_share < 1:
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        data = Subset(data, chosen[: round(task.cached_examples * arm.cached_share)].tolist())
    loader = DataLoader(data, batch_size, shuffle=True, drop_last=True, num_workers=task.workers, collate_fn=split.collate)
    return EchoDataModule.from_dataloaders(
        loader,
        factor=arm.factor,
        insertion_point=task.points[0] if arm.point == "none" else arm.point,
        buffer_size=arm.buffer_size(batch_size),
        reuse="each",  # these runs are about the paper's rule
        seed=seed,
    )
