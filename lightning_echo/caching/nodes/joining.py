"""How the nodes of a job join their caches when these are opened: who takes part, what is refused, the group and the boards.

All ranks do this together. What one rank refuses, all ranks refuse, with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.caching.keys import Keys
from lightning_echo.caching.node_cache import Identity, NodeCache, Place, gathered, nodes_of, place_of_process
from lightning_echo.caching.nodes.board import Board, Counted, FromOthers, Shape
from lightning_echo.caching.nodes.exchange import Exchange, Group
from lightning_echo.protecting.memory import bytes_in_words

__all__ = ["Part", "Partitioned", "Rounds", "join", "reason_against"]

_TIME_OUT = timedelta(minutes=2)  # of a collective. Each thread answers within a second, unless its process hangs
_SPARE_ROUNDS = 4
_LEAST_ROUNDS = 3  # that a ring holds
_SHARE_OF_FREE = 0.25
_OPTION = "cache.partitioned=True"


class Part(NamedTuple):
    """What a rank tells the others about itself.

    Attributes:
        shares: Number of shares of a pass.
        share: The share of this rank.
        workers: Number of its worker processes.
        batch_size: Number of examples in a batch.
        ahead: Number of batches that may be asked for and not yet delivered.
        origin: What its order depends on, beside the seed of the run.
        refusal: Why other ranks cannot compute its order; empty if they can.
    """

    shares: int
    share: int
    workers: int
    batch_size: int
    ahead: int
    origin: str = ""
    refusal: str = ""


class _Member(NamedTuple):
    place: Place
    part: Part
    identity: Identity
    difference: str
    has_own_cache: bool


class Rounds:
    """What a pipeline needs for the exchange, from its start to its end.

    Args:
        others: What the workers of this rank need.
        board: The board of the node.
        rank: Number of this rank on its node.
        start: Number of the start.
        share: The share of a pass that is this rank's.
        exchange: The exchange, on the leader of a node; None on other ranks.

    Attributes:
        others: As given.
        share: As given.
        exchange: As given.
    """

    def __init__(self, others: FromOthers, board: Board, rank: int, start: int, share: int, exchange: Exchange | None) -> None:
        self.others, self.share, self.exchange = others, share, exchange
        self._board, self._rank, self._start = board, rank, start
        self._has_said = False

    def take_note(self) -> str:
        """Returns once what the user should know; empty if there is nothing.

        Raises:
            OrdersDifferError: The ranks do not have the same order.
        """
        if self.exchange is None or self._has_said or not self.exchange.failure:
            return ""
        if self.exchange.error is not None:
            raise self.exchange.error
        self._has_said = True
        return f"the nodes do not exchange examples any more, and each reads what it does not hold: {self.exchange.failure}"

    def release(self) -> None:
        """Tells the workers of this rank to wait no more, before they are ended."""
        self._board.close_rank(self._rank, self._start)

    def close(self) -> None:
        """Ends the thread."""
        if self.exchange is not None:
            self.exchange.close()


class Partitioned:
    """How this rank takes part in a partitioned cache.

    Args:
        board: The board of the node.
        node: Number of the node.
        rank: Number of this rank on its node.
        node_of_share: For each share of a pass the node that gets it.
        group: The group of the leaders.
        capacities: Bytes of the ring of each node.
        cache: The cache of the node.
        keys: The keys of the data set.
        sizes: Bytes that the cache of each node may hold.
        part: What this rank has told the others about itself.

    Attributes:
        nodes: Number of nodes.
        size: Bytes that the caches of all nodes may hold together.
    """

    def __init__(
        self,
        board: Board,
        node: int,
        rank: int,
        node_of_share: Sequence[int],
        group: Group,
        capacities: Sequence[int],
        cache: NodeCache,
        keys: Keys,
        sizes: Sequence[int],
        part: Part,
    ) -> None:
        self._board, self._node, self._rank, self._node_of_share = board, node, rank, list(node_of_share)
        self._capacities, self._cache, self._keys, self._part = capacities, cache, keys, part
        self._group, self.nodes = group, len(capacities)
        self._start, self.size = 0, sum(sizes)
        self._last: Exchange | None = None

    def begin(self) -> Rounds:
        """Begins a start of the pipelines. All ranks start their pipelines together, and end them together."""
        self._start += 1
        others = FromOthers(self._board, self._node, self._rank, self._start)
        if self._rank == 0:
            self._last = Exchange(
                self._group,
                self._node,
                self._node_of_share,
                self._board,
                self._capacities,
                self._cache.arena,
                self._keys,
                self._start,
                self._last,
            )
        exchange = self._last if self._rank == 0 else None
        return Rounds(others, self._board, self._rank, self._start, self._part.share, exchange)

    def goes_on(self, cache: NodeCache, keys: Keys, part: Part) -> bool:
        """Returns whether this rank can take part as before, when the data set was made anew and has the same examples."""
        self._keys = keys
        has_failed = self._last is not None and bool(self._last.failure)
        return cache is self._cache and part == self._part and not has_failed

    def count(self, received: int, waited_seconds: float) -> None:
        """Counts what was delivered on this rank."""
        self._board.count(self._rank, received, waited_seconds)

    @property
    def counted(self) -> Counted:
        """What was counted on this node."""
        return self._board.counted


# ---------------------------------------------------------------------- joining


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
    """Joins the caches of the nodes. All ranks must call this function together.

    Args:
        cache: The cache of this node.
        keys: The keys of the data set.
        identity: What data set this rank has.
        part: What this rank tells the others about itself.
        example_bytes: About how many bytes one held example takes.
        difference: How the data of this rank differs from that of rank 0; empty if no difference is known.
        has_own_cache: Whether this rank could not share the cache of its node.
        before: How this rank took part until now, with another data set.

    Returns:
        How this rank takes part; None if the job has a single node.

    Raises:
        ValueError: The nodes cannot be joined.
        RuntimeError: There is no memory, or no connection.
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
    if before is not None and all(gathered(before.goes_on(cache, keys, part))):
        return before
    me = torch.distributed.get_rank()
    here = [rank for rank, node in enumerate(nodes) if node == nodes[me]]
    board = _board_of_node(here, keys.count, part, example_bytes, len(leaders))
    node_of_share = [0] * part.shares
    for member, node in zip(members, nodes, strict=True):
        node_of_share[member.part.share] = node
    rings: list[tuple[int, int]] = gathered((board.shape.ring_bytes, cache.counts.size))
    capacities, sizes = zip(*(rings[leader] for leader in leaders), strict=True)
    group = _group_of(leaders)
    return Partitioned(board, nodes[me], here.index(me), node_of_share, group, capacities, cache, keys, sizes, part)


def reason_against(parts: Sequence[Part], identities: Sequence[Identity], differences: Sequence[str]) -> str:
    """Returns why the nodes of these ranks cannot be joined; empty if they can.

    Args:
        parts, identities: Those of the ranks.
        differences: How the data of each rank differs from that of rank 0, as far as that is known.
    """
    for rank, part in enumerate(parts):
        if part.refusal:
            return part.refusal
        if part[:1] + part[2:] != parts[0][:1] + parts[0][2:]:
            return (
                f"rank {rank} has {_words(part)}, and rank 0 {_words(parts[0])}: they must be the same on all ranks, so that "
                "each can compute what the others need"
            )
    if sorted(part.share for part in parts) != list(range(parts[0].shares)):
        return (
            f"{len(parts)} ranks divide the data into {parts[0].shares} shares: each rank must have one of its own (it is not so "
            "where ranks share the work on the same data)"
        )
    for rank, identity in enumerate(identities):
        if identity.samples is None:
            return (
                "the data sets of the ranks cannot be compared, since a worker_init_fn may change them: leave it out, or leave "
                "partitioned out"
            )
        if not identity.is_like(identities[0]):
            return (
                f"rank {rank} has another data set than rank 0 ({identity.kind} of {identity.keys:,} examples, and "
                f"{identities[0].kind} of {identities[0].keys:,}; {differences[rank] or 'eight samples were compared'}), so that "
                "an example of one would be taken for that of the other"
            )
    return ""


def _words(part: Part) -> str:
    order = f" and the order of {part.origin}" if part.origin else ""
    return f"{part.workers} workers, batches of {part.batch_size}, {part.ahead} batches ahead{order}"


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
    if failures := [said for _, said in made if said]:
        raise RuntimeError(failures[0])
    return Board.attach(made[here[0]][0]) if board is None else board


def _ring(ranks: int, part: Part, example_bytes: int) -> int:
    """Returns the bytes of a ring: enough for what all ranks of the node ask for ahead, or else a share of the free memory."""
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


def _group_of(leaders: Sequence[int]) -> Group:
    try:
        return Group(torch.distributed.new_group(leaders, timeout=_TIME_OUT, backend="gloo"))
    except RuntimeError as error:
        raise RuntimeError(f"{_OPTION} needs a connection between the nodes by Gloo, which could not be made: {error}") from error
