"""The arms of a task: what differs from run to run beside seed and learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from learning.task import Task
from lightning_echo.plan.plan import smallest_buffer

__all__ = ["Arm", "first_arms", "further_arms"]

FACTORS = (2, 4, 8)
LARGE_BATCH = 4  # times the task's batch size
USUAL_BUFFER_BATCHES, LARGE_BUFFER_BATCHES = 2, 16
LARGE_BATCH_BUDGET = 3  # times the budget: fewer steps are in as many examples


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        factor: Echo factor.
        point: Insertion point; at factor 1 it changes nothing.
        buffer: ``"usual"`` (`USUAL_BUFFER_BATCHES`, twice as many where batches are reused: the package's default until these
            runs), ``"small"`` (the least that fills a batch), ``"large"`` (`LARGE_BUFFER_BATCHES`, the default since), or
            ``"default"`` (what the package chooses).
        batch_multiple: Batch size in multiples of the task's.
        cached_share: 1, or 1/e: trained without echoing on this share of the data, fixed, each example read once and then
            kept. Counted as if echoed, one fresh example per e delivered, so that arms compare at equal steps.
    """

    factor: int = 1
    point: str = "none"
    buffer: str = "usual"
    batch_multiple: int = 1
    cached_share: float = 1.0

    @property
    def name(self) -> str:
        """In tables and CSV files."""
        if self.cached_share < 1:
            return f"fixed 1/{round(1 / self.cached_share)} of the data"
        parts = ["no echo" if self.factor == 1 else f"{self.point}, e={self.factor}"]
        parts += [] if self.buffer == "usual" else [f"{self.buffer} buffer"]
        parts += [] if self.batch_multiple == 1 else [f"batch x{self.batch_multiple}"]
        return ", ".join(parts)

    @property
    def uses_per_fresh(self) -> int:
        """Steps' examples per fresh example."""
        return self.factor if self.cached_share == 1 else round(1 / self.cached_share)

    def budget_examples(self, task: Task) -> int:
        """Fresh examples after which a run ends."""
        return task.budget_examples * (1 if self.batch_multiple == 1 else LARGE_BATCH_BUDGET)

    def buffer_size(self, batch_size: int) -> int | None:
        """The buffer in the loader's items: examples, or batches."""
        if self.buffer == "default":
            return None
        by_batches = self.point == "after_batching"
        if self.buffer == "small":
            return 1 if by_batches else max(smallest_buffer(batch_size, self.factor, 1), 1)
        if self.buffer == "large":
            return LARGE_BUFFER_BATCHES * (1 if by_batches else batch_size)
        return USUAL_BUFFER_BATCHES * (2 if by_batches else batch_size)


def first_arms(task: Task) -> list[Arm]:
    """The arms that need no other one's result: no echo, points and factors, and a fixed share of the data for each factor."""
    points = dict.fromkeys(task.points, FACTORS if task.full else (2,))
    if not task.full:
        points[task.points[0]] = (2, 4)
    used = sorted({factor for factors in points.values() for factor in factors})
    echoed = [Arm(factor, point) for point, factors in points.items() for factor in factors]
    return [Arm(), *echoed, *(Arm(cached_share=1 / factor) for factor in used)]


def further_arms(task: Task, best_point: str) -> list[Arm]:
    """The arms at the point that was best at e = 4 on the tuning seeds: other buffers, and larger batches.

    Those at e = 2 and 8 with a large buffer came when the others had shown that it is the better default.
    """
    if not task.full:
        return []
    buffers = [Arm(4, best_point, buffer="small"), *(Arm(factor, best_point, buffer="large") for factor in FACTORS)]
    batches = [Arm(1, batch_multiple=LARGE_BATCH), *(Arm(factor, best_point, batch_multiple=LARGE_BATCH) for factor in (4, 8))]
    return [*buffers, *batches]
