"""Files that workers read, and how to have them read from the storage again.

``posix_fadvise(DONTNEED)`` drops a file's pages from the page cache; it needs no root. What is opened by other means than
Python's (a database, a memory map of a library in C) is not seen here, and a network file system may keep a cache of its own.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable

__all__ = ["OpenedFiles", "drop_pages"]


class OpenedFiles:
    """Notes which regular files this process opens for reading, from now on: for a worker, which ends with the phase.

    An audit hook cannot be taken away again, so that it must not be set in a process that goes on.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        sys.addaudithook(self._note)

    def take(self) -> list[str]:
        """Those opened since the last time."""
        paths, self._paths = self._paths, {}
        return [path for path in paths if _is_data(path)]

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open" and args and isinstance(args[0], str | bytes | os.PathLike):
            self._paths[os.path.abspath(os.fsdecode(args[0]))] = None


def drop_pages(paths: Iterable[str]) -> int:
    """Drops the files' pages from the page cache; of how many files that was done. Where the system cannot, none."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    dropped = 0
    for path in paths:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:  # gone meanwhile, or no longer ours to read
            continue
        try:
            os.fsync(file)  # pages that are not written yet would stay; a file that was only read has none
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            dropped += 1
        finally:
            os.close(file)
    return dropped


def _is_data(path: str) -> bool:
    """Whether it is a regular file, and none of Python's own."""
    if path.endswith((".py", ".pyc", ".so")) or path.startswith(("/proc/", "/sys/", "/dev/")):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
