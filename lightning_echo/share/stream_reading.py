"""Reads a loader that is not read by index, a stream or one that makes its batches itself: it is iterated, pass after pass."""

from __future__ import annotations

import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.data.randomness import seed_all
from lightning_echo.pipeline.kinds import Kind
from lightning_echo.pipeline.prefetch import WorkerProcesses
from lightning_echo.pipeline.requests import tell_pass
from lightning_echo.pipeline.worker import EchoDataset, add_note
from lightning_echo.plan.plan import mix
from lightning_echo.share.packing import END, ERROR, Packed, pack, pack_error
from lightning_echo.share.reading import Reads, WorkerStart
from lightning_echo.share.same_data import Unit, sending_by_value, unit_of
from lightning_echo.share.window import Closed, Lane, TooLargeError, Window
from lightning_echo.split.staged import read_batch

# Each item is put into the window. Items are numbered one after the other. The number of a reader's first item follows from the
# number of its first pass (`first_item`), so another reader never has the same numbers. After the bytes of each item come its
# pass and its place in that pass. A special item marks the end of a pass.
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
        sockets: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        super().__init__(when_lost, "reading", self._pump)
        self.window = Window.create(window_bytes, 1, begin)
        self._seed, self._next, self._lane = seed, begin, Lane(self.window, 0)
        self._workers = WorkerProcesses(WorkerStart(sockets, getattr(kind.loader, "worker_init_fn", None)))
        self._loader, self._user_loader = self._packing(kind), kind.loader

    @property
    def workers(self) -> int:
        return int(getattr(self._user_loader, "num_workers", 0))

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
                self._lane.note_prepared(len(items), time.perf_counter_ns() - began, cpu_nanoseconds)
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
            self._lane.put(self._next, kind, [*parts, at.to_bytes()], size + _AT.size)
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
