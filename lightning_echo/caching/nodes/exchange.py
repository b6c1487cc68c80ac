"""`Exchange`: the thread of a node's leader. It tells the other leaders what this node holds, sends records and receives records.

The leaders have a Gloo group of their own. Each leader has one thread for it, and all threads call the same collectives in the
same order. A turn has up to three kinds of collectives, see ``caching/nodes/__init__.py``:

* a header from each node,
* which of the needed examples each node holds,
* the records of each round for which all rings have room.

**How it ends.** A node that closes says so in the header of one more turn, and all threads end after that turn. A node that
cannot go on says so when it tells what it holds. If a node has died, its connections break, or the time-out of the group passes:
then the call raises, and the thread ends. (A node cannot tell the others by closing its connections, because forked workers hold
them open, too.) In each case the board says that the exchange has ended, and workers read what they need. `Exchange.close` waits
a few seconds for the thread. If the thread hangs in a collective, it is left alone: it is a daemon thread, and refers to nothing
of the training.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_echo.caching.arena import Arena
from lightning_echo.caching.keys import Keys
from lightning_echo.caching.nodes.board import Board
from lightning_echo.caching.nodes.partition import (
    Integers,
    Partition,
    RingSpace,
    Transfers,
    aligned,
    told,
    transfers_of,
)

__all__ = ["Exchange", "Group", "OrdersDifferError"]

_BEAT_SECONDS = 0.25  # time between two turns of a node that has nothing to say
_HELD_UP_SECONDS = 0.002  # time between two looks whether the rings have room again
_MOST_ROUNDS = 16  # in a turn
_JOIN_SECONDS = 5.0


class OrdersDifferError(RuntimeError):
    """The nodes have computed different orders."""

    def __init__(self) -> None:
        super().__init__(
            "cache.partitioned=True needs an order that every rank can compute, and the nodes have computed different ones: the "
            "sampler does not yield the same on all ranks. Seed it alike on all ranks, or leave partitioned out"
        )


class _Header(NamedTuple):
    """What a node says in each turn.

    Attributes:
        start: Number of its start.
        asked: Rounds whose needs it knows.
        known: Rounds for which it is known who holds what: the same number on all nodes.
        taken: Rounds from which its workers have taken everything.
        is_full: Whether its cache takes nothing more.
        ends: Whether it ends.
    """

    start: int
    asked: int
    known: int
    taken: int
    is_full: int
    ends: int


class _Round(NamedTuple):
    """What is sent for a round.

    Attributes:
        transfers: All records of the round.
        block_bytes: Bytes that the round takes in the ring of each node.
    """

    transfers: Transfers
    block_bytes: list[int]


class Group:
    """The collectives of the leaders, in the order of the nodes.

    Args:
        group: A process group of torch's.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the numbers that each node gives."""
        rows = [torch.zeros(len(values), dtype=torch.int64) for _ in range(torch.distributed.get_world_size(self._group))]
        torch.distributed.all_gather(rows, torch.tensor(values, dtype=torch.int64), group=self._group)
        return [row.tolist() for row in rows]

    def largest(self, values: Integers) -> Integers:
        """Returns at each place the largest number that any node gives there."""
        reduced = torch.from_numpy(values)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return reduced.numpy()

    def hand_over(self, incoming: torch.Tensor, received: list[int], outgoing: torch.Tensor, sent: list[int]) -> None:
        """Sends bytes to each node, and receives some from each."""
        torch.distributed.all_to_all_single(incoming, outgoing, received, sent, group=self._group)


class Exchange:
    """What the leader of a node exchanges with the others, from one start of the pipelines to their end.

    Args:
        group: The group of the leaders.
        node: Number of this node.
        node_of_share: For each share of the data the node that gets it.
        board: The board of this node.
        capacities: Bytes of the ring of each node.
        arena: What this node holds.
        keys: Turns indices into keys.
        start: Number of the start.
        after: The exchange of the start before. Its thread must end first.

    Attributes:
        failure: Why the exchange has failed; empty if it has not.
        error: An error that the training must end with; None if there is none.
    """

    def __init__(
        self,
        group: Group,
        node: int,
        node_of_share: Sequence[int],
        board: Board,
        capacities: Sequence[int],
        arena: Arena,
        keys: Keys,
        start: int,
        after: Exchange | None = None,
    ) -> None:
        self._group, self._node, self._board, self._arena, self._keys = group, node, board, arena, keys
        self._node_of_share = np.array(node_of_share, dtype=np.int64)
        self._capacities, self._start, self._after = list(capacities), start, after
        self._nodes = len(self._capacities)
        self.failure = ""
        self.error: OrdersDifferError | None = None
        self._changed = threading.Condition()
        self._asked: deque[Sequence[Any]] = deque()  # the needs of rounds for which it is not known yet who holds what
        self._asked_count = 0
        self._ends = self._has_ended = False
        # Only the thread uses what follows.
        self._partition = Partition(board.keepers)
        self._known = self._arrived = 0
        self._taken = [0] * board.shape.ranks
        self._is_held_up = False  # whether all have asked for more than the rings have room for
        self._pending: deque[_Round] = deque()  # rounds that are known and have not arrived
        self._spaces = [RingSpace(capacity) for capacity in self._capacities]
        self._outgoing = np.empty(0, dtype=np.uint8)
        self._thread = threading.Thread(target=self._run, name="lightning_echo-exchange", daemon=True)

    def begin(self) -> None:
        """Starts the thread. Call it after the workers were started, so that none is forked while the thread begins."""
        self._thread.start()

    def ask(self, rows: Sequence[Any]) -> None:
        """Takes the needs of the next round.

        Args:
            rows: The indices of the round, or lists of indices: one for each share of the data in turn, again and again.
        """
        with self._changed:
            if not self._has_ended:
                self._asked.append(rows)
                self._asked_count += 1
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread, and those of the other nodes."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            if self._after is not None:
                if self._after._thread.ident is not None:  # its pipeline has started
                    self._after._thread.join()
                self.failure, self.error, self._after = self._after.failure, self._after.error, None
            if not self.failure:
                self._board.begin(self._start)
                while self._take_turn():
                    pass
        except OrdersDifferError as error:
            self.error, self.failure = error, str(error)
        except Exception as error:  # Gloo may raise anything when a node is gone
            self.failure = f"{type(error).__name__}: {error}"
        self._board.end(self._start, has_failed=bool(self.failure))
        with self._changed:
            self._has_ended = True
            self._asked.clear()

    def _take_turn(self) -> bool:
        """Takes a turn together with all nodes. Returns whether there is a next one."""
        self._wait()
        with self._changed:
            asked, ends = self._asked_count, self._ends
        taken = self._count_taken()
        mine = _Header(self._start, asked, self._known, taken, self._arena.counts.is_frozen, ends)
        heads = [_Header(*row) for row in self._group.gather(mine)]
        if any(head.ends for head in heads):
            return False
        if any((head.start, head.known) != (self._start, self._known) for head in heads):
            seen = ", ".join(f"start {head.start} at round {head.known}" for head in heads)
            raise RuntimeError(f"the nodes of a partitioned cache have not started together ({seen}): start all of them anew")
        for space, head in zip(self._spaces, heads, strict=True):
            space.free(head.taken)
        least_taken = min(head.taken for head in heads)
        last = min(*(head.asked for head in heads), self._known + _MOST_ROUNDS, least_taken + self._board.shape.rounds)
        if last > self._known:
            self._learn(last - self._known, [bool(head.is_full) for head in heads])
        while self._pending and self._fits(self._pending[0]):
            self._transfer(self._pending.popleft())
        self._is_held_up = bool(self._pending) or (last <= self._known and min(head.asked for head in heads) > self._known)
        return True

    def _wait(self) -> None:
        """Waits until there is something to do, or until the other nodes need a turn of this node."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends or (not self._is_held_up and self._asked_count > self._known),
                _HELD_UP_SECONDS if self._is_held_up else _BEAT_SECONDS,
            )

    def _count_taken(self) -> int:
        for rank in range(len(self._taken)):
            self._taken[rank] = min(self._board.taken(self._start, rank, self._taken[rank]), self._arrived)
        return min(self._taken)

    def _learn(self, count: int, is_full: Sequence[bool]) -> None:
        """Finds out who holds which examples of the next rounds, and what is to be sent."""
        with self._changed:
            rounds = [self._asked.popleft() for _ in range(count)]
        needs = [self._needs_of(rows) for rows in rounds]
        keys = np.concatenate([keys for keys, _ in needs])
        needing = np.concatenate([needing for _, needing in needs])
        error = None
        try:
            mine = told(self._arena.lengths_of(keys), self._node)
        except Exception as caught:  # a file on a disk
            mine, error = np.zeros(len(keys), dtype=np.int64), caught
        digest = zlib.crc32(keys.tobytes())
        both = [digest, -digest]  # each node gets the largest of both: so it sees whether all digests are equal
        largest = self._group.largest(np.concatenate([[*both, error is not None], mine]))
        if error is not None:
            raise error
        if largest[2]:
            raise RuntimeError("another node cannot read what it holds")
        if largest[:2].tolist() != both:
            raise OrdersDifferError
        said, begin = largest[3:], 0
        has_key = keys >= 0
        self._partition.settle(keys[has_key], needing[has_key], said[has_key], is_full)
        for of_round, _ in needs:
            part = slice(begin, begin + len(of_round))
            transfers = transfers_of(keys[part], needing[part], said[part], self._capacities)
            self._pending.append(_Round(transfers, transfers.block_bytes(self._nodes)))
            begin = part.stop
        self._known += count

    def _needs_of(self, rows: Sequence[Any]) -> tuple[Integers, Integers]:
        """Returns the keys of a round, and for each the node that needs it. A number below 0 is no key."""
        shares = len(self._node_of_share)
        if rows and isinstance(rows[0], list | tuple):  # a batch sampler has made them
            indices = [index for row in rows for index in row]
            needing = np.repeat(self._node_of_share[np.arange(len(rows)) % shares], [len(row) for row in rows])
        else:
            indices = list(rows)
            needing = self._node_of_share[np.arange(len(rows)) % shares]
        return self._keys.of_many(indices), needing

    def _fits(self, round_: _Round) -> bool:
        """Returns whether the rings of all nodes have room for a round."""
        return all(map(RingSpace.has_room, self._spaces, round_.block_bytes))

    def _transfer(self, round_: _Round) -> None:
        """Sends and receives the records of the next round, and shows it to the workers."""
        began, number, begin, count, transfers = time.perf_counter(), self._arrived, 0, 0, round_.transfers
        for node, (space, size) in enumerate(zip(self._spaces, round_.block_bytes, strict=True)):
            if size:
                place = space.place(number, size)
                assert place is not None  # it fits
                if node == self._node:
                    begin = place
        if len(transfers.keys):
            theirs = transfers.chosen(transfers.sources == self._node)
            mine = transfers.chosen(transfers.targets == self._node)
            outgoing, count = self._pack(theirs), len(mine.keys)
            sent, received = theirs.bytes_by(theirs.targets, self._nodes), mine.bytes_by(mine.sources, self._nodes)
            records_at = begin + aligned(24 * count)
            incoming = torch.frombuffer(self._board.ring, dtype=torch.uint8)[records_at : records_at + sum(received)]
            self._group.hand_over(incoming, received, outgoing, sent)
            if count:
                offsets = records_at + np.cumsum(aligned(mine.lengths)) - aligned(mine.lengths)
                directory = np.frombuffer(self._board.ring, np.int64, 3 * count, begin).reshape(3, count)
                directory[:] = mine.keys, offsets, mine.lengths
            self._board.count_exchange(time.perf_counter() - began)
        self._board.show(self._start, number, begin, count)
        self._arrived += 1

    def _pack(self, mine: Transfers) -> torch.Tensor:
        """Returns the records that this node sends, in their order."""
        ends = np.cumsum(aligned(mine.lengths))
        total = int(ends[-1]) if len(ends) else 0
        if total > len(self._outgoing):
            self._outgoing = np.empty(total, dtype=np.uint8)
        target = memoryview(self._outgoing.data)
        for key, at, size in zip(mine.keys.tolist(), (ends - aligned(mine.lengths)).tolist(), mine.lengths.tolist(), strict=True):
            record = self._arena.get(key)
            if record is None or len(record) != size:
                raise RuntimeError(f"the record of example {key} is damaged")
            target[at : at + size] = record
        return torch.from_numpy(self._outgoing[:total])
