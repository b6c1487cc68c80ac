"""Which item of the reader's stream stands at which position of a training.

The reader's pass has ``length`` items. A training of ``ranks`` ranks takes slot ``s`` of pass ``q`` as item ``q * length + s``,
and rank ``r`` the slots ``r``, ``r + ranks`` ... of it. Its own pass is as long as its plain loader's: ``drop_last`` leaves out
the last items; slots beyond the end are filled with the rank's item before. So a position says which item it is, wherever a
training enters: there is nothing to remember.
"""

from __future__ import annotations

from typing import Any

from lightning_echo.fetching.layout import Layout, Start

__all__ = ["SharedOrder", "item_at", "start_at"]


def item_at(layout: Layout, rank: int, position: int) -> int:
    """Returns the reader's item at a position of a training.

    Args:
        layout: How the training cuts and deals out a pass.
        rank: Which share of it is that of this rank.
        position: In its fresh stream.

    Example:
        >>> layout = Layout(length=7, replicas=2, batch_size=2, last_batch_size=2, batches_per_pass=2)
        >>> [item_at(layout, 1, position) for position in range(5)]
        [1, 3, 5, 5, 8]
    """
    number, offset = divmod(position, layout.pass_length)
    slot = offset * layout.replicas + rank
    if slot >= layout.length:
        slot = slot - layout.replicas if slot >= layout.replicas else slot % layout.length
    return number * layout.length + slot


def start_at(layout: Layout, item: int) -> Start:
    """Returns where a training begins that may have all items from ``item`` on: at a batch of its own, in a whole pass.

    Args:
        layout: How the training cuts and deals out a pass.
        item: The first item that it may have.

    Example:
        >>> layout = Layout(length=10, replicas=1, batch_size=4, last_batch_size=2, batches_per_pass=3)
        >>> start_at(layout, 0), start_at(layout, 5), start_at(layout, 9)
        (Start(position=0, number=0), Start(position=8, number=2), Start(position=10, number=3))
    """
    number, slot = divmod(item, layout.length)
    batch = -(-slot // (layout.batch_size * layout.replicas))
    if batch >= layout.batches_per_pass:
        number, batch = number + 1, 0
    return Start(number * layout.pass_length + batch * layout.batch_size, number * layout.batches_per_pass + batch)


class SharedOrder:
    """The order of a training that shares: item after item of the reader's stream. See `Order` for what is not said here.

    Args:
        layout: How the training cuts and deals out a pass.
        rank: Which share of it is that of this rank.
        phase: Batches of a pass that come before batch 0 of the run, since the training entered within a pass.
        name: The name that is shared.
    """

    exact = True

    def __init__(self, layout: Layout, rank: int, phase: int, name: str) -> None:
        self._layout, self._rank, self._phase, self._name = layout, rank, phase, name
        self.pass_length = layout.pass_length
        self.position = 0

    def begin_spreading(self) -> None:
        """Does nothing: the reader's passes are spread from the start."""

    def take(self, count: int) -> list[Any]:
        """Returns the items of the next ``count`` positions."""
        first = self.position
        self.position += count
        return [item_at(self._layout, self._rank, position) for position in range(first, first + count)]

    def seek(self, position: int) -> None:
        """Goes to a position."""
        self.position = position

    def state(self, position: int) -> dict[str, Any]:
        """Returns what a resumed run needs."""
        del position
        return {"phase": self._phase, "share": self._name}

    def load(self, state: dict[str, Any]) -> None:
        """Does nothing: what a state says was given when this order was made."""

    def prune(self, position: int) -> None:
        """Does nothing: nothing is remembered."""
