"""The sizes that a plan works with, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_echo.planning.ratio import EchoRatio

__all__ = ["PlanShape", "Reuse", "smallest_buffer"]


class Reuse(str, Enum):
    """Which items are used again, see ``plan.py``."""

    each = "each"
    """Each fresh item is used ``e`` times."""

    memory = "memory"
    """Echoes are drawn from all items that memory holds."""

    def __str__(self) -> str:
        return self.value


def smallest_buffer(batch_size: int, factor: float, workers: int) -> int:
    """Returns how many live items a rank needs to fill a batch: ``B - floor(B / e)`` for each worker."""
    return max(workers, 1) * (batch_size - EchoRatio.of(factor).fewest_fresh(batch_size))


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """What stays the same while a plan runs. Sizes count items: examples, or batches if whole batches are reused.

    Attributes:
        batch_size: Items in a full batch.
        last_batch_size: Items in the last batch of the plain loader's epoch, which may be a full one.
        batches_per_pass: Batches of the plain loader in one epoch on this rank.
        workers: Number of worker processes, each with its own buffer. 0 counts as one.
        buffer_size: The largest number of live items of a rank.
        seed: Seed of the draws.
        distinct: Whether a batch must not hold an index twice. It makes no difference for whole batches.
        reuse: The rule of reuse.
        most_distance: The largest number of positions that the order keeps between two fresh uses of an index; None: as many as
            are needed.
        phase: Number of batches of a pass that come before batch 0, if a run begins within a pass.
    """

    batch_size: int
    last_batch_size: int
    batches_per_pass: int
    workers: int
    buffer_size: int
    seed: int
    distinct: bool = True
    reuse: Reuse = Reuse.each
    most_distance: int | None = None
    phase: int = 0

    @property
    def pass_length(self) -> int:
        """Number of items in one pass on this rank."""
        return (self.batches_per_pass - 1) * self.batch_size + self.last_batch_size

    @property
    def buffer_in_pass(self) -> int:
        """The part of the buffer that a short pass can fill without holding an index twice."""
        if not self.distinct or self.pass_length >= self.buffer_size + self.batch_size:
            return self.buffer_size
        return max((self.pass_length - self.batch_size) // 2, 0)

    @cached_property  # asked for in every batch
    def max_age(self) -> int:
        """Number of positions for which an item may be live, so that no batch holds an index twice (see ``plan.py``).

        If a pass is not longer than the buffer, this is impossible. Items may then stay live, because exact counts come first.
        """
        if not self.distinct or self.pass_length <= self.buffer_size:
            return 1 << 62
        return self.distance

    @property
    def distance(self) -> int:
        """Number of positions that must lie between two fresh uses of an index; 0 if none must."""
        if not self.distinct:
            return 0
        least = self.buffer_in_pass + self.batch_size
        slack = 2 * max(self.workers, 1) * max(self.batch_size, 16)
        most = self.pass_length if self.most_distance is None else self.most_distance
        # In a short pass, half of what is to spare goes to the slack, and half to the shuffling of the next pass.
        return min(most, least + min(slack, max(self.pass_length - least, 0) // 2))

    def size_of(self, number: int) -> int:
        """Returns the size of batch ``number``: that of the plain loader, epoch after epoch. A fresh pass may end elsewhere."""
        ends_pass = (number + self.phase + 1) % self.batches_per_pass == 0
        return self.last_batch_size if ends_pass else self.batch_size
