"""The sizes that an echo plan works with, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_echo.planning.ratio import EchoRatio

__all__ = ["PlanShape", "smallest_buffer"]


def smallest_buffer(batch_size: int, factor: float, workers: int) -> int:
    """Live examples a rank needs so that a batch can be filled: ``B - floor(B / e)`` for each worker."""
    return max(workers, 1) * (batch_size - EchoRatio.of(factor).fewest_fresh(batch_size))


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """What stays the same while a plan runs. Sizes count items: examples, or batches where they are reused.

    Attributes:
        batch_size: Items in a full batch.
        last_batch_size: Items in the last batch of a pass (equal to ``batch_size`` where they divide it).
        batches_per_pass: Batches of the plain loader in one epoch on this rank.
        workers: Worker processes, each with a buffer of its own; 0 counts as one.
        buffer_size: Most live items per rank.
        seed: Seed of the draws.
        distinct: Whether an index must not be twice in a batch; no matter for whole batches.
    """

    batch_size: int
    last_batch_size: int
    batches_per_pass: int
    workers: int
    buffer_size: int
    seed: int
    distinct: bool = True

    @property
    def pass_length(self) -> int:
        """Items that one pass holds on this rank."""
        return (self.batches_per_pass - 1) * self.batch_size + self.last_batch_size

    @property
    def buffer_in_pass(self) -> int:
        """The part of the buffer that a small pass can fill without holding an example twice."""
        if not self.distinct or self.pass_length >= self.buffer_size + self.batch_size:
            return self.buffer_size
        return max((self.pass_length - self.batch_size) // 2, 0)

    @cached_property  # asked for in every batch
    def max_age(self) -> int:
        """Positions of the fresh stream for which an example may be live, so that it is never twice in a batch (see plan.py).

        A pass that does not even hold the buffer cannot promise that: then exact counts come first.
        """
        if not self.distinct or self.pass_length <= self.buffer_size:
            return 1 << 62
        return self.distance

    @property
    def distance(self) -> int:
        """Positions that are to lie between two uses of an index as a fresh example, 0 if none are."""
        if not self.distinct:
            return 0
        least = self.buffer_in_pass + self.batch_size
        slack = 2 * max(self.workers, 1) * max(self.batch_size, 16)
        # In a short pass half of what there is to spare goes to the slack, half to shuffling the next pass.
        return min(self.pass_length, least + min(slack, max(self.pass_length - least, 0) // 2))

    def size_of(self, number: int) -> int:
        """Items in batch ``number``: those of the plain loader, pass after pass."""
        return self.last_batch_size if (number + 1) % self.batches_per_pass == 0 else self.batch_size
