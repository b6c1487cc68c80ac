"""Pipelines: plan, order, the rebuilt loader and the thread that fetches ahead; over an index, over a stream, and at rest."""

from __future__ import annotations

import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from lightning_echo.cache.exchange import Rounds
from lightning_echo.cache.holding import Hold
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.data.randomness import PreservingIterator
from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.batches import BatchEcho, PassOver, PassReader
from lightning_echo.pipeline.journal import JournalFile
from lightning_echo.pipeline.prefetch import JOIN_SECONDS, Prefetcher, WorkerProcesses
from lightning_echo.pipeline.reads import Pools, ReadTimeoutError
from lightning_echo.pipeline.requests import BatchRequests, ExampleRequests
from lightning_echo.pipeline.streams import StreamNote, StreamRequest
from lightning_echo.pipeline.worker import EchoCollate, EchoDataset, Report
from lightning_echo.plan.journal import Journal
from lightning_echo.plan.memory import make_plan, plan_from_state
from lightning_echo.plan.plan import Plan, PlanShape, mix
from lightning_echo.split.prove import Split
from lightning_echo.split.reading import ReadPart
from lightning_echo.split.staged import Stages


class Start(NamedTuple):
    """Where a new plan begins: stream position of its first fresh item, and number of its first batch in the run."""

    position: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The values that a run gives to the pipeline that it starts."""

    seed: int  # of the run; the seeds of order, draws and augmentation are derived from it
    factor: float  # echo factor of a new plan
    # State of the pipeline before, see `RestartablePipeline.state`: `plan`, `order` and `stream`. A part that is None or missing
    # begins newly.
    state: dict[str, Any]
    # Where a new plan begins. Over a stream, also with a state: the number of the next batch, and of fresh examples before it.
    begin_at: Start
    worker_init_fn: Any  # the user's function that each worker runs first, or the one that Lightning has set on the `EchoLoader`
    journal: JournalFile | None = None  # on demand: where the run is written down
    repeated: Journal | None = None  # on demand: the journal of the run that is repeated
    passes_over: int = 0  # over a stream: passes that have ended


@dataclass(frozen=True)
class Layout:
    """How a pass is cut into batches and divided among the ranks. A state can only be resumed exactly under the same layout.

    Items are examples. They are batches if only whole batches are known: with a user's batch sampler, or with a loader that is
    not a plain ``DataLoader``. Sizes are those on one rank, except ``length``, the number of items in a pass over all ranks (of
    batches over a stream whose loader has a length). ``batches_per_pass`` is as with the plain loader; 0 if that has no length.
    """

    length: int
    replicas: int
    batch_size: int
    last_batch_size: int
    batches_per_pass: int

    @property
    def pass_length(self) -> int:
        return (self.batches_per_pass - 1) * self.batch_size + self.last_batch_size

    def items_per_pass(self, by_batches: bool) -> int:
        """Positions of a pass on one rank: batches if whole batches are echoed, else examples."""
        return self.batches_per_pass if by_batches else self.pass_length

    def state(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """The insertion point that was chosen, and why."""

    point: InsertionPoint  # never `auto`
    reason: str  # why `auto` did not choose an earlier point; empty if it chose the earliest, or if the user asked for the point
    make_stages: Callable[[Any], Stages]  # makes the stages of a data set, in a worker
    reused: tuple[str, ...]  # names of the stages that an echo reuses, for people
    redone: tuple[str, ...]  # names of the stages that each use redoes, for people
    item_bytes: int  # estimated memory of a live item (an example, or a batch if whole batches are echoed); 0 if unknown
    caution: str = ""  # why a resumed run gets other examples from this data set; empty if no reason is known
    split: Split | None = None  # where the data set is split
    holds: Sequence[Hold] = ()  # what a cache can hold, the earliest cut first; empty if that was not asked
    reading: ReadPart | None = None  # what threads may read ahead; None: nothing, or not asked
    no_reading: str = ""  # why threads may read nothing; empty if they may, or if that was not asked


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The values with which a pipeline is opened: those of the run, and those of the loader's `Setting`."""

    launch: Launch
    choice: Choice
    layout: Layout
    shape: PlanShape  # as of `Kind.shape`
    rank: int  # number of this rank's share of a pass
    key: int  # seed of this rank's random numbers in the workers, see `rank_key`
    cache: LoaderCache | None = None  # through which examples are read
    on_demand: bool = False  # whether batches echo on demand: the factor is then the bound of `DemandRule`
    say: Callable[[str], None] = lambda message: None  # warns the user
    in_flight: int | str = 1  # reads that the user asks to be under way at most on this rank, or "auto"
    most_ahead_bytes: int = 0  # that may be read ahead on this rank

    def plan(self) -> Plan:
        """Returns the plan, at the batch to begin with."""
        saved = self.launch.state["plan"]
        if saved is not None:
            return plan_from_state(self.shape, saved)
        plan = make_plan(self.shape, self.launch.factor)
        plan.position, plan.number = self.launch.begin_at
        return plan


def rebuilt_loader(
    loader: Any,
    requests: Iterable[Any],
    answering: Any,
    key: int,
    workers: WorkerProcesses,
    *,
    timeout: float | None = None,
    prefetched: int = 0,
) -> DataLoader[Any]:
    """Returns the user's ``DataLoader`` with the same workers and options, and a data set that answers requests.

    ``prefetched``: requests that all workers together get ahead; 0: as many as the user's loader.
    """
    options: dict[str, Any] = {name: getattr(loader, name) for name in ("num_workers", "pin_memory", "timeout")}
    if timeout is not None:
        options["timeout"] = timeout
    if loader.num_workers:
        options["prefetch_factor"] = prefetched // loader.num_workers or loader.prefetch_factor
        options["multiprocessing_context"] = workers.noted_by(loader.multiprocessing_context)
    if getattr(loader, "pin_memory_device", ""):
        options["pin_memory_device"] = loader.pin_memory_device
    generator = loader.generator
    if generator is None:  # without a generator, making the iterator would draw from the random state of the training
        generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own loader has given the same warnings already
        dataset: Any = EchoDataset(answering)
        collate: Any = EchoCollate(loader.collate_fn)
        return DataLoader(
            dataset,
            batch_sampler=requests,
            collate_fn=collate,
            worker_init_fn=workers.worker_init_fn,
            generator=generator,
            **options,
        )


# ---------------------------------------------------------------------- index pipeline
# A pipeline has no epochs. A run starts one at its first batch, because the ranks and the seed are only known then. It drops the
# pipeline when the run is closed or continues at another place. A kind of loader opens one (``kinds.py``)::
#
#     echoing examples         plan, order      --> ExampleRequests --> rebuilt loader              --> Prefetcher
#     echoing whole batches    plan, order      --> BatchRequests   --> rebuilt loader --> BatchEcho --> Prefetcher
#     a loader not rebuilt     plan, PassReader --> BatchRequests   --> PassReader     --> BatchEcho
#
# `PassReader` is both the order and the reader of a loader that is not rebuilt. `Prefetcher`, the thread, is left out if no
# thread may run.

_NOISE_SEED = 12


class IndexPipeline:
    """Yields batch after batch, each with its `Report`.

    ``batches`` yields a `UseToCome` in place of a batch if the batches are live on the device. The pipeline owns ``reader`` (a
    loader that is not rebuilt) and closes it. ``rounds`` is None if the nodes do not exchange examples, ``pools`` if no threads
    read in the workers.
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
        pools: Pools | None = None,
    ) -> None:
        self._pools = pools
        self._requests, self._workers, self._reader, self._rounds = requests, workers, reader, rounds
        self._batches: Iterator[Any] | None = batches
        self._on_device = on_device
        self._ended_at = 0  # number of batches of the run after which it was found that a pass had ended
        self.exact = requests.order.exact
        self.change_factor = requests.change_factor

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        assert self._batches is not None
        self._requests.delivered = delivered
        note = "" if self._rounds is None else self._rounds.take_note()
        try:
            item: tuple[Any, Report] = next(self._batches)
        except PassOver:
            self._ended_at = delivered
            return None
        except RuntimeError as error:  # torch has no class of its own for a time-out
            if self._pools is not None and "timed out after" in str(error) and (what := self._pools.who_waits()):
                raise ReadTimeoutError(f"{error}: {what}") from error
            raise
        if item[1] is None:
            assert self._requests.failure is not None
            raise self._requests.failure
        if note:
            item = item[0], item[1]._replace(note=note)
        if self._on_device:
            use, report = item
            return use.hand_out(), report  # not in the thread, because a batch is prepared where it is used
        return item

    def state(self, delivered: int) -> dict[str, Any]:
        state = self._requests.state(delivered)
        if delivered < self._ended_at:  # a resumed run finds that out again
            del state["order"]["passes"][-1]
        return state

    def position(self, delivered: int) -> int | None:
        return self._requests.position(delivered)

    def close(self) -> None:
        if self._pools is not None:
            self._pools.close()
        if self._rounds is not None:
            self._rounds.release()
        batches, self._batches = self._batches, None
        if isinstance(batches, Prefetcher) and not batches.close():
            self._workers.end()  # one of them is in a read of the user's
        self._workers.end_others()
        if self._reader is not None:
            self._reader.close()
        if self._rounds is not None:
            self._rounds.close()


def pipeline_over(
    requests: ExampleRequests | BatchRequests,
    batches: Iterator[Any],
    workers: WorkerProcesses,
    *,
    on_device: bool,
    in_thread: bool,
    are_owned: bool,
    rounds: Rounds | None = None,
    pools: Pools | None = None,
) -> IndexPipeline:
    """Returns the pipeline over a rebuilt loader, which yields ``batches`` for ``requests``.

    ``in_thread``: whether a thread fetches ahead. If not, the random states of the training are restored after each batch.
    ``are_owned``: whether no other code uses the memory of a batch.
    """
    if not in_thread:
        batches = PreservingIterator(batches)
    if isinstance(requests, BatchRequests):
        batches = BatchEcho(requests, batches, on_device=on_device, are_owned=are_owned)
    if in_thread:
        batches = Prefetcher(batches, lost=workers.lost)
    return IndexPipeline(requests, batches, workers, on_device=on_device, rounds=rounds, pools=pools)


def rank_key(seed: int, noise_rank: int) -> int:
    """Returns the seed of a rank's random numbers in the workers. Only ranks with equal ``noise_rank`` draw the same."""
    return mix(seed, _NOISE_SEED, noise_rank)


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
        self.change_factor = requests.change_factor
        self._answers: Iterator[Any] | None = answers
        self._places = {delivered: place}  # the places after the last three batches, by the number of delivered batches

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        assert self._answers is not None
        batch, report, place = next(self._answers)
        last = {number: self._places[number] for number in (delivered - 1, delivered) if number in self._places}
        self._places = {**last, delivered + (report is not None): place}
        return None if report is None else (batch, report)

    def state(self, delivered: int) -> dict[str, Any]:
        place = self._places[delivered]
        return {"plan": None, "order": None, "stream": {**place.state(), **self._requests.state(place.request)}}

    def position(self, delivered: int) -> None:
        """Returns None: each worker counts for its part of the stream."""

    def close(self, within: float = JOIN_SECONDS) -> None:
        """``within``: seconds after which a worker that is in a read of the user's is ended."""
        answers, self._answers = self._answers, None
        if isinstance(answers, Prefetcher) and not answers.close(within):
            self._workers.end()
        self._workers.end_others()


# ---------------------------------------------------------------------- requests and answers


@dataclass(frozen=True)
class StreamPlace:
    """The place of a run over a stream: after a batch, or between two passes."""

    request: int
    pass_number: int
    begun: bool  # whether the pass has had a batch
    ended: frozenset[int]  # workers whose stream has ended in this pass
    batches: tuple[int, ...]  # number of batches that each worker has made
    workers: tuple[bytes | None, ...]  # the state of each worker, pickled as it came; None for a worker without a state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> StreamPlace:
        workers = tuple(None if saved is None else pickle.dumps(saved) for saved in state["workers"])
        return cls(state["request"], state["pass"], state["begun"], frozenset(state["ended"]), tuple(state["batches"]), workers)

    def state(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "pass": self.pass_number,
            "begun": self.begun,
            "ended": sorted(self.ended),
            "batches": list(self.batches),
            "workers": [None if saved is None else pickle.loads(saved) for saved in self.workers],
        }


class StreamRequests(Iterator[StreamRequest]):
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

    def __next__(self) -> StreamRequest:
        with self._lock:
            at, self.next = self.next, self.next + 1
            worker = at % self._workers
            resume, self._resume[worker] = self._resume[worker], None
            if at < self._first:
                return StreamRequest(-1, 1.0, resume, at)
            pass_number = self._pass_number if at >= self.begins_at else self._pass_number - 1
            return StreamRequest(pass_number, self.factor_at(at), resume, at)

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
                "factors": [[request, self.factor_at(request)], *later],
                "pending": [list(change) for change in self._pending],
            }

    def factor_at(self, request: int) -> float:
        """Returns the factor of a request."""
        return next(factor for since, factor in reversed(self._factors) if since <= request)


class StreamAnswers(Iterator[tuple[Any, Report | None, StreamPlace]]):
    """Receives the answers of the workers, in the thread that fetches. ``received`` counts the batches of the run before.

    Yields (batch, its report, place after it), and between two passes (None, None, place).
    """

    def __init__(
        self, answers: Iterator[tuple[Any, Report, StreamNote]], requests: StreamRequests, place: StreamPlace, received: int
    ) -> None:
        self._answers, self._requests, self._place, self._received = answers, requests, place, received
        self._at = place.request - place.request % len(place.workers)  # the request whose answer comes next

    def __next__(self) -> tuple[Any, Report | None, StreamPlace]:
        while self._at < self._requests.begins_at:  # these were requested before it was known where the pass begins
            self._at += 1
            next(self._answers)
        self._requests.has_received(self._received)
        while len((place := self._place).ended) < len(place.workers):
            self._at += 1
            batch, report, note = next(self._answers)
            # A batch may itself be None: some collate functions return None if all examples are broken. So the counts decide.
            made = bool(report.fresh or report.echoed)
            ended = place.ended | {note.worker} if note.ended else place.ended
            batches, states = list(place.batches), list(place.workers)
            batches[note.worker] += made
            states[note.worker] = note.state
            begun = place.begun or made
            self._place = StreamPlace(place.request + 1, place.pass_number, begun, ended, tuple(batches), tuple(states))
            if made:
                self._received += 1
                return batch, report, self._place
        if not place.begun:
            raise RuntimeError(
                f"the stream yielded no batch in pass {place.pass_number}: it must have examples each time it is iterated "
                "(with drop_last=True, a full batch in at least one worker)"
            )
        self._requests.begin_pass()
        first = self._requests.begins_at
        self._place = StreamPlace(first, place.pass_number + 1, False, frozenset(), place.batches, place.workers)
        return None, None, self._place


# ---------------------------------------------------------------------- restartable pipeline
# At rest there are no workers and no thread, only the state from which the next started pipeline continues.

_BEGINNING: dict[str, Any] = {"plan": None, "order": None}


class Pipeline(Protocol):
    """The methods of a started pipeline that a run calls. It is an `IndexPipeline` or a `StreamPipeline`.

    ``exact``: whether a resumed run gets the same order.
    """

    exact: bool

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the batch after ``delivered`` batches of the run, and its report; None if a pass has ended here.

        The caller counts the batches delivered before this one: an interrupt may come before the caller gets a batch.
        """

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` of the run on."""

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state for resuming after ``delivered`` batches: those delivered so far, or one or two less.

        ``delivered`` is at least the number of batches when the pipeline was started.
        """

    def position(self, delivered: int) -> int | None:
        """Returns the position of the next fresh item in that state, without making it; on demand, how many were delivered.

        None for a stream, whose workers count for themselves.
        """

    def close(self) -> None:
        """Ends the workers and the thread."""


class RestartablePipeline:
    """The started pipeline or, at rest, the state from which the next one continues."""

    def __init__(self) -> None:
        self.begin_at = Start(0, 0)  # of a pipeline without a state
        self.started: Pipeline | None = None  # None at rest
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
            self.started = None
            _close_all(self._to_close)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state for resuming after ``delivered`` batches: that of plan and order, or of a stream, in plain types."""
        if self.started is not None:
            return self.started.state(delivered)
        if self._one_before is not None and self._one_before[0] == delivered:
            return self._one_before[1]
        return self._at_rest

    def position(self, delivered: int) -> int | None:
        """Returns the position of the next fresh item after ``delivered`` batches, as `Pipeline.position`."""
        if self.started is not None:
            return self.started.position(delivered)
        state = self.state(delivered)  # one that is there
        if state.get("stream") is not None:
            return None
        if (demand := state.get("demand")) is not None:
            return int(demand["frontier"] + sum(size for _, size in demand["ahead"]))
        return self.begin_at.position if state["plan"] is None else int(state["plan"]["position"])

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
        self.started = None
        _close_all(self._to_close)
        self._at_rest, self._one_before, self.begin_at = state or _BEGINNING, None, begin_at

    def wait_with(self, state: dict[str, Any]) -> None:
        """Lets the next pipeline continue from another `state`. It may only be called at rest."""
        self._at_rest, self._one_before = state, None

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("begin_at", "_at_rest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RestartablePipeline.__init__(self)
        self.__dict__.update(state)


def _close_all(pipelines: list[Pipeline]) -> None:
    while pipelines:
        pipelines.pop().close()
