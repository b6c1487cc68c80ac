"""Which item of the reader's stream stands at which position of a training.

The reader's pass has ``length`` items. Slot ``s`` of pass ``q`` is item ``q * length + s``. Of the ``ranks`` ranks of a training,
rank ``r`` takes the slots ``r``, ``r + ranks`` ... . The training's own pass is as long as that of its plain loader:
``drop_last`` leaves out the last items, and a slot after the end repeats the rank's item before it. So the item follows from the
position alone, wherever a training enters, and nothing must be remembered.
"""

from __future__ import annotations

from typing import Any

from lightning_echo.fetching.layout import Layout, Start

__all__ = ["SharedOrder", "item_at", "start_at"]


def item_at(layout: Layout, rank: int, position: int) -> int:
    """Returns the reader's item at a position of a training.

    Args:
        layout: How the training cuts a pass into batches and divides it among ranks.
        rank: The number of this rank's share of a pass.
        position: The position of the fresh example on this rank.

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
    """Returns where a training begins that may have all items from ``item`` on: at the start of one of its batches.

    Args:
        layout: How the training cuts a pass into batches and divides it among ranks.
        item: The first item that the training may have.

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
    """The order of a training that shares: item after item of the reader's stream. See also `Order`.

    Args:
        layout: How the training cuts a pass into batches and divides it among ranks.
        rank: The number of this rank's share of a pass.
        phase: Number of batches of the pass before batch 0 of the run. It is not 0 if the training entered within a pass.
        name: The name that is shared.
    """

    exact = True

    def __init__(self, layout: Layout, rank: int, phase: int, name: str) -> None:
        self._layout, self._rank, self._phase, self._name = layout, rank, phase, name
        self.pass_length = layout.pass_length
        self.position = 0

    def begin_spreading(self) -> None:
        """Does nothing: the reader's passes are spread from the beginning."""

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
        """Does nothing: this order was made with what a state says."""

    def prune(self, position: int) -> None:
        """Does nothing: nothing is remembered."""
