"""torchmetrics for fresh and echoed examples and for the job's idle fraction, with their reductions over ranks.

The steps of a job are synchronous: if one rank waits, all ranks wait. So the idle time of a step is the longest wait of any rank.
The idle fraction of the job is neither the mean nor the maximum of the idle fractions of its ranks. Therefore `IdleFraction`
stores the waits of an epoch, and the ranks join them once: for each step, the longest wait and the rank that had it. Each rank
sends and holds one number per step, no matter how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
_LEAST_PER_BLOCK = 2  # steps: blocks of a single step would not show how the waits of neighbouring steps depend on each other


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
    return _of_joined(longest, rank, seconds[int(seconds.sum(dim=1).argmax())])


def _of_joined(longest: Tensor, rank: Tensor, seconds: Tensor) -> JobSteps:
    """Returns the steps of a job.

    Args:
        longest: The longest wait of any rank before each step, seconds, shape (steps,).
        rank: The rank that had this wait, the same shape.
        seconds: Seconds from step to step on the rank whose steps took longest in sum, the same shape.
    """
    total, count = float(seconds.sum()), len(longest)
    idle = min(float(longest.sum()), total)
    slowest = int(torch.bincount(rank).argmax())
    low = idle_low(longest, seconds)
    return JobSteps(count, idle / total if total else 0.0, slowest, idle / count, (total - idle) / count, low)


def _join(per_step: Tensor, group: Any = None) -> list[Tensor]:
    """Joins the steps of all ranks by reductions. Gathering them would take 3.3 GB for 100,000 steps of 4,096 ranks.

    Args:
        per_step: Seconds waited, and seconds from step to step, of this rank, shape (2, steps).
        group: The process group; None: all ranks.

    Returns:
        One tensor, in a list as torchmetrics wants it, shape (3, steps), float64. Its rows are the longest waits, the ranks that
        had them, and the seconds of the rank whose steps took longest in sum.

    Raises:
        ValueError: The ranks have made different numbers of steps.
    """
    rank, steps = torch.distributed.get_rank(group), per_step.shape[1]
    waited, seconds = per_step.double()
    whole = torch.stack([seconds.new_tensor(steps).long(), seconds.new_tensor(-steps).long(), _marked(seconds.sum(), rank)])
    _largest(whole, group)
    most, fewest, slowest = whole.tolist()
    if most != -fewest:
        raise ValueError(f"all ranks must have made equally many steps, and they have made {-fewest} to {most}, this one {steps}")
    marked = _marked(waited, rank)
    if rank != _LAST_RANK - (slowest & _LAST_RANK):
        seconds = torch.zeros_like(seconds)
    if steps:
        _largest(marked, group)
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.SUM, group=group)
    return [torch.stack([(marked >> _RANK_BITS) / 1e9, (_LAST_RANK - (marked & _LAST_RANK)).double(), seconds])]


_RANK_BITS = 16
_LAST_RANK = 2**_RANK_BITS - 1


def _marked(seconds: Tensor, rank: int) -> Tensor:
    """Returns times as integers that also hold the number of the rank. Of equal times, that of the lowest rank is the largest."""
    marked: Tensor = ((seconds * 1e9).round().long() << _RANK_BITS) | (_LAST_RANK - rank)
    return marked


def _largest(values: Tensor, group: Any) -> None:
    torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)


def idle_low(waited: Tensor, seconds: Tensor) -> float | None:
    """Returns the lower end of the 95 % interval of the idle fraction.

    The waits of neighbouring steps are not independent, because workers deliver several batches in a row. So the steps are cut
    into a few long blocks. The sums over these blocks are nearly independent (batch means). The idle fraction is a ratio of two
    sums. Its error follows from the differences between the waiting of each block and the mean share of the block's time.

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
    """Share of a job's training time in which it waited for input, 0 to 1.

    ``update`` takes the steps of one rank. ``compute`` joins all ranks. If they have made different numbers of steps, it raises a
    ValueError on all of them. There may be up to 65,536 ranks.

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
            ValueError: The two are not equally long.
        """
        if len(waited) != len(seconds):
            raise ValueError(f"waited and seconds must be equally long, got {len(waited)} and {len(seconds)} steps")
        added = torch.stack([torch.as_tensor(part, dtype=torch.float32, device=self.device) for part in (waited, seconds)])
        self.per_step = torch.cat([self.per_step, added], dim=1)

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        """Joins the steps of all ranks, see torchmetrics. Uses reductions, unless another ``dist_sync_fn`` is given."""
        super().sync(dist_sync_fn or self.dist_sync_fn or _join, process_group, should_sync, distributed_available)

    def compute(self) -> Tensor:
        """Returns the job's idle fraction, shape (); NaN before the first step."""
        steps = self.steps()
        return torch.tensor(float("nan") if steps is None else steps.idle_fraction, device=self.device)

    def steps(self, first: int = 0) -> JobSteps | None:
        """Returns the job's steps from number ``first`` on, or None if there are none.

        Within ``sync_context()`` the steps of all ranks are joined. Otherwise they are the steps of this rank.

        Args:
            first: Number of the first step to return, from 0.
        """
        if first >= self.per_step.shape[-1]:
            return None
        per_step = self.per_step[..., first:].cpu()
        if per_step.shape[-2] == 3:  # joined
            longest, rank, seconds = per_step[0]
            return _of_joined(longest, rank.long(), seconds)
        per_step = per_step.reshape(-1, *per_step.shape[-2:])  # (ranks, 2, steps): own steps, or gathered by another function
        return job_steps(per_step[:, 0], per_step[:, 1])


class EchoCounter(Metric):
    """Counts fresh and echoed examples over all ranks.

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
