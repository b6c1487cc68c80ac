"""Each fresh item is used ``e`` times: the rule of the paper.

The words are those of ``plan.py``, and these:

* *Due*: the fresh items that the error diffusion asks for up to the end of the next batch, and that no batch has had yet.
* *Steady*: said of the number of fresh items in a batch of ``B``. It is the number of due items, but at least ``floor(B / e)``
  and at most ``ceil(B / e)``.
* *Warming*: a buffer is being filled. Its batches have as many fresh items as that needs.
* *Staggered*: said of uses left that differ from item to item, as in the middle of a run. Items that fill a buffer get such uses,
  so that they do not all come to their last use at once.
* *Owed*: uses that items did not get, because the buffer had no room or the items grew too old. Later items get them. Below 0:
  items got too many uses, and later items get fewer.

The rules:

* Every worker has a `Buffer` of its own. An item's *age* is counted in positions of the stream.
* Uses per item follow from error diffusion: the ``i``-th item gets ``floor(i * e) - floor((i - 1) * e)`` uses.
* Fresh items per batch follow from error diffusion, too: their number is steady. The rest of the batch is drawn from the live
  items without replacement, so no item is in a batch twice. Each has the same probability (`Buffer.draw`), with two exceptions:
  items that would grow too old come first (`Buffer.urgent`), and of the items with one use left, the next batch must find enough.
* A buffer must not hold more live items than allowed, nor fewer than the next batch needs. Therefore single items may get up to
  three uses fewer or more, and later items make up for it. So the share of fresh items, and with it the factor, is exact with any
  buffer.
* Warming fills the buffer to the middle between what a batch needs and what may be live. From then on batches are steady.
  Below factor 2 only ``e - 1`` of the fresh items are used again, so only that share of the spare room is filled.
* A smaller factor drops the uses beyond it. A larger one adds to the uses that are left. Then the buffer is warmed as at the
  start, if too few items are live.
* An item is live for at most ``max_age`` positions. Near that age its uses are drawn first. ``order.py`` keeps the same index at
  least that far apart from one pass to the next, so that no index is live twice. If a pass is not longer than the buffer, this is
  impossible: items then stay live, and a batch may hold an index twice.

If whole batches are the items, the plan has batch size 1 and one buffer.

Source: Choi et al. 2019, arXiv 1907.05550, section 2 (echo factor, shuffle buffer after echoing).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

from lightning_echo.plan.plan import Call, Plan, mix

_STATE = ("warming", "owed", "staggered", "delivered", "fresh")  # attributes that are saved besides the live items


@dataclass(slots=True, eq=False)
class Live:
    """A live item, with its uses left and uses so far, the call that read it, and its index in a list of `Buffer.by_left`."""

    position: int
    left: int
    used: int
    call: Call
    list_index: int = 0


class Buffer:
    """The live items of one worker, drawn at random and dropped by age, both in constant time for each item.

    Attributes:
        by_left: The live items by their uses left.
        by_age: The items, oldest first. Those that are no longer live may still be among them.
        forget: Positions whose remaining uses were dropped, and that no batch has named yet.
        warming: Whether the buffer is warming.
        owed: Uses that later items are owed. Below 0: uses that later items lose.
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
    def oldest_call(self) -> int:
        return min(item.call.first for item in self)

    @property
    def last_use_count(self) -> int:
        """Number of items with one use left. Each of them that is drawn makes room for another item."""
        return len(self.by_left.get(1, ()))

    def with_fewest_left(self) -> list[Live]:
        return self.by_left[min(self.by_left)] if self.by_left else []

    def state(self) -> dict[str, Any]:
        """Returns plain types, without `forget`: the worker of a resumed run holds nothing. The order of the items matters."""
        live = [[item.position, item.left, item.used, *item.call] for item in self]
        uses_left = sum(item.left for item in self)  # follows from `live`, so that a missing item in a state is noticed
        return {"live": live, "uses_left": uses_left, **{name: getattr(self, name) for name in _STATE}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Buffer:
        buffer = cls()
        for name in _STATE:
            setattr(buffer, name, state[name])
        items = [Live(position, left, used, Call(*call)) for position, left, used, *call in state["live"]]
        for item in items:
            buffer.put(item)
        buffer.by_age = deque(sorted(items, key=lambda item: item.position))
        return buffer

    def clear(self) -> None:
        """Takes out all items. The caller puts them back, with other uses left."""
        self.by_left, self._count, self.staggered = {}, 0, 0

    def put(self, item: Live) -> None:
        others = self.by_left.setdefault(item.left, [])
        item.list_index = len(others)
        others.append(item)
        self._count += 1

    def remove(self, item: Live) -> None:
        """Takes out an item. The last one of its list takes its place."""
        others = self.by_left[item.left]
        last = others.pop()
        if last is not item:
            others[item.list_index] = last
            last.list_index = item.list_index
        if not others:
            del self.by_left[item.left]
        self._count -= 1

    def draw(self, count: int, least_last: int, most_last: int, rand: Callable[[], float]) -> list[Live]:
        """Takes out ``count`` items at random. Each item has the same probability, and each number of uses left gets its share.

        If items were drawn one by one, the number of items that come to their last use would change much from batch to batch.
        Systematic sampling over the items, ordered by uses left, keeps that number steady. So even a buffer that is hardly larger
        than a batch is large enough.

        Of the items with one use left, at least ``least_last`` are drawn, if there are so many, because the plan needs their
        room. At most ``most_last`` are drawn, if the others are enough: the next batch needs the rest.
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
            drawn = []
            for _ in range(count):
                drawn.append(others[int(rand() * len(others))])
                self.remove(drawn[-1])
            return drawn
        self._count -= len(self.by_left.pop(left, []))
        return others

    def drop_until(self, position: int) -> bool:
        """Drops the items up to a position, whose uses are owed to later items. Returns whether there were any."""
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

        ``newest`` is the position of the newest item after this batch. From one batch of this worker to the next one there are
        ``advance`` positions. An item has at most ``most_left`` uses left.
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


class EachPlan(Plan):
    """Uses each fresh item ``e`` times; see `Plan`.

    Example:
        >>> from lightning_echo.plan.plan import PlanShape
        >>> shape = PlanShape(batch_size=4, last_batch_size=4, batches_per_pass=100, workers=1, buffer_size=8, seed=0)
        >>> plan = EachPlan(shape, factor=2.0)
        >>> fresh = [plan.next_batch().fresh for _ in range(6)]  # warming, then half of each batch
        >>> fresh[0], fresh[2:]
        (4, [2, 2, 2, 2])
    """

    _holder = Buffer
    _state_name = "buffers"

    def _with_echoes(self, buffer: Buffer, size: int, fresh: int) -> tuple[list[int], bytes]:
        fresh_items = self._fresh_items(buffer, size, fresh)
        # The most fresh items of this worker's next full batch. A short batch in between needs fewer.
        next_size = self.shape.batch_size
        next_fresh = next_size if buffer.warming else self._steady_fresh(buffer, next_size)
        echoes = self._draw(buffer, size - fresh, fresh, next_fresh)
        self._keep_within_bounds(buffer, fresh_items, echoes, next_fresh)
        for item in chain(fresh_items, echoes):
            if item.left:
                buffer.put(item)
        buffer.by_age.extend(fresh_items)
        stays_live = bytes([item.left > 0 for item in chain(fresh_items, echoes)])
        return [item.position for item in echoes], stays_live

    def _set_factor(self, factor: float) -> None:
        rises = factor > self.factor
        super()._set_factor(factor)
        workers, batch_size = len(self._held), self.shape.batch_size
        needed = batch_size - self._ratio.fresh_among(batch_size)
        spare = max(self.shape.buffer_in_pass // workers - needed, 0)
        if factor < 2:  # only e - 1 of the items are used again, so the same number of live items would reach further back
            spare = ceil(spare * (factor - 1))
        self._most_live, self._warm_live = needed + spare, needed + spare // 2  # where the buffer is full; where warming ends
        batches = max(ceil(factor / (batch_size * (factor - 1))), 1) if factor > 1 else 1  # until one must have an echo
        self._advance = workers * self._ratio.most_fresh(batches * batch_size)
        for buffer in self._held:
            buffer.restrict(self._most_uses)
            buffer.delivered = buffer.fresh = buffer.owed = 0
            if rises:
                self._add_uses(buffer)
            if len(buffer) < self._warm_live:
                buffer.warming, buffer.staggered = True, 0

    def _add_uses(self, buffer: Buffer) -> None:
        """Raises the uses that live items have left to staggered uses of the new, higher factor."""
        items = sorted(buffer, key=lambda item: (-item.used, item.position))
        buffer.clear()
        for item, left in zip(items, sorted(self._ratio.staggered(0, len(items), len(items))), strict=True):
            item.left = max(item.left, min(left, self._most_uses - item.used))
            buffer.put(item)

    def _fresh_count(self, buffer: Buffer, size: int) -> int:
        """Returns the steady number of fresh items, or more while the buffer is warming."""
        live, steady = len(buffer), self._steady_fresh(buffer, size)
        if not buffer.warming and live < size - steady:
            buffer.warming, buffer.staggered, buffer.delivered, buffer.fresh = True, 0, 0, 0
        if buffer.warming:
            most = self._ratio.most_fresh(size)
            return max(size - live, min(size, most + self._warm_live - live), most)
        fewest = self._ratio.fresh_among(size)
        due = self._ratio.fresh_among(buffer.delivered + size) - buffer.fresh
        if due == fewest + 1 and live >= size - fewest:
            staying = sum(left > 0 for left in self._ratio.uses_left(buffer.fresh, due))
            if staying > self._most_live - live + min(size - due, buffer.last_use_count):
                return fewest  # there is no room for the other item: it comes in the next batch
        return steady

    def _fresh_items(self, buffer: Buffer, size: int, fresh: int) -> list[Live]:
        """Returns a batch's fresh items with their uses left, and counts them unless the buffer is warming."""
        if buffer.warming:
            left = self._warming_uses(buffer, size, fresh)
        else:
            buffer.delivered += size
            if not fresh:
                return []
            left = self._ratio.uses_left(buffer.fresh, fresh)
            self._settle_owed(buffer, left)
            buffer.fresh += fresh
        call = Call(self.position, fresh)
        return [Live(self.position + i, uses_left, 1, call) for i, uses_left in enumerate(left)]

    def _warming_uses(self, buffer: Buffer, size: int, fresh: int) -> list[int]:
        """Returns the uses that each fresh item has left while the buffer is warming. Ends warming when enough items are live.

        Some make up for the uses of the batch's echoes. Others fill the buffer, with staggered uses. The rest is used once.
        """
        to_fill = max(self._warm_live - len(buffer), 0)
        uses, per = self._ratio
        regular = min((size - fresh) * per // max(uses - per, 1), fresh)  # each of these gives e - 1 echoes
        filling = min(fresh - regular, to_fill)
        left = self._ratio.uses_left(buffer.fresh, regular)
        left += self._ratio.staggered(buffer.staggered, filling, buffer.staggered + to_fill)
        buffer.staggered += filling
        buffer.warming = fresh - regular < to_fill
        return [0] * (fresh - len(left)) + left

    def _settle_owed(self, buffer: Buffer, left: list[int]) -> None:
        """Gives items a use that is owed, or takes one away if others got too many. All stay within floor and ceil of e."""
        least, most = self._fewest_uses - 1, self._most_uses - 1
        for i, uses in enumerate(left):
            change = (buffer.owed > 0) - (buffer.owed < 0)
            if least <= uses + change <= most or least == most:
                left[i] += change
                buffer.owed -= change

    def _draw(self, buffer: Buffer, count: int, fresh: int, next_fresh: int) -> list[Live]:
        """Draws the echoes of a batch with ``fresh`` fresh items, and takes one use from each."""
        if not count:
            return []
        self._seed(mix(self.shape.seed, self.number))
        live, next_echoes = len(buffer) + fresh, self.shape.batch_size - next_fresh
        crowd = max(next_fresh - next_echoes, 0)  # fresh items of the next batch that its echoes cannot make room for
        least_last, most_last = live - self._most_live + crowd, live - next_echoes
        newest = self.position + fresh - 1
        drawn = buffer.urgent(newest, self.shape.max_age, self._advance, self._fewest_uses + 1)[:count]
        for item in drawn:
            buffer.remove(item)
        last = sum(item.left == 1 for item in drawn)
        drawn += buffer.draw(count - len(drawn), least_last - last, most_last - last, self._random.random)
        for item in drawn:
            item.left -= 1
            item.used += 1
        return drawn

    def _keep_within_bounds(self, buffer: Buffer, fresh_items: list[Live], echoes: list[Live], next_fresh: int) -> None:
        """Ends or adds uses, so that neither too many nor too few items are live. Later items make up for it."""
        staying = [item for item in chain(echoes, fresh_items) if item.left]
        count = len(buffer) + len(staying)
        for _ in range(count - self._most_live):
            item = min(chain(staying, buffer.with_fewest_left()), key=lambda item: (item.left, -item.used))
            if item in staying:
                staying.remove(item)
            else:
                buffer.remove(item)
                buffer.forget.append(item.position)
            buffer.owed += item.left
            item.left = 0
        if (too_few := self.shape.batch_size - next_fresh - count) > 0:
            ended = sorted((item for item in chain(fresh_items, echoes) if not item.left), key=lambda item: item.used)
            for item in ended[:too_few]:
                buffer.owed -= 1
                item.left = 1
