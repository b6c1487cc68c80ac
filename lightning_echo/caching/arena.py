"""`Arena`: an append-only store of bytes that the processes of a node share. What is in it never moves and never changes.

::

    | header (4096 bytes) | index: 8 bytes per key | record | record | ...
                                  |                   ^
                                  +-------------------+   offset of the record; 0: none; 1: is being written

A writer takes the lock, claims the key and reserves space, and gives the lock back. Then it writes the record, and the index word
last. A process that is killed meanwhile loses the space that it had reserved, and its key is never held; what others read is not
touched. The lock is one of the kernel's (``fcntl``), which ends with the process that has it. Such a lock does not exclude other
threads of the process, and is dropped when *any* descriptor of the file is closed in it. So a process has one descriptor for each
file, and a lock between its threads.

Readers take no lock. An index word that is not 0 or 1 never changes again.

The bytes are in memory (a ``memfd``: it has no name, is not bounded by ``/dev/shm``, and is gone with the last process that has
it), or in a file. All is written by ``pwrite``, which fails where memory or disk are full: a store through a map would kill the
process. A file is read by ``pread``, too: it may become shorter, or its disk may fail.

A file may outlive its processes. Each process that has it holds a second lock, shared by all, which belongs to the open file and
so to forked processes, too. Who opens the file alone looks it over first (`_look_over`): a key that a killed process had claimed
is free again, and what cannot be right is refused. (``flock`` would do, but on network storage it excludes the first lock.)

Source: Mohan et al. 2021, arXiv 2007.06775, section 4.1 (MinIO: items, once cached, are never replaced).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from stat import S_ISREG
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lightning_echo.caching.free_memory import free_memory_bytes

__all__ = ["Arena", "ArenaCounts", "ArenaError", "held_in_memory"]

_MAGIC = b"lightecho1"
_HEADER = struct.Struct("<10s?5xQQ")  # magic, whether it is on a disk, number of keys, bytes that records may take
_COUNTS = struct.Struct("<QQQ")  # bytes taken, records, whether it is frozen
_COUNTS_AT = 64
_LOOKUPS = struct.Struct("<QQ")  # hits, misses
_LOOKUPS_AT = 96
_NOTE = struct.Struct("<II")  # bytes of the note, and the checksum of header and note
_NOTE_AT = 128
_HEADER_BYTES = 4096
_MOST_NOTED = _HEADER_BYTES - _NOTE_AT - _NOTE.size
_WORD = struct.Struct("<Q")
_ABSENT, _CLAIMED = 0, 1
_ALIGNMENT = 64
_GROWTH_STEP_BYTES = 64 * 2**20  # free memory is asked for before each of these
_SPARE = 0.1  # a record that does not fit is passed over if more than this share of the budget would stay empty
_FULL_ERRORS = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}
_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}  # says a file system without O_TMPFILE
_HAVING = struct.Struct("hhqqi")  # C's struct flock: type, whence, first byte, bytes, process
_HAVING_AT = (1, 1)  # the second byte; the first one is what `locked` locks
_WORDS_AT_ONCE = 2**20  # of the index, when it is looked over


class ArenaError(RuntimeError):
    """A file is no arena, or one for something else."""


class ArenaCounts(NamedTuple):
    """What an arena holds.

    Attributes:
        bytes: Bytes of the records, with what is lost between them.
        records: Records that can be read.
        is_frozen: Whether nothing is added any more.
    """

    bytes: int
    records: int
    is_frozen: bool


class _WordsInFile:
    """The index of a file. What is missing of it reads as absent."""

    def __init__(self, fd: int, keys: int) -> None:
        self._fd, self._keys = fd, keys

    def __getitem__(self, key: int) -> int:
        if not 0 <= key < self._keys:
            raise IndexError(key)
        data = os.pread(self._fd, _WORD.size, _HEADER_BYTES + _WORD.size * key)
        return int.from_bytes(data, "little") if len(data) == _WORD.size else _ABSENT


class _File:
    """A descriptor, the lock between threads, and in memory a map: one in each process for each file.

    Args:
        fd: The descriptor.
        is_alone: Whether no other process has the file, so that it can be looked over.
    """

    def __init__(self, fd: int, *, is_alone: bool = False) -> None:
        self.keys: int
        self.budget: int
        header = os.pread(fd, _HEADER_BYTES, 0).ljust(_HEADER_BYTES, b"\0")
        magic, on_disk, self.keys, self.budget = _HEADER.unpack_from(header)
        if magic != _MAGIC:
            raise ArenaError("this file is no cache of lightning_echo, or one of another version: give another path or name")
        length, checksum = _NOTE.unpack_from(header, _NOTE_AT)
        self.note = header[_NOTE_AT + _NOTE.size :][:length]
        if checksum != zlib.crc32(self.note, zlib.crc32(header[: _HEADER.size])):
            raise ArenaError(_damaged("its header is not what was written"))
        self.fd, self.in_memory = fd, not on_disk
        self.start = _start_of_records(self.keys)
        self.end = self.start + self.budget
        self.threads = threading.Lock()
        self.users = 0  # arenas of this process
        self.words: memoryview | _WordsInFile
        if self.in_memory:
            self.map = mmap.mmap(fd, self.end, mmap.MAP_SHARED, mmap.PROT_READ)
            self.view = memoryview(self.map)
            self.words = self.view[_HEADER_BYTES : _HEADER_BYTES + _WORD.size * self.keys].cast("Q")
            return
        if (size := os.fstat(fd).st_size) < self.end:
            raise ArenaError(_damaged(f"it has {size:,} of its {self.end:,} bytes"))
        self.words = _WordsInFile(fd, self.keys)
        if is_alone:
            _look_over(self)
        _lock_with_others(fd)

    def at(self, offset: int, size: int) -> memoryview | bytes:
        """Returns bytes: a view that must not be kept, or a copy, which is shorter where the file ends."""
        return self.view[offset : offset + size] if self.in_memory else _read(self.fd, size, offset)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes all other threads and processes."""
        with self.threads:
            fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, 0)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, 0)

    def close(self) -> None:
        """Ends the map and closes the descriptor."""
        if isinstance(self.words, memoryview):
            with contextlib.suppress(BufferError):  # somebody looks at a record still: the map ends with that view
                self.words.release()
                self.view.release()
                self.map.close()
        os.close(self.fd)


_open: dict[tuple[int, int], _File] = {}  # by device and inode: a second descriptor would drop the lock when it is closed
_opening = threading.RLock()  # again by the same thread, when garbage is collected meanwhile


def _renew_locks() -> None:
    """In a forked process, a lock that a thread of its parent had would never be given back."""
    global _opening
    _opening = threading.RLock()
    for each in _open.values():
        each.threads = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


class Arena:
    """Records by key, 0 to ``keys`` - 1, shared by all processes that have it.

    It can be sent to worker processes, forked or spawned, and to other processes of the same user on this machine
    (`Arena.address`).

    Args:
        fd: A descriptor of a file that `create` or `create_file` has made; it belongs to this object from now on.
        reserve_bytes: Memory that must stay free. Below it the arena is frozen.
        is_alone: Whether no other process has the file, and this one has it locked.

    Attributes:
        shortage: Why this process has frozen the arena before it was full; empty if it has not.

    Example:
        >>> arena = Arena.create(keys=10, budget_bytes=2**20)
        >>> arena.put(3, [b"some ", b"bytes"]), arena.put(3, [b"others"])
        (True, False)
        >>> bytes(arena.get(3)), arena.get(4), arena.counts.records
        (b'some bytes', None, 1)
    """

    def __init__(self, fd: int, *, reserve_bytes: int = 0, is_alone: bool = False) -> None:
        self._reserve, self.shortage = reserve_bytes, ""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with _opening:
            if (known := _open.get(key)) is None:
                try:
                    known = _open[key] = _File(fd, is_alone=is_alone)
                except BaseException:
                    os.close(fd)
                    raise
            elif known.fd != fd:
                with known.threads:  # closing a descriptor drops the lock: no thread may have it
                    os.close(fd)
            known.users += 1
        self._file = known
        weakref.finalize(self, _leave, key)

    @classmethod
    def create(cls, keys: int, budget_bytes: int, *, reserve_bytes: int = 0) -> Arena:
        """Makes an arena in memory.

        Args:
            keys: Number of keys.
            budget_bytes: Bytes that the records may take.
            reserve_bytes: Memory that must stay free.

        Raises:
            OSError: There is no memory for the index (8 bytes per key).
        """
        fd = os.memfd_create("lightning_echo", os.MFD_CLOEXEC)
        return cls(_formatted(fd, keys, budget_bytes, on_disk=False), reserve_bytes=reserve_bytes)

    @classmethod
    def create_file(
        cls,
        path: str,
        keys: int,
        budget_bytes: int,
        note: bytes = b"",
        records: Mapping[int, Sequence[Any]] = MappingProxyType({}),
    ) -> Arena:
        """Makes an arena in a file, which must not exist. Only this user can read it. The file appears when it is complete.

        Args:
            path: The file's path.
            keys: Number of keys.
            budget_bytes: Bytes that the records may take.
            note: What others should know about the arena.
            records: What is in it from the beginning, by key.

        Raises:
            OSError: The file exists, cannot be written, or there is no space for the index (8 bytes per key).
        """
        folder, name = os.path.split(path)
        fd, temporary = _new_file(folder or ".")
        place = -1
        try:
            arena = cls(_formatted(fd, keys, budget_bytes, on_disk=True, note=note))
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
        """Makes an arena on the disk of a folder, in a file that has no name: it is gone with the last process that has it.

        Raises:
            OSError: The folder does not exist or cannot be written, or there is no space for the index (8 bytes per key).
        """
        fd, temporary = _new_file(folder)
        if temporary is not None:
            os.unlink(temporary)
        return cls(_formatted(fd, keys, budget_bytes, on_disk=True))

    @classmethod
    def open_file(cls, path: str) -> Arena:
        """Opens the arena in a file. If no other process has it, it is looked over first.

        Raises:
            OSError: The file cannot be opened.
            ArenaError: The file is no arena, is damaged, or other users may have written into it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                raise ArenaError(f"{path} belongs to another user, who could have written anything into it: give another path")
            if not S_ISREG(status.st_mode):
                raise ArenaError(f"{path} is no file: give another path or name")
            if status.st_mode & 0o022:
                raise ArenaError(f"{path} can be written by other users, who could have written anything into it: remove it")
            is_alone = _lock_alone(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, is_alone=is_alone)

    # ------------------------------------------------------------------ what it holds

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self._file.keys

    @property
    def budget_bytes(self) -> int:
        """Bytes that the records may take."""
        return self._file.budget

    @property
    def note(self) -> bytes:
        """What was noted when it was made."""
        return self._file.note

    @property
    def counts(self) -> ArenaCounts:
        """What it holds now."""
        taken, records, frozen = _COUNTS.unpack(bytes(self._file.at(_COUNTS_AT, _COUNTS.size)).ljust(_COUNTS.size, b"\0"))
        return ArenaCounts(taken, records, bool(frozen))

    def __contains__(self, key: int) -> bool:
        return self._file.words[key] > _CLAIMED

    def get(self, key: int) -> memoryview | bytes | None:
        """Returns the record of a key, None if there is none: a view that must not be kept, or bytes from a file.

        What a file has lost of a record is missing in it.
        """
        file = self._file
        offset = file.words[key]
        if offset <= _CLAIMED:
            return None
        begin = offset + _WORD.size
        length = int.from_bytes(file.at(offset, _WORD.size), "little")
        return file.at(begin, max(min(length, file.end - begin), 0))  # a length that was damaged leads to nothing outside

    # ------------------------------------------------------------------ adding

    def put(self, key: int, parts: Sequence[Any]) -> bool:
        """Adds a record, if there is none yet and there is room.

        Args:
            key: Its key.
            parts: Its bytes, in pieces.

        Returns:
            Whether it was added.
        """
        if self._file.words[key] != _ABSENT or self.counts.is_frozen:
            return False
        size = sum(memoryview(part).nbytes for part in parts)
        offset = self._reserve_space(key, _WORD.size + size)
        if offset is None:
            return False
        try:
            _write(self._file.fd, [_WORD.pack(size), *parts], offset)
        except OSError as error:
            if error.errno not in _FULL_ERRORS:
                raise
            if self.freeze():
                self.shortage = f"no more can be written: {error.strerror}"
            return False
        with self._file.locked():
            _write(self._file.fd, [_WORD.pack(offset)], _HEADER_BYTES + _WORD.size * key)
            self._change_counts(records=1)
        return True

    def freeze(self) -> bool:
        """Lets nothing be added any more. Returns whether this call did so."""
        with self._file.locked():
            was_frozen = self.counts.is_frozen
            self._change_counts(freezes=True)
        return not was_frozen

    def _reserve_space(self, key: int, size: int) -> int | None:
        """Claims a key, and returns where its record is to be written; None if somebody else has it, or there is no room."""
        file = self._file
        with file.locked():
            if file.words[key] != _ABSENT:
                return None
            taken, frozen = self.counts.bytes, self.counts.is_frozen
            end = _aligned(taken + size, _ALIGNMENT)
            if frozen:
                return None
            if end > file.budget or (file.in_memory and not self._may_grow(taken, end)):
                if end <= file.budget:
                    self.shortage = "memory is running short"
                if end <= file.budget or file.budget - taken <= _SPARE * file.budget:
                    self._change_counts(freezes=True)
                return None
            _write(file.fd, [_WORD.pack(_CLAIMED)], _HEADER_BYTES + _WORD.size * key)
            self._change_counts(taken=end - taken)
        return file.start + taken

    def _may_grow(self, taken: int, end: int) -> bool:
        """Whether memory allows it, asked whenever another step of growth begins: past a container's limit the kernel kills."""
        if taken and taken // _GROWTH_STEP_BYTES == end // _GROWTH_STEP_BYTES:
            return True
        free = free_memory_bytes()
        return free is None or free - max(_GROWTH_STEP_BYTES, end - taken) >= self._reserve

    def add_lookups(self, hits: int, misses: int) -> None:
        """Counts lookups, for all processes."""
        with self._file.locked():
            before = self.lookups
            _write(self._file.fd, [_LOOKUPS.pack(before[0] + hits, before[1] + misses)], _LOOKUPS_AT)

    @property
    def lookups(self) -> tuple[int, int]:
        """Hits and misses that were counted by `add_lookups`, of all processes."""
        hits, misses = _LOOKUPS.unpack(self._file.at(_LOOKUPS_AT, _LOOKUPS.size))
        return hits, misses

    def _change_counts(self, *, taken: int = 0, records: int = 0, freezes: bool = False) -> None:
        """Under the lock."""
        now = self.counts
        counts = _COUNTS.pack(now.bytes + taken, now.records + records, now.is_frozen or freezes)
        _write(self._file.fd, [counts], _COUNTS_AT)

    # ------------------------------------------------------------------ other processes

    @property
    def address(self) -> tuple[int, int]:
        """Process and descriptor, under which other processes of this user and machine can open it while this one lives."""
        return os.getpid(), self._file.fd

    @classmethod
    def attach(cls, address: tuple[int, int], *, reserve_bytes: int = 0) -> Arena:
        """Opens the arena that another process has, in memory or in a file.

        Raises:
            OSError: The process is not there, or not to be seen from here (another container).
            ArenaError: What is there is no arena.
        """
        pid, fd = address
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), reserve_bytes=reserve_bytes)

    def __reduce__(self) -> tuple[Callable[..., Arena], tuple[Any, ...]]:
        """For a worker process: how to attach, and not what is in it."""
        return _received, (reduction.DupFd(self._file.fd), self._reserve)

    def __copy__(self) -> Arena:
        return self

    def __deepcopy__(self, memo: Any) -> Arena:
        return self


def held_in_memory() -> int:
    """Returns the bytes of records that the arenas of this process hold in memory."""
    with _opening:
        return sum(_COUNTS.unpack_from(file.view, _COUNTS_AT)[0] for file in _open.values() if file.in_memory)


def _received(sent: Any, reserve_bytes: int) -> Arena:
    return Arena(sent.detach(), reserve_bytes=reserve_bytes)


def _leave(key: tuple[int, int]) -> None:
    """Closes a file that no arena of this process uses any more."""
    with _opening:
        file = _open[key]
        file.users -= 1
        if not file.users:
            del _open[key]
            file.close()


def _new_file(folder: str) -> tuple[int, str | None]:
    """Returns a new file in a folder, and its name; None if it has none, so that nothing is left if the process is killed."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES or not os.path.isdir(folder):
            raise
    return tempfile.mkstemp(prefix=".lightning_echo-", dir=folder)


def _lock_alone(fd: int) -> bool:
    """Locks a file if no other process has it; returns whether it has."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _HAVING.pack(fcntl.F_WRLCK, os.SEEK_SET, *_HAVING_AT, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _lock_with_others(fd: int) -> None:
    """Locks a file together with all others that have it, after one that looks it over."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _HAVING.pack(fcntl.F_RDLCK, os.SEEK_SET, *_HAVING_AT, 0))


def _formatted(fd: int, keys: int, budget_bytes: int, *, on_disk: bool, note: bytes = b"") -> int:
    header = _HEADER.pack(_MAGIC, on_disk, keys, budget_bytes)
    try:
        if len(note) > _MOST_NOTED:
            raise ValueError(f"a note has at most {_MOST_NOTED} bytes, got {len(note)}")
        start = _start_of_records(keys)
        os.ftruncate(fd, start + budget_bytes)
        os.posix_fallocate(fd, 0, start)  # what is mapped must be there: else a look at it could kill the process
        _write(fd, [_COUNTS.pack(0, 0, False)], _COUNTS_AT)
        _write(fd, [_NOTE.pack(len(note), zlib.crc32(note, zlib.crc32(header))), note], _NOTE_AT)
        _write(fd, [header], 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _look_over(file: _File) -> None:
    """Makes good what killed processes have left, in a file that nobody else has.

    * A key that was claimed and never written is free again. Its space is lost.
    * The records are counted anew: a process may have been killed between a record and its count.
    * A file that was frozen since its disk was full goes on.

    Raises:
        ArenaError: The index leads to where no record can be.
    """
    taken, _, frozen = _COUNTS.unpack(_read(file.fd, _COUNTS.size, _COUNTS_AT))
    if taken > file.budget:
        raise ArenaError(_damaged("it has more records than there is room for"))
    records, last = 0, 0
    for first in range(0, file.keys, _WORDS_AT_ONCE):
        count = min(_WORDS_AT_ONCE, file.keys - first)
        words = np.frombuffer(_read(file.fd, _WORD.size * count, _HEADER_BYTES + _WORD.size * first), "<u8")
        offsets = words[words > _CLAIMED]
        records += len(offsets)
        last = max(last, int(offsets.max(initial=0)))
        if (offsets < file.start).any() or (offsets >= file.start + taken).any() or (offsets % _ALIGNMENT).any():
            raise ArenaError(_damaged("its index leads to where no record is"))
        for place in np.flatnonzero(words == _CLAIMED):
            _write(file.fd, [_WORD.pack(_ABSENT)], _HEADER_BYTES + _WORD.size * (first + int(place)))
    if last and last + _WORD.size + int.from_bytes(_read(file.fd, _WORD.size, last), "little") > file.start + taken:
        raise ArenaError(_damaged("a record is where there should be none"))  # the next one would be written over it
    has_room = file.budget - taken > _SPARE * file.budget
    _write(file.fd, [_COUNTS.pack(taken, records, frozen and not has_room)], _COUNTS_AT)


def _damaged(what: str) -> str:
    return f"this file is damaged: {what}. Remove it, or give another path or name"


def _start_of_records(keys: int) -> int:
    return _aligned(_HEADER_BYTES + _WORD.size * keys, mmap.PAGESIZE)


def _read(fd: int, size: int, offset: int) -> bytes:
    """Reads all of it, as far as the file goes."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    return data + _read(fd, size - len(data), offset + len(data))  # the system gives at most 2 GiB at once


def _write(fd: int, parts: Sequence[Any], offset: int) -> None:
    """Writes all of it, also where the system takes it in pieces."""
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


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
