"""Which example is used when: the plan, pure arithmetic without data, torch or I/O."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from math import gcd
from typing import Any, ClassVar, NamedTuple, TypeVar

# ---------------------------------------------------------------------- hashing

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Returns a 64-bit hash of integers (splitmix64 finaliser), the same on every machine. All seeds are made from it."""
    value = 0
    for number in numbers:
        value = (value + number + _ODD) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def named_seed(seed: int, name: str) -> int:
    """Returns a different seed of 63 bits for each name; the seed itself for an empty name."""
    return mix(seed, *name.encode()) >> 1 if name else seed


# ---------------------------------------------------------------------- ratio
# The echo factor as a fraction: 2.37 is 237 / 100. Error diffusion rounds it so that no error adds up:
#
# * Of the first ``n`` items of a worker exactly ``floor(n / e)`` are fresh.
# * The first ``i`` fresh items of a worker get ``floor(i * e)`` uses together.
#
# So every such fraction is met exactly and on all ranks alike, without random numbers. ``memory.py`` keeps the first rule,
# ``each.py`` keeps both. Batches that fill the buffer may hold more fresh items. These are not counted, and nothing makes up
# for them; the two files define these batches.

MOST_FACTOR = 1_000_000
_DENOMINATOR_LIMIT = 1_000_000


class EchoRatio(NamedTuple):
    """The echo factor ``e = uses / per``. Both are integers, so that 1.1 x 10 is 11, and rounding errors do not add up.

    Example:
        >>> ratio = EchoRatio.of(2.5)
        >>> ratio.fresh_among(10), ratio.fresh_among(7), ratio.most_fresh(7), ratio.uses_left(0, 4)
        (4, 2, 3, [1, 2, 1, 2])
    """

    uses: int
    per: int

    @classmethod
    def of(cls, factor: float) -> EchoRatio:
        """Returns the nearest fraction with a denominator up to a million."""
        ratio = Fraction(factor).limit_denominator(_DENOMINATOR_LIMIT)
        return cls(ratio.numerator, ratio.denominator)

    def fresh_among(self, count: int) -> int:
        """Returns how many of the first ``count`` items are fresh. It is also the fewest in a batch of ``count`` items."""
        return count * self.per // self.uses

    def most_items(self, fresh: int) -> int:
        """Returns the largest number of items of which ``fresh`` are fresh."""
        return -(-(fresh + 1) * self.uses // self.per) - 1

    def most_fresh(self, size: int) -> int:
        """Returns the most fresh items in a batch of ``size`` items."""
        return -(-size * self.per // self.uses)

    def uses_left(self, first: int, count: int) -> list[int]:
        """Returns the uses that ``count`` items have left after their first use, if ``first`` fresh items came before them."""
        totals = [i * self.uses // self.per for i in range(first, first + count + 1)]
        return [after - before - 1 for before, after in pairwise(totals)]

    def staggered(self, first: int, count: int, total: int) -> list[int]:
        """Returns the staggered uses of ``count`` of ``total`` items, from number ``first`` on.

        They are evenly spread over the uses that an item may have left after its first one, and not sorted.
        """
        stride = next((s for s in range(max(total * 5 // 8, 1), total) if gcd(s, total) == 1), 1)
        above, below = self.uses - self.per, self.per * total * 2
        return [-(-(2 * (i * stride % total) + 1) * above // below) for i in range(first, first + count)]


# ---------------------------------------------------------------------- shape


class Reuse(str, Enum):
    """Which items are used again."""

    each = "each"
    """Each fresh item is used ``e`` times."""

    memory = "memory"
    """Echoes are drawn from all items that memory holds."""

    __str__ = str.__str__


def smallest_buffer(batch_size: int, factor: float, workers: int) -> int:
    """Returns how many live items a rank needs to fill a batch: ``B - floor(B / e)`` for each worker."""
    return max(workers, 1) * (batch_size - EchoRatio.of(factor).fresh_among(batch_size))


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """What stays the same while a plan runs. Sizes count items: examples, or batches if whole batches are reused.

    Attributes:
        last_batch_size: Items in the last batch of the plain loader's epoch, which may be a full one.
        batches_per_pass: Batches of the plain loader in one epoch on this rank.
        workers: Number of worker processes, each with its own buffer. 0 counts as one.
        buffer_size: The largest number of live items of a rank.
        distinct: Whether a batch must not hold an index twice. It makes no difference for whole batches.
        most_distance: The largest number of positions that the order keeps between two fresh uses of an index; None: no limit.
        distances: For a pass, the number of positions between two uses of an index, one there and one in the pass before, where
            that may be less than ``most_distance``; None: it is never less.
        phase: Number of batches of a pass that come before batch 0, if a run begins within a pass.
    """

    batch_size: int
    last_batch_size: int
    batches_per_pass: int
    workers: int
    buffer_size: int
    seed: int
    distinct: bool = True
    reuse: Reuse = Reuse.each
    most_distance: int | None = None
    distances: Callable[[int], int] | None = None
    phase: int = 0

    @property
    def pass_length(self) -> int:
        return (self.batches_per_pass - 1) * self.batch_size + self.last_batch_size

    @property
    def buffer_in_pass(self) -> int:
        """The part of the buffer that a short pass can fill without holding an index twice."""
        if not self.distinct or self.pass_length >= self.buffer_size + self.batch_size:
            return self.buffer_size
        return max((self.pass_length - self.batch_size) // 2, 0)

    @cached_property  # asked for in every batch
    def max_age(self) -> int:
        """Number of positions for which an item may be live, so that no batch holds an index twice (see ``order.py``).

        If a pass is not longer than the buffer, this is impossible. Items may then stay live, because exact counts come first.
        """
        if not self.distinct or self.pass_length <= self.buffer_size:
            return 1 << 62
        return self.distance

    @property
    def distance(self) -> int:
        """Number of positions that must lie between two fresh uses of an index; 0 if none must."""
        if not self.distinct:
            return 0
        least = self.buffer_in_pass + self.batch_size
        slack = 2 * max(self.workers, 1) * max(self.batch_size, 16)
        most = self.pass_length if self.most_distance is None else self.most_distance
        # In a short pass, half of what is to spare goes to the slack, and half to the shuffling of the next pass.
        return min(most, least + min(slack, max(self.pass_length - least, 0) // 2))

    def too_old(self, position: int) -> int:
        """Returns the last position whose item may not be live beside a fresh item at ``position``, so that no batch holds an
        index twice."""
        found = position - self.max_age
        if self.distances is None or not (number := position // self.pass_length):
            return found
        return max(found, min(position - self.distances(number), number * self.pass_length - 1))

    def size_of(self, number: int) -> int:
        """Returns the size of batch ``number``: that of the plain loader, epoch after epoch. A fresh pass may end elsewhere."""
        ends_pass = (number + self.phase + 1) % self.batches_per_pass == 0
        return self.last_batch_size if ends_pass else self.batch_size


# ---------------------------------------------------------------------- plan
# Words of this folder:
#
# * *Item*: an example, or a whole batch for ``after_batching`` and ``after_transfer``.
# * *Position*: the number of a fresh item. The fresh items of a rank form one endless stream: position ``s`` is item
#   ``s % pass_length`` of pass ``s // pass_length``.
# * *Live*: an item that was used at least once and may be used again.
#
# A plan fixes which positions are fresh in each batch and which live items are used again. It never sees an index, so that it is
# the same on all ranks. ``order.py`` turns positions into indices. There are two plans:
#
# * `EachPlan` (``each.py``): each fresh item is used ``e`` times. It is live while uses are left.
# * `MemoryPlan` (``memory.py``): ``1 / e`` of the items are fresh, and echoes are drawn from all items that memory holds.
#
# ``DataLoader`` gives batch ``k`` to worker ``k % workers``. Both plans promise:
#
# * Every echo is asked of the worker that holds the item.
# * No position is in a batch twice.
# * The random draws of a batch are seeded with seed and batch number. So the state needs to hold no random state.

P = TypeVar("P", bound="Plan")


class Call(NamedTuple):
    """The fresh items of one batch: first position, and number. A data set that reads whole batches reads them in one call."""

    first: int
    size: int


class PlannedBatch(NamedTuple):
    """One batch of the plan.

    Attributes:
        number: Number of the batch in the run, from 0.
        first_fresh: Position of its first fresh item.
        fresh: Number of fresh ``positions``. They come first.
        stays_live: One byte per item, 1 if it is still live after this batch.
        forget: Positions of items that are no longer live: the worker may drop them.
    """

    number: int
    first_fresh: int
    fresh: int
    positions: Sequence[int]
    stays_live: bytes
    forget: tuple[int, ...]


class LiveItem(NamedTuple):
    """A live item: its position in the fresh stream, and the call in which it was read."""

    position: int
    call: Call


class Plan(ABC):
    """Yields `PlannedBatch` after `PlannedBatch`, without end.

    Attributes:
        number: Number of the next batch.
        position: Position of the next fresh item.
        factor: The echo factor in force.
        pending: Changes of the factor to come. Each is the number of a batch, and the factor from that batch on.
    """

    # The class of what each worker holds, and its name in a state. Such an object counts the items of its worker's batches
    # (``delivered``) and the fresh ones among them (``fresh``), and has the positions to drop (``forget``).
    _holder: ClassVar[Any]
    _state_name: ClassVar[str]
    _ratio: EchoRatio

    def __init__(self, shape: PlanShape, factor: float) -> None:
        self.shape = shape
        self.number = 0
        self.position = 0
        self.factor = factor
        self.pending: list[tuple[int, float]] = []
        self._random = random.Random()
        # `Random.seed` calls this for an integer, after a look at the type. So the numbers are the same, at less cost.
        self._seed = super(random.Random, self._random).seed
        self._held: list[Any] = [self._holder() for _ in range(max(shape.workers, 1))]
        self._set_factor(factor)

    @property
    def live_count(self) -> int:
        return sum(map(len, self._held))

    def live(self) -> list[LiveItem]:
        """Returns the live items of all workers, oldest first."""
        return sorted(LiveItem(item.position, item.call) for item in chain.from_iterable(self._held))

    @property
    def oldest_call(self) -> int:
        """First position of the oldest call in which a live item was read. If nothing is live: the next fresh position."""
        oldest: int = min((held.oldest_call for held in self._held if len(held)), default=self.position)
        return oldest

    def wanted_fresh(self) -> int:
        """Returns how many fresh items the next batch wants. Ask before `next_batch` if the source may have fewer."""
        return self._next_size()[2]

    def next_batch(self, missing: int = 0) -> PlannedBatch:
        """Plans the next batch without the fresh items that are ``missing``, because the source no longer has them.

        Their echoes are left out, too. Otherwise other items would be used more often than the factor demands.
        """
        held, size, fresh = self._next_size()
        if missing:
            fresh -= missing
            paid = self._ratio.most_items(held.fresh + fresh) - held.delivered
            size = min(size - missing, max(paid, fresh))
        positions: Sequence[int]
        if self._echoes:
            echoes, stays_live = self._with_echoes(held, size, fresh)
            positions = [*range(self.position, self.position + fresh), *echoes]
        else:  # nothing stays live, and nothing has to be worked out
            fresh, positions, stays_live = size, range(self.position, self.position + size), bytes(size)
        batch = PlannedBatch(self.number, self.position, fresh, positions, stays_live, tuple(held.forget))
        held.forget.clear()
        self.position, self.number = self.position + fresh, self.number + 1
        return batch

    def _next_size(self) -> tuple[Any, int, int]:
        """Applies the changes that are due and drops items that are too old.

        Returns what the next batch's worker holds, the size of the batch, and its number of fresh items.
        """
        while self.pending and self.pending[0][0] <= self.number:
            self._set_factor(self.pending.pop(0)[1])
        size = self.shape.size_of(self.number)
        held = self._held[self.number % len(self._held)]
        if not self._echoes:
            return held, size, size
        fresh = self._fresh_count(held, size)
        while held.drop_until(self.shape.too_old(self.position + fresh - 1)):
            fresh = self._fresh_count(held, size)
        return held, size, fresh

    def _steady_fresh(self, held: Any, size: int) -> int:
        """Returns how many items of a worker's next batch must be fresh by error diffusion."""
        ratio = self._ratio
        due: int = ratio.fresh_among(held.delivered + size) - held.fresh
        return min(max(due, ratio.fresh_among(size)), ratio.most_fresh(size))

    @abstractmethod
    def _fresh_count(self, held: Any, size: int) -> int:
        """Returns the number of fresh items in the next batch of a worker, with what it holds now."""

    @abstractmethod
    def _with_echoes(self, held: Any, size: int, fresh: int) -> tuple[Sequence[int], bytes]:
        """Fills the next batch. Returns the positions of its echoes, and which of its items stay live: first the fresh ones."""

    def _set_factor(self, factor: float) -> None:
        self.factor, self._ratio = factor, EchoRatio.of(factor)
        self._fewest_uses, self._most_uses = self._ratio.uses // self._ratio.per, -(-self._ratio.uses // self._ratio.per)
        self._echoes = self._most_uses > 1

    def state(self) -> dict[str, Any]:
        """Returns what decides the batches from `number` on, in plain types: positions, never indices."""
        return {
            "number": self.number,
            "position": self.position,
            "factor": self.factor,
            "pending": [list(change) for change in self.pending],
            self._state_name: [held.state() for held in self._held],
        }

    @classmethod
    def from_state(cls: type[P], shape: PlanShape, state: dict[str, Any]) -> P:
        plan = cls(shape, state["factor"])
        plan.number, plan.position = state["number"], state["position"]
        plan.pending = [(int(number), float(factor)) for number, factor in state["pending"]]
        plan._held = [cls._holder.from_state(saved) for saved in state[cls._state_name]]
        return plan

    def change_factor(self, number: int, factor: float) -> None:
        """Applies ``factor`` from batch ``number`` on, instead of all changes that were to come from that batch on."""
        if number < self.number:
            raise ValueError(f"batch {number} is planned already, the next one is {self.number}")
        self.pending = [(earlier, before) for earlier, before in self.pending if earlier < number] + [(number, factor)]
