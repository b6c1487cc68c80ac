"""What an experiment trains: a task is data, a model, a loss and a target; arms and rules are the same for all tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["Split", "Task", "adam"]

QUICK_PARTS = 20


def adam(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Adam in one kernel, which takes a tenth of the step less."""
    return torch.optim.Adam(parameters, rate, fused=True)


@dataclass(frozen=True)
class Split:
    """The data of one seed.

    Attributes:
        train: Training examples, of which the order is drawn anew in each pass.
        evaluate: The metric of a model (in evaluation mode) on held-out data.
        collate: As in ``DataLoader``; None: the default.
    """

    train: Dataset[Any]
    evaluate: Callable[[nn.Module], float]
    collate: Callable[[Sequence[Any]], Any] | None = None


@dataclass(frozen=True)
class Task:
    """One line of the issue's table of tasks.

    Attributes:
        name: In file names and tables.
        title: In words, with the paper's counterpart.
        metric: Name and unit of what is evaluated.
        is_higher_better: Whether a larger metric is better.
        target: The metric to reach, fixed before the first run.
        margin: How much worse the metric may be and still count as not worse (finding 6).
        points: Insertion points that exist for this task, the earliest first.
        batch_size: Examples in a batch (b).
        spacing_examples: Fresh examples from evaluation to evaluation.
        window_evaluations: The target is reached when the mean of so many evaluations is there.
        budget_examples: Fresh examples after which a run ends; final quality is compared there.
        cached_examples: The examples of which an arm on a fixed 1/e of the data gets its share: the training set, or what a run
            reads of it where that is less.
        rates: Learning rates to begin with, in ascending order, each `RATE_STEP` times the one before.
        make_split: From a seed.
        make_model: With weights drawn from torch's generator.
        loss: Of a model on a batch.
        quick_target: In the place of `target` for ``--quick``, whose runs end after a `QUICK_PARTS`-th of the budget.
        make_optimizer: From parameters and the learning rate.
        workers: Of the training loader.
        full: Whether all arms are run, or only those of a supporting task (no echo, all points at e = 2, one at e = 4).
    """

    name: str
    title: str
    metric: str
    is_higher_better: bool
    target: float
    margin: float
    points: tuple[str, ...]
    batch_size: int
    spacing_examples: int
    window_evaluations: int
    budget_examples: int
    cached_examples: int
    rates: tuple[float, ...]
    make_split: Callable[[int], Split]
    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    quick_target: float
    make_optimizer: Callable[[Any, float], torch.optim.Optimizer] = adam
    workers: int = 0
    full: bool = True

    def quick(self) -> Task:
        """The same task, just long enough to see that every table fills."""
        return replace(
            self,
            target=self.quick_target,
            budget_examples=self.budget_examples // QUICK_PARTS,
            spacing_examples=max(self.spacing_examples // QUICK_PARTS, self.batch_size),
            window_evaluations=2,
            rates=self.rates[1:2],
        )

    def is_reached(self, value: float) -> bool:
        """Whether a metric (or a mean of it) is at the target."""
        return value >= self.target if self.is_higher_better else value <= self.target
