"""The training's side: it finds a reader or starts one, and takes example after example out of the window."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_echo.cache.reads import Lookups
from lightning_echo.log import LOGGER
from lightning_echo.share.config import (
    Gone,
    ShareConfig,
    StarterLock,
    check_peer,
    new_socket,
    receive,
    said_last,
    send,
    shared_folder,
    socket_of,
)
from lightning_echo.share.parts import Items, sealed
from lightning_echo.share.places import Agreement
from lightning_echo.share.process import Payload, ReaderError, log_tail, name_of_process, start_reader
from lightning_echo.share.same_data import CACHE, in_short
from lightning_echo.share.window import HELD, CacheState, Window, unpack

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
            "workers": self._workers,
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


# ---------------------------------------------------------------------- attachment
# When the reader dies, this process still has its window, with the examples in it. The training takes them. At the same time it
# attaches to the next reader (`Attachment._succeed`):
#
# * Data that is read by index: each reader gives the same example at the same item. The training asks the next reader for the
#   first item that the window lacks. A training that the reader waits for, and that comes in time, loses nothing and gets nothing
#   twice.
# * A stream, or whole batches: a reader cannot begin within a pass. The training ends with a `ReaderError`. With
#   ``share.restart="pass"`` it continues with the next pass (`SharedStream.follow`).
# * With ``share.restart=False`` (True by default), or if a reader dies where one before it died, the training ends with a
#   `ReaderError`.
#
# The ranks of a training must miss the same items. So they ask the reader before they take a round of items, and it gives all
# ranks the same answer (``server.py``).

_LOOK_SECONDS = 0.001  # time between two looks of a training that waits for an example
_SAY_AFTER_SECONDS = 3.0  # a longer wait is logged
_SAY_AGAIN_SECONDS = 10.0
_LEAST_PACE = 0.5  # of the examples that are read. A training that takes fewer is warned
_AGAIN_SECONDS = 0.1  # time between two looks, during the wait for an answer, whether the training ends


class Missed(Exception):
    """The item is not there any more: the reader has not waited for this training. ``low`` is the first one that may be there.

    Both count the members of the training's part (`Items`).
    """

    def __init__(self, item: int, low: int) -> None:
        super().__init__(item, low)
        self.item, self.low = item, low


class NextReader(Exception):
    """A new reader has followed a dead one, and its items are others. The argument is its first item."""


class Stopped(Exception):
    """The training ends, and waits for nothing any more."""


@dataclass
class Waited:
    """Seconds that a training has waited for examples."""

    for_reading: float = 0.0  # until examples were read and prepared
    for_peers: float = 0.0  # while the reader waited for another training
    by_peer: dict[str, float] = field(default_factory=dict)  # the same, for each of the other trainings by name

    def after(self, before: Waited) -> Waited:
        names = {*before.by_peer, *self.by_peer}
        by_peer = {name: before.by_peer.get(name, 0.0) + self.by_peer.get(name, 0.0) for name in names}
        return Waited(before.for_reading + self.for_reading, before.for_peers + self.for_peers, by_peer)


class Attachment:
    """A training's connection to the reader of a name.

    Its methods count the *members* of the training's part, which are all ``items`` if the training takes all. What the reader and
    the window count is named an item of the reader.

    Args:
        tell_every: This training reports its place to the reader after this number of items, or before.
        follow: For items that another reader does not give again. It gets the window of the dead reader, and the first item that
            this training has not taken, and returns the first item to ask the next reader for. It may raise a `ReaderError`.
        workers: How many workers this process would have for itself, see `ShareConfig`. 0: it asks for none.
        holds: Whether the reader keeps items, even if they were taken, from ``held_from`` on. If that is raised, the reader gets
            it when the next item is taken or waited for.
    """

    def __init__(
        self,
        config: ShareConfig,
        payload: Callable[[bool], Payload],
        data_fingerprint: dict[str, str],
        *,
        tell_every: int = 1,
        group: Group | None = None,
        follow: Callable[[Window, int], int] | None = None,
        label: str = "",
        workers: int = 0,
        holds: bool = False,
        items: Items | None = None,
    ) -> None:
        self.items = items or Items()
        self._config, self._tell_every, self.group, self._follow = config, max(tell_every, 1), group or Group.of_one(), follow
        self._connector = Connector(config, payload, data_fingerprint, self.group, label, self.items, workers)
        self._link: Link | None = None
        self._succession: Succession | None = None
        self._said_read = 0  # examples that the reader reads in a pass, as of the last message about the pace
        self._next = self._told = 0  # the first item that is still needed, and its last value that the reader got
        self.held_from = 0 if holds else None
        self._missed_to = 0  # items before this one were not taken
        self._agreed = 0  # with several ranks: they all take the items below this one
        self._last = -1  # with several ranks: the last item that was taken
        self._lead = 0  # with several ranks: so many positions after the item that was asked for is the last one that was taken
        self._again: tuple[int, int, bytes] | None = None  # the item that was taken last, if it may be asked for again
        self._kept: dict[int, list[tuple[int, bytes]]] = {}  # items that will be asked for later
        self._cache = CacheState()  # when this training left
        self._asked = self._hits = 0  # items that were asked for in order, and those of them that the reader's cache had
        self.is_stopped, self._pid = False, os.getpid()  # stopped: a `take` that waits in another thread ends
        self.waited = Waited()
        self.saved_cpu_seconds = 0.0  # of reading that the other trainings paid for
        self.need_nanoseconds = 0  # per example, without waiting and without echoing. The reader gets it with the next place
        self.missed = 0  # examples that other trainings had, and not this rank
        self.read_again = 0  # examples that the reader has read again for this rank, without those that its cache had

    def enter(self, wish: int | None, *, goes_on: bool = False) -> Place:
        """Attaches to the reader. ``goes_on``: whether this training had another one before, on another node, which has died."""
        items = self.items
        link = self._connector.connect(None if wish is None else items.item(wish), goes_on=goes_on)
        self._link = link
        self._next = self._told = items.member_from(link.place.item)
        self._succession = Succession(link, self._succeed)
        self._say_pace()
        return link.place._replace(item=self._next, there=items.member_from(link.place.there))

    @property
    def trainings(self) -> int:
        return 0 if self._link is None else self._link.window.trainings

    @property
    def cache(self) -> CacheState:
        """The contents of the reader's cache; after this training has left, as they were then."""
        return self._cache if self._link is None else self._link.window.cache

    @property
    def most_factor(self) -> float | None:
        """The largest factor with which this training takes fresh examples as fast as they come; None if no other one shares."""
        if self.trainings < 2 or not self.need_nanoseconds:
            return None
        surplus = self.seconds_per_example * 1e9 / self.need_nanoseconds
        return max(math.floor(100 * surplus) / 100, 1.0)

    @property
    def seconds_per_example(self) -> float:
        """Seconds between two examples, as the reader or a slower training that it waits for needs them; 0 if not known."""
        if self._link is None:
            return 0.0
        window, share = self._link.window_of(self.items.item(self._next)), self.items.share
        need = window.slowest_need_nanoseconds / share
        return max(window.seconds_per_example / self._pace, need / 1e9 if need > self.need_nanoseconds else 0.0)

    @property
    def _pace(self) -> float:
        """The share of the examples that the reader reads which this training takes."""
        if self.items.part is None or self._link is None:
            return 1.0
        read = self._link.window_of(self.items.item(self._next)).read_in_pass
        return min(len(self.items.part.indices) / read, 1.0) if read else 1.0

    @property
    def cpu_seconds_per_example(self) -> float:
        """Processor time in seconds that the reader takes for an example; 0 if not known."""
        return 0.0 if self._link is None else self._link.window.cpu_seconds_per_example

    @property
    def lookups(self) -> Lookups:
        """Which of the items that were asked for in order the reader's cache had."""
        return Lookups(self._hits, self._asked - self._hits)

    def keep(self, items: Iterable[int]) -> None:
        """Takes items that come before those asked for in order, and keeps them, each as often as it will be asked for."""
        for item, times in sorted(Counter(items).items()):
            kind, data = self.taken(item)
            self._kept[item] = [(kind, bytes(data))] * times

    def take(self, item: int) -> Any:
        """Returns the example of an item as soon as it is there. Items must be asked for in order."""
        if (kept := self._kept.get(item)) is not None:
            kind, again = kept.pop()
            if not kept:
                del self._kept[item]
            return unpack(kind & ~HELD, bytearray(again))
        if item >= self._next:
            kind, data = self.taken(item)
        elif self._again is not None and self._again[0] == item:  # the last slots of a pass may repeat the item before them
            kind, data = self._again[1], bytearray(self._again[2])
        else:
            raise RuntimeError(f"item {item} is asked for again, and the training is at {self._next}")
        self._asked += 1
        self._hits += kind // HELD
        return unpack(kind & ~HELD, data)

    def taken(self, item: int) -> tuple[int, bytearray]:
        """Returns kind and bytes of an item as soon as it is there. Raises the errors of `take`, and `NextReader`."""
        assert self._link is not None  # entered
        if self.group.ranks > 1:
            return self._taken_by_all(item)
        at = self.items.item(item)
        found = self._copy(at)
        while found is None:
            self._wait_for(item)
            found = self._copy(at)
        self._next = item + 1
        if self._next - self._told >= self._tell_every:
            self._tell(self._next)
        return found

    def _taken_by_all(self, item: int) -> tuple[int, bytearray]:
        """Does the same as `taken` for one of several ranks, which take or miss whole rounds together."""
        assert self._link is not None
        self._agree(self.group.round_of(item))
        group = self.group
        wanted = item if item > self._last else group.own_from(self._last + 1, item)  # else it would come twice
        found = self._copy(self.items.item(wanted))
        while found is None:
            try:
                self._wait_for(wanted)
            except Missed as missed:
                if item >= self._agreed:
                    raise
                # This process was stopped for a while, and the other ranks have taken theirs: later items take their place.
                wanted = group.own_from(max(missed.low, wanted + 1), item)
            found = self._copy(self.items.item(wanted))
        self._again = item, found[0], bytes(found[1])
        self._next, self._last = item + 1, wanted
        lead, before = group.position_of(wanted) - group.position_of(item), self._lead
        self.missed, self._lead = self.missed + max(lead - before, 0), lead
        if item + self.group.ranks >= self._agreed:
            self._tell(self._agreed)  # this was the last item that the ranks have agreed on
        elif self._next - self._told >= self._tell_every:
            self._tell(self._next)
        return found

    def _copy(self, at: int) -> tuple[int, bytearray] | None:
        """Returns kind and bytes of an item of the reader; None if it is not there."""
        link = self._link
        assert link is not None
        if not link.again or at >= link.place.there:
            return link.window.copy(at)
        found = link.again[0].copy(at)
        if found is not None and not found[0] & HELD:
            self.read_again += 1
        return found

    def note_missed(self, count: int) -> None:
        """Counts examples that this rank does not ask for, since they are gone: those of them that it has not had."""
        had = min(self._lead, count)
        self._lead -= had
        self.missed += count - had

    # ------------------------------------------------------------------ waiting

    def _agree(self, item: int) -> None:
        """Waits until the ranks agree on the round that begins with an item. Raises `Missed` if all continue at a later item."""
        assert self._link is not None
        if item < self._agreed:
            return
        item_of, end = self.items.item, self.group.round_of(item + self._tell_every)
        ask = {"round": item_of(item), "end": item_of(end), "need": self.need_nanoseconds}
        poll = select.poll()
        poll.register(self._link.connection, select.POLLIN)
        try:
            send(self._link.connection, {"ask": ask})
            while not poll.poll(1e3 * _AGAIN_SECONDS):
                if self.is_stopped:
                    raise Stopped("the training ends, and waits for nothing any more")
            answer = receive(self._link.connection)[0]
        except (Gone, OSError):
            answer = {"failed": "killed"}
        if "failed" in answer:
            answer = self._agreed_without_reader(ask["round"], ask["end"])
        else:
            self._note_told(item)
        if "jump" in answer:
            raise self._missed(item, self.items.member_from(int(answer["jump"])))
        self._agreed = self.items.member_from(int(answer["until"]))

    def _agreed_without_reader(self, asked: int, end: int) -> dict[str, Any]:
        """Returns what the dead reader has answered the other ranks, which it has noted in its window, or would have answered."""
        assert self._link is not None
        low, noted = self._link.window_of(asked).low, self._link.window.agreement(self.group.name)
        if noted is None and asked < low:
            raise ReaderError(
                f"the reader of share={self._config.name!r} has died, and this rank does not know which examples the other ranks "
                "have missed. Resume the training from its last checkpoint"
            )
        is_jump, to = Agreement(*noted or ()).answer(asked, end, low, 0.0)
        return {"jump" if is_jump else "until": to}

    def _wait_for(self, item: int) -> None:
        """Waits until an item is there, or until that is impossible."""
        assert self._link is not None
        say_at = time.perf_counter() + _SAY_AFTER_SECONDS
        while not self.arrives(item):
            if (now := time.perf_counter()) > say_at:
                say_at, at = now + _SAY_AGAIN_SECONDS, self.items.item(item)
                is_blocked = self._link.window_of(at).is_blocked(at)
                LOGGER.info("share=%r: waits for %s", self._config.name, self._what(at, is_blocked))

    def has(self, item: int) -> bool:
        """Returns whether an item is there."""
        at = self.items.item(item)
        return self._link is not None and self._link.window_of(at).has(at)

    def arrives(self, item: int, *, waits: bool = True) -> bool:
        """Returns whether an item is there; if not, after a moment. Raises the errors of `taken` if it cannot come any more.

        ``waits``: whether the training waits for it, so that the moment counts as `waited`.
        """
        assert self._link is not None
        at = self.items.item(item)
        window = self._link.window_of(at)
        is_gone = window.low > at  # must be read first: an item that is there now may be gone a moment later
        if window.has(at):
            return True
        if is_gone:
            raise self._missed(item, max(self.items.member_from(window.low), self._next))
        if self.is_stopped:
            raise Stopped("the training ends, and waits for nothing any more")
        self._tell(item)  # what is held may have changed since
        now, is_blocked, peer = time.perf_counter(), window.is_blocked(at), window.slowest_label
        self._look(item)
        passed = time.perf_counter() - now if waits else 0.0
        if not is_blocked:
            self.waited.for_reading += passed
        elif waits:
            self.waited.for_peers += passed
            self.waited.by_peer[peer] = self.waited.by_peer.get(peer, 0.0) + passed
        return False

    def _what(self, item: int, is_blocked: bool) -> str:
        """Returns what this training waits for, for people. ``item`` is one of the reader."""
        assert self._link is not None
        window = self._link.window_of(item)
        if is_blocked:
            return f"{window.slowest_label or 'another training'}, which is slower"
        place, read = self._link.place, max(window.last_written + 1, window.begin)
        if self.items.item(self._next) > place.item or not place.is_late or read >= item:
            return "examples to be read"
        return f"the next pass: {item - read:,} examples of this one come first"

    def _look(self, item: int) -> None:
        """Waits for a moment. If there is a next reader, changes to it."""
        assert self._link is not None  # entered
        assert self._succession is not None
        link, at = self._succession.following(_LOOK_SECONDS), self.items.item(item)
        if link is None or self._link.window_of(at).has(at):  # workers of the old one may have put it there just now
            return
        gone = self._link
        self._succession.go_over()
        place = self.items.member_from(link.place.item)
        self._link, self._told, self._agreed = link, place, 0
        gone.close()
        if self._follow is not None:
            self._next = place
            raise NextReader(place)
        if self.group.ranks > 1:
            self._agree(self.group.round_of(item))  # if the ranks miss items, all miss the same
        elif place > item:
            raise self._missed(item, place)

    def _tell(self, item: int) -> None:
        """Reports to the reader that all items before this one are not needed any more."""
        item = self.group.round_of(item if self.held_from is None else min(item, self.held_from))
        if item <= self._told or self._link is None:
            return
        try:
            send(self._link.connection, {"at": self.items.item(item), "need": self.need_nanoseconds})
        except (Gone, OSError):  # the thread notices this, too. A reader that is very busy gets it with the next item
            return
        self._note_told(item)

    def _note_told(self, item: int) -> None:
        """Notes that the reader knows that all items before this one are not needed any more."""
        assert self._link is not None
        window = self._link.window_of(self.items.item(max(item - 1, 0)))
        takers = window.taken_in_pass / window.read_in_pass if window.read_in_pass else self.trainings  # of an example
        taken = max(item - max(self._told, self._missed_to), 0)
        self.saved_cpu_seconds += taken * self.cpu_seconds_per_example * (1 - 1 / max(takers, 1)) / self.group.ranks
        self._told = max(item, self._told)
        if self._link.again and self.items.item(item) >= self._link.place.there:
            self._link.again.pop().close()  # all is taken: its memory becomes free
        if self._link.window.read_in_pass != self._said_read:
            self._say_pace()

    def _say_pace(self) -> None:
        """Says at which pace this training gets its part, if it takes one."""
        assert self._link is not None
        self._said_read, name = self._link.window.read_in_pass, self._config.name
        if self.items.part is None or not self._said_read:
            return
        size = len(self.items.part.indices)
        pace = min(size / self._said_read, 1.0)
        LOGGER.log(
            logging.INFO if pace >= _LEAST_PACE else logging.WARNING,
            "share=%r: this training takes %s of the %s examples of a pass, and the reader reads %s for all: it gets %.2f of the "
            "examples that are read%s",
            name,
            f"{size:,}",
            f"{self.items.part.base_length:,}",
            f"{self._said_read:,}",
            pace,
            "" if pace >= _LEAST_PACE else f". Alone its passes would take {pace:.2f} of the time: leave share out of it",
        )

    def _missed(self, item: int, low: int) -> Missed:
        self._missed_to = low
        return Missed(item, low)

    def _succeed(self, link: Link, is_over: Callable[[], bool]) -> Link:
        """Returns the connection to the reader that follows a dead one, or raises a `ReaderError`. Runs in a thread."""
        window, config = link.window, self._config
        # With ``at``; empty if the reader was killed. It says "over" if it died while it let this training enter.
        last = said_last(link.connection, "failed") or said_last(link.connection, "over")
        why = f" ({last.get('failed') or last.get('over')})" if last else ""
        if not config.restart:
            raise ReaderError(
                f"the reader of share={config.name!r} has died{why}, and share.restart is False. {log_tail(config.name)}"
            )
        item_of = self.items.item
        first = max(self._next, self.items.member_from(link.place.item))  # this thread may be ahead of the training
        lacking = first
        while link.window_of(at := item_of(lacking)).has(at):
            lacking += 1
        lacks_from = None if self.items.part is None else window.unfinished_from  # others take items that this training skips
        died_at = last.get("at")
        if died_at is None:
            died_at = lacking if self._follow is None else lacking - link.place.item
            died_at = died_at if lacks_from is None else lacks_from
        # A rank counts what any of them needs: they end together.
        needed_from = item_of(first) if self._follow is None and self.group.ranks == 1 else 0
        self._connector.note_death(died_at, why, needed_from)
        LOGGER.warning("share=%r: the reader has died; another one is started%s", config.name, why)
        wish = item_of(self.group.round_of(lacking)) if self._follow is None else self._follow(window, first)
        expected = window.trainings
        following = self._connector.connect(wish, goes_on=True, expected=expected, lacks_from=lacks_from, is_over=is_over)
        held, now = window.cache.examples, following.window.cache.examples
        if now < held:
            message = "share=%r: the cache of the reader that has died had %s examples, and that of the next one begins with %s"
            LOGGER.warning(message, config.name, f"{held:,}", f"{now:,}")
        return following

    def close(self) -> None:
        """Leaves the reader at once. Afterwards, nothing may be taken."""
        self._kept.clear()
        if os.getpid() != self._pid:  # a forked child must not end the connection of its parent
            return
        if self._link is None or self._succession is None:
            return
        self._cache = self._link.window.cache
        self._succession.end()
        self._link.hang_up()
        self._link.close()
        self._link = self._succession = None
