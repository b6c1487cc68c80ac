"""The live items of one worker: drawn by their place, dropped by their age, in constant time each."""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Buffer", "Live"]


class Live:
    """A live item.

    Attributes:
        position: Its position in the fresh stream.
        left: Uses left; 0 once it is dead.
        used: Uses so far.
        call: Stream position of the first fresh item of its batch, and their number: what was read in one call.
        slot: Where it stands in its list.
    """

    __slots__ = ("call", "left", "position", "slot", "used")

    def __init__(self, position: int, left: int, used: int, call: tuple[int, int]) -> None:
        self.position, self.left, self.used, self.call, self.slot = position, left, used, call, 0


class Buffer:
    """The live items of one worker, and how far its level share of fresh items has come."""

    def __init__(self) -> None:
        self.ones: list[Live] = []  # one use left: drawing it frees its place
        self.more: list[Live] = []  # two or more uses left
        self.births: deque[Live] = deque()  # by age; the dead are passed over
        self.forget: list[int] = []
        self.warming = True
        self.owed = 0  # uses that found no place, due to later examples
        self.staggered = 0  # items that this warm-up has given uses to
        self.delivered = self.fresh = 0  # since the share of fresh items was last set level

    def __len__(self) -> int:
        return len(self.ones) + len(self.more)

    def state(self) -> dict[str, Any]:
        """Plain types. The order of the live items matters: they are drawn by their place.

        What is to be forgotten is left out: the worker of a resumed run holds nothing.
        """
        live = [[item.position, item.left, item.used, *item.call] for item in (*self.ones, *self.more)]
        names = ("warming", "owed", "staggered", "delivered", "fresh")
        return {"live": live, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Buffer:
        buffer = cls()
        for name, value in state.items():
            if name != "live":
                setattr(buffer, name, value)
        for position, left, used, *call in state["live"]:
            item = Live(position, left, used, (call[0], call[1]))
            buffer.put(item)
            buffer.births.append(item)
        buffer.births = deque(sorted(buffer.births, key=lambda item: item.position))
        return buffer

    def start_warming(self) -> None:
        self.warming, self.staggered, self.delivered, self.fresh = True, 0, 0, 0

    def put(self, item: Live) -> None:
        target = self.ones if item.left == 1 else self.more
        item.slot = len(target)
        target.append(item)

    def take(self, source: list[Live], slot: int) -> Live:
        item, last = source[slot], source.pop()
        if last is not item:
            source[slot] = last
            last.slot = slot
        return item

    def remove(self, item: Live) -> None:
        self.take(self.ones if item.left == 1 else self.more, item.slot)

    def drop_until(self, position: int) -> bool:
        """Drops the items up to a stream position; whether there were any."""
        dropped = False
        while self.births and (self.births[0].left == 0 or self.births[0].position <= position):
            item = self.births.popleft()
            if item.left:
                self.remove(item)
                self.owed += item.left
                item.left, dropped = 0, True
                self.forget.append(item.position)
        return dropped

    def restrict(self, most_uses: int) -> None:
        """Drops all uses beyond ``most_uses`` per example."""
        items = [item for item in self.births if item.left]
        self.ones, self.more, self.births = [], [], deque()
        for item in items:
            item.left = min(item.left, most_uses - item.used)
            if item.left > 0:
                self.put(item)
                self.births.append(item)
            else:
                item.left = 0
                self.forget.append(item.position)

    def urgent(self, newest: int, max_age: int, step: int, most_left: int) -> list[Live]:
        """Items that grow too old unless they are drawn in this batch and in every later one.

        ``step``: by how many positions the stream moves between two batches of this worker.
        """
        found = []
        too_old = newest + 1 - max_age  # an item here can be drawn in this batch at the latest, one ``step`` on in the next
        young = too_old + most_left * step
        for item in self.births:
            if item.position >= young:
                break
            if item.left * step > item.position - too_old:
                found.append(item)
        return found
