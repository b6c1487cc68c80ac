"""Pipelines: plan, order, the rebuilt loader and the thread that fetches ahead; over an index, over a stream, and at rest."""

from __future__ import annotations

import math
import pickle
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightning_echo.cache.exchange import Rounds
from lightning_echo.cache.reads import Caching
from lightning_echo.data.randomness import PreservingIterator
from lightning_echo.pipeline.batches import BatchEcho, LiveBatchEcho, PassOver, PassReader, RequestedReader
from lightning_echo.pipeline.prefetch import DEPTH, Prefetcher, WorkerProcesses
from lightning_echo.pipeline.requests import (
    AllRanksOrder,
    BatchedOrder,
    BatchRequests,
    ExampleRequests,
    OrdersOfRanks,
    RequestsInRounds,
    SamplerOrder,
    samplers_of_ranks,
)
from lightning_echo.pipeline.source import Choice, Launch, Layout, Source, Start, reads_whole_batches
from lightning_echo.pipeline.streams import StreamNote, StreamRequest
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.memory import make_plan, plan_from_state
from lightning_echo.plan.order import Order, SequentialOrder, ShuffledOrder
from lightning_echo.plan.plan import Plan, PlanShape, mix

# ---------------------------------------------------------------------- index pipeline
# A pipeline has no epochs. A run starts one at its first batch, because the ranks and the seed are only known then. It drops the
# pipeline when the run is closed or continues at another place. `start_index_pipeline` makes a pipeline::
#
#     echoing examples         plan, order      --> ExampleRequests --> rebuilt loader              --> Prefetcher
#     echoing whole batches    plan, order      --> BatchRequests   --> rebuilt loader --> BatchEcho --> Prefetcher
#     a loader not rebuilt     plan, PassReader --> BatchRequests   --> PassReader     --> BatchEcho
#
# `PassReader` is both the order and the reader of a loader that is not rebuilt. `Prefetcher`, the thread, is left out if no
# thread may run.

_ORDER_SEED, _NOISE_SEED, _PASS_SEED = 11, 12, 13


class IndexPipeline:
    """Yields batch after batch, each with its `Report`.

    ``batches`` yields a `UseToCome` in place of a batch if the batches are live on the device. The pipeline owns ``reader`` (a
    loader that is not rebuilt) and closes it. ``rounds`` is None if the nodes do not exchange examples.
    """

    def __init__(
        self,
        requests: ExampleRequests | BatchRequests,
        batches: Iterator[Any],
        workers: WorkerProcesses,
        *,
        reader: PassReader | None = None,
        on_device: bool = False,
        rounds: Rounds | None = None,
    ) -> None:
        self._requests, self._workers, self._reader, self._rounds = requests, workers, reader, rounds
        self._batches: Iterator[Any] | None = batches
        self._on_device = on_device
        self._ended_at = 0  # number of batches of the run after which it was found that a pass had ended
        self.exact = requests.order.exact

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the next batch and its report; None if a pass without a known length has ended.

        The caller counts the batches delivered before this one: an interrupt may come before the caller gets a batch.
        """
        assert self._batches is not None
        self._requests.delivered = delivered
        note = "" if self._rounds is None else self._rounds.take_note()
        try:
            item: tuple[Any, Report] = next(self._batches)
        except PassOver:
            self._ended_at = delivered
            return None
        if item[1] is None:
            assert self._requests.failure is not None
            raise self._requests.failure
        if note:
            item = item[0], item[1]._replace(note=note)
        if self._on_device:
            use, report = item
            return use.hand_out(), report  # not in the thread, because a batch is prepared where it is used
        return item

    def change_factor(self, number: int, factor: float) -> None:
        self._requests.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state for resuming after ``delivered`` batches: those delivered so far, or one or two less."""
        state = self._requests.state(delivered)
        if delivered < self._ended_at:  # a resumed run finds that out again
            del state["order"]["passes"][-1]
        return state

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.release()
        batches, self._batches = self._batches, None
        if isinstance(batches, Prefetcher):
            batches.close()
        self._workers.end_others()
        if self._reader is not None:
            self._reader.close()
        if self._rounds is not None:
            self._rounds.close()


# ---------------------------------------------------------------------- starting


def start_index_pipeline(
    source: Source,
    choice: Choice,
    layout: Layout,
    shape: PlanShape,
    launch: Launch,
    *,
    rank: int,
    key: int,
    caching: Caching | None = None,
    rounds: Rounds | None = None,
) -> IndexPipeline:
    """Starts a pipeline: its workers, and the thread that fetches ahead if one may run.

    ``rank`` is the number of this rank's share of a pass, ``key`` the seed of its random numbers in the workers (`rank_key`).
    """
    if not source.rebuilds:
        return _start_reading(source, choice, layout, shape, launch)
    order = _order(source, choice, layout, shape, launch, rank, rounds)
    requests = _requests(source, choice, layout, shape, launch, order)
    in_rounds = None
    if rounds is not None:
        in_rounds = RequestsInRounds(requests, rounds, order if isinstance(order, AllRanksOrder | OrdersOfRanks) else None)
    workers = WorkerProcesses(launch.worker_init_fn)
    # Code that may draw from the global random states must not run while the training draws from them, too.
    in_thread = source.num_workers > 0 and source.may_run_in_thread
    batches: Iterator[Any] = iter(source.rebuild(in_rounds or requests, choice.make_stages, key, workers, caching))
    if rounds is not None and rounds.exchange is not None:
        rounds.exchange.begin()
    # Once a worker has sent a batch, it does not use its memory any more.
    return pipeline_over(
        requests,
        batches,
        workers,
        on_device=choice.point.on_device,
        in_thread=in_thread,
        are_owned=source.num_workers > 0,
        rounds=rounds,
    )


def pipeline_over(
    requests: ExampleRequests | BatchRequests,
    batches: Iterator[Any],
    workers: WorkerProcesses,
    *,
    on_device: bool,
    in_thread: bool,
    are_owned: bool,
    rounds: Rounds | None = None,
) -> IndexPipeline:
    """Returns the pipeline over a rebuilt loader, which yields ``batches`` for ``requests``.

    Args:
        in_thread: Whether a thread fetches ahead. If not, the random states of the training are restored after each batch.
        are_owned: Whether no other code uses the memory of a batch.
    """
    if not in_thread:
        batches = PreservingIterator(batches)
    if isinstance(requests, BatchRequests):
        read = RequestedReader(batches).read
        batches = LiveBatchEcho(requests, read, are_owned=are_owned) if on_device else BatchEcho(requests, read)
    if in_thread:
        batches = Prefetcher(batches, lost=workers.lost)
    return IndexPipeline(requests, batches, workers, on_device=on_device, rounds=rounds)


def _start_reading(source: Source, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch) -> IndexPipeline:
    """Starts the pipeline of a loader that is not rebuilt, but read as it is."""
    length = layout.batches_per_pass or None
    reader = PassReader(source.loader, length, mix(launch.seed, _PASS_SEED), is_estimate=source.reads_stream)
    if launch.state["order"] is not None:
        reader.load(launch.state["order"])
    requests = BatchRequests(_plan(shape, launch), reader)
    reader.expect(requests.not_held)
    on_device = choice.point.on_device
    batches = LiveBatchEcho(requests, reader.read) if on_device else BatchEcho(requests, reader.read)
    none_of_ours = WorkerProcesses()
    return IndexPipeline(requests, batches, none_of_ours, reader=reader, on_device=on_device)


def _requests(
    source: Source, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch, order: Order
) -> ExampleRequests | BatchRequests:
    """Returns the batch sampler of a rebuilt loader, at the batch to begin with."""
    by_batches, plan = choice.point.by_batches, _plan(shape, launch)
    if launch.state["order"] is not None:
        order.load(launch.state["order"])
    if not by_batches:
        return ExampleRequests(plan, order, whole_calls=reads_whole_batches(source, choice))
    if source.own_batches:
        return BatchRequests(plan, order)
    return BatchRequests(plan, BatchedOrder(order, layout.batch_size, layout.last_batch_size, layout.batches_per_pass))


def _order(
    source: Source, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch, rank: int, rounds: Rounds | None
) -> Order:
    """Returns the order of this rank. If this rank exchanges examples for all ranks, the order also has those of the others."""
    preserves = choice.point.by_batches and not source.num_workers
    if rounds is None or rounds.exchange is None:
        return index_order(source, layout, shape.distance, launch.seed, rank, preserves=preserves)
    if source.shards_itself:  # the sampler is a DistributedSampler
        dealt_out, seed = (layout.length, layout.pass_length, 1, 0, shape.distance), mix(launch.seed, _ORDER_SEED)
        return OrdersOfRanks(
            [SamplerOrder(each, *dealt_out, seed=seed) for each in samplers_of_ranks(source.sampler)], rounds.share
        )
    whole = index_order(source, layout, shape.distance, launch.seed, rank, preserves=preserves, is_whole=True)
    return AllRanksOrder(whole, layout.replicas, rank)


def _plan(shape: PlanShape, launch: Launch) -> Plan:
    if launch.state["plan"] is not None:
        return plan_from_state(shape, launch.state["plan"])
    plan = make_plan(shape, launch.factor)
    plan.position, plan.number = launch.begin_at
    return plan


def index_order(
    source: Source, layout: Layout, distance: int, seed: int, rank: int, *, preserves: bool, is_whole: bool = False
) -> Order:
    """Returns the order of a rebuilt loader's indices, or of its batches if the user's batch sampler makes them.

    Args:
        distance: Least number of positions between two uses of an index, after passes are spread.
        preserves: As in `SamplerOrder`.
        is_whole: Whether the order of all slots is returned, as if there were one rank.
    """
    dealt_out = (layout.length, layout.pass_length, layout.replicas, rank)
    if is_whole:
        dealt_out = (layout.length, layout.pass_length * layout.replicas, 1, 0)
    if source.is_sequential:
        return SequentialOrder(*dealt_out)
    if source.is_shuffled:
        return ShuffledOrder(*dealt_out, distance, layout.replicas, seed=mix(seed, _ORDER_SEED))
    return SamplerOrder(source.sampler, *dealt_out, distance, layout.replicas, seed=mix(seed, _ORDER_SEED), preserves=preserves)


def rank_key(seed: int, noise_rank: int) -> int:
    """Returns the seed of a rank's random numbers in the workers.

    Ranks with equal ``noise_rank``, and only those, draw the same.
    """
    return mix(seed, _NOISE_SEED, noise_rank)


def lookahead(source: Source, by_batches: bool, largest_factor: float) -> int:
    """Returns the largest number of batches that may be planned after the delivered one, however fast the workers are."""
    if by_batches and not source.rebuilds:
        # A batch is read when it is asked for. Only the batch at which a pass has ended is planned before.
        return int(source.length is None)
    if not source.num_workers:
        return 0
    if not by_batches:
        return source.prefetched_batches + DEPTH
    # Between two batches that are read, up to ceil(e) + 1 are delivered, and a few more if the buffer is smaller than that.
    uses = math.ceil(largest_factor) + 1 if largest_factor > 1 else 1
    return (source.prefetched_batches + 3) * uses + DEPTH


# ---------------------------------------------------------------------- stream pipeline
# Each worker plans for its own part of the stream (``streams.py``). The main process only sends the pass and the factor.
# ``DataLoader`` sends request ``k`` to worker ``k % workers``, and sends one more whenever it has received an answer. So an event
# at a certain request or answer happens at the same place in every run:
#
# * A new factor is used in all requests that were not yet sent when a certain batch has been received.
# * A pass is over when the last worker has reported the end of its stream. The next pass begins with the first request to worker
#   0 that was not sent by then. Workers answer the requests in between without a batch.


class StreamPipeline:
    """Yields batch after batch, each with its `Report`, as `IndexPipeline` does for data that is read by index.

    ``answers`` is `StreamAnswers`, in a thread or not. ``place`` is where the run continues after ``delivered`` batches. `exact`
    is True: only the stream itself can know whether a resumed run gets the same order.
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

        ``delivered`` counts the batches of the run before it.
        """
        assert self._answers is not None
        batch, report, place = next(self._answers)
        last = {number: self._places[number] for number in (delivered - 1, delivered) if number in self._places}
        self._places = {**last, delivered + (report is not None): place}
        return None if report is None else (batch, report)

    def change_factor(self, number: int, factor: float) -> None:
        self._requests.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        place = self._places[delivered]
        return {"plan": None, "order": None, "stream": {**place.state(), **self._requests.state(place.request)}}

    def close(self) -> None:
        answers, self._answers = self._answers, None
        if isinstance(answers, Prefetcher):
            answers.close()
        self._workers.end_others()


def start_stream_pipeline(source: Source, shape: PlanShape, launch: Launch, *, key: int) -> StreamPipeline:
    """Starts a pipeline: its workers, and the thread that fetches ahead if there are workers.

    ``shape`` has the sizes of the plan of one worker, and the seed of its draws. ``key`` is as in `start_index_pipeline`.
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
    """The place of a run over a stream: after a batch, or between two passes.

    Attributes:
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
        return cls(0, 0, False, frozenset(), (0,) * workers, (None,) * workers)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StreamPlace:
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
        """Returns the place after one more answer. ``made``: whether the worker made a batch."""
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
    """The batch sampler over a stream. The thread that fetches takes requests; the thread that trains sets new factors.

    ``factors`` has pairs of a request and the factor from that request on, ascending; the first pair is in use at ``place``.
    ``pending`` has pairs of a batch of the run and the factor from that batch on. ``DataLoader`` always takes ``prefetched``
    requests ahead. ``next`` is the number of the next request, ``begins_at`` that of the first request of the pass.
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
        with self._lock:
            self._pass_number += 1
            self.begins_at = -(-self.next // self._workers) * self._workers

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` of the run on. That batch must not be requested yet."""
        with self._lock:
            self._pending[:] = [change for change in self._pending if change[0] < number] + [(number, factor)]

    def has_received(self, batches: int) -> None:
        """Moves pending factors to the next request, if it is time after this number of received batches of the run."""
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
    """Receives the answers of the workers, in the thread that fetches. ``received`` counts the batches of the run before.

    Yields (batch, its report, place after it), and between two passes (None, None, place).
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


# ---------------------------------------------------------------------- restartable pipeline
# At rest there are no workers and no thread, only the state from which the next started pipeline continues.

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
        """Returns the state for resuming after ``delivered`` batches: those delivered so far, or one or two less.

        ``delivered`` is at least the number of batches when the pipeline was started.
        """

    def close(self) -> None:
        """Ends the workers and the thread."""


class RestartablePipeline:
    """The started pipeline (``started``; None at rest) or, at rest, the state from which the next one continues.

    A pipeline without a state begins at ``begin_at``.
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
        """Returns the state for resuming after ``delivered`` batches: that of plan and order, or of a stream, in plain types."""
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
        return {name: vars(self)[name] for name in ("begin_at", "_at_rest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RestartablePipeline.__init__(self)
        self.__dict__.update(state)


def _close_all(pipelines: list[Pipeline]) -> None:
    while pipelines:
        pipelines.pop().close()
