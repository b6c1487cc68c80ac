"""The training's side: it attaches to a reader, takes example after example out of the window, and outlives the reader.

When the reader dies, what it has published is still in the window, which this process holds. The training goes on with it. A
thread, which has waited for nothing else, attaches to the next reader meanwhile (and starts one, if nobody else does), at the
item after the last that is there. Any reader gives the same example at the same item, so nothing is lost and nothing comes
twice.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_echo.sharing.folder import FileLock, socket_of, starter_lock_of
from lightning_echo.sharing.packing import unpack
from lightning_echo.sharing.reader.process import Payload
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.sharing.starting import ReaderError, log_tail, start_reader
from lightning_echo.sharing.window import Window
from lightning_echo.sharing.wire import Gone, check_peer, new_socket, receive, send

__all__ = ["Attachment", "Group", "Missed", "NextReader", "Place", "SharedDataDiffers"]

_log = logging.getLogger("lightning_echo")

_LOOK_SECONDS = 0.001  # who waits for an example looks so often
_BETWEEN_TRIES_SECONDS = 0.05
_MOST_START_SECONDS = 60.0  # a reader that is being started is waited for so long at the end of a training
_SAY_AFTER_SECONDS = 3.0  # a longer wait is worth a line


class SharedDataDiffers(ValueError):
    """Another training has other data under the same name."""


class Missed(Exception):
    """The item is not there any more: the reader has not waited for this training."""


class NextReader(Exception):
    """Another reader has followed one whose items nobody finds again; its first item is the argument."""


class Stopped(Exception):
    """The training ends, and waits for nothing any more."""


class Group(NamedTuple):
    """The ranks of a training, which are one to the reader.

    Attributes:
        name: The same on all ranks.
        ranks: Number of them.
    """

    name: str
    ranks: int

    @classmethod
    def of_one(cls) -> Group:
        """Returns that of a training that has one rank."""
        return cls(uuid.uuid4().hex, 1)


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


class _Link(NamedTuple):
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
        """Waits until the reader is gone: it says nothing more, so whatever comes is its end."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
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


@dataclass
class Waited:
    """Seconds that a training has waited for examples.

    Attributes:
        for_reading: Until they were read and prepared.
        for_peers: While the reader waited for another training.
    """

    for_reading: float = 0.0
    for_peers: float = 0.0


class Attachment:
    """A training's connection to the reader of a name.

    Args:
        config: The options of sharing.
        payload: Returns what a reader needs, if this training has to start one.
        data_print: What is compared of the data.
        tell_every: The reader hears of this training's place after so many items at the latest.
        group: The ranks of this training.
        follow: Of items that no other reader finds again: returns from which item on to ask the next reader, given the window of
            the one that has died, and the first item that this training has not taken. It may raise a `ReaderError`.

    Attributes:
        waited: Seconds that were waited.
        saved_cpu_seconds: Processor seconds that this training did not need for reading, since others took the same examples: of
            each example, the share that falls to the others.
        need_nanoseconds: Time per example that this training takes, if it never waited and used each example once. The reader
            hears of it with the next place.
    """

    def __init__(
        self,
        config: ShareConfig,
        payload: Callable[[], Payload],
        data_print: dict[str, str],
        *,
        tell_every: int = 1,
        group: Group | None = None,
        follow: Callable[[Window, int], int] | None = None,
    ) -> None:
        self._config, self._payload, self._print = config, payload, data_print
        self._tell_every, self._group, self._follow = max(tell_every, 1), group or Group.of_one(), follow
        self._link: _Link | None = None
        self._next = self._told = 0  # the first item that is still needed, and what the reader knows of it
        self._successor: _Succession | None = None
        self._again: tuple[int, int, bytes] | None = None  # the item that was taken last, if it may be asked for again
        self._kept: dict[int, list[tuple[int, bytes]]] = {}  # items that will be asked for again, each as often as it is there
        self._is_stopped, self._pid = False, os.getpid()
        self.waited = Waited()
        self.saved_cpu_seconds = 0.0
        self.need_nanoseconds = 0

    def enter(self, wish: int | None, *, goes_on: bool = False) -> Place:
        """Attaches to the reader of the name, and starts one if there is none.

        Args:
            wish: The item to go on from; None: the start.
            goes_on: Whether this training was there already, with a reader that has died.

        Raises:
            SharedDataDiffers: The reader has other data.
            ReaderError: No reader could begin.
        """
        link = self._attached(wish, goes_on, 0, lambda: False)
        self._use(link)
        self._next = link.place.item
        return link.place

    def _use(self, link: _Link) -> None:
        """Takes examples from a window from now on."""
        self._link, self._told = link, link.place.item
        self._successor = _Succession(link, self._succeed)

    @property
    def is_waited_for(self) -> bool:
        """Whether the reader waits for this training."""
        return self._config.behind == "wait"

    @property
    def low(self) -> int:
        """The first item of which the reader says that it will not be overwritten."""
        assert self._link is not None  # entered
        return max(self._link.window.low, self._next)

    @property
    def trainings(self) -> int:
        """How many trainings the reader has; 0 without one."""
        return 0 if self._link is None else self._link.window.trainings

    @property
    def most_factor(self) -> float | None:
        """The largest factor with which fresh examples are taken as fast as they can come; None without other trainings."""
        if self.trainings < 2 or not self.need_nanoseconds:
            return None
        surplus = self.seconds_per_example * 1e9 / self.need_nanoseconds
        return max(math.floor(100 * surplus) / 100, 1.0)

    @property
    def seconds_per_example(self) -> float:
        """Time between two examples, seconds: what the reader takes, or a slower training that it waits for; 0 if not known."""
        if self._link is None:
            return 0.0
        window = self._link.window
        need = window.slowest_need_nanoseconds
        return max(window.seconds_per_example, need / 1e9 if need > self.need_nanoseconds else 0.0)

    def keep(self, items: Iterable[int]) -> None:
        """Takes items that come before those that will be asked for in order, and keeps them until they are asked for.

        Args:
            items: In any order. One that will be asked for twice is there twice.
        """
        for item, times in sorted(Counter(items).items()):
            kind, data = self.taken(item)
            self._kept[item] = [(kind, bytes(data))] * times

    def take(self, item: int) -> Any:
        """Returns the example of an item, as soon as it is there. Items must be asked for in order.

        Raises:
            Missed: It is not there any more.
            ReaderError: The reader has died, and no other one is to begin.
            Exception: What the data set has raised in the reader.
        """
        if (kept := self._kept.get(item)) is not None:
            kind, again = kept.pop()
            if not kept:
                del self._kept[item]
            return unpack(kind, bytearray(again))
        if item < self._next:
            return self._take_again(item)
        return unpack(*self.taken(item))

    def taken(self, item: int) -> tuple[int, bytearray]:
        """Returns kind and bytes of an item out of the window, as soon as it is there. The rest is as of `take`.

        Raises:
            NextReader: There is another reader, and its items are others.
        """
        assert self._link is not None  # entered
        found = self._link.window.copy(item)
        while found is None:
            self._wait_for(item)
            found = self._link.window.copy(item)
        if self._group.ranks > 1:
            self._again = item, found[0], bytes(found[1])
        self._next = item + 1
        if self._next - self._told >= self._tell_every:
            self._tell(self._next)
        return found

    def _take_again(self, item: int) -> Any:
        """Returns the example that was taken last once more: the last slots of a pass are filled up with the ones before."""
        if self._again is None or self._again[0] != item:
            raise RuntimeError(f"item {item} is asked for again, and the training is at {self._next}")
        return unpack(self._again[1], bytearray(self._again[2]))

    # ------------------------------------------------------------------ waiting

    def _wait_for(self, item: int) -> None:
        """Waits until an item is there, or until that is impossible."""
        assert self._link is not None
        self._tell(item)
        if self._has(item):
            return
        started = time.perf_counter()
        said = False
        while not self._has(item):
            if self._is_stopped:
                raise Stopped
            now = time.perf_counter()
            window = self._link.window
            is_blocked = window.is_blocked(item)
            self._look(item)
            passed = time.perf_counter() - now
            if is_blocked:
                self.waited.for_peers += passed
            else:
                self.waited.for_reading += passed
            if not said and now - started > _SAY_AFTER_SECONDS:
                said = True
                what = "another training, which is slower" if is_blocked else "examples to be read"
                _log.info("share=%r: waits for %s", self._config.name, what)

    def _has(self, item: int) -> bool:
        """Whether an item is there.

        Raises:
            Missed: It was there, and is not any more.
        """
        assert self._link is not None
        window = self._link.window
        is_gone = window.low > item  # looked at first: what is there now may be gone a moment later
        if window.has(item):
            return True
        if is_gone:
            raise Missed(item)
        return False

    def _look(self, item: int) -> None:
        """Waits for a moment, and goes over to the next reader if there is one."""
        assert self._link is not None  # entered
        assert self._successor is not None
        link = self._successor.result(_LOOK_SECONDS)
        if link is None or self._link.window.has(item):  # workers of the old one may have put it there since the thread looked
            return
        gone = self._link
        self._use(link)
        gone.close()
        if self._follow is not None:
            self._next = link.place.item
            raise NextReader(link.place.item)
        if link.place.item > item:
            raise Missed(item)

    def _tell(self, item: int) -> None:
        """Tells the reader that all items before this one are not needed any more."""
        if item <= self._told or self._link is None:
            return
        window, count = self._link.window, max(self.trainings, 1)
        saved = (item - self._told) * window.cpu_seconds_per_example * (count - 1) / count / self._group.ranks
        try:
            send(self._link.connection, {"at": item, "need": self.need_nanoseconds})
        except BlockingIOError:  # it is stopped, or very busy: it hears of it with the next one
            return
        except (Gone, OSError):  # the thread sees it, too
            return
        self._told = item
        self.saved_cpu_seconds += saved

    def _succeed(self, link: _Link, is_over: Callable[[], bool]) -> _Link:
        """Returns the connection to the reader that follows one that has died. Runs in a thread.

        Raises:
            ReaderError: There will be none.
        """
        window, config = link.window, self._config
        if not config.restart:
            raise ReaderError(
                f"the reader of share={config.name!r} has died, and share.restart is False. The end of its log:\n"
                f"{log_tail(config.name)}"
            )
        if window.last_written < window.begin:
            raise ReaderError(
                f"the reader of share={config.name!r} has died before its first example. The end of its log:\n"
                f"{log_tail(config.name)}"
            )
        _log.warning("share=%r: the reader has died; another one is started", config.name)
        if self._follow is not None:
            return self._attached(self._follow(window, self._next), False, window.trainings, is_over)
        return self._attached(window.end_from(self._next), True, window.trainings, is_over)

    # ------------------------------------------------------------------ attaching

    def _attached(self, wish: int | None, goes_on: bool, expected: int, is_over: Callable[[], bool]) -> _Link:
        """Returns a connection to a reader; starts one if there is none and nobody else does.

        Args:
            wish: The item to go on from; None: the start.
            goes_on: Whether this training was there already, with a reader that has died.
            expected: How many trainings that one had.
            is_over: Whether this training has ended meanwhile.
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
                    return _Link(connection, pidfd, window, place)
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
            "label": f"{os.path.basename(sys.argv[0] or 'python')} (process {os.getpid()})",
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
            _log.info("share=%r: waits for other trainings (wait_for=%d)", config.name, config.wait_for)
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

    def stop(self) -> None:
        """Ends a `take` that waits in another thread."""
        self._is_stopped = True

    def close(self) -> None:
        """Leaves the reader, at once. Nothing may be taken any more."""
        self._kept.clear()
        if os.getpid() != self._pid:  # a forked child does not leave for its parent
            return
        if self._link is None or self._successor is None:
            return
        self._successor.end()
        self._link.hang_up()
        self._successor.join()
        self._link.close()
        self._link = self._successor = None


class _Succession:
    """A thread that waits until a reader is gone, and then attaches to the next one.

    Args:
        link: The connection to the reader.
        succeed: Returns the connection to the next one.
    """

    def __init__(self, link: _Link, succeed: Callable[[_Link, Callable[[], bool]], _Link]) -> None:
        self._next: _Link | None = None
        self._failure: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, args=(link, succeed), name="lightning_echo-succession", daemon=True)
        self._thread.start()

    def _run(self, link: _Link, succeed: Callable[[_Link, Callable[[], bool]], _Link]) -> None:
        link.wait_for_end()
        if self._is_over:
            return
        try:
            self._next = succeed(link, lambda: self._is_over)
        except BaseException as error:  # handed on to the training
            self._failure = error

    def result(self, within: float) -> _Link | None:
        """Returns the next connection; None while the reader lives, or the next one is not there yet.

        Args:
            within: Seconds to wait.

        Raises:
            ReaderError: There will be no next one.
        """
        self._thread.join(within)
        if self._failure is not None:
            if isinstance(self._failure, ReaderError):
                raise self._failure
            raise ReaderError(f"no other reader could begin: {self._failure}") from self._failure
        return None if self._thread.is_alive() else self._next

    def end(self) -> None:
        """Lets it end when the connection does."""
        self._is_over = True

    def join(self) -> None:
        """Waits for its end, and closes a next connection that nobody has used."""
        self._thread.join(timeout=_MOST_START_SECONDS)
        if self._next is not None:
            self._next.hang_up()
            self._next.close()
