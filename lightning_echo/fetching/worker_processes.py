"""The worker processes of a loader that is rebuilt here: what they run first, and which of them has died.

torch notices a dead worker in two ways: by a signal, which raises an error somewhere in the main thread, and in the thread that
fetches, after five seconds without a batch. A training that waits for the fetching thread (``prefetch.py``) must notice it
sooner, in whichever thread the training runs. So the processes are noted when a ``DataLoader`` makes them: in its multiprocessing
context, which is one of its public arguments. As long as batches arrive, nothing looks at the processes.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.context import BaseContext
from typing import Any

from lightning_echo.protecting.elsewhere import noting_context
from lightning_echo.workers.errors import InitThatSaysWhy

__all__ = ["WorkerProcesses"]

_BETWEEN_LOOKS_SECONDS = 0.005


class WorkerProcesses:
    """The processes that one ``DataLoader`` starts.

    Args:
        worker_init_fn: The function that each of them runs first, as for ``DataLoader``.
    """

    def __init__(self, worker_init_fn: Any = None) -> None:
        self.worker_init_fn = InitThatSaysWhy(worker_init_fn)
        self._processes: list[Any] = []

    def noted_by(self, context: BaseContext | None) -> BaseContext:
        """Returns a multiprocessing context whose processes are noted here.

        Args:
            context: The context to copy; None: the default context.
        """
        return noting_context(context or multiprocessing.get_context(), self._processes)

    def lost(self, within: float = 0.0) -> RuntimeError | None:
        """Returns the error that torch raises for a worker that has died, or None. A worker that ended with status 0 did not die.

        Args:
            within: Seconds to wait for a worker that is dying. Its connections break before the process has ended.
        """
        number = self.first_lost(within)
        if number is None:
            return None
        process = self._processes[number]
        return RuntimeError(f"DataLoader worker (pid {process.pid}) {_how(process.exitcode)}")

    def first_lost(self, within: float = 0.0) -> int | None:
        """Returns the number of the first worker that has died, or None. See `lost`."""
        deadline = time.monotonic() + within
        while True:
            for number, process in enumerate(self._processes):
                if process.exitcode:
                    return number
            if time.monotonic() >= deadline:
                return None
            time.sleep(_BETWEEN_LOOKS_SECONDS)

    def end_others(self) -> None:
        """Ends the other workers, if one has died. torch alone would wait for the dead worker for a while.

        A worker that is terminated by its parent ends with status 0, as torch has set it up. So it does not count as another dead
        worker.
        """
        if self.lost() is not None:
            for process in self._processes:
                process.terminate()


def _how(exitcode: int) -> str:
    """Returns how a process has ended, in torch's words."""
    if exitcode < 0:
        return f"is killed by signal: {signal.strsignal(-exitcode)}."
    return (
        f"exited unexpectedly with exit code {exitcode}. Details are lost due to multiprocessing. Rerunning with num_workers=0 "
        "may give better error trace."
    )
