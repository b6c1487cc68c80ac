"""The worker processes of a loader that is rebuilt here: which of them has died, as soon as somebody asks.

torch notices a dead worker in two ways: by a signal, which raises in the main thread wherever that is by then, and in the thread
that fetches, after five seconds without a batch. A training that waits for the fetching thread (prefetch.py) shall hear of it
sooner, in whichever thread it runs. So the processes are noted where a ``DataLoader`` makes them: by its multiprocessing context,
which is a public argument of it. Nothing is asked of them as long as batches arrive.
"""

from __future__ import annotations

import copy
import multiprocessing
import signal
import time
from multiprocessing.context import BaseContext
from typing import Any

__all__ = ["WorkerProcesses"]

_BETWEEN_LOOKS = 0.005


class WorkerProcesses:
    """The processes that one ``DataLoader`` has started."""

    def __init__(self) -> None:
        self._processes: list[Any] = []

    def noted_by(self, context: BaseContext | None) -> BaseContext:
        """Returns a multiprocessing context whose processes are noted here.

        Args:
            context: What it is a copy of. None: the default one.
        """
        context = context or multiprocessing.get_context()
        make: Any = context.Process  # type: ignore[attr-defined]  # each of its subclasses has one

        def process(*args: Any, **kwargs: Any) -> Any:
            self._processes.append(make(*args, **kwargs))
            return self._processes[-1]

        noting = copy.copy(context)
        vars(noting)["Process"] = process
        return noting

    def lost(self, within: float = 0.0) -> RuntimeError | None:
        """The error that torch raises for a worker that has died; None: none has. One that ended with status 0 has not died.

        Args:
            within: Seconds to wait for one that is dying: its connections break before it is dead.
        """
        deadline = time.monotonic() + within
        while True:
            for process in self._processes:
                if process.exitcode:
                    return RuntimeError(f"DataLoader worker (pid {process.pid}) {_how(process.exitcode)}")
            if time.monotonic() >= deadline:
                return None
            time.sleep(_BETWEEN_LOOKS)

    def end_others(self) -> None:
        """Ends those that live where one has died: who would end them by torch's means may wait for the dead one for a while.

        A worker of torch's that is terminated by its parent ends with status 0, so that nobody takes it for another dead one.
        """
        if self.lost() is not None:
            for process in self._processes:
                process.terminate()


def _how(exitcode: int) -> str:
    """How a process has ended."""
    if exitcode < 0:
        return f"is killed by signal: {signal.strsignal(-exitcode)}."
    return (
        f"exited unexpectedly with exit code {exitcode}. Details are lost due to multiprocessing. Rerunning with num_workers=0 "
        "may give better error trace."
    )
