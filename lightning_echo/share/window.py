"""The window: memory in which the reader's workers put examples, and from which the trainings copy them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np

from lightning_echo.cache.record import NotPlainError, decode, encode_plain

# ---------------------------------------------------------------------- packing
# Examples are bytes in the window, as records (``cache/record.py``) whose header is JSON. They can hold tensors, arrays, images,
# numbers, strings, bytes, None, and dicts, lists and tuples of these. Named tuples, instances of dataclasses, and containers that
# are in an example twice, are rewritten first. Anything else is refused, and the message gives the path to it. Pickle could write
# it, but bytes from another process are never unpickled here. An error of the data set may stand in the place of an example.

PLAIN, REWRITTEN, ERROR, END = 0, 1, 2, 3  # kinds. The last one has no bytes and marks the end of a pass
HELD = 0x40  # added to the kind of an example that the reader's cache held
_MOST_TEXT = 4000  # characters of an error's message
_NAMED, _TUPLE, _DATACLASS = "named", "tuple", "dataclass"  # tags of a tuple in a rewritten example
_OF_THAT_NAME = "in this training, but the reader's data set returns one of that name"


class Packed(NamedTuple):
    """An example as bytes, in pieces that share memory with the example. ``size`` is that of all pieces, in bytes."""

    kind: int
    parts: Sequence[Any]
    size: int


class SharedReadError(RuntimeError):
    """The data set has raised an exception in the reader whose type is not one of Python's own."""


def pack(example: Any) -> Packed:
    """Returns an example as bytes. Raises a TypeError with the path of a part that cannot be shared."""
    try:
        record, kind = encode_plain(example), PLAIN
    except NotPlainError:
        record, kind = encode_plain(_rewritten(example, "example")), REWRITTEN
    return Packed(kind, record.parts, record.size)


def pack_error(error: Exception) -> Packed:
    """Returns an exception as bytes: its type, its message and its notes."""
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    message = f"{error}{notes}"[:_MOST_TEXT]
    kind = type(error)
    record = encode_plain({"module": kind.__module__, "name": kind.__qualname__, "message": message})
    return Packed(ERROR, record.parts, record.size)


def unpack(kind: int, data: bytearray) -> Any:
    """Returns the example of these bytes, which the caller must not use afterwards, or raises the data set's own error."""
    found = decode(data, trusted=False, is_own=True)
    if kind == ERROR:
        raise _error_of(found)
    return found if kind == PLAIN else _as_it_was(found)


def _error_of(found: dict[str, str]) -> Exception:
    known = getattr(import_module("builtins"), found["name"], None) if found["module"] == "builtins" else None
    if isinstance(known, type) and issubclass(known, Exception) and known is not StopIteration:
        try:
            return known(found["message"])
        except TypeError:  # UnicodeDecodeError and others need more arguments than a message
            pass
    return SharedReadError(f"{found['module']}.{found['name']}: {found['message']}")


# --- values for which a record has no form --------------------------------------------------------------------------------


def _rewritten(value: Any, path: str) -> Any:
    """Returns a copy of a value in which no container is there twice, and each tuple has a tag for its kind."""
    kind = type(value)
    if kind is dict:
        return {key: _rewritten(part, f"{path}[{key!r}]") for key, part in value.items()}
    if kind is list:
        return [_rewritten(part, f"{path}[{number}]") for number, part in enumerate(value)]
    if isinstance(value, tuple):
        names = getattr(kind, "_fields", None)
        if kind is not tuple and (names is None or not _is_found(kind)):
            raise _refused(value, path)
        parts = [
            _rewritten(part, f"{path}.{name}") for name, part in zip(names or map(str, range(len(value))), value, strict=True)
        ]
        return (_TUPLE, *parts) if kind is tuple else (_NAMED, kind.__module__, kind.__qualname__, *parts)
    if is_dataclass(kind) and kind.__new__ is object.__new__ and _is_found(kind):
        # its fields, also those in slots, and other attributes that were set on it
        in_slots = {each.name: getattr(value, each.name) for each in fields(kind) if hasattr(value, each.name)}
        attributes = {**getattr(value, "__dict__", in_slots), **in_slots}
        held = {name: _rewritten(part, f"{path}.{name}") for name, part in attributes.items()}
        return (_DATACLASS, kind.__module__, kind.__qualname__, held)
    try:
        encode_plain(value)
    except NotPlainError:
        raise _refused(value, path) from None
    return value


def _as_it_was(value: Any) -> Any:
    """Undoes `_rewritten`."""
    kind = type(value)
    if kind is dict:
        return {key: _as_it_was(part) for key, part in value.items()}
    if kind is list:
        return [_as_it_was(part) for part in value]
    if kind is not tuple:
        return value
    tag = value[0]
    if tag == _TUPLE:
        return tuple(map(_as_it_was, value[1:]))
    module, name = value[1:3]
    found = _look_up(module, name)
    if tag == _NAMED:
        if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
            raise TypeError(f"{module}.{name} is not a named tuple {_OF_THAT_NAME}")
        return found(*map(_as_it_was, value[3:]))
    if not (isinstance(found, type) and is_dataclass(found) and found.__new__ is object.__new__):
        raise TypeError(f"{module}.{name} is not a dataclass {_OF_THAT_NAME}")
    made: Any = object.__new__(found)  # its own code does not run: it has only its attributes
    for attribute, part in value[3].items():
        object.__setattr__(made, attribute, _as_it_was(part))
    return made


def _is_found(kind: type) -> bool:
    """Whether another process finds a class by its name."""
    return _look_up(kind.__module__, kind.__qualname__) is kind or kind.__module__ == "__main__"


def _look_up(module: str, name: str) -> Any:
    """Returns the object of this name in a module that was imported before; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _refused(value: Any, path: str) -> TypeError:
    kind = type(value)
    return TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be shared: only None, numbers, strings, bytes, tensors "
        "on the CPU, numpy arrays, PIL images, tv_tensors, and dicts, lists, tuples, named tuples and dataclasses of these can. "
        "Let the data set return one of these, and make the rest of it in collate_fn"
    )


# ---------------------------------------------------------------------- window
# The window is a memfd. It has no name, so nothing is left behind, and ``/dev/shm`` does not limit it. It cannot be shrunk, and
# the descriptor of the trainings cannot write::
#
#     | header: sizes, low, who waits for whom | index: a row (stamp, offset, bytes) per slot | ring of worker 0 | ring of 1 | ...
#
# * Item ``n`` has slot ``n % slots``. It is there if the stamp of its row is ``n + 1``. The highest byte of its size is its kind.
#   A worker writes the example first, then the row, and the stamp last. Before it overwrites an example, it removes the stamp. A
#   training that has copied an example looks at the stamp again: if it is still there, the copy is whole.
# * Each item has a fixed worker: the number of its chunk ``n // CHUNK``, counted from the first chunk of the window, modulo the
#   number of workers. Each worker writes its ring from the start to the end, again and again. All items of a slot belong to one
#   worker, so each word has only one writer.
# * The reader writes ``low``: items below it may be overwritten. A worker that finds no room waits until ``low`` has moved. It
#   also notes that it waits, so that a training knows for whom it waits.

CHUNK = 32
"""Items that a worker is asked for at once."""


class CacheState(NamedTuple):
    """The contents of the reader's cache, in numbers. All are 0 if it has none."""

    examples: int = 0
    bytes: int = 0
    size: int = 0  # bytes that it may hold
    is_full: int = 0  # whether it takes no more examples
    hold: int = 0  # the form of an example, as its place in ``HOLDS``


_MAGIC = 0x4C45_5348_4152_4504  # the last byte: version of the layout
_HEADER_BYTES = 8192
_MAGIC_AT, _LOW, _CLOSED, _SLOTS, _WORKERS, _RING, _BEGIN, _TRAININGS, _NEED, _READ, _TAKEN, _CACHE = range(12)  # words
_OF_WORKERS = _CACHE + len(CacheState._fields)
_BLOCKED, _PREPARED, _NANOSECONDS, _CPU_NANOSECONDS, _PRESENT = range(5)  # words of a worker, one worker after the other
_WORDS = 5
_LABEL_BYTES = 128  # at the end of the header
_MOST_WORKERS = ((_HEADER_BYTES - _LABEL_BYTES) // 8 - _OF_WORKERS) // _WORDS
_ROW = 3  # words of a row: stamp, offset, bytes
_KIND_SHIFT = 56
_MOST_SIZE = 2**_KIND_SHIFT - 1
_ALIGNMENT = 16
_BYTES_PER_SLOT = 1024  # about. With smaller examples, the number of slots limits the window
_LOOK_SECONDS = 0.001  # time between two looks of a worker that waits for room


class TooLargeError(ValueError):
    """An example is larger than a worker's share of the window."""


class Closed(Exception):
    """The reader ends, and nothing more is to be written."""


class _Word:
    """A number in the header of a window, as an attribute."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, window: Window, kind: type[Window]) -> int:
        return int(window._words[self._at])

    def __set__(self, window: Window, number: int) -> None:
        window._words[self._at] = number


class Window:
    """The window in one process. The reader and its workers may write it, the trainings may not.

    It owns the descriptor of the memfd. ``begin`` is its first item, ``workers`` the number of rings, ``slots`` that of the rows
    of the index. Raises a ValueError if the memfd is not a window of this version.
    """

    low = _Word(_LOW)  # items below this one may be overwritten
    is_closed = _Word(_CLOSED)  # for its writers
    trainings = _Word(_TRAININGS)
    # time per item of the slowest training that the reader waits for, without its own waiting and without echoing
    slowest_need_nanoseconds = _Word(_NEED)
    read_in_pass = _Word(_READ)  # examples that the reader reads in a pass, as its trainings want them; 0 if not known
    taken_in_pass = _Word(_TAKEN)  # examples that all its trainings together take in a pass; 0 if not known

    def __init__(self, descriptor: int, *, can_write: bool) -> None:
        self._descriptor, self._can_write = descriptor, can_write
        size = os.fstat(descriptor).st_size
        if size < _HEADER_BYTES:
            raise ValueError(f"this is not a window: it has {size} bytes. Trainings that share must have the same lightning_echo")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if can_write else 0)
        self._memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
        self._words: Any = np.frombuffer(self._memory, np.uint64, _HEADER_BYTES // 8)
        self.slots, self.workers, self.ring_bytes, self.begin = (int(self._words[at]) for at in (_SLOTS, _WORKERS, _RING, _BEGIN))
        rows = self.slots * _ROW * 8
        self._data_at = _HEADER_BYTES + _aligned(rows)
        if int(self._words[_MAGIC_AT]) != _MAGIC or self._data_at + self.workers * self.ring_bytes != size:
            raise ValueError(
                f"this is not a window of this version (it has {size} bytes): trainings that share must have the same "
                "lightning_echo"
            )
        self._rows: Any = np.frombuffer(self._memory, np.uint64, self.slots * _ROW, _HEADER_BYTES).reshape(self.slots, _ROW)
        self._bytes = memoryview(self._memory)
        self._row_words = self._bytes[_HEADER_BYTES : _HEADER_BYTES + rows].cast("Q")  # faster than numpy

    @classmethod
    def create(cls, size_bytes: int, workers: int, begin: int) -> Window:
        """Makes a window. Raises a ValueError if there are too many workers."""
        if not 1 <= workers <= _MOST_WORKERS:
            raise ValueError(f"a shared loader may have up to {_MOST_WORKERS} workers, got {workers}")
        slots = CHUNK * workers * max(size_bytes // (_BYTES_PER_SLOT * CHUNK * workers), 2)
        ring_bytes = max(size_bytes // workers // _ALIGNMENT, 1) * _ALIGNMENT
        descriptor = os.memfd_create("lightning_echo-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _HEADER_BYTES + _aligned(slots * _ROW * 8) + workers * ring_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        header = np.zeros(_OF_WORKERS, np.uint64)
        header[[_MAGIC_AT, _LOW, _SLOTS, _WORKERS, _RING, _BEGIN]] = _MAGIC, begin, slots, workers, ring_bytes, begin
        os.pwrite(descriptor, header.tobytes(), 0)
        return cls(descriptor, can_write=True)

    def read_only_descriptor(self) -> int:
        """Returns a descriptor through which nothing can be written; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def slowest_label(self) -> str:
        """The training that the reader waits for first, for people; empty if it waits for none."""
        return self._memory[_HEADER_BYTES - _LABEL_BYTES : _HEADER_BYTES].rstrip(b"\0").decode(errors="replace")

    @slowest_label.setter
    def slowest_label(self, value: str) -> None:
        self._memory[_HEADER_BYTES - _LABEL_BYTES : _HEADER_BYTES] = value.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")

    @property
    def cache(self) -> CacheState:
        """The contents of the reader's cache, some tenths of a second ago."""
        return CacheState(*map(int, self._words[_CACHE:_OF_WORKERS]))

    @cache.setter
    def cache(self, state: CacheState) -> None:
        self._words[_CACHE:_OF_WORKERS] = state

    def close_for_writers(self) -> None:
        self.is_closed = 1

    def worker_of(self, item: int) -> int:
        return (item // CHUNK - self.begin // CHUNK) % self.workers

    def item_of(self, worker: int) -> int:
        """Returns the present item of a worker: it has written all of its items before it."""
        present = int(self._words[_word(worker, _PRESENT)]) or (self.begin // CHUNK + worker) * CHUNK
        return max(self.begin, present)

    @property
    def unfinished_from(self) -> int:
        """The first item that may be missing here, although a training wants it. Items before ``low`` are wanted by none."""
        return max(self.low, min(self.item_of(worker) for worker in range(self.workers)))

    def is_blocked(self, item: int) -> bool:
        """Returns whether the worker of an item waits for room, which means that it waits for a training."""
        return bool(self._words[_word(self.worker_of(item), _BLOCKED)])

    @property
    def is_full(self) -> bool:
        return any(self._words[_word(worker, _BLOCKED)] for worker in range(self.workers))

    @property
    def seconds_per_example(self) -> float:
        """Mean time in seconds that all workers together take for an example, without waiting for room. 0 before the first."""
        return self._mean_seconds(_NANOSECONDS) / self.workers

    @property
    def cpu_seconds_per_example(self) -> float:
        """Mean processor time in seconds that the workers take for an example. 0 before the first."""
        return self._mean_seconds(_CPU_NANOSECONDS)

    def _mean_seconds(self, name: int) -> float:
        of_workers = self._words[_OF_WORKERS : _word(self.workers, 0)].reshape(self.workers, _WORDS)
        prepared = int(of_workers[:, _PREPARED].sum())
        return float(of_workers[:, name].sum()) / 1e9 / prepared if prepared else 0.0

    def has(self, item: int) -> bool:
        return self._row_words[item % self.slots * _ROW] == item + 1

    def end_from(self, item: int) -> int:
        """Returns the first item from ``item`` on that cannot be taken."""
        while self.has(item):
            item += 1
        return item

    def copy(self, item: int) -> tuple[int, bytearray] | None:
        """Returns the kind of an item, and a copy of its bytes; None if it is not there, or was overwritten during the copy."""
        row, words = item % self.slots * _ROW, self._row_words
        if words[row] != item + 1:
            return None
        at, size = self._data_at + words[row + 1], words[row + 2]
        copied = bytearray(self._bytes[at : at + (size & _MOST_SIZE)])
        return (size >> _KIND_SHIFT, copied) if words[row] == item + 1 else None

    @property
    def last_written(self) -> int:
        """The last item that was written; -1 if none was."""
        return int(self._rows[:, 0].max()) - 1

    def close(self) -> None:
        """Closes the descriptor. The memory stays until its last reference ends, because another thread may use it now."""
        os.close(self._descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_spawned, (DupFd(self._descriptor), self._can_write)


def _from_spawned(descriptor: Any, can_write: bool) -> Window:
    return Window(descriptor.detach(), can_write=can_write)


class _Placed(NamedTuple):
    """An example in a ring: its item, and the range of bytes."""

    item: int
    start: int
    end: int


class Ring:
    """The ring in which one worker writes. ``is_orphan`` returns whether the reader has ended, and makes no room any more."""

    def __init__(self, window: Window, worker: int, is_orphan: Callable[[], bool] = lambda: False) -> None:
        self._window, self._worker, self._is_orphan = window, worker, is_orphan
        self._start = window._data_at + worker * window.ring_bytes
        self._held: deque[_Placed] = deque()
        self._head = 0
        self.waited_nanoseconds = 0  # for room

    def put(self, item: int, kind: int, parts: Sequence[Any], size: int) -> None:
        """Writes an example of ``size`` bytes as soon as there is room. Raises `TooLargeError`; `Closed` if the reader ends."""
        window = self._window
        if size > window.ring_bytes:
            raise TooLargeError(
                f"the example takes {size:,} bytes, and each of the {window.workers} workers has {window.ring_bytes:,} bytes of "
                "the window: give share.window more"
            )
        needed = _aligned(size)
        start = self._room(item, needed)
        if start is None:
            start = self._wait(item, needed)
        _write(window._descriptor, parts, size, self._start + start)
        row = window._rows[item % window.slots]
        row[0] = 0
        row[1], row[2] = self._worker * window.ring_bytes + start, size | kind << _KIND_SHIFT
        row[0] = item + 1
        self.note_present(item + 1)
        self._held.append(_Placed(item, start, start + needed))
        self._head = start + needed

    def _wait(self, item: int, needed: int) -> int:
        words, at = self._window._words, _word(self._worker, _BLOCKED)
        words[at] = item + 1
        began = time.perf_counter_ns()
        try:
            while (start := self._room(item, needed)) is None:
                if self._window.is_closed or self._is_orphan():
                    raise Closed
                time.sleep(_LOOK_SECONDS)
        finally:
            words[at] = 0
            self.waited_nanoseconds += time.perf_counter_ns() - began
        return start

    def note_present(self, item: int) -> None:
        """Notes that this worker has written all items before this one that it was to write."""
        self._window._words[_word(self._worker, _PRESENT)] = item

    def note_prepared(self, examples: int, nanoseconds: int, cpu_nanoseconds: int) -> None:
        """Counts examples that this worker has prepared, their time without waiting for room, and their processor time."""
        words, at = self._window._words, _word(self._worker, 0)
        words[at + _PREPARED] += np.uint64(examples)
        words[at + _NANOSECONDS] += np.uint64(nanoseconds)
        words[at + _CPU_NANOSECONDS] += np.uint64(cpu_nanoseconds)

    def _room(self, item: int, needed: int) -> int | None:
        """Returns where in the ring there is room. First removes items that may be overwritten, but no more than needed."""
        low, held, window = self._window.low, self._held, self._window
        while True:
            is_free = not held or held[0].item > item - window.slots
            start = self._gap(needed) if is_free else None
            if start is not None:
                return start
            if held[0].item >= low:
                return None
            gone = held.popleft()
            row = window._rows[gone.item % window.slots]
            if int(row[0]) == gone.item + 1:
                row[0] = 0

    def _gap(self, needed: int) -> int | None:
        """Returns where this number of bytes fits between the held items; None if nowhere."""
        if not self._held:
            return 0
        tail, head, end = self._held[0].start, self._head, self._window.ring_bytes
        if head > tail:
            return head if end - head >= needed else 0 if tail > needed else None
        return head if tail - head > needed else None


def _write(descriptor: int, parts: Sequence[Any], size: int, at: int) -> None:
    """Writes the pieces one after the other, usually in one call."""
    written = os.pwritev(descriptor, parts, at) if len(parts) <= os.sysconf("SC_IOV_MAX") else 0
    if written == size:
        return
    rest = memoryview(b"".join(parts))[written:]
    while rest:
        written = os.pwrite(descriptor, rest, at + size - len(rest))
        if not written:
            raise OSError(errno.EIO, "nothing was written into the window")
        rest = rest[written:]


def _word(worker: int, name: int) -> int:
    return _OF_WORKERS + worker * _WORDS + name


def _aligned(size: int) -> int:
    return -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
