"""Echo on demand over a stream: a worker pulls until its batch is full of fresh examples, or until the training needs it.

The rule, and the words in shared memory, are those of examples with an index (``pipeline/demand_worker.py``). The stream, its
passes and its state are those of ``pipeline/streams.py``. A worker pulls in its own thread, inside the answering of a request: it
pulls an example, looks whether its batch is full or due, and pulls the next one. So all that it has pulled is in a batch when it
answers, in the order of the stream, and the state that it sends with the batch is that of the stream as it is.

* `StreamOnDemand`, in a worker, pulls the examples, and draws echoes from what it holds.
* `StreamWords` tell a worker whether its request is due, although requests may be answered without a batch.
* `DemandStreamPipeline`, in the main process, receives the batches.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_echo.data.copies import copy_example
from lightning_echo.data.randomness import BATCH, PreservingIterator
from lightning_echo.pipeline.demand import CLOSE_READ_SECONDS, Pace, Waiting
from lightning_echo.pipeline.demand_worker import Words
from lightning_echo.pipeline.pipelines import Opening, StreamAnswers, StreamPipeline, StreamPlace, StreamRequests
from lightning_echo.pipeline.prefetch import Prefetcher, WorkerProcesses
from lightning_echo.pipeline.streams import END, NOTHING_MADE, StreamEcho, StreamNote, StreamRequest
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.demand import Arrived, DemandRule

# ---------------------------------------------------------------------- words


class StreamWords(Words):
    """`Words` of requests that may be answered without a batch, as by a worker whose stream has ended.

    The next request to be answered is that of the batch that the training gets next. So the number of its batch is the request's,
    less all requests so far that were answered without one. ``passed`` is that difference before the first answer. The thread
    that receives the answers counts it: the training may wait meanwhile.
    """

    def __init__(self, loader: Any, passed: int) -> None:
        super().__init__(loader)
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        self._passed: Any = context.RawArray("q", 1) if loader.num_workers else [0]
        self._passed[0] = passed

    def pass_over(self) -> None:
        """Notes that a request was answered without a batch."""
        self._passed[0] += 1

    def is_due(self, number: int) -> bool:
        """Returns whether the training is about to wait for the batch of request ``number``."""
        return super().is_due(number - self._passed[0])


# ---------------------------------------------------------------------- in a worker
# A pass ends in a worker as with the plain loader: there, its last batch has what is left, ``count % batch_size`` examples, or is
# left out (``drop_last``). On demand, other numbers may be left, since batches before had echoes. Every batch is to have a size
# that the plain loader's have. So the last batch has the size of the plain loader's last one if what is left fits into that, and
# is left out if that is. Otherwise it is a full one. It is filled with echoes, which the account may lend. If memory holds too
# few, as after a resume, it is smaller, or left out with ``drop_last``.


class StreamOnDemand(StreamEcho):
    """Answers requests in one process. ``most_factor`` bounds ``max_factor``. The other arguments are those of `StreamEcho`."""

    def __init__(self, *args: Any, words: StreamWords, most_factor: float = math.inf, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._words, self._most_factor = words, most_factor
        self._number = 0  # of this worker's next batch
        self._pass, self._in_pass = -1, 0  # the present pass, and how many examples of it were pulled here
        self._position = 0  # of the next example among all that this process pulls
        self._memory: dict[Any, Any] = {}  # examples by position, those of the rule
        self._parent = 0  # the process of the training, seen from a worker

    def _begin_planning(self) -> None:
        self._rule = DemandRule(self._shape.seed, 1.0, self._shape.buffer_size)
        if get_worker_info() is not None:
            self._parent = os.getppid()

    def fetch(self, request: StreamRequest) -> tuple[list[Any] | None, Report, StreamNote]:
        if self._worker < 0:
            self._begin()
        if request.resume is not None:
            self._resume(request.resume)
        if request.pass_number <= self._ended:
            return None, NOTHING_MADE, self._note_in(request)
        if request.pass_number != self._pass:
            self._pass, self._in_pass = request.pass_number, 0
        rule, started = self._rule, perf_counter()
        rule.set_factor(min(request.factor, self._most_factor))
        pulled = self._pull_until_due(request)
        read = perf_counter()
        size = self._shape.batch_size if self._ended < request.pass_number else self._last_size(len(pulled))
        if not size or self._words.is_closed:
            return None, NOTHING_MADE, self._note_in(request)
        number, self._number = self._number, self._number + 1
        handed = rule.hand_out(number, size, [Arrived(position, position, self._pass) for position in pulled])
        examples = [self._use_of(pulled[position]) for position, *_ in handed.fresh]
        examples += [self._use_of(self._memory[key]) for key in handed.echoes]
        if rule.keeps:
            self._memory.update(pulled)
        for key in handed.forget:
            self._memory.pop(key, None)  # with `max_factor` 1, it was not kept
        note = self._note_in(request)
        self._seeding.seed(BATCH, number)
        return examples, Report(len(handed.fresh), len(handed.echoes), 0, read - started, perf_counter() - read), note

    def _pull_until_due(self, request: StreamRequest) -> dict[int, Any]:
        """Pulls until the batch is full or due, the stream ends or the loader was closed. Returns the examples by position."""
        rule, reader, words, size = self._rule, self._reader, self._words, self._shape.batch_size
        pulled: dict[int, Any] = {}
        arrived: list[Arrived] = []
        try:
            while len(arrived) < size and not words.is_closed:
                if words.is_due(request.number) and not words.are_reads_cheap and rule.may_hand_out(size, arrived):
                    break
                if self._parent and os.getppid() != self._parent:
                    raise RuntimeError("the process of the training has ended")
                if not arrived:
                    reader.begin(request.pass_number, self._number)
                example = reader.pull_next(copies=rule.keeps)
                if example is END:
                    self._ended = request.pass_number
                    break
                pulled[self._position] = example
                arrived.append(Arrived(self._position, self._position, request.pass_number))
                self._position += 1
            if arrived or self._ended == request.pass_number:
                reader.note_state()
        except Exception as error:
            self._note_place(error, request.pass_number)
            raise
        self._in_pass += len(arrived)
        return pulled

    def _last_size(self, left: int) -> int:
        """Returns the size of the last batch of a pass, of which ``left`` examples are left; 0 if there is none."""
        full = self._shape.batch_size
        of_plain = self._in_pass % full
        size = of_plain if left <= of_plain else full
        filled = min(size, left + (len(self._memory) if self._rule.keeps else 0))
        return 0 if not left or (self._drop_last and filled < full) else filled

    def _use_of(self, example: Any) -> Any:
        return copy_example(example) if self._rule.keeps and self._copies_uses else example

    # ------------------------------------------------------------------ state

    def _note_in(self, request: StreamRequest) -> StreamNote:
        """Returns the note, with the worker's state if the stream has one."""
        reader, has_ended = self._reader, request.pass_number <= self._ended
        if not reader.is_stateful:
            return StreamNote(self._worker, has_ended, None)
        state = {
            "ended": self._ended,
            "stream": reader.state,
            "stream_pass": reader.pass_number,
            "pulled": [],
            "number": self._number,
            "in_pass": self._in_pass,
        }
        return StreamNote(self._worker, has_ended, pickle.dumps(state))

    def _resume(self, resume: bytes | int) -> None:
        if isinstance(resume, int):
            self._number = resume
            return
        state = pickle.loads(resume)
        self._ended, self._number = state["ended"], state["number"]
        self._pass, self._in_pass = state["stream_pass"], state["in_pass"]
        self._reader.resume(state["stream"], state["stream_pass"], state["stream_pass"] + 1)


# ---------------------------------------------------------------------- in the main process


class UntilClosed(Iterator[tuple[Any, Report, StreamNote]]):
    """The answers of the workers, until the loader was closed: from then on they have no batch. Counts those without one."""

    def __init__(self, answers: Iterator[tuple[Any, Report, StreamNote]], words: StreamWords) -> None:
        self._answers, self._words = answers, words

    def __next__(self) -> tuple[Any, Report, StreamNote]:
        answer = next(self._answers)
        if self._words.is_closed:
            raise StopIteration
        if not answer[1].fresh and not answer[1].echoed:
            self._words.pass_over()
        return answer


@dataclass
class StreamWaiting(Waiting):
    """A training that waits for examples of a stream. Its ``requests`` do not tell for which."""

    requests: Any

    def _what(self) -> str:
        return "the next example of the stream"

    def _why(self) -> str:
        return (
            f"{self._what()} is not there yet. A worker does not echo while the stream lets it wait for an example, or once what "
            "memory holds has been used as often as max_factor allows"
        )


class DemandStreamPipeline(StreamPipeline):
    """Yields batch after batch, as `StreamPipeline` does for a constant factor."""

    def __init__(self, *args: Any, words: StreamWords, waiting: StreamWaiting, workers: int, most_lead: int) -> None:
        super().__init__(*args)
        self._words, self._waiting, self._count = words, waiting, workers
        self._pace = Pace(most_lead)

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        self._pace.ask()
        self._words.ask(delivered)
        self._waiting.since = perf_counter()
        try:
            found = super().next_batch(delivered)
        finally:
            self._waiting.since = None
        if found is not None:
            self._waiting.has_begun = True
            # Workers whose stream has ended get requests, too. The others make all the batches.
            others = max(self._count - len(self._places[delivered + 1].ended), 1)
            size = found[1].fresh + found[1].echoed
            due = -(-self._pace.hand(found[1]) * self._count // others)
            self._words.hand(due, reads_are_cheap=self._pace.reads_are_cheap(size))
        return found

    def state(self, delivered: int) -> dict[str, Any]:
        state = super().state(delivered)
        return {**state, "stream": {**state["stream"], "on_demand": True}}

    def close(self, within: float = CLOSE_READ_SECONDS) -> None:
        self._words.close()
        self._waiting.end()
        super().close(within)


def stream_on_demand(
    loader: Any,
    opening: Opening,
    requests: StreamRequests,
    place: StreamPlace,
    processes: WorkerProcesses,
    turn: AbstractContextManager[Any] | None,
    answered_by: Callable[[StreamOnDemand], Iterator[Any]],
) -> DemandStreamPipeline:
    """Returns the pipeline that continues at a place. ``answered_by`` starts the rebuilt loader, in which that object answers."""
    workers, delivered = len(place.workers), opening.launch.begin_at.number
    words = StreamWords(loader, place.request - place.request % workers - delivered)
    fetcher = StreamOnDemand(
        loader.dataset,
        opening.shape,
        opening.key,
        loader.collate_fn,
        drop_last=loader.drop_last,
        turn=turn,
        words=words,
        most_factor=math.inf if loader.num_workers else 1.0,  # without workers, nothing is pulled while a step runs
    )
    answers = StreamAnswers(UntilClosed(answered_by(fetcher), words), requests, place, delivered)
    waiting = StreamWaiting(requests, processes, loader.dataset, loader.timeout, opening.say)
    ahead: Iterator[Any] = PreservingIterator(answers)
    if loader.num_workers:
        ahead = Prefetcher(answers, lost=waiting.lost, watched=True)
    else:
        waiting.watch()
    most_lead = max(loader.num_workers * (loader.prefetch_factor or 0), 1)
    parts = requests, ahead, processes, place, delivered
    return DemandStreamPipeline(*parts, words=words, waiting=waiting, workers=workers, most_lead=most_lead)
