"""The items of the reader, their order, and how its workers prepare them."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.context
import os
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_echo.cache.reads import CachedReads, Caching, StaleCacheError
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.data.randomness import EXAMPLE, Seeding, seed_all
from lightning_echo.log import LOGGER
from lightning_echo.pipeline.ahead import AheadOrder
from lightning_echo.pipeline.kinds import Indexed, Kind
from lightning_echo.pipeline.pipelines import Layout
from lightning_echo.pipeline.prefetch import WorkerProcesses
from lightning_echo.pipeline.reads import Abandoned, ReadAhead, ReadPool, most_ahead_bytes
from lightning_echo.pipeline.requests import tell_pass
from lightning_echo.pipeline.worker import EchoDataset, add_note
from lightning_echo.plan.order import Order
from lightning_echo.plan.plan import mix
from lightning_echo.share.parts import Wanted
from lightning_echo.share.reader_cache import ReaderCache
from lightning_echo.share.same_data import Unit, sending_by_value, unit_of
from lightning_echo.share.window import (
    CHUNK,
    END,
    ERROR,
    HELD,
    CacheState,
    Closed,
    Packed,
    Ring,
    TooLargeError,
    Window,
    pack,
    pack_error,
)
from lightning_echo.split.reading import ReadPart
from lightning_echo.split.staged import examples_in, read_batch, uncut_stages

# ---------------------------------------------------------------------- worker start

_PR_SET_PDEATHSIG = 1
_ForkProcess = getattr(multiprocessing.context, "ForkProcess", ())  # which not every system has


class WorkerStart:
    """A ``worker_init_fn``: it sets up a worker of the reader, then calls the user's own.

    * It lets the worker end with the reader. A worker of torch's loader checks whether its parent has changed. But if the reader
      dies while the worker begins, the worker does not notice this.
    * It closes the descriptors of the reader's sockets that a forked worker has inherited. When the reader has died, no training
      may find them open.
    """

    def __init__(self, sockets: Sequence[int], users: Callable[[int], None] | None) -> None:
        self._sockets = [(descriptor, os.fstat(descriptor).st_ino) for descriptor in sockets]
        self._users = users

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The reader may have died before this call. ``is_alive`` looks at a pipe. A worker that was forked later has inherited
        # the other end of that pipe, and holds it open. But the system knows the parent of a forked worker: it is the reader, and
        # another process after the reader is dead.
        reader = multiprocessing.parent_process()
        is_forked = isinstance(multiprocessing.current_process(), _ForkProcess)
        if reader is None or not reader.is_alive() or (is_forked and os.getppid() != reader.pid):
            os._exit(1)
        for descriptor, inode in self._sockets:
            with suppress(OSError):  # in a spawned process the number is free, or another descriptor's
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)
        if self._users is not None:
            self._users(worker)


# ---------------------------------------------------------------------- reading
# Item ``n`` of the endless stream is slot ``n % length`` of pass ``n // length``. Its index follows from the seed and ``n``, and
# so do the random numbers that are drawn for it. So any reader can begin at any item. Between two uses of an index are at least a
# third of a pass, or 2^18 items. So no training gets an index that it still holds, and none needs to change the order. (Of the
# items of a part, there are fewer between two uses: how many follows from the order, see `PartItems`.)
#
# The workers get items in chunks of `CHUNK`. The chunks are cut at multiples of that number, wherever a reader begins. So a data
# set that reads many examples at once (``__getitems__``) always draws the same numbers for them. The workers are those of a
# ``DataLoader``. They put the examples into the window, and the ``DataLoader`` only yields that a chunk is done. Loaders without
# such an order are read by `StreamReading`.
#
# Items that no training wants are skipped (`Wanted`). A data set that reads many examples at once reads whole chunks, or nothing.

_NOISE = 21
_MOST_APART = 2**18  # items: 0.4 s, 60 MiB
_PREFETCHED_CHUNKS = 2  # per worker
_MOST_DYING_SECONDS = 1.0
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


class Chunk(NamedTuple):
    """The items that a worker prepares at once."""

    first: int
    wanted: list[int]  # the items that are prepared. The others are wanted by nobody, or come before the reader's first one
    indices: list[Any]
    ahead: list[Any]  # indices of later chunks of the same worker, which it has not been told yet
    dropped: list[Any]  # indices of this chunk that it was told, and that are not wanted any more

    def index_of(self, item: int) -> Any:
        return self.indices[item - self.first]


def chunks(order: AheadOrder, wanted: Wanted, begin: int, workers: int = 1, chunks_ahead: int = 0) -> Iterator[Chunk]:
    """Yields chunk after chunk without end. The first one contains item ``begin``. They go to the ``workers`` in turn.

    What is ``wanted`` of a chunk is settled when it is yielded. ``chunks_ahead``: the number of its own chunks that a worker is
    told ahead.
    """
    first = begin // CHUNK * CHUNK
    order.seek(first)
    told: dict[int, list[Any]] = {}  # indices that a worker was told ahead, by the first item of their chunk
    while True:
        order.prune(first)
        indices, ahead, known = order.take(CHUNK), list[Any](), told.pop(first, [])
        for coming in range(first + CHUNK * workers, first + CHUNK * (workers * chunks_ahead + 1), CHUNK * workers):
            if coming not in told and order.reaches(coming + CHUNK - 1):
                later = [order.at(item) for item in range(coming, coming + CHUNK)]
                told[coming] = list(compress(later, wanted.are_read(later)))
                ahead += told[coming]
        is_read = wanted.settle(first + CHUNK, indices)
        dropped = [index for index, stays in zip(indices, is_read, strict=True) if not stays and index in known]
        items = [item for item, stays in enumerate(is_read, first) if stays and item >= begin]
        yield Chunk(first, items, indices, ahead, dropped)
        first += CHUNK


class Preparation:
    """Reads the examples of chunks in a worker, through the reader's cache if it has one, and puts them into the window."""

    def __init__(
        self, dataset: Any, window: Window, seed: int, ahead: ReadAhead | None = None, caching: Caching | None = None
    ) -> None:
        self.dataset, self._window, self._seed, self._ahead, self._caching = dataset, window, seed, ahead, caching
        self._ring: Ring | None = None
        self._pool: ReadPool | None = None
        self._cached: CachedReads | None = None

    def fetch(self, chunk: Chunk) -> tuple[int]:
        """Puts the wanted examples of a chunk into the window. Returns how many were read; 0 if the reader ends."""
        ring = self._ring or self._begin()
        ring.note_present(chunk.first)  # it has written what it was to write before
        if self._pool is not None:
            self._pool.begin([chunk.index_of(item) for item in chunk.wanted], chunk.ahead, chunk.dropped)
        began, waited, cpu = time.perf_counter_ns(), ring.waited_nanoseconds, time.process_time_ns()
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
        for source in (self._pool, self._cached):
            if source is not None and (note := source.take_note()):
                LOGGER.warning("%s", note)  # in the log of the reader
        count = len(chunk.wanted)
        busy = time.perf_counter_ns() - began - (ring.waited_nanoseconds - waited)
        ring.note_prepared(count, busy, time.process_time_ns() - cpu)
        ring.note_present(chunk.first + len(chunk.indices))
        return (count,)

    def _begin(self) -> Ring:
        worker = get_worker_info()
        assert worker is not None  # a reader has workers
        parent = os.getppid()
        self._ring = Ring(self._window, worker.id, lambda: os.getppid() != parent)
        stages = read = uncut_stages(self.dataset)
        held: tuple[Callable[[Any], bool], ...] = ()
        if self._caching is not None:
            self._cached = CachedReads(self._caching, self.dataset, stages)
            read, stages, held = self._cached.held_stages, self._cached.stages, (self._cached.holds,)
        if self._ahead is not None:
            self._pool = ReadPool(self._ahead, self.dataset, read, *held)
        self._load, self._load_many = stages.load, stages.load_many
        self._seeding = Seeding(self.dataset, mix(self._seed, _NOISE))
        return self._ring

    def _prepare(self, item: int, index: Any) -> None:
        assert self._ring is not None
        self._ring.note_present(item)
        try:
            (held,) = self._look_up([index])
            self._seeding.seed(EXAMPLE, item)
            example = self._load(index)
        except Exception as error:  # an error of the data set: every training gets it at this item
            self._put_error(item, error, f"(reading example {index!r} of the data set)")
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
            add_note(error, f"(reading examples {chunk.indices!r} of the data set in one call)")
            for item in chunk.wanted:
                self._put_error(item, error, "")
            if isinstance(error, StaleCacheError):
                raise
        else:
            for item in chunk.wanted:
                self._put(item, chunk.index_of(item), examples[item - chunk.first], held[item - chunk.first])

    def _put(self, item: int, index: Any, example: Any, held: int) -> None:
        assert self._ring is not None
        note = f"(example {index!r} of the data set)"
        try:
            kind, parts, size = pack(example)
        except Exception as error:  # an object that is not plain, or errors of the user's own objects
            self._put_error(item, error, note)
            return
        try:
            self._ring.put(item, kind | held, parts, size)
        except TooLargeError as error:
            self._put_error(item, error, note)

    def _put_error(self, item: int, error: Exception, note: str) -> None:
        assert self._ring is not None
        if note:
            add_note(error, note)
        kind, parts, size = pack_error(error)
        self._ring.put(item, kind, parts, size)


def _as_it_is(result: Any) -> Any:
    return result


class Reads:
    """Puts examples into one window, in threads. ``when_lost`` gets the error if that cannot continue, in one of them."""

    window: Window
    about_cache = ""  # one line for people; empty if there is no cache
    wanted: Wanted | None = None  # None: everything is read

    def __init__(self, when_lost: Callable[[BaseException], None], name: str, *runs: Callable[[], None]) -> None:
        self._when_lost, self._over = when_lost, threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"lightning_echo-{name}", daemon=True) for run in runs
        ]

    def start(self) -> None:
        """Begins the work. If it raises an exception, `lost_at` says whether a worker has died meanwhile."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def lost_at(self) -> int | None:
        """Returns the item at which a worker has died; None if none has, or if that is not known."""
        return None

    @property
    def cache_state(self) -> CacheState:
        return CacheState()

    def close(self) -> None:
        """Ends the work."""
        self._over.set()
        self.window.close_for_writers()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=MOST_END_SECONDS)
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


class Reading(Reads):
    """The workers of a reader, which prepare examples from item ``begin`` on. A worker closes the reader's ``sockets``."""

    def __init__(
        self,
        kind: Kind,
        seed: int,
        begin: int,
        window_bytes: int,
        when_lost: Callable[[BaseException], None],
        sockets: Sequence[int] = (),
        *,
        part: ReadPart | None = None,
        in_flight: int | str = 1,
        cache: ReaderCache | None = None,
        follows: bool = False,
    ) -> None:
        super().__init__(when_lost, "reading", self._pump)
        assert isinstance(kind, Indexed)
        self._cache = cache
        opened = None if cache is None else cache.open(kind, follows=follows)
        self.about_cache = "" if cache is None else cache.about
        loader, order, ahead = kind.loader, order_of(kind, seed), 0
        self.window = Window.create(window_bytes, loader.num_workers, begin)
        self.window.cache = self.cache_state
        self.wanted = wanted = Wanted(begin)
        until = None if opened is None else opened.cut
        self._ahead = (
            None if part is None else ReadAhead.of(loader, part, until, in_flight, most_ahead_bytes(free_memory_bytes()))
        )
        if self._ahead is not None and kind.is_foreseeable:
            ahead = -(-self._ahead.window(order.pass_length // loader.num_workers) // CHUNK)
        caching = None if opened is None else opened.caching()
        dataset: Any = EchoDataset(Preparation(loader.dataset, self.window, seed, self._ahead, caching))
        in_order = AheadOrder(order, order.pass_length, crosses=kind.is_own_order)
        requests: Any = chunks(in_order, wanted, begin, loader.num_workers, ahead)
        self._workers = WorkerProcesses(WorkerStart(sockets, loader.worker_init_fn))
        self._loader = DataLoader(
            dataset,
            batch_sampler=requests,
            collate_fn=_as_it_is,
            num_workers=loader.num_workers,
            prefetch_factor=_PREFETCHED_CHUNKS,
            worker_init_fn=self._workers.worker_init_fn,
            multiprocessing_context=self._workers.noted_by(sending_by_value(loader.multiprocessing_context or get_context())),
        )
        self._chunks: Iterator[Any] = iter(())

    def start(self) -> None:
        self._chunks = iter(self._loader)
        super().start()

    def _pump(self) -> None:
        for _ in self._chunks:  # so that the workers get more to do
            if self.window.is_closed:
                break

    @property
    def cache_state(self) -> CacheState:
        return CacheState() if self._cache is None else self._cache.state

    def lost_at(self) -> int | None:
        worker = self._workers.first_lost(_MOST_DYING_SECONDS)
        return None if worker is None else self.window.item_of(worker)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.pools.close()
        super().close()
        del self._chunks  # ends the workers


# ---------------------------------------------------------------------- stream reading
# A loader that is not read by index is iterated, and each item is put into the window. Items are numbered one after the other.
# The number of a reader's first item follows from the number of its first pass (`first_item`), so another reader never has the
# same numbers. After the bytes of each item come its pass and its place in that pass. A special item marks the end of a pass.
#
# The workers turn the items into bytes. One thread receives the bytes, in the order of the user's own loader, and writes them. It
# must be one thread, because the order is known only when the pass has been read. Random numbers follow from the name and the
# number of the pass.

_PASS_SHIFT = 40  # 2^40 is more items than a reader yields in its life
_AT = struct.Struct("<QQ")
_LOOK_SECONDS = 0.01
_OVER: Any = object()


class At(NamedTuple):
    """The place of an item: its pass, and its place in that pass."""

    number: int
    offset: int

    def to_bytes(self) -> bytes:
        return _AT.pack(*self)

    @classmethod
    def cut_from(cls, data: bytearray) -> At:
        at = cls(*_AT.unpack_from(data, len(data) - _AT.size))
        del data[-_AT.size :]
        return at


def first_item(number: int) -> int:
    return number << _PASS_SHIFT


def first_pass(item: int) -> int:
    return item >> _PASS_SHIFT


class StreamReading(Reads):
    """Iterates a loader, and puts its items into one window. Its first pass follows from item ``begin``. See `Reading`."""

    def __init__(
        self,
        kind: Kind,
        seed: int,
        begin: int,
        window_bytes: int,
        when_lost: Callable[[BaseException], None],
        sockets: Sequence[int] = (),
    ) -> None:
        super().__init__(when_lost, "reading", self._pump)
        self.window = Window.create(window_bytes, 1, begin)
        self._seed, self._next, self._ring = seed, begin, Ring(self.window, 0)
        self._workers = WorkerProcesses(WorkerStart(sockets, getattr(kind.loader, "worker_init_fn", None)))
        self._loader, self._user_loader = self._packing(kind), kind.loader

    def _packing(self, kind: Kind) -> Any:
        """Returns a loader that yields lists of packed items, each with the processor time that they took, in nanoseconds."""
        loader, unit = kind.loader, unit_of(kind)
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            return _Packing(loader)
        options: dict[str, Any] = {"collate_fn": _Pack(unit, loader.collate_fn)}
        if unit is Unit.streamed:
            options["batch_size"] = loader.batch_size
        elif unit is Unit.examples_of_batch:
            options["batch_sampler"] = loader.batch_sampler
        else:
            options |= {"batch_size": None, "sampler": None if kind.reads_stream else loader.sampler}
        context = sending_by_value(loader.multiprocessing_context or get_context())
        users: Any = SimpleNamespace(dataset=loader.dataset)  # a fetcher that is asked for nothing else
        dataset: Any = (_TellingStream if isinstance(loader.dataset, IterableDataset) else _Telling)(users)
        return DataLoader(
            dataset,
            num_workers=loader.num_workers,
            worker_init_fn=self._workers.worker_init_fn,
            multiprocessing_context=self._workers.noted_by(context) if loader.num_workers else None,
            **options,
        )

    # ------------------------------------------------------------------ in the thread

    def _pump(self) -> None:
        number = first_pass(self._next)
        while not self.window.is_closed:
            offset = 0
            for packed in self._items_of_pass(number):
                self._put(packed, At(number, offset))
                offset += 1
            if not offset:
                self._put(pack_error(RuntimeError(f"the loader yielded nothing in pass {number}")), At(number, 0))
            self._put(Packed(END, (), 0), At(number, offset))
            number += 1

    def _items_of_pass(self, number: int) -> Iterator[Packed]:
        """Yields the items of a pass. If the user's code raises an exception, that is the last item."""
        loader = self._user_loader
        seed_all(mix(self._seed, number))
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        try:
            tell_pass(number, loader, getattr(loader, "dataset", None), *samplers)
            for generator in {getattr(each, "generator", None) for each in (loader, *samplers)}:
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(mix(self._seed, number))
            iterator = iter(self._loader)
            while True:
                began = time.perf_counter_ns()
                several = next(iterator, _OVER)
                if several is _OVER or self.window.is_closed:
                    return
                cpu_nanoseconds, items = several
                self._ring.note_prepared(len(items), time.perf_counter_ns() - began, cpu_nanoseconds)
                for item in items:
                    yield item
                    if item.kind == ERROR:
                        return
        except Exception as error:  # an error of the user's code goes to every training, unless a worker has died
            if lost := self._workers.lost(1.0):
                raise lost from error
            add_note(error, f"(reading pass {number})")
            yield pack_error(error)

    def _put(self, packed: Packed, at: At) -> None:
        kind, parts, size = packed
        try:
            self._ring.put(self._next, kind, [*parts, at.to_bytes()], size + _AT.size)
        except TooLargeError as error:
            if kind == ERROR:
                raise
            self._put(pack_error(error), at)
            return
        self._next += 1
        # Waits until an error is taken, so that a loader that fails again and again does not fill the window with errors.
        while kind == ERROR and self.window.low < self._next:
            if self.window.is_closed:
                raise Closed
            time.sleep(_LOOK_SECONDS)


# ---------------------------------------------------------------------- in the workers


class _Failed(NamedTuple):
    """Stands for an item that could not be read. torch would send no exception whose class it does not find by its name."""

    error: Packed


def _failed(error: Exception) -> _Failed:
    add_note(error, f"\n\n{''.join(traceback.format_exception(error))}")
    return _Failed(pack_error(error))


class _Telling(EchoDataset):
    """A data set that reads the user's by index, and returns a `_Failed` in place of an exception."""

    def __getitems__(self, request: Any) -> Any:
        try:
            return read_batch(self._echo_fetcher.dataset, request)
        except Exception as error:
            return _failed(error)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._echo_fetcher.dataset[index]
        except Exception as error:
            return _failed(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._echo_fetcher,)


class _TellingStream(_Telling, IterableDataset[Any]):
    """The same for a stream. An exception is its last item."""

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._echo_fetcher.dataset
        except Exception as error:
            yield _failed(error)


@dataclass
class _Pack:
    """A collate function that makes packed items from the read examples."""

    unit: Unit
    users: Any  # the loader's own collate function
    before: int = 0  # processor time of this process when the last items were ready

    def __call__(self, read: Any) -> tuple[int, list[Packed]]:
        if self.unit is Unit.streamed:
            items = [_packed(example) for example in read]
        else:
            if self.unit is Unit.batch and not isinstance(read, _Failed):
                try:
                    read = self.users(read)
                except Exception as error:
                    read = _failed(error)
            items = [_packed(read)]
        before, self.before = self.before, time.process_time_ns()
        return self.before - before, items


@dataclass
class _Packing:
    """A loader whose batches are packed here, since the loader makes them itself."""

    loader: Any

    def __iter__(self) -> Iterator[tuple[int, list[Packed]]]:
        before = time.thread_time_ns()
        for batch in self.loader:
            packed = _packed(batch)
            now = time.thread_time_ns()
            yield now - before, [packed]
            before = now


def _packed(item: Any) -> Packed:
    """Returns an item as bytes in one piece, which a worker can send. If the item cannot be shared, it is the error."""
    try:
        kind, parts, size = item.error if isinstance(item, _Failed) else pack(item)
        return Packed(kind, (b"".join(parts),), size)
    except Exception as error:  # an object that is not plain, or errors of the user's own objects
        kind, parts, size = pack_error(error)
        return Packed(kind, (b"".join(parts),), size)
