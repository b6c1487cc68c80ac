"""The pipeline of a training, started or at rest: either way it has a state, and takes a new factor.

At rest there are no workers and no thread, only what the next start goes on from.
"""

from __future__ import annotations

import weakref
from typing import Any

from lightning_echo.fetching.index_pipeline import IndexPipeline, Layout
from lightning_echo.fetching.stream_pipeline import StreamPipeline

__all__ = ["PipelineSlot"]


class PipelineSlot:
    """Holds the started `IndexPipeline` or `StreamPipeline`, or the state between two of them.

    Attributes:
        begin_at: Stream position and batch number at which a pipeline begins that goes on from no state.
        saved_for: What a loaded state depends on, until it is started from: point, layout, workers, buffer size.
        started: The started pipeline; None while it is at rest.
        layout: How the pass of the pipeline that was started last is cut; None before the first, and after a state was loaded.
    """

    def __init__(self) -> None:
        self.begin_at = (0, 0)
        self.saved_for: dict[str, Any] = {}
        self.layout: Layout | None = None
        self._at_rest: dict[str, Any] = {"plan": None, "order": None}
        self.started: IndexPipeline | StreamPipeline | None = None
        self._holder: list[IndexPipeline | StreamPipeline] = []  # the started one, apart: it can outlive self to be closed
        self._finalizer = weakref.finalize(self, _close_all, self._holder)

    def start(self, pipeline: IndexPipeline | StreamPipeline, layout: Layout) -> IndexPipeline | StreamPipeline:
        """From now on the pipeline is asked."""
        self.started = pipeline
        self._holder.append(pipeline)
        self.layout = layout
        self._at_rest, self.saved_for = {"plan": None, "order": None}, {}
        return pipeline

    def stop(self, delivered: int) -> None:
        """Ends workers and thread; the next start goes on after so many batches of the run."""
        if self._holder:
            self._at_rest = self.state(delivered)
            self._close()

    def state(self, delivered: int) -> dict[str, Any]:
        """States of plan and order (or stream) after so many batches of the run. None before the first start."""
        return self._holder[0].state(delivered) if self._holder else self._at_rest

    def resting(self, delivered: int) -> PipelineSlot:
        """The same without workers, after so many batches: for a process that is spawned with a loader."""
        rests = PipelineSlot()
        rests.begin_at, rests.saved_for, rests.layout = self.begin_at, self.saved_for, self.layout
        rests._at_rest = self.state(delivered)
        return rests

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state of the loader, which holds that of `state`."""
        self._close()
        self.layout = None
        self._at_rest = {name: state[name] for name in ("plan", "order", "stream") if name in state}
        self.begin_at = (state["begin_at"][0], state["begin_at"][1])
        self.saved_for = {name: state[name] for name in ("insertion_point", "layout", "workers", "buffer_size")}

    def go_to(self, position: int, number: int) -> None:
        """Ends workers and thread; the next start begins at a stream position and a batch number, and nothing is live."""
        self._close()
        self.layout = None
        self._at_rest, self.begin_at = {"plan": None, "order": None}, (position, number)

    def change_factor(self, number: int, factor: float) -> None:
        """Lets a factor count from batch ``number`` on; nothing to do before the first start."""
        if self._holder:
            self._holder[0].change_factor(number, factor)
        elif (planned := self._at_rest["plan"] or self._at_rest.get("stream")) is not None:
            pending = planned["pending"]
            pending[:] = [change for change in pending if change[0] < number] + [[number, factor]]

    def _close(self) -> None:
        self.started = None
        _close_all(self._holder)

    def __getstate__(self) -> dict[str, Any]:
        """Of one that is `resting`."""
        return {name: vars(self)[name] for name in ("begin_at", "saved_for", "layout", "_at_rest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        PipelineSlot.__init__(self)
        self.__dict__.update(state)


def _close_all(holder: list[IndexPipeline | StreamPipeline]) -> None:
    while holder:
        holder.pop().close()
