"""The echo factor as a fraction. Error diffusion decides from it which items are fresh, and how often each is used.

A factor such as 2.37 is the fraction 237 / 100 here. Error diffusion rounds it so that no error adds up:

* Of the first ``n`` items of a worker exactly ``floor(n / e)`` are fresh.
* The first ``i`` fresh items of a worker get ``floor(i * e)`` uses together.

So every such fraction is met exactly and on all ranks alike, without random numbers. ``memory_plan.py`` keeps the first rule,
``each_plan.py`` keeps both. Batches that fill the buffer may hold more fresh items. These are not counted, and nothing makes up
for them. The two files say which batches that are.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import gcd
from typing import NamedTuple

__all__ = ["MOST_FACTOR", "EchoRatio"]

MOST_FACTOR = 1_000_000
_DENOMINATOR_LIMIT = 1_000_000


class EchoRatio(NamedTuple):
    """The echo factor ``e = uses / per``. Both are integers, so that 1.1 x 10 is 11, and rounding errors do not add up.

    Example:
        >>> ratio = EchoRatio.of(2.5)
        >>> ratio.fresh_among(10), ratio.fewest_fresh(7), ratio.most_fresh(7), ratio.uses_left(0, 4)
        (4, 2, 3, [1, 2, 1, 2])
    """

    uses: int
    per: int

    @classmethod
    def of(cls, factor: float) -> EchoRatio:
        """Returns the nearest fraction with a denominator up to a million."""
        ratio = Fraction(factor).limit_denominator(_DENOMINATOR_LIMIT)
        return cls(ratio.numerator, ratio.denominator)

    @property
    def fewest_uses(self) -> int:
        """The fewest uses of an item, ``floor(e)``."""
        return self.uses // self.per

    @property
    def most_uses(self) -> int:
        """The most uses of an item, ``ceil(e)``."""
        return -(-self.uses // self.per)

    def fresh_among(self, count: int) -> int:
        """Returns how many of the first ``count`` items are fresh."""
        return count * self.per // self.uses

    def most_items(self, fresh: int) -> int:
        """Returns the largest number of items of which ``fresh`` are fresh."""
        return -(-(fresh + 1) * self.uses // self.per) - 1

    def fewest_fresh(self, size: int) -> int:
        """Returns the fewest fresh items of a batch, ``floor(B / e)``."""
        return size * self.per // self.uses

    def most_fresh(self, size: int) -> int:
        """Returns the most fresh items of a batch, ``ceil(B / e)``."""
        return -(-size * self.per // self.uses)

    def fresh_for(self, echoes: int) -> int:
        """Returns how many fresh items give ``echoes`` echoes, rounded down. Each gives ``e - 1``."""
        return echoes * self.per // max(self.uses - self.per, 1)

    def uses_left(self, first: int, count: int) -> list[int]:
        """Returns the uses that ``count`` fresh items have left after their first use. ``first`` fresh items came before them."""
        totals = [i * self.uses // self.per for i in range(first, first + count + 1)]
        return [after - before - 1 for before, after in pairwise(totals)]

    def staggered(self, first: int, count: int, total: int) -> list[int]:
        """Returns the staggered uses of ``count`` of ``total`` items, from number ``first`` on.

        In the middle of a run, live items have different numbers of uses left. Staggered uses are such numbers. They are evenly
        spread over the uses that an item may have left after its first one, and they are not sorted.
        """
        stride = next((s for s in range(max(total * 5 // 8, 1), total) if gcd(s, total) == 1), 1)
        above, below = self.uses - self.per, self.per * total * 2
        return [-(-(2 * (i * stride % total) + 1) * above // below) for i in range(first, first + count)]
