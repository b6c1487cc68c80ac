"""What the reader does with a loader that is not read by index: it iterates the loader, and puts each item into the window.

Items are numbered one after the other. The number of a reader's first item follows from the number of its first pass
(`first_item`), so another reader never has the same numbers. After the bytes of each item come its pass and its place in that
pass. A special item says that a pass has ended.

The workers turn the items into bytes. One thread receives the bytes, in the order of the user's own loader, and writes them. It
must be one thread, because the order is known only when the pass has been read. Random numbers follow from the name and the
number of the pass.
"""

from __future__ import annotations

import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.fetching.sampler_order import tell_pass
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.hashing import mix
from lightning_echo.protecting.randomness import seed_all
from lightning_echo.sharing.packing import END, ERROR, Packed, pack, pack_error
from lightning_echo.sharing.reader.by_value import sending_by_value
from lightning_echo.sharing.reader.loader_parts import Unit, unit_of
from lightning_echo.sharing.reader.worker_start import WorkerStart
from lightning_echo.sharing.window import Closed, Ring, TooLargeError, Window
from lightning_echo.splitting.staged import read_batch
from lightning_echo.workers.dataset import EchoDataset
from lightning_echo.workers.errors import add_note

__all__ = ["At", "StreamReading", "first_item", "first_pass"]

_PASS_SHIFT = 40  # 2^40 is more items than a reader yields in its life
_AT = struct.Struct("<QQ")
_LOOK_SECONDS = 0.01
_OVER: Any = object()


class At(NamedTuple):
    """Where an item stands.

    Attributes:
        number: Its pass.
        offset: Its place in that pass.
    """

    number: int
    offset: int

    def to_bytes(self) -> bytes:
        """Returns the bytes that come after an item."""
        return _AT.pack(*self)

    @classmethod
    def cut_from(cls, data: bytearray) -> At:
        """Removes the place from the end of an item's bytes, and returns it."""
        at = cls(*_AT.unpack_from(data, len(data) - _AT.size))
        del data[-_AT.size :]
        return at


def first_item(number: int) -> int:
    """Returns the first item of a reader that begins with a pass."""
    return number << _PASS_SHIFT


def first_pass(item: int) -> int:
    """Returns the first pass of the reader that has this first item."""
    return item >> _PASS_SHIFT


class StreamReading:
    """Iterates a loader, and puts its items into one window. See `Reading`.

    Args:
        source: The reader's copy of the loader.
        seed: Seed for all random numbers.
        begin: The first item. The first pass follows from it.
        window_bytes: Memory for items, in bytes.
        when_lost: Called with the error if the loader's workers have died, in another thread.
        sockets: Descriptors of the reader's sockets, which a forked worker closes.

    Attributes:
        window: Where the items are put.
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
        self.window = Window.create(window_bytes, 1, begin)
        self._seed, self._next, self._when_lost = seed, begin, when_lost
        self._workers = WorkerProcesses(WorkerStart(sockets, getattr(source.loader, "worker_init_fn", None)))
        self._loader, self._user_loader = self._packing(source), source.loader
        self._thread = threading.Thread(target=self._pump, name="lightning_echo-reading", daemon=True)
        self._thread.start()

    def lost_at(self) -> int | None:
        """Returns None: another reader begins with another pass."""
        return None

    def close(self) -> None:
        """Ends the workers."""
        self.window.close_for_writers()
        self._thread.join(timeout=10.0)
        self.window.close()

    def _packing(self, source: Source) -> Any:
        """Returns a loader that yields lists of packed items, each with the processor time that they took, in nanoseconds."""
        loader, unit = source.loader, unit_of(source)
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            return _Packing(loader)
        options: dict[str, Any] = {"collate_fn": _Pack(unit, loader.collate_fn)}
        if unit is Unit.streamed:
            options["batch_size"] = loader.batch_size
        elif unit is Unit.examples_of_batch:
            options["batch_sampler"] = loader.batch_sampler
        else:
            options |= {"batch_size": None, "sampler": None if source.reads_stream else loader.sampler}
        context = sending_by_value(loader.multiprocessing_context or get_context())
        return DataLoader(
            _telling(loader.dataset),
            num_workers=loader.num_workers,
            worker_init_fn=self._workers.worker_init_fn,
            multiprocessing_context=self._workers.noted_by(context) if loader.num_workers else None,
            **options,
        )

    # ------------------------------------------------------------------ in the thread

    def _pump(self) -> None:
        """Reads pass after pass."""
        ring, number = Ring(self.window, 0), first_pass(self._next)
        try:
            while not self.window.is_closed:
                self._read_pass(ring, number)
                number += 1
        except Closed:
            pass
        except BaseException as error:  # handed on to the thread that serves the trainings
            if not self.window.is_closed:
                self._when_lost(error)

    def _read_pass(self, ring: Ring, number: int) -> None:
        offset = 0
        for packed in self._items_of_pass(ring, number):
            self._put(ring, packed, At(number, offset))
            offset += 1
        if not offset:
            self._put_error(ring, RuntimeError(f"the loader yielded nothing in pass {number}"), At(number, 0))
        self._put(ring, Packed(END, (), 0), At(number, offset))

    def _items_of_pass(self, ring: Ring, number: int) -> Iterator[Packed]:
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
                ring.note_prepared(len(items), time.perf_counter_ns() - began, cpu_nanoseconds)
                for item in items:
                    yield item
                    if item.kind == ERROR:
                        return
        except Exception as error:  # an error of the user's code goes to every training, unless a worker has died
            if lost := self._workers.lost(1.0):
                raise lost from error
            add_note(error, f"(reading pass {number})")
            yield pack_error(error)

    def _put(self, ring: Ring, packed: Packed, at: At) -> None:
        kind, parts, size = packed
        try:
            ring.put(self._next, kind, [*parts, at.to_bytes()], size + _AT.size)
        except TooLargeError as error:
            if kind == ERROR:
                raise
            self._put_error(ring, error, at)
            return
        self._next += 1
        if kind == ERROR:
            self._wait_until_taken(self._next)

    def _put_error(self, ring: Ring, error: Exception, at: At) -> None:
        self._put(ring, pack_error(error), at)

    def _wait_until_taken(self, item: int) -> None:
        """Waits, so that a loader that fails again and again does not fill the window with its errors."""
        while self.window.low < item:
            if self.window.is_closed:
                raise Closed
            time.sleep(_LOOK_SECONDS)


# ---------------------------------------------------------------------- in the workers


class _Failed(NamedTuple):
    """Stands in the place of what could not be read. torch would send no exception whose class it does not find by its name."""

    error: Packed


def _failed(error: Exception) -> _Failed:
    add_note(error, f"\n\n{''.join(traceback.format_exception(error))}")
    return _Failed(_joined(pack_error(error)))


@dataclass
class _Known:
    """The user's data set, as a `Fetcher` that is asked for nothing else."""

    dataset: Any

    def fetch(self, request: Any) -> tuple[Any, ...]:
        raise NotImplementedError


def _telling(dataset: Any) -> Any:
    """Returns a data set that reads the user's, and returns a `_Failed` in place of an exception."""
    return (_TellingStream if isinstance(dataset, IterableDataset) else _Telling)(_Known(dataset))


class _Telling(EchoDataset):
    """See `_telling`; for data that is read by index."""

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


class _Pack:
    """A collate function that makes packed items from what the data set has read."""

    def __init__(self, unit: Unit, users: Any) -> None:
        self._unit, self._users = unit, users
        self._before = 0  # processor time of this process when the last items were ready

    def __call__(self, read: Any) -> tuple[int, list[Packed]]:
        items = [_packed(example) for example in read] if self._unit is Unit.streamed else [self._packed_batch(read)]
        before, self._before = self._before, time.process_time_ns()
        return self._before - before, items

    def _packed_batch(self, read: Any) -> Packed:
        if self._unit is Unit.batch and not isinstance(read, _Failed):
            try:
                read = self._users(read)
            except Exception as error:
                read = _failed(error)
        return _packed(read)


class _Packing:
    """A loader whose batches are packed here, since the loader makes them itself."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[int, list[Packed]]]:
        before = time.thread_time_ns()
        for batch in self._loader:
            packed = _packed(batch)
            now = time.thread_time_ns()
            yield now - before, [packed]
            before = now


def _packed(item: Any) -> Packed:
    """Returns an item as bytes in one piece, which a worker can send. If the item cannot be shared, it is the error."""
    if isinstance(item, _Failed):
        return item.error
    try:
        return _joined(pack(item))
    except Exception as error:  # what is not plain, and what the user's own objects raise when they are looked at
        return _joined(pack_error(error))


def _joined(packed: Packed) -> Packed:
    return Packed(packed.kind, (b"".join(packed.parts),), packed.size)
