"""What the actor runs. It is on the node of the reader that reads, and gives its examples to the relays of the other nodes.

For each relay it has a *feed*, which is a training for the reader. A feed is a thread that copies example after example out of
the window, a few megabytes ahead of what its relay has asked for. This file does not import Ray: Ray calls it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_echo.sharing.cluster.chunk import Chunk, Piece
from lightning_echo.sharing.reader.process import Payload
from lightning_echo.sharing.same_data import difference
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.sharing.starting import ReaderError
from lightning_echo.sharing.taking.attachment import Attachment
from lightning_echo.sharing.window import CHUNK

__all__ = ["MOST_AHEAD_BYTES", "MOST_SILENT_SECONDS", "Handing"]

MOST_AHEAD_BYTES = 8 * 2**20
"""A feed copies so much ahead, and a chunk has as much, or one example."""

MOST_SILENT_SECONDS = 30.0
"""A relay that says nothing for so long is gone, or cut off. One that follows it on its node needs less than that to come."""

_MOST_WAIT_SECONDS = 0.5  # if there is nothing, a relay gets its answer after this time
_BETWEEN_LOOKS_SECONDS = 0.5


class Handing:
    """The actor beside a reader.

    Args:
        name: The name that is shared.
        node: The node on which this runs.
        where: The name of the node, for people.
        data_print: What is compared of the reader's data.
    """

    def __init__(self, name: str, node: str, where: str, data_print: dict[str, str]) -> None:
        self._name, self._node, self._where, self._print = name, node, where, data_print
        self._feeds: dict[str, _Feed] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="lightning_echo-watch", daemon=True).start()

    def meet(self, data_print: dict[str, str]) -> dict[str, str]:
        """Tells a reader which node reads, and how its data differs from the data here; empty if it does not differ."""
        return {"node": self._node, "where": self._where, "differs": difference(data_print, self._print)}

    def enter(self, relay: str, label: str, item: int, goes_on: bool, join: str) -> None:
        """Lets a relay in. If a relay came from the same node before, it has died, and is dropped.

        Args:
            relay: A name that no other relay has.
            label: Its node, for people.
            item: The item at which it would go on.
            goes_on: Whether its trainings had another reader before, which has died.
            join: As in `ShareConfig`.
        """
        config = ShareConfig(self._name, join=join, restart=False)
        attachment = Attachment(config, self._no_other, self._print, tell_every=CHUNK, label=label, holds=True)
        with self._lock:
            before = [name for name, other in self._feeds.items() if other.label == label]

            def replace() -> None:
                for name in before:
                    self.leave(name)

            self._feeds[relay] = _Feed(attachment, label, item, goes_on, replace)

    def _no_other(self) -> Payload:
        """Raises an error if there is no reader. The actor starts none, since that would not be on the node of its trainings."""
        raise ReaderError(f"the reader of share={self._name!r} on {self._where} has ended")

    def take(self, relay: str, needed: int) -> Any:
        """Returns the next examples of a relay as an array (see `Chunk`). It is empty if there are none within a moment.

        Args:
            relay: The relay.
            needed: All items before this one are in the relay's window. The reader keeps the items from this one on, so that
                another relay can follow this one.

        Raises:
            ReaderError: The reader has ended, or the relay is not known.
        """
        feed = self._feed(relay)
        feed.attachment.let_go(needed)
        return feed.chunk(_MOST_WAIT_SECONDS).to_array()

    def stay(self, relay: str, need_nanoseconds: int) -> int:
        """Notes that a relay is there. Returns how many other nodes get examples of this reader.

        Args:
            relay: The relay.
            need_nanoseconds: As in `Attachment`, for the slowest training of the relay's node.

        Raises:
            ReaderError: The relay is not known.
        """
        attachment = self._feed(relay).attachment
        attachment.need_nanoseconds = need_nanoseconds
        relays = len(self._feeds)
        return relays - 1 + (attachment.trainings > relays)

    def leave(self, relay: str) -> None:
        """Drops a relay."""
        with self._lock:
            feed = self._feeds.pop(relay, None)
        if feed is not None:
            feed.stop()

    def _feed(self, relay: str) -> _Feed:
        with self._lock:
            feed = self._feeds.get(relay)
            if feed is None:
                raise ReaderError(f"{self._where} has let this node go, since it was silent for {MOST_SILENT_SECONDS:.0f} s")
            feed.heard = time.monotonic()
            return feed

    def _watch(self) -> None:
        """Drops relays that send nothing any more, so that the reader does not wait for them."""
        while True:
            time.sleep(_BETWEEN_LOOKS_SECONDS)
            now = time.monotonic()
            for relay in [relay for relay, feed in list(self._feeds.items()) if now - feed.heard > MOST_SILENT_SECONDS]:
                self.leave(relay)


class _Feed:
    """The examples for one relay.

    Args:
        attachment: The feed's connection to the reader. It is closed with the feed.
        label: The relay's node.
        item: The item at which the relay would go on.
        goes_on: See `Handing.enter`.
        when_entered: Called when the reader has let this feed in. Until then, the feed before it must hold the items that it
            needs.

    Attributes:
        attachment: As given.
        label: As given.
        heard: When the relay last sent something, by the monotonic clock.
    """

    def __init__(self, attachment: Attachment, label: str, item: int, goes_on: bool, when_entered: Callable[[], None]) -> None:
        self.attachment, self.label, self.heard = attachment, label, time.monotonic()
        self._pieces: deque[Piece] = deque()
        self._bytes = self._first = 0
        self._nanoseconds = self._cpu_nanoseconds = 0  # per example, see `Chunk`
        self._is_over = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(item, goes_on, when_entered), name="lightning_echo-feed", daemon=True
        )
        self._thread.start()

    def _run(self, item: int, goes_on: bool, when_entered: Callable[[], None]) -> None:
        try:
            item = self._first = self.attachment.enter(item, goes_on=goes_on).item
            when_entered()
            while self._put(Piece(*self.attachment.taken(item))):
                if item % CHUNK == 0:
                    self._nanoseconds = int(1e9 * self.attachment.seconds_per_example)
                    self._cpu_nanoseconds = int(1e9 * self.attachment.cpu_seconds_per_example)
                item += 1
        except BaseException as error:  # the relay gets it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self.attachment.close()

    def _put(self, piece: Piece) -> bool:
        """Puts an example into the feed as soon as there is room. Returns whether the feed goes on."""
        with self._changed:
            self._wait(lambda: self._is_over or self._bytes < MOST_AHEAD_BYTES)
            self._pieces.append(piece)
            self._bytes += len(piece.data)
            self._changed.notify_all()
            return not self._is_over

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Waits until a condition is true. `stop` ends the wait, for example if the relay is silent for too long."""
        while not holds():
            self._changed.wait(_BETWEEN_LOOKS_SECONDS)

    def chunk(self, within: float) -> Chunk:
        """Returns the examples that are ready. If there are none, waits for some.

        Args:
            within: Longest time to wait, in seconds.

        Raises:
            ReaderError: The reader has ended, and all its examples were given to the relay.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._failure is not None, within)
            pieces, self._pieces, self._bytes = list(self._pieces), deque(), 0
            first, self._first = self._first, self._first + len(pieces)
            self._changed.notify_all()
            if not pieces and self._failure is not None:
                raise ReaderError(str(self._failure)) from self._failure
        return Chunk(first, pieces, self._nanoseconds, self._cpu_nanoseconds)

    def stop(self) -> None:
        """Ends the thread, which leaves the reader."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self.attachment.stop()
