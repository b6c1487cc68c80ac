"""The pipeline of a run: started, or at rest. In both cases it has a state.

At rest there are no workers and no thread, only the state from which the next started pipeline continues.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from lightning_echo.fetching.layout import Start
from lightning_echo.workers.seconds import Report

__all__ = ["Pipeline", "RestartablePipeline"]

_BEGINNING: dict[str, Any] = {"plan": None, "order": None}


class Pipeline(Protocol):
    """The methods of a started pipeline that a run calls. It is an `IndexPipeline` or a `StreamPipeline`."""

    @property
    def exact(self) -> bool:
        """Whether a resumed run gets the same order."""

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the batch after ``delivered`` batches of the run, and its report; None if a pass has ended here."""

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` of the run on."""

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state from which a run continues after ``delivered`` batches: those delivered so far, or one or two less.

        Not less than the number of batches delivered when the pipeline was started.
        """

    def close(self) -> None:
        """Ends the workers and the thread."""


class RestartablePipeline:
    """The started pipeline, or, at rest, the state from which the next one continues.

    Attributes:
        begin_at: Where a pipeline without a state begins.
        started: The started pipeline; None at rest.
    """

    def __init__(self) -> None:
        self.begin_at = Start(0, 0)
        self.started: Pipeline | None = None
        self._at_rest = _BEGINNING
        self._one_before: tuple[int, dict[str, Any]] | None = None  # a number of batches, one less than at rest; the state there
        self._started_after = 0  # batches
        # The started pipeline again, in a list that can outlive this object: when this object is dropped, its pipeline is closed.
        self._to_close: list[Pipeline] = []
        self._finalizer = weakref.finalize(self, _close_all, self._to_close)

    def start(self, pipeline: Pipeline, delivered: int) -> Pipeline:
        """Takes a pipeline that was started after ``delivered`` batches of the run, and returns it."""
        self.started, self._started_after, self._one_before = pipeline, delivered, None
        self._to_close.append(pipeline)
        self._at_rest = _BEGINNING
        return pipeline

    def stop(self, delivered: int) -> None:
        """Ends the workers and the thread. The next pipeline continues after ``delivered`` batches of the run."""
        if self.started is not None:
            self._at_rest, before = self.state(delivered), delivered - 1
            self._one_before = (before, self.state(before)) if before >= self._started_after else None
            self._close()

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state from which a run continues after ``delivered`` batches: that of plan and order, or of a stream.

        Its types are plain, see `EchoState.pipeline`.
        """
        if self.started is not None:
            return self.started.state(delivered)
        if self._one_before is not None and self._one_before[0] == delivered:
            return self._one_before[1]
        return self._at_rest

    def reaches(self, delivered: int) -> bool:
        """Returns whether `state` knows the state after ``delivered`` batches, which may be one less than those delivered."""
        if self.started is not None:
            return delivered >= self._started_after
        return self._one_before is not None and self._one_before[0] == delivered

    def resting(self, delivered: int) -> RestartablePipeline:
        """Returns a pipeline at rest, in the state after ``delivered`` batches, for a process that is spawned with a loader."""
        rests = RestartablePipeline()
        rests.begin_at = self.begin_at
        rests._at_rest = self.state(delivered)
        return rests

    def go_to(self, begin_at: Start, state: dict[str, Any] | None = None) -> None:
        """Ends the workers and the thread. The next pipeline continues from a `state`, or else begins without live examples."""
        self._close()
        self._at_rest, self._one_before, self.begin_at = state or _BEGINNING, None, begin_at

    def wait_with(self, state: dict[str, Any]) -> None:
        """Lets the next pipeline continue from another `state`. It may only be called at rest."""
        self._at_rest, self._one_before = state, None

    def _close(self) -> None:
        self.started = None
        _close_all(self._to_close)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a pipeline that is `resting`."""
        return {name: vars(self)[name] for name in ("begin_at", "_at_rest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RestartablePipeline.__init__(self)
        self.__dict__.update(state)


def _close_all(pipelines: list[Pipeline]) -> None:
    while pipelines:
        pipelines.pop().close()
