"""The pipeline of a training, started or at rest: either way it has a state.

At rest there are no workers and no thread, only what the next start goes on from.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from lightning_echo.fetching.index_pipeline import IndexPipeline, Layout
from lightning_echo.fetching.stream_pipeline import StreamPipeline

__all__ = ["PipelineSlot", "Start"]

_BEGINNING: dict[str, Any] = {"plan": None, "order": None}


class Start(NamedTuple):
    """Where a pipeline begins that goes on from no state: a stream position, and the number of a batch."""

    position: int
    number: int


class PipelineSlot:
    """Holds the started `IndexPipeline` or `StreamPipeline`, or the state between two of them.

    Attributes:
        begin_at: Where a pipeline begins that goes on from no state.
        started: The started pipeline; None while it is at rest.
        layout: How the pass of the pipeline that was started last is cut; None before the first, and after a state was loaded.
    """

    def __init__(self) -> None:
        self.begin_at = Start(0, 0)
        self.layout: Layout | None = None
        self._at_rest = _BEGINNING
        self.started: IndexPipeline | StreamPipeline | None = None
        self._holder: list[IndexPipeline | StreamPipeline] = []  # the started one, apart: it can outlive self to be closed
        self._finalizer = weakref.finalize(self, _close_all, self._holder)

    def start(self, pipeline: IndexPipeline | StreamPipeline, layout: Layout) -> IndexPipeline | StreamPipeline:
        """From now on the pipeline is asked."""
        self.started = pipeline
        self._holder.append(pipeline)
        self.layout = layout
        self._at_rest = _BEGINNING
        return pipeline

    def stop(self, delivered: int) -> None:
        """Ends workers and thread; the next start goes on after so many batches of the run."""
        if self._holder:
            self._at_rest = self.state(delivered)
            self._close()

    def state(self, delivered: int) -> dict[str, Any]:
        """States of plan and order (or stream) after so many batches of the run: plain types, see `EchoState.pipeline`."""
        return self._holder[0].state(delivered) if self._holder else self._at_rest

    def resting(self, delivered: int) -> PipelineSlot:
        """The same without workers, after so many batches: for a process that is spawned with a loader."""
        rests = PipelineSlot()
        rests.begin_at, rests.layout = self.begin_at, self.layout
        rests._at_rest = self.state(delivered)
        return rests

    def go_to(self, begin_at: Start, state: dict[str, Any] | None = None) -> None:
        """Ends workers and thread; the next start goes on from a state as `state` gives it, or begins with nothing live."""
        self._close()
        self.layout = None
        self._at_rest, self.begin_at = state or _BEGINNING, begin_at

    def wait_with(self, state: dict[str, Any]) -> None:
        """Goes on from another state when it is started; only at rest."""
        self._at_rest = state

    def _close(self) -> None:
        self.started = None
        _close_all(self._holder)

    def __getstate__(self) -> dict[str, Any]:
        """Of one that is `resting`."""
        return {name: vars(self)[name] for name in ("begin_at", "layout", "_at_rest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        PipelineSlot.__init__(self)
        self.__dict__.update(state)


def _close_all(holder: list[IndexPipeline | StreamPipeline]) -> None:
    while holder:
        holder.pop().close()
