"""What the reader reads, in which order, and how its workers prepare it.

Item ``n`` of the endless stream is slot ``n % length`` of pass ``n // length``. Its index follows from the seed and ``n``, and
so do the random numbers that are drawn for it. So any reader can begin at any item. Between two uses of an index are at least a
third of a pass, or 2^18 items. So no training gets an index that it still holds, and none needs to change the order.

The workers get items in chunks of `CHUNK`. The chunks are cut at multiples of that number, wherever a reader begins. So a data
set that reads many examples at once (``__getitems__``) always draws the same numbers for them. The workers are those of a
``DataLoader``. They put the examples into the window, and the ``DataLoader`` only yields that a chunk is done. Loaders without
such an order are read by ``stream_reading.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from lightning_echo.fetching.index_pipeline import index_order
from lightning_echo.fetching.layout import Layout
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.hashing import mix
from lightning_echo.planning.order import Order
from lightning_echo.protecting.seeding import EXAMPLE, Seeding
from lightning_echo.sharing.packing import pack, pack_error
from lightning_echo.sharing.reader.by_value import sending_by_value
from lightning_echo.sharing.reader.worker_start import WorkerStart
from lightning_echo.sharing.window import CHUNK, Closed, Ring, TooLargeError, Window
from lightning_echo.splitting.staged import examples_in
from lightning_echo.splitting.stages import uncut_stages
from lightning_echo.workers.dataset import EchoDataset
from lightning_echo.workers.errors import add_note

__all__ = ["Chunk", "Preparation", "Reading", "chunks", "distance_of", "order_of"]

_NOISE = 21
_MOST_APART = 2**18  # items: 0.4 s, 60 MiB
_PREFETCHED_CHUNKS = 2  # per worker
_MOST_DYING_SECONDS = 1.0


def distance_of(length: int) -> int:
    """Returns the least number of items between two uses of an index; 0 if a pass is too short for that.

    Each of these items takes time and memory at the begin of a pass. So there is a limit, and no training has a larger buffer.
    """
    return min(length // 3, _MOST_APART)


def order_of(source: Source, seed: int) -> Order:
    """Returns the order of the reader's items, at its beginning.

    Args:
        source: The reader's copy of the loader.
        seed: Seed for the order and all random numbers.
    """
    length = len(source.sampler)
    whole = Layout(length=length, replicas=1, batch_size=length, last_batch_size=length, batches_per_pass=1)
    order = index_order(source, whole, distance_of(length), seed, 0, preserves=False)
    order.begin_spreading()
    return order


class Chunk(NamedTuple):
    """The items that a worker prepares at once.

    Attributes:
        first: The first item.
        skipped: Number of items at the start that are not prepared, since the reader begins after them.
        indices: The index of each item.
    """

    first: int
    skipped: int
    indices: list[Any]


def chunks(order: Order, begin: int) -> Iterator[Chunk]:
    """Yields chunk after chunk without end. The first one contains item ``begin``."""
    first = begin // CHUNK * CHUNK
    order.seek(first)
    while True:
        order.prune(first)
        yield Chunk(first, max(begin - first, 0), order.take(CHUNK))
        first += CHUNK


class Preparation:
    """Reads the examples of chunks in a worker, and puts them into the window.

    Args:
        dataset: The user's data set.
        window: The window.
        seed: Seed for the order and all random numbers.
    """

    def __init__(self, dataset: Any, window: Window, seed: int) -> None:
        self.dataset, self._window, self._seed = dataset, window, seed
        self._ring: Ring | None = None

    def fetch(self, chunk: Chunk) -> tuple[int]:
        """Puts the examples of a chunk into the window. Returns how many were read; 0 if the reader ends."""
        ring = self._ring or self._begin()
        began, waited, cpu = time.perf_counter_ns(), ring.waited_nanoseconds, time.process_time_ns()
        try:
            if self._load_many is None:
                for item in range(chunk.first + chunk.skipped, chunk.first + len(chunk.indices)):
                    self._prepare(item, chunk.indices[item - chunk.first])
            else:
                self._prepare_together(chunk)
        except Closed:
            return (0,)
        count = len(chunk.indices) - chunk.skipped
        busy = time.perf_counter_ns() - began - (ring.waited_nanoseconds - waited)
        ring.note_prepared(count, busy, time.process_time_ns() - cpu)
        return (count,)

    def _begin(self) -> Ring:
        worker = get_worker_info()
        assert worker is not None  # a reader has workers
        parent = os.getppid()
        self._ring = Ring(self._window, worker.id, lambda: os.getppid() != parent)
        stages = uncut_stages(self.dataset)
        self._load, self._load_many = stages.load, stages.load_many
        self._seeding = Seeding(self.dataset, mix(self._seed, _NOISE))
        return self._ring

    def _prepare(self, item: int, index: Any) -> None:
        self._seeding.seed(EXAMPLE, item)
        try:
            example = self._load(index)
        except Exception as error:  # an error of the data set: every training gets it at this item
            self._put_error(item, error, f"(reading example {index!r} of the data set)")
        else:
            self._put(item, index, example)

    def _prepare_together(self, chunk: Chunk) -> None:
        assert self._load_many is not None
        self._seeding.seed(EXAMPLE, chunk.first)
        wanted = range(chunk.first + chunk.skipped, chunk.first + len(chunk.indices))
        try:
            examples = examples_in(self._load_many(chunk.indices), chunk.indices)
        except Exception as error:  # as above
            add_note(error, f"(reading examples {chunk.indices!r} of the data set in one call)")
            for item in wanted:
                self._put_error(item, error, "")
        else:
            for item in wanted:
                self._put(item, chunk.indices[item - chunk.first], examples[item - chunk.first])

    def _put(self, item: int, index: Any, example: Any) -> None:
        assert self._ring is not None
        note = f"(example {index!r} of the data set)"
        try:
            kind, parts, size = pack(example)
        except Exception as error:  # what is not plain, and what the user's own objects raise when they are looked at
            self._put_error(item, error, note)
            return
        try:
            self._ring.put(item, kind, parts, size)
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


class Reading:
    """The workers of a reader, which prepare examples from one item on and put them into one window.

    Args:
        source: The reader's copy of the loader.
        seed: Seed for the order and all random numbers.
        begin: The first item.
        window_bytes: Memory for examples, in bytes.
        when_lost: Called with the error if the workers cannot go on, in another thread.
        sockets: Descriptors of the reader's sockets, which a worker closes.

    Attributes:
        window: Where the examples are put.
    """

    def __init__(
        self,
        source: Source,
        seed: int,
        begin: int,
        window_bytes: int,
        when_lost: Callable[[BaseException], None],
        sockets: Sequence[int] = (),
    ) -> None:
        loader = source.loader
        self.window = Window.create(window_bytes, loader.num_workers, begin)
        self._when_lost = when_lost
        dataset: Any = EchoDataset(Preparation(loader.dataset, self.window, seed))
        requests: Any = chunks(order_of(source, seed), begin)
        self._workers = WorkerProcesses(WorkerStart(sockets, loader.worker_init_fn))
        self._chunks = iter(
            DataLoader(
                dataset,
                batch_sampler=requests,
                collate_fn=_as_it_is,
                num_workers=loader.num_workers,
                prefetch_factor=_PREFETCHED_CHUNKS,
                worker_init_fn=self._workers.worker_init_fn,
                multiprocessing_context=self._workers.noted_by(sending_by_value(loader.multiprocessing_context or get_context())),
            )
        )
        self._thread = threading.Thread(target=self._pump, name="lightning_echo-reading", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        """Takes the results of the workers, so that they get more to do."""
        try:
            for _ in self._chunks:
                if self.window.is_closed:
                    break
        except BaseException as error:  # handed on to the thread that serves the trainings
            if not self.window.is_closed:
                self._when_lost(error)

    def lost_at(self) -> int | None:
        """Returns the item at which a worker has died; None if none has."""
        worker = self._workers.first_lost(_MOST_DYING_SECONDS)
        return None if worker is None else self.window.item_of(worker)

    def close(self) -> None:
        """Ends the workers."""
        self.window.close_for_writers()
        self._thread.join(timeout=10.0)
        del self._chunks
        self.window.close()
