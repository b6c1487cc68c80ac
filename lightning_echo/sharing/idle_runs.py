"""Loaders of one process that share under one name: one that is idle does not hold up the next one.

The reader waits for each training. But a loop that has ended may leave its loader in scope, and no other process tells the reader
that nobody takes from it any more. So when the next loader of that name must start, the idle ones are closed. If one of them is
iterated again, it starts again where it stopped.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, NamedTuple, Protocol

__all__ = ["begins"]


class Run(Protocol):
    """What is asked of an `EchoRun`: see there."""

    delivery: Any

    @property
    def is_running(self) -> bool: ...

    def close(self) -> None: ...


class _Use(NamedTuple):
    """The epoch of a run that was begun last, and where."""

    name: str
    process: int
    thread: threading.Thread
    epoch: weakref.ref[Any]

    def is_idle(self, run: Run) -> bool:
        """Whether no batch is taken in this epoch any more, and the thread that took them does something else now."""
        epoch = self.epoch()
        is_over = epoch is None or epoch.finished or run.delivery.progress.over
        return is_over and (self.thread is threading.current_thread() or not self.thread.is_alive())


_uses: weakref.WeakKeyDictionary[Run, _Use] = weakref.WeakKeyDictionary()


def begins(run: Run, name: str, epoch: Any) -> None:
    """Notes that a run begins an epoch in this thread. If it must start, the idle runs of the same name are closed first.

    Args:
        run: The run.
        name: The name that it shares.
        epoch: The iterator of the epoch.
    """
    use = _Use(name, os.getpid(), threading.current_thread(), weakref.ref(epoch))
    if not run.is_running:
        for other, last in list(_uses.items()):
            if other is not run and last[:2] == use[:2] and last.is_idle(other):
                other.close()
    _uses[run] = use
