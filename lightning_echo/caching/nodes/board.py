"""`Board`: shared memory of a node, in which its leader and all its workers see what other nodes have sent.

::

    | numbers | of each rank: numbers, marks | of each round: where it lies | who keeps each key | ring |

The leader writes which rounds have arrived. A worker marks a round when it has taken from the ring what it needs. The leader
frees the round when all ranks have marked it. Each number has only one writer, so no lock is needed.

A round is known by its *id*, which is made of two numbers: that of the start (the pipelines of a job start and end together) and
that of the round. So the rest of an earlier start is never taken for something else. After a worker has copied a record, it looks
again whether the leader is still at the same start. If not, the record may have been overwritten.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_echo.caching.nodes.partition import Integers

__all__ = ["Board", "Counted", "FromOthers", "Shape", "id_of"]

_ROUND_BITS = 40  # of an id
_ARRIVED, _ENDED, _FAILED, _EXCHANGED = range(4)  # numbers of the leader
_CLOSED, _RECEIVED, _WAITED = range(3)  # numbers of a rank
_NUMBERS = 8
_PATIENCE_SECONDS = 60.0  # after this time a worker reads from storage
_LITTLE_PATIENCE_SECONDS = 1.0  # the same, for a worker that has waited in vain, until a round comes in time again
_FIRST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.0002, 0.001
_NANOSECONDS = 1e9


def id_of(start: int, number: int) -> int:
    """Returns the id of a round. A later round, or a later start, has a larger id."""
    return start << _ROUND_BITS | number


class Shape(NamedTuple):
    """The sizes of a board.

    Attributes:
        keys: Number of keys.
        ranks: Ranks of the node.
        rounds: Rounds that may be in progress at the same time.
        ring_bytes: Bytes of the ring.
    """

    keys: int
    ranks: int
    rounds: int
    ring_bytes: int

    @property
    def words(self) -> int:
        """Number of eight-byte numbers before the keepers."""
        return _NUMBERS + self.ranks * (_NUMBERS + self.rounds) + 3 * self.rounds

    @property
    def keepers_at(self) -> int:
        """Where the keepers begin."""
        return 8 * self.words

    @property
    def ring_at(self) -> int:
        """Where the ring begins."""
        return -(-(self.keepers_at + 2 * self.keys) // mmap.PAGESIZE) * mmap.PAGESIZE


class Counted(NamedTuple):
    """What was counted on a node.

    Attributes:
        received: Delivered examples that came from other nodes.
        waited_seconds: Seconds that workers have waited for such examples.
        exchange_seconds: Seconds in which records were sent and received.
    """

    received: int
    waited_seconds: float
    exchange_seconds: float


class Board:
    """The memory, as one process has it. It can be sent to worker processes.

    Args:
        fd: A descriptor. It belongs to this object from now on.
        shape: The sizes of the board.

    Attributes:
        shape: As given.
        keepers: For each key the node that may keep it, see `Partition`.
        ring: The bytes of the ring.
    """

    def __init__(self, fd: int, shape: Shape) -> None:
        self._fd, self.shape = fd, shape
        self.map = mmap.mmap(fd, shape.ring_at + shape.ring_bytes)
        words: Integers = np.frombuffer(self.map, np.int64, shape.words)
        self._leaders, rest = words[:_NUMBERS], words[_NUMBERS:]
        self._ranks = rest[: shape.ranks * _NUMBERS].reshape(shape.ranks, _NUMBERS)
        rest = rest[shape.ranks * _NUMBERS :]
        self._marks = rest[: shape.ranks * shape.rounds].reshape(shape.ranks, shape.rounds)
        self._table = rest[shape.ranks * shape.rounds :].reshape(shape.rounds, 3)
        self.keepers: npt.NDArray[np.int16] = np.frombuffer(self.map, np.int16, shape.keys, shape.keepers_at)
        self.ring = memoryview(self.map)[shape.ring_at :]

    @classmethod
    def create(cls, shape: Shape) -> Board:
        """Makes a board.

        Raises:
            OSError: There is no memory for it.
        """
        fd = os.memfd_create("lightning_echo-board", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, shape.ring_at + shape.ring_bytes)
            os.posix_fallocate(fd, 0, shape.ring_at + shape.ring_bytes)  # without space, reading the map could kill the process
            return cls(fd, shape)
        except BaseException:
            os.close(fd)
            raise

    def __del__(self) -> None:
        if hasattr(self, "map"):
            os.close(self._fd)  # the map ends with the arrays that use it

    @property
    def address(self) -> tuple[int, int, Shape]:
        """Process, descriptor and sizes, for `attach`."""
        return os.getpid(), self._fd, self.shape

    @classmethod
    def attach(cls, address: tuple[int, int, Shape]) -> Board:
        """Opens the board that another process of this node has made.

        Raises:
            OSError: That process is not there, or cannot be seen from here.
        """
        pid, fd, shape = address
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), Shape(*shape))

    def __reduce__(self) -> tuple[Callable[..., Board], tuple[Any, ...]]:
        return _received, (reduction.DupFd(self._fd), self.shape)

    # ------------------------------------------------------------------ what the leader writes

    def begin(self, start: int) -> None:
        """Begins a start: no node keeps anything yet, and nothing has arrived."""
        self.keepers[:] = 0
        self._leaders[_FAILED] = 0
        self._leaders[_ARRIVED] = id_of(start, 0)

    def show(self, start: int, number: int, begin: int, count: int) -> None:
        """Lets workers find a round that has arrived.

        Args:
            start: Number of the start.
            number: Number of the round.
            begin: Where the directory of the round lies in the ring.
            count: Number of records of the round.
        """
        row = self._table[number % self.shape.rounds]
        row[0] = 0
        row[1:] = begin, count
        row[0] = id_of(start, number) + 1
        self._leaders[_ARRIVED] = id_of(start, number + 1)

    def end(self, start: int, *, has_failed: bool) -> None:
        """Tells all workers to wait no more. If the exchange has failed, each node keeps what it reads."""
        self._leaders[_FAILED] = has_failed
        self._leaders[_ENDED] = start

    def count_exchange(self, seconds: float) -> None:
        """Counts seconds in which records were sent and received."""
        self._leaders[_EXCHANGED] += int(seconds * _NANOSECONDS)

    def taken(self, start: int, rank: int, since: int) -> int:
        """Returns the first round that a rank has not taken yet. A rank that has closed counts as having taken all.

        Args:
            start: Number of the start.
            rank: Number of the rank on its node.
            since: The round to begin with. All rounds before it are known to be taken.
        """
        if self._ranks[rank, _CLOSED] >= start:
            return 1 << _ROUND_BITS
        marks, rounds = self._marks[rank], self.shape.rounds
        while marks[since % rounds] == id_of(start, since) + 1:
            since += 1
        return since

    # ------------------------------------------------------------------ what a rank writes

    def close_rank(self, rank: int, start: int) -> None:
        """Tells the workers of a rank to wait no more, because the rank ends."""
        self._ranks[rank, _CLOSED] = start

    def count(self, rank: int, received: int, waited_seconds: float) -> None:
        """Counts, for a rank, delivered examples that came from other nodes, and how long its workers waited for them."""
        self._ranks[rank, _RECEIVED] += received
        self._ranks[rank, _WAITED] += int(waited_seconds * _NANOSECONDS)

    @property
    def counted(self) -> Counted:
        """What was counted for all ranks of the node."""
        waited, exchanged = self._ranks[:, _WAITED].sum(), self._leaders[_EXCHANGED]
        return Counted(int(self._ranks[:, _RECEIVED].sum()), float(waited / _NANOSECONDS), float(exchanged / _NANOSECONDS))

    # ------------------------------------------------------------------ what a worker does

    def mark(self, rank: int, start: int, number: int) -> None:
        """Notes that a worker of a rank has taken what it needs of a round."""
        self._marks[rank, number % self.shape.rounds] = id_of(start, number) + 1

    def wait_for(self, rank: int, start: int, number: int, patience: float) -> bool:
        """Waits until a round has arrived, at most for ``patience`` seconds. Returns whether it has arrived.

        A worker whose main process has died does not wait. It holds the connections of that process open, so the other nodes do
        not notice the death as long as the worker lives.
        """
        wanted, nap = id_of(start, number + 1), _FIRST_NAP_SECONDS
        give_up, parent = time.monotonic() + patience, os.getppid()
        while self._leaders[_ARRIVED] < wanted:
            has_ended = self._leaders[_ENDED] >= start or self._ranks[rank, _CLOSED] >= start
            if has_ended or time.monotonic() > give_up or os.getppid() != parent:
                return False
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        return True

    def records_of(self, start: int, number: int) -> dict[int, memoryview]:
        """Returns the records of a round that has arrived, by key. They are views, which must not be kept."""
        wanted, begin, count = self._table[number % self.shape.rounds].tolist()
        if wanted != id_of(start, number) + 1 or not count:
            return {}
        directory: Integers = np.frombuffer(self.ring, np.int64, 3 * count, begin)
        keys, offsets, lengths = directory.reshape(3, count).tolist()
        return {key: self.ring[at : at + size] for key, at, size in zip(keys, offsets, lengths, strict=True)}

    def is_at(self, start: int) -> bool:
        """Returns whether the leader is still at a start. If so, rounds that are not marked were not overwritten."""
        return bool(id_of(start, 0) <= self._leaders[_ARRIVED] < id_of(start + 1, 0))

    def may_keep(self, key: int, node: int) -> bool:
        """Returns whether a node may keep an example that it has read."""
        return bool(self.keepers[key] == node + 1 or self._leaders[_FAILED])


def _received(sent: Any, shape: Shape) -> Board:
    return Board(sent.detach(), shape)


class FromOthers:
    """What a worker gets from other nodes, batch by batch. It is sent to the worker.

    Args:
        board: The board of the node.
        node: Number of the node.
        rank: Number of the rank on its node.
        start: Number of the start.

    Attributes:
        received: Examples of the present batch that came from other nodes.
        waited: Seconds that this process has waited for the present batch's round.
    """

    def __init__(self, board: Board, node: int, rank: int, start: int) -> None:
        self._board, self._node, self._rank, self._start = board, node, rank, start
        self._round, self._was_late = -1, False
        self._records: dict[int, memoryview] | None = None
        self.received, self.waited = 0, 0.0

    def begin(self, number: int) -> None:
        """Begins a batch.

        Args:
            number: Its round; -1: it has none.
        """
        self._round, self._records, self.received, self.waited = number, None, 0, 0.0

    def take(self, keys: Sequence[int | None], decode: Callable[[int, Any], Any]) -> dict[int, Any]:
        """Returns the examples that have come from other nodes, by their place in ``keys``. It may wait for them.

        Args:
            keys: The keys of the examples that this node does not hold.
            decode: Gets a key and its record, and returns an example that does not share memory with the record.
        """
        if self._round < 0:
            return {}
        if self._records is None:
            began = time.perf_counter()
            patience = _LITTLE_PATIENCE_SECONDS if self._was_late else _PATIENCE_SECONDS
            has_arrived = self._board.wait_for(self._rank, self._start, self._round, patience)
            self._was_late = not has_arrived
            self.waited += time.perf_counter() - began
            self._records = self._board.records_of(self._start, self._round) if has_arrived else {}
        records = self._records
        if not records:
            return {}
        try:
            found = {place: decode(key, records[key]) for place, key in enumerate(keys) if key in records}
        except Exception:
            if self._board.is_at(self._start):
                raise
            return {}
        if not self._board.is_at(self._start):
            return {}
        self.received += len(found)
        return found

    def end(self) -> None:
        """Ends a batch: its part of the ring may be overwritten."""
        if self._round >= 0:
            self._records = None
            self._board.mark(self._rank, self._start, self._round)
            self._round = -1

    def may_keep(self, key: int) -> bool:
        """Returns whether this node may keep an example that it has read."""
        return self._board.may_keep(key, self._node)
