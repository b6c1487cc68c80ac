"""`RunCounts`: the fresh and echoed examples of a run on all ranks, also after a resume.

A checkpoint holds only the state of rank 0. So the state of this object holds the counts of the whole job.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_echo.measuring.metrics import EchoCounter

__all__ = ["Examples", "RunCounts"]


class Examples(NamedTuple):
    """Numbers of examples.

    Attributes:
        fresh: Fresh examples.
        echoed: Echoed examples.
    """

    fresh: int = 0
    echoed: int = 0


class RunCounts:
    """Joins the examples delivered on this rank with those of the other ranks.

    Attributes:
        counter: The metric that counts the examples delivered in the run.
        totals: Examples of the job when the ranks last added them up.
    """

    def __init__(self) -> None:
        self.counter = EchoCounter()
        self.totals = Examples()
        self._in_metric_at_totals = Examples()  # examples that the metric had counted on this rank then
        self._counted = Examples()  # of the examples delivered on this rank, those that the metric has counted

    def go_on_from(self, delivered: Examples) -> None:
        """Notes what this rank has delivered so far. The totals that were loaded contain it."""
        self._counted, self._in_metric_at_totals = delivered, self._in_metric()

    def skip_to(self, delivered: Examples) -> None:
        """Begins to count here, because a loader that was made anew may begin at 0, or at another number."""
        self._counted = delivered

    def update(self, delivered: Examples) -> None:
        """Counts the examples that this rank has delivered since the last call."""
        self.counter.update(delivered.fresh - self._counted.fresh, delivered.echoed - self._counted.echoed)
        self._counted = delivered

    def add_up(self) -> Examples:
        """Adds up the examples of all ranks, which must call this together."""
        counts = self.counter.compute()
        self.totals = Examples(int(counts["fresh_examples"]), int(counts["echoed_examples"]))
        self._in_metric_at_totals = self._in_metric()
        return self.totals

    def state(self, world_size: int) -> list[int]:
        """Returns the job's fresh and echoed examples.

        It assumes that since the totals every other rank has counted as many examples as this one.
        """
        now, then = self._in_metric(), self._in_metric_at_totals
        return [
            self.totals.fresh + world_size * (now.fresh - then.fresh),
            self.totals.echoed + world_size * (now.echoed - then.echoed),
        ]

    def load(self, state: list[int]) -> None:
        """Restores what `state` returned."""
        self.totals = Examples(*state)
        self.counter.reset()
        self.counter.update(self.totals.fresh, self.totals.echoed)

    def _in_metric(self) -> Examples:
        return Examples(*self.counter.counts.tolist())
