"""How a training finds the reader of a name, or starts one; and how it attaches to the next reader when that has died."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from lightning_echo.log import LOGGER
from lightning_echo.share.config import (
    Gone,
    ShareConfig,
    StarterLock,
    check_peer,
    new_socket,
    receive,
    send,
    shared_folder,
    socket_of,
)
from lightning_echo.share.parts import Items, sealed
from lightning_echo.share.process import Payload, ReaderError, log_tail, name_of_process, start_reader
from lightning_echo.share.same_data import CACHE, in_short
from lightning_echo.share.window import Window

# ---------------------------------------------------------------------- connecting
# A training attaches to the reader of its name, or starts one. A thread waits for the end of the reader, and attaches to the next
# reader at once, even if the old window still has examples to take. So a reader that follows a dead one knows all its trainings
# within a moment, and keeps the items that each of them needs.

_BETWEEN_TRIES_SECONDS = 0.05
_MOST_START_SECONDS = 60.0  # at its end, a training waits at most this long for a reader that is being started
_MOST_MUTE_SECONDS = 60.0  # a reader reports every few seconds that it is there
_MOST_DEATHS = 2  # of readers at one item
_MOST_DEATHS_FOR_OTHERS = 4  # at an item that this training does not need: the next reader may not know yet that nobody does


class SharedDataDiffers(ValueError):
    """Another training has other data under the same name."""


def _instead(difference: str) -> str:
    """Returns what to do, in a sentence, so that trainings with such a difference can share."""
    if difference.startswith("sampler"):
        return (
            " Trainings with samplers of their own can share what is read, not what is prepared: leave share out, and give them "
            'CachedDataset(dataset, CacheConfig("8GiB", path=folder, name="train"))'
        )
    if not difference.startswith(("data set", "dataset")):
        return ""
    return (
        " If each of them takes a part of one data set, make all of it in each training, and choose the part last:\n"
        "    data = Images(all_files, transform)\n"
        "    loader = DataLoader(torch.utils.data.Subset(data, indices), shuffle=True)"
    )


class _Mute(Exception):
    """The reader does not answer."""


class _Over(Exception):
    """The reader has announced that it ends, and that another one may follow."""


class Group(NamedTuple):
    """The ranks of a training, which count as one training for the reader."""

    name: str  # the same on all ranks
    ranks: int
    pass_items: int = 0  # items of a pass of the reader; 0 for one rank
    elsewhere: int = 0  # those of the ranks that are on other nodes, and have readers there

    @classmethod
    def of_one(cls) -> Group:
        return cls(uuid.uuid4().hex, 1)

    def round_of(self, item: int) -> int:
        """Returns the first item of the round that an item is in. Each rank takes one item of a round.

        If the last items of a pass are fewer than the ranks, they belong to the round before, and not all ranks take one.

        >>> group = Group("g", ranks=2, pass_items=7)
        >>> [group.round_of(item) for item in range(9)]
        [0, 0, 2, 2, 4, 4, 4, 7, 7]
        """
        if self.ranks == 1:
            return item
        number, slot = divmod(item, self.pass_items)
        last = max(self.pass_items // self.ranks - 1, 0)
        return number * self.pass_items + min(slot // self.ranks, last) * self.ranks

    def own_from(self, item: int, of: int) -> int:
        """Returns the first item from ``item`` on that the same rank takes as item ``of``.

        >>> group = Group("g", ranks=2, pass_items=7)
        >>> [group.own_from(item, of=2) for item in range(9)]
        [0, 2, 2, 4, 4, 6, 6, 7, 9]
        """
        rank = (of - self.round_of(of)) % self.ranks
        while (item - self.round_of(item)) % self.ranks != rank:
            item += 1
        return item

    def position_of(self, item: int) -> int:
        """Returns how many items a rank takes before this one, from item 0 on."""
        number, slot = divmod(item, self.pass_items)
        return number * -(-self.pass_items // self.ranks) + slot // self.ranks


class Place(NamedTuple):
    """The place where a training has entered."""

    item: int  # at which it continues
    others: int  # trainings that have entered before
    is_late: bool  # whether this is another place than it would get alone
    batch_size: int | None = None  # of the reader's loader
    there: int = 0  # the window has what it takes from this item on. Items from its place up to this one are read again for it


class Link(NamedTuple):
    """A connection to a reader, and its window."""

    connection: socket.socket
    pidfd: int  # shows when the reader's process ends; -1 if that is in another PID namespace
    window: Window
    place: Place
    again: list[Window]  # one, with the items that are read again for this training; empty if it needs none

    def window_of(self, item: int) -> Window:
        """Returns the window that has an item of the reader."""
        return self.window if item >= self.place.there else next(iter(self.again), self.window)

    def hang_up(self) -> None:
        """Ends the connection, even if forked children hold the socket open."""
        with suppress(OSError):  # it may be closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.window.close()
        for window in self.again:
            window.close()


class Connector:
    """Attaches a training, ``label`` for people, to the reader of a name. If there is none, starts one with ``payload(follows)``.

    ``follows``: whether this training had another reader before, which has died.
    """

    def __init__(
        self,
        config: ShareConfig,
        payload: Callable[[bool], Payload],
        data_fingerprint: dict[str, str],
        group: Group,
        label: str = "",
        items: Items | None = None,
        workers: int = 0,
    ) -> None:
        self._config, self._payload, self._fingerprint, self._group = config, payload, in_short(data_fingerprint), group
        self._label, self._items, self._workers = label or name_of_process(), items or Items(), workers
        self._has_started = False  # the present reader
        self._died_at = Counter[int]()  # where readers died: an item, or how many items of a stream they had delivered
        self._socket, self._mute = 0, -1  # inodes of the socket that was found last, and of one where nobody answers

    def connect(
        self,
        wish: int | None,
        *,
        goes_on: bool,
        expected: int = 0,
        lacks_from: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Link:
        """Returns a connection to a reader. If there is none, and no other training starts one, this training starts one.

        ``wish`` is the item at which to continue; None: the start. ``goes_on``: whether this training had another reader before,
        which has died and had ``expected`` trainings. ``lacks_from`` is the first item that one of them may lack; None: this
        training knows only of its own. ``is_over`` returns whether this training has ended in the meantime.
        """
        lock, killed = StarterLock(self._config.name), 0
        while True:
            found = self._connected()
            if found is None and lock.try_to_hold():
                with lock:
                    found = self._connected()
                    if found is None:
                        payload = self._payload(goes_on)
                        payload.options["expected"] = expected
                        self._say_elsewhere()
                        self._has_started = True
                        if not start_reader(self._config.name, payload):
                            killed = self._killed_again(killed)
                        continue
            if found is not None:
                connection, pidfd = found
                try:
                    place, windows = self._introduced(connection, wish, goes_on, expected, lacks_from)
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
                        killed = self._killed_again(killed)
                    elif not isinstance(error, _Over):
                        raise
                else:
                    return Link(connection, pidfd, windows[0], place, windows[1:])
            if is_over():
                raise ReaderError("the training has ended")
            time.sleep(_BETWEEN_TRIES_SECONDS)

    def note_death(self, item: int | None, why: str, needed_from: int = 0) -> None:
        """Records where a reader died, if known. Raises a `ReaderError` if a reader before it died at the same item.

        If this training does not take that item, or needs none before item ``needed_from``, more may: those that take it end.
        """
        if item is None:
            return
        self._died_at[item] += 1
        is_needed = item >= needed_from and self._items.item(self._items.member_from(item)) == item
        if self._died_at[item] >= (_MOST_DEATHS if is_needed else _MOST_DEATHS_FOR_OTHERS):
            times = "twice" if is_needed else f"{self._died_at[item]} times"
            raise ReaderError(
                f"the reader of share={self._config.name!r} has died {times} at item {item}{why}, and another one would do the "
                f"same. {log_tail(self._config.name)}"
            )

    def _killed_again(self, killed: int) -> int:
        """Returns how many readers of this training were killed before they answered. Raises an error if no other one is started.

        One of another training does not count: it is killed with that training, if it begins just then.
        """
        if not self._has_started:
            return killed
        self._has_started = False
        if killed or not self._config.restart:
            times = "twice " if killed else ""
            raise ReaderError(
                f"the reader of share={self._config.name!r} has died {times}before it answered. {log_tail(self._config.name)}"
            )
        return killed + 1

    def _connected(self) -> tuple[socket.socket, int] | None:
        """Returns a connection to a living reader and its pidfd; None if there is no reader."""
        connection, path = new_socket(), socket_of(self._config.name)
        try:
            self._socket = os.stat(path).st_ino
            if self._socket != self._mute:  # else as if it were not there
                connection.connect(path)
                pid = check_peer(connection)
                return connection, os.pidfd_open(pid) if pid else -1
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):  # the last: only its forked children live
            pass
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    def _introduced(
        self, connection: socket.socket, wish: int | None, goes_on: bool, expected: int, lacks_from: int | None
    ) -> tuple[Place, list[Window]]:
        """Introduces this training to the reader, and waits for a place. Returns it, and the windows of a `Link`."""
        config = self._config
        hello = {
            "label": self._label,
            "behind": config.behind,
            "join": config.join,
            "late": 0.0 if config.cluster else config.late,  # other nodes would have to read again, too
            "wait_for": 1 if goes_on else config.wait_for,
            "wait_seconds": config.wait_seconds,
            "wish": wish,
            "goes_on": goes_on,
            "expected": expected,
            "lacks_from": lacks_from,
            "group": self._group.name,
            "ranks": self._group.ranks,
            "ranks_here": self._group.ranks - self._group.elsewhere,
            "workers": self._workers,
            "cluster_workers": config.cluster_range,
            "fingerprint": self._fingerprint,
        }
        part = self._items.part
        with nullcontext() if part is None else sealed(part.bits) as descriptor:
            send(connection, {"hello": hello}, () if descriptor is None else [descriptor])
        message, descriptors = self._answer(connection)
        if "refused" in message and message["refused"].startswith(f"{CACHE}: "):
            raise SharedDataDiffers(
                f"the reader of share={config.name!r} has another {message['refused']} (here, and in the reader: "
                f"{message['whose']}). It has one cache for all: give all trainings that share the same cache, or another name"
            )
        if "refused" in message:
            raise SharedDataDiffers(
                f"share={config.name!r} is the name of other data: {message['refused']} (here, and in the reader: "
                f"{message['whose']}). Trainings that share must have the same data set, sampler, transforms and code; give "
                "another name for other data. If the difference decides nothing about examples, name it in all trainings: "
                f'ShareConfig(ignore=("log_dir",)).{_instead(message["refused"])}'
            )
        if "failed" in message:
            raise ReaderError(
                f"the reader of share={config.name!r} could not begin: {message['failed']}. {log_tail(config.name)}"
            )
        if "over" in message:
            LOGGER.info("share=%r: the reader that was there ends: %s", config.name, message["over"])
            self._has_started = False
            self.note_death(message.get("at"), f" ({message['over']})", wish or 0)
            raise _Over
        welcome = message["welcome"]
        if any(config.cluster_range) and not welcome["has_cluster"]:
            LOGGER.warning(
                "share=%r: there are no workers on other machines (share.cluster_workers): the reader that is there was started "
                "by hand, and is in no cluster. Let the training start it",
                config.name,
            )
        if any(config.cluster_range) and welcome["about_cluster"] and not goes_on:
            LOGGER.warning("share=%r: %s", config.name, welcome["about_cluster"])
        if welcome["cache"] and not goes_on:
            LOGGER.info("share=%r: the reader's %s", config.name, welcome["cache"])
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
        place = Place(welcome["place"], welcome["others"], welcome["is_late"], welcome["batch_size"], welcome["there"])
        return place, [Window(descriptor, can_write=False) for descriptor in descriptors]

    def _answer(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """Waits for the answer to a hello. As long as the reader waits for others, it reports that every few seconds."""
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
        """Warns of another reader of this name, which this training does not find."""
        if os.environ.get("LIGHTNING_ECHO_SHARED"):
            return  # the folder was chosen
        name, folders = self._config.name, set()
        with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
            folders = {os.path.dirname(words[7].rstrip("\n")) for line in lines if len(words := line.split(maxsplit=7)) > 7}
        paths = [os.path.join(folder, f"{name}.sock") for folder in sorted(folders - {str(shared_folder()), ""})]
        for path in filter(os.path.exists, paths):
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
    """A thread that waits until a reader is gone, then attaches to the next one with ``succeed``, and so on."""

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
            poll = select.poll()
            poll.register(link.connection, select.POLLRDHUP)  # the reader has ended, or this side has hung up
            if link.pidfd >= 0:
                poll.register(link.pidfd, select.POLLIN)
            poll.poll()
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
        """Returns the connection to the next reader; None if there is none yet. Raises a `ReaderError` if no reader follows."""
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
