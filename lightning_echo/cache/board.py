"""Which node holds, keeps and sends what, and the shared memory in which a node's workers see the records of other nodes."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_echo.cache.arena import ALIGNMENT, aligned

# ---------------------------------------------------------------------- partition
# All nodes compute alike who holds what, who keeps what, who sends what to whom, and where it will lie.
#
# The *needs* of a round are the keys of all examples that all ranks read for it, in the order of the slots, each with the node
# that needs the example. For each key, a node *tells* a number: 0 if it does not hold the example, otherwise how long its record
# is. The largest number of all nodes counts, so one collective is enough.

Integers = npt.NDArray[np.int64]

NOT_HELD, BEING_WRITTEN = -2, -1  # in place of the length of a record
_NODE_BITS = 16
_ENTRY_BYTES = 24  # of the directory of a round: key, offset, length


def told(lengths: Integers, node: int) -> Integers:
    """Returns the numbers that a node tells for the needed keys, from their lengths (or `NOT_HELD`, `BEING_WRITTEN`).

    Example:
        >>> told(np.array([NOT_HELD, BEING_WRITTEN, 0, 7]), node=1).tolist()
        [0, 65537, 131073, 589825]
    """
    return np.where(lengths == NOT_HELD, 0, ((lengths + 2) << _NODE_BITS) | node)


@dataclass(frozen=True, eq=False)
class Partition:
    """Which node may keep each key: its number plus one; 0: no node has needed it yet. Workers read this array."""

    keepers: npt.NDArray[np.int16]

    def settle(self, keys: Integers, needing: Integers, answers: Integers, is_full: Sequence[bool]) -> None:
        """Decides who keeps the needed examples that no node holds: the first node that needs the example and has room.

        If that node becomes full before it has kept the example, another node may keep it. For each of the needed ``keys``,
        ``needing`` has the node that needs it, ``answers`` the largest answer of all nodes. ``is_full``, of each node's cache,
        was asked before that.
        """
        keepers = self.keepers
        is_held = answers > 0
        keepers[keys[is_held]] = ((answers[is_held] & ((1 << _NODE_BITS) - 1)) + 1).astype(np.int16)
        full = np.array([False, *is_full])  # place 0 stands for no node, which is never full
        present = keepers[keys]
        may = ~is_held & ((present == 0) | full[present]) & ~full[1:][needing]
        # If a key is there several times, the last assignment counts. So the keys are assigned from the last to the first.
        keepers[keys[may][::-1]] = (needing[may][::-1] + 1).astype(np.int16)


class Transfers(NamedTuple):
    """The records that are sent for a round, with their bytes, in the order of source node, target node, and need."""

    sources: Integers
    targets: Integers
    keys: Integers
    lengths: Integers

    def chosen(self, which: npt.NDArray[Any]) -> Transfers:
        return Transfers(*(column[which] for column in self))

    def bytes_by(self, whose: Integers, nodes: int) -> list[int]:
        """Returns for each node the bytes of its records, each aligned. ``whose`` is ``sources`` or ``targets``."""
        found: list[int] = np.bincount(whose, aligned(self.lengths), nodes).astype(np.int64).tolist()
        return found

    def block_bytes(self, nodes: int) -> list[int]:
        """Returns the bytes that a round takes in the ring of each node: its directory, and the records."""
        directories = aligned(_ENTRY_BYTES * np.bincount(self.targets, minlength=nodes))
        blocks: list[int] = (directories + np.array(self.bytes_by(self.targets, nodes), dtype=np.int64)).tolist()
        return blocks


def transfers_of(keys: Integers, needing: Integers, answers: Integers, capacities: Sequence[int]) -> Transfers:
    """Returns the records that are sent for a round. A record is sent to a node once, however many of its ranks need it.

    The arguments are those of `Partition.settle`. A record that does not fit into an empty ring (``capacities``) is not sent.
    """
    lengths, holders = (answers >> _NODE_BITS) - 2, answers & ((1 << _NODE_BITS) - 1)
    places = np.flatnonzero((answers > 0) & (lengths >= 0) & (holders != needing))
    pairs = holders[places] * len(capacities) + needing[places]
    _, first = np.unique(pairs * (keys.max(initial=0) + 1) + keys[places], return_index=True)
    first = first[np.lexsort((first, pairs[first]))]
    places = places[first]
    found = Transfers(holders[places], needing[places], keys[places], lengths[places])
    # Which records fit into the ring of their node? There is no loop over nodes, because there may be hundreds.
    by_target = np.argsort(found.targets, kind="stable")
    targets = found.targets[by_target]
    ends = np.cumsum(aligned(found.lengths[by_target]) + _ENTRY_BYTES)
    firsts = np.searchsorted(targets, targets)  # for each record the first one of its node
    before = np.concatenate([[0], ends])[firsts]
    fits = np.empty(len(targets), dtype=bool)
    fits[by_target] = ends - before + ALIGNMENT <= np.array(capacities, dtype=np.int64)[targets]
    return found if fits.all() else found.chosen(fits)


@dataclass(eq=False)
class RingSpace:
    """Where blocks lie in a ring. Each node computes this for the rings of all nodes, and so knows whether there is room.

    Example:
        >>> space = RingSpace(100)
        >>> space.place(0, 60), space.place(1, 60)
        (0, None)
        >>> space.free(1)
        >>> space.place(1, 60), space.place(2, 40), space.place(3, 1)
        (0, 60, None)
    """

    capacity: int
    blocks: deque[tuple[int, int, int]] = field(default_factory=deque)  # round, where it begins, where it ends

    def place(self, number: int, size: int) -> int | None:
        """Takes ``size`` (at least 1) bytes in one piece for a round. Returns where they begin; None if there is no room.

        The number of the round must be larger than all before it.
        """
        begin = self._begin(size)
        if begin is not None:
            self.blocks.append((number, begin, begin + size))
        return begin

    def has_room(self, size: int) -> bool:
        return not size or self._begin(size) is not None

    def _begin(self, size: int) -> int | None:
        if not self.blocks:
            return 0 if size <= self.capacity else None
        first, last = self.blocks[0][1], self.blocks[-1][2]
        if self.blocks[-1][1] < first:  # the last block lies before the first
            return last if size <= first - last else None
        if size <= self.capacity - last:
            return last
        return 0 if size <= first else None

    def free(self, before: int) -> None:
        while self.blocks and self.blocks[0][0] < before:
            self.blocks.popleft()


# ---------------------------------------------------------------------- board
# `Board`: shared memory of a node, in which its leader and all its workers see the records of other nodes.
#
# ::
#
#     | numbers | of each rank: numbers, marks | of each round: where it lies | who keeps each key | ring |
#
# The leader writes which rounds have arrived. A worker marks a round when it has taken its records from the ring. The leader
# frees the round when all ranks have marked it. Each number has only one writer, so no lock is needed.
#
# The *id* of a round is made of two numbers: that of the start (the pipelines of a job start and end together) and that of the
# round. So the rest of an earlier start is never taken for something else. After a worker has copied a record, it looks again
# whether the leader is still at the same start. If not, the record may have been overwritten.

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
    """The sizes of a board. ``rounds`` may be in progress concurrently."""

    keys: int
    ranks: int
    rounds: int
    ring_bytes: int

    @property
    def words(self) -> int:
        """Number of eight-byte numbers before the keepers."""
        return _NUMBERS + self.ranks * (_NUMBERS + self.rounds) + 3 * self.rounds

    @property
    def ring_at(self) -> int:
        return -(-(8 * self.words + 2 * self.keys) // mmap.PAGESIZE) * mmap.PAGESIZE


class Counted(NamedTuple):
    """The counts of a node: delivered examples of other nodes, waiting for them, and seconds of sending and receiving."""

    received: int
    waited_seconds: float
    exchange_seconds: float


class Board:
    """The memory, as one process has it. It can be sent to worker processes. The descriptor belongs to it."""

    def __init__(self, fd: int, shape: Shape) -> None:
        self._fd, self.shape = fd, shape
        self.map = mmap.mmap(fd, shape.ring_at + shape.ring_bytes)
        words: Integers = np.frombuffer(self.map, np.int64, shape.words)
        self.leaders, rest = words[:_NUMBERS], words[_NUMBERS:]
        self._ranks = rest[: shape.ranks * _NUMBERS].reshape(shape.ranks, _NUMBERS)
        rest = rest[shape.ranks * _NUMBERS :]
        self._marks = rest[: shape.ranks * shape.rounds].reshape(shape.ranks, shape.rounds)
        self._table = rest[shape.ranks * shape.rounds :].reshape(shape.rounds, 3)
        self.keepers: npt.NDArray[np.int16] = np.frombuffer(self.map, np.int16, shape.keys, 8 * shape.words)
        self.ring = memoryview(self.map)[shape.ring_at :]

    @classmethod
    def create(cls, shape: Shape) -> Board:
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
        """Opens the board that another process of this node has made, or raises ``OSError`` if that process is not visible."""
        pid, fd, shape = address
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), Shape(*shape))

    def __reduce__(self) -> tuple[Callable[..., Board], tuple[Any, ...]]:
        return _received, (reduction.DupFd(self._fd), self.shape)

    # ------------------------------------------------------------------ written by the leader

    def begin(self, start: int) -> None:
        """Begins a start: no node keeps anything yet, and nothing has arrived."""
        self.keepers[:] = 0
        self.leaders[_FAILED] = 0
        self.leaders[_ARRIVED] = id_of(start, 0)

    def show(self, start: int, number: int, begin: int, count: int) -> None:
        """Lets workers find a round that has arrived: ``count`` records, whose directory begins at this place of the ring."""
        row = self._table[number % self.shape.rounds]
        row[0] = 0
        row[1:] = begin, count
        row[0] = id_of(start, number) + 1
        self.leaders[_ARRIVED] = id_of(start, number + 1)

    def end(self, start: int, *, has_failed: bool) -> None:
        """Makes all workers stop waiting. If the exchange has failed, each node keeps what it reads."""
        self.leaders[_FAILED] = has_failed
        self.leaders[_ENDED] = start

    def count_exchange(self, seconds: float) -> None:
        self.leaders[_EXCHANGED] += int(seconds * _NANOSECONDS)

    def taken(self, start: int, rank: int, since: int) -> int:
        """Returns the first round, from ``since`` on, that a rank has not taken. A rank that has closed counts as having all."""
        if self._ranks[rank, _CLOSED] >= start:
            return 1 << _ROUND_BITS
        marks, rounds = self._marks[rank], self.shape.rounds
        while marks[since % rounds] == id_of(start, since) + 1:
            since += 1
        return since

    # ------------------------------------------------------------------ written by a rank

    def close_rank(self, rank: int, start: int) -> None:
        """Makes the workers of a rank stop waiting, because the rank ends."""
        self._ranks[rank, _CLOSED] = start

    def count(self, rank: int, received: int, waited_seconds: float) -> None:
        self._ranks[rank, _RECEIVED] += received
        self._ranks[rank, _WAITED] += int(waited_seconds * _NANOSECONDS)

    @property
    def counted(self) -> Counted:
        waited, exchanged = self._ranks[:, _WAITED].sum(), self.leaders[_EXCHANGED]
        return Counted(int(self._ranks[:, _RECEIVED].sum()), float(waited / _NANOSECONDS), float(exchanged / _NANOSECONDS))

    # ------------------------------------------------------------------ used by a worker

    def mark(self, rank: int, start: int, number: int) -> None:
        """Notes that a worker of a rank has taken its records of a round."""
        self._marks[rank, number % self.shape.rounds] = id_of(start, number) + 1

    def wait_for(self, rank: int, start: int, number: int, patience: float) -> bool:
        """Waits until a round has arrived, at most for ``patience`` seconds. Returns whether it has arrived."""
        wanted, nap = id_of(start, number + 1), _FIRST_NAP_SECONDS
        give_up, parent = time.monotonic() + patience, os.getppid()
        while self.leaders[_ARRIVED] < wanted:
            has_ended = self.leaders[_ENDED] >= start or self._ranks[rank, _CLOSED] >= start
            # A worker whose main process has died does not wait: it holds the connections of that process open, so the other
            # nodes do not notice the death as long as the worker lives.
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
        return bool(id_of(start, 0) <= self.leaders[_ARRIVED] < id_of(start + 1, 0))


def _received(sent: Any, shape: Shape) -> Board:
    return Board(sent.detach(), shape)


class FromOthers:
    """A worker's access to the records of other nodes, batch by batch. It is sent to the worker."""

    def __init__(self, board: Board, node: int, rank: int, start: int) -> None:
        self._board, self._node, self._rank, self._start = board, node, rank, start
        self._round, self._was_late = -1, False
        self._records: dict[int, memoryview] | None = None
        self.received, self.waited = 0, 0.0  # examples of the present batch, and seconds of waiting for its round

    def begin(self, number: int) -> None:
        """Begins a batch of this round; -1: it has none."""
        self._round, self._records, self.received, self.waited = number, None, 0, 0.0

    def take(self, keys: Sequence[int | None], decode: Callable[[int, Any], Any]) -> dict[int, Any]:
        """Returns the examples that have come from other nodes, by their place in ``keys``. It may wait for them.

        The result of ``decode`` must not share memory with the record.
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
        return bool(self._board.keepers[key] == self._node + 1 or self._board.leaders[_FAILED])
