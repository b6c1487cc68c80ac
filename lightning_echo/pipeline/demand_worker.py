"""The worker of echo on demand: it reads until its batch is full of fresh examples, or until the training needs it.

Main process and workers share a few words of memory (`Words`). The thread that trains writes which batch it asks for, before it
waits. So a worker knows whether anybody waits for its batch, and it decides as late as possible which of the examples are fresh.
The rule itself is `DemandRule` (``plan/demand.py``).

`DemandExamples` reads what the requests tell. With reads in flight, threads read, and what arrives first is taken first.
Otherwise the worker reads one example, looks whether its batch is full or due, and reads the next one. What a batch that is due
still lacks are echoes.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from itertools import chain
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from lightning_echo.data.copies import copy_example
from lightning_echo.data.randomness import BATCH, EXAMPLE
from lightning_echo.pipeline.reads import NOTHING_READ, Abandoned, ReadPool
from lightning_echo.pipeline.worker import NO_LOOKUPS, LiveExamples, Report
from lightning_echo.plan.demand import Arrived, DemandRule
from lightning_echo.plan.order import entry_key
from lightning_echo.split.staged import Stages, examples_in, unchanged

_LOOK_SECONDS = 0.001  # a worker that has nothing to read looks so often whether its batch is due
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


class _Read(NamedTuple):
    """An example that was read: the first use, and the copy that memory holds."""

    arrived: Arrived
    index: Any
    example: Any
    kept: Any


class DemandExamples(LiveExamples):
    """Answers requests in one process. ``rule`` gets a new memory in each process. The other arguments are `LiveExamples`'s.

    ``most_overtaking``: so many later examples, of threads and of a cache, are taken before one that takes long. Then that one is
    awaited.
    """

    def __init__(self, *args: Any, words: Words, rule: DemandRule, most_overtaking: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._words, self._rule, self._most_overtaking = words, rule, most_overtaking
        self._todo: deque[tuple[int, Any, int]] = deque()  # position, index and pass of what this thread reads
        self._calls: deque[ToRead] = deque()  # the same, for a data set that reads many in one call
        self._in_pool: dict[Hashable, deque[tuple[int, int]]] = {}  # by index: position and pass of what threads read
        # Where threads read: all that was told and not taken, the oldest first. By position: its number, and its index.
        self._left: OrderedDict[int, tuple[int, Any]] = OrderedDict()
        self._told = 0  # positions, so far
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
        before = NO_LOOKUPS if self._counted is None else self._counted.lookups
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
        if self._counted is not None:
            now = self._counted.lookups
            report = report._replace(hits=now.hits - before.hits, misses=now.misses - before.misses)
        if self._cached is not None:
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
            self._left[position] = self._told, index
            self._told += 1
            if self._cached is not None and self._cached.holds(index):
                self._todo.append((position, index, number))
            else:
                self._in_pool.setdefault(entry_key(index), deque()).append((position, number))
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
        return (bool(self._todo) or self._pool.has_arrived) and self._overtaken() is NOTHING_READ

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
        if self._pool is not None:
            taken = self._next_of_pool(self._pool)
            if taken is None:
                return False
            position, index, number = taken
        elif self._todo:
            position, index, number = self._todo.popleft()
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

    def _next_of_pool(self, pool: ReadPool) -> tuple[int, Any, int] | None:
        """Returns position, index and pass of the next example: what threads have read comes before what the cache holds.

        But the oldest one of all comes first if it is there. So neither holds up the other for long. None if there is nothing.
        """
        oldest = next(iter(self._left), -1)
        self._words.read(self._worker or 0, oldest)
        overtaken = self._overtaken()
        if not (self._todo and self._todo[0][0] == oldest):
            waits = not self._todo or overtaken is not NOTHING_READ
            index = pool.next_read(_LOOK_SECONDS if waits else 0.0, overtaken)
            if index is not NOTHING_READ:
                key = entry_key(index)
                places = self._in_pool[key]
                position, number = places.popleft()
                if not places:
                    del self._in_pool[key]
                del self._left[position]
                return position, index, number
            if waits:
                return None
        position, index, number = self._todo.popleft()
        del self._left[position]
        return position, index, number

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
        """Returns the index of the oldest example that is left, if it must come next; else `NOTHING_READ`."""
        if not self._left:
            return NOTHING_READ
        number, index = next(iter(self._left.values()))
        taken_after = self._told - number - len(self._left)
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
