"""Who holds what, who keeps what, who sends what to whom, and where it will lie. All nodes do this arithmetic in the same way.

The *needs* of a round are the keys of all examples that all ranks read for it, in the order of the slots. Each need also says
which node needs the example. For each key, a node *tells* a number, which says whether the node holds the example and how long
its record is. It is 0 if the node does not hold it. The largest number of all nodes counts, so one collective is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BEING_WRITTEN", "NOT_HELD", "Integers", "Partition", "RingSpace", "Transfers", "told", "transfers_of"]

Integers = npt.NDArray[np.int64]

NOT_HELD, BEING_WRITTEN = -2, -1  # in place of the length of a record
_NODE_BITS = 16
_ALIGNMENT = 64
_ENTRY_BYTES = 24  # of the directory of a round: key, offset, length


def told(lengths: Integers, node: int) -> Integers:
    """Returns the numbers that a node tells for the needed keys.

    Args:
        lengths: The length of the record of each key on this node, `NOT_HELD` or `BEING_WRITTEN`.
        node: Number of the node.

    Example:
        >>> told(np.array([NOT_HELD, BEING_WRITTEN, 0, 7]), node=1).tolist()
        [0, 65537, 131073, 589825]
    """
    return np.where(lengths == NOT_HELD, 0, ((lengths + 2) << _NODE_BITS) | node)


def _lengths(said: Integers) -> Integers:
    """Returns the lengths of `told`."""
    return (said >> _NODE_BITS) - 2


class Partition:
    """Which node may keep each key.

    Args:
        keepers: For each key the number of the node that may keep it, plus one. 0: no node has needed it yet. This class changes
            the array, and workers read it.
    """

    def __init__(self, keepers: npt.NDArray[np.int16]) -> None:
        self._keepers = keepers

    def settle(self, keys: Integers, needing: Integers, said: Integers, is_full: Sequence[bool]) -> None:
        """Decides who keeps the examples that are needed and that no node holds.

        It is the first node that needs the example and has room. If that node becomes full before it has kept the example,
        another node may keep it.

        Args:
            keys: The needs.
            needing: The node that needs each of them.
            said: The number that was told for each of them, the largest of all nodes.
            is_full: Whether the cache of each node is full. It was asked before the numbers were told.
        """
        keepers = self._keepers
        is_held = said > 0
        keepers[keys[is_held]] = ((said[is_held] & ((1 << _NODE_BITS) - 1)) + 1).astype(np.int16)
        full = np.array([False, *is_full])  # place 0 stands for no node, which is never full
        present = keepers[keys]
        may = ~is_held & ((present == 0) | full[present]) & ~full[1:][needing]
        # If a key is there several times, the last assignment counts. So the keys are assigned from the last to the first.
        keepers[keys[may][::-1]] = (needing[may][::-1] + 1).astype(np.int16)


class Transfers(NamedTuple):
    """What is sent for a round, in the order of source, target, and need.

    Attributes:
        sources: The node that sends each record.
        targets: The node that gets it.
        keys: Its key.
        lengths: Its bytes.
    """

    sources: Integers
    targets: Integers
    keys: Integers
    lengths: Integers

    def chosen(self, which: npt.NDArray[Any]) -> Transfers:
        """Returns some of them."""
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


def transfers_of(keys: Integers, needing: Integers, said: Integers, capacities: Sequence[int]) -> Transfers:
    """Returns what is sent for a round. A record is sent to a node once, however many of its ranks need it.

    Args:
        keys: The needs.
        needing: The node that needs each of them.
        said: The number that was told for each of them, the largest of all nodes.
        capacities: Bytes of the ring of each node. What does not fit into an empty ring is not sent.
    """
    lengths, holders = _lengths(said), said & ((1 << _NODE_BITS) - 1)
    places = np.flatnonzero((said > 0) & (lengths >= 0) & (holders != needing))
    pairs = holders[places] * len(capacities) + needing[places]
    _, first = np.unique(pairs * (keys.max(initial=0) + 1) + keys[places], return_index=True)
    first = first[np.lexsort((first, pairs[first]))]
    places = places[first]
    found = Transfers(holders[places], needing[places], keys[places], lengths[places])
    fits = _fitting(found, np.array(capacities, dtype=np.int64))
    return found if fits.all() else found.chosen(fits)


def _fitting(transfers: Transfers, capacities: Integers) -> npt.NDArray[np.bool_]:
    """Returns which records fit into the ring of their node. It has no loop over nodes, because there may be hundreds."""
    by_target = np.argsort(transfers.targets, kind="stable")
    targets = transfers.targets[by_target]
    ends = np.cumsum(aligned(transfers.lengths[by_target]) + _ENTRY_BYTES)
    firsts = np.searchsorted(targets, targets)  # for each record the first one of its node
    before = np.concatenate([[0], ends])[firsts]
    fits = np.empty(len(targets), dtype=bool)
    fits[by_target] = ends - before + _ALIGNMENT <= capacities[targets]
    return fits


def aligned(size: Any) -> Any:
    """Returns a size, or an array of them, rounded up."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RingSpace:
    """Where blocks lie in a ring. Each node computes this for the rings of all nodes, and so knows whether there is room.

    Args:
        capacity: Bytes of the ring.

    Example:
        >>> space = RingSpace(100)
        >>> space.place(0, 60), space.place(1, 60)
        (0, None)
        >>> space.free(1)
        >>> space.place(1, 60), space.place(2, 40), space.place(3, 1)
        (0, 60, None)
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: deque[tuple[int, int, int]] = deque()  # round, where it begins, where it ends

    def place(self, number: int, size: int) -> int | None:
        """Takes space for a round, in one piece. Returns where the space begins; None if there is no room now.

        Args:
            number: The number of the round. It must be larger than all before it.
            size: Bytes of the round, at least 1.
        """
        begin = self._begin(size)
        if begin is not None:
            self._blocks.append((number, begin, begin + size))
        return begin

    def has_room(self, size: int) -> bool:
        """Returns whether there is room for this number of bytes now."""
        return not size or self._begin(size) is not None

    def _begin(self, size: int) -> int | None:
        if not self._blocks:
            return 0 if size <= self._capacity else None
        first, last = self._blocks[0][1], self._blocks[-1][2]
        wraps = self._blocks[-1][1] < first  # the last block lies before the first
        if wraps:
            return last if size <= first - last else None
        if size <= self._capacity - last:
            return last
        return 0 if size <= first else None

    def free(self, before: int) -> None:
        """Gives back the space of all rounds before one."""
        while self._blocks and self._blocks[0][0] < before:
            self._blocks.popleft()
