"""A relay: it takes the place of the workers in a reader that gets its examples from another node.

It has two threads. One asks for chunk after chunk, and writes a chunk into the window while the next one is on its way. The other
tells the other node every second that this node is there, and gets the number of other nodes. The window begins with the first
example that comes. Trainings are let in only then, so they lose nothing if the other node is lost before.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from lightning_echo.sharing.cluster.chunk import Chunk
from lightning_echo.sharing.packing import pack_error
from lightning_echo.sharing.reader.server import Reads, Start
from lightning_echo.sharing.window import Closed, Ring, TooLargeError, Window

__all__ = ["Far", "FarLost", "Relay"]

_STAY_SECONDS = 1.0
_MOST_END_SECONDS = 10.0


class FarLost(RuntimeError):
    """The node that reads is gone, or does not answer."""


class Far(Protocol):
    """The node that reads, as a relay sees it. Each call ends within seconds. Calls that return a value may raise `FarLost`."""

    def enter(self, relay: str, start: Start) -> None:
        """Lets a relay in. See `Handing.enter`."""

    def ask(self, relay: str, needed: int) -> Any:
        """Asks for the next chunk, and returns the argument for `chunk`. All items before ``needed`` are in the window."""

    def chunk(self, asked: Any) -> Chunk:
        """Returns the chunk that was asked for."""

    def stay(self, relay: str, need_nanoseconds: int) -> int:
        """Tells the other node that a relay is there. Returns the number of other nodes."""

    def leave(self, relay: str) -> None:
        """Tells the other node that a relay ends, and does not wait for an answer."""


class Relay:
    """Begins to read for the server of a reader, if another node reads (`Elsewhere` in ``reader/server.py``).

    Args:
        far: The node that reads.
        window_bytes: Memory for examples, in bytes.
        say: Called with messages for the log.
    """

    def __init__(self, far: Far, window_bytes: int, say: Callable[[str], None]) -> None:
        self._far, self._window_bytes, self._say = far, window_bytes, say
        self._relaying: _Relaying | None = None

    @property
    def nodes(self) -> int:
        """How many other nodes get the same examples now; 0 if that is not known yet, or if this node reads for itself."""
        return 0 if self._relaying is None else self._relaying.nodes

    def begin(self, start: Start, read_here: Callable[[], Reads], when_lost: Callable[[BaseException], None]) -> Reads | None:
        """Returns the object that puts examples into a window; None if the other node has not answered yet.

        Args:
            start: Where to begin.
            read_here: Begins to read on this node.
            when_lost: Called with the error if the other node is lost, in another thread.
        """
        if self._relaying is None:
            self._relaying = _Relaying(self._far, start, self._window_bytes, when_lost)
        found = self._relaying.window_if_begun
        if found is None:
            return None
        if start.goes_on and found.begin > start.item:
            self._say(
                f"this node needs item {start.item}, and the other one has items from {found.begin} on: it reads for itself"
            )
            self.leave()
            return read_here()
        return self._relaying

    def leave(self) -> None:
        """Leaves the other node."""
        if self._relaying is not None:
            self._relaying.close()
            self._relaying = None


class _Relaying:
    """Puts examples of another node into a window.

    Args:
        far: The node that reads.
        start: Where to begin.
        window_bytes: Memory for examples, in bytes.
        when_lost: See `Relay.begin`.

    Attributes:
        nodes: How many other nodes get the same examples.
    """

    def __init__(self, far: Far, start: Start, window_bytes: int, when_lost: Callable[[BaseException], None]) -> None:
        self._far, self._start, self._window_bytes, self._when_lost = far, start, window_bytes, when_lost
        self._name, self.nodes = uuid.uuid4().hex, 0
        self._window: Window | None = None
        self._over, self._is_closed = threading.Event(), False
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name="lightning_echo-relay", daemon=True)
            for run in (self._pump, self._stay)
        ]
        self._has_entered = threading.Event()
        for thread in self._threads:
            thread.start()

    @property
    def window_if_begun(self) -> Window | None:
        """The window; None before the first example."""
        return self._window

    @property
    def window(self) -> Window:
        """The window, once it has begun."""
        assert self._window is not None
        return self._window

    def lost_at(self) -> int | None:
        """Returns None: there are no workers here."""
        return None

    def close(self) -> None:
        """Ends the threads, and leaves the other node. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._over.set()
        if self._window is not None:
            self._window.close_for_writers()
        self._far.leave(self._name)
        for thread in self._threads:
            thread.join(timeout=_MOST_END_SECONDS)
        if self._window is not None:
            self._window.close()

    # ------------------------------------------------------------------ in the threads

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Closed:
            pass
        except BaseException as error:  # the thread that serves the trainings gets it
            if not self._over.is_set():
                self._over.set()
                self._when_lost(error)

    def _stay(self) -> None:
        self._has_entered.wait()
        while not self._over.is_set():
            need = 0 if self._window is None else self._window.slowest_need_nanoseconds
            self.nodes = self._far.stay(self._name, need)
            self._over.wait(_STAY_SECONDS)

    def _pump(self) -> None:
        try:
            self._far.enter(self._name, self._start)
        finally:
            self._has_entered.set()
        chunk = self._next(self._far.ask(self._name, 0), 0)
        self.nodes = self._far.stay(self._name, 0)  # trainings that enter now are told how many others there are
        window = Window.create(self._window_bytes, 1, chunk.first)
        ring, self._window = Ring(window, 0), window
        while True:
            asked, end = self._far.ask(self._name, chunk.first), chunk.first + len(chunk.pieces)
            _put(ring, chunk)
            chunk = self._next(asked, end)
            if chunk.first != end:
                raise FarLost(f"examples are missing: after {end - 1} came {chunk.first}")

    def _next(self, asked: Any, needed: int) -> Chunk:
        """Returns the next chunk that has examples."""
        while not self._over.is_set():
            chunk = self._far.chunk(asked)
            if chunk.pieces:
                return chunk
            asked = self._far.ask(self._name, needed)
        raise Closed


def _put(ring: Ring, chunk: Chunk) -> None:
    """Writes the examples of a chunk as soon as there is room."""
    for item, (kind, data) in enumerate(chunk.pieces, chunk.first):
        try:
            ring.put(item, kind, [data], len(data))
        except TooLargeError as error:  # the window of the other node is larger than this one
            packed = pack_error(error)
            ring.put(item, packed.kind, packed.parts, packed.size)
    count = len(chunk.pieces)
    ring.note_prepared(count, count * chunk.nanoseconds, count * chunk.cpu_nanoseconds)
