"""How long a training is busy with an example. The other trainings need this time to decide on their factors.

Each training tells the reader how long it is busy with an example, and not how long it waited. The others calculate with this
time. So two controllers do not drive each other's factors up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median_low
from time import perf_counter
from typing import Any

from lightning_echo.fetching.restartable_pipeline import Pipeline
from lightning_echo.sharing.taking.attachment import Attachment
from lightning_echo.workers.seconds import Report

__all__ = ["Pace", "PacedPipeline"]

_STEPS = 15  # the time of a step is the median of so many steps


class Pace:
    """Measures a training, step by step.

    Args:
        attachment: Gets the time that the training is busy, and says how fast items can come.
        examples_of_item: Returns the number of examples in an item of the reader, for all ranks together.
    """

    def __init__(self, attachment: Attachment, examples_of_item: Callable[[], float]) -> None:
        self._attachment, self._examples_of_item = attachment, examples_of_item
        self._handed_out: tuple[float, float] | None = None  # the time of the last batch, and how many items it had
        self._busy_nanoseconds: deque[int] = deque(maxlen=_STEPS)

    def note_step(self) -> None:
        """Notes how long the training was busy with the last batch: the median of a few, since validation may come between."""
        if self._handed_out is not None:
            began, items = self._handed_out
            self._busy_nanoseconds.append(int((perf_counter() - began) * 1e9 / items))
            self._attachment.need_nanoseconds = int(median_low(self._busy_nanoseconds))

    def handed_out(self, report: Report) -> Report:
        """Notes that the training gets a batch now.

        Returns:
            The report of the batch. In place of the time that this training waited for fresh examples, it has the time between
            two fresh examples. No factor follows from the waiting, because that depends on what is prepared by then. What counts
            is how fast examples can come: as fast as the reader prepares them, or as fast as a slower training takes them for
            which the reader waits. For that training, its time without waiting and without echoing counts. So the slower of two
            trainings sees a faster one, whatever factor the faster one has.
        """
        per_item = self._examples_of_item()
        self._handed_out = perf_counter(), max(report.fresh + report.echoed, 1) / per_item
        if not report.fresh:
            return report
        return report._replace(source=report.fresh / per_item * self._attachment.seconds_per_example)


class PacedPipeline:
    """The pipeline of a training over a `SharedStream`, measured. See `IndexPipeline`.

    Args:
        inner: The pipeline.
        attachment: The connection. It is closed with the pipeline.
        pace: The measurements.

    Attributes:
        exact: Whether a resumed run gets the same order.
    """

    def __init__(self, inner: Pipeline, attachment: Attachment, pace: Pace) -> None:
        self._inner, self._attachment, self._pace = inner, attachment, pace
        self.exact = inner.exact

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the next batch and its report; None if a pass has ended."""
        self._pace.note_step()
        found = self._inner.next_batch(delivered)
        return None if found is None else (found[0], self._pace.handed_out(found[1]))

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` on."""
        self._inner.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state from which a run resumes after ``delivered`` batches."""
        return self._inner.state(delivered)

    def close(self) -> None:
        """Leaves the reader."""
        self._attachment.stop()
        self._inner.close()
        self._attachment.close()
