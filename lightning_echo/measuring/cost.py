"""The cost model: the time per step at any echo factor, from measured seconds, and the smallest factor that feeds the device.

    host time per batch        h(e) = (reused / e + redone) / W          W workers
    time per step              T(e) = max(h(e), d)                       d: device time per step
                               T(e) = reused / e + redone + d            W = 0: nothing overlaps
    idle fraction              1 - d / T(e)
    speed-up                   S(e) = T(1) / T(e)

The insertion point decides which of the source, rest and collate seconds are reused, and which are redone.

Source: Choi et al. 2019, arXiv 1907.05550, section 2 (upstream and downstream time, their ratio R).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_echo.insertion import POINTS, InsertionPoint, Needs, earliest

__all__ = ["PipelineCosts"]


@dataclass(frozen=True)
class PipelineCosts:
    """The seconds that one batch costs if all its examples are fresh.

    Attributes:
        insertion_point: The name of an `InsertionPoint`, but not ``"auto"``.
        source_seconds: Worker time per batch before the insertion point.
        rest_seconds: Worker time per batch after the insertion point, without collate.
        collate_seconds: Worker time per batch for collate.
        device_seconds: Time per step in which the device is busy, transfer included.
        workers: Number of worker processes. With 0, loading and training take turns.

    Example:
        >>> costs = PipelineCosts("after_augmentation", 0.08, 0.0, 0.0, device_seconds=0.01, workers=2)
        >>> costs.step_seconds(1), costs.step_seconds(4), costs.speedup(8), costs.feeding_factor()
        (0.04, 0.01, 4.0, 4.0)
    """

    insertion_point: str
    source_seconds: float
    rest_seconds: float
    collate_seconds: float
    device_seconds: float
    workers: int

    @classmethod
    def of_waiting(cls, step_seconds: float, idle_fraction: float, factor: float, workers: int = 1) -> PipelineCosts:
        """Returns the costs of a pipeline whose workers cannot be measured. They follow from the time that steps waited.

        While the device waits, a step lasts as long as the host needs for a batch. Without workers, the host needs the time that
        the device waited.

        Args:
            step_seconds: Time per step, with the waiting.
            idle_fraction: Share of that time in which the device waited. It must be clearly more than 0.
            factor: Echo factor in force. Whole batches are assumed to be reused.
            workers: Number of worker processes. Only 0 makes a difference: loading and training take turns.
        """
        host = step_seconds if workers else step_seconds * idle_fraction
        return cls(earliest(Needs.batches).value, host * factor, 0.0, 0.0, step_seconds * (1 - idle_fraction), min(workers, 1))

    @property
    def reused_seconds(self) -> float:
        """Worker time per batch that echoing saves."""
        return self._total_seconds if InsertionPoint(self.insertion_point).by_batches else self.source_seconds

    @property
    def redone_seconds(self) -> float:
        """Worker time per batch that no echo factor saves."""
        return self._total_seconds - self.reused_seconds

    @property
    def upstream_seconds(self) -> float:
        """Host time per fresh batch when all workers work on it: the paper's upstream time."""
        return self.reused_seconds / max(self.workers, 1)

    @property
    def _total_seconds(self) -> float:
        return self.source_seconds + self.rest_seconds + self.collate_seconds

    def host_seconds(self, factor: float) -> float:
        """Returns the host time per batch at an echo factor."""
        return (self.reused_seconds / factor + self.redone_seconds) / max(self.workers, 1)

    def step_seconds(self, factor: float) -> float:
        """Returns the time per step at an echo factor."""
        host = self.host_seconds(factor)
        return max(host, self.device_seconds) if self.workers else host + self.device_seconds

    def idle_fraction(self, factor: float) -> float:
        """Returns the share of the time in which the device waits, at an echo factor."""
        seconds = self.step_seconds(factor)
        return 1 - self.device_seconds / seconds if seconds else 0.0

    def speedup(self, factor: float) -> float:
        """Returns the steps per second at an echo factor, relative to factor 1."""
        seconds = self.step_seconds(factor)
        return self.step_seconds(1) / seconds if seconds else 1.0

    def feeding_factor(self, idle_fraction: float = 0.0) -> float:
        """Returns the smallest factor that brings the device's idle fraction down to a target; infinite if no factor does.

        Args:
            idle_fraction: The target, in [0, 1).
        """
        longest_step = self.device_seconds / (1 - idle_fraction)
        worker_seconds = longest_step * self.workers if self.workers else longest_step - self.device_seconds
        left_for_reused = worker_seconds - self.redone_seconds
        if not self.reused_seconds and left_for_reused >= 0:
            return 1.0
        return max(1.0, self.reused_seconds / left_for_reused) if left_for_reused > 0 else math.inf

    def slower(self, ratio: float) -> PipelineCosts:
        """Returns the costs of the same pipeline on a host that takes ``ratio`` times as long."""
        return replace(
            self,
            source_seconds=self.source_seconds * ratio,
            rest_seconds=self.rest_seconds * ratio,
            collate_seconds=self.collate_seconds * ratio,
        )

    def at_later_points(self) -> list[PipelineCosts]:
        """Returns the costs of the same pipeline at each later insertion point whose cost is known, earliest first.

        More of the pipeline is reused there. Echoing after the transfer is left out, because the transfer takes no host time.
        """
        source = self.source_seconds + self.rest_seconds
        return [
            replace(self, insertion_point=point.value, source_seconds=source, rest_seconds=0.0)
            for point in self._later()
            if "augment" in point.properties.reused and "transfer" in point.properties.redone
        ]

    def later_points_of_unknown_cost(self) -> list[InsertionPoint]:
        """Returns the later points that reuse a part of ``rest_seconds``. How large that part is was not measured."""
        return [point for point in self._later() if "augment" in point.properties.redone]

    def _later(self) -> tuple[InsertionPoint, ...]:
        return POINTS[POINTS.index(InsertionPoint(self.insertion_point)) + 1 :]
