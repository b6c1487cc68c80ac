"""`Arena`: an append-only store of bytes that the processes of a node share. What is in it never moves and never changes.

Nothing is evicted. When the budget is used up, or memory or the disk is running short, the arena is frozen: it takes nothing
more, and what it holds stays until the job ends. A named one stays on its disk, and may take more when the next job has looked it
over.

A writer takes the lock, claims the key, reserves space and gives the lock back. Then it writes the record, and last the index
word. If the writer is killed in between, the reserved space is lost, and the key stays claimed (in a named file, until the next
job looks it over). Nothing that others read changes,
and the kernel releases the lock. Readers take no lock, because an index word that is an offset never changes again.

``arena_file.py`` explains where the bytes are, in memory or on a disk, and what the locks are.

Source: Mohan et al. 2021, arXiv 2007.06775, section 4.1 (MinIO: items, once cached, are never replaced).
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_echo.caching.arena_file import (
    ABSENT,
    ALIGNMENT,
    CLAIMED,
    SPARE,
    WORD_BYTES,
    ArenaCounts,
    ArenaError,
    aligned,
    formatted,
    have,
    leave,
    new_file,
    open_of_process,
    open_own,
)
from lightning_echo.caching.free_memory import free_memory_bytes

__all__ = ["Arena", "ArenaAddress"]

_GROWTH_STEP_BYTES = 64 * 2**20  # free memory is asked for before each of these
_FULL_ERRORS = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}


class ArenaAddress(NamedTuple):
    """Where other processes of a machine find an arena.

    Attributes:
        pid: A process that has it.
        fd: The descriptor of that process.
        token: Random bytes in the arena. The process may have ended, and its number may belong to another one.
    """

    pid: int
    fd: int
    token: bytes


class Arena:
    """Records by key, from key 0 to key ``keys - 1``, shared by all processes that have the arena.

    It can be sent to worker processes, forked or spawned, and to other processes of the same user on this machine
    (`Arena.address`).

    Args:
        fd: A descriptor of a file that `create` or `create_file` has made. This object closes it.
        reserve_bytes: Memory that must stay free. If less is free, the arena is frozen.
        looks_over: Whether the file is looked over, if no other process has it.

    Attributes:
        shortage: Why this process has frozen the arena before it was full; empty if it has not done so.

    Example:
        >>> arena = Arena.create(keys=10, budget_bytes=2**20)
        >>> arena.put(3, [b"some ", b"bytes"]), arena.put(3, [b"others"])
        (True, False)
        >>> bytes(arena.get(3)), arena.get(4), arena.counts.records
        (b'some bytes', None, 1)
    """

    def __init__(self, fd: int, *, reserve_bytes: int = 0, looks_over: bool = False) -> None:
        self._reserve, self.shortage = reserve_bytes, ""
        self._file, key = have(fd, looks_over=looks_over)
        weakref.finalize(self, leave, key)

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
        """Makes an arena in a file without a name, on the disk of a folder. The file is gone when no process has it any more.

        Raises:
            OSError: The folder does not exist or cannot be written, or there is no space for the index (8 bytes per key).
        """
        fd, temporary = new_file(folder)
        if temporary is not None:
            os.unlink(temporary)
        return cls(formatted(fd, keys, budget_bytes, on_disk=True))

    @classmethod
    def open_file(cls, path: str) -> Arena:
        """Opens the arena in a file. If no other process has it, it is looked over first.

        Raises:
            OSError: The file cannot be opened.
            ArenaError: The file is no arena, is damaged, or other users may have written into it.
        """
        return cls(open_own(path), looks_over=True)

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
        """What was noted when the arena was made."""
        return self._file.note

    @property
    def counts(self) -> ArenaCounts:
        """What the arena holds now."""
        return self._file.counts

    @property
    def is_in_memory(self) -> bool:
        """Whether the records are in memory, and not on a disk."""
        return self._file.in_memory

    def __contains__(self, key: int) -> bool:
        return self._file.words[key] > CLAIMED

    def get(self, key: int) -> memoryview | bytes | None:
        """Returns the record of a key; None if there is none.

        From memory it is a view, which must not be kept. From a file it is bytes. Bytes that the file has lost are missing.
        """
        file = self._file
        offset = file.words[key]
        if offset <= CLAIMED:
            return None
        return file.record_at(offset)

    def lengths_of(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the number of bytes of the record of each key.

        It is -2 if there is no record, and -1 if the record is being written or its writer was killed.

        Args:
            keys: The keys. A number below 0 is no key.

        Example:
            >>> arena = Arena.create(keys=10, budget_bytes=2**20)
            >>> arena.put(3, [b"some ", b"bytes"])
            True
            >>> arena.lengths_of(np.array([3, 4, -1])).tolist()
            [10, -2, -2]
        """
        words = self._file.words
        index = np.frombuffer(words, np.uint64) if isinstance(words, memoryview) else None
        offsets = index[keys] if index is not None else np.array([words[key] if key >= 0 else ABSENT for key in keys.tolist()])
        lengths = np.where((offsets == ABSENT) | (keys < 0), -2, -1).astype(np.int64)
        for place in np.flatnonzero((offsets > CLAIMED) & (keys >= 0)).tolist():
            lengths[place] = len(self._file.record_at(int(offsets[place])))
        return lengths

    # ------------------------------------------------------------------ adding

    def put(self, key: int, parts: Sequence[Any]) -> bool:
        """Adds a record, if there is none yet and there is room.

        Args:
            key: Its key.
            parts: Its bytes, in pieces.

        Returns:
            Whether it was added.
        """
        if self._file.words[key] != ABSENT or self.counts.is_frozen:
            return False
        size = sum(memoryview(part).nbytes for part in parts)
        try:
            offset = self._file.locked(lambda: self._reserve_space(key, WORD_BYTES + size))
            if offset is None:
                return False
            self._file.write_record(offset, size, parts)
            self._file.locked(lambda: self._show(key, offset))
        except OSError as error:
            if error.errno not in _FULL_ERRORS:
                raise
            shortage = f"no more can be written: {error.strerror}"
            with suppress(OSError):  # it is written over, but some file systems need room for that
                shortage = shortage if self.freeze() else ""
            self.shortage = self.shortage or shortage
            return False
        return True

    def _show(self, key: int, offset: int) -> None:
        """Lets others find a record that is written. The caller has the lock."""
        self._file.set_word(key, offset)
        self._change_counts(records=1)

    def freeze(self) -> bool:
        """Freezes the arena, so that nothing is added any more. Returns False if it was frozen before."""
        return self._file.locked(self._freeze)

    def _freeze(self) -> bool:
        was_frozen = self.counts.is_frozen
        self._change_counts(freezes=True)
        return not was_frozen

    def _reserve_space(self, key: int, size: int) -> int | None:
        """Claims a key, and returns where its record is to be written; None if the key is taken or there is no room.

        The caller has the lock.
        """
        file = self._file
        if file.words[key] != ABSENT:
            return None
        taken, frozen = self.counts.bytes, self.counts.is_frozen
        end = aligned(taken + size, ALIGNMENT)
        if frozen:
            return None
        if end > file.budget or (file.in_memory and not self._may_grow(taken, end)):
            if end <= file.budget:
                self.shortage = "memory is running short"
            if end <= file.budget or file.budget - taken <= SPARE * file.budget:
                self._change_counts(freezes=True)
            return None
        file.set_word(key, CLAIMED)
        self._change_counts(taken=end - taken)
        return file.start + taken

    def _may_grow(self, taken: int, end: int) -> bool:
        """Whether enough memory is free for the next step of growth. Past a container's limit the kernel kills processes."""
        if taken and taken // _GROWTH_STEP_BYTES == end // _GROWTH_STEP_BYTES:
            return True
        free = free_memory_bytes()
        return free is None or free - max(_GROWTH_STEP_BYTES, end - taken) >= self._reserve

    def add_lookups(self, hits: int, misses: int) -> None:
        """Counts lookups, for all processes."""
        self._file.locked(lambda: self._add_lookups(hits, misses))

    def _add_lookups(self, hits: int, misses: int) -> None:
        before = self._file.lookups
        self._file.lookups = before[0] + hits, before[1] + misses

    @property
    def lookups(self) -> tuple[int, int]:
        """Hits and misses that were counted by `add_lookups`, of all processes."""
        return self._file.lookups

    def _change_counts(self, *, taken: int = 0, records: int = 0, freezes: bool = False) -> None:
        """Changes the counts. The caller has the lock."""
        now = self.counts
        self._file.counts = ArenaCounts(now.bytes + taken, now.records + records, now.is_frozen or freezes)

    # ------------------------------------------------------------------ other processes

    @property
    def address(self) -> ArenaAddress:
        """Where other processes of this user and machine find it while this process lives."""
        return ArenaAddress(os.getpid(), self._file.fd, self._file.token)

    @classmethod
    def attach(cls, address: ArenaAddress, *, reserve_bytes: int = 0) -> Arena:
        """Opens the arena that another process has, in memory or in a file.

        Raises:
            OSError: The process is not there, or not to be seen from here (another container).
            ArenaError: What is there is not this arena: another process has the number now.
        """
        arena = cls(open_of_process(address.pid, address.fd), reserve_bytes=reserve_bytes)
        if arena._file.token != address.token:
            raise ArenaError(f"process {address.pid} has another cache there")
        return arena

    def __reduce__(self) -> tuple[Callable[..., Arena], tuple[Any, ...]]:
        """Returns the way to attach, and not the records. A process that is being started inherits the descriptor.

        Any other pickle may be read by several processes, or by none, so it must keep nothing open.
        """
        if get_spawning_popen() is not None:
            return _inherited, (DupFd(self._file.fd), self._reserve)
        return _attached, (self.address, self._reserve, self.keys)

    def __copy__(self) -> Arena:
        return self

    def __deepcopy__(self, memo: Any) -> Arena:
        return self


def _inherited(sent: Any, reserve_bytes: int) -> Arena:
    return Arena(sent.detach(), reserve_bytes=reserve_bytes)


def _attached(address: ArenaAddress, reserve_bytes: int, keys: int) -> Arena:
    """Returns the arena of a pickle. If that cannot be reached any more, it is one that holds nothing, so that all is read."""
    try:
        return Arena.attach(address, reserve_bytes=reserve_bytes)
    except (OSError, ArenaError) as error:
        arena = Arena.create(keys, 0)
        arena.freeze()
        arena.shortage = f"process {address.pid}, which has its examples, is gone or cannot be reached from here ({error})"
        return arena
