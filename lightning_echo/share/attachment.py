"""The training's side: it takes example after example out of the window of its reader, or of the next one."""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_echo.cache.reads import Lookups
from lightning_echo.log import LOGGER
from lightning_echo.share.config import Gone, ShareConfig, receive, said_last, send
from lightning_echo.share.connecting import Connector, Group, Link, Place, Succession
from lightning_echo.share.packing import HELD, unpack
from lightning_echo.share.parts import Items
from lightning_echo.share.places import Agreement
from lightning_echo.share.process import Payload, ReaderError, log_tail
from lightning_echo.share.window import CacheState, Window

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
_LONG_SECONDS = 0.5  # waits for one example after the other, each longer than this, are one wait
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
        self._say_at = self._long_until = 0.0  # when the wait is logged, and until when another one belongs to it
        self.is_stopped, self._pid = False, os.getpid()  # stopped: a `take` that waits in another thread ends
        self.waited = Waited()
        self.saved_cpu_seconds = 0.0  # of reading that the other trainings paid for
        self.need_nanoseconds = 0  # per example, without waiting and without echoing. The reader gets it with the next place
        self.missed = 0  # examples that other trainings had, and not this rank
        self.read_again = 0  # examples that the reader has read again for this rank, without those that its cache had

    def begin_at(self, item: int) -> None:
        """Begins at a later item than the one at which this training has entered: ranks on other nodes have entered there."""
        self._next = max(self._next, item)

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
        at, link = self.items.item(item), self._link
        found = self._copy(at) if link.again else link.window.copy(at)  # a call less, for most
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
        began = now = time.perf_counter()
        if began >= self._long_until:
            self._say_at = began + _SAY_AFTER_SECONDS
        while not self.arrives(item):
            if (now := time.perf_counter()) > self._say_at:
                self._say_at, at = now + _SAY_AGAIN_SECONDS, self.items.item(item)
                is_blocked = self._link.window_of(at).is_blocked(at)
                LOGGER.info("share=%r: waits for %s", self._config.name, self._what(at, is_blocked))
        if now - began > _LONG_SECONDS:  # a full window has room for one more example now and then
            self._long_until = now + _LONG_SECONDS

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
        if self.group.elsewhere:  # the ranks there have another reader, and miss nothing
            raise ReaderError(
                f"share={self._config.name!r}: this rank needs item {item}, as the ranks on other nodes do, and the reader "
                f"of this node has items from {low} on. Resume the training from its last checkpoint"
            )
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
        lacking = max(first, self.items.member_from(link.window_of(item_of(first)).low))  # what is gone is missed
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
