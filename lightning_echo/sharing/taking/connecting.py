"""How a training finds a reader: it attaches to the reader of its name, or starts one. When that dies, it attaches to the next.

A thread waits for the end of the reader, and attaches to the next reader at once, even if the old window still has examples to
take. So a reader that follows a dead one knows all its trainings within a moment, and keeps the items that each of them needs.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_echo.log import LOGGER
from lightning_echo.sharing.folder import FileLock, socket_of, sockets_elsewhere, starter_lock_of
from lightning_echo.sharing.reader.process import Payload
from lightning_echo.sharing.same_data import in_short
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.sharing.starting import ReaderError, log_tail, name_of_process, start_reader
from lightning_echo.sharing.window import Window
from lightning_echo.sharing.wire import Gone, check_peer, new_socket, receive, said_last, send

__all__ = ["Connector", "Group", "Link", "Place", "SharedDataDiffers", "Succession"]


_BETWEEN_TRIES_SECONDS = 0.05
_MOST_START_SECONDS = 60.0  # at its end, a training waits at most this long for a reader that is being started
_MOST_MUTE_SECONDS = 60.0  # a reader says every few seconds that it is there


class SharedDataDiffers(ValueError):
    """Another training has other data under the same name."""


class _Mute(Exception):
    """The reader does not answer."""


class _Over(Exception):
    """The reader has said that it ends, and that another one may follow."""


class Group(NamedTuple):
    """The ranks of a training, which count as one training for the reader.

    Attributes:
        name: A name, the same on all ranks.
        ranks: Number of ranks.
        pass_items: Items of a pass of the reader; 0 for one rank.
    """

    name: str
    ranks: int
    pass_items: int = 0

    @classmethod
    def of_one(cls) -> Group:
        """Returns the group of a training that has one rank."""
        return cls(uuid.uuid4().hex, 1)

    def round_of(self, item: int) -> int:
        """Returns the first item of the round that an item is in. Each rank takes one item of a round.

        With one rank, each item is a round. If the last items of a pass are fewer than the ranks, they belong to the round
        before. Not all ranks take such an item.

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
        item: The item at which it goes on.
        others: How many other trainings have entered before.
        is_late: Whether this is another place than it would get alone.
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
        pidfd: Tells when the reader's process ends; -1 if that is in another PID namespace.
        window: The window.
        place: Where this training has entered.
    """

    connection: socket.socket
    pidfd: int
    window: Window
    place: Place

    def why_it_ended(self) -> dict[str, Any]:
        """Returns the reader's last message, with ``failed`` and ``at``; an empty one if it was killed."""
        return said_last(self.connection, "failed")

    def wait_for_end(self) -> None:
        """Waits until the reader has ended, or until this side hangs up."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        if self.pidfd >= 0:
            poll.register(self.pidfd, select.POLLIN)
        poll.poll()

    def hang_up(self) -> None:
        """Ends the connection, even if forked children hold the socket open."""
        with suppress(OSError):  # it may be closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection, the descriptor and the window."""
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.window.close()


class Connector:
    """Attaches a training to the reader of a name, and starts one if there is none.

    Args:
        config: The options of sharing.
        payload: Returns what a new reader needs. It is called if this training must start a reader.
        data_print: What is compared of the data.
        group: The ranks of this training.
        label: A name of this training, for people; empty: its program and process.
    """

    def __init__(
        self, config: ShareConfig, payload: Callable[[], Payload], data_print: dict[str, str], group: Group, label: str = ""
    ) -> None:
        self._config, self._payload, self._print, self._group = config, payload, in_short(data_print), group
        self._label = label or name_of_process()
        self._has_started = False  # the present reader
        self._died_at: int | None = None  # where the last reader died: an item, or how many items of a stream it had delivered
        self._socket, self._mute = 0, -1  # inodes of the socket that was found last, and of one where nobody answers

    def connect(self, wish: int | None, *, goes_on: bool, expected: int = 0, is_over: Callable[[], bool] = lambda: False) -> Link:
        """Returns a connection to a reader. If there is none, and no other training starts one, this training starts one.

        Args:
            wish: The item at which to go on; None: the start.
            goes_on: Whether this training had another reader before, which has died.
            expected: How many trainings the dead reader had.
            is_over: Returns whether this training has ended in the meantime.

        Raises:
            SharedDataDiffers: The reader has other data.
            ReaderError: No reader could begin, or two were killed before they answered.
        """
        lock, killed = FileLock(starter_lock_of(self._config.name)), 0
        while True:
            found = self._connected()
            if found is None and lock.try_to_hold():
                with lock:
                    found = self._connected()
                    if found is None:
                        payload = self._payload()
                        payload.options["expected"] = expected
                        self._say_elsewhere()
                        self._has_started = True
                        killed += not start_reader(self._config.name, payload)
                        self._check_again(killed)
                        continue
            if found is not None:
                connection, pidfd = found
                try:
                    window, place = self._introduced(connection, wish, goes_on)
                except BaseException as error:
                    connection.close()
                    if pidfd >= 0:
                        os.close(pidfd)
                    if isinstance(error, _Mute):
                        LOGGER.warning(
                            "share=%r: the reader that is there does not answer for %g s: another one is started in its place",
                            self._config.name,
                            _MOST_MUTE_SECONDS,
                        )
                        self._mute = self._socket
                    elif isinstance(error, Gone):  # it was killed before it answered
                        killed += 1
                        self._check_again(killed)
                    elif not isinstance(error, _Over):
                        raise
                else:
                    return Link(connection, pidfd, window, place)
            if is_over():
                raise ReaderError("the training has ended")
            time.sleep(_BETWEEN_TRIES_SECONDS)

    def note_death(self, item: int | None, why: str) -> None:
        """Records where a reader died; None if that is not known.

        Raises:
            ReaderError: The reader before it died at the same item.
        """
        if item is not None and item == self._died_at:
            raise ReaderError(
                f"the reader of share={self._config.name!r} has died twice at item {item}{why}, and another one would do the "
                f"same. {log_tail(self._config.name)}"
            )
        self._died_at = self._died_at if item is None else item

    def _check_again(self, killed: int) -> None:
        """Raises an error if no other reader is started after so many that were killed before they answered."""
        if killed > 1 or (killed and self._has_started and not self._config.restart):
            times = "twice " if killed > 1 else ""
            raise ReaderError(
                f"the reader of share={self._config.name!r} has died {times}before it answered. {log_tail(self._config.name)}"
            )

    def _connected(self) -> tuple[socket.socket, int] | None:
        """Returns a connection to a living reader and its pidfd; None if there is no reader."""
        connection, path = new_socket(), socket_of(self._config.name)
        try:
            self._socket = os.stat(path).st_ino
            if self._socket == self._mute:  # as if it were not there
                connection.close()
                return None
            connection.connect(path)
            pid = check_peer(connection)
            return connection, os.pidfd_open(pid) if pid else -1
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):  # the last: only its forked children live
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise

    def _introduced(self, connection: socket.socket, wish: int | None, goes_on: bool) -> tuple[Window, Place]:
        """Tells the reader about this training, and waits for a place."""
        config = self._config
        hello = {
            "label": self._label,
            "behind": config.behind,
            "join": config.join,
            "wait_for": 1 if goes_on else config.wait_for,
            "wait_seconds": config.wait_seconds,
            "wish": wish,
            "goes_on": goes_on,
            "group": self._group.name,
            "ranks": self._group.ranks,
            "print": self._print,
        }
        send(connection, {"hello": hello})
        message, descriptors = self._answer(connection)
        if "refused" in message:
            raise SharedDataDiffers(
                f"share={config.name!r} is the name of other data: {message['refused']} (here, and in the reader: "
                f"{message['whose']}). Trainings that share must have the same data set, sampler, transforms and code; give "
                "another name for other data. If the difference decides nothing about examples, name it in all trainings: "
                'ShareConfig(ignore=("log_dir",))'
            )
        if "failed" in message:
            raise ReaderError(
                f"the reader of share={config.name!r} could not begin: {message['failed']}. {log_tail(config.name)}"
            )
        if "over" in message:
            LOGGER.info("share=%r: the reader that was there ends: %s", config.name, message["over"])
            self._has_started = False
            self.note_death(message.get("at"), f" ({message['over']})")
            raise _Over
        welcome = message["welcome"]
        if not self._has_started:
            LOGGER.info("share=%r: takes examples from the reader that is there: %s", config.name, welcome["whose"])
        if not goes_on and not welcome["others"] and welcome["count"] < config.wait_for:
            LOGGER.warning(
                "share=%r: the reader begins with %d of %d trainings (wait_for): no more have come within %g s (wait_seconds)",
                config.name,
                welcome["count"],
                config.wait_for,
                config.wait_seconds,
            )
        self._has_started = False
        connection.setblocking(False)
        place = Place(welcome["place"], welcome["others"], welcome["is_late"], welcome["batch_size"])
        return Window(descriptors[0], can_write=False), place

    def _answer(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """Waits for the answer to a hello. As long as the reader waits for others, it says so every few seconds."""
        connection.settimeout(_MOST_MUTE_SECONDS)
        has_said = False
        while True:
            try:
                message, descriptors = receive(connection)
            except TimeoutError:
                raise _Mute from None
            if "waits" not in message:
                return message, descriptors
            if not has_said:
                has_said, config = True, self._config
                what = "the reader of another node, or " if config.cluster else ""
                LOGGER.info("share=%r: waits for %sother trainings (wait_for=%d)", config.name, what, config.wait_for)

    def _say_elsewhere(self) -> None:
        """Says that there is another reader of this name, which this training does not find."""
        name = self._config.name
        for path in sockets_elsewhere(name):
            with new_socket() as connection, suppress(OSError):  # the reader of this socket has died, or is another user's
                connection.connect(path)
                LOGGER.warning(
                    "share=%r: there is a reader of this name in %s (process %d), but this training looks in %s, and starts its "
                    "own. Give all trainings the same XDG_RUNTIME_DIR, or the same LIGHTNING_ECHO_SHARED",
                    name,
                    os.path.dirname(path),
                    check_peer(connection),
                    os.path.dirname(socket_of(name)),
                )


class Succession:
    """A thread that waits until a reader is gone, then attaches to the next one, and so on.

    Args:
        link: The connection to the reader.
        succeed: Gets the connection to a dead reader, and returns the connection to the reader that follows.
    """

    def __init__(self, link: Link, succeed: Callable[[Link, Callable[[], bool]], Link]) -> None:
        self._succeed = succeed
        self._links: deque[Link] = deque()  # to the readers that followed, the oldest first
        self._latest = link
        self._failure: BaseException | None = None
        self._is_over = False
        self._lock = threading.Lock()  # for the latest link, and for whether all is over
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
            except BaseException as error:  # the training gets it
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
        """Returns the connection to the next reader; None if the present one lives, or if the next one is not there yet.

        Args:
            within: Seconds to wait.

        Raises:
            ReaderError: No reader follows.
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
        """Ends the thread, leaves the reader, and closes the connections that were not used."""
        with self._lock:
            self._is_over = True
            self._latest.hang_up()
        self._thread.join(timeout=_MOST_START_SECONDS)
        for link in self._links:
            link.hang_up()
            link.close()
