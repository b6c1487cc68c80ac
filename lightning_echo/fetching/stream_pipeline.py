"""A started pipeline over a stream: what `IndexPipeline` is where there are indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_echo.fetching.prefetch import Prefetcher
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.stream_requests import StreamAnswers, StreamPlace, StreamRequests
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting.randomness import PreservingIterator
from lightning_echo.workers.seconds import Report

__all__ = ["StreamPipeline"]


class StreamPipeline:
    """Hands out batch after batch, each with its counts of examples and the seconds that it took.

    Args:
        source: The user's loader, over a stream.
        shape: Sizes of the plan of one worker, and the seed of its draws.
        key: Seed of this rank's random numbers.
        factor: Echo factor to begin with.
        state: ``stream`` of a `state`; None to begin anew.
        delivered: Batches of the run before.
        worker_init_fn: For the workers.
    """

    exact = True

    def __init__(
        self,
        source: Source,
        shape: PlanShape,
        key: int,
        factor: float,
        state: dict[str, Any] | None,
        *,
        delivered: int,
        worker_init_fn: Any,
    ) -> None:
        if state is None:
            place, factors, pending = StreamPlace.first(max(source.num_workers, 1)), [(0, factor)], []
        else:
            place = StreamPlace.from_state(state)
            factors, pending = ([(at, value) for at, value in state[name]] for name in ("factors", "pending"))
        self._requests = StreamRequests(place, factors, pending, source.prefetched_batches)
        self._places = {delivered: place}  # after the last batches
        self._workers = WorkerProcesses()
        answers = iter(source.rebuild_stream(self._requests, shape, key, worker_init_fn, self._workers))
        items = StreamAnswers(answers, self._requests, place, delivered)
        in_thread = source.num_workers > 0
        self._items: Iterator[Any] | None = Prefetcher(items, lost=self._workers.lost) if in_thread else PreservingIterator(items)

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """The next batch, its counts and seconds; None: a pass has ended.

        Args:
            delivered: Batches of the run before.
        """
        assert self._items is not None
        batch, report, place = next(self._items)
        self._places = {delivered: self._places[delivered], delivered + (report is not None): place}
        return None if report is None else (batch, report)

    def change_factor(self, number: int, factor: float) -> None:
        """Lets a factor count from batch ``number`` on."""
        self._requests.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """What a run goes on from after so many batches: those delivered last, or one less."""
        place = self._places[delivered]
        return {"plan": None, "order": None, "stream": {**place.state(), **self._requests.state(place.request)}}

    def close(self) -> None:
        """Lets go of workers and thread."""
        items, self._items = self._items, None
        if isinstance(items, Prefetcher):
            items.close()
        self._workers.end_others()
