"""The files that workers read, and how to make the next read come from the storage again.

``posix_fadvise(DONTNEED)`` drops a file's pages from the page cache, and does not need root. If a file is not opened by Python
(but by a database, or as a memory map by a library in C), it is not noticed here. A network file system may have its own cache.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Sequence

__all__ = ["OpenedFiles", "drop_pages", "hold_data"]

_LARGE_BYTES = 2**24
_NOT_DATA = ("/proc/", "/sys/", "/dev/", os.path.join(sys.prefix, ""), os.path.join(sys.base_prefix, "lib", ""))


class OpenedFiles:
    """Notes which regular files this process opens for reading, from now on. Use it only in a worker that ends with the phase.

    An audit hook cannot be removed, so it must not be set in a process that goes on afterwards.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        sys.addaudithook(self._note)

    def take(self) -> list[str]:
        """Returns the data files opened since the last call."""
        paths, self._paths = self._paths, {}
        return [path for path in paths if _is_data(path)]

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike) and _reads(args[1], args[2]):
            self._paths[os.path.abspath(os.fsdecode(args[0]))] = None


def drop_pages(paths: Iterable[str]) -> int:
    """Drops the files' pages from the page cache.

    Returns:
        The number of files whose pages were dropped; 0 if the system cannot do it.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    dropped = 0
    for path in paths:
        try:
            with open(path, "rb", buffering=0) as file:
                os.fsync(file)  # pages that are not written yet would stay in memory; a file that was only read has none
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:  # the file is gone, may no longer be read, or its file system cannot drop pages
            continue
        dropped += 1
    return dropped


def hold_data(paths: Sequence[str], batches: int) -> bool:
    """Whether these files hold the data set, and not only labels or settings: there is a file for each batch, or large files."""
    return len(paths) >= batches or sum(map(_size_of, paths)) >= _LARGE_BYTES


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # the file is gone
        return 0


def _reads(mode: object, flags: object) -> bool:
    """Whether a file is opened for reading only."""
    if isinstance(mode, str):
        return not set(mode) & set("wax+")
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) == 0


def _is_data(path: str) -> bool:
    """Whether the path is a regular file, and not one of Python's own."""
    if path.endswith((".py", ".pyc", ".so")) or path.startswith(_NOT_DATA):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
