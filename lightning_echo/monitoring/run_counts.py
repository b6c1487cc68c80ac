"""`RunCounts`: fresh and echoed examples of a run, all ranks, also after a resume: a checkpoint holds rank 0's state alone."""

from __future__ import annotations

from lightning_echo.measuring.metrics import EchoCounter

__all__ = ["RunCounts"]


class RunCounts:
    """Adds up what this rank has delivered with what the other ranks have.

    Attributes:
        counter: Examples delivered in the run.
        totals: Fresh and echoed examples of the job when they were last added up.
    """

    def __init__(self) -> None:
        self.counter = EchoCounter()
        self.totals = (0, 0)
        self._at_totals = (0, 0)  # what the metric had counted on this rank then
        self._counted = (0, 0)  # of the examples delivered on this rank, those that the metric knows of

    def go_on(self, delivered: tuple[int, int]) -> None:
        """What was delivered on this rank so far is in the totals already."""
        self._counted, self._at_totals = delivered, self._in_metric()

    def skip_to(self, delivered: tuple[int, int]) -> None:
        """Counts from here on: a loader that was made anew may begin at 0, or elsewhere."""
        self._counted = delivered

    def update(self, delivered: tuple[int, int]) -> None:
        """Counts what this rank has delivered since the last time."""
        self.counter.update(delivered[0] - self._counted[0], delivered[1] - self._counted[1])
        self._counted = delivered

    def add_up(self) -> tuple[int, int]:
        """Over all ranks, which must call it together."""
        counts = self.counter.compute()
        self.totals = (int(counts["fresh_examples"]), int(counts["echoed_examples"]))
        self._at_totals = self._in_metric()
        return self.totals

    def state(self, world_size: int) -> list[int]:
        """The job's counts. What other ranks have counted since they were added up is taken to be what this one has."""
        since = [now - then for now, then in zip(self._in_metric(), self._at_totals, strict=True)]
        return [total + world_size * added for total, added in zip(self.totals, since, strict=True)]

    def load(self, state: list[int]) -> None:
        """Goes on from `state`."""
        fresh, echoed = state
        self.counter.reset()
        self.counter.update(fresh, echoed)
        self.totals = (fresh, echoed)

    def _in_metric(self) -> tuple[int, int]:
        fresh, echoed = self.counter.counts.tolist()
        return fresh, echoed
