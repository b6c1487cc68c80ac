"""Echo on demand over a stream: a worker pulls until its batch is full of fresh examples, or until the training needs it.

The rule, and the words in shared memory, are those of examples with an index (``pipeline/demand_worker.py``). The stream, its
passes and its state are those of ``pipeline/streams.py``. A worker pulls in its own thread, inside the answering of a request: it
pulls an example, looks whether its batch is full or due, and pulls the next one. So all that it has pulled is in a batch when it
answers, in the order of the stream, and the state that it sends with the batch is that of the stream as it is.

* `StreamOnDemand`, in a worker, pulls the examples, and draws echoes from what it holds.
* `StreamWords` tell a worker whether its request is due, although requests may be answered without a batch.
* `DemandStreamPipeline`, in the main process, receives the batches.
* `RepeatedStream` tells the workers of a replay what to pull.
"""

from __future__ import annotations

import math
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_echo.data.contents import digest_of_object
from lightning_echo.data.copies import copy_example
from lightning_echo.data.randomness import BATCH, PreservingIterator
from lightning_echo.pipeline.demand import CLOSE_READ_SECONDS, Pace, Waiting, conditions_of
from lightning_echo.pipeline.demand_worker import Words
from lightning_echo.pipeline.journal import NO_ENDS, JournalFile, Repeated
from lightning_echo.pipeline.pipelines import Opening, StreamAnswers, StreamPipeline, StreamPlace, StreamRequests
from lightning_echo.pipeline.prefetch import Prefetcher, WorkerProcesses
from lightning_echo.pipeline.streams import END, NOTHING_MADE, Pulls, StreamEcho, StreamNote, StreamRequest
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.demand import Arrived, Booked, DemandRule
from lightning_echo.plan.journal import Begin, Ends, Journal, JournalError

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
    """Answers requests in one process.

    ``most_factor`` bounds ``max_factor``. ``digests``: whether notes have a digest of an example. The other arguments are those
    of `StreamEcho`.
    """

    def __init__(
        self, *args: Any, words: StreamWords, most_factor: float = math.inf, digests: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._words, self._most_factor, self._digests = words, most_factor, digests
        self._number = 0  # of this worker's next batch
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
        self._reach(request.pass_number)
        rule, started = self._rule, perf_counter()
        rule.set_factor(min(request.factor, self._most_factor))
        pulled = self._pull_for(request)
        read = perf_counter()
        digest = digest_of_object(pulled[max(pulled)]) if pulled and self._digests else ""
        has_ended = self._ended == request.pass_number
        size = self._last_size(len(pulled)) if has_ended else self._shape.batch_size
        if self._words.is_closed:
            return None, NOTHING_MADE, self._note_in(request)
        here = Pulls(len(pulled) if size else None, has_ended)
        if request.pulls is not None and request.pulls != here:
            raise JournalError(self._difference(request, request.pulls, here))
        if not size:
            return None, NOTHING_MADE, self._note_in(request)
        number, self._number = self._number, self._number + 1
        handed = rule.hand_out(number, size, [Arrived(position, position, self._pass) for position in pulled])
        examples = [self._use_of(pulled[position]) for position, *_ in handed.fresh]
        examples += [self._use_of(self._memory[key]) for key in handed.echoes]
        if rule.keeps:
            self._memory.update(pulled)
        for key in handed.forget:
            self._memory.pop(key, None)  # with `max_factor` 1, it was not kept
        note = self._note_in(request)._replace(digest=digest)
        self._seeding.seed(BATCH, number)
        return examples, Report(len(handed.fresh), len(handed.echoes), 0, read - started, perf_counter() - read), note

    def _pull_for(self, request: StreamRequest) -> dict[int, Any]:
        """Pulls until the batch is full or due, the stream ends or the loader was closed. Returns the examples by position.

        In a replay, it pulls what the journal says, however long that takes.
        """
        rule, reader, words, size = self._rule, self._reader, self._words, self._shape.batch_size
        pulled: dict[int, Any] = {}
        arrived: list[Arrived] = []
        try:
            while len(arrived) < size and not words.is_closed:
                if self._is_enough(request, arrived):
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

    def _is_enough(self, request: StreamRequest, arrived: list[Arrived]) -> bool:
        """Returns whether a batch that is not full takes no further fresh example."""
        if request.pulls is not None:
            return not request.pulls.ends and len(arrived) == request.pulls.fresh
        words = self._words
        return (
            words.is_due(request.number)
            and not words.are_reads_cheap
            and self._rule.may_hand_out(self._shape.batch_size, arrived)
        )

    def _difference(self, request: StreamRequest, there: Pulls, here: Pulls) -> str:
        def in_words(pulls: Pulls) -> str:
            fresh = "left out what was left" if pulls.fresh is None else f"had {pulls.fresh} fresh examples"
            return f"{fresh}{', and the stream ended' if pulls.ends else ''}"

        return (
            f"this is not the stream of the run that is repeated: in pass {request.pass_number}, batch {self._number} of worker "
            f"{self._worker} {in_words(there)}; here it {in_words(here)}. Give the loader the data of that run, in its order"
        )

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


class RepeatedStream(Repeated):
    """What the workers of a replay pull. ``place``: where it begins.

    The journal has the batches in their order. Workers make them in turn, and those whose stream has ended are left out. So it
    says what each worker pulls for its next request, but not for which request: how many are sent to a worker whose stream has
    ended depends on how many are sent ahead.
    """

    what = "another stream"
    how = "examples. Give the loader the data of that run, in its order: a stream that draws by itself must draw by a seed"

    def __init__(self, journal: Journal, begin: Begin, place: StreamPlace) -> None:
        super().__init__(journal, begin)
        self._in_turn = self._all_in_turn(place)
        self._to_tell: list[deque[tuple[int, Pulls]]] = [deque() for _ in place.workers]  # the number of a batch, and its pulls
        self._ended = [place.pass_number if worker in place.ended else -1 for worker in range(len(place.workers))]  # as told
        self._received = begin.number  # batches
        self.passes_over = 0  # of those of the stretch

    def _all_in_turn(self, place: StreamPlace) -> Iterator[tuple[int, int, Pulls]]:
        """Yields (worker, number of its batch or of the one after it, what it pulls), in the order in which workers answer."""
        count, ended, stretch = len(place.workers), set(place.ended), self.stretch
        worker = place.request % count
        for number in range(stretch.begin.number, stretch.end + 1):
            for _ in range(stretch.passes.count(number)):
                for last in set(range(count)) - ended:
                    yield last, number, Pulls(None, ends=True)
                ended, worker = set(), 0
            if number == stretch.end:
                return
            before, with_it = stretch.ends.get(number, NO_ENDS)
            batch = Pulls(len(stretch.fresh_in(number)), with_it)
            for pulls in (*[Pulls(None, ends=True)] * before, batch):
                while worker in ended:
                    worker = (worker + 1) % count
                yield worker, number, pulls
                if pulls.ends:
                    ended.add(worker)
                worker = (worker + 1) % count

    def tell(self, request: StreamRequest) -> StreamRequest:
        """Returns a request with what its worker is to pull."""
        worker = request.number % len(self._to_tell)
        if request.pass_number <= self._ended[worker]:
            return request
        while not self._to_tell[worker]:
            if (found := next(self._in_turn, None)) is None:
                return request._replace(pass_number=-1)  # the training does not wait for it, see `over_at`
            self._to_tell[found[0]].append(found[1:])
        number, pulls = self._to_tell[worker].popleft()
        if pulls.ends:
            self._ended[worker] = request.pass_number
        return request._replace(factor=self.stretch.factor_of(number), pulls=pulls)

    def over_at(self, number: int) -> Exception | None:
        return None if self.passes_over < len(self.stretch.passes) else super().over_at(number)

    def receive(self, digest: str) -> None:
        """Receives the next batch. Raises a `JournalError` if it is not that of the run."""
        failure = self.changed_at(self._received, [digest])
        self._received += 1
        if failure is not None:
            raise failure


class StreamWritten:
    """Writes down what is delivered. ``fresh``: how many fresh examples were delivered before.

    ``bound_of`` returns the ``max_factor`` of a batch, by its number and that of its request.
    """

    def __init__(self, journal: JournalFile, fresh: int, bound_of: Callable[[int, int], float]) -> None:
        self.journal, self._fresh, self._bound_of = journal, fresh, bound_of
        self.digests: deque[str] = deque()  # of the batches that were received and not delivered

    def deliver(self, number: int, report: Report, before: StreamPlace, after: StreamPlace) -> None:
        """Notes batch ``number``. ``before`` and ``after``: the places before and after it."""
        fresh = range(self._fresh, self._fresh + report.fresh)
        self._fresh = fresh.stop
        request = after.request - 1
        with_it = request % len(after.workers) in after.ended
        ends = Ends(len(after.ended) - len(before.ended) - with_it, with_it)
        self.journal.deliver(fresh, [self.digests.popleft()], self._bound_of(number, request), ends)


class UntilClosed(Iterator[tuple[Any, Report, StreamNote]]):
    """The answers of the workers, until the loader was closed: from then on they have no batch. Counts those without one.

    ``written``: if there is a journal, it gets the digests of batches, and this thread writes. ``repeated``: compares them.
    """

    def __init__(
        self,
        answers: Iterator[tuple[Any, Report, StreamNote]],
        words: StreamWords,
        written: StreamWritten | None = None,
        repeated: RepeatedStream | None = None,
    ) -> None:
        self._answers, self._words, self._written, self._repeated = answers, words, written, repeated

    def __next__(self) -> tuple[Any, Report, StreamNote]:
        if self._written is not None:
            self._written.journal.note()
        answer = next(self._answers)
        if self._words.is_closed:
            raise StopIteration
        _, report, note = answer
        if not report.fresh and not report.echoed:
            self._words.pass_over()
            return answer
        if self._repeated is not None:
            self._repeated.receive(note.digest)
        if self._written is not None:
            self._written.digests.append(note.digest)
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

    def __init__(
        self,
        *args: Any,
        words: StreamWords,
        waiting: StreamWaiting,
        workers: int,
        most_lead: int,
        written: StreamWritten | None = None,
        repeated: RepeatedStream | None = None,
    ) -> None:
        super().__init__(*args)
        self._words, self._waiting, self._count = words, waiting, workers
        self._written, self._repeated = written, repeated
        self._pace = Pace(most_lead)

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        if self._repeated is not None and (over := self._repeated.over_at(delivered)) is not None:
            raise over
        self._pace.ask()
        self._words.ask(delivered)
        self._waiting.since = perf_counter()
        before = self._places[delivered]
        try:
            found = super().next_batch(delivered)
        finally:
            self._waiting.since = None
        if found is None:
            if self._written is not None:
                self._written.journal.pass_over()
            if self._repeated is not None:
                self._repeated.passes_over += 1
        else:
            if self._written is not None:
                self._written.deliver(delivered, found[1], before, self._places[delivered + 1])
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
        if self._written is not None:
            self._written.journal.close()


def stream_on_demand(
    loader: Any,
    opening: Opening,
    requests: StreamRequests,
    place: StreamPlace,
    processes: WorkerProcesses,
    turn: AbstractContextManager[Any] | None,
    answered_by: Callable[[Iterator[StreamRequest], StreamOnDemand], Iterator[Any]],
) -> DemandStreamPipeline:
    """Returns the pipeline that continues at a place.

    ``answered_by`` starts the rebuilt loader, in which an object answers requests.
    """
    launch, workers = opening.launch, len(place.workers)
    delivered, fresh = launch.begin_at.number, launch.begin_at.position
    most_factor = math.inf if loader.num_workers else 1.0  # without workers, nothing is pulled while a step runs
    begin = Begin(
        number=delivered,
        booked=Booked(fresh),
        max_factor=requests.factor_at(place.request),
        conditions=conditions_of(
            opening,
            loader.num_workers,
            examples_held=opening.shape.buffer_size,
            drop_last=loader.drop_last,
            batches_of_workers=list(place.batches),
            ended_workers=sorted(place.ended),
        ),
        passes=launch.passes_over,
    )
    repeated = None if launch.repeated is None else RepeatedStream(launch.repeated, begin, place)

    def bound_of(number: int, request: int) -> float:
        return min(requests.factor_at(request), most_factor) if repeated is None else repeated.stretch.factor_of(number)

    written = None
    if launch.journal is not None:
        launch.journal.begin(begin)
        written = StreamWritten(launch.journal, fresh, bound_of)
    words = StreamWords(loader, place.request - place.request % workers - delivered)
    fetcher = StreamOnDemand(
        loader.dataset,
        opening.shape,
        opening.key,
        loader.collate_fn,
        drop_last=loader.drop_last,
        turn=turn,
        words=words,
        most_factor=most_factor,
        digests=written is not None or repeated is not None,
    )
    sent = requests if repeated is None else map(repeated.tell, requests)
    answers = StreamAnswers(UntilClosed(answered_by(sent, fetcher), words, written, repeated), requests, place, delivered)
    waiting = StreamWaiting(requests, processes, loader.dataset, loader.timeout, opening.say)
    ahead: Iterator[Any] = PreservingIterator(answers)
    if loader.num_workers:
        ahead = Prefetcher(answers, lost=waiting.lost, watched=True)
    else:
        waiting.watch()
    most_lead = max(loader.num_workers * (loader.prefetch_factor or 0), 1)
    return DemandStreamPipeline(
        requests,
        ahead,
        processes,
        place,
        delivered,
        words=words,
        waiting=waiting,
        workers=workers,
        most_lead=most_lead,
        written=written,
        repeated=repeated,
    )
