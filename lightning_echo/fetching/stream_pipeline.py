"""A started pipeline over a stream: the requests to the workers, their answers, and `StreamPipeline`.

Each worker plans for itself, for its part of the stream (``workers/streams.py``). The main process only says the pass and the
factor. ``DataLoader`` sends request ``k`` to worker ``k % workers``, and sends one more whenever it has received an answer. So an
event at a certain request or answer happens at the same place in every run:

* A new factor is used in all requests that were not yet sent when a certain batch has been received.
* A pass is over when the last worker has said that its stream has ended. The next pass begins with the first request to worker 0
  that was not sent by then. Workers answer the requests in between without a batch.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_echo.fetching.layout import Launch
from lightning_echo.fetching.prefetch import Prefetcher
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting.randomness import PreservingIterator
from lightning_echo.workers.seconds import Report
from lightning_echo.workers.streams import StreamNote, StreamRequest

__all__ = ["StreamAnswers", "StreamPipeline", "StreamPlace", "StreamRequests", "start_stream_pipeline"]


class StreamPipeline:
    """Yields batch after batch, each with its `Report`, as `IndexPipeline` does for data that is read by index.

    Args:
        requests: The requests to the workers.
        answers: Yields (batch, its report, place after it), and between two passes (None, None, place). It is `StreamAnswers`, in
            a thread or not.
        workers: The worker processes behind ``answers``.
        place: Where the run goes on.
        delivered: Number of batches of the run before.

    Attributes:
        exact: Whether a resumed run gets the same order. Only the stream itself can know this for certain.
    """

    exact = True

    def __init__(
        self, requests: StreamRequests, answers: Iterator[Any], workers: WorkerProcesses, place: StreamPlace, delivered: int
    ) -> None:
        self._requests, self._workers = requests, workers
        self._answers: Iterator[Any] | None = answers
        self._places = {delivered: place}  # the places after the last three batches, by the number of delivered batches

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the next batch and its report; None if a pass has ended.

        Args:
            delivered: Number of batches of the run before this one.
        """
        assert self._answers is not None
        batch, report, place = next(self._answers)
        last = {number: self._places[number] for number in (delivered - 1, delivered) if number in self._places}
        self._places = {**last, delivered + (report is not None): place}
        return None if report is None else (batch, report)

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` on."""
        self._requests.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state from which a run resumes after ``delivered`` batches: those delivered so far, or one or two less."""
        place = self._places[delivered]
        return {"plan": None, "order": None, "stream": {**place.state(), **self._requests.state(place.request)}}

    def close(self) -> None:
        """Ends the workers and the thread."""
        answers, self._answers = self._answers, None
        if isinstance(answers, Prefetcher):
            answers.close()
        self._workers.end_others()


def start_stream_pipeline(source: Source, shape: PlanShape, launch: Launch, *, key: int) -> StreamPipeline:
    """Starts a pipeline: its workers, and the thread that fetches ahead if there are workers.

    Args:
        source: The user's loader, over a stream.
        shape: Sizes of the plan of one worker, and the seed of its draws.
        launch: How the run begins.
        key: Seed of this rank's random numbers in the workers, see `rank_key`.
    """
    state, delivered = launch.state.get("stream"), launch.begin_at.number
    if state is None:
        place, factors, pending = StreamPlace.first(max(source.num_workers, 1)), [(0, launch.factor)], []
    else:
        place = StreamPlace.from_state(state)
        factors, pending = ([(at, value) for at, value in state[name]] for name in ("factors", "pending"))
    requests, workers = StreamRequests(place, factors, pending, source.prefetched_batches), WorkerProcesses(launch.worker_init_fn)
    received = iter(source.rebuild_stream(requests, shape, key, workers))
    answers = StreamAnswers(received, requests, place, delivered)
    ahead = Prefetcher(answers, lost=workers.lost) if source.num_workers else PreservingIterator(answers)
    return StreamPipeline(requests, ahead, workers, place, delivered)


# ---------------------------------------------------------------------- requests and answers


@dataclass(frozen=True)
class StreamPlace:
    """Where a run over a stream stands: after a batch, or between two passes.

    Attributes:
        request: Number of the next request.
        pass_number: Number of the pass.
        begun: Whether the pass has had a batch.
        ended: Workers whose stream has ended in this pass.
        batches: Number of batches that each worker has made.
        workers: The state of each worker, pickled as it came; None for a worker without a state.
    """

    request: int
    pass_number: int
    begun: bool
    ended: frozenset[int]
    batches: tuple[int, ...]
    workers: tuple[bytes | None, ...]

    @classmethod
    def first(cls, workers: int) -> StreamPlace:
        """Returns the start of a run."""
        return cls(0, 0, False, frozenset(), (0,) * workers, (None,) * workers)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StreamPlace:
        """Returns the place of a `state`."""
        workers = tuple(None if saved is None else pickle.dumps(saved) for saved in state["workers"])
        return cls(state["request"], state["pass"], state["begun"], frozenset(state["ended"]), tuple(state["batches"]), workers)

    def state(self) -> dict[str, Any]:
        """Returns the place in plain types, if the stream's own state has plain types."""
        return {
            "request": self.request,
            "pass": self.pass_number,
            "begun": self.begun,
            "ended": sorted(self.ended),
            "batches": list(self.batches),
            "workers": [None if saved is None else pickle.loads(saved) for saved in self.workers],
        }

    def after(self, note: StreamNote, *, made: bool) -> StreamPlace:
        """Returns the place after one more answer.

        Args:
            note: What the worker said.
            made: Whether the worker made a batch.
        """
        worker = note.worker
        batches, states = list(self.batches), list(self.workers)
        batches[worker] += made
        states[worker] = note.state
        ended = self.ended | {worker} if note.ended else self.ended
        return replace(
            self,
            request=self.request + 1,
            begun=self.begun or made,
            ended=ended,
            batches=tuple(batches),
            workers=tuple(states),
        )


class StreamRequests:
    """The batch sampler over a stream. It yields one `StreamRequest` after the other.

    The thread that fetches takes requests from it. The thread that trains tells it new factors.

    Args:
        place: Where the run begins.
        factors: Pairs of a request and the factor from that request on, ascending. The first pair is in use at ``place``.
        pending: Changes that are still to come: pairs of a batch of the run and the factor from that batch on.
        prefetched: How many requests ``DataLoader`` always takes ahead.

    Attributes:
        next: Number of the next request.
        begins_at: Number of the request with which the pass begins.
    """

    def __init__(
        self, place: StreamPlace, factors: list[tuple[int, float]], pending: list[tuple[int, float]], prefetched: int
    ) -> None:
        self._workers, self._first, self._prefetched = len(place.workers), place.request, prefetched
        self.next = place.request - place.request % self._workers  # worker 0 gets the first request, even out of its turn
        self._pass_number, self.begins_at = place.pass_number, place.request
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
            pass_number = self._pass_number if at >= self.begins_at else self._pass_number - 1
            return StreamRequest(pass_number, self._factor_at(at), resume)

    def begin_pass(self) -> None:
        """Begins the next pass."""
        with self._lock:
            self._pass_number += 1
            self.begins_at = -(-self.next // self._workers) * self._workers

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` of the run on. That batch must not be requested yet."""
        with self._lock:
            self._pending[:] = [change for change in self._pending if change[0] < number] + [(number, factor)]

    def has_received(self, batches: int) -> None:
        """Uses pending factors from the next request on, if it is time.

        Args:
            batches: Number of batches of the run that have been received.
        """
        with self._lock:
            while self._pending and self._pending[0][0] <= batches + self._prefetched:
                self._factors.append((self.next, self._pending.pop(0)[1]))

    def state(self, request: int) -> dict[str, Any]:
        """Returns the factors from a request on, in plain types."""
        with self._lock:
            later = [list(change) for change in self._factors if change[0] > request]
            return {
                "factors": [[request, self._factor_at(request)], *later],
                "pending": [list(change) for change in self._pending],
            }

    def _factor_at(self, request: int) -> float:
        return next(factor for since, factor in reversed(self._factors) if since <= request)


class StreamAnswers:
    """Receives the answers of the workers, in the thread that fetches.

    Yields (batch, its report, place after it), and between two passes (None, None, place).

    Args:
        answers: The rebuilt loader. It yields (batch or None, report, note).
        requests: The requests to the workers.
        place: Where the run begins.
        received: Number of batches of the run before.
    """

    def __init__(
        self,
        answers: Iterator[tuple[Any, Report, StreamNote]],
        requests: StreamRequests,
        place: StreamPlace,
        received: int,
    ) -> None:
        self._answers, self._requests, self._place, self._received = answers, requests, place, received
        self._at = place.request - place.request % len(place.workers)  # the request whose answer comes next

    def __iter__(self) -> StreamAnswers:
        return self

    def __next__(self) -> tuple[Any, Report | None, StreamPlace]:
        while self._at < self._requests.begins_at:  # these were requested before it was known where the pass begins
            self._next_answer()
        self._requests.has_received(self._received)
        while len(self._place.ended) < len(self._place.workers):
            batch, report, note = self._next_answer()
            # A batch may itself be None: some collate functions return None if all examples are broken. So the counts decide.
            made = bool(report.fresh or report.echoed)
            self._place = self._place.after(note, made=made)
            if made:
                self._received += 1
                return batch, report, self._place
        if not self._place.begun:
            raise RuntimeError(
                f"the stream yielded no batch in pass {self._place.pass_number}: it must have examples each time it is iterated "
                "(with drop_last=True, a full batch in at least one worker)"
            )
        self._requests.begin_pass()
        place, first = self._place, self._requests.begins_at
        self._place = StreamPlace(first, place.pass_number + 1, False, frozenset(), place.batches, place.workers)
        return None, None, self._place

    def _next_answer(self) -> tuple[Any, Report, StreamNote]:
        self._at += 1
        return next(self._answers)
