"""`Arena`: an append-only store of bytes that the processes of a node share. A record in it never moves and never changes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import struct
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from stat import S_ISREG
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_echo.data.machine import free_memory_bytes

# ---------------------------------------------------------------------- arena file
# `ArenaFile`: the file of an arena in one process: its layout, its descriptor, its locks, reading and writing.
#
# ::
#
#     | header (4096 bytes) | index: 8 bytes per key | record | record | ...
#                                   |                   ^
#                                   +-------------------+   offset of the record; 0: none; 1: is being written
#
# The bytes are in memory or on a disk. In memory the file is a ``memfd``: it has no name, is not limited by ``/dev/shm``, and is
# gone when no process has it any more. All writes use ``pwrite``, which fails if the memory or the disk is full. A store through
# a map would kill the process then. A file on a disk is read with ``pread``, because it may become shorter, or its disk may fail.
# A file in memory is read so, too, if this process may not map it (``ulimit -v``).
#
# **The lock for writing** is a lock of the kernel (``fcntl``) on the first byte, which belongs to an open file of this process
# alone: a forked process opens the file once more. So it ends with the process, and stays when somebody closes another descriptor
# of the file. It does not exclude other threads of the process: a lock between threads does.
#
# **The lock of all processes that have the file open.** A file on a disk may outlive its processes. Each process that has the
# file holds a second lock, which all of them share. It belongs to the open file, and so forked processes have it, too. A process
# that opens the file while no other has it looks it over first (`look_over`). Then a key that a killed process had claimed is
# free again, and a damaged file is refused. (``flock`` cannot be used: on network storage it excludes the first lock.)

T = TypeVar("T")

_MAGIC = b"lightecho2"
_HEADER = struct.Struct("<10s?5xQQ")  # magic, whether it is on a disk, number of keys, bytes that records may take
_TOKEN_AT, _TOKEN_BYTES = 32, 16  # random bytes, which no other arena has
_COUNTS = struct.Struct("<QQQ")  # bytes taken, records, whether it is frozen
_COUNTS_AT = 64
_LOOKUPS = struct.Struct("<QQ")  # hits, misses
_LOOKUPS_AT = 96
_NOTE = struct.Struct("<II")  # bytes of the note, and the checksum of header and note
_NOTE_AT = 128
_HEADER_BYTES = 4096
_MOST_NOTED = _HEADER_BYTES - _NOTE_AT - _NOTE.size
_WORD = struct.Struct("<Q")
WORD_BYTES = _WORD.size
ABSENT, CLAIMED = 0, 1  # words of the index that are not offsets
ALIGNMENT = 64
SPARE = 0.1  # if a record does not fit, but more than this share of the budget is free, only this record is left out
_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}  # errors of a file system without O_TMPFILE
_LOCK = struct.Struct("hhqqi")  # C's struct flock: type, whence, first byte, bytes, process
_HAVING_AT = (1, 1)  # the second byte
_WRITING_AT = (0, 1)  # the first byte
_WORDS_AT_ONCE = 2**20  # of the index, when it is looked over
_NO_ARENA = "this file is not a cache of lightning_echo, or one of another version: give another path or name"
_DAMAGED = "this file is damaged: {}. Remove it, or give another path or name"


class ArenaError(RuntimeError):
    """A file is not an arena, or it is an arena for something else."""


class ArenaCounts(NamedTuple):
    """``bytes`` of the records and of the space that is lost between them; ``records`` that can be read."""

    bytes: int
    records: int
    is_frozen: bool


@dataclass(frozen=True)
class _WordsInFile:
    """The index of a file. A word that the file has lost reads as `ABSENT`."""

    fd: int
    keys: int

    def __getitem__(self, key: int) -> int:
        if not 0 <= key < self.keys:
            raise IndexError(key)
        data = os.pread(self.fd, _WORD.size, _HEADER_BYTES + _WORD.size * key)
        return int.from_bytes(data, "little") if len(data) == _WORD.size else ABSENT


class ArenaFile:
    """A descriptor, the lock between threads, and in memory a map. A process has one object for each file (see `have`)."""

    def __init__(self, fd: int, *, is_alone: bool = False) -> None:
        self.keys: int
        self.budget: int  # bytes that the records may take
        header = os.pread(fd, _HEADER_BYTES, 0).ljust(_HEADER_BYTES, b"\0")
        magic, on_disk, self.keys, self.budget = _HEADER.unpack_from(header)
        if magic != _MAGIC:
            raise ArenaError(_NO_ARENA)
        length, checksum = _NOTE.unpack_from(header, _NOTE_AT)
        self.note = header[_NOTE_AT + _NOTE.size :][:length]
        self.token = header[_TOKEN_AT:][:_TOKEN_BYTES]
        if checksum != zlib.crc32(self.note, zlib.crc32(header[: _HEADER.size])):
            raise ArenaError(_DAMAGED.format("its header is not what was written"))
        self.fd, self.in_memory = fd, not on_disk
        self.start: int = aligned(_HEADER_BYTES + _WORD.size * self.keys, mmap.PAGESIZE)  # of the records
        self.end = self.start + self.budget  # if all of it is taken
        self.threads = threading.Lock()
        self.own = -1  # a descriptor of an open file that no other process has, for the lock; opened when it is needed
        self.users = 0  # arenas of this process
        self.view: memoryview | None = None
        self.words: memoryview | _WordsInFile = _WordsInFile(fd, self.keys)  # the index: a word by key
        if self.in_memory:
            with suppress(OSError):  # a limit of this process: it is read with pread
                self.map = mmap.mmap(fd, self.end, mmap.MAP_SHARED, mmap.PROT_READ)
                self.view = memoryview(self.map)
                self.words = self.view[_HEADER_BYTES : _HEADER_BYTES + _WORD.size * self.keys].cast("Q")
            return
        if (size := os.fstat(fd).st_size) < self.end:
            raise ArenaError(_DAMAGED.format(f"it has {size:,} of its {self.end:,} bytes"))
        if is_alone:
            look_over(self)
        # This is the lock that all processes with this file share. It waits for a process that looks the file over.
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, *_HAVING_AT, 0))

    def at(self, offset: int, size: int) -> memoryview | bytes:
        """Returns bytes of the file: from a map a view, which must not be kept; from a disk a copy, which may be shorter."""
        return _read(self.fd, size, offset) if self.view is None else self.view[offset : offset + size]

    @property
    def counts(self) -> ArenaCounts:
        """The counts. A file that has lost its header holds nothing."""
        taken, records, frozen = _COUNTS.unpack(bytes(self.at(_COUNTS_AT, _COUNTS.size)).ljust(_COUNTS.size, b"\0"))
        return ArenaCounts(taken, records, bool(frozen))

    def set_word(self, key: int, word: int) -> None:
        write(self.fd, [_WORD.pack(word)], _HEADER_BYTES + _WORD.size * key)

    def record_at(self, offset: int) -> memoryview | bytes:
        """Returns a record. Bytes that the file has lost are missing."""
        begin = offset + _WORD.size
        if self.view is not None:  # of memory, which no other program writes into
            return self.view[begin : begin + _WORD.unpack_from(self.view, offset)[0]]
        length = int.from_bytes(_read(self.fd, _WORD.size, offset), "little")
        return _read(self.fd, max(min(length, self.end - begin), 0), begin)  # a damaged length must not lead outside

    def locked(self, change: Callable[[], T]) -> T:
        """Calls a function while all other threads and processes are excluded, and returns its result.

        An interrupt, or torch's error about a dead worker, may come between any two steps. It must not leave the file locked,
        because all other processes would wait for it. So this is not a context manager: an error may come between its lock and
        its body.
        """
        with self.threads:
            if self.own < 0:
                self.own = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.fcntl(self.own, fcntl.F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *_WRITING_AT, 0))
                return change()
            finally:
                fcntl.fcntl(self.own, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, *_WRITING_AT, 0))

    def close(self) -> None:
        if self.own >= 0:
            os.close(self.own)
        if self.view is not None and isinstance(self.words, memoryview):
            with suppress(BufferError):  # a view of a record is still in use: the map ends with that view
                self.words.release()
                self.view.release()
                self.map.close()
        os.close(self.fd)


# ---------------------------------------------------------------------- the files that this process has

_open: dict[tuple[int, int], ArenaFile] = {}  # by device and inode
_opening = threading.RLock()  # for `_open` and what is in it; only taken by ``with``, which an interrupt cannot leave locked
_busy: list[None] = []  # not empty while the thread that has `_opening` is in the middle of something
_left: deque[tuple[int, int]] = deque()  # files that one arena has left


def _renew_locks() -> None:
    """Makes new locks in a forked process: a lock that a thread of the parent had would never be released."""
    global _opening
    _opening = threading.RLock()
    _busy.clear()
    for each in _open.values():
        each.threads = threading.Lock()
        if each.own >= 0:
            os.close(each.own)
            each.own = -1


os.register_at_fork(after_in_child=_renew_locks)


def have(fd: int, *, looks_over: bool = False) -> tuple[ArenaFile, tuple[int, int]]:
    """Returns the file of a descriptor, which belongs to it from then on, and the key for `leave`."""
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino)
    with _opening:
        try:
            _busy.append(None)
            if (known := _open.get(key)) is None:
                try:
                    known = _open[key] = ArenaFile(fd, is_alone=looks_over and lock_alone(fd))
                except BaseException:
                    os.close(fd)
                    raise
            elif known.fd != fd:
                os.close(fd)
            known.users += 1
        finally:
            _busy.clear()
    _close_left()
    return known, key


def leave(key: tuple[int, int]) -> None:
    """Closes a file that no arena of this process uses any more."""
    # This function may run anywhere, because it runs when an arena is collected as garbage. In the middle of `have` it only notes
    # the file. In another thread it waits for `have`, which waits for nothing that such a thread could have.
    _left.append(key)
    _close_left()


def _close_left() -> None:
    """Closes the files that were left. If this thread is in the middle of `have`, it does so at the end of that."""
    with _opening:
        while _left and not _busy:
            file = _open[key := _left.popleft()]
            file.users -= 1
            if not file.users:
                del _open[key]
                file.close()


def held_in_memory() -> int:
    with _opening:
        try:
            _busy.append(None)
            held = sum(file.counts.bytes for file in _open.values() if file.in_memory)
        finally:
            _busy.clear()
    _close_left()
    return held


# ---------------------------------------------------------------------- making, opening and looking over


def new_file(folder: str) -> tuple[int, str | None]:
    """Returns a new file in a folder, and its name: None if possible, so that the file ends with the process."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES or not os.path.isdir(folder):
            raise
    return tempfile.mkstemp(prefix=".lightning_echo-", dir=folder)


def formatted(fd: int, keys: int, budget_bytes: int, *, on_disk: bool, note: bytes = b"") -> int:
    """Writes an empty arena into the file of a descriptor, and returns the descriptor."""
    # The budget is cut down to the largest file that this process may write (``ulimit -f``).
    start: int = aligned(_HEADER_BYTES + _WORD.size * keys, mmap.PAGESIZE)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY:
        budget_bytes = max(min(budget_bytes, most - start), 0)
    header = _HEADER.pack(_MAGIC, on_disk, keys, budget_bytes)
    try:
        if len(note) > _MOST_NOTED:
            raise ValueError(f"a note has at most {_MOST_NOTED} bytes, got {len(note)}")
        os.ftruncate(fd, start + budget_bytes)
        os.posix_fallocate(fd, 0, start)  # mapped bytes must have space: without it, reading them could kill the process
        write(fd, [os.urandom(_TOKEN_BYTES)], _TOKEN_AT)
        write(fd, [_COUNTS.pack(0, 0, False)], _COUNTS_AT)
        write(fd, [_NOTE.pack(len(note), zlib.crc32(note, zlib.crc32(header))), note], _NOTE_AT)
        write(fd, [header], 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own(path: str) -> int:
    """Opens a file that only this user can have written, and returns its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise ArenaError(f"{path} belongs to another user, who could have written anything into it: give another path")
        if not S_ISREG(status.st_mode):
            raise ArenaError(f"{path} is not a file: give another path or name")
        if status.st_mode & 0o022:
            raise ArenaError(f"{path} can be written by other users, who could have written anything into it: remove it")
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_alone(fd: int) -> bool:
    """Locks a file if no other process has it. Returns whether it is locked."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *_HAVING_AT, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def look_over(file: ArenaFile) -> None:
    """Repairs the remains of killed processes, in a file that no other process has.

    * A key that was claimed and never written is free again. Its space is lost.
    * The records are counted again, since a process may have been killed after it wrote a record and before it counted it.
    * A file that was frozen because its disk was full takes examples again.

    It raises `ArenaError` if the index points to a place where no record can be.
    """
    taken, _, frozen = _COUNTS.unpack(_read(file.fd, _COUNTS.size, _COUNTS_AT))
    if taken > file.budget:
        raise ArenaError(_DAMAGED.format("it has more records than there is room for"))
    records, last = 0, 0
    for first in range(0, file.keys, _WORDS_AT_ONCE):
        count = min(_WORDS_AT_ONCE, file.keys - first)
        words = np.frombuffer(_read(file.fd, _WORD.size * count, _HEADER_BYTES + _WORD.size * first), "<u8")
        offsets = words[words > CLAIMED]
        records += len(offsets)
        last = max(last, int(offsets.max(initial=0)))
        if (offsets < file.start).any() or (offsets >= file.start + taken).any() or (offsets % ALIGNMENT).any():
            raise ArenaError(_DAMAGED.format("its index leads to where no record is"))
        for place in np.flatnonzero(words == CLAIMED):
            write(file.fd, [_WORD.pack(ABSENT)], _HEADER_BYTES + _WORD.size * (first + int(place)))
    if last and last + _WORD.size + int.from_bytes(_read(file.fd, _WORD.size, last), "little") > file.start + taken:
        raise ArenaError(_DAMAGED.format("a record is where there should be none"))  # the next one would be written over it
    has_room = file.budget - taken > SPARE * file.budget
    write(file.fd, [_COUNTS.pack(taken, records, frozen and not has_room)], _COUNTS_AT)


def _read(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    return data + _read(fd, size - len(data), offset + len(data))  # the system gives at most 2 GiB at once


def write(fd: int, parts: Sequence[Any], offset: int) -> None:
    """Writes all parts, even if the system takes them piece by piece."""
    left = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
    while left:
        written = os.pwritev(fd, left[:1000], offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left and written:
            left[0] = left[0][written:]


def aligned(size: Any, to: int = ALIGNMENT) -> Any:
    """Returns a size, or an array of them, rounded up."""
    return -(-size // to) * to


# ---------------------------------------------------------------------- arena
# Nothing is evicted. When the budget is used up, or memory or the disk is running short, the arena is frozen: it takes nothing
# more, and its records stay until no process has the arena any more. A named one stays on its disk, and may take more when the
# next job has looked it over.
#
# A writer takes the lock, claims the key, reserves space and releases the lock. Then it writes the record, and last the index
# word. If the writer is killed in between, the reserved space is lost, and the key stays claimed (in a named file, until the next
# job looks it over). Nothing that others read changes, and the kernel releases the lock. Readers take no lock, because an index
# word that is an offset never changes again.
#
# Source: Mohan et al. 2021, arXiv 2007.06775, section 4.1 (MinIO: items, once cached, are never replaced).

_GROWTH_STEP_BYTES = 64 * 2**20  # free memory is asked for before each of these
_FULL_ERRORS = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}


class ArenaAddress(NamedTuple):
    """Where other processes of a machine find an arena: a process that has it, and its descriptor."""

    pid: int
    fd: int
    token: bytes  # random bytes of the arena: the process may have ended, and its number may belong to another one


class Arena:
    """Records by key, from key 0 to key ``keys - 1``, shared by all processes that have the arena.

    It can be sent to worker processes, forked or spawned, and to other processes of the same user on this machine
    (`Arena.address`). If less than ``reserve_bytes`` of memory are free, it is frozen. ``note`` is what `create_file` was given
    for others to know, and ``shortage`` why this process has frozen the arena before it was full.

    Example:
        >>> arena = Arena.create(keys=10, budget_bytes=2**20)
        >>> arena.put(3, [b"some ", b"bytes"]), arena.put(3, [b"others"])
        (True, False)
        >>> bytes(arena.get(3)), arena.get(4), arena.counts.records
        (b'some bytes', None, 1)
    """

    keys: int
    budget_bytes: int
    is_in_memory: bool

    def __init__(self, fd: int, *, reserve_bytes: int = 0, looks_over: bool = False) -> None:
        self._reserve, self.shortage = reserve_bytes, ""
        file, key = have(fd, looks_over=looks_over)
        weakref.finalize(self, leave, key)
        self._file, self.note = file, file.note
        self.keys, self.budget_bytes, self.is_in_memory = file.keys, file.budget, file.in_memory

    @classmethod
    def create(cls, keys: int, budget_bytes: int, *, reserve_bytes: int = 0) -> Arena:
        """Makes an arena in memory. The index takes 8 bytes per key besides the budget."""
        fd = os.memfd_create("lightning_echo", os.MFD_CLOEXEC)
        return cls(formatted(fd, keys, budget_bytes, on_disk=False), reserve_bytes=reserve_bytes)

    @classmethod
    def create_file(
        cls,
        path: str,
        keys: int,
        budget_bytes: int,
        note: bytes = b"",
        records: Mapping[int, Sequence[Any]] = MappingProxyType({}),
    ) -> Arena:
        """Makes an arena with these records in a file, which must not exist and appears complete. Only this user can read it."""
        folder, name = os.path.split(path)
        fd, temporary = new_file(folder or ".")
        place = -1
        try:
            arena = cls(formatted(fd, keys, budget_bytes, on_disk=True, note=note))
            for key, parts in records.items():
                arena.put(key, parts)
            place = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            source = f"/proc/self/fd/{arena._file.fd}" if temporary is None else os.path.abspath(temporary)
            os.link(source, name, dst_dir_fd=place, follow_symlinks=True)
        finally:
            if place >= 0:
                os.close(place)
            if temporary is not None:
                os.unlink(temporary)
        return arena

    @classmethod
    def create_nameless(cls, folder: str, keys: int, budget_bytes: int) -> Arena:
        """Makes an arena in a file without a name, on the disk of a folder. The file is gone when no process has it any more."""
        fd, temporary = new_file(folder)
        if temporary is not None:
            os.unlink(temporary)
        return cls(formatted(fd, keys, budget_bytes, on_disk=True))

    @classmethod
    def open_file(cls, path: str) -> Arena:
        """Opens the arena in a file. If no other process has it, it is looked over first."""
        return cls(open_own(path), looks_over=True)

    # ------------------------------------------------------------------ its contents

    @property
    def counts(self) -> ArenaCounts:
        return self._file.counts

    def __contains__(self, key: int) -> bool:
        return self._file.words[key] > CLAIMED

    def get(self, key: int) -> memoryview | bytes | None:
        """Returns the record of a key; None if there is none. From memory it is a view, which must not be kept."""
        file = self._file
        offset = file.words[key]
        if offset <= CLAIMED:
            return None
        return file.record_at(offset)

    def lengths_of(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the bytes of the record of each key. -2: none (also below key 0); -1: it is being written, or never will be."""
        words = self._file.words
        index = np.frombuffer(words, np.uint64) if isinstance(words, memoryview) else None
        offsets = index[keys] if index is not None else np.array([words[key] if key >= 0 else ABSENT for key in keys.tolist()])
        lengths = np.where((offsets == ABSENT) | (keys < 0), -2, -1).astype(np.int64)
        for place in np.flatnonzero((offsets > CLAIMED) & (keys >= 0)).tolist():
            lengths[place] = len(self._file.record_at(int(offsets[place])))
        return lengths

    # ------------------------------------------------------------------ adding

    def put(self, key: int, parts: Sequence[Any]) -> bool:
        """Adds a record, given in pieces, if there is none yet and there is room. Returns whether it was added."""
        if self._file.words[key] != ABSENT or self.counts.is_frozen:
            return False
        size = sum(memoryview(part).nbytes for part in parts)
        try:
            offset = self._file.locked(lambda: self._reserve_space(key, WORD_BYTES + size))
            if offset is None:
                return False
            write(self._file.fd, [_WORD.pack(size), *parts], offset)
            self._file.locked(lambda: self._change((key, offset), records=1))  # from now on others find the record
        except OSError as error:
            if error.errno not in _FULL_ERRORS:
                raise
            shortage = f"no more can be written: {error.strerror}"
            with suppress(OSError):  # it is written over, but some file systems need room for that
                shortage = shortage if self.freeze() else ""
            self.shortage = self.shortage or shortage
            return False
        return True

    def freeze(self) -> bool:
        """Freezes the arena, so that nothing is added any more. Returns False if it was frozen before."""
        return not self._file.locked(lambda: self._change(freezes=True)).is_frozen

    def _reserve_space(self, key: int, size: int) -> int | None:
        """Claims a key under the caller's lock. Returns where its record will be; None if the key is taken or without room."""
        file = self._file
        if file.words[key] != ABSENT or (counts := self.counts).is_frozen:
            return None
        taken = counts.bytes
        end = aligned(taken + size)
        if end > file.budget:
            if file.budget - taken <= SPARE * file.budget:
                self._change(freezes=True)
            return None
        if file.in_memory and (not taken or taken // _GROWTH_STEP_BYTES != end // _GROWTH_STEP_BYTES):
            # Enough memory must be free for the next step of growth: past a container's limit the kernel kills processes.
            free = free_memory_bytes()
            if free is not None and free - max(_GROWTH_STEP_BYTES, end - taken) < self._reserve:
                self.shortage = "memory is running short"
                self._change(freezes=True)
                return None
        self._change((key, CLAIMED), taken=end - taken)
        return file.start + taken

    def _change(
        self, word: tuple[int, int] | None = None, *, taken: int = 0, records: int = 0, freezes: bool = False
    ) -> ArenaCounts:
        """Sets the word of a key, if one is given, and then changes the counts. Returns the counts before. It needs the lock."""
        if word is not None:
            self._file.set_word(*word)
        before = self.counts
        now = _COUNTS.pack(before.bytes + taken, before.records + records, before.is_frozen or freezes)
        write(self._file.fd, [now], _COUNTS_AT)
        return before

    @property
    def lookups(self) -> tuple[int, int]:
        hits, misses = _LOOKUPS.unpack(self._file.at(_LOOKUPS_AT, _LOOKUPS.size))
        return hits, misses

    def add_lookups(self, hits: int, misses: int) -> None:
        self._file.locked(lambda: self._add_lookups(hits, misses))

    def _add_lookups(self, hits: int, misses: int) -> None:
        before = self.lookups
        write(self._file.fd, [_LOOKUPS.pack(before[0] + hits, before[1] + misses)], _LOOKUPS_AT)

    # ------------------------------------------------------------------ other processes

    @property
    def address(self) -> ArenaAddress:
        """Where other processes of this user and machine find it while this process lives."""
        return ArenaAddress(os.getpid(), self._file.fd, self._file.token)

    @classmethod
    def attach(cls, address: ArenaAddress, *, reserve_bytes: int = 0) -> Arena:
        """Opens the arena that another process has.

        It raises ``OSError`` if that is gone or invisible (another container), `ArenaError` if its number is another's by now.
        """
        path = f"/proc/{address.pid}/fd/{address.fd}"
        if not S_ISREG(os.stat(path).st_mode):  # opening a device could do anything
            raise ArenaError(_NO_ARENA)
        arena = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), reserve_bytes=reserve_bytes)
        if arena._file.token != address.token:
            raise ArenaError(f"process {address.pid} has another cache there")
        return arena

    def __reduce__(self) -> tuple[Callable[..., Arena], tuple[Any, ...]]:
        """Returns the way to attach, and not the records."""
        if get_spawning_popen() is not None:  # a process that is being started inherits the descriptor
            return _inherited, (DupFd(self._file.fd), self._reserve)
        # Any other pickle may be read by several processes, or by none, so it must keep nothing open.
        return _attached, (self.address, self._reserve, self.keys)

    def __deepcopy__(self, memo: Any = None) -> Arena:
        return self

    __copy__ = __deepcopy__


def _inherited(sent: Any, reserve_bytes: int) -> Arena:
    return Arena(sent.detach(), reserve_bytes=reserve_bytes)


def _attached(address: ArenaAddress, reserve_bytes: int, keys: int) -> Arena:
    """Returns the arena of a pickle, or an empty one if that is out of reach, so that all is read."""
    try:
        return Arena.attach(address, reserve_bytes=reserve_bytes)
    except (OSError, ArenaError) as error:
        arena = Arena.create(keys, 0)
        arena.freeze()
        arena.shortage = f"process {address.pid}, which has its examples, is gone or cannot be reached from here ({error})"
        return arena
