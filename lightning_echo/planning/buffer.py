"""The live items of one worker. They are drawn at random and dropped by their age, both in constant time for each item.

The words are those of ``plan.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

__all__ = ["Buffer", "Call", "Live"]

_STATE = ("warming", "owed", "staggered", "delivered", "fresh")  # attributes that are saved beside the live items


class Call(NamedTuple):
    """The fresh items of one batch. A data set that reads whole batches reads them in one call.

    Attributes:
        first: Position of the first of these items.
        size: Number of these items.
    """

    first: int
    size: int


class Live:
    """A live item.

    Attributes:
        position: Its position in the fresh stream.
        left: Uses left; 0 when it is no longer live.
        used: Uses so far.
        call: The call in which it was read.
        list_index: Its index in the list of the items that have as many uses left. The buffer sets it.
    """

    __slots__ = ("call", "left", "list_index", "position", "used")

    def __init__(self, position: int, left: int, used: int, call: Call) -> None:
        self.position, self.left, self.used, self.call, self.list_index = position, left, used, call, 0


class Buffer:
    """The live items of one worker, and the uses that its next batches have to make up for.

    Attributes:
        by_left: The live items by their uses left.
        by_age: The items, oldest first. Those that are no longer live may still be among them.
        forget: Positions whose remaining uses were dropped. No batch has told this to the worker yet.
        warming: Whether the buffer is warming.
        owed: Uses that later items are owed. Below 0: uses that later items have to give back.
        staggered: Number of items that got staggered uses in this warming.
        delivered: Number of items in this worker's batches since warming ended or the factor changed. The steady number of fresh
            items follows from it and from `fresh`.
        fresh: Number of fresh items among them.
    """

    def __init__(self) -> None:
        self.by_left: dict[int, list[Live]] = {}
        self.by_age: deque[Live] = deque()
        self.forget: list[int] = []
        self.warming = True
        self.owed = self.staggered = self.delivered = self.fresh = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Live]:
        return chain.from_iterable(self.by_left.values())

    @property
    def last_use_count(self) -> int:
        """Number of items with one use left. When one of them is drawn, there is room for another item."""
        return len(self.by_left.get(1, ()))

    def with_fewest_left(self) -> list[Live]:
        """Returns the items with the fewest uses left."""
        return self.by_left[min(self.by_left)] if self.by_left else []

    def state(self) -> dict[str, Any]:
        """Returns plain types. The order of the live items matters: `draw` chooses them by their index in a list.

        `forget` is left out: the worker of a resumed run holds nothing.
        """
        live = [[item.position, item.left, item.used, *item.call] for item in self]
        uses_left = sum(item.left for item in self)  # follows from `live`, so that a missing item in a state is noticed
        return {"live": live, "uses_left": uses_left, **{name: getattr(self, name) for name in _STATE}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Buffer:
        """Returns the buffer whose `state` it was."""
        buffer = cls()
        for name in _STATE:
            setattr(buffer, name, state[name])
        items = [Live(position, left, used, Call(*call)) for position, left, used, *call in state["live"]]
        for item in items:
            buffer.put(item)
        buffer.by_age = deque(sorted(items, key=lambda item: item.position))
        return buffer

    def start_warming(self) -> None:
        """Begins to fill the buffer, and sets the counts back."""
        self.warming, self.staggered, self.delivered, self.fresh = True, 0, 0, 0

    def clear(self) -> None:
        """Takes out all items. The caller puts them back, with other uses left."""
        self.by_left, self._count, self.staggered = {}, 0, 0

    def put(self, item: Live) -> None:
        """Puts an item into the list of those that have as many uses left."""
        others = self.by_left.setdefault(item.left, [])
        item.list_index = len(others)
        others.append(item)
        self._count += 1

    def remove(self, item: Live) -> None:
        """Takes out this item."""
        self._take(item.left, item.list_index)

    def _take(self, left: int, list_index: int) -> Live:
        """Takes out one of the items with ``left`` uses left. The last item of the list takes its place."""
        others = self.by_left[left]
        item, last = others[list_index], others.pop()
        if last is not item:
            others[list_index] = last
            last.list_index = list_index
        if not others:
            del self.by_left[left]
        self._count -= 1
        return item

    def draw(self, count: int, least_last: int, most_last: int, rand: Callable[[], float]) -> list[Live]:
        """Takes out ``count`` items at random. Each item has the same probability, and each number of uses left gets its share.

        If items were drawn one by one, the number of items that come to their last use would change much from batch to batch.
        Systematic sampling over the items, ordered by uses left, keeps that number steady. So even a buffer that is hardly larger
        than a batch is large enough.

        Args:
            count: Number of items to draw.
            least_last: The least number of drawn items with one use left, if there are so many. The plan needs their room.
            most_last: The largest number of drawn items with one use left, if the others are enough. The next batch needs the
                rest.
            rand: Returns uniform random numbers from [0, 1).
        """
        ones, live = self.last_use_count, self._count
        last = int(ones * count / live + rand()) if live else 0
        last = min(max(min(last, most_last), least_last, count - (live - ones), 0), ones, count)
        drawn = self._draw_from(1, last, rand) if last else []
        count, live, offset = count - last, live - ones, rand()
        before = passed = 0
        for left in sorted(self.by_left) if count else ():
            if left > 1:
                passed += len(self.by_left[left])
                upto = int(passed * count / live + offset) if passed < live else count
                if upto > before:
                    drawn += self._draw_from(left, upto - before, rand)
                    before = upto
                    if before == count:
                        break
        return drawn

    def _draw_from(self, left: int, count: int, rand: Callable[[], float]) -> list[Live]:
        others = self.by_left.get(left, [])
        if count < len(others):
            return [self._take(left, int(rand() * len(others))) for _ in range(count)]
        self._count -= len(self.by_left.pop(left, []))
        return others

    def drop_until(self, position: int) -> bool:
        """Drops the items up to a position. Their uses are owed to later items.

        Returns:
            Whether any item was dropped.
        """
        dropped = False
        while self.by_age and (self.by_age[0].left == 0 or self.by_age[0].position <= position):
            item = self.by_age.popleft()
            if item.left:
                self.remove(item)
                self.owed += item.left
                item.left, dropped = 0, True
                self.forget.append(item.position)
        return dropped

    def restrict(self, most_uses: int) -> None:
        """Drops uses, so that no item gets more than ``most_uses`` in all."""
        items = [item for item in self.by_age if item.left]
        self.clear()
        self.by_age = deque()
        for item in items:
            item.left = min(item.left, most_uses - item.used)
            if item.left > 0:
                self.put(item)
                self.by_age.append(item)
            else:
                item.left = 0
                self.forget.append(item.position)

    def urgent(self, newest: int, max_age: int, advance: int, most_left: int) -> list[Live]:
        """Returns the items that grow too old unless this batch and every later one draws them.

        Args:
            newest: Position of the newest item after this batch.
            max_age: Number of positions for which an item may be live.
            advance: Number of positions from one batch of this worker to its next batch.
            most_left: The largest number of uses that an item has left.
        """
        found = []
        too_old = newest + 1 - max_age  # an item here must be drawn in this batch, an item ``advance`` later in the next one
        young = too_old + most_left * advance
        for item in self.by_age:
            if item.position >= young:
                break
            if item.left * advance > item.position - too_old:
                found.append(item)
        return found
