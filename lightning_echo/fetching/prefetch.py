"""A thread that fetches ahead, so that the hand-over from the workers costs the training loop nothing.

Receiving a batch from a worker takes the main process 0.5 to 0.9 ms (unpickling, opening shared memory), and giving its
memory back 0.1 ms, more for larger ones. Done by the training thread, that time adds to every step; done here, it passes
while the step runs: the thread lets go of an item after the one who asked for it did, when it has fetched the one ``depth`` +
1 later. That keeps one item more in memory, of those that were handed out ``depth`` + 1 at most where nobody asks it for
another.

Where there is no step to speak of, nothing can be gained, and changing threads for every batch costs 0.1 ms on a busy machine:
then who asks fetches itself. What is fetched, and in which order, is the same either way. The thread refers to the source alone,
so that nothing of the loader is kept alive by it.

A worker may die while the thread waits for it: torch's loader looks for that after five seconds, and one that died while it wrote
has left half a batch in the pipe, for which the thread waits for good. Who asks, or closes, does not wait with it: when nothing
has come for a while, it looks itself whether something was lost.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["DEPTH", "Prefetcher", "clear_frames"]

DEPTH = 2
_SHORT_SECONDS = 0.0002  # a step that takes less than the thread costs
_JOIN_SECONDS = 10.0  # a source that is stuck for longer is left to its daemon thread
_LOOK_SECONDS = 0.3  # so long nothing comes before it is asked whether something can still come

_Result = tuple[Any, BaseException | None]


class Prefetcher:
    """Iterates ``source``, at most ``depth`` items ahead of who asks and, while that one is busy, in a thread.

    Args:
        source: Any iterator. Its exceptions arrive in order, where the item would have.
        depth: Most items fetched and not yet asked for.
        lost: Returns an error once the source has lost what it needs to go on, else None, after so many seconds; raised in place
            of what the source makes of it, or waits for.
    """

    def __init__(
        self, source: Iterator[Any], depth: int = DEPTH, lost: Callable[[float], BaseException | None] = lambda within: None
    ) -> None:
        self._source: Iterator[Any] | None = source
        self._lost = lost
        self._depth = depth
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ahead = 0  # asked of the thread and not yet received
        self._left = float("-inf")  # when the last item was handed out; the first step counts as a long one

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self._source is None:
            raise StopIteration
        is_short = time.perf_counter() - self._left < _SHORT_SECONDS
        if not is_short:
            self._ask()
        if self._ahead:
            item, failure = self._receive()
            if not is_short:
                self._ask()
        else:
            item, failure = _fetch(self._source)
        if failure is None:
            self._left = time.perf_counter()
            return item
        self._source = None
        lost = None if isinstance(failure, StopIteration) else self._lost(_LOOK_SECONDS if _is_broken_off(failure) else 0.0)
        try:
            if lost is None or str(lost) == str(failure).strip():  # torch knows, too
                raise failure
            raise lost from failure
        finally:
            del failure, lost  # their tracebacks hold this frame

    def close(self) -> None:
        """Ends the thread; the source is let go of with it."""
        self._source = None
        self._stop.set()
        self._asked.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return
        left = _JOIN_SECONDS
        while self._thread.is_alive() and left > 0:
            self._thread.join(min(left, _LOOK_SECONDS))
            left -= _LOOK_SECONDS
            if self._lost(0.0) is not None:
                break  # it ends by itself when torch has looked, too

    def _receive(self) -> _Result:
        """What the thread has fetched, or the reason why it cannot."""
        while True:
            try:
                result = self._results.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if (lost := self._lost(0.0)) is not None:
                    return None, lost
            else:
                self._ahead -= 1
                return result

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
    source: Iterator[Any],
    asked: queue.SimpleQueue[None],
    results: queue.SimpleQueue[_Result],
    stop: threading.Event,
    depth: int,
) -> None:
    # What is asked for while one is in use comes `depth` after that one: the one before it is done with, here as there.
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
    del source  # here and last: torch ends the workers with it, and in the main thread its signal handler would interrupt that


def _is_broken_off(failure: BaseException) -> bool:
    """Whether a connection may have broken, so that who was at its other end is dying."""
    return isinstance(failure, (OSError, EOFError))


def clear_frames(error: BaseException | None) -> None:
    """Lets go of what the frames of an error refer to: torch's hold the workers, and end them wherever it is dropped.

    An error may interrupt the handling of another one (torch raises from a signal handler when a worker has died).
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _fetch(source: Iterator[Any]) -> _Result:
    try:
        return next(source), None
    except BaseException as error:  # handed on as it is: the one who asks must see it, StopIteration included
        clear_frames(error)
        del source
        return None, error
