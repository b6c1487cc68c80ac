"""torchmetrics for fresh and echoed examples and for the job's idle fraction, with their reductions over ranks.

The steps of a job are synchronous: if one rank waits, all ranks wait. So the idle time of a step is the longest wait of any rank.
Neither the mean nor the maximum of the ranks' own idle fractions is that of the job. `IdleFraction` therefore stores the waits of
an epoch and gathers them once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["EchoCounter", "IdleFraction", "JobSteps", "idle_low", "job_steps"]

# Blocks of the batch means, and the 97.5 % quantile of Student's t with one degree of freedom less. On simulated waits over 50
# steps with a true idle fraction of 0.05, the lower end lay above that in at most 2.8 % of the samples if waits were independent,
# came in bursts (periods 2 to 32) or had heavy tails, and in 4.5 % with a correlation of 0.95 from step to step. More blocks were
# wrong more often, up to 21 %, and so was a bootstrap over blocks, up to 17 %.
_BLOCKS, _QUANTILE = 5, 2.776
_LEAST_PER_BLOCK = 2  # steps: of single steps, nothing could be told about what follows upon what


class JobSteps(NamedTuple):
    """The steps of a job, joined over its ranks.

    Attributes:
        steps: Number of steps.
        idle_fraction: Share of the time in which the job waited for input.
        slowest_rank: The rank whose wait was the longest most often.
        wait_seconds: Mean over steps of the longest wait of any rank.
        step_seconds: Mean over steps of the time in which no rank waited.
        idle_low: Lower end of the 95 % interval of `idle_fraction`, see `idle_low`; None if there are too few steps.
    """

    steps: int
    idle_fraction: float
    slowest_rank: int
    wait_seconds: float
    step_seconds: float
    idle_low: float | None = None


def job_steps(waited: Tensor, seconds: Tensor) -> JobSteps:
    """Joins the steps of all ranks.

    Args:
        waited: Seconds that each rank waited for input before each step, shape (ranks, steps), steps >= 1.
        seconds: Seconds from step to step, the same shape.

    Example:
        >>> waited = torch.tensor([[0.5, 0.0], [0.0, 0.5]])  # two ranks that wait in turn
        >>> job_steps(waited, torch.ones(2, 2)).idle_fraction
        0.5
    """
    longest, rank = waited.max(dim=0)
    total, count = float(seconds.sum(dim=1).max()), waited.shape[1]
    idle = min(float(longest.sum()), total)
    often = torch.bincount(rank, minlength=waited.shape[0])
    low = idle_low(longest, seconds[int(seconds.sum(dim=1).argmax())])
    return JobSteps(count, idle / total if total else 0.0, int(often.argmax()), idle / count, (total - idle) / count, low)


def idle_low(waited: Tensor, seconds: Tensor) -> float | None:
    """Returns the lower end of the 95 % interval of the idle fraction: how little the waiting may be by chance.

    The waits of neighbouring steps are not independent: workers hand over several batches in a row. So the steps are cut into a
    few long blocks, whose sums nearly are (batch means). The idle fraction is a ratio of two sums, so that its error follows from
    what each block waited more than that share of its time.

    Args:
        waited: Seconds that the job waited before each step, shape (steps,).
        seconds: Seconds from step to step, shape (steps,).

    Returns:
        The lower end, at least 0; None if there are fewer than ten steps, or they took no time.

    Example:
        >>> steady = torch.full((50,), 0.2), torch.ones(50)
        >>> now_and_then = torch.eye(50)[7] * 10, torch.ones(50) + torch.eye(50)[7] * 10  # one step of 50 waited for ten seconds
        >>> round(idle_low(*steady), 3), idle_low(*now_and_then)
        (0.2, 0.0)
    """
    size = len(waited) // _BLOCKS
    if size < _LEAST_PER_BLOCK:
        return None
    blocks = [part[-size * _BLOCKS :].double().reshape(_BLOCKS, size).sum(dim=1) for part in (waited, seconds)]
    total = float(blocks[1].sum())
    if not total:
        return None
    fraction = float(blocks[0].sum()) / total
    beyond = blocks[0] - fraction * blocks[1]
    error = math.sqrt(float(beyond.square().sum()) * _BLOCKS / (_BLOCKS - 1)) / total
    return max(0.0, fraction - _QUANTILE * error)


class IdleFraction(Metric):
    """Share of a job's training time in which it waited for input.

    ``update`` takes the steps of one rank. ``compute`` is over all ranks, which must have made the same number of steps.

    Example:
        >>> idle = IdleFraction()
        >>> idle.update(waited=[0.1, 0.3], seconds=[1.0, 1.0])
        >>> round(idle.compute().item(), 6)
        0.2
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = True  # otherwise ``forward`` would stack the new steps on the old ones, as if they were another rank's
    per_step: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("per_step", torch.zeros(2, 0), dist_reduce_fx=None)

    def update(self, waited: list[float] | Tensor, seconds: list[float] | Tensor) -> None:
        """Adds steps.

        Args:
            waited: Seconds waited for input before each step, shape (steps,).
            seconds: Seconds from step to step, shape (steps,).

        Raises:
            ValueError: They are not equally long.
        """
        if len(waited) != len(seconds):
            raise ValueError(f"waited and seconds must be equally long, got {len(waited)} and {len(seconds)} steps")
        added = torch.stack([torch.as_tensor(part, dtype=torch.float32, device=self.device) for part in (waited, seconds)])
        self.per_step = torch.cat([self.per_step, added], dim=1)

    def compute(self) -> Tensor:
        """Returns the job's idle fraction, shape (); NaN before the first step."""
        steps = self.steps()
        return torch.tensor(float("nan") if steps is None else steps.idle_fraction, device=self.device)

    def steps(self, first: int = 0) -> JobSteps | None:
        """Returns the job's steps from number ``first`` on, or None if there are none.

        Within ``sync_context()`` they are joined over all ranks, else they are those of this rank.
        """
        count = self.per_step.shape[-1]
        if first >= count:
            return None
        per_step = self.per_step.reshape(-1, 2, count)[:, :, first:].cpu()  # (ranks, 2, steps)
        return job_steps(per_step[:, 0], per_step[:, 1])


class EchoCounter(Metric):
    """Fresh and echoed examples, over all ranks.

    Example:
        >>> counter = EchoCounter()
        >>> counter.update(fresh=8, echoed=24)
        >>> {name: int(value) for name, value in counter.compute().items()}
        {'fresh_examples': 8, 'echoed_examples': 24}
    """

    is_differentiable = False
    full_state_update = False
    counts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, fresh: int, echoed: int) -> None:
        """Adds examples of this rank.

        Args:
            fresh: Number of fresh examples.
            echoed: Number of echoed examples.
        """
        self.counts += torch.tensor([fresh, echoed], device=self.device)

    def compute(self) -> dict[str, Tensor]:
        """Returns ``fresh_examples`` and ``echoed_examples``, each of shape ()."""
        return {"fresh_examples": self.counts[0], "echoed_examples": self.counts[1]}
