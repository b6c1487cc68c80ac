"""The live items of one worker: drawn by their place, dropped by their age, in constant time each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

__all__ = ["Buffer", "Live"]

_STATE = ("warming", "owed", "staggered", "delivered", "fresh")  # attributes that are saved beside the live items


class Live:
    """A live item.

    Attributes:
        position: Its position in the fresh stream.
        left: Uses left; 0 once it is dead.
        used: Uses so far.
        call: Stream position of the first fresh item of its batch, and their number: what was read in one call.
        slot: Where it stands among those with as many uses left.
    """

    __slots__ = ("call", "left", "position", "slot", "used")

    def __init__(self, position: int, left: int, used: int, call: tuple[int, int]) -> None:
        self.position, self.left, self.used, self.call, self.slot = position, left, used, call, 0


class Buffer:
    """The live items of one worker, and how far its level share of fresh items has come."""

    def __init__(self) -> None:
        self.by_left: dict[int, list[Live]] = {}  # uses left -> the items that have so many
        self.births: deque[Live] = deque()  # by age; the dead are passed over
        self.forget: list[int] = []
        self.warming = True
        self.owed = 0  # uses that found no place, due to later examples
        self.staggered = 0  # items that this warm-up has given uses to
        self.delivered = self.fresh = 0  # since the share of fresh items was last set level
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Live]:
        return chain.from_iterable(self.by_left.values())

    @property
    def last_uses(self) -> int:
        """Items with one use left: drawing one frees its place."""
        return len(self.by_left.get(1, ()))

    def nearly_used_up(self) -> list[Live]:
        """The items with the fewest uses left."""
        return self.by_left[min(self.by_left)] if self.by_left else []

    def state(self) -> dict[str, Any]:
        """Plain types. The order of the live items matters: they are drawn by their place.

        What is to be forgotten is left out: the worker of a resumed run holds nothing.
        """
        live = [[item.position, item.left, item.used, *item.call] for item in self]
        uses_left = sum(item.left for item in self)  # said twice: a state that lacks an item is found out
        return {"live": live, "uses_left": uses_left, **{name: getattr(self, name) for name in _STATE}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Buffer:
        buffer = cls()
        for name in _STATE:
            setattr(buffer, name, state[name])
        for position, left, used, *call in state["live"]:
            item = Live(position, left, used, (call[0], call[1]))
            buffer.put(item)
            buffer.births.append(item)
        buffer.births = deque(sorted(buffer.births, key=lambda item: item.position))
        return buffer

    def start_warming(self) -> None:
        self.warming, self.staggered, self.delivered, self.fresh = True, 0, 0, 0

    def clear(self) -> None:
        """Takes out all items, to be put back with other uses."""
        self.by_left, self._count, self.staggered = {}, 0, 0

    def put(self, item: Live) -> None:
        others = self.by_left.setdefault(item.left, [])
        item.slot = len(others)
        others.append(item)
        self._count += 1

    def take(self, left: int, slot: int) -> Live:
        """Takes out one of the items that have ``left`` uses left."""
        others = self.by_left[left]
        item, last = others[slot], others.pop()
        if last is not item:
            others[slot] = last
            last.slot = slot
        if not others:
            del self.by_left[left]
        self._count -= 1
        return item

    def remove(self, item: Live) -> None:
        self.take(item.left, item.slot)

    def draw(self, count: int, least: int, most: int, rand: Callable[[], float]) -> list[Live]:
        """Takes out ``count`` items at random, each with the same probability, and of all uses left their share.

        Were items drawn one by one, the number that dies in a batch would swing; taken by strata (systematic sampling over
        the items, ordered by uses left) it stays level, and a buffer hardly larger than a batch lasts.

        Args:
            count: How many.
            least: At least so many of them have one use left, if there are so many: their places are needed.
            most: At most so many, if the others suffice: else the next batch would find too few.
            rand: Uniform numbers from [0, 1).
        """
        ones, live = self.last_uses, self._count
        share = int(ones * count / live + rand()) if live else 0
        share = min(max(min(share, most), least, count - (live - ones), 0), ones, count)
        drawn = self._draw_from(1, share, rand)
        count, live, offset = count - share, live - ones, rand()
        before = passed = 0
        for left in sorted(self.by_left):
            if left > 1 and count:
                passed += len(self.by_left[left])
                upto = int(passed * count / live + offset) if passed < live else count
                if upto > before:
                    drawn += self._draw_from(left, upto - before, rand)
                    before = upto
        return drawn

    def _draw_from(self, left: int, count: int, rand: Callable[[], float]) -> list[Live]:
        others = self.by_left.get(left, [])
        if count < len(others):
            return [self.take(left, int(rand() * len(others))) for _ in range(count)]
        self._count -= len(self.by_left.pop(left, []))
        return others

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
        self.clear()
        self.births = deque()
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
