"""What a worker of the reader runs first. It makes sure that the worker ends with the reader, and closes the reader's sockets."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.context
import os
import signal
from collections.abc import Callable, Sequence

__all__ = ["WorkerStart"]

_PR_SET_PDEATHSIG = 1
_ForkProcess = getattr(multiprocessing.context, "ForkProcess", ())  # which not every system has


class WorkerStart:
    """A ``worker_init_fn``: it does what a worker of the reader needs, then calls the user's own.

    * It lets the worker end with the reader. A worker of torch's loader looks whether its parent has changed. But if the reader
      dies while the worker begins, the worker does not notice this.
    * It closes the descriptors of the reader's sockets that a forked worker has inherited. When the reader has died, no training
      may find them open.

    Args:
        sockets: Descriptors of the sockets.
        users: The user's ``worker_init_fn``, or None.
    """

    def __init__(self, sockets: Sequence[int], users: Callable[[int], None] | None) -> None:
        self._sockets = [(descriptor, os.fstat(descriptor).st_ino) for descriptor in sockets]
        self._users = users

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if _has_lost_reader():  # before the call above
            os._exit(1)
        for descriptor, inode in self._sockets:
            _close_if(descriptor, inode)
        if self._users is not None:
            self._users(worker)


def _has_lost_reader() -> bool:
    """Whether the process that has started this one is dead.

    ``is_alive`` looks at a pipe. A worker that was forked later has inherited the other end of that pipe, and holds it open. But
    the system knows the parent of a forked worker: it is the reader, and another process after the reader is dead.
    """
    reader = multiprocessing.parent_process()
    if reader is None or not reader.is_alive():
        return True
    is_forked = isinstance(multiprocessing.current_process(), _ForkProcess)
    return is_forked and os.getppid() != reader.pid


def _close_if(descriptor: int, inode: int) -> None:
    """Closes a descriptor that this process has inherited. In a spawned process the number is another descriptor's, or free."""
    try:
        if os.fstat(descriptor).st_ino == inode:
            os.close(descriptor)
    except OSError:  # there is no such descriptor
        pass
