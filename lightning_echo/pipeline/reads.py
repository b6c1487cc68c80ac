"""Reads in flight: threads of a worker read coming examples ahead of time, and the worker takes them in their order.

Behind a storage with latency, a worker that reads one example after the other waits for each of them. Here many reads are under
way at once, and what the training gets does not change by one bit:

* Each request carries the indices that its worker is going to read next (``pipeline/ahead.py``).
* A `ReadPool` in the worker reads them in their order, at most so many at once and so many bytes ahead. What threads run is a
  `ReadPart` (``split/reading.py``): mostly the raw item only. All other work stays in the worker's own thread, since threads that
  compute would only take turns with it.
* The stages ask for an example by its index, as without threads. The pool waits until it is read, and raises its error then. An
  example that nobody has foreseen is read first. What a cache holds is not read.

The pool and the worker's own thread share one lock. A *slot* is one read: it waits in the order of the hints, is under way, and
is read. A slot is found by its index, since an index is read to the same item wherever it stands.

``reads_in_flight="auto"``: threads read only while reads wait. A read that comes from the page cache takes less time than the
change between two threads. So the worker reads by itself at first, and measures how long some of its reads wait: the time that
has passed, less the time in which the thread has computed, and less that in which it waited for a processor. If reads wait, the
threads begin. From then on, one read in `_PROBE_EVERY` is left to the worker. If these do not wait any more, the threads stop.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from time import monotonic, perf_counter, thread_time
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_echo.data.copies import copy_example, nbytes
from lightning_echo.data.difference import difference
from lightning_echo.data.randomness import preserved_random_states, put_back, quick_states, random_states
from lightning_echo.plan.order import entry_key
from lightning_echo.split.prove import Split
from lightning_echo.split.reading import AUTO_IN_FLIGHT, MOST_IN_FLIGHT, ReadPart, file_of
from lightning_echo.split.staged import Load, Stages, decoded

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

USUAL_IN_FLIGHT = 64  # for "auto"
_WINDOW_PER_READ, _LEAST_WINDOW = 16, 256  # examples that a worker is told ahead: for each read under way, and at least
_MOST_BYTES, _SHARE_OF_FREE = 2**30, 20  # that are read ahead on a rank: at most a twentieth of the free memory
_FILES_BESIDE = 64  # that a worker may have open for other purposes

_LEAST_WAIT_SECONDS = 0.0005  # of a read, on average, from which on threads are worth their changes
_LAST_READS, _MOST_LAST_READS = 8, 64  # the worker looks at the median of the last few, and at the mean of more
_MEASURED_EVERY = 4  # reads, after the first ones
_PROBE_EVERY = 2048  # reads
_WATCHED_EVERY = 4  # waits for the user's code, in which nobody else draws random numbers; the first ones are watched all
_JUDGED_AFTER = 16  # reads of files that a thread has read before
_CHECKED_BY_ITSELF = 10  # reads on demand, of which some are compared with one without threads
_PROBES = 3  # in a row that do not wait, before the threads stop
_LOOK_SECONDS = 0.1  # a worker that waits for a read looks so often whether it has to end
_JOIN_SECONDS = 0.5  # a thread in the training's process must not be in torch's code when the interpreter ends
_WORDS_BYTES = 512  # for a read that is waited for, in words

_WAITING, _UNDER_WAY, _READ, _LEFT_OUT = range(4)

NOTHING_READ: Any = object()
"""Returned by `ReadPool.next_read` if no example has arrived."""


_DRAW = "random numbers were drawn while threads read {}, so that from here on reads_in_flight is 1. Draw them in augment"


class ReadChangedError(RuntimeError):
    """A thread has read another item than the worker's own thread reads."""


class Abandoned(BaseException):
    """A worker does not wait for a read any more, because of ``error``. After an ``Exception`` it would be read again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ReadTimeoutError(RuntimeError, TimeoutError):
    """torch has waited for a batch for as long as the loader's ``timeout``, and a worker waits for a read."""


class Pools:
    """What the pools of a loader share with the main process, also those in workers.

    ``context`` is the context of the ``workers``; None: there are none.

    * `close` tells the pools that the loader is closed.
    * A pool that waits for a read says for which one. `who_waits` tells it where torch only says that a batch does not come.
    """

    def __init__(self, context: Any = None, workers: int = 1) -> None:
        # Without a lock: a killed worker would keep it.
        self._closed: Any = SimpleNamespace(value=0) if context is None else context.RawValue("b", 0)
        # For each worker: since when it waits, by the clock that all processes share, and the read in words.
        self._waiting = (
            [bytearray(_WORDS_BYTES)] if context is None else [context.RawArray("c", _WORDS_BYTES) for _ in range(workers)]
        )
        self._pools: list[ReadPool] = []  # of this process

    @property
    def is_closed(self) -> bool:
        return bool(self._closed.value)

    def add(self, pool: ReadPool) -> None:
        self._pools.append(pool)

    def close(self) -> None:
        self._closed.value = 1
        ends = monotonic() + _JOIN_SECONDS
        while self._pools:
            self._pools.pop().close(ends)

    def waits(self, worker: int, since: float, what: str) -> None:
        words = f"{since} {what}".encode()[: _WORDS_BYTES - 1]
        self._waiting[worker][:] = words + bytes(_WORDS_BYTES - len(words))

    def waits_no_more(self, worker: int) -> None:
        self._waiting[worker][:1] = b"\0"

    def who_waits(self) -> str:
        """Returns the read for which a worker has waited longest, in words; empty if none waits."""
        said = [bytes(words).split(b"\0")[0].decode(errors="replace").partition(" ") for words in self._waiting]
        waiting = [(float(since), what) for since, _, what in said if what]
        if not waiting:
            return ""
        since, what = min(waiting)
        return f"{what} is not read after {monotonic() - since:.3g} s"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pools": []}


@dataclass(frozen=True)
class ReadAhead:
    """Everything that a worker needs to read ahead. It is sent to the worker.

    Attributes:
        part: What threads run.
        until: Where an example is cut that is asked for. None: it is read whole.
        threads: The largest number of reads under way in the worker.
        most_bytes: The largest number of bytes that are read ahead in the worker.
        is_auto: Whether threads read only while reads wait.
        pools: What the pool shares with the main process.
    """

    part: ReadPart
    until: Split | None
    threads: int
    most_bytes: int
    is_auto: bool
    pools: Pools

    @classmethod
    def of(cls, loader: Any, part: ReadPart, until: Split | None, in_flight: int | str, most_bytes: int) -> ReadAhead:
        """Returns what each worker of a ``DataLoader`` needs. ``in_flight`` and ``most_bytes`` are those of the rank."""
        workers, context = max(loader.num_workers, 1), loader.multiprocessing_context or torch.multiprocessing.get_context()
        most = USUAL_IN_FLIGHT if in_flight == AUTO_IN_FLIGHT else int(in_flight)
        return cls(
            part=part,
            until=until,
            threads=min(max(most // workers, 1), most_open_files()),
            most_bytes=most_bytes // workers,
            is_auto=in_flight == AUTO_IN_FLIGHT,
            pools=Pools(context if loader.num_workers else None, workers),
        )

    def window(self, pass_length: int) -> int:
        """Returns how many examples the worker is told ahead: so many that a read that takes long holds few others up.

        ``pass_length``: the worker's examples in a pass. A short run should not read far beyond its end.
        """
        by_bytes = max(self.most_bytes // max(self.part.item_bytes, 1), self.threads)
        wanted = max(_WINDOW_PER_READ * self.threads, _LEAST_WINDOW)
        return min(wanted, by_bytes, max(pass_length // 4, 2 * self.threads))


class _Slot:
    __slots__ = ("bytes", "compared", "error", "index", "is_asked", "is_probe", "state", "value")

    def __init__(self, index: Any, compared: Any = NOTHING_READ) -> None:
        self.index, self.compared, self.state = index, compared, _WAITING
        self.is_asked = self.is_probe = False
        self.bytes = 0
        self.value: Any = None
        self.error: BaseException | None = None


class ReadPool:
    """Reads in threads, and by itself what threads do not read.

    It takes the place of the ``load`` of ``stages``. ``is_held`` returns whether a cache holds the example of an index.
    """

    def __init__(
        self, reading: ReadAhead, dataset: Any, stages: Stages, is_held: Callable[[Any], bool] = lambda index: False
    ) -> None:
        self._reading, self._dataset, self._is_held = reading, dataset, is_held
        self._reads = reading.part.make(dataset, reading.until)
        self._read_by_itself = self._reads.read()
        self._todo: deque[_Slot] = deque()
        self._foreseen: dict[Any, deque[_Slot]] = {}  # told ahead, by index
        self._asked: dict[Any, deque[_Slot]] = {}  # of the present batch
        self._draws = False  # whether threads draw random numbers, found by `next_read`
        self._takes_arrived = False  # whether `next_read` takes examples, else `load` asks for them by index
        self._arrived: deque[_Slot] = deque()  # for `next_read`: read by threads
        self._for_itself: deque[_Slot] = deque()  # for `next_read`: that no thread is to read
        self._compared: deque[_Slot] = deque()  # for `next_read`: read once more by threads
        self._lock = threading.Lock()
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._largest = reading.part.item_bytes  # bytes of an item so far
        self._note = ""  # a message for the user
        self._is_on, self._is_useless = not reading.is_auto, False
        self._is_closed = False
        self._bytes = 0  # read ahead, and about to be
        self._awaited: _Slot | None = None
        self._is_full = False  # whether a thread waits until fewer bytes are read ahead
        self._count = self._checked = 0  # reads that threads were asked for, and those of the user's code that were taken
        self._check_at = 1  # the 1st, 10th, 100th ... read of the user's code is compared with one without threads
        self._waits: deque[float] = deque(maxlen=_MOST_LAST_READS)  # seconds, of the last reads without threads
        self._waits_after: deque[float] = deque(maxlen=_MOST_LAST_READS)  # of those whose file a thread has read before
        self._wait_before = 0.0  # mean of ``_waits`` when threads began
        self._idle_probes = self._by_itself_count = self._wait_count = 0
        self._busy = BusyTime()
        info = get_worker_info()
        self._is_worker, self._worker, self._parent = info is not None, 0 if info is None else info.id, os.getppid()
        self._under_way, self._seconds = 0, 0.0  # reads now, and the seconds of all reads since `mean_in_flight`
        self._since = self._counted_at = perf_counter()
        stages.load_through(self._loading)
        reading.pools.add(self)

    def _loading(self, plain: Load) -> Load:
        self._plain = plain
        return self.load

    # ------------------------------------------------------------------ the worker's own thread

    def begin(self, asked: Sequence[Any], ahead: Sequence[Any], dropped: Sequence[Any]) -> None:
        """Begins a batch: the examples ``asked`` for now, those that are asked for later, and those that are not any more."""
        to_read, dropped = list[Any](), list(dropped)
        for index in asked:
            (dropped if self._is_held(index) else to_read).append(index)
        ahead = [index for index in ahead if not self._is_held(index)]
        with self._lock:
            self._skip_done()
            for slots in self._asked.values():  # that a cache has got in the meantime, or that an error has left over
                for slot in slots:
                    self._leave_out(slot)
            self._asked.clear()
            for index in dropped:
                if (lost := _taken(self._foreseen, index)) is not None:
                    self._leave_out(lost)
            first = list[_Slot]()
            for index in to_read:
                if (known := _taken(self._foreseen, index)) is None:
                    first.append(slot := self._new(index))
                else:
                    slot = known
                slot.is_asked = True
                self._asked.setdefault(_key(index), deque()).append(slot)
            self._todo.extendleft(each for each in reversed(first) if not each.is_probe)
            for index in ahead:
                slot = self._new(index)
                self._foreseen.setdefault(_key(index), deque()).append(slot)
                if not slot.is_probe:
                    self._todo.append(slot)
            if self._is_on:
                self._start_threads()
                self._work.notify()

    def load(self, index: Any) -> Any:
        """Returns an example, as the stages load it without threads. Raises the error of its read."""
        slot = _taken(self._asked, index)
        if slot is None:  # a second try, or the comparison of a cache
            return self._plain(index)
        with self._lock:
            is_left = slot.state == _WAITING and (slot.is_probe or not self._is_on or not self._threads)
            if not is_left and slot.state not in (_READ, _LEFT_OUT):
                self._wait_for(slot)
            is_read, value, error = slot.state == _READ, slot.value, slot.error
            self._leave_out(slot)
        if not is_read:
            return self._by_itself(index, is_probe=slot.is_probe)
        if (finish := self._reads.finish) is None:
            return self._after_warming(index)
        if error is not None:
            raise error
        if not self._reading.part.is_ours:
            while self._compared:
                self._compare(self._compared.popleft())
            return decoded(finish(index, value)) if self._may_be_used(index, value) else self._plain(index)
        try:
            return finish(index, value)
        except Exception:
            self._reading.part.raise_for_file(self._dataset, index)  # its error names the file, and ours only has the bytes
            raise

    def foresee(self, indices: Sequence[Any]) -> None:
        """Takes examples to be read. `next_read` returns their indices, in the order in which they arrive."""
        with self._lock:
            self._takes_arrived = True
            for index in indices:
                slot = self._new(index)
                (self._for_itself if slot.is_probe else self._todo).append(slot)
            if self._is_on:
                self._start_threads()
                self._work.notify()

    @property
    def has_arrived(self) -> bool:
        """Whether threads have read an example that `next_read` has not returned."""
        return bool(self._arrived)

    def next_read(self, within: float, only: Any = NOTHING_READ) -> Any:
        """Returns the index of an example for which `load` does not wait: a thread has read it, or this one is to read it.

        Waits for one for at most so many seconds. Returns `NOTHING_READ` if none has arrived. ``only``: the index of the one that
        must come next.
        """
        with self._lock:
            for left in chain.from_iterable(self._asked.values()):  # that a cache has got in the meantime
                self._leave_out(left)
            self._asked.clear()
            if (slot := self._next_arrived(only)) is None and within:
                self._wait_count += 1
                is_watched = self._wait_count <= _MOST_LAST_READS or self._wait_count % _WATCHED_EVERY == 0
                before = quick_states() if is_watched and not self._reading.part.is_ours else None
                self._hurry(only)
                self._done.wait(within)
                slot = self._next_arrived(only)
                if before is not None and before != quick_states():  # nobody else draws while this thread waits
                    put_back(before)
                    if slot is not None:
                        self._arrived.appendleft(slot)
                    self._read_by_itself_only()
                    slot = self._next_arrived(only)
            if slot is None:
                return NOTHING_READ
            slot.is_asked = True
            self._asked.setdefault(_key(slot.index), deque()).append(slot)
            return slot.index

    def take_note(self) -> str:
        """Returns a message for the user, or empty."""
        note, self._note = self._note, ""
        return note

    def mean_in_flight(self) -> float:
        """Returns how many reads were under way on average since the last call."""
        with self._lock:
            self._count_seconds()
            now, seconds = self._counted_at, self._seconds
            passed, self._since, self._seconds = now - self._since, now, 0.0
        return seconds / passed if passed > 0 else 0.0

    def close(self, ends: float = 0.0) -> None:
        """Ends the threads, and waits for them until ``ends``. One that hangs in a read ends with the process."""
        with self._lock:
            self._is_closed = True
            self._busy.close()
            self._todo.clear()
            self._work.notify_all()
            self._done.notify_all()
        for thread in self._threads:
            thread.join(max(ends - monotonic(), 0.0))

    def _new(self, index: Any) -> _Slot:
        slot, self._count = _Slot(index), self._count + 1
        slot.is_probe = self._reading.is_auto and self._is_on and self._count % _PROBE_EVERY == 0
        return slot

    def _hurry(self, only: Any) -> None:
        """Lets threads read an example although they have read as many bytes ahead as they may: it must come next."""
        for slot in self._todo if only is not NOTHING_READ else ():
            if not slot.is_asked and slot.state == _WAITING and _key(slot.index) == _key(only):
                slot.is_asked = True
                self._todo.remove(slot)
                self._todo.appendleft(slot)
                self._work.notify_all()
                break

    def _next_arrived(self, only: Any) -> _Slot | None:
        self._skip_done()
        is_left = not self._is_on or not self._threads
        for slots in (self._arrived, self._for_itself, self._todo) if is_left else (self._arrived, self._for_itself):
            if only is NOTHING_READ and slots:
                return slots.popleft()
            for slot in slots if only is not NOTHING_READ else ():
                if _key(slot.index) == _key(only):
                    slots.remove(slot)
                    return slot
        return None

    def _leave_out(self, slot: _Slot) -> None:
        """Gives up a read that is not needed. If it is under way, its thread drops the result."""
        if slot.state == _READ:
            self._free(slot)
        slot.state, slot.value = _LEFT_OUT, None

    def _free(self, slot: _Slot) -> None:
        self._bytes, slot.bytes = self._bytes - slot.bytes, 0
        if self._is_full:
            self._is_full = False
            self._work.notify_all()

    def _wait_for(self, slot: _Slot) -> None:
        self._awaited, pools, has_told = slot, self._reading.pools, False
        self._wait_count += 1
        is_watched = self._wait_count <= _MOST_LAST_READS or self._wait_count % _WATCHED_EVERY == 0
        before = quick_states() if is_watched and not self._reading.part.is_ours else None
        try:
            since = monotonic()
            while slot.state != _READ and not self._done.wait_for(lambda: slot.state == _READ, _LOOK_SECONDS):
                if self._is_closed or pools.is_closed or (self._is_worker and os.getppid() != self._parent):
                    raise Abandoned(RuntimeError(f"the loader was closed while example {slot.index!r} of the data set was read"))
                pools.waits(self._worker, since, self._in_words(slot.index))
                has_told = True
        finally:
            self._awaited = None
            if has_told:
                pools.waits_no_more(self._worker)
        if before is not None and before != quick_states():  # nobody else draws while this thread waits
            put_back(before)
            self._leave_out(slot)
            self._read_in_order(slot.index)

    def _read_in_order(self, index: Any) -> None:
        """Reads one after the other from here on, since threads draw random numbers. What they have read ahead is not used."""
        self._is_on, self._is_useless = False, True
        for slot in chain.from_iterable((*self._asked.values(), *self._foreseen.values())):
            self._leave_out(slot)
        self._note = _DRAW.format(f"example {index!r} of the data set and others")

    def _read_by_itself_only(self) -> None:
        """The same for `next_read`. What is under way comes after the rest."""
        self._is_on, self._is_useless, self._draws = False, True, True
        self._compare_no_more()
        for slot in self._arrived:
            self._leave_out(slot)
        self._for_itself.extendleft(reversed(self._arrived))
        self._arrived.clear()
        self._note = _DRAW.format("examples of the data set")

    def _in_words(self, index: Any) -> str:
        find = file_of(self._dataset)
        return f"example {index!r} of the data set{'' if find is None else f' ({find(index)})'}"

    def _may_be_used(self, index: Any, value: Any) -> bool:
        """Compares some of the items that threads have read with what this thread reads, and refuses one that differs.

        On demand a thread reads the later ones once more: this thread must not wait for a read while the training waits. False:
        random numbers were drawn meanwhile, by this read or by one beside it, so threads read no more.
        """
        self._checked += 1
        if self._checked < self._check_at:
            return True
        self._check_at *= 10
        if self._takes_arrived and self._checked > _CHECKED_BY_ITSELF:
            again = _Slot(index, copy_example(value))
            with self._lock:
                if self._is_on:  # else no thread reads any more
                    self._todo.appendleft(again)
                    self._work.notify()
            return True
        with preserved_random_states():
            before = random_states()
            again = self._read_by_itself(index)
            where, drew = difference(again, value), difference(before, random_states())
        if where is not None:
            raise self._refused(index, f"in a thread it is another one ({where})")
        if drew is not None:
            with self._lock:
                self._read_by_itself_only() if self._takes_arrived else self._read_in_order(index)
        return drew is None

    def _compare(self, slot: _Slot) -> None:
        """Compares an item that a thread has read with what another read of it has given."""
        where = None if slot.error is not None else difference(slot.compared, slot.value)
        if slot.error is not None:  # the storage may have failed; the next item is compared
            self._check_at = self._checked + 1
        if where is not None:
            raise self._refused(slot.index, f"read twice, it is another one ({where})")

    def _refused(self, index: Any, what: str) -> Abandoned:
        return Abandoned(
            ReadChangedError(
                f"example {index!r} of the data set cannot be read by threads: {what}. They may share a file and its place "
                "in it, or a buffer: give each thread its own (threading.local), or set reads_in_flight=1"
            )
        )

    # ------------------------------------------------------------------ without threads, and whether that is better

    def _by_itself(self, index: Any, *, is_probe: bool) -> Any:
        self._by_itself_count += 1
        is_looked_at = self._by_itself_count <= _MOST_LAST_READS or self._by_itself_count % _MEASURED_EVERY == 0
        if not self._reading.is_auto or not (is_probe or is_looked_at):
            return self._plain(index)
        example, waited = self._measured(index)
        if is_probe:
            self._idle_probes = 0 if waited > _LEAST_WAIT_SECONDS else self._idle_probes + 1
            if self._idle_probes == _PROBES:
                self._switch(on=False)
        elif not self._is_on:
            self._waits.append(waited)
            if not self._is_useless and self._reads_wait():
                self._switch(on=True)
        return example

    def _measured(self, index: Any) -> tuple[Any, float]:
        """Returns an example that this thread reads, and the seconds in which the thread has waited."""
        before, busy = perf_counter(), self._busy.seconds()
        example = self._plain(index)
        return example, perf_counter() - before - (self._busy.seconds() - busy)

    def _reads_wait(self) -> bool:
        waits = self._waits
        if len(waits) < _LAST_READS or len(waits) % _LAST_READS:
            return False
        if median(list(waits)[-_LAST_READS:]) > _LEAST_WAIT_SECONDS:
            return True
        return len(waits) == _MOST_LAST_READS and fmean(waits) > _LEAST_WAIT_SECONDS

    def _after_warming(self, index: Any) -> Any:
        """Reads an example whose file a thread has read before. If that does not help, threads read no more."""
        if not self._reading.is_auto or not self._is_on:
            return self._plain(index)
        example, waited = self._measured(index)
        self._waits_after.append(waited)
        if len(self._waits_after) >= _JUDGED_AFTER and 2 * fmean(self._waits_after) > self._wait_before:
            self._is_useless = True
            self._switch(on=False)
        return example

    def _switch(self, *, on: bool) -> None:
        with self._lock:
            self._is_on, self._idle_probes = on, 0
            if on:
                self._wait_before = fmean(self._waits)
                self._start_threads()
                self._work.notify_all()
            else:
                self._compare_no_more()
                self._waits.clear()
                self._waits_after.clear()

    def _compare_no_more(self) -> None:
        """Takes out what threads were to read once more: only they do so."""
        left = [slot for slot in self._todo if slot.compared is NOTHING_READ]
        self._todo.clear()
        self._todo.extend(left)

    # ------------------------------------------------------------------ threads

    def _start_threads(self) -> None:
        while len(self._threads) < self._reading.threads:
            thread = threading.Thread(target=self._run, name=f"lightning_echo-read-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads: fewer reads are under way
                break
            self._threads.append(thread)

    def _run(self) -> None:
        if self._is_worker:
            torch.set_num_threads(1)  # counts for each thread by itself, and torch has set it for the worker's own
        read: Load | None = None
        while (slot := self._next()) is not None:
            value, error, taken = None, None, 0
            try:
                read = read or self._reads.read()
                value = read(slot.index)
                if not self._reading.part.is_ours and type(value) is not bytes:
                    value = copy_example(value)  # a later read may use its memory again
                taken = self._size_of(value)
            except BaseException as raised:  # the worker's own thread raises it when the example's turn comes
                error = raised
            self._end(slot, value, error, taken)
            del slot, value, error

    def _size_of(self, value: Any) -> int:
        try:
            return nbytes(value)
        except Exception:  # an object of the user's may raise anything when it is looked at
            return self._largest

    def _next(self) -> _Slot | None:
        """Waits for the next read; None if the pool is closed."""
        todo, reading = self._todo, self._reading
        with self._lock:
            while not self._is_closed:
                self._skip_done()
                has_room = not self._bytes or self._bytes + self._largest <= reading.most_bytes
                if todo and self._is_on and (has_room or todo[0].is_asked):
                    slot = todo.popleft()
                    slot.state, slot.bytes = _UNDER_WAY, self._largest
                    self._bytes += slot.bytes
                    self._count_seconds()
                    self._under_way += 1
                    if todo:
                        self._work.notify()  # each wakes the next: few threads take turns where reads are fast
                    return slot
                self._is_full = bool(todo) and not has_room
                self._work.wait()
        return None

    def _skip_done(self) -> None:
        """Takes out the first reads that are not waiting any more: also those that no thread was needed for."""
        while self._todo and self._todo[0].state != _WAITING:
            self._todo.popleft()

    def _end(self, slot: _Slot, value: Any, error: BaseException | None, taken: int) -> None:
        with self._lock:
            self._count_seconds()
            self._under_way -= 1
            if slot.state == _LEFT_OUT:
                self._free(slot)
                return
            if slot.compared is not NOTHING_READ:
                slot.value, slot.error = value, error
                self._free(slot)
                self._compared.append(slot)
                return
            if self._draws:
                self._free(slot)
                slot.state = _LEFT_OUT  # it may have drawn random numbers
                self._for_itself.append(slot)
                self._done.notify()
                return
            slot.state, slot.value, slot.error = _READ, value, error
            self._largest = max(self._largest, taken)
            self._bytes += taken - slot.bytes
            slot.bytes = taken
            if self._takes_arrived:
                self._arrived.append(slot)
            if self._takes_arrived or slot is self._awaited:
                self._done.notify()

    def _count_seconds(self) -> None:
        now = perf_counter()
        self._seconds += self._under_way * (now - self._counted_at)
        self._counted_at = now


def _taken(slots: dict[Any, deque[_Slot]], index: Any) -> _Slot | None:
    """Takes out the first slot of an index; None if there is none."""
    key = _key(index)
    if (found := slots.get(key)) is None:
        return None
    slot = found.popleft()
    if not found:
        del slots[key]
    return slot


def _key(index: Any) -> Any:
    return index if type(index) is int else entry_key(index)


class BusyTime:
    """The seconds in which a thread has computed, or waited for a processor. The first call decides which thread."""

    def __init__(self) -> None:
        self._file: int | None = None  # has the nanoseconds, after others; see the kernel's scheduler/sched-stats.rst
        self._is_open = False

    def seconds(self) -> float:
        return thread_time() + self.queued_seconds()

    def queued_seconds(self) -> float:
        """Returns the seconds in which the thread has waited for a processor; 0 if the system does not tell."""
        if not self._is_open:
            self._is_open = True
            with suppress(OSError):  # not on this system: a busy machine then looks like one that waits for its storage
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def most_ahead_bytes(free_bytes: int | None) -> int:
    """Returns the memory that reads in flight may take on a rank. ``free_bytes``: that it may count on; None: not known."""
    return _MOST_BYTES if free_bytes is None else min(_MOST_BYTES, free_bytes // _SHARE_OF_FREE)


def most_open_files() -> int:
    """Returns how many files the threads of a process may have open."""
    limit = MOST_IN_FLIGHT if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(limit - _FILES_BESIDE, 1) if 0 <= limit < MOST_IN_FLIGHT + _FILES_BESIDE else MOST_IN_FLIGHT
