"""A partitioned cache: the nodes of a job hold different examples, and send them to each other (CoorDL, section 4.2).

How it works, in the order of one batch:

1. Every rank makes the same requests in the same order, since a plan knows no data. A request has a number, its *round*. When the
   leader of a node (its first rank) asks its workers for a batch, it knows from the order which examples *all* ranks need for
   that round (``pipeline/requests.py``). ``DataLoader`` asks for some batches ahead, so the needs are known that early. To plan
   further ahead is not possible: a new factor would then count from a later batch, and the batches would change.
2. The leader gives the needs to a thread (`Exchange`). The threads of all leaders have a Gloo group, and take turns together.
   A turn begins with a header from each node: how far it has asked, how far its workers have taken, whether its cache is full,
   and whether it ends. A round is done in this turn if all nodes have asked for it. An idle node takes its turn four times a
   second.
3. Each node tells the lengths of the needed records that it holds, in one collective with a number for each need. So all nodes
   know who holds what. From that, all compute the same answers: who sends what to whom, where it will lie, and which node may
   keep an example that no node holds. That is the first node that reads it and whose cache is not full (`board.py`).
4. The records are sent by ``all_to_all_single``, with one call for each round, directly into the *ring*: shared memory next to
   the arena (`board.py`). If the ring of a node has no room, all nodes wait. A round is free when the workers have taken their
   records from it.
5. A worker that misses an example waits until its round has arrived, looks into the ring, and reads what is not there.

A failure here cannot make a batch wrong, because what does not arrive is read. When a node ends, dies or does not answer, the
threads of all nodes end, and everything is read from storage. `join` defines how the nodes of a job find each other, and what is
refused.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_echo.cache.arena import Arena, aligned
from lightning_echo.cache.board import (
    Board,
    FromOthers,
    Integers,
    Partition,
    RingSpace,
    Shape,
    Transfers,
    told,
    transfers_of,
)
from lightning_echo.cache.node_cache import Identity, NodeCache, Place, gathered, nodes_of, place_of_process
from lightning_echo.cache.reads import Keys
from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.machine import free_memory_bytes

# ---------------------------------------------------------------------- exchange
# The leaders have a Gloo group of their own. Each leader has one thread for it, and all threads call the same collectives in the
# same order. A turn has up to three kinds of collectives, see above: a header from each node; which of the needed examples each
# node holds; the records of each round for which all rings have room.
#
# **How it ends.** A node that closes announces this in the header of one more turn, and all threads end after that turn. A node
# that cannot continue announces this when it tells its lengths. If a node has died, its connections break, or the time-out of the
# group passes: then the call raises, and the thread ends. (A node cannot announce its end by closing its connections, because
# forked workers hold them open, too.) In each case the board shows that the exchange has ended, and workers read what they need.
# `Exchange.close` waits a few seconds for the thread. If the thread hangs in a collective, it is left alone: it is a daemon
# thread, and refers to nothing of the training.

_BEAT_SECONDS = 0.25  # time between two turns of a node that has nothing to say
_HELD_UP_SECONDS = 0.002  # time between two looks whether the rings have room again
_MOST_ROUNDS = 16  # in a turn
_JOIN_SECONDS = 5.0


class OrdersDifferError(RuntimeError):
    """The nodes have computed different orders."""


class _Header(NamedTuple):
    """What a node announces in each turn."""

    start: int
    asked: int  # rounds whose needs it knows
    known: int  # rounds for which it is known who holds what: the same number on all nodes
    taken: int  # rounds from which its workers have taken everything
    is_full: int
    ends: int


@dataclass(frozen=True)
class Group:
    """The collectives of the leaders, in the order of the nodes."""

    group: Any

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        rows = [torch.zeros(len(values), dtype=torch.int64) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(rows, torch.tensor(values, dtype=torch.int64), group=self.group)
        return [row.tolist() for row in rows]

    def largest(self, values: Integers) -> Integers:
        """Returns at each place the largest number that any node gives there."""
        reduced = torch.from_numpy(values)
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return reduced.numpy()


class Exchange:
    """The leader's exchange with the other nodes, from one start of the pipelines to their end.

    ``node_of_share`` has the node that gets each share of the data. The thread of the exchange before (``after``) must end first.
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
        self.failure = ""  # why the exchange has failed; empty if it has not
        self.error: OrdersDifferError | None = None  # the training must end with it
        self._changed = threading.Condition()
        self._asked: deque[Sequence[Any]] = deque()  # the needs of rounds for which it is not known yet who holds what
        self._asked_count = 0
        self._ends = self._has_ended = False
        # Only the thread uses what follows.
        self._partition = Partition(board.keepers)
        self._known = self._arrived = 0
        self._taken = [0] * board.shape.ranks
        self._is_held_up = False  # whether all have asked for more than the rings have room for
        # The records of each round that is known and has not arrived, and the bytes that they take in the ring of each node.
        self._pending: deque[tuple[Transfers, list[int]]] = deque()
        self._spaces = [RingSpace(capacity) for capacity in self._capacities]
        self._outgoing = np.empty(0, dtype=np.uint8)
        self._thread = threading.Thread(target=self._run, name="lightning_echo-exchange", daemon=True)

    def begin(self) -> None:
        """Starts the thread. Call it after the workers were started, so that none is forked while the thread begins."""
        self._thread.start()

    def ask(self, rows: Sequence[Any]) -> None:
        """Takes the needs of the next round: indices, or lists of them, for each share of the data in turn, again and again."""
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
        with self._changed:  # until there is something to do, or until the other nodes need a turn of this node
            self._changed.wait_for(
                lambda: self._ends or (not self._is_held_up and self._asked_count > self._known),
                _HELD_UP_SECONDS if self._is_held_up else _BEAT_SECONDS,
            )
            asked, ends = self._asked_count, self._ends
        for rank, taken in enumerate(self._taken):
            self._taken[rank] = min(self._board.taken(self._start, rank, taken), self._arrived)
        mine = _Header(self._start, asked, self._known, min(self._taken), self._arena.counts.is_frozen, ends)
        heads = [_Header(*row) for row in self._group.gather(mine)]
        if any(head.ends for head in heads):
            return False
        if any((head.start, head.known) != (self._start, self._known) for head in heads):
            seen = ", ".join(f"start {head.start} at round {head.known}" for head in heads)
            raise RuntimeError(f"the nodes of a partitioned cache have not started together ({seen}): restart all of them")
        for space, head in zip(self._spaces, heads, strict=True):
            space.free(head.taken)
        least_taken = min(head.taken for head in heads)
        last = min(*(head.asked for head in heads), self._known + _MOST_ROUNDS, least_taken + self._board.shape.rounds)
        if last > self._known:
            self._learn(last - self._known, [bool(head.is_full) for head in heads])
        while self._pending and all(map(RingSpace.has_room, self._spaces, self._pending[0][1])):
            self._transfer(*self._pending.popleft())
        self._is_held_up = bool(self._pending) or (last <= self._known and min(head.asked for head in heads) > self._known)
        return True

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
            raise OrdersDifferError(
                "cache.partitioned=True needs an order that every rank can compute, and the nodes have computed different ones: "
                "the sampler does not yield the same on all ranks. Seed it alike on all ranks, or leave partitioned out"
            )
        answers, begin = largest[3:], 0
        has_key = keys >= 0
        self._partition.settle(keys[has_key], needing[has_key], answers[has_key], is_full)
        for of_round, _ in needs:
            part = slice(begin, begin + len(of_round))
            transfers = transfers_of(keys[part], needing[part], answers[part], self._capacities)
            self._pending.append((transfers, transfers.block_bytes(self._nodes)))
            begin = part.stop
        self._known += count

    def _needs_of(self, rows: Sequence[Any]) -> tuple[Integers, Integers]:
        """Returns the keys of a round, and for each the node that needs it. A number below 0 is not a key."""
        shares = len(self._node_of_share)
        if rows and isinstance(rows[0], list | tuple):  # a batch sampler has made them
            indices = [index for row in rows for index in row]
            needing = np.repeat(self._node_of_share[np.arange(len(rows)) % shares], [len(row) for row in rows])
        else:
            indices = list(rows)
            needing = self._node_of_share[np.arange(len(rows)) % shares]
        return self._keys.of_many(indices), needing

    def _transfer(self, transfers: Transfers, block_bytes: Sequence[int]) -> None:
        """Sends and receives the records of the next round, and shows it to the workers."""
        began, number, begin, count = time.perf_counter(), self._arrived, 0, 0
        for node, (space, size) in enumerate(zip(self._spaces, block_bytes, strict=True)):
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
            torch.distributed.all_to_all_single(incoming, outgoing, received, sent, group=self._group.group)
            if count:
                offsets = records_at + np.cumsum(aligned(mine.lengths)) - aligned(mine.lengths)
                directory = np.frombuffer(self._board.ring, np.int64, 3 * count, begin).reshape(3, count)
                directory[:] = mine.keys, offsets, mine.lengths
            self._board.count_exchange(time.perf_counter() - began)
        self._board.show(self._start, number, begin, count)
        self._arrived += 1

    def _pack(self, mine: Transfers) -> torch.Tensor:
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


# ---------------------------------------------------------------------- joining
# All ranks open their caches together. If one rank refuses, all ranks refuse, with the same words.

_TIME_OUT = timedelta(minutes=2)  # of a collective. Each thread answers within a second, unless its process hangs
_SPARE_ROUNDS = 4
_LEAST_ROUNDS = 3  # that a ring holds
_SHARE_OF_FREE = 0.25
_OPTION = "cache.partitioned=True"


class Part(NamedTuple):
    """A rank's description of itself for the others."""

    shares: int  # of a pass
    share: int
    workers: int
    batch_size: int
    ahead: int  # batches that may be asked for and not yet delivered
    origin: str = ""  # what its order depends on, besides the seed of the run
    refusal: str = ""  # why other ranks cannot compute its order; empty if they can


class _Member(NamedTuple):
    place: Place
    part: Part
    identity: Identity
    difference: str
    has_own_cache: bool


@dataclass(eq=False)
class Rounds:
    """A pipeline's part in the exchange, from its start to its end. Only the leader of a node has an ``exchange``."""

    others: FromOthers
    board: Board
    rank: int
    start: int
    share: int
    exchange: Exchange | None
    has_said: bool = False

    def take_note(self) -> str:
        """Returns a message for the user once; empty if there is none. Raises `OrdersDifferError` if the ranks' orders differ."""
        if self.exchange is None or self.has_said or not self.exchange.failure:
            return ""
        if self.exchange.error is not None:
            raise self.exchange.error
        self.has_said = True
        return f"the nodes do not exchange examples any more, and each reads what it does not hold: {self.exchange.failure}"

    def release(self) -> None:
        """Makes the workers of this rank stop waiting, before they are ended."""
        self.board.close_rank(self.rank, self.start)

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()


@dataclass(eq=False)
class Partitioned:
    """This rank's part in a partitioned cache.

    ``rank`` is its number on its node. ``node_of_share`` has the node that gets each share of a pass, ``capacities`` the bytes of
    each node's ring, and ``size`` is the number of bytes that the caches of all nodes may hold.
    """

    board: Board
    node: int
    rank: int
    node_of_share: Sequence[int]
    group: Group
    capacities: Sequence[int]
    cache: NodeCache
    keys: Keys
    size: int
    part: Part
    start: int = 0
    exchange: Exchange | None = None  # the last one, if this rank is the leader of its node

    def begin(self) -> Rounds:
        """Begins a start of the pipelines. All ranks start their pipelines together, and end them together."""
        self.start += 1
        others = FromOthers(self.board, self.node, self.rank, self.start)
        if self.rank == 0:
            arena, before = self.cache.arena, self.exchange
            self.exchange = Exchange(
                self.group, self.node, self.node_of_share, self.board, self.capacities, arena, self.keys, self.start, before
            )
        return Rounds(others, self.board, self.rank, self.start, self.part.share, self.exchange)

    def continues(self, cache: NodeCache, keys: Keys, part: Part) -> bool:
        """Returns whether this rank can take part as before, when the data set was made again and has the same examples."""
        self.keys = keys
        has_failed = self.exchange is not None and bool(self.exchange.failure)
        return cache is self.cache and part == self.part and not has_failed


def join(
    cache: NodeCache,
    keys: Keys,
    identity: Identity,
    part: Part,
    example_bytes: int,
    *,
    difference: str,
    has_own_cache: bool,
    before: Partitioned | None = None,
) -> Partitioned | None:
    """Joins the caches of the nodes, or returns None if the job has a single node. All ranks must call this function together.

    It raises ``ValueError`` if the nodes cannot be joined, and ``RuntimeError`` without memory or connection. ``example_bytes``
    is about what one held example takes, ``difference`` how the data of this rank differs from that of rank 0 (as far as that is
    known), and ``before`` how this rank took part until then, with another data set.
    """
    members: list[_Member] = gathered(_Member(place_of_process(), part, identity, difference, has_own_cache))
    nodes = nodes_of([member.place for member in members])
    leaders = [nodes.index(node) for node in range(max(nodes) + 1)]
    if len(leaders) == 1:
        return None
    differences = [member.difference for member in members]
    if reason := reason_against([member.part for member in members], [member.identity for member in members], differences):
        raise ValueError(f"{_OPTION} is impossible here: {reason}")
    if own := [rank for rank, member in enumerate(members) if member.has_own_cache]:
        raise ValueError(f"{_OPTION} is impossible here: rank {own[0]} cannot reach the cache of its node")
    # If this rank has joined before, all other ranks have joined with it.
    if before is not None and all(gathered(before.continues(cache, keys, part))):
        return before
    me = torch.distributed.get_rank()
    here = [rank for rank, node in enumerate(nodes) if node == nodes[me]]
    board = _board_of_node(here, keys.count, part, example_bytes, len(leaders))
    node_of_share = [0] * part.shares
    for member, node in zip(members, nodes, strict=True):
        node_of_share[member.part.share] = node
    rings: list[tuple[int, int]] = gathered((board.shape.ring_bytes, cache.counts.size))
    capacities, sizes = zip(*(rings[leader] for leader in leaders), strict=True)
    try:
        group = Group(torch.distributed.new_group(leaders, timeout=_TIME_OUT, backend="gloo"))
    except RuntimeError as error:
        raise RuntimeError(f"{_OPTION} needs a connection between the nodes by Gloo, which could not be made: {error}") from error
    return Partitioned(board, nodes[me], here.index(me), node_of_share, group, capacities, cache, keys, sum(sizes), part)


def reason_against(parts: Sequence[Part], identities: Sequence[Identity], differences: Sequence[str]) -> str:
    """Returns why the nodes of these ranks cannot be joined; empty if they can."""
    for rank, part in enumerate(parts):
        if part.refusal:
            return part.refusal
        if part[:1] + part[2:] != parts[0][:1] + parts[0][2:]:
            mine, first = (
                f"{each.workers} workers, batches of {each.batch_size}, {each.ahead} batches ahead"
                f"{each.origin and f' and the order of {each.origin}'}"
                for each in (part, parts[0])
            )
            return (
                f"rank {rank} has {mine}, and rank 0 {first}: they must be the same on all ranks, so that each can compute what "
                "the others need"
            )
    if sorted(part.share for part in parts) != list(range(parts[0].shares)):
        return (
            f"{len(parts)} ranks divide the data into {parts[0].shares} shares: each rank must have one of its own (it is not so "
            "where ranks share the work on the same data)"
        )
    for rank, identity in enumerate(identities):
        if identity.samples is None:
            return f"the data sets of the ranks cannot be compared, since on rank {rank} {identity.why_no_samples}"
        if not identity.is_like(identities[0]):
            return (
                f"rank {rank} has another data set than rank 0 ({identity.kind} of {identity.keys:,} examples, and "
                f"{identities[0].kind} of {identities[0].keys:,}; {differences[rank] or 'eight samples were compared'}), so that "
                "an example of one would be taken for that of the other"
            )
    return ""


def _board_of_node(here: Sequence[int], keys: int, part: Part, example_bytes: int, nodes: int) -> Board:
    """Returns the board of this node, which its leader makes."""
    me = torch.distributed.get_rank()
    board, failure = None, ""
    if me == here[0]:
        try:
            rounds = 2 * (part.ahead + _SPARE_ROUNDS) + 16
            board = Board.create(Shape(keys, len(here), rounds, _ring(len(here), part, example_bytes)))
        except (OSError, ValueError) as error:
            failure = f"rank {me} has no memory for what comes from {nodes - 1} other nodes: {error}"
    made: list[tuple[Any, str]] = gathered((None if board is None else board.address, failure))
    if failures := [failure for _, failure in made if failure]:
        raise RuntimeError(failures[0])
    return Board.attach(made[here[0]][0]) if board is None else board


def _ring(ranks: int, part: Part, example_bytes: int) -> int:
    """Returns the bytes of a ring: enough for all requests ahead of the node's ranks, or else a share of the free memory."""
    of_round = 2 * max(example_bytes, 4096) * part.batch_size * ranks  # examples have different sizes
    wanted = max(of_round // 2 * (part.ahead + _SPARE_ROUNDS), _LEAST_ROUNDS * of_round)
    free = free_memory_bytes()
    if free is None or wanted <= free * _SHARE_OF_FREE:
        return wanted
    if _LEAST_ROUNDS * of_round > free * _SHARE_OF_FREE:
        raise ValueError(
            f"{_LEAST_ROUNDS} batches of {ranks} ranks take {bytes_in_words(_LEAST_ROUNDS * of_round)}, and "
            f"{bytes_in_words(free)} are free"
        )
    return int(free * _SHARE_OF_FREE)
