"""The echo factor as a fraction, and what error diffusion makes of it: who is fresh, and how often each is used.

Error diffusion: of the first ``n`` examples exactly ``floor(n / e)`` are fresh, and the first ``i`` fresh ones get
``floor(i * e)`` uses. So every factor is met exactly, on all ranks alike, and no coin is flipped.
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
    """``uses / per`` is the echo factor: integers, so that 1.1 x 10 is 11 and no rounding error adds up.

    Example:
        >>> ratio = EchoRatio.of(2.5)
        >>> ratio.fresh(10), ratio.fewest_fresh(7), ratio.most_fresh(7), ratio.uses_left(0, 4)
        (4, 2, 3, [1, 2, 1, 2])
    """

    uses: int
    per: int

    @classmethod
    def of(cls, factor: float) -> EchoRatio:
        """The nearest fraction with a denominator up to a million."""
        ratio = Fraction(factor).limit_denominator(_DENOMINATOR_LIMIT)
        return cls(ratio.numerator, ratio.denominator)

    @property
    def fewest_uses(self) -> int:
        """``floor(e)``."""
        return self.uses // self.per

    @property
    def most_uses(self) -> int:
        """``ceil(e)``."""
        return -(-self.uses // self.per)

    def fresh(self, delivered: int) -> int:
        """Fresh items among the first ``delivered`` ones."""
        return delivered * self.per // self.uses

    def most_delivered(self, fresh: int) -> int:
        """Most items among which so many, and no more, are fresh."""
        return -(-(fresh + 1) * self.uses // self.per) - 1

    def fewest_fresh(self, size: int) -> int:
        """``floor(B / e)``."""
        return size * self.per // self.uses

    def most_fresh(self, size: int) -> int:
        """``ceil(B / e)``."""
        return -(-size * self.per // self.uses)

    def used_up(self, echoes: int) -> int:
        """Fresh items whose further uses are as many as these echoes."""
        return echoes * self.per // max(self.uses - self.per, 1)

    def uses_left(self, first: int, count: int) -> list[int]:
        """Uses after the first one of ``count`` fresh items, of which ``first`` came before."""
        totals = [i * self.uses // self.per for i in range(first, first + count + 1)]
        return [after - before - 1 for before, after in pairwise(totals)]

    def staggered(self, first: int, count: int, total: int) -> list[int]:
        """Uses left as in the middle of a run: those of ``count`` of ``total`` items, from ``first`` on.

        Evenly spread over what an item has left after its first use, and not in order.
        """
        stride = next((s for s in range(max(total * 5 // 8, 1), total) if gcd(s, total) == 1), 1)
        above, below = self.uses - self.per, self.per * total * 2
        return [-(-(2 * (i * stride % total) + 1) * above // below) for i in range(first, first + count)]
