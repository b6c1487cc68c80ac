"""Echo on demand: a worker reads until its batch is full of fresh examples, or until the training needs it, and echoes the rest.

Main process and workers share a few words of memory (`Words`). The thread that trains writes which batch it asks for, before it
waits. So a worker knows whether anybody waits for its batch, and it decides as late as possible which of the examples are fresh.
The rule itself is `DemandRule` (``plan/demand.py``).

* `DemandRequests`, the batch sampler, tells a worker the positions that it is to read, and their indices.
* `DemandExamples`, in a worker, reads them. With reads in flight, threads read them, and what arrives first is taken first.
  Otherwise the worker reads one example, looks whether its batch is full or due, and reads the next one.
* `DemandPipeline`, in the main process, books the fresh positions of each batch when that batch is delivered. What is booked is
  the state of the run. What was read and not delivered is read again by a resumed run.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from lightning_echo.data.copies import copy_example
from lightning_echo.data.randomness import BATCH, EXAMPLE, PreservingIterator
from lightning_echo.pipeline.journal import JournalFile
from lightning_echo.pipeline.prefetch import DEPTH, Prefetcher, WorkerProcesses
from lightning_echo.pipeline.reads import NOTHING_READ, Abandoned, Pools, ReadTimeoutError
from lightning_echo.pipeline.requests import let_go_of_frames, with_place
from lightning_echo.pipeline.worker import NO_LOOKUPS, LiveExamples, Report
from lightning_echo.plan.demand import Arrived, Block, Booked, Dealing, DemandRule, EarlierRanks, lead
from lightning_echo.plan.journal import Begin, Journal, JournalError, checksum
from lightning_echo.plan.order import Order, entry_key
from lightning_echo.split.reading import file_of
from lightning_echo.split.staged import Stages, examples_in, unchanged

_LOOK_SECONDS = 0.001  # a worker that has nothing to read looks so often whether its batch is due
_KEPT_BATCHES = 3  # delivered, and not booked: a state may be that of one or two batches before
_LAST_STEPS = 10  # whose times decide how early a batch is due
_DEAD_SECONDS = 10.0  # the training waits so long before the user is told that the source delivers nothing
_CLOSE_READ_SECONDS = 1.0  # a worker that reads for longer is ended when the loader is closed
_CLOSE_SECONDS = 5.0
OVERTAKING = 32  # examples for each read in flight, that may arrive before one that takes long
_CHEAP_SHARE = 0.25  # reads that take less of the time of making a batch are not worth an echo
_CLOSED, _ASKED, _HANDED, _LEAD, _CHEAP, _READING = range(6)  # the last one: a word for each worker


class Words:
    """What the main process and the workers tell each other while they work. Without a lock: a killed worker would keep it.

    ``asked`` is the number of the batch that the training waits for, or waited for last; ``handed`` whether it has got a batch.
    """

    def __init__(self, loader: Any) -> None:
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        count = _READING + max(loader.num_workers, 1)
        self._words: Any = context.RawArray("q", count) if loader.num_workers else [0] * count
        for worker in range(max(loader.num_workers, 1)):
            self.read(worker, -1)  # nothing yet

    def ask(self, number: int) -> None:
        self._words[_ASKED] = number

    def hand(self, lead_batches: int, *, reads_are_cheap: bool) -> None:
        self._words[_LEAD] = lead_batches
        self._words[_CHEAP] = reads_are_cheap
        self._words[_HANDED] = 1

    def close(self) -> None:
        self._words[_CLOSED] = 1

    def read(self, worker: int, position: int) -> None:
        """Notes which position a worker reads, or waits for."""
        self._words[_READING + worker] = position

    def read_by(self, worker: int) -> int:
        return int(self._words[_READING + worker])

    @property
    def is_closed(self) -> bool:
        return bool(self._words[_CLOSED])

    @property
    def are_reads_cheap(self) -> bool:
        """Whether making a batch takes so long that echoing in place of its reads would save nearly nothing."""
        return bool(self._words[_CHEAP])

    def is_due(self, number: int) -> bool:
        """Returns whether the training is about to wait for a batch. Before it has got its first one, it reads ahead only."""
        words = self._words
        return bool(words[_HANDED]) and int(words[_ASKED]) >= number - int(words[_LEAD])


class ToRead(NamedTuple):
    """Positions that a worker is told together, with their indices and passes. A data set may read them in one call."""

    positions: Sequence[int]
    indices: list[Any]
    pass_numbers: Sequence[int]


class DemandRequest(NamedTuple):
    """A request to a worker for one batch."""

    number: int
    size: int
    max_factor: float
    to_read: tuple[ToRead, ...]  # what the worker is to read from now on, after what it was told before
    ends: bool = False  # whether the worker is told nothing more, because the user's order has failed
    fresh: frozenset[int] | None = None  # exactly these positions are fresh, as a journal says; None: those that arrive


NOTHING_TO_REPEAT = DemandRequest(-1, 0, 1.0, ())
"""Stands for a batch that a replay cannot repeat. It is answered by None twice."""


# ---------------------------------------------------------------------- in a worker


class _Read(NamedTuple):
    """An example that was read: the first use, and the copy that memory holds."""

    arrived: Arrived
    index: Any
    example: Any
    kept: Any


class DemandExamples(LiveExamples):
    """Answers requests in one process. ``rule`` gets a new memory in each process. The other arguments are `LiveExamples`'s.

    ``most_overtaking``: so many examples that threads have read are taken before one that takes long. Then that one is awaited.
    """

    def __init__(self, *args: Any, words: Words, rule: DemandRule, most_overtaking: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._words, self._rule, self._most_overtaking = words, rule, most_overtaking
        self._todo: deque[tuple[int, Any, int]] = deque()  # position, index and pass of what this thread reads
        self._calls: deque[ToRead] = deque()  # the same, for a data set that reads many in one call
        self._in_pool: dict[Hashable, deque[tuple[int, int]]] = {}  # by index: position and pass of what threads read
        self._awaited: OrderedDict[int, tuple[int, Any]] = OrderedDict()  # the same by position: its number, and its index
        self._for_pool = 0  # positions that threads were told
        self._read: list[_Read] = []  # arrived, and in no batch yet
        self._arrived: list[Arrived] = []  # the same, for the rule
        self._memory: dict[Hashable, tuple[Any, Any]] = {}  # index and example, by key
        self._parent = 0  # the process of the training, as the first request finds it
        self._worker: int | None = None  # the number of this one; None: there are no workers

    def fetch(self, request: DemandRequest) -> tuple[Any, ...]:  # type: ignore[override]
        """Returns the examples of a batch, its report, and the positions of the fresh ones; None twice if there is no batch."""
        if request.number < 0:
            return None, None, ()
        try:
            return self._answer_on_demand(self._stages or self._begin(), request)
        except Abandoned as abandoned:
            raise abandoned.error from None

    def _answer_on_demand(self, stages: Stages, request: DemandRequest) -> tuple[Any, ...]:
        self._source_seconds = 0.0
        before = NO_LOOKUPS if self._caching is None else self._caching.store.lookups
        self._rule.set_factor(request.max_factor)
        if not self._parent:
            info = get_worker_info()
            self._parent, self._worker = os.getppid(), None if info is None else info.id
        self._note_to_read(stages, request.to_read)
        watched = self._watched if self._cached is None else None  # a cache watches its reads itself
        if watched is not None:
            watched.begin()
        left = len(self._read)
        read = self._read_until_due if request.fresh is None else self._read_as_before
        may_repeat = read(stages, request)
        if may_repeat is None:
            return None, None, ()
        if watched is not None:
            if watched.must_repeat():
                self._read[left:] = [self._read_again(stages, read) for read in self._read[left:]]
            watched.end()
        started = perf_counter()
        fresh, echoes = self._take(request, may_repeat=may_repeat)
        self._seeding.seed(BATCH, request.number)
        indices, examples = map(list, zip(*((index, example) for _, index, example in (*fresh, *echoes)), strict=True))
        if stages.augment is not unchanged:
            examples = self._augment(stages, indices, examples)
        report = Report(len(fresh), len(echoes), 0, self._source_seconds, perf_counter() - started)
        return examples, self._complete(report, before), tuple(position for position, _, _ in fresh)

    def _complete(self, report: Report, before: Any) -> Report:
        note = ""
        if self._watched is not None:
            note, self._watched.note = self._watched.note, ""
        if self._pool is not None:
            report = report._replace(in_flight=self._pool.mean_in_flight())
            note = note or self._pool.take_note()
        if self._caching is not None and self._cached is not None:
            now = self._caching.store.lookups
            report = report._replace(hits=now.hits - before.hits, misses=now.misses - before.misses)
            note = note or self._cached.take_note()
        return report._replace(note=note)

    # ------------------------------------------------------------------ reading

    def _note_to_read(self, stages: Stages, told: Sequence[ToRead]) -> None:
        """Notes what is to be read: by threads, or by this one, as also what a cache holds."""
        if stages.load_many is not None:
            self._calls.extend(told)
            return
        each = chain.from_iterable(zip(*block, strict=True) for block in told)
        if self._pool is None:
            self._todo.extend(each)
            return
        for_threads = []
        for position, index, number in each:
            if self._cached is not None and self._cached.holds(index):
                self._todo.append((position, index, number))
            else:
                self._in_pool.setdefault(entry_key(index), deque()).append((position, number))
                self._awaited[position] = self._for_pool, index
                self._for_pool += 1
                for_threads.append(index)
        self._pool.foresee(for_threads)

    def _read_until_due(self, stages: Stages, request: DemandRequest) -> bool | None:
        """Reads until the batch is full or due. Returns whether an index may be twice in it; None if there can be no batch."""
        rule, size, arrived = self._rule, request.size, self._arrived
        while True:
            if len(arrived) >= size and len(rule.fresh_in(size, arrived)) == size:
                return False
            if self._words.is_closed:
                return None
            if self._words.is_due(request.number) and rule.may_hand_out(size, arrived) and not self._takes_more():
                return False
            if self._read_next(stages):
                continue
            if not (self._todo or self._in_pool or self._calls):
                if len(arrived) >= size:
                    return True
                if request.ends:
                    return None
            self._look_for_parent()

    def _takes_more(self) -> bool:
        """Returns whether a batch that is due takes another fresh example: one that is there, and that costs little to take."""
        if self._pool is None:
            return self._words.are_reads_cheap and bool(self._todo or self._calls)
        if not self._words.are_reads_cheap and self._worker is not None:
            return False
        return bool(self._todo) or (self._pool.has_arrived and self._overtaken() is NOTHING_READ)

    def _read_as_before(self, stages: Stages, request: DemandRequest) -> bool | None:
        """Reads what a journal says, however long that takes. Returns what `_read_until_due` returns."""
        assert request.fresh is not None
        while not request.fresh <= {arrived.position for arrived in self._arrived}:
            if self._words.is_closed or (request.ends and not (self._todo or self._in_pool or self._calls)):
                return None
            if not self._read_next(stages):
                self._look_for_parent()
        return True

    def _look_for_parent(self) -> None:
        if get_worker_info() is not None and os.getppid() != self._parent:
            raise RuntimeError("the process of the training has ended")

    def _read_next(self, stages: Stages) -> bool:
        """Reads the next example, or those of the next call. Returns whether there was one: if not, this has waited a moment."""
        if self._todo:
            position, index, number = self._todo.popleft()
        elif self._pool is not None:
            self._words.read(self._worker or 0, next(iter(self._awaited), -1))
            index = self._pool.next_read(_LOOK_SECONDS, self._overtaken())
            if index is NOTHING_READ:
                return False
            key = entry_key(index)
            places = self._in_pool[key]
            position, number = places.popleft()
            del self._awaited[position]
            if not places:
                del self._in_pool[key]
        elif self._calls:
            self._read_call(stages, self._calls.popleft())
            return True
        else:
            sleep(_LOOK_SECONDS)
            return False
        self._words.read(self._worker or 0, position)
        self._look_up([index], are_fresh=True)
        if self._watched is not None and not self._rule.keeps:  # then it may draw random numbers
            self._seeding.seed(EXAMPLE, position)
        self._add(Arrived(position, entry_key(index), number), index, self._load(stages, position, index))
        return True

    def _read_call(self, stages: Stages, call: ToRead) -> None:
        self._words.read(self._worker or 0, call.positions[0])
        self._look_up(call.indices, are_fresh=True)
        if self._watched is not None and not self._rule.keeps:  # as in `_read_next`
            self._seeding.seed(EXAMPLE, call.positions[0])
        examples = self._load_call(stages, call.positions[0], call.indices)
        for position, index, number, example in zip(*call, examples, strict=True):
            # A copy, since the data set may use its memory again in the next call, when examples of this one are left.
            self._add(Arrived(position, entry_key(index), number), index, copy_example(example))

    def _add(self, arrived: Arrived, index: Any, example: Any) -> None:
        self._arrived.append(arrived)
        # Memory holds a copy, since the data set may use its memory again. The bound may be raised before the example is used.
        self._read.append(_Read(arrived, index, example, self._kept(index, example)))

    def _overtaken(self) -> Any:
        """Returns the index of the oldest example that threads read, if it must come next; else `NOTHING_READ`."""
        if not self._awaited:
            return NOTHING_READ
        number, index = next(iter(self._awaited.values()))
        taken_after = self._for_pool - number - len(self._awaited)
        return index if taken_after >= self._most_overtaking else NOTHING_READ

    def _read_again(self, stages: Stages, read: _Read) -> _Read:
        """Reads an example once more, by itself: random numbers were drawn, or two examples are in the same memory."""
        position = read.arrived.position
        if stages.load_many is None:
            example = self._load(stages, position, read.index)
        else:
            example = examples_in(self._load_call(stages, position, [read.index]), [read.index])[0]
        return read._replace(example=example, kept=self._kept(read.index, example))

    # ------------------------------------------------------------------ a batch

    def _take(self, request: DemandRequest, *, may_repeat: bool) -> tuple[list[Any], list[Any]]:
        """Takes a batch out of what has arrived and what memory holds: position (-1: an echo), index and example of each."""
        arrived = self._arrived
        if request.fresh is not None:
            arrived = [each for each in arrived if each.position in request.fresh]
        handed = self._rule.hand_out(request.number, request.size, arrived, may_repeat=may_repeat)
        by_position = {read.arrived.position: read for read in self._read}
        taken = [by_position.pop(each.position) for each in handed.fresh]
        self._read = list(by_position.values())
        self._arrived = [read.arrived for read in self._read]
        echoes = [(-1, *self._again(key)) for key in handed.echoes]
        if self._rule.keeps:
            for read in taken:
                self._memory[read.arrived.key] = read.index, read.kept
            for key in handed.forget:
                del self._memory[key]
        else:
            self._memory.clear()
        return [(read.arrived.position, read.index, read.example) for read in taken], echoes

    def _again(self, key: Hashable) -> tuple[Any, Any]:
        index, kept = self._memory[key]
        return index, self._use_of(index, kept)


# ---------------------------------------------------------------------- in the main process


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
        self._order_from = math.inf  # a state has the order from here on: another rank may not have come further
        self._known = first  # the indices of all positions before it were taken
        # Batches that were delivered and not booked, by number: a state may be asked for that is before them.
        self._delivered: deque[tuple[int, Sequence[int]]] = deque()
        self._next_delivered = self._next_noted = number  # noted: in the journal
        self.failure: Exception | None = None  # of the user's order, or because of which a batch cannot be repeated
        self._ends_at = math.inf if repeated is None else repeated.stretch.end  # the first batch that cannot be repeated
        self._take_indices(dealing.next)
        self.lock = threading.RLock()

    def __next__(self) -> DemandRequest:
        with self.lock:
            self._book()
            told = list[ToRead]()
            try:
                for block in self._dealing.deal(self._count % self._workers):
                    told.append(self._with_indices(block))
            except Exception as error:  # the user's sampler may raise anything: after the batches that it has given
                self.failure = self.failure or with_place(error)
                let_go_of_frames(error)
            number, fresh = self._number, None
            if self._repeated is not None:
                if self.failure is None:
                    self.failure = self._repeated.failure_at(number, self._indices)
                    if self.failure is not None:
                        self._ends_at = number
                if number >= self._ends_at:
                    return NOTHING_TO_REPEAT
                fresh = self._repeated.fresh_in(number)
            self._number, self._count = number + 1, self._count + 1
            return DemandRequest(
                number, self._size_of(number), self._bound_of(number), tuple(told), self.failure is not None, fresh
            )

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
        """Notes in the journal what was delivered."""
        for number, fresh in tuple(self._delivered) if self._journal is not None else ():
            if number >= self._next_noted:
                assert self._journal is not None
                self._journal.book(fresh, [self._indices[position] for position in fresh], self._bound_of(number))
                self._next_noted = number + 1

    def _book(self) -> None:
        self._note()
        while len(self._delivered) > _KEPT_BATCHES:
            number, fresh = self._delivered.popleft()
            self._dealing.book(fresh)
            for position in fresh:
                del self._indices[position]
            while len(self._factors) > 1 and self._factors[1][0] <= number:
                self._factors.pop(0)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state after ``delivered`` batches, which may be one or two fewer than those delivered."""
        with self.lock:
            self._note()  # a checkpoint is not later than its journal
            first = self._delivered[0][0] if self._delivered else self._next_delivered
            if not first <= delivered <= self._next_delivered:
                raise RuntimeError(f"the state after {delivered} batches is gone: {self._next_delivered} are delivered")
            before = self._dealing.booked()
            booked = before.with_more(chain.from_iterable(fresh for number, fresh in self._delivered if number < delivered))
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
            since = int(min(before.frontier, self._order_from))
            return {"plan": None, "order": self.order.state(since), "demand": demand}

    def place(self) -> tuple[int, Booked]:
        """Returns the number of batches that were delivered, and what was."""
        with self.lock:
            since_booked = chain.from_iterable(fresh for _, fresh in self._delivered)
            return self._next_delivered, self._dealing.booked().with_more(since_booked)

    def keep_order_from(self, position: int) -> None:
        """Lets a state have the order from a position on that another rank has come to."""
        with self.lock:
            self._order_from = position

    def close(self) -> None:
        """Closes the journal."""
        if self._journal is None:
            return
        if self.lock.acquire(timeout=_CLOSE_SECONDS):  # a sampler of the user's may hang in the other thread
            try:
                self._note()
            finally:
                self.lock.release()
        self._journal.close()

    def index_of(self, position: int) -> Any:
        """Returns the index of a position that is open; None if it is not known."""
        return self._indices.get(position)

    @property
    def next_worker(self) -> int:
        """The worker that makes the next batch."""
        return (self._next_delivered - self._first) % self._workers


class StretchOver(RuntimeError):
    """A replay has come to where memory was empty: its workers must be started again."""


class Repeated:
    """What the requests of a replay ask for: the batches of a `Stretch`."""

    def __init__(self, journal: Journal, begin: Begin) -> None:
        self._journal, self.stretch = journal, journal.stretch_of(begin)
        self._checksum = 0  # of all fresh indices so far

    def fresh_in(self, number: int) -> frozenset[int]:
        return frozenset(self.stretch.fresh_in(number))

    def failure_at(self, number: int, indices: Mapping[int, Any]) -> Exception | None:
        """Returns why batch ``number``, the next one, cannot be repeated; None if it can. ``indices``: by position."""
        if number >= self.stretch.end:
            why = self._journal.why_over(self.stretch)
            return JournalError(why) if why else StretchOver()
        self._checksum = checksum([indices[position] for position in self.stretch.fresh_in(number)], self._checksum)
        if self._checksum == self.stretch.checks.get(number, self._checksum):
            return None
        return JournalError(
            f"{self._journal.name} is of a run with another order: in batch {number:,} or shortly before it, that had other "
            "indices. Give the loader the sampler, and the state of its generator, that it had in that run"
        )


@dataclass
class Waiting:
    """A training that waits for fresh examples: for how long, and what is said of it.

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
    has_said: bool = False

    def lost(self, within: float) -> BaseException | None:
        """Returns an error if the training waits in vain, see `Prefetcher`. Says once that the source delivers nothing."""
        if (error := self.workers.lost(within)) is not None:
            return error
        if self.since is None:
            return None
        waited = perf_counter() - self.since
        if self.timeout and waited > self.timeout:
            return ReadTimeoutError(f"DataLoader timed out after {self.timeout:g} seconds: {self._what()} is not read")
        if waited > _DEAD_SECONDS and self.has_begun and not self.has_said:
            self.has_said = True
            self.say(f"the training has waited {waited:.0f} s for fresh examples: {self._why()}")
        return None

    def _why(self) -> str:
        return (
            f"{self._what()} is not read yet. What memory holds bridges a stall for max_factor uses, and only while threads read "
            "(reads_in_flight) or reads return"
        )

    def _what(self) -> str:
        index = self.requests.index_of(self.words.read_by(self.requests.next_worker))
        if index is None:  # its worker reads nothing just now, or what it reads was delivered meanwhile
            return "the next example of the data set"
        find = file_of(self.dataset)
        return f"example {index!r} of the data set{'' if find is None else f' ({find(index)})'}"


class Pace:
    """Decides how early a batch is due: as making one takes, with the example that the worker reads just then.

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
        making = median(self._makings) + (median(self._loads) * self._read_at_once if self._loads else 0.0)
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

    def close(self) -> None:
        self._words.close()
        if self._pools is not None:
            self._pools.close()
        batches, self._batches = self._batches, None
        if isinstance(batches, Prefetcher) and not batches.close(_CLOSE_READ_SECONDS):
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
