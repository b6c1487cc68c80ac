"""The cost model: from measured seconds to the time per step at any echo factor, and the smallest factor that feeds the device.

    host time per batch        h(e) = (reused / e + redone) / W          W workers
    time per step              T(e) = max(h(e), d)                       d: device time per step
                               T(e) = reused / e + redone + d            W = 0: nothing overlaps
    idle fraction              1 - d / T(e)
    speed-up                   S(e) = T(1) / T(e)

What is reused and what is redone of source, rest and collate is the insertion point's matter.

Source: Choi et al. 2019, arXiv 1907.05550, section 2 (upstream and downstream time, their ratio R).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_echo.insertion import POINTS, InsertionPoint, Needs, earliest

__all__ = ["PipelineCosts"]


@dataclass(frozen=True)
class PipelineCosts:
    """What one batch costs, were all its examples fresh.

    Attributes:
        insertion_point: The name of an `InsertionPoint`, but not ``"auto"``.
        source_seconds: Worker time per batch before the insertion point.
        rest_seconds: Worker time per batch after it, except collate.
        collate_seconds: Worker time per batch for collate.
        device_seconds: Time per step in which the device is busy, transfer included.
        workers: Worker processes; 0: loading and training take turns.

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
        """Of a pipeline that cannot be looked into: while the device waits, a step lasts as long as the host needs for it.

        Where loading and training take turns the host needs what is waited.

        Args:
            step_seconds: Time per step, waiting included.
            idle_fraction: Share of it in which the device waited; more than next to nothing.
            factor: Echo factor in force; whole batches are assumed to be reused.
            workers: 0: loading and training take turns. How many others there are makes no difference.
        """
        host = step_seconds if workers else step_seconds * idle_fraction
        return cls(earliest(Needs.batches).value, host * factor, 0.0, 0.0, step_seconds * (1 - idle_fraction), min(workers, 1))

    @property
    def reused_seconds(self) -> float:
        """Worker time per batch that echoing saves."""
        return self._total_seconds if InsertionPoint(self.insertion_point).by_batches else self.source_seconds

    @property
    def redone_seconds(self) -> float:
        """Worker time per batch that is spent whatever the factor."""
        return self._total_seconds - self.reused_seconds

    @property
    def upstream_seconds(self) -> float:
        """Host time per fresh batch, all workers working on it: the paper's upstream time."""
        return self.reused_seconds / max(self.workers, 1)

    @property
    def _total_seconds(self) -> float:
        return self.source_seconds + self.rest_seconds + self.collate_seconds

    def host_seconds(self, factor: float) -> float:
        """Host time per batch at an echo factor."""
        return (self.reused_seconds / factor + self.redone_seconds) / max(self.workers, 1)

    def step_seconds(self, factor: float) -> float:
        """Time per step at an echo factor."""
        host = self.host_seconds(factor)
        return max(host, self.device_seconds) if self.workers else host + self.device_seconds

    def idle_fraction(self, factor: float) -> float:
        """Share of the time in which the device waits."""
        seconds = self.step_seconds(factor)
        return 1 - self.device_seconds / seconds if seconds else 0.0

    def speedup(self, factor: float) -> float:
        """Steps per second, relative to factor 1."""
        seconds = self.step_seconds(factor)
        return self.step_seconds(1) / seconds if seconds else 1.0

    def feeding_factor(self, idle_fraction: float = 0.0) -> float:
        """The smallest factor at which the device waits no longer than a share of the time; infinite if none does.

        Args:
            idle_fraction: That share, in [0, 1).
        """
        room = self.device_seconds / (1 - idle_fraction)  # time per step that is short enough
        room = room * self.workers if self.workers else room - self.device_seconds
        room -= self.redone_seconds
        if not self.reused_seconds and room >= 0:
            return 1.0
        return max(1.0, self.reused_seconds / room) if room > 0 else math.inf

    def slower(self, ratio: float) -> PipelineCosts:
        """The same with a host that takes ``ratio`` times as long."""
        return replace(
            self,
            source_seconds=self.source_seconds * ratio,
            rest_seconds=self.rest_seconds * ratio,
            collate_seconds=self.collate_seconds * ratio,
        )

    def later_points(self) -> list[PipelineCosts]:
        """The same pipeline, echoed at each later point of which the cost is known: more of it is reused. Earliest first."""
        source = self.source_seconds + self.rest_seconds
        return [
            replace(self, insertion_point=point.value, source_seconds=source, rest_seconds=0.0)
            for point in self._later()
            if "augment" in point.properties.reused and "transfer" in point.properties.redone  # it is no host time
        ]

    def unknown_points(self) -> list[InsertionPoint]:
        """The later points that reuse a part of ``rest_seconds``: how large a part is not known, nor is their cost."""
        return [point for point in self._later() if "augment" in point.properties.redone]

    def _later(self) -> tuple[InsertionPoint, ...]:
        return POINTS[POINTS.index(InsertionPoint(self.insertion_point)) + 1 :]
