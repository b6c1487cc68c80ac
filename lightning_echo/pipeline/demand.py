"""Echo on demand: a batch takes the fresh examples that have arrived when the training needs it, and echoes for the rest.

The workers decide which examples are fresh (``pipeline/demand_worker.py``). This is the main process:

* `DemandRequests`, the batch sampler, tells a worker the positions that it is to read, and their indices.
* `DemandPipeline` books the fresh positions of each batch when that batch is delivered. What is booked is the state of the run.
  What was read and not delivered is read again by a resumed run.
* `examples_on_demand` starts both.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from lightning_echo.data.randomness import PreservingIterator
from lightning_echo.pipeline.demand_worker import NOTHING_TO_REPEAT, DemandExamples, DemandRequest, ToRead, Words
from lightning_echo.pipeline.journal import JournalFile, Repeated, begin_journal
from lightning_echo.pipeline.pipelines import Layout, Opening, Pipeline, rebuilt_loader
from lightning_echo.pipeline.prefetch import DEPTH, Prefetcher, WorkerProcesses
from lightning_echo.pipeline.reads import Pools, ReadAhead, ReadTimeoutError
from lightning_echo.pipeline.requests import let_go_of_frames, with_place
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.demand import Block, Booked, Dealing, DemandRule, EarlierRanks, delivered_before, lead
from lightning_echo.plan.journal import Begin, ReplayedDealing
from lightning_echo.plan.order import Order
from lightning_echo.split.reading import file_of
from lightning_echo.split.staged import batched

_KEPT_BATCHES = 3  # delivered, and not booked: a state may be that of one or two batches before
_LAST_STEPS = 10  # whose times decide how early a batch is due
_DEAD_SECONDS = 10.0  # the training waits so long before the user is told that the source delivers nothing
_TOLD_AGAIN = 10  # a training that waits so many times as long as when the user was told tells so again
_BETWEEN_SECONDS = 60.0  # at least so long after the user was told before
_WATCH_SECONDS = 1.0  # where no thread fetches, it is looked so often how long the training has waited
CLOSE_READ_SECONDS = 1.0  # a worker that reads for longer is ended when the loader is closed
_OVERTAKING = 32  # examples for each read in flight, that may arrive before one that takes long
_CHEAP_SHARE = 0.25  # reads that take less of the time of making a batch are not worth an echo


class DemandRequests(Iterator[DemandRequest]):
    """The batch sampler: a request for each batch, with what its worker is to read.

    ``size_of`` returns the size of a batch by its number in the run. ``number`` is that of the next batch. ``journal``: where the
    fresh positions of each batch are written. ``repeated``: what a replay repeats.
    """

    def __init__(
        self,
        dealing: Dealing,
        order: Order,
        *,
        workers: int,
        number: int,
        size_of: Callable[[int], int],
        factors: list[tuple[int, float]],
        most_factor: float = math.inf,
        earlier: Any = None,
        journal: JournalFile | None = None,
        repeated: Repeated | None = None,
    ) -> None:
        self._earlier = earlier
        self._journal, self._repeated = journal, repeated
        self._dealing, self.order, self._workers, self._size_of = dealing, order, max(workers, 1), size_of
        self._number = self._first = number
        self._count = 0  # torch sends request ``k`` to worker ``k % workers``
        self._most_factor = most_factor
        self._factors = factors  # (from which batch on, `max_factor`), ascending; the first one is in force
        self._indices: dict[int, Any] = {}  # of open positions
        first = dealing.booked().frontier
        order.seek(first)
        # A state has the order from here on: another rank may not have come further. The run says so after the start.
        self._order_from = 0.0
        self._known = first  # the indices of all positions before it were taken
        # Batches that were delivered and not booked, by number: a state may be asked for that is before them.
        self._delivered: deque[tuple[int, Sequence[int]]] = deque()
        self._next_delivered = self._next_noted = number  # noted: in the journal
        self.failure: Exception | None = None  # of the user's order, or because of which a batch cannot be repeated
        self._ends_at = math.inf if repeated is None else repeated.stretch.end  # the first batch that cannot be repeated
        self.lock = threading.RLock()  # never held while the user's sampler runs, or a file is written: that may hang
        self._noting, self._is_noting = threading.RLock(), False  # one thread after the other, so that batches stay in order
        self._take_indices(dealing.next)

    def __next__(self) -> DemandRequest:
        self._note()
        with self.lock:
            self._book()
            self.order.prune(self._order_begins)
        told = list[ToRead]()
        try:
            for block in self._dealing.deal(self._count % self._workers):
                told.append(self._with_indices(block))
        except Exception as error:  # the user's sampler may raise anything: after the batches that it has given
            self.failure = self.failure or with_place(error)
            let_go_of_frames(error)
        with self.lock:
            number, fresh = self._number, None
            if self._repeated is not None:
                if self.failure is None:
                    self.failure = self._repeated.over_at(number) or self._changed_at(number, self._repeated)
                    if self.failure is not None:
                        self._ends_at = number
                if number >= self._ends_at:
                    return NOTHING_TO_REPEAT
                fresh = frozenset(self._repeated.stretch.fresh_in(number))
            self._number, self._count = number + 1, self._count + 1
            return DemandRequest(
                number, self._size_of(number), self._bound_of(number), tuple(told), self.failure is not None, fresh
            )

    def _changed_at(self, number: int, repeated: Repeated) -> Exception | None:
        return repeated.changed_at(number, [self._indices[position] for position in repeated.stretch.fresh_in(number)])

    def _with_indices(self, positions: Block) -> ToRead:
        length = self.order.pass_length
        while self._known <= positions[-1]:
            if self.failure is not None:
                raise self.failure
            first = self._known
            in_pass = min(positions[-1] + 1 - first, length - first % length)  # a pass that fails loses nothing of the one before
            self._take_indices(first + in_pass)
        return ToRead(
            positions, [self._indices[position] for position in positions], [position // length for position in positions]
        )

    def _take_indices(self, end: int) -> None:
        for position, index in enumerate(self.order.take(end - self._known), self._known):
            if not self._dealing.is_delivered(position):
                self._indices[position] = index
        self._known = end

    @property
    def _order_begins(self) -> int:
        """The first position that this rank, or another one, has not delivered."""
        return int(min(self._dealing.frontier, self._order_from))

    def _factor_of(self, number: int) -> float:
        return next(factor for since, factor in reversed(self._factors) if since <= number or since == self._factors[0][0])

    def _bound_of(self, number: int) -> float:
        """Returns ``max_factor`` as a worker gets it."""
        if self._repeated is not None:
            return self._repeated.stretch.factor_of(number)
        return min(self._factor_of(number), self._most_factor)

    def change_factor(self, number: int, factor: float) -> None:
        """Sets ``max_factor`` from batch ``number`` on, instead of all changes that were to come from that batch on."""
        with self.lock:
            first, *others = self._factors
            self._factors = [first, *(each for each in others if each[0] < number), (number, factor)]

    def deliver(self, number: int, fresh: Sequence[int]) -> None:
        """Notes the fresh positions of batch ``number``. A later request books them, outside of the training's thread."""
        self._delivered.append((number, fresh))
        self._next_delivered = number + 1

    def _note(self) -> None:
        """Notes in the journal what was delivered, without ``lock``: a disk may take long, and each step needs that."""
        with self._noting:
            if self._is_noting:  # a signal handler saves a state within this very call: what it interrupts notes the rest
                return
            self._is_noting = True
            try:
                with self.lock:
                    new = [(number, fresh) for number, fresh in tuple(self._delivered) if number >= self._next_noted]
                    noted = [(fresh, [self._indices[each] for each in fresh], self._bound_of(number)) for number, fresh in new]
                for (number, _), batch in zip(new, noted, strict=True):
                    if self._journal is not None:
                        self._journal.book(*batch, number=number)
                    self._next_noted = number + 1
            finally:
                self._is_noting = False

    def _book(self) -> None:
        """Books what was delivered. Where no thread fetches, a signal handler may save a state at any moment of it."""
        while len(self._delivered) > _KEPT_BATCHES and self._delivered[0][0] < self._next_noted:
            number, fresh = self._delivered[0]
            self._dealing.book(fresh)
            for position in fresh:
                del self._indices[position]
            while len(self._factors) > 1 and self._factors[1][0] <= number:
                self._factors.pop(0)
            self._delivered.popleft()  # last: until then, a state has the batch from here

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state after ``delivered`` batches, which may be one or two fewer than those delivered."""
        self._note()  # a checkpoint is not later than its journal
        with self.lock:
            booked = self._booked_after(delivered)
            pending = [[since, factor] for since, factor in self._factors if since > delivered]
            demand = {
                "number": delivered,
                "frontier": booked.frontier,
                "ahead": booked.runs(),
                "max_factor": self._factor_of(delivered),
                "pending": pending,
            }
            if self._earlier is not None:
                demand["earlier"] = self._earlier
            return {"plan": None, "order": self.order.state(self._order_begins), "demand": demand}

    def position(self, delivered: int) -> int:
        """Returns how many positions are delivered in the `state` after ``delivered`` batches, without making one."""
        with self.lock:
            return self._booked_after(delivered).delivered

    def _booked_after(self, delivered: int) -> Booked:
        first = self._delivered[0][0] if self._delivered else self._next_delivered
        if not first <= delivered <= self._next_delivered:
            raise RuntimeError(f"the state after {delivered} batches is gone: {self._next_delivered} are delivered")
        fresh = (fresh for number, fresh in self._delivered if number < delivered)
        return self._dealing.booked().with_more(chain.from_iterable(fresh))

    def place(self) -> tuple[int, Booked]:
        """Returns the number of batches that were delivered, and what was."""
        with self.lock:
            since_booked = chain.from_iterable(fresh for _, fresh in self._delivered)
            return self._next_delivered, self._dealing.booked().with_more(since_booked)

    def keep_order_from(self, position: float) -> None:
        """Lets a state have the order from a position on that all other ranks have reached; infinite: there are none."""
        with self.lock:
            self._order_from = position

    def close(self) -> None:
        """Closes the journal."""
        self._note()
        if self._journal is not None:
            self._journal.close()

    def index_of(self, position: int) -> Any:
        """Returns the index of a position that is open; None if it is not known."""
        return self._indices.get(position)

    @property
    def next_worker(self) -> int:
        """The worker that makes the next batch."""
        return (self._next_delivered - self._first) % self._workers


@dataclass
class Waiting:
    """A training that waits for fresh examples: for how long, and what is said of it.

    Where a thread fetches, the training asks meanwhile whether it waits in vain (`lost`). Elsewhere the training itself is in the
    user's loader, and a thread of its own looks (`watch`).

    ``timeout``: that of the user's loader, in seconds; 0: none. It counts from the moment at which the training asks.
    """

    requests: DemandRequests
    workers: WorkerProcesses
    dataset: Any
    timeout: float
    say: Callable[[str], None]
    words: Any = None
    since: float | None = None  # None: it does not wait
    has_begun: bool = False  # whether the training has got a batch
    _stalls: int = 0  # so many times it has waited for long
    _stall: float | None = None  # since when the last time
    _told_after: float = 0.0  # seconds of that after which the user is told
    _told_at: float = -math.inf
    _is_over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Lets a thread say that the source delivers nothing, until `end`."""
        threading.Thread(target=self._watch, name="lightning_echo-waiting", daemon=True).start()

    def end(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(_WATCH_SECONDS):
            if (since := self.since) is not None:
                self._tell_if_dead(since)

    def lost(self, within: float) -> BaseException | None:
        """Returns an error if the training waits in vain, see `Prefetcher`. Tells the user if the source delivers nothing."""
        if (error := self.workers.lost(within)) is not None:
            return error
        if (since := self.since) is None:
            return None
        waited = perf_counter() - since
        if self.timeout and waited > self.timeout:
            return ReadTimeoutError(f"DataLoader timed out after {self.timeout:g} seconds: {self._what()} is not read")
        self._tell_if_dead(since)
        return None

    def _tell_if_dead(self, since: float) -> None:
        """Tells the user of each stall, and of a long one again, but not too often."""
        now = perf_counter()
        waited = now - since
        if waited <= _DEAD_SECONDS or not self.has_begun:
            return
        if since != self._stall:
            self._stall, self._stalls, self._told_after = since, self._stalls + 1, _DEAD_SECONDS
        if waited > self._told_after and now - self._told_at > _BETWEEN_SECONDS:
            self._told_at, self._told_after = now, _TOLD_AGAIN * waited
            stall = f" (stall {self._stalls})" if self._stalls > 1 else ""
            self.say(f"the training has waited {waited:.0f} s for fresh examples{stall}: {self._why()}")

    def _why(self) -> str:
        reads_many = batched(self.dataset) is not None
        while_reading = "calls of __getitems__ return" if reads_many else "threads read (reads_in_flight) or reads return"
        bridged = f"What memory holds bridges a stall for max_factor uses, and only while {while_reading}"
        return f"{self._what()} is not read yet. {bridged}"

    def _what(self) -> str:
        index = self.requests.index_of(self.words.read_by(self.requests.next_worker))
        if index is None:  # its worker reads nothing just now, or what it reads was delivered meanwhile
            return "the next example of the data set"
        find = file_of(self.dataset)
        return f"example {index!r} of the data set{'' if find is None else f' ({find(index)})'}"


class Pace:
    """Decides how early a batch is due: as making one takes, with the example that the worker reads just then.

    The slowest of the last makings counts: on busy processors some take several times as long as others. Of the reads, the usual
    one counts. Behind a heavy tail the slowest one would make all batches due, and leave the workers none to read for.

    ``read_at_once``: examples that the worker reads, or decodes, before it looks again.
    """

    def __init__(self, most_lead: int, read_at_once: int = 1) -> None:
        self._most_lead, self._read_at_once = most_lead, read_at_once
        self._steps: deque[float] = deque(maxlen=_LAST_STEPS)
        self._makings: deque[float] = deque(maxlen=_LAST_STEPS)
        self._loads: deque[float] = deque(maxlen=_LAST_STEPS)
        self._handed_at: float | None = None

    def ask(self) -> None:
        """Notes that the training asks for a batch: a step is over, if it has got one."""
        if self._handed_at is not None:
            self._steps.append(perf_counter() - self._handed_at)
            self._handed_at = None

    def hand(self, report: Report) -> int:
        """Notes that the training gets a batch. Returns how many batches before its turn a batch is due."""
        self._makings.append(report.rest + report.collate)
        if report.fresh:
            self._loads.append(report.source / report.fresh)
        self._handed_at = perf_counter()
        if not self._steps:
            return min(1, self._most_lead)
        making = max(self._makings) + (median(self._loads) * self._read_at_once if self._loads else 0.0)
        return lead(making, median(self._steps), self._most_lead)

    def reads_are_cheap(self, size: int) -> bool:
        """Returns whether the reads of a batch take little of the time of making it. A slow batch of the last ones decides."""
        return len(self._loads) > 2 and size * max(self._loads) < _CHEAP_SHARE * median(self._makings)


class DemandPipeline:
    """Yields batch after batch, each with its `Report`, as `IndexPipeline` does for a constant factor."""

    def __init__(
        self,
        requests: DemandRequests,
        batches: Iterator[Any],
        words: Words,
        workers: WorkerProcesses,
        waiting: Waiting,
        *,
        in_thread: bool,
        most_lead: int,
        read_at_once: int,
        pools: Pools | None,
    ) -> None:
        self._requests, self._words, self._workers, self._waiting, self._pools = requests, words, workers, waiting, pools
        self._batches: Iterator[Any] | None = PreservingIterator(batches)
        if in_thread:
            self._batches = Prefetcher(batches, lost=waiting.lost, watched=True)
        else:
            waiting.watch()
        self._pace = Pace(most_lead, read_at_once)
        self.exact = requests.order.exact
        self.change_factor = requests.change_factor
        self.place, self.keep_order_from = requests.place, requests.keep_order_from

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        assert self._batches is not None
        self._pace.ask()
        self._words.ask(delivered)
        self._waiting.since = perf_counter()
        try:
            batch, report, *fresh = next(self._batches)
        finally:
            self._waiting.since = None
        if report is None:
            assert self._requests.failure is not None
            raise self._requests.failure
        self._requests.deliver(delivered, fresh[0])
        self._words.hand(self._pace.hand(report), reads_are_cheap=self._pace.reads_are_cheap(report.fresh + report.echoed))
        self._waiting.has_begun = True
        return batch, report

    def state(self, delivered: int) -> dict[str, Any]:
        return self._requests.state(delivered)

    def position(self, delivered: int) -> int:
        return self._requests.position(delivered)

    def close(self) -> None:
        self._words.close()
        self._waiting.end()
        if self._pools is not None:
            self._pools.close()
        batches, self._batches = self._batches, None
        if isinstance(batches, Prefetcher) and not batches.close(CLOSE_READ_SECONDS):
            self._workers.end()  # one of them is in a read of the user's
        self._workers.end_others()
        self._requests.close()


def booked_of(saved: dict[str, Any] | None, position: int) -> Booked:
    """Returns what a state of `DemandPipeline` has booked; without one, all before a position."""
    return Booked(position) if saved is None else Booked.of(saved["frontier"], saved["ahead"])


def earlier_of(saved: dict[str, Any] | None) -> list[EarlierRanks]:
    """Returns what earlier ranks had delivered, by a state of `DemandPipeline`."""
    rows = [] if saved is None else saved.get("earlier") or []
    return [
        EarlierRanks(replicas, pass_length, tuple(Booked.of(frontier, ahead) for _, frontier, ahead, *_ in places))
        for replicas, pass_length, places in rows
    ]


def factors_of(saved: dict[str, Any] | None, factor: float) -> list[tuple[int, float]]:
    """Returns ``max_factor``, and its changes to come, each with the number of its first batch."""
    if saved is None:
        return [(0, factor)]
    pending = [(int(number), float(value)) for number, value in saved["pending"]]
    return [(saved["number"], saved["max_factor"]), *pending]


def window_of(size: int, prefetched: int, workers: int, ahead: int) -> int:
    """Returns of how many positions a worker is told: for all batches that it may have made or begun, and ``ahead`` more."""
    batches = prefetched // max(workers, 1) + -(-(DEPTH + 1 + _KEPT_BATCHES) // max(workers, 1)) + 2
    return batches * size + ahead


# ---------------------------------------------------------------------- how it starts


class ReadByIndex(Protocol):
    """What this needs of a kind of loader: `Indexed`, in ``kinds.py``."""

    loader: Any
    num_workers: int

    @property
    def prefetched_on_demand(self) -> int: ...

    @property
    def may_run_in_thread(self) -> bool: ...

    @property
    def is_foreseeable(self) -> bool: ...

    def reading(self, opening: Opening) -> ReadAhead | None: ...

    def order(self, layout: Layout, distance: int, seed: int, rank: int) -> Order: ...


def examples_on_demand(kind: ReadByIndex, opening: Opening) -> Pipeline:
    """Starts a `DemandPipeline` and its workers."""
    launch, choice, shape, loader = opening.launch, opening.choice, opening.shape, kind.loader
    caching = None if opening.cache is None else opening.cache.caching(None)
    reads_many = choice.make_stages(loader.dataset).load_many is not None
    reading = None if reads_many else kind.reading(opening)
    order = kind.order(opening.layout, 0, launch.seed, opening.rank)
    if launch.state["order"] is not None:
        order.load(launch.state["order"])
    pass_length, workers = opening.layout.pass_length, max(kind.num_workers, 1)
    ahead = reading.window(pass_length // workers) if reading is not None and kind.is_foreseeable else 0
    window = window_of(shape.batch_size, kind.prefetched_on_demand, workers, ahead)
    saved, held = launch.state.get("demand"), min(opening.shape.buffer_size, pass_length) // workers
    begin = Begin(
        number=launch.begin_at.number if saved is None else saved["number"],
        booked=booked_of(saved, launch.begin_at.position),
        max_factor=launch.factor if saved is None else saved["max_factor"],
        conditions=conditions_of(opening, kind.num_workers, examples_held=held, reads_whole_batches=reads_many),
    )
    repeated = begin_journal(launch.journal, launch.repeated, begin)
    dealing = (
        Dealing(
            begin.booked,
            pass_length=pass_length,
            block=shape.batch_size,
            workers=workers,
            window=window,
            delivered_before=delivered_before(
                earlier_of(saved), pass_length=pass_length, replicas=opening.layout.replicas, rank=opening.rank
            ),
        )
        if repeated is None
        else ReplayedDealing(
            repeated.stretch, pass_length=pass_length, block=shape.batch_size, window=window, reads_blocks=reads_many
        )
    )
    # Without workers, nothing is read while a step runs, except by threads.
    most_factor = 1.0 if not kind.num_workers and reading is None else math.inf
    requests = DemandRequests(
        dealing,
        order,
        workers=workers,
        number=begin.number,
        size_of=shape.size_of,
        factors=factors_of(saved, launch.factor),
        most_factor=most_factor,
        earlier=None if saved is None else saved.get("earlier"),
        journal=launch.journal,
        repeated=repeated,
    )
    words, processes = Words(loader), WorkerProcesses(launch.worker_init_fn)
    rule = DemandRule(opening.key, launch.factor, held)
    examples = DemandExamples(
        loader.dataset,
        choice.make_stages,
        opening.key,
        loader.collate_fn,
        caching,
        reading,
        words=words,
        rule=rule,
        most_overtaking=0 if reading is None else max(min(_OVERTAKING * reading.threads, pass_length // workers // 4), 1),
    )
    in_thread = kind.num_workers > 0 and kind.may_run_in_thread
    timeout = 0 if in_thread else loader.timeout  # in a thread, it counts from when the training asks
    prefetched = kind.prefetched_on_demand
    rebuilt = rebuilt_loader(loader, requests, examples, opening.key, processes, timeout=timeout, prefetched=prefetched)
    return DemandPipeline(
        requests,
        iter(rebuilt),
        words,
        processes,
        Waiting(requests, processes, loader.dataset, loader.timeout, opening.say, words),
        in_thread=in_thread,
        # A batch must not be due when it is requested, or its worker never reads. A thread requests it some batches earlier.
        most_lead=max(prefetched - (not in_thread), 0),
        read_at_once=shape.batch_size if reads_many else 1,
        pools=None if reading is None else reading.pools,
    )


def conditions_of(opening: Opening, workers: int, **others: Any) -> dict[str, Any]:
    """Returns what must be the same for a replay, by name."""
    return {
        "seed": opening.launch.seed,
        **opening.layout.state(),
        "rank": opening.rank,
        "workers": workers,
        "insertion_point": opening.choice.point.value,
        **others,
    }
