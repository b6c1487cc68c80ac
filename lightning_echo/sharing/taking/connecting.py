"""How a training comes to a reader: it attaches to the one of its name, or starts one. When that dies, it attaches to the next.

A thread of its own waits for the end of the reader, and attaches to the next one at once, however much there is still to be taken
from the windows before. So a reader that follows a dead one hears of all its trainings within a moment, and
keeps for each what it needs.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from lightning_echo.log import LOGGER
from lightning_echo.sharing.folder import FileLock, socket_of, starter_lock_of
from lightning_echo.sharing.reader.process import Payload
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.sharing.starting import ReaderError, start_reader
from lightning_echo.sharing.window import Window
from lightning_echo.sharing.wire import Gone, check_peer, new_socket, receive, send

__all__ = ["Connector", "Group", "Link", "Place", "SharedDataDiffers", "Succession"]


_BETWEEN_TRIES_SECONDS = 0.05
_MOST_START_SECONDS = 60.0  # a reader that is being started is waited for so long at the end of a training
_SAY_AFTER_SECONDS = 3.0  # a longer wait is worth a line


class SharedDataDiffers(ValueError):
    """Another training has other data under the same name."""


class Group(NamedTuple):
    """The ranks of a training, which are one to the reader.

    Attributes:
        name: The same on all ranks.
        ranks: Number of them.
        pass_items: Items of a pass of the reader; 0 for one rank.
    """

    name: str
    ranks: int
    pass_items: int = 0

    @classmethod
    def of_one(cls) -> Group:
        """Returns that of a training that has one rank."""
        return cls(uuid.uuid4().hex, 1)

    def round_of(self, item: int) -> int:
        """Returns the first item of the round of an item: each rank takes one item of a round. Of one rank, each is a round.

        What is left at the end of a pass, fewer items than ranks, counts for the round before: not all ranks take it.

        Example:
            >>> group = Group("g", ranks=2, pass_items=7)
            >>> [group.round_of(item) for item in range(9)]
            [0, 0, 2, 2, 4, 4, 4, 7, 7]
        """
        if self.ranks == 1:
            return item
        number, slot = divmod(item, self.pass_items)
        last = max(self.pass_items // self.ranks - 1, 0)
        return number * self.pass_items + min(slot // self.ranks, last) * self.ranks


class Place(NamedTuple):
    """Where a training has entered.

    Attributes:
        item: The item that it goes on from.
        others: How many trainings are at work beside it.
        is_late: Whether it is another place than it would have had alone.
        batch_size: The batch size of the reader's loader; None if it has none.
    """

    item: int
    others: int
    is_late: bool
    batch_size: int | None = None


class Link(NamedTuple):
    """A connection to a reader, and its window.

    Attributes:
        connection: The connection.
        pidfd: Tells when the reader's process ends; -1 where it lies in another PID namespace.
        window: The window.
        place: Where this training has entered.
    """

    connection: socket.socket
    pidfd: int
    window: Window
    place: Place

    def wait_for_end(self) -> None:
        """Waits until the reader is gone, or until this side hangs up."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        if self.pidfd >= 0:
            poll.register(self.pidfd, select.POLLIN)
        poll.poll()

    def hang_up(self) -> None:
        """Ends the connection, also where forked children hold the socket open."""
        with suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of all of it."""
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.window.close()


class Connector:
    """Attaches a training to the reader of a name, and starts one if there is none.

    Args:
        config: The options of sharing.
        payload: Returns what a reader needs, if this training has to start one.
        data_print: What is compared of the data.
        group: The ranks of this training.
        label: This training, for people; empty: its program and process.
    """

    def __init__(
        self, config: ShareConfig, payload: Callable[[], Payload], data_print: dict[str, str], group: Group, label: str = ""
    ) -> None:
        self._config, self._payload, self._print, self._group = config, payload, data_print, group
        self._label = label or f"{os.path.basename(sys.argv[0] or 'python')} (process {os.getpid()})"

    def connect(self, wish: int | None, *, goes_on: bool, expected: int = 0, is_over: Callable[[], bool] = lambda: False) -> Link:
        """Returns a connection to a reader; starts one if there is none and nobody else does.

        Args:
            wish: The item to go on from; None: the start.
            goes_on: Whether this training was there already, with a reader that has died.
            expected: How many trainings that one had.
            is_over: Whether this training has ended meanwhile.

        Raises:
            SharedDataDiffers: The reader has other data.
            ReaderError: No reader could begin.
        """
        lock = FileLock(starter_lock_of(self._config.name))
        while True:
            found = self._connected()
            if found is None and lock.try_to_hold():
                with lock:
                    found = self._connected()
                    if found is None:
                        payload = self._payload()
                        payload.options["expected"] = expected
                        start_reader(self._config.name, payload)
                        continue
            if found is not None:
                connection, pidfd = found
                try:
                    window, place = self._introduced(connection, wish, goes_on)
                except BaseException as error:
                    connection.close()
                    if pidfd >= 0:
                        os.close(pidfd)
                    if not isinstance(error, Gone):  # it ended, or died, before it answered
                        raise
                else:
                    return Link(connection, pidfd, window, place)
            if is_over():
                raise ReaderError("the training has ended")
            time.sleep(_BETWEEN_TRIES_SECONDS)

    def _connected(self) -> tuple[socket.socket, int] | None:
        """Returns a connection to a living reader and its pidfd; None if there is no reader."""
        connection = new_socket()
        try:
            connection.connect(socket_of(self._config.name))
            pid = check_peer(connection)
            return connection, os.pidfd_open(pid) if pid else -1
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):  # the last: forked children hold its socket
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise

    def _introduced(self, connection: socket.socket, wish: int | None, goes_on: bool) -> tuple[Window, Place]:
        """Says who comes, and waits for a place."""
        config = self._config
        hello = {
            "label": self._label,
            "behind": config.behind,
            "join": config.join,
            "wait_for": 1 if goes_on else config.wait_for,
            "wish": wish,
            "goes_on": goes_on,
            "group": self._group.name,
            "ranks": self._group.ranks,
            "print": self._print,
        }
        send(connection, {"hello": hello})
        connection.settimeout(_SAY_AFTER_SECONDS)
        try:
            message, descriptors = receive(connection)
        except TimeoutError:
            what = "the reader of another node, or " if config.cluster else ""
            LOGGER.info("share=%r: waits for %sother trainings (wait_for=%d)", config.name, what, config.wait_for)
            connection.settimeout(None)
            message, descriptors = receive(connection)
        if "refused" in message:
            raise SharedDataDiffers(
                f"share={config.name!r} is the name of other data: {message['refused']}. Trainings that share must have the same "
                "data set, sampler and transforms; give another name for other data"
            )
        welcome = message["welcome"]
        connection.setblocking(False)
        place = Place(welcome["place"], welcome["others"], welcome["is_late"], welcome["batch_size"])
        return Window(descriptors[0], can_write=False), place


class Succession:
    """A thread that waits until a reader is gone, then attaches to the next one, and so on.

    Args:
        link: The connection to the reader.
        succeed: Returns the connection to the reader that follows the one of a given connection.
    """

    def __init__(self, link: Link, succeed: Callable[[Link, Callable[[], bool]], Link]) -> None:
        self._succeed = succeed
        self._links: deque[Link] = deque()  # to the readers that followed, the oldest first
        self._latest = link
        self._failure: BaseException | None = None
        self._is_over = False
        self._lock = threading.Lock()  # of the latest link and of whether all is over
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_echo-succession", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            link = self._latest
            link.wait_for_end()
            if self._is_over:
                return
            try:
                following = self._succeed(link, lambda: self._is_over)
            except BaseException as error:  # handed on to the training
                with self._lock:
                    self._failure = error
                    self._news.set()
                return
            with self._lock:
                self._links.append(following)
                self._latest = following
                self._news.set()
                if self._is_over:
                    following.hang_up()

    def following(self, within: float) -> Link | None:
        """Returns the connection to the next reader; None while this one lives, or the next one is not there yet.

        Args:
            within: Seconds to wait.

        Raises:
            ReaderError: There will be no next one.
        """
        self._news.wait(within)
        if self._links:
            return self._links[0]
        if self._failure is None:
            return None
        if isinstance(self._failure, ReaderError):
            raise self._failure
        raise ReaderError(f"no other reader could begin: {self._failure}") from self._failure

    def go_over(self) -> None:
        """Notes that the connection that `following` has returned is in use now."""
        with self._lock:
            self._links.popleft()
            if not self._links and self._failure is None:
                self._news.clear()

    def end(self) -> None:
        """Ends it, leaves the reader, and closes the connections that nobody has used."""
        with self._lock:
            self._is_over = True
            self._latest.hang_up()
        self._thread.join(timeout=_MOST_START_SECONDS)
        for link in self._links:
            link.hang_up()
            link.close()
