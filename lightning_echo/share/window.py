"""The window: memory in which the reader's workers put examples, and from which the trainings copy them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np

# ---------------------------------------------------------------------- window
# The window is a memfd. It has no name, so nothing is left behind, and ``/dev/shm`` does not limit it. It cannot be shrunk, and
# the descriptor of the trainings cannot write::
#
#     | header: sizes, low, a few words for each lane | index: a row (stamp, place, bytes) per slot | ring | side ring |
#
# * A *lane* is a writer: one worker of the reader. It writes chunks of items, one after the other, each from its first item to
#   its last, and its later chunks have later items. Lanes may come and go. ``at`` of a lane is the first item that it may still
#   write.
# * The reader writes ``low``: items below it may be overwritten. An item is *over* when it is below ``low`` and below ``at`` of
#   all lanes: then no training needs it, and no lane writes it any more.
# * Item ``n`` has slot ``n % slots``. It is there if the stamp of its row is ``n + 1``, and its place is still its own. The
#   highest byte of its size is its kind. A lane writes the example first, then the row, and the stamp last. It may write into a
#   slot only when the item before in that slot is over. So each word of a row has one writer at a time. A training that has
#   copied an example looks at stamp and place again: if they still hold, the copy is whole.
# * All lanes write into one ring, so the largest example is as large as the window, however many they are. A lane that wants room
#   holds a lock of the memfd, which the system releases if the lane is killed: it moves ``tail`` over records that are over, and
#   ``head`` over its own. While it does, no lane begins. A place is a count of bytes, of which the ring has the last ones: it is
#   still its own if it is not below ``tail``.
# * The lane with the earliest item has the first choice, and a later item leaves a quarter of the ring to it. Nevertheless later
#   items, which are taken last, may lie before what is over, so that the earliest item would wait for ever. Then it is put into
#   the side ring, which only has such items, in their order. Of its memory nothing is used before. It takes a quarter of what the
#   ring takes, or one larger example; more if an item has waited for long, as where many ranks keep large examples.
#
# A lane that finds no room waits until the items that take it are over. It also notes that it waits, so that a training knows for
# whom it waits.

CHUNK = 32
"""Items that a worker is asked for at once."""

MOST_LANES = 128
"""Workers of a reader."""

MOST_FAR_LANES = 96
"""Those of them that may be on other machines."""


class CacheState(NamedTuple):
    """The contents of the reader's cache, in numbers. All are 0 if it has none."""

    examples: int = 0
    bytes: int = 0
    size: int = 0  # bytes that it may hold
    is_full: int = 0  # whether it takes no more examples
    hold: int = 0  # the form of an example, as its place in ``HOLDS``


_MAGIC = 0x4C45_5348_4152_4508  # the last byte: version of the layout
_HEADER_BYTES = 8192
# words of the header
_MAGIC_AT, _LOW, _CLOSED, _SLOTS, _RING, _BEGIN, _TRAININGS, _NEED, _LANES, _PUT, _PUT_BYTES, _HEADS = range(12)
_TAILS = _HEADS + 2  # heads and tails: a word for each of the two rings
# gone: of the items before this one, some were overwritten; most aside: bytes of the side ring that may be used
_READ, _TAKEN, _OPEN, _GONE, _MOST_ASIDE, _RANKS, _CACHE = range(15, 22)
_OF_LANES = _CACHE + len(CacheState._fields)
_AT, _BLOCKED, _PREPARED, _NANOSECONDS, _CPU_NANOSECONDS = range(5)  # words of the lanes, each for one lane after the other
_NOWHERE = 2**63  # ``at`` of a lane that there is not
# What the ranks of a training have agreed on: of each group a key, which of two records holds, and the records. The other one
# is written, then that word, so that one is whole if the reader dies. A record: the end, the number of jumps, the last ones.
_MOST_GROUPS, _MOST_JUMPS = 16, 3
_OF_RECORD = 2 + 2 * _MOST_JUMPS
_OF_GROUP = 2 + 2 * _OF_RECORD
_GROUPS = _OF_LANES + 5 * MOST_LANES
_IS_UNNOTED = _GROUPS + _MOST_GROUPS * _OF_GROUP  # whether there were more groups
_LABEL_BYTES = 128  # at the end of the header
_ROW = 3  # words of a row: stamp, place, bytes
_KIND_SHIFT = 56
_MOST_SIZE = 2**_KIND_SHIFT - 1
_ASIDE = 2**63  # added to a place in the side ring
_ALIGNMENT = 16
_RECORD = 16  # bytes before an example in the ring: its item + 1, and the bytes of both. 0 in place of an item: nothing
_BYTES_PER_SLOT = 1024  # about. With smaller examples, the number of slots limits the window
_FOR_LATER = 3, 4  # the share of the ring that an item may take although earlier ones are not written
_FOR_ASIDE = 1, 4  # the share of the side ring that may be used at first
_MOST_WAIT_NANOSECONDS = 10**9  # an item that has waited for longer may use more of it
_LOOK_SECONDS = 0.001  # time between two looks of a worker that waits for room


class TooLargeError(ValueError):
    """An example is larger than the window."""


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
    """The window in one process. The reader and its lanes may write it, the trainings may not.

    It owns the descriptor of the memfd. ``begin`` is its first item, ``slots`` the number of the rows of the index, and
    ``ring_bytes`` the size of the largest example. Raises a ValueError if the memfd is not a window of this version.
    """

    low = _Word(_LOW)  # items below this one may be overwritten
    is_open = _Word(_OPEN)  # for its lanes: the first ones have all begun
    is_closed = _Word(_CLOSED)  # for its writers
    trainings = _Word(_TRAININGS)
    ranks = _Word(_RANKS)  # the most ranks of a training. They take a round of items, one each, of which all are there at once
    # time per item of the slowest training that the reader waits for, without its own waiting and without echoing
    slowest_need_nanoseconds = _Word(_NEED)
    read_in_pass = _Word(_READ)  # examples that the reader reads in a pass, as its trainings want them; 0 if not known
    taken_in_pass = _Word(_TAKEN)  # examples that all its trainings together take in a pass; 0 if not known

    def __init__(self, descriptor: int, *, can_write: bool) -> None:
        self._descriptor, self._can_write = descriptor, can_write
        self._pid, self._thread_lock = os.getpid(), threading.Lock()
        size = os.fstat(descriptor).st_size
        if size < _HEADER_BYTES:
            raise ValueError(f"this is not a window: it has {size} bytes. Trainings that share must have the same lightning_echo")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if can_write else 0)
        self._memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes[:_HEADER_BYTES].cast("Q")  # faster than numpy
        self.slots, self.ring_bytes, self.begin = (self._words[at] for at in (_SLOTS, _RING, _BEGIN))
        rows = self.slots * _ROW * 8
        self._data_at = _HEADER_BYTES + _aligned(rows)
        self._capacity = self.ring_bytes + _RECORD
        if self._words[_MAGIC_AT] != _MAGIC or self._data_at + 2 * self._capacity != size:
            raise ValueError(
                f"this is not a window of this version (it has {size} bytes): trainings that share must have the same "
                "lightning_echo"
            )
        self._row_words = self._bytes[_HEADER_BYTES : _HEADER_BYTES + rows].cast("Q")
        self._stamps: Any = np.frombuffer(self._row_words, np.uint64)[::_ROW]
        begins = self._data_at, self._data_at + self._capacity
        self._rings = [self._bytes[begin : begin + self._capacity].cast("Q") for begin in begins]

    @classmethod
    def create(cls, size_bytes: int, lanes: int, begin: int) -> Window:
        """Makes a window with so many lanes, the first ones, which begin at item ``begin``. Without any, it is not open yet."""
        # Lanes that each have a chunk in work and one to come need as many slots, else they wait for each other.
        slots = CHUNK * max(size_bytes // (_BYTES_PER_SLOT * CHUNK), 2 * MOST_LANES)
        ring_bytes = _aligned(size_bytes)
        descriptor = os.memfd_create("lightning_echo-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _HEADER_BYTES + _aligned(slots * _ROW * 8) + 2 * (_RECORD + ring_bytes))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        header = np.zeros(_word(0, _BLOCKED), np.uint64)
        share, of = _FOR_ASIDE
        header[[_MAGIC_AT, _LOW, _SLOTS, _RING, _BEGIN]] = _MAGIC, begin, slots, ring_bytes, begin
        header[_MOST_ASIDE] = ring_bytes * share // of
        header[_OF_LANES:] = _NOWHERE
        os.pwrite(descriptor, header.tobytes(), 0)
        window = cls(descriptor, can_write=True)
        for lane in range(lanes):
            window.begin_lane(lane, begin)
        window.is_open = int(lanes > 0)
        return window

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
        return CacheState(*self._words[_CACHE:_OF_LANES])

    @cache.setter
    def cache(self, state: CacheState) -> None:
        self._words[_CACHE:_OF_LANES] = memoryview(array("Q", state))

    def close_for_writers(self) -> None:
        self.is_closed = 1

    # ------------------------------------------------------------------ agreements

    def note_agreement(self, group: str, end: int, jumps: Sequence[tuple[int, int]], groups: Iterable[str]) -> None:
        """Notes what the ranks of a group have agreed on (`Agreement`), before they hear it. ``groups`` are those at work."""
        kept, words = {_key(each) for each in groups}, self._words
        places = [_GROUPS + number * _OF_GROUP for number in range(_MOST_GROUPS)]
        at = next((place for place in places if words[place] == _key(group)), None)
        at = at or next((place for place in places if words[place] not in kept), None)
        if at is None:
            words[_IS_UNNOTED] = 1
            return
        other = 1 - words[at + 1]
        flat = [number for jump in jumps[-_MOST_JUMPS:] for number in jump]
        begin = at + 2 + other * _OF_RECORD
        words[begin : begin + 2 + len(flat)] = memoryview(array("Q", [end, len(jumps), *flat]))
        words[at + 1] = other
        words[at] = _key(group)  # last: nobody looks for the record of the group before, which has left

    def agreement(self, group: str) -> tuple[int, list[tuple[int, int]]] | None:
        """Returns the end and the jumps of `note_agreement`; None if the reader may have agreed on more than is noted."""
        words = self._words
        for at in range(_GROUPS, _GROUPS + _MOST_GROUPS * _OF_GROUP, _OF_GROUP):
            if words[at] == _key(group):
                begin = at + 2 + words[at + 1] * _OF_RECORD
                end, count, *flat = words[begin : begin + _OF_RECORD]
                return (end, list(zip(flat[::2], flat[1::2], strict=True))[:count]) if count <= _MOST_JUMPS else None
        return None if words[_IS_UNNOTED] else (0, [])

    # ------------------------------------------------------------------ lanes

    def begin_lane(self, lane: int, item: int) -> None:
        """Notes that there is a lane, which writes no item before this one. The reader calls this before the lane begins."""
        with self._locked():  # a lane that looks where all others are must not overlook this one
            self._words[_word(lane, _AT)] = item
            self._words[_LANES] = max(self._words[_LANES], lane + 1)

    def end_lane(self, lane: int) -> None:
        """Notes that a lane has ended. The reader calls this when nothing writes in that lane any more."""
        self._words[_word(lane, _AT)] = _NOWHERE

    def at(self, lane: int) -> int:
        """Returns the first item that a lane may still write."""
        return self._words[_word(lane, _AT)]

    def waits(self, lane: int) -> bool:
        """Returns whether a lane waits for room."""
        return bool(self._words[_word(lane, _BLOCKED)])

    def reach_back(self, item: int) -> int:
        """Keeps items from ``item`` on that were taken, as many as are still there. Returns the first one, which is ``low``.

        The reader calls this. No lane gets room meanwhile, and afterwards none gets what these items take.
        """
        with self._locked():
            end = max([self.last_written + 1, *(at + 1 for at in self._of_lanes(_AT) if at != _NOWHERE)])
            self.low = min(self.low, max(item, self._words[_GONE], self.begin, end - self.slots))
        return self.low

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return sum(at != _NOWHERE for at in self._of_lanes(_AT))

    @property
    def _earliest(self) -> int:
        """The first item that any lane may still write."""
        return min(self._of_lanes(_AT), default=_NOWHERE)

    @property
    def unfinished_from(self) -> int:
        """The first item that may be missing here, although a training wants it. Items before ``low`` are wanted by none."""
        return max(self.low, self._earliest)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of this window. The system releases it when its process is killed."""
        if self._pid != os.getpid():  # a forked worker: a thread of the reader may have held the lock
            self._pid, self._thread_lock = os.getpid(), threading.Lock()
        with self._thread_lock:  # that of the system keeps out no other thread
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _of_lanes(self, name: int) -> memoryview:
        return self._words[_word(0, name) : _word(self._words[_LANES], name)]

    def is_blocked(self, item: int) -> bool:
        """Returns whether a lane waits for room for an item, or for one before it, which means that it waits for a training."""
        return any(0 < blocked <= item + 1 for blocked in self._of_lanes(_BLOCKED))

    @property
    def is_full(self) -> bool:
        """Whether the earliest item that is not written waits for room."""
        return self.is_blocked(self._earliest)

    @property
    def seconds_per_example(self) -> float:
        """Mean time in seconds that all lanes together take for an example, without waiting for room. 0 before the first."""
        return self._mean_seconds(_NANOSECONDS) / max(self.lanes, 1)

    @property
    def bytes_per_example(self) -> float:
        """Mean bytes of an example in the window; 0 before the first."""
        return self._words[_PUT_BYTES] / self._words[_PUT] if self._words[_PUT] else 0.0

    @property
    def cpu_seconds_per_example(self) -> float:
        """Mean processor time in seconds that the lanes take for an example. 0 before the first."""
        return self._mean_seconds(_CPU_NANOSECONDS)

    def _mean_seconds(self, name: int) -> float:
        prepared = sum(self._of_lanes(_PREPARED))
        return sum(self._of_lanes(name)) / 1e9 / prepared if prepared else 0.0

    # ------------------------------------------------------------------ items

    def has(self, item: int) -> bool:
        row, words = item % self.slots * _ROW, self._row_words
        return words[row] == item + 1 and self._is_kept(words[row + 1])

    def _is_kept(self, place: int) -> bool:
        """Returns whether the place of an item was not given to another one."""
        return self._words[_TAILS + (place >= _ASIDE)] <= place % _ASIDE

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
        place, size = words[row + 1], words[row + 2]
        at = self._data_at + place % self._capacity if place < _ASIDE else self._address(place)  # a call less, for most
        copied = bytearray(self._bytes[at : at + (size & _MOST_SIZE)])
        if words[row] != item + 1 or not (self._words[_TAILS] <= place if place < _ASIDE else self._is_kept(place)):
            return None
        return size >> _KIND_SHIFT, copied

    def _address(self, place: int) -> int:
        return self._data_at + (place >= _ASIDE) * self._capacity + place % _ASIDE % self._capacity

    @property
    def last_written(self) -> int:
        """The last item that was written; -1 if none was."""
        return int(self._stamps.max()) - 1

    def free(self) -> None:
        """Frees the memory of all examples, which nobody needs any more, also where forked processes have inherited it."""
        begin = -(-_HEADER_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory.madvise(mmap.MADV_REMOVE, begin, len(self._memory) - begin)

    def close(self) -> None:
        """Closes the descriptor. The memory stays until its last reference ends, because another thread may use it now."""
        os.close(self._descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_spawned, (DupFd(self._descriptor), self._can_write)


def _from_spawned(descriptor: Any, can_write: bool) -> Window:
    return Window(descriptor.detach(), can_write=can_write)


class Lane:
    """What writes in one lane. ``is_orphan`` returns whether the reader has ended, and makes no room any more.

    While it waits for room, it looks again after a millisecond, then after longer and longer, up to ``most_look_seconds``.
    """

    def __init__(
        self,
        window: Window,
        number: int,
        is_orphan: Callable[[], bool] = lambda: False,
        most_look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._window, self._number, self._is_orphan, self._most_look = window, number, is_orphan, most_look_seconds
        self._at, self._blocked = _word(number, _AT), _word(number, _BLOCKED)
        self.waited_nanoseconds = 0  # for room
        # up to which place it has looked at the ring, the last item there, and the last place with an earlier item than before
        self._seen = self._seen_last = self._out_of_order = 0

    def wait_until_open(self) -> None:
        """Waits until the window is open. Raises `Closed` if the reader ends."""
        while not self._window.is_open:
            if self._window.is_closed or self._is_orphan():
                raise Closed
            time.sleep(_LOOK_SECONDS)

    def go_to(self, item: int) -> None:
        """Notes that this lane writes no item before this one any more."""
        self._window._words[self._at] = item

    def put(self, item: int, kind: int, parts: Sequence[Any], size: int) -> None:
        """Writes an example of ``size`` bytes as soon as there is room. Raises `TooLargeError`; `Closed` if the reader ends."""
        window = self._window
        if window.is_closed:  # what is left of a chunk of slow reads is not read
            raise Closed
        self._check(size)
        self.go_to(item)
        place = self._room(item, size)
        if place is None:
            place = self._wait(item, size)
        _write(window._descriptor, parts, size, window._address(place))
        row, words = item % window.slots * _ROW, window._row_words
        words[row] = 0
        words[row + 1], words[row + 2] = place, size | kind << _KIND_SHIFT
        words[row] = item + 1
        self.go_to(item + 1)

    def _check(self, size: int) -> None:
        """Raises a `TooLargeError` if there can never be room for an example of this size."""
        window, ranks = self._window, self._window._words[_RANKS]
        if size > window.ring_bytes:
            raise TooLargeError(
                f"the example takes {size:,} bytes, and the window has {window.ring_bytes:,} bytes: give share.window more"
            )
        if ranks > 1 and (ranks + 1) * (_RECORD + _aligned(size)) > window._capacity:  # one more: the end of the ring may be left
            raise TooLargeError(
                f"the example takes {size:,} bytes, and the window has {window.ring_bytes:,} bytes: give share.window more, "
                f"room for {ranks + 1} of them, since {ranks} ranks take as many at once"
            )

    def _wait(self, item: int, size: int) -> int:
        words = self._window._words
        words[self._blocked] = item + 1
        began, look = time.perf_counter_ns(), _LOOK_SECONDS
        try:
            while (place := self._room(item, size, time.perf_counter_ns() - began)) is None:
                if self._window.is_closed or self._is_orphan():
                    raise Closed
                self._check(size)  # ranks may have come meanwhile
                time.sleep(look)
                look = min(2 * look, self._most_look)
        finally:
            words[self._blocked] = 0
            self.waited_nanoseconds += time.perf_counter_ns() - began
        return place

    def note_prepared(self, examples: int, nanoseconds: int, cpu_nanoseconds: int) -> None:
        """Counts examples that this lane has prepared, their time without waiting for room, and their processor time."""
        words = self._window._words
        for name, more in ((_PREPARED, examples), (_NANOSECONDS, nanoseconds), (_CPU_NANOSECONDS, cpu_nanoseconds)):
            words[_word(self._number, name)] += more

    def _room(self, item: int, size: int, waited_nanoseconds: int = 0) -> int | None:
        """Returns a place for an example; None if it has to wait."""
        if self._has_to_wait(item):
            return None
        window, words, needed = self._window, self._window._words, _RECORD + _aligned(size)
        with window._locked():  # no lane begins meanwhile, which would be overlooked
            earliest = window._earliest
            over = min(words[_LOW], earliest)  # the items below this one are over
            if item - window.slots >= over:
                return None
            place = self._place(0, item, needed, over, window._capacity)
            if place is None and item == earliest and not self._is_in_order(item):
                is_urgent = waited_nanoseconds > _MOST_WAIT_NANOSECONDS
                place = self._place(1, item, needed, over, window._capacity if is_urgent else words[_MOST_ASIDE])
                if is_urgent:  # the next ones need not wait so long
                    words[_MOST_ASIDE] = max(words[_MOST_ASIDE], words[_HEADS + 1] - words[_TAILS + 1])
            return place

    def _has_to_wait(self, item: int) -> bool:
        """Returns whether an earlier item has the first choice."""
        window, words = self._window, self._window._words
        if any(0 < blocked <= item for blocked in window._of_lanes(_BLOCKED)):
            return True
        (share, of), earliest = _FOR_LATER, window._earliest
        distance, passed = item - min(words[_LOW], earliest), max(earliest - window.begin, 1)
        # of ``passed`` items so many were written; of the others nobody wanted any
        needed = distance * min(words[_PUT], passed) * words[_PUT_BYTES]
        return bool(item > earliest and needed * of > words[_PUT] * passed * window._capacity * share)

    def _is_in_order(self, item: int) -> bool:
        """Returns whether the ring only has items before this one, in order, so that trainings make room by taking them.

        The oldest of them is needed. Each record is looked at once.
        """
        words, ring, capacity = self._window._words, self._window._rings[0], self._window._capacity
        tail, head = words[_TAILS], words[_HEADS]
        if self._seen < tail:
            self._seen, self._seen_last = tail, 0
        while self._seen < head:
            at = self._seen % capacity // 8
            if 0 < ring[at] < self._seen_last:
                self._out_of_order = self._seen
            self._seen_last = ring[at] or self._seen_last
            self._seen += ring[at + 1]
        return self._out_of_order <= tail and self._seen_last <= item

    def _place(self, number: int, item: int, needed: int, over: int, most: int) -> int | None:
        """Returns a place in one of the two rings, or None. First moves its ``tail`` over records that are over.

        The ring may hold ``most`` bytes, or one example.
        """
        words, ring, capacity = self._window._words, self._window._rings[number], self._window._capacity
        head_at, tail_at = _HEADS + number, _TAILS + number
        while True:
            head, tail = words[head_at], words[tail_at]
            rest = -head % capacity  # bytes up to the end of the ring
            skipped = rest if rest < needed else 0
            if head == tail or head + skipped + needed - tail <= most:
                break
            at = tail % capacity // 8
            if ring[at] > over:  # it is of an item that is not over, plus 1
                return None
            words[_GONE] = max(words[_GONE], ring[at])
            words[tail_at] = tail + ring[at + 1]
        if skipped:
            at = head % capacity // 8
            ring[at], ring[at + 1] = 0, skipped
            words[head_at] = head = head + skipped
        if head - skipped == tail:  # the ring is empty
            words[tail_at] = head
        at = head % capacity // 8
        ring[at], ring[at + 1] = item + 1, needed
        words[_PUT] += 1
        words[_PUT_BYTES] += needed
        words[head_at] = head + needed
        return head + _RECORD + number * _ASIDE


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


def _word(lane: int, name: int) -> int:
    return _OF_LANES + name * MOST_LANES + lane


def _key(group: str) -> int:
    return int.from_bytes(blake2b(group.encode(errors="replace"), digest_size=8).digest(), "little") or 1


def _aligned(size: int) -> int:
    return -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
