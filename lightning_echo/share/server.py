"""The reader's side of the socket: trainings come, leave or die, and it answers them.

::

    reader, a process of its own                         training: batch size, collate function and factor of its own
    order -> chunks -> workers --write--> window --copy out--> plan, live examples -> collate -> thread -> step
                          ^                  |                    |
                          +------ low <------+---- cursors <------+      over a Unix socket: JSON, never data
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from lightning_echo.log import LOGGER
from lightning_echo.pipeline.choice import choose_reading
from lightning_echo.pipeline.kinds import Indexed, Kind
from lightning_echo.share.config import Gone, WireError, amount_in, check_peer, item_in, one_of, receive, send
from lightning_echo.share.parts import bits_in, count_of, read_in_chunks
from lightning_echo.share.places import Agreement, Entry, Training, Trainings
from lightning_echo.share.reader_cache import ReaderCache
from lightning_echo.share.reading import ReadAgain, Reading, Reads
from lightning_echo.share.same_data import Unit, difference, in_short, unit_of
from lightning_echo.share.stream_reading import StreamReading
from lightning_echo.share.window import MOST_LANES
from lightning_echo.split.reading import AUTO_IN_FLIGHT
from lightning_echo.split.staged import batched

# ---------------------------------------------------------------------- server
# One thread waits for all trainings (``selectors``). When a training ends in any way, the reader notices at once: its socket
# closes, or its process ends (``pidfd``). The second also works if the training has forked children that hold the socket open.

_LOOK_SECONDS = 0.2
_MOST_FIRST_WAIT_SECONDS = 30.0  # a reader waits at least this long for its first training
_GRACE_SECONDS = 10.0  # how long it waits for the trainings of a reader that has died
_GOING_ON_SECONDS = 2.0  # the same, for the first one of them
_TELL_FIRST_SECONDS = 3.0  # then the trainings that still wait get a sign of this reader
_TELL_AGAIN_SECONDS = 10.0
_BETWEEN_ACCEPTS_SECONDS = 1.0  # if the system has no descriptor left
_MOST_TEXT = 2000  # characters


class Start(NamedTuple):
    """How the first trainings begin: at ``item``, or as ``join`` demands if other trainings have begun before."""

    item: int
    goes_on: bool  # whether they had another reader before, which has died
    join: str
    cluster_workers: tuple[int, int] = (0, 0)  # as in `Training`


class CannotBegin(RuntimeError):
    """No training can enter. The next reader of these trainings would fail, too."""


class Elsewhere(Protocol):
    """Another node, which reads and from which this reader gets its examples: ``ray.py``."""

    @property
    def nodes(self) -> int:
        """How many other nodes get the same examples."""

    def begin(self, start: Start, read_here: Callable[[], Reads], when_lost: Callable[[BaseException], None]) -> Reads | None:
        """Returns the object that puts examples into a window; None if it is not there yet."""

    def leave(self) -> None:
        """Leaves the other node."""


class Cluster(Protocol):
    """Workers on other machines, which make examples for this reader: ``ray_workers.py``."""

    def want(self, low: int, high: int) -> None:
        """Lets there be so many: ``low`` at first, up to ``high`` while the trainings wait for reading."""

    @property
    def has_settled(self) -> bool:
        """Whether it is known what the machines can do. Raises `CannotBegin` if they cannot make these examples."""

    def attend(self, reading: Reading | None) -> None:
        """Lets them work for a reading from now on; None: for none."""

    @property
    def about(self) -> str:
        """What trainings should know that come now; mostly empty."""

    def status(self) -> list[dict[str, Any]]:
        """Returns what each of them does, for people."""


@dataclass
class _Peer:
    """The other end of a connection."""

    connection: socket.socket
    pid: int
    pidfd: int = -1
    training: Training | None = None
    closed: bool = False
    tell_at: float = 0.0
    knows_place: bool = False  # whether its welcome was sent


class Server:
    """Serves the trainings of one name until all have left.

    Args:
        listener: The socket to which trainings connect. It listens already.
        kind: That of this process's copy of the loader.
        follows: Whether a reader of this name has died. If its trainings still run, they come within a moment. No other training
            enters before them, since this reader must begin where they are.
        expected: How many trainings the dead reader had. Until they are here, nothing is overwritten, for a while.
        cache: What the reader keeps of the examples that it has read; None: nothing.
        workers: As in `ShareConfig`.
        least_workers: With ``workers="sum"``, there are at least so many.
        starter: Who has started this reader, for people.
        when_over: Called when no training may come any more.
        elsewhere: Another node that reads; None: this reader reads itself.
        gather_seconds: How long this reader waits for all trainings of the dead reader before it begins. Trainings on other nodes
            need other items than those on this node.
        cluster: Workers on other machines; None: there can be none.
    """

    def __init__(
        self,
        listener: socket.socket,
        kind: Kind,
        *,
        seed: int,
        data_fingerprint: dict[str, str],
        window_bytes: int,
        linger_seconds: float,
        workers: int | str = "sum",
        least_workers: int = 0,
        in_flight: int | str = 1,
        cache: ReaderCache | None = None,
        follows: bool = False,
        expected: int = 0,
        starter: str = "serve",
        when_over: Callable[[], None] = lambda: None,
        elsewhere: Elsewhere | None = None,
        gather_seconds: float = 0.0,
        cluster: Cluster | None = None,
    ) -> None:
        self._cluster = cluster
        self._listener, self._kind, self._seed, self._fingerprint = listener, kind, seed, in_short(data_fingerprint)
        self._window_bytes, self._linger_seconds = window_bytes, linger_seconds
        self._workers, self._least_workers = workers, least_workers
        self._read: Callable[..., Reads] = StreamReading
        self._length, self._reads_chunks = 0, False  # whether chunks are read whole
        if unit_of(kind) is Unit.indexed:
            self._length, self._reads_chunks = len(kind.sampler), batched(kind.loader.dataset) is not None
            reading = choose_reading(kind, in_flight, [None] if cache is None else cache.cuts)
            self._read = partial(Reading, part=reading, in_flight=in_flight, cache=cache, follows=follows)
        elif in_flight not in (1, AUTO_IN_FLIGHT):
            choose_reading(kind, in_flight)  # raises the reason
        self._trainings = Trainings(self._length)
        size = getattr(kind.loader, "batch_size", None)
        self._batch_size = size if isinstance(size, int) else None
        self._peers: dict[int, _Peer] = {}  # by the descriptor of the connection
        self._reading: Reads | None = None
        self._again = ReadAgain(self._reads_up_to, window_bytes, self._workers_of)  # for trainings that come late
        self._selector = selectors.DefaultSelector()
        self._lost: BaseException | None = None
        self._wake_here, self._wake_there = socket.socketpair()
        self._follows, self._expected, self._when_over = follows, expected, when_over
        self._elsewhere, self._gather_seconds = elsewhere, gather_seconds
        self._starter, self._is_outdated = starter, False
        self._reads_all = False  # since trainings of a dead reader may still come
        self._begun = self._last_left = time.monotonic()
        self._had_training = False
        self._accepts_from = math.inf  # the time in seconds from which it accepts again

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serves, until the last training has left for long enough. Raises a RuntimeError if the workers cannot continue."""
        self._listener.setblocking(False)
        self._accept_again()
        self._selector.register(self._wake_here, selectors.EVENT_READ, self._hear_lost)
        try:
            while not self._is_over():
                for key, _ in self._selector.select(_LOOK_SECONDS):
                    act: Callable[[], object] = key.data
                    act()
                if time.monotonic() > self._accepts_from:
                    self._accept_again()
                self._move_low()
                if len(self._trainings.entered) < len(self._trainings.all):
                    self._let_enter_or_fail()
                    self._tell_waiting()
                self._want_workers()  # afterwards, since workers may read again for one that enters
        except Exception as error:
            # Now, because a training shows the end of the log as soon as this reader has left.
            LOGGER.error("ends\n%s", traceback.format_exc())
            self._say_why(error)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connections, then ends the workers. In this order, a training can start another reader at once."""
        self._let_nobody_come()
        self._listener.close()
        self._trainings.all.clear()
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._end_reading()
        self._selector.close()
        self._wake_here.close()
        self._wake_there.close()

    def _let_nobody_come(self) -> None:
        """Calls ``when_over``, once: the next reader may be at that place soon."""
        when_over, self._when_over = self._when_over, lambda: None
        when_over()

    def _is_over(self) -> bool:
        if self._trainings.all:
            return False
        if self._is_outdated:
            return True
        patience = self._linger_seconds if self._had_training else max(self._linger_seconds, _MOST_FIRST_WAIT_SECONDS)
        return time.monotonic() - self._last_left > patience

    def _hear_lost(self) -> None:
        assert self._lost is not None  # it is set before the socket is written to
        raise RuntimeError(f"the reader's workers cannot continue: {self._lost}") from self._lost

    def _on_lost(self, error: BaseException) -> None:
        """Called in the thread that reads."""
        self._lost = error
        self._wake_there.send(b"!")

    # ------------------------------------------------------------------ coming and going

    def _accept_again(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._accepts_from = math.inf

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # the system has no descriptor or memory left. Who comes is served later
            LOGGER.warning("a training comes, and cannot be let in yet: %s", error)
            self._selector.unregister(self._listener)
            self._accepts_from = time.monotonic() + _BETWEEN_ACCEPTS_SECONDS
            return
        try:
            pid = check_peer(connection)
        except PermissionError as error:
            LOGGER.warning("refused: %s", error)
            connection.close()
            return
        connection.setblocking(False)
        peer = _Peer(connection, pid)
        self._peers[connection.fileno()] = peer
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, peer))
        try:
            peer.pidfd = os.pidfd_open(pid) if pid else -1
        except OSError:  # it has ended already, or is in another PID namespace: its socket shows when it ends
            return
        self._selector.register(peer.pidfd, selectors.EVENT_READ, lambda: self._drop(peer))

    def _drop(self, peer: _Peer) -> None:
        if peer.closed:
            return
        peer.closed = True
        self._selector.unregister(peer.connection)
        del self._peers[peer.connection.fileno()]
        peer.connection.close()
        if peer.pidfd >= 0:
            self._selector.unregister(peer.pidfd)
            os.close(peer.pidfd)
        if peer.training is not None:
            self._last_left = time.monotonic()
            if peer.training in self._trainings.all:  # else the reader ends
                self._trainings.all.remove(peer.training)
                LOGGER.info("%s has left", peer.training.label)
                self._settle()
                self._move_low()
                if not self._trainings.all:
                    self._end_reading()  # nobody takes its items, and another node would wait for this one

    # ------------------------------------------------------------------ their messages

    def _hear(self, peer: _Peer) -> bool:
        """Answers one message. A wrong message ends its connection. Returns whether there was a message."""
        if peer.closed:
            return False
        descriptors: list[int] = []
        try:
            message, descriptors = receive(peer.connection)
            self._answer(peer, message, descriptors)
        except BlockingIOError:
            return False
        except (Gone, OSError):
            self._drop(peer)
        except (WireError, KeyError, TypeError, ValueError, AttributeError) as error:
            LOGGER.warning("process %s sent an invalid message: %s", peer.pid, error)
            self._drop(peer)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _answer(self, peer: _Peer, message: dict[str, Any], descriptors: list[int]) -> None:
        if "at" in message:
            self._move(peer, item_in(message["at"]), item_in(message.get("need", 0)))
        elif "ask" in message:
            self._agree(peer, message["ask"])
        elif "hello" in message:
            self._welcome(peer, message["hello"], descriptors)
        elif "status" in message:
            send(peer.connection, self._status())
        else:
            raise WireError(f"unknown message {str(message)[:80]}")

    def _move(self, peer: _Peer, item: int, need_nanoseconds: int) -> None:
        training = peer.training
        if training is None or training.cursor is None:
            raise WireError("a cursor of who has not entered")
        if item < (training.at or 0):
            raise WireError("a cursor that goes back")
        training.need_nanoseconds = need_nanoseconds
        if item < training.cursor:
            training.catching_up = item
        else:
            training.cursor, training.catching_up = item, None
        self._move_low()

    def _agree(self, peer: _Peer, ask: dict[str, Any]) -> None:
        training, reading = peer.training, self._reading
        if training is None or training.cursor is None or reading is None:
            raise WireError("a question of who has not entered")
        asked = item_in(ask["round"])
        self._move(peer, max(asked, training.at or 0), item_in(ask["need"]))  # it needs no earlier item
        end = item_in(ask["end"])
        agreement = self._trainings.agreements.setdefault(training.group, Agreement())
        again = self._again.get(training.group)
        low = reading.window.low if again is None or asked >= training.cursor else again.window.low
        is_jump, item = agreement.answer(asked, end, low, time.monotonic())
        reading.window.note_agreement(training.group, agreement.end, agreement.jumps, self._trainings.agreements)
        send(peer.connection, {"jump" if is_jump else "until": item})

    def _move_low(self) -> None:
        """Lets the workers overwrite items that nobody needs."""
        if self._reading is None:
            return
        self._again.move_low(self._trainings.all)
        window = self._reading.window
        slowest = self._trainings.slowest()
        nodes = 0 if self._elsewhere is None else self._elsewhere.nodes
        window.trainings, window.slowest_need_nanoseconds = self._trainings.count + nodes, self._trainings.slowest_need()
        window.slowest_label = "" if slowest is None else slowest.label
        window.taken_in_pass = round(self._length * (self._trainings.taken() + nodes))
        window.ranks = max((one.ranks for one in self._trainings.all), default=1)
        window.cache = self._reading.cache_state
        if self._are_missing(self._trainings.entered) or self._may_follow:
            return  # trainings of the dead reader still need items, and are not here yet to report it
        if self._reads_all:
            self._settle()
        self._expected = 0
        window.low = self._trainings.low(window.low, time.monotonic())

    def _are_missing(self, here: Sequence[Training]) -> bool:
        """Whether trainings of a reader that has died are not among these."""
        going_on, there = [one for one in self._trainings.all if one.goes_on], {id(one) for one in here}
        have_come = {one.group for one in going_on if id(one) in there}
        is_missing = len(have_come) < self._expected or any(id(one) not in there for one in going_on)
        return is_missing and time.monotonic() - self._begun < _GRACE_SECONDS

    @property
    def _may_follow(self) -> bool:
        """Whether trainings of a reader that has died may come of which this reader has not heard."""
        return self._follows and time.monotonic() - self._begun < _GOING_ON_SECONDS

    def _settle(self) -> None:
        """Reads from now on what the trainings want; everything, while it is not known what all of them want."""
        if self._reading is None:
            return
        bits, trainings = None, self._trainings
        if (wanted := self._reading.wanted) is not None:  # else another node reads, for others, too
            # Not for longer: what nobody wants may be what kills its reader.
            self._reads_all = self._are_missing([*trainings.entered, *trainings.ready()])
            self._reads_all |= self._may_follow and not trainings.going_on
            bits = None if self._reads_all else trainings.wanted()
            wanted.change(bits)
        count = self._length if bits is None else count_of(bits)
        self._reading.window.read_in_pass = read_in_chunks(count, self._length) if self._reads_chunks else count

    def _welcome(self, peer: _Peer, hello: dict[str, Any], descriptors: list[int]) -> None:
        if peer.training is not None:
            raise WireError("a second hello")
        theirs = hello["fingerprint"]
        if not isinstance(theirs, dict) or not all(isinstance(text, str) for text in theirs.values()):
            raise WireError("a print of another kind")
        for other in [each for each in self._peers.values() if each.training is not None]:
            while self._hear(other):  # a training that has left before this one came is not at work
                pass
        if differs := difference(theirs, self._fingerprint):
            if self._had_training and not self._trainings.all and self._linger_seconds < float("inf"):
                LOGGER.info("ends: a training of this name has other data: %s", differs)
                self._is_outdated = True  # the training starts another reader
                self._let_nobody_come()
                self._try_to_send(peer, {"over": differs[:_MOST_TEXT]})
            else:
                send(peer.connection, {"refused": differs[:_MOST_TEXT], "whose": self._who()})
            self._drop(peer)
            return
        wish, lacks_from, part = hello["wish"], hello.get("lacks_from"), None
        low, high = hello.get("cluster_workers", (0, 0))
        if len(descriptors) > 1:
            raise WireError(f"a hello may bring 1 descriptor, got {len(descriptors)}")
        if descriptors:
            part = bits_in(descriptors[0], self._length)
            if not part.any():
                raise WireError("a part without an example")
        peer.training = Training(
            pid=peer.pid,
            label=str(hello["label"])[:200],
            behind=one_of(hello["behind"], ("wait", "skip")),
            join=one_of(hello["join"], ("now", "pass")),
            late=amount_in(hello["late"]),
            wait_for=item_in(hello["wait_for"]),
            wish=None if wish is None else item_in(wish),
            goes_on=bool(hello["goes_on"]),
            group=str(hello["group"])[:100],
            ranks=item_in(hello["ranks"]),
            ranks_here=item_in(hello.get("ranks_here", hello["ranks"])),
            part=part,
            share=1.0 if part is None else count_of(part) / self._length,
            lacks_from=None if lacks_from is None else item_in(lacks_from),
            workers=item_in(hello["workers"]),
            cluster_workers=(item_in(low), item_in(high)),
            patient_until=time.monotonic() + amount_in(hello["wait_seconds"]),
        )
        peer.tell_at = time.monotonic() + _TELL_FIRST_SECONDS
        self._expected = max(self._expected, item_in(hello["expected"]))  # also if a new training has started this reader
        self._trainings.all.append(peer.training)
        self._had_training = True

    def _tell_waiting(self) -> None:
        """Reports to waiting trainings, every few seconds, that this reader is there and waits, too."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.training is not None and peer.training.cursor is None and now >= peer.tell_at:
                peer.tell_at = now + _TELL_AGAIN_SECONDS
                self._try_to_send(peer, {"waits": self._trainings.count})

    def _let_enter_or_fail(self) -> None:
        try:
            self._let_enter()
        except CannotBegin:
            raise
        except Exception as error:  # of the user's sampler, of an object that is sent to workers, of the system
            if any(each is not None and each.has_lost_worker() for each in (self._reading, *self._again.values())):
                raise  # torch raises this in the main thread whenever a worker dies, also while others are started
            raise CannotBegin(f"{type(error).__name__}: {error}") from error

    def _say_why(self, error: Exception) -> None:
        """Reports to all trainings why this reader ends."""
        if self._trainings.entered:  # they go on with the next reader. The socket stays, and tells it that it follows this one
            self._when_over = lambda: None
        self._listener.close()
        self._let_nobody_come()
        lost = [each.lost_at() for each in (self._reading, *self._again.values()) if each is not None]
        at = min((item for item in lost if item is not None), default=None)
        ends = {"failed": str(error)[:_MOST_TEXT], "at": at}
        for peer in list(self._peers.values()):
            if peer.training is not None:
                # A failure that keeps trainings from entering would keep them from the next reader, too: they end.
                has_hope = not peer.knows_place and not isinstance(error, CannotBegin)
                self._try_to_send(peer, {"over": ends["failed"], "at": at} if has_hope else ends)

    def _try_to_send(self, peer: _Peer, message: dict[str, Any]) -> None:
        with suppress(Gone, OSError):  # it has left, or does not listen
            send(peer.connection, message)

    def _let_enter(self) -> None:
        """Lets waiting trainings enter. If the reader has not begun, it begins as soon as enough of them have come."""
        trainings = self._trainings
        if not trainings.entered:
            begin, passed = trainings.begin_at(time.monotonic()), time.monotonic() - self._begun
            is_early = self._follows and passed < _GOING_ON_SECONDS and not any(one.goes_on for one in trainings.ready())
            # One that came within a pass may need much earlier items than the others.
            have_come = {one.group for one in trainings.ready() if one.goes_on}  # with all their ranks
            is_missing = len(have_come) < self._expected and passed < max(self._gather_seconds, _GOING_ON_SECONDS)
            if begin is None or is_early or is_missing or not self._begin(begin):
                return
        reading = self._reading
        assert reading is not None  # a training has entered before, or it was begun just now
        self._settle()
        peers = {id(peer.training): peer for peer in self._peers.values() if peer.training is not None}
        nodes = 0 if self._elsewhere is None else self._elsewhere.nodes
        window, kind = reading.window, self._kind
        # A sampler of the user's is asked for one item after the other, and what was read for another node was read there.
        can_repeat = isinstance(kind, Indexed) and kind.is_own_order and self._elsewhere is None
        reach_back = window.reach_back if can_repeat else None
        entries = trainings.entries(window.begin, window.low, reading.wanted, reach_back, time.monotonic())
        for group, agreed in trainings.agreements.items():
            window.note_agreement(group, agreed.end, agreed.jumps, trainings.agreements)
        lacking = dict[str, list[Entry]]()
        for entry in entries:
            if entry.place < entry.there:
                lacking.setdefault(entry.training.group, []).append(entry)
        for group, of_ranks in lacking.items():
            if not self._again.begin(of_ranks, window.bytes_per_example):
                entries = trainings.jump(entries, group)
        for entry in entries:
            is_late = entry.is_late or (self._elsewhere is not None and entry.place > (entry.training.wish or 0))
            self._tell_place(peers[id(entry.training)], reading, entry._replace(others=entry.others + nodes, is_late=is_late))
        self._move_low()

    def _begin(self, item: int) -> bool:
        """Begins to read at an item. Drops the items that were read for others before. Returns whether there is a window."""
        if self._reading is not None:
            self._end_reading()
        if self._cluster is not None:
            self._cluster.want(*self._trainings.cluster_workers)
            if not self._cluster.has_settled:
                return False
        here = partial(self._read, self._kind, self._seed, item, self._window_bytes, self._on_lost, self._sockets)
        if self._elsewhere is None:
            self._reading = here()
        else:
            ready = self._trainings.ready()
            join = "pass" if any(one.join == "pass" for one in ready) else "now"
            start = Start(item, any(one.goes_on for one in ready), join, self._trainings.cluster_workers)
            self._reading = self._elsewhere.begin(start, here, self._on_lost)
        if self._reading is None:
            return False
        self._settle()
        self._want_workers()
        self._reading.start()
        if self._cluster is not None and isinstance(self._reading, Reading):
            self._cluster.attend(self._reading)
        return True

    def _reads_up_to(self, begin: int, end: int) -> Reads:
        return self._read(self._kind, self._seed, begin, self._window_bytes, self._on_lost, self._sockets, end=end)

    def _sockets(self) -> list[int]:
        """Returns the descriptors of its sockets, which a worker must not hold open."""
        return [self._listener.fileno(), *self._peers]

    def _want_workers(self) -> None:
        """Lets as many workers be there as the trainings ask for, with those that read again for one of them."""
        if self._cluster is not None and self._trainings.all:
            self._cluster.want(*self._trainings.cluster_workers)
        left = self._wanted_workers - self._again.want()
        if self._reading is not None:
            self._reading.want(max(left, 1) if self._again else left)  # 0 if only other nodes get examples

    @property
    def _wanted_workers(self) -> int:
        wanted = self._workers
        if wanted == "sum":
            wanted = max(self._trainings.workers, self._least_workers)
        elif wanted == "starter":
            wanted = getattr(self._kind.loader, "num_workers", 0)
        return min(int(wanted), MOST_LANES)

    def _workers_of(self, group: str) -> int:
        """Returns how many workers read again for a training: those that it asks for, or its share of a fixed number."""
        own = sum(one.workers for one in self._trainings.all if one.group == group)
        share = (MOST_LANES if self._workers == "sum" else self._wanted_workers) // (len(self._again) + 1)
        return max(min(own, share) if self._workers == "sum" else share, 1)

    def _end_reading(self) -> None:
        """Ends the workers, and leaves other nodes."""
        self._again.close()
        if self._cluster is not None:
            self._cluster.attend(None)
        if self._elsewhere is not None:
            self._elsewhere.leave()
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _who(self) -> str:
        return f"process {os.getpid()}, started {time.monotonic() - self._begun:.0f} s ago by {self._starter}"

    def _tell_place(self, peer: _Peer, reading: Reads, entry: Entry) -> None:
        again = [self._again[entry.training.group]] if entry.place < entry.there else []
        descriptors: list[int] = []
        welcome: dict[str, Any] = {"place": entry.place, "there": entry.there, "others": entry.others, "is_late": entry.is_late}
        welcome |= {"batch_size": self._batch_size, "whose": self._who()}
        welcome |= {"count": self._trainings.count, "cache": reading.about_cache}
        welcome |= {"has_cluster": self._cluster is not None or self._elsewhere is not None}
        welcome |= {"about_cluster": "" if self._cluster is None else self._cluster.about}
        try:
            for each in (reading, *again):
                descriptors.append(each.window.read_only_descriptor())
            send(peer.connection, {"welcome": welcome}, descriptors)
            peer.knows_place = True
        except Gone:
            self._drop(peer)
        except OSError as error:  # this process or the system has no descriptor or memory left, or it does not listen
            LOGGER.warning("%s cannot be let in: %s", entry.training.label, error)
            self._try_to_send(peer, {"failed": f"{type(error).__name__}: {error}"})
            self._drop(peer)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    # ------------------------------------------------------------------ status

    def _status(self) -> dict[str, Any]:
        trainings, slowest = self._trainings, self._trainings.slowest()
        window = None if self._reading is None else self._reading.window
        return {
            "status": {
                "pid": os.getpid(),
                "data": self._fingerprint["data set"],
                "trainings": [
                    {"pid": one.pid, "label": one.label, "behind": one.behind, "at": one.at, "share": one.share}
                    for one in trainings.all[:100]
                ],
                "count": trainings.count,
                "length": self._length,
                "read": 0 if window is None else window.read_in_pass,
                "window_bytes": self._window_bytes,
                "workers": 0 if self._reading is None else self._reading.workers,
                "written": 0 if window is None else window.last_written + 1,
                "low": 0 if window is None else window.low,
                "is_full": window is not None and window.is_full,
                "slowest": None if slowest is None else slowest.label,
                "cluster": [] if self._cluster is None else self._cluster.status(),
            }
        }
