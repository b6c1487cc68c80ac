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
process.

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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from typing import Any, NamedTuple

from lightning_echo.caching.free_memory import free_memory_bytes

__all__ = ["Arena", "ArenaCounts", "ArenaError", "held_in_memory"]

_MAGIC = b"lightecho1"
_HEADER = struct.Struct("<10s?5xQQ")  # magic, whether it is on a disk, number of keys, bytes that records may take
_COUNTS = struct.Struct("<QQQ")  # bytes taken, records, whether it is frozen
_COUNTS_AT = 64
_LOOKUPS = struct.Struct("<QQ")  # hits, misses
_LOOKUPS_AT = 96
_HEADER_BYTES = 4096
_WORD = struct.Struct("<Q")
_ABSENT, _CLAIMED = 0, 1
_ALIGNMENT = 64
_GROWTH_STEP_BYTES = 64 * 2**20  # free memory is asked for before each of these
_SPARE = 0.1  # a record that does not fit is passed over if more than this share of the budget would stay empty
_FULL_ERRORS = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}


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


class _File:
    """A descriptor, its map, and the lock between threads: one in each process for each file."""

    def __init__(self, fd: int) -> None:
        self.keys: int
        self.budget: int
        magic, on_disk, self.keys, self.budget = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC:
            raise ArenaError("this file is no cache of lightning_echo, or one of another version: give another path or name")
        self.fd, self.in_memory = fd, not on_disk
        self.start = _aligned(_HEADER_BYTES + _WORD.size * self.keys, mmap.PAGESIZE)
        mapped = self.start + self.budget if self.in_memory else self.start  # what is in a file is read from it, and not mapped
        self.map = mmap.mmap(fd, mapped, mmap.MAP_SHARED, mmap.PROT_READ)
        self.view = memoryview(self.map)
        self.words = self.view[_HEADER_BYTES : _HEADER_BYTES + _WORD.size * self.keys].cast("Q")
        self.threads = threading.Lock()
        self.users = 0  # arenas of this process

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
        path: The file's path; None: it has none.
        reserve_bytes: Memory that must stay free. Below it the arena is frozen.

    Example:
        >>> arena = Arena.create(keys=10, budget_bytes=2**20)
        >>> arena.put(3, [b"some ", b"bytes"]), arena.put(3, [b"others"])
        (True, False)
        >>> bytes(arena.get(3)), arena.get(4), arena.counts.records
        (b'some bytes', None, 1)
    """

    def __init__(self, fd: int, path: str | None = None, *, reserve_bytes: int = 0) -> None:
        self._path, self._reserve = path, reserve_bytes
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with _opening:
            if (known := _open.get(key)) is None:
                try:
                    known = _open[key] = _File(fd)
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
    def create_file(cls, path: str, keys: int, budget_bytes: int) -> Arena:
        """Makes an arena in a file, which must not exist. Only this user can read it.

        Raises:
            OSError: The file exists, cannot be written, or there is no space for the index (8 bytes per key).
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return cls(_formatted(fd, keys, budget_bytes, on_disk=True), path)

    @classmethod
    def create_nameless(cls, folder: str, keys: int, budget_bytes: int) -> Arena:
        """Makes an arena on the disk of a folder, in a file that has no name: it is gone with the last process that has it.

        Raises:
            OSError: The folder does not exist or cannot be written, or there is no space for the index (8 bytes per key).
        """
        fd, path = tempfile.mkstemp(prefix=".lightning_echo-", dir=folder)
        os.unlink(path)
        return cls(_formatted(fd, keys, budget_bytes, on_disk=True))

    @classmethod
    def open_file(cls, path: str) -> Arena:
        """Opens the arena in a file.

        Raises:
            OSError: The file cannot be opened.
            ArenaError: The file is no arena, or belongs to another user.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.fstat(fd).st_uid != os.geteuid():
            os.close(fd)
            raise ArenaError(f"{path} belongs to another user, who could have written anything into it: give another path")
        return cls(fd, path)

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
    def counts(self) -> ArenaCounts:
        """What it holds now."""
        taken, records, frozen = _COUNTS.unpack_from(self._file.view, _COUNTS_AT)
        return ArenaCounts(taken, records, bool(frozen))

    def __contains__(self, key: int) -> bool:
        return self._file.words[key] > _CLAIMED

    def get(self, key: int) -> memoryview | bytes | None:
        """Returns the record of a key, None if there is none: a view that must not be kept, or bytes from a file."""
        file = self._file
        offset = file.words[key]
        if offset <= _CLAIMED:
            return None
        if file.in_memory:
            (length,) = _WORD.unpack_from(file.view, offset)
            return file.view[offset + _WORD.size : offset + _WORD.size + length]
        (length,) = _WORD.unpack(os.pread(file.fd, _WORD.size, offset))
        return os.pread(file.fd, length, offset + _WORD.size)

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
            self.freeze()
            return False
        with self._file.locked():
            _write(self._file.fd, [_WORD.pack(offset)], _HEADER_BYTES + _WORD.size * key)
            self._change_counts(records=1)
        return True

    def freeze(self) -> None:
        """Lets nothing be added any more."""
        with self._file.locked():
            self._change_counts(freezes=True)

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
        hits, misses = _LOOKUPS.unpack_from(self._file.view, _LOOKUPS_AT)
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
        if self._path is not None:
            return Arena.open_file, (self._path,)
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


def _formatted(fd: int, keys: int, budget_bytes: int, *, on_disk: bool) -> int:
    try:
        start = _aligned(_HEADER_BYTES + _WORD.size * keys, mmap.PAGESIZE)
        os.ftruncate(fd, start + budget_bytes)
        os.posix_fallocate(fd, 0, start)  # what is mapped must be there: else a look at it could kill the process
        _write(fd, [_COUNTS.pack(0, 0, False)], _COUNTS_AT)
        _write(fd, [_HEADER.pack(_MAGIC, on_disk, keys, budget_bytes)], 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


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
