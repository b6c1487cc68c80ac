"""A thread that fetches ahead, so that taking a batch costs the training loop nothing; and the processes of the workers."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

from lightning_echo.data.elsewhere import noting_context
from lightning_echo.pipeline.worker import InitThatSaysWhy

# ---------------------------------------------------------------------- prefetch
# Receiving a batch from a worker takes the main process 0.5 to 0.9 ms (unpickling, opening shared memory). Freeing its memory
# takes 0.1 ms, more for larger batches. In the training thread, that time would add to every step. In a thread of its own, it
# passes while the step runs. The thread that drops an item last frees its memory. That must be this thread, so it keeps each item
# until it has fetched ``depth`` + 1 more. This costs the memory of one more item. If the consumer no longer asks, at most
# ``depth`` + 1 of the used items stay in memory.
#
# If steps take almost no time, the thread saves nothing, and changing threads for every batch costs 0.1 ms on a busy machine.
# Then the consumer fetches the item itself. The items and their order are the same in both cases. The thread refers only to the
# source, so it keeps nothing of the loader alive.
#
# A worker may die while the thread waits for it. torch's loader notices that after five seconds. If the worker died while it was
# writing, half a batch is in the pipe, and the thread waits for the rest forever. The consumer does not wait with the thread:
# when nothing has come for a while, and when it closes, it checks by itself whether something was lost.

DEPTH = 2
_SHORT_SECONDS = 0.0002  # a shorter step takes less time than the thread costs
JOIN_SECONDS = 10.0  # a source that is stuck for longer is left to its daemon thread
_LOOK_SECONDS = 0.3  # when nothing has come for this long, the consumer looks whether something can still come

NOTHING_YET: Any = object()
"""Stands for an item that has not come in time."""

_Result = tuple[Any, BaseException | None]


class Prefetcher(Iterator[Any]):
    """Iterates ``source``, at most ``depth`` items ahead of the consumer and, while the consumer is busy, in a thread.

    An exception of the source is raised here in order, in place of the item. ``lost`` returns an error if the source cannot
    continue, for example because a worker has died; else None. It gets the number of seconds that it may wait for such a loss.
    The error replaces the one that the source raises or would wait for. ``watched``: whether it may come whenever the consumer
    waits. The thread then fetches also if steps take no time.
    """

    def __init__(
        self,
        source: Iterator[Any],
        depth: int = DEPTH,
        lost: Callable[[float], BaseException | None] = lambda within: None,
        *,
        watched: bool = False,
    ) -> None:
        self._source: Iterator[Any] | None = source
        self._lost, self._watched = lost, watched
        self._depth = depth
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ahead = 0  # items that the thread was asked for and that were not yet received
        self._handed_out_at = float("-inf")  # when the last item was returned; the first step counts as a long one

    def __next__(self) -> Any:
        if self._source is None:
            raise StopIteration
        is_short = not self._watched and time.perf_counter() - self._handed_out_at < _SHORT_SECONDS
        if not is_short:
            self._ask()
        if self._ahead:
            while (item := self._item_of(self._received(_LOOK_SECONDS))) is NOTHING_YET:
                pass
            if not is_short:
                self._ask()
        else:
            item = self._item_of(_fetch(self._source))
        self._handed_out_at = time.perf_counter()
        return item

    def next_within(self, seconds: float) -> Any:
        """Returns the next item, or `NOTHING_YET` if none comes within some seconds. It is always the thread that fetches."""
        if self._source is None:
            raise StopIteration
        self._ask()
        item = self._item_of(self._received(seconds))
        if item is not NOTHING_YET:
            self._ask()
        return item

    @property
    def has_arrived(self) -> bool:
        """Whether an item was fetched that nobody has taken."""
        return not self._results.empty()

    def _received(self, seconds: float) -> _Result:
        try:
            result = self._results.get(timeout=seconds)
        except queue.Empty:
            return NOTHING_YET, self._lost(0.0)  # if something is lost, the thread can fetch nothing
        self._ahead -= 1
        return result

    def _item_of(self, result: _Result) -> Any:
        """Returns the item of a result, or raises its error, or what is known to have caused that."""
        item, failure = result
        if failure is None:
            return item
        self._source = None
        is_broken_off = isinstance(failure, (OSError, EOFError))  # a connection: the process at its other end may be dying
        lost = None if isinstance(failure, StopIteration) else self._lost(_LOOK_SECONDS if is_broken_off else 0.0)
        try:
            if lost is None or str(lost) == str(failure).strip():  # torch has raised the same error
                raise failure
            raise lost from failure
        finally:
            del failure, lost, result  # their tracebacks refer to this frame

    def close(self, within: float = JOIN_SECONDS) -> bool:
        """Ends the thread, and waits for it. Returns whether it has ended, or will by itself."""
        self._source = None
        self._stop.set()
        self._asked.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return True
        left = within
        while self._thread.is_alive() and left > 0:
            self._thread.join(min(left, _LOOK_SECONDS))
            left -= _LOOK_SECONDS
            if self._lost(0.0) is not None:
                return True  # the thread ends by itself when torch has noticed this, too
        return not self._thread.is_alive()

    def _ask(self) -> None:
        """Lets the thread fetch until it is ``depth`` items ahead."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_pump,
                args=(self._source, self._asked, self._results, self._stop, self._depth),
                name="lightning_echo-prefetch",
                daemon=True,
            )
            self._thread.start()
        for _ in range(self._depth - self._ahead):
            self._asked.put(None)
        self._ahead = self._depth


def _pump(
    source: Iterator[Any], asked: queue.SimpleQueue[None], results: queue.SimpleQueue[_Result], stop: threading.Event, depth: int
) -> None:
    """Fetches an item for each entry in ``asked``, until it is stopped."""
    # The consumer asks for an item while it uses the item `depth` before that. So it has dropped the item `depth` + 1 before.
    held: deque[Any] = deque(maxlen=depth + 1)
    while True:
        asked.get()
        if stop.is_set():
            break
        result = _fetch(source)
        failed = result[1] is not None
        if failed:
            held.clear()
        else:
            held.append(result[0])
        results.put(result)
        del result  # its batch, or the frames of its error
        if failed:
            stop.wait()
    # Last, and in this thread: torch ends the workers with the source. In the main thread, its signal handler would interrupt.
    del source


def clear_frames(error: BaseException | None) -> None:
    """Drops the objects to which the frames of an error refer. torch's frames refer to the workers, which end when dropped."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__  # torch raises from a signal handler when a worker has died


def _fetch(source: Iterator[Any]) -> _Result:
    try:
        return next(source), None
    except BaseException as error:  # passed on as it is: the consumer must get it, StopIteration included
        clear_frames(error)
        del source
        return None, error


# ---------------------------------------------------------------------- worker processes
# torch notices a dead worker in two ways: by a signal, which raises an error somewhere in the main thread, and in the thread that
# fetches, after five seconds without a batch. A training that waits for the fetching thread must notice it
# sooner, in whichever thread the training runs. So the processes are noted when a ``DataLoader`` makes them: in its
# multiprocessing context, which is one of its public arguments. As long as batches arrive, nothing looks at the processes.

_BETWEEN_LOOKS_SECONDS = 0.005


class WorkerProcesses:
    def __init__(self, worker_init_fn: Any = None) -> None:
        self.worker_init_fn = InitThatSaysWhy(worker_init_fn)
        self._processes: list[Any] = []

    def noted_by(self, context: BaseContext | None) -> BaseContext:
        """Returns a multiprocessing context (a copy; None: of the default one) whose processes are noted here."""
        return noting_context(context or multiprocessing.get_context(), self._processes)

    def lost(self, within: float = 0.0) -> RuntimeError | None:
        """Returns torch's error for a worker that has died, or None. A worker that ended with status 0 did not die.

        ``within``: seconds to wait for a worker that is dying. Its connections break before the process has ended.
        """
        number = self.first_lost(within)
        if number is None:
            return None
        process = self._processes[number]
        if process.exitcode < 0:
            how = f"is killed by signal: {signal.strsignal(-process.exitcode)}."
        else:
            how = (
                f"exited unexpectedly with exit code {process.exitcode}. Details are lost due to multiprocessing. Rerunning with "
                "num_workers=0 may give better error trace."
            )
        return RuntimeError(f"DataLoader worker (pid {process.pid}) {how}")

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

    def end(self) -> None:
        """Ends all workers, also those that are in the user's code."""
        for process in self._processes:
            process.terminate()

    def end_others(self) -> None:
        """Ends the other workers if one has died. torch alone would wait for the dead worker for a while."""
        if self.lost() is not None:
            for process in self._processes:
                process.terminate()  # a worker of torch's then ends with status 0: it does not count as another dead worker
