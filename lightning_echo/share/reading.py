"""The items of the reader, their order, and how its workers prepare them."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_echo.cache.reads import CachedReads, Caching, StaleCacheError
from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.data.randomness import EXAMPLE, Seeding
from lightning_echo.log import LOGGER
from lightning_echo.pipeline.ahead import AheadOrder
from lightning_echo.pipeline.kinds import Indexed, Kind
from lightning_echo.pipeline.pipelines import Layout
from lightning_echo.pipeline.prefetch import WorkerProcesses
from lightning_echo.pipeline.reads import Abandoned, Pools, ReadAhead, ReadPool, most_ahead_bytes
from lightning_echo.pipeline.worker import EchoDataset, add_note
from lightning_echo.plan.order import Order
from lightning_echo.plan.plan import mix
from lightning_echo.share.packing import HELD, pack, pack_error
from lightning_echo.share.parts import Chunk, Dealing, Wanted
from lightning_echo.share.places import Entry, Training
from lightning_echo.share.reader_cache import ReaderCache
from lightning_echo.share.same_data import sending_by_value
from lightning_echo.share.window import CHUNK, MOST_LANES, CacheState, Closed, Lane, TooLargeError, Window
from lightning_echo.split.reading import ReadPart
from lightning_echo.split.staged import examples_in, uncut_stages

# ---------------------------------------------------------------------- worker start

_PR_SET_PDEATHSIG = 1
_ForkProcess = getattr(multiprocessing.context, "ForkProcess", ())  # which not every system has


class WorkerStart:
    """A ``worker_init_fn``: it sets up a worker of the reader, then calls the user's own.

    * For the user's code, the worker is one of several that have different numbers: ``number`` of ``workers``. For torch it is
      the only worker of its loader.
    * It lets the worker end with the reader. A worker of torch's loader checks whether its parent has changed. But if the reader
      dies while the worker begins, the worker does not notice this.
    * It closes the reader's sockets, which a forked worker has inherited. When the reader has died, or has ended a connection, no
      training may find it open. ``sockets`` returns the descriptors of those that are open: in a worker, of those that were when
      it was forked.
    """

    def __init__(
        self,
        sockets: Callable[[], Sequence[int]],
        users: Callable[[int], None] | None,
        number: int | None = None,
        workers: int = 1,
    ) -> None:
        self._sockets, self._users, self._number, self._workers = sockets, users, number, workers

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The reader may have died before this call. ``is_alive`` looks at a pipe. A worker that was forked later has inherited
        # the other end of that pipe, and holds it open. But the system knows the parent of a forked worker: it is the reader, and
        # another process after the reader is dead.
        reader = multiprocessing.parent_process()
        is_forked = isinstance(multiprocessing.current_process(), _ForkProcess)
        if reader is None or not reader.is_alive() or (is_forked and os.getppid() != reader.pid):
            os._exit(1)
        for descriptor in self._sockets():
            with suppress(OSError):  # the reader has closed it before, since it ends
                os.close(descriptor)
        if self._number is not None:
            worker, info = self._number, get_worker_info()
            for name, value in (("id", worker), ("num_workers", self._workers)):
                object.__setattr__(info, name, value)
        if self._users is not None:
            self._users(worker)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_sockets": tuple}  # a process that is not forked has inherited none


# ---------------------------------------------------------------------- order
# Item ``n`` of the endless stream is slot ``n % length`` of pass ``n // length``. Its index follows from the seed and ``n``, and
# so do the random numbers that are drawn for it. So any reader can begin at any item. Between two uses of an index are at least a
# third of a pass, or 2^18 items. So no training gets an index that it still holds, and none needs to change the order. (Of the
# items of a part, there are fewer between two uses: how many follows from the order, see `PartItems`.)

_NOISE, _WORKER = 21, 22
_MOST_APART = 2**18  # items: 0.4 s, 60 MiB
_PREFETCHED_CHUNKS = 2  # per worker
_NOTHING = Chunk(0, [], [], [], [])  # a worker that is asked for it answers when it has begun
_MOST_DYING_SECONDS, _BETWEEN_LOOKS_SECONDS = 1.0, 0.005
_MOST_BEGINNING_SECONDS = 0.5  # then those that are there are served, and the other workers begin later
MOST_END_SECONDS = 10.0


def distance_of(length: int) -> int:
    """Returns the least number of items between two uses of an index; 0 if a pass is too short for that."""
    return min(length // 3, _MOST_APART)  # each of these items takes time and memory at the beginning of a pass


def order_of(kind: Kind, seed: int) -> Order:
    """Returns the order of the reader's items, at its beginning."""
    assert isinstance(kind, Indexed)
    length = len(kind.sampler)
    whole = Layout(length=length, replicas=1, batch_size=length, last_batch_size=length, batches_per_pass=1)
    order = kind.order(whole, distance_of(length), seed, 0)
    order.begin_spreading()
    return order


# ---------------------------------------------------------------------- preparation


class Puts(Protocol):
    """Where a worker puts its examples: a `Lane`, or what has its place on another machine."""

    waited_nanoseconds: int

    def wait_until_open(self) -> None: ...
    def go_to(self, item: int) -> None: ...
    def put(self, item: int, kind: int, parts: Sequence[Any], size: int) -> None: ...
    def note_prepared(self, examples: int, nanoseconds: int, cpu_nanoseconds: int) -> None: ...


class Recipe(NamedTuple):
    """How all workers of a reader read."""

    seed: int
    ahead: ReadAhead | None = None
    caching: Caching | None = None


class Preparation:
    """Reads the examples of chunks in a worker, through the reader's cache if it has one, and puts them into a lane.

    ``open_lane`` returns that lane: it is called in the worker. ``where``, if not empty, is added to errors of the data set.
    ``say`` gets messages for the user, which come into the log of the reader.
    """

    def __init__(
        self,
        dataset: Any,
        open_lane: Callable[[], Puts],
        recipe: Recipe,
        where: str = "",
        say: Callable[[str], None] = LOGGER.warning,
    ) -> None:
        self.dataset, self._open_lane, self._where, self._say = dataset, open_lane, where, say
        self._seed, self._ahead, self._caching = recipe
        self._lane: Puts | None = None
        self._pool: ReadPool | None = None
        self._cached: CachedReads | None = None
        self._is_broken_off = False  # whether it has left a chunk before its end

    def fetch(self, chunk: Chunk) -> tuple[int]:
        """Puts the wanted examples of a chunk into the window. Returns how many were read; 0 if the reader ends."""
        if self._is_broken_off or chunk == _NOTHING:  # broken off: the lane stays at the first item that is missing
            return (0,)
        lane = self._lane or self._begin()
        try:
            lane.wait_until_open()  # if user's code kills a worker while others are started, torch raises that in the start
        except Closed:
            return (0,)
        lane.go_to(next(iter(chunk.wanted), chunk.end))
        if self._pool is not None:
            self._pool.begin([chunk.index_of(item) for item in chunk.wanted], chunk.ahead, chunk.dropped)
        began, waited, cpu = time.perf_counter_ns(), lane.waited_nanoseconds, time.process_time_ns()
        self._is_broken_off = True
        try:
            if self._load_many is None:
                for item in chunk.wanted:
                    self._prepare(item, chunk.index_of(item))
            elif chunk.wanted:
                self._prepare_together(chunk)
        except Closed:
            return (0,)
        except Abandoned as abandoned:
            raise abandoned.error from None
        self._is_broken_off = False
        for source in (self._pool, self._cached):
            if source is not None and (note := source.take_note()):
                self._say(note)
        count = len(chunk.indices if self._load_many is not None and chunk.wanted else chunk.wanted)
        busy = time.perf_counter_ns() - began - (lane.waited_nanoseconds - waited)
        lane.note_prepared(count, busy, time.process_time_ns() - cpu)
        lane.go_to(chunk.end)
        return (count,)

    def _begin(self) -> Puts:
        self._lane = self._open_lane()
        stages = read = uncut_stages(self.dataset)
        held: tuple[Callable[[Any], bool], ...] = ()
        if self._caching is not None:
            self._cached = CachedReads(self._caching, self.dataset, stages)
            read, stages, held = self._cached.held_stages, self._cached.stages, (self._cached.holds,)
        if self._ahead is not None:
            self._pool = ReadPool(self._ahead, self.dataset, read, *held)
        self._load, self._load_many = stages.load, stages.load_many
        self._seeding = Seeding(self.dataset, mix(self._seed, _NOISE))
        return self._lane

    def _prepare(self, item: int, index: Any) -> None:
        assert self._lane is not None
        self._lane.go_to(item)
        try:
            (held,) = self._look_up([index])
            self._seeding.seed(EXAMPLE, item)
            example = self._load(index)
        except Exception as error:  # an error of the data set: every training gets it at this item
            self._put_error(item, error, f"(reading example {index!r} of the data set{self._where})")
            if isinstance(error, StaleCacheError):  # nobody may get another example of this cache
                raise
        else:
            self._put(item, index, example, held)

    def _look_up(self, indices: list[Any]) -> list[int]:
        """Looks examples up in the cache that are loaded next, and reads what it does not hold. Returns `HELD` or 0 for each."""
        if self._cached is None:
            return [0] * len(indices)
        held = [HELD * self._cached.holds(index) for index in indices]
        self._cached.look_up(indices, are_fresh=True)  # this moves the random states, which are seeded afterwards
        return held

    def _prepare_together(self, chunk: Chunk) -> None:
        assert self._load_many is not None
        try:
            held = self._look_up(chunk.indices)
            self._seeding.seed(EXAMPLE, chunk.first)
            examples = examples_in(self._load_many(chunk.indices), chunk.indices)
        except Exception as error:  # as above
            note = f"(reading examples {chunk.indices!r} of the data set in one call{self._where})"
            for item in chunk.wanted:
                self._put_error(item, error, note if item == chunk.wanted[0] else "")
            if isinstance(error, StaleCacheError):
                raise
        else:
            for item in chunk.wanted:
                self._put(item, chunk.index_of(item), examples[item - chunk.first], held[item - chunk.first])

    def _put(self, item: int, index: Any, example: Any, held: int) -> None:
        assert self._lane is not None
        note = f"(example {index!r} of the data set{self._where})"
        try:
            kind, parts, size = pack(example)
        except Exception as error:  # an object that is not plain, or errors of the user's own objects
            self._put_error(item, error, note)
            return
        try:
            self._lane.put(item, kind | held, parts, size)
        except TooLargeError as error:
            self._put_error(item, error, note)

    def _put_error(self, item: int, error: Exception, note: str) -> None:
        assert self._lane is not None
        if note:
            add_note(error, note)
        kind, parts, size = pack_error(error)
        self._lane.put(item, kind, parts, size)


def _as_it_is(result: Any) -> Any:
    return result


def _lane_in(window: Window, number: int) -> Lane:
    """Returns the lane of this worker, which ends with the reader."""
    parent = os.getppid()
    return Lane(window, number, lambda: os.getppid() != parent)


class Reads:
    """Puts examples into one window, in threads. ``when_lost`` gets the error if that cannot continue, in one of them."""

    window: Window
    about_cache = ""  # one line for people; empty if there is no cache
    wanted: Wanted | None = None  # None: everything is read

    def __init__(self, when_lost: Callable[[BaseException], None], name: str, *runs: Callable[[], None]) -> None:
        self._when_lost, self._over, self._name = when_lost, threading.Event(), f"lightning_echo-{name}"
        self._threads = [self._thread(run) for run in runs]

    def _thread(self, run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run, args=(run,), name=self._name, daemon=True)

    @property
    def workers(self) -> int:
        """How many workers there are now."""
        return 0

    def want(self, workers: int) -> None:
        """Notes how many workers are wanted. Here their number is fixed."""

    def start(self) -> None:
        """Begins the work. If it raises an exception, `has_lost_worker` says whether a worker has died meanwhile."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def has_lost_worker(self) -> bool:
        """Returns whether a worker has died; False if that is not known."""
        return False

    def lost_at(self) -> int | None:
        """Returns the item at which a worker has died; None if none has, or not of an item, or if that is not known."""
        return None

    @property
    def cache_state(self) -> CacheState:
        return CacheState()

    def close(self) -> None:
        """Ends the work."""
        self._over.set()
        self.window.close_for_writers()
        end = time.monotonic() + MOST_END_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(end - time.monotonic(), 0.0))
        self.window.close()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Closed:
            pass
        except BaseException as error:  # handed on to the thread that serves the trainings
            if not self._over.is_set():
                self._over.set()
                self._when_lost(error)


@contextmanager
def as_os_error() -> Iterator[None]:
    """Raises Python's error for a thread that cannot be started as an OSError, as for a process that cannot."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise OSError(errno.EAGAIN, str(error)) from error


# ---------------------------------------------------------------------- reading
# A worker of the reader is the only worker of a ``DataLoader`` of its own. So it gets the next chunk when it has room for one,
# whatever the others do, and it may come and go alone. The workers put the examples into the window, each in a lane of its own
# (``window.py``). The ``DataLoader`` only yields that a chunk is done, to a thread that asks for more. Loaders without such an
# order are read by `StreamReading` (``stream_reading.py``).


class Reading(Reads):
    """The workers of a reader, which prepare examples from item ``begin`` on, up to ``end`` (None: without end).

    A worker closes the reader's ``sockets``. There are as many as the loader of ``kind`` has, until another number is wanted.
    """

    def __init__(
        self,
        kind: Kind,
        seed: int,
        begin: int,
        window_bytes: int,
        when_lost: Callable[[BaseException], None],
        sockets: Callable[[], Sequence[int]] = tuple,
        *,
        part: ReadPart | None = None,
        in_flight: int | str = 1,
        cache: ReaderCache | None = None,
        follows: bool = False,
        end: int | None = None,
    ) -> None:
        super().__init__(when_lost, "reading")
        assert isinstance(kind, Indexed)
        self._plain, self._seed, self._sockets, self._cache = kind.loader, seed, sockets, cache
        opened = None if cache is None else cache.open(kind, follows=follows)
        self._caching = None if opened is None else opened.caching()
        until = None if opened is None else opened.cut
        self.about_cache = "" if cache is None else cache.about
        order, ahead = order_of(kind, seed), 0
        self.window = Window.create(window_bytes, 0, begin)
        self.window.cache = self.cache_state
        self.wanted = wanted = Wanted(begin)
        self._context = self._plain.multiprocessing_context or get_context()
        self._ahead = None
        if part is not None:
            of_each = ReadAhead.of(self._plain, part, until, in_flight, most_ahead_bytes(free_memory_bytes()))
            self._ahead = replace(of_each, pools=Pools(self._context, MOST_LANES))
            if kind.is_foreseeable:
                ahead = -(-self._ahead.window(order.pass_length // self._plain.num_workers) // CHUNK)
        self._dealing = Dealing(AheadOrder(order, order.pass_length, crosses=kind.is_own_order), wanted, begin, ahead, end)
        self._workers: dict[int, WorkerProcesses] = {}  # by number
        self._far = set[int]()  # numbers of lanes that threads write in for workers on other machines
        self._handed_over: deque[tuple[int, Iterable[Chunk]]] = deque()  # such lanes, and what a worker here is to write there
        self._most, self._has_begun = min(self._plain.num_workers, MOST_LANES), False  # most: how many are wanted
        self._may_begin = True  # another worker: no attempt has failed since the number was changed

    def want(self, workers: int) -> None:
        """Lets workers begin or end, until there are so many; 0: as many as before. One that ends first does what it was told.

        If they take long to begin, where processes are spawned, some begin now, and the others in the next calls.
        """
        before, self._most = self._most, min(workers or self._most, MOST_LANES)
        if not self._has_begun or self._over.is_set():
            return
        if self._most != before:
            self._may_begin = True
            LOGGER.info("number of workers: %d in place of %d", self._most, before)
        with self._dealing.lock:
            while self._handed_over:
                self._begin_worker(*self._handed_over.popleft())
            at_work = sorted(self._workers.keys() - self._dealing.ending)
            self._dealing.ending.update(at_work[self._most :])
            end = time.monotonic() + _MOST_BEGINNING_SECONDS
            for _ in range(min(self._most - len(at_work), len(self._free_lanes())) if self._may_begin else 0):
                if self._dealing.is_over:
                    break
                try:
                    self._begin_worker()
                except OSError as error:  # the system has no process, thread, memory or descriptor left
                    # An error of the sampler, which has lost its place, is none of these; and one worker is needed.
                    if not self._dealing.is_whole or not self._workers:
                        raise
                    self._may_begin = False
                    # As text: the error's frames hold torch's iterator, which ends a worker that was begun when it is dropped.
                    LOGGER.warning("a worker cannot be started, so that there are fewer than %d: %s", self._most, str(error))
                    break
                if time.monotonic() > end:
                    break

    def start(self) -> None:
        self._has_begun = True
        self.want(self._most)
        self.window.is_open = 1

    def _begin_worker(self, lane: int | None = None, chunks: Iterable[Chunk] = ()) -> None:
        """Starts a worker. It is a child of this thread, which must live as long as the worker.

        ``lane``: the number of a lane that has begun, in which it writes these ``chunks`` and no others; None: it gets one of its
        own. Raises an OSError if the system does not allow that; then no chunk is lost.
        """
        begun: SimpleQueue[Iterator[Any] | None] = SimpleQueue()
        with self._dealing.taking_back():
            number = self._free_lanes()[0] if lane is None else lane
            start = WorkerStart(
                self._sockets, self._plain.worker_init_fn, number, max(len(self._workers) + 1, self._most, number + 1)
            )
            processes = WorkerProcesses(start)
            preparation = Preparation(self._plain.dataset, partial(_lane_in, self.window, number), self.recipe)
            dataset: Any = EchoDataset(preparation)
            requests: Any = self._requests(number) if lane is None else chunks
            loader: Any = DataLoader(
                dataset,
                batch_sampler=requests,
                collate_fn=_as_it_is,
                num_workers=1,
                prefetch_factor=_PREFETCHED_CHUNKS,
                worker_init_fn=processes.worker_init_fn,
                multiprocessing_context=processes.noted_by(sending_by_value(self._context)),
                # torch draws a seed for the worker: not where the order may draw its numbers
                generator=torch.Generator().manual_seed(mix(self._seed, _WORKER, number)),
            )
            self._workers[number] = processes
            self._far.discard(number)
            thread = self._thread(partial(self._pump, number, processes, begun.get))
            try:
                with as_os_error():
                    thread.start()  # first: if it cannot, no worker may have a chunk
                    begun.put(iter(loader))
            except BaseException as error:
                begun.put(None)
                if isinstance(error, OSError):
                    self._forget(number)
                raise
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def _requests(self, number: int) -> Iterator[Chunk]:
        """Yields what a worker is asked for.

        Where others are at work, it gets no chunk before it has begun, which takes seconds if it is spawned: every training would
        wait for that chunk.
        """
        if self.window.is_open:
            yield from [_NOTHING] * _PREFETCHED_CHUNKS
        yield from self._begin_lane(number)

    def _begin_lane(self, number: int) -> Iterator[Chunk]:
        """Begins a lane, and returns its chunks. If there are none, the lane has ended."""
        chunks = self._dealing.chunks_of(number)
        with self._dealing.lock:
            self.window.begin_lane(number, self._dealing.next_item)
            first = next(chunks, None)
        if first is None:
            self.window.end_lane(number)
            return iter(())
        return chain([first], chunks)

    def _free_lanes(self) -> list[int]:
        return [each for each in range(MOST_LANES) if each not in self._workers and each not in self._far]

    def _pump(self, number: int, processes: WorkerProcesses, begun: Callable[[], Iterator[Any] | None]) -> None:
        """Asks a worker for more, until it ends. When the thread ends, it drops the iterator, which ends the process."""
        if (chunks := begun()) is None:
            return
        try:
            for _ in chunks:
                if self.window.is_closed:
                    return
        except RuntimeError as error:  # torch may only say that the worker is gone
            if lost := processes.lost():
                raise lost from error
            raise
        with self._dealing.lock:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self.window.end_lane(number)
        self._dealing.ending.discard(number)
        del self._workers[number]

    @property
    def dataset(self) -> Any:
        return self._plain.dataset

    @property
    def recipe(self) -> Recipe:
        """How each of its workers reads."""
        return Recipe(self._seed, self._ahead, self._caching)

    # ------------------------------------------------------------------ for workers on other machines
    # They get chunks as a worker does, and a thread of this process writes what they have made, in a lane of theirs. If such a
    # worker is lost, a new one here continues in the same lane. So each lane writes what was dealt to it.

    def open_lane(self) -> tuple[int, Iterator[Chunk]] | None:
        """Returns the number of a lane that has begun, and its chunks; None if there is none now.

        The chunks end when the reading ends, or with those that were dealt before `deal_no_more`.
        """
        with self._dealing.lock:
            lanes, coming = self._free_lanes(), max(self._most - len(self._workers), 0)
            if not self.window.is_open or self._over.is_set() or self._dealing.is_over or len(lanes) <= coming:
                return None
            chunks = self._begin_lane(lanes[0])
            self._far.add(lanes[0])
            return lanes[0], chunks

    def deal_no_more(self, number: int) -> None:
        """Deals nothing more to a lane of `open_lane`."""
        with self._dealing.lock:
            self._dealing.ending.add(number)

    def hand_over(self, number: int, chunks: Iterable[Chunk]) -> None:
        """Lets a worker of this reader write these chunks in a lane of `open_lane`, which gets no more. The lane then ends."""
        self._handed_over.append((number, chunks))

    def close_lane(self, number: int) -> None:
        """Ends a lane of `open_lane`, in which nothing is written any more."""
        with self._dealing.lock:
            self._far.discard(number)
            self.window.end_lane(number)
            self._dealing.ending.discard(number)

    def begin_thread(self, run: Callable[[], None]) -> None:
        """Starts a thread that writes in such a lane. An exception there ends the reading, which waits for the thread.

        Raises an OSError if the system has no thread left.
        """
        with self._dealing.lock:
            thread = self._thread(run)
            with as_os_error():
                thread.start()
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    @property
    def workers(self) -> int:
        return len(self._workers)

    @property
    def cache_state(self) -> CacheState:
        return CacheState() if self._cache is None else self._cache.state

    def has_lost_worker(self) -> bool:
        return bool(self._lost())

    def lost_at(self) -> int | None:
        at = [self.window.at(number) for number in self._lost() if not self.window.waits(number)]
        return min([*at, self._dealing.next_item]) if at else None  # one that had not begun is nowhere yet

    def _lost(self) -> list[int]:
        """Returns the numbers of workers that have died. Waits a moment for one that is dying."""
        end = time.monotonic() + _MOST_DYING_SECONDS
        while True:
            workers = list(self._workers.items())
            lost = [number for number, processes in workers if processes.first_lost() is not None]
            if lost or time.monotonic() > end:
                return lost
            time.sleep(_BETWEEN_LOOKS_SECONDS)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.pools.close()
        super().close()


# ---------------------------------------------------------------------- reading again
# A training that comes late gets what it has missed. What the window no longer has is read again for this training alone, into a
# window of its own, by workers of its own.

_MOST_CATCHING_UP = 4  # trainings at once: for each of them there is a window


class ReadAgain(dict[str, Reads]):
    """What is read again for trainings that come late, by the group of each.

    Args:
        read: Makes what reads the items from one up to another one.
        window_bytes: The size of a window.
        workers_of: How many workers read for a group, once it is in here.
    """

    def __init__(self, read: Callable[[int, int], Reads], window_bytes: int, workers_of: Callable[[str], int]) -> None:
        super().__init__()
        self._read, self._window_bytes, self._workers_of = read, window_bytes, workers_of

    def begin(self, entries: Sequence[Entry], bytes_per_example: float) -> bool:
        """Reads again what ranks of a training lack, since the window does not have it. Returns whether that is possible."""
        if len(self) >= _MOST_CATCHING_UP:
            return False
        training, first, end = entries[0].training, min(each.place for each in entries), max(each.there for each in entries)
        needed = min(self._window_bytes, round((end - first) * bytes_per_example))
        if (free := free_memory_bytes()) is not None and needed > free // 2:
            LOGGER.warning(
                "%s comes late, and what it has missed is not read again: that takes %s, more than half of the free memory",
                training.label,
                bytes_in_words(needed),
            )
            return False
        try:
            self[training.group] = again = self._read(first, end)  # from now on it is known whose worker has died
            again.window.read_in_pass = again.window.taken_in_pass = 1  # for this training alone
            again.window.slowest_label, again.window.ranks = training.label, training.ranks
            assert again.wanted is not None
            again.wanted.change(training.part)
            again.want(self._workers_of(training.group))
            again.start()
        except OSError as error:  # the system has no process, memory or descriptor left
            LOGGER.warning("%s comes late, and what it has missed cannot be read again: %s", training.label, error)
            if training.group in self:
                self.pop(training.group).close()
            return False
        message = "%s comes late: items %d to %d are read again for it, with %d workers"
        LOGGER.info(message, training.label, first, end - 1, again.workers)
        return True

    def want(self) -> int:
        """Lets as many workers be there as read for each group. Returns how many that are."""
        for group, again in self.items():
            again.want(self._workers_of(group))
        return sum(map(self._workers_of, self))

    def move_low(self, trainings: Sequence[Training]) -> None:
        """Lets the workers overwrite what their training has taken, and ends those that read for nobody any more."""
        for group, again in list(self.items()):
            at = [one.catching_up for one in trainings if one.group == group and one.catching_up is not None]
            if at:
                again.window.low = min(at)
            else:  # a thread waits for its workers
                del self[group]
                end = partial(_end, again)
                thread = threading.Thread(target=end, name="lightning_echo-close", daemon=True)
                try:
                    with as_os_error():
                        thread.start()
                except OSError:  # the system has no thread left: the others wait, too
                    end()

    def close(self) -> None:
        """Ends all workers."""
        for again in self.values():
            again.close()
        self.clear()


def _end(again: Reads) -> None:
    """Ends workers that read again for a training, which needs nothing of that any more."""
    again.close()
    again.window.free()
