"""What is asked of the workers that echo a stream: which pass, by which factor; and what their answers amount to.

``DataLoader`` hands request ``k`` to worker ``k % workers``, and asks for one more whenever it has received an answer. So
whatever is made to happen at a certain request or answer happens there in every run:

* a new factor counts for all requests that are not asked for yet when a certain batch has been received;
* a pass begins with the first request of worker 0 that is not asked for yet when the last worker says that its stream has ended.
  Requests before that one are answered without a batch by workers that have ended.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_echo.workers.seconds import Report
from lightning_echo.workers.streams import StreamNote, StreamRequest

__all__ = ["StreamAnswers", "StreamPlace", "StreamRequests"]


@dataclass(frozen=True)
class StreamPlace:
    """Where a run over a stream stands: after a batch, or between two passes.

    Attributes:
        request: The next one.
        number: Of the pass.
        begun: Whether the pass has a batch already.
        ended: Workers whose stream has ended in it.
        batches: How many each worker has made.
        workers: Their states, as they came.
    """

    request: int
    number: int
    begun: bool
    ended: frozenset[int]
    batches: tuple[int, ...]
    workers: tuple[bytes | None, ...]

    @classmethod
    def first(cls, workers: int) -> StreamPlace:
        """The start of a run."""
        return cls(0, 0, False, frozenset(), (0,) * workers, (None,) * workers)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StreamPlace:
        workers = tuple(None if saved is None else pickle.dumps(saved) for saved in state["workers"])
        return cls(state["request"], state["pass"], state["begun"], frozenset(state["ended"]), tuple(state["batches"]), workers)

    def state(self) -> dict[str, Any]:
        """Plain types where the stream's own state is."""
        return {
            "request": self.request,
            "pass": self.number,
            "begun": self.begun,
            "ended": sorted(self.ended),
            "batches": list(self.batches),
            "workers": [None if saved is None else pickle.loads(saved) for saved in self.workers],
        }


class StreamRequests:
    """The batch sampler: one `StreamRequest` after the other. Asked by the thread that fetches, told by the training's.

    Args:
        place: Where the run begins.
        factors: Since which request which factor counts, ascending; the first entry counts at ``place``.
        pending: Changes that are to come: from which batch of the run on, and the factor.
        prefetched: Requests that are always asked for ahead.

    Attributes:
        next: The next request.
        begins_at: The one with which the pass began.
    """

    def __init__(
        self, place: StreamPlace, factors: list[tuple[int, float]], pending: list[tuple[int, float]], prefetched: int
    ) -> None:
        self._workers, self._first, self._prefetched = len(place.workers), place.request, prefetched
        self.next = place.request - place.request % self._workers  # worker 0 is asked first, though it may not be its turn
        self._number, self.begins_at = place.number, place.request
        self._factors, self._pending = factors, pending
        self._resume: list[bytes | int | None] = [None] * self._workers
        if place.request:
            self._resume = [made if state is None else state for state, made in zip(place.workers, place.batches, strict=True)]
        self._lock = threading.RLock()

    def __iter__(self) -> StreamRequests:
        return self

    def __next__(self) -> StreamRequest:
        with self._lock:
            at, self.next = self.next, self.next + 1
            worker = at % self._workers
            resume, self._resume[worker] = self._resume[worker], None
            if at < self._first:
                return StreamRequest(-1, 1.0, resume)
            return StreamRequest(self._number if at >= self.begins_at else self._number - 1, self._factor_at(at), resume)

    def begin_pass(self) -> None:
        """Lets the next pass begin."""
        with self._lock:
            self._number += 1
            self.begins_at = -(-self.next // self._workers) * self._workers

    def change_factor(self, number: int, factor: float) -> None:
        """Lets a factor count from batch ``number`` of the run on, which must not be asked for yet."""
        with self._lock:
            self._pending[:] = [change for change in self._pending if change[0] < number] + [(number, factor)]

    def has_received(self, batches: int) -> None:
        """Says how many batches of the run have been received."""
        with self._lock:
            while self._pending and self._pending[0][0] <= batches + self._prefetched:
                self._factors.append((self.next, self._pending.pop(0)[1]))

    def state(self, request: int) -> dict[str, Any]:
        """The factors from a request on: plain types."""
        with self._lock:
            later = [list(change) for change in self._factors if change[0] > request]
            return {
                "factors": [[request, self._factor_at(request)], *later],
                "pending": [list(change) for change in self._pending],
            }

    def _factor_at(self, request: int) -> float:
        return next(factor for since, factor in reversed(self._factors) if since <= request)


class StreamAnswers:
    """Receives what the workers answer, in the thread that fetches.

    Yields (batch, its counts and seconds, place after it), and between two passes (None, None, place).

    Args:
        answers: Of the rebuilt loader: batch or None, counts and seconds, note.
        requests: What is asked for.
        place: Where the run begins.
        received: Batches of the run before.
    """

    def __init__(
        self,
        answers: Iterator[tuple[Any, Report, StreamNote]],
        requests: StreamRequests,
        place: StreamPlace,
        received: int,
    ) -> None:
        self._answers, self._requests, self._place, self._received = answers, requests, place, received
        self._at = place.request - place.request % len(place.workers)  # the request that is answered next

    def __iter__(self) -> StreamAnswers:
        return self

    def __next__(self) -> tuple[Any, Report | None, StreamPlace]:
        while self._at < self._requests.begins_at:  # asked for before it was known where the pass begins
            self._next_answer()
        self._requests.has_received(self._received)
        while len(self._place.ended) < len(self._place.workers):
            batch, report, note = self._next_answer()
            made = any(report[:2])  # a batch may itself be None: collate functions return that for examples that are all broken
            self._place = _after(self._place, note, made=made)
            if made:
                self._received += 1
                return batch, report, self._place
        if not self._place.begun:
            raise RuntimeError(
                f"the stream yielded no batch in pass {self._place.number}: it must have examples each time it is iterated "
                "(with drop_last=True, a full batch in at least one worker)"
            )
        self._requests.begin_pass()
        place, first = self._place, self._requests.begins_at
        self._place = StreamPlace(first, place.number + 1, False, frozenset(), place.batches, place.workers)
        return None, None, self._place

    def _next_answer(self) -> tuple[Any, Report, StreamNote]:
        self._at += 1
        return next(self._answers)


def _after(place: StreamPlace, note: StreamNote, *, made: bool) -> StreamPlace:
    """The place after one more answer."""
    worker = note.worker
    batches, states = list(place.batches), list(place.workers)
    batches[worker] += made
    states[worker] = note.state
    ended = place.ended | {worker} if note.ended else place.ended
    return replace(
        place, request=place.request + 1, begun=place.begun or made, ended=ended, batches=tuple(batches), workers=tuple(states)
    )
