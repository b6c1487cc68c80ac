"""How long a training is busy with an example, and what follows from that for the factors of all that share.

Each training tells the reader how long it is busy with an example, and not how long it waited. The others reckon with that: of
two controllers, neither drives the other one up.
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

_STEPS = 15  # of which the median says how long a step takes


class Pace:
    """Measures a training, step by step.

    Args:
        attachment: Is told how long the training is busy, and says how fast items can come.
        examples_of_item: Returns how many examples an item of the reader's is, on all ranks.
    """

    def __init__(self, attachment: Attachment, examples_of_item: Callable[[], float]) -> None:
        self._attachment, self._examples_of_item = attachment, examples_of_item
        self._handed_out: tuple[float, float] | None = None  # when the last batch was, and how many items that was
        self._busy_nanoseconds: deque[int] = deque(maxlen=_STEPS)

    def note_step(self) -> None:
        """Notes how long the training was busy with the last batch: the median of a few, since validation comes between two."""
        if self._handed_out is not None:
            began, items = self._handed_out
            self._busy_nanoseconds.append(int((perf_counter() - began) * 1e9 / items))
            self._attachment.need_nanoseconds = int(median_low(self._busy_nanoseconds))

    def handed_out(self, report: Report) -> Report:
        """Notes that a batch is handed out now.

        Returns:
            Its report, with the time between two fresh examples in place of how long this training waited for them. Waiting
            depends on what is prepared by then: no factor follows from it. What counts is how fast examples can come: as the
            reader prepares them, or as another training takes them that the reader waits for. Of that training it is the time
            that it would take if it never waited and did not echo. So the slower of two sees a faster one, whatever factor that
            has.
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
        attachment: The connection; closed with the pipeline.
        pace: The measurements.

    Attributes:
        exact: Whether a resumed run finds the same order again.
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
        """Lets a factor count from batch ``number`` on."""
        self._inner.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns what a run goes on from after so many batches."""
        return self._inner.state(delivered)

    def close(self) -> None:
        """Leaves the reader."""
        self._attachment.stop()
        self._inner.close()
        self._attachment.close()
