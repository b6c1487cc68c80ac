"""The runs of a study as figures: what the report needs of them."""

from __future__ import annotations

from collections.abc import Callable

from learning.reuse.due import ReuseProgress
from learning.reuse.rows import ReuseRow
from learning.reuse.studies import NO_ECHO, ReuseArm
from learning.rules import Interval, interval_of_median, ratios

__all__ = ["ReuseRuns"]


class ReuseRuns:
    """What the report needs of a study's runs.

    Args:
        progress: Its runs.
    """

    def __init__(self, progress: ReuseProgress) -> None:
        self.study, self.progress = progress.study, progress
        self._times: dict[tuple[ReuseArm, int], list[float]] = {}

    @property
    def batch_size(self) -> int:
        """Examples in a batch."""
        return self.study.task.batch_size

    def is_there(self, *arms: ReuseArm) -> bool:
        """Whether all of the report's runs of these arms are done."""
        return all(self.progress.reported(arm) for arm in arms)

    def figures(self, arm: ReuseArm, figure: Callable[[ReuseRow], float]) -> list[float]:
        """A figure of the report's runs of an arm, by seed."""
        return [figure(row) for row in self.progress.reported(arm)]

    def times(self, arm: ReuseArm, ratio: int) -> list[float]:
        """Time to the target in steps, behind a source that is ``ratio`` times too slow, by seed."""
        if (arm, ratio) not in self._times:
            self._times[arm, ratio] = self.figures(arm, lambda row: row.time_to_target(self.batch_size, ratio))
        return self._times[arm, ratio]

    def step_ratio(self, arm: ReuseArm) -> Interval:
        """Steps to the target divided by those without echoing, paired by seed."""
        ours, theirs = (self.figures(one, lambda row: row.steps_to_target) for one in (arm, NO_ECHO))
        return interval_of_median(ratios(ours, theirs))

    def time_ratio(self, arm: ReuseArm, partner: ReuseArm, ratio: int) -> Interval:
        """Time to the target divided by the partner's, paired by seed."""
        return interval_of_median(ratios(self.times(arm, ratio), self.times(partner, ratio)))
