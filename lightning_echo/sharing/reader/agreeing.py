"""What the ranks of a training take and what they miss: it must be the same for all of them.

A rank asks before it takes a *round*, which has one item for each rank. The answer to the first rank that asks is the answer for
all. If the round is still in the window, the ranks take it, and all rounds up to the end that this rank asked for. These items
are held for the other ranks for a moment, even if the reader does not wait for this training. If the round is gone, all ranks
jump from this round to the same later item. This is pure arithmetic, as in ``trainings.py``.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HOLD_SECONDS", "Agreement", "Answer"]

HOLD_SECONDS = 0.25
"""How long items are held that the ranks have agreed on and not all have taken. A rank that comes later takes other items."""


class Answer(NamedTuple):
    """What a rank is told.

    Attributes:
        is_jump: Whether the rank goes on at ``item``. If not, it takes all rounds below ``item``.
        item: An item of the reader's stream.
    """

    is_jump: bool
    item: int


class Agreement:
    """What the ranks of one training have agreed on."""

    def __init__(self) -> None:
        self._end = 0  # the ranks have agreed on all before
        self._held_since = 0.0
        self._jumps: list[tuple[int, int]] = []  # (first item of the round, item to go on at), in order

    def answer(self, asked: int, end: int, low: int, now: float) -> Answer:
        """Answers a rank.

        Args:
            asked: The first item of the round that the rank asks for.
            end: The first item after the rounds that the rank would take at once.
            low: Items below this one may be gone.
            now: The time in seconds.

        Example:
            >>> agreement = Agreement()
            >>> agreement.answer(0, 8, low=0, now=0.0), agreement.answer(4, 12, low=6, now=0.0)  # the other rank: as settled
            (Answer(is_jump=False, item=8), Answer(is_jump=False, item=8))
            >>> agreement.answer(8, 16, low=40, now=1.0), agreement.answer(8, 16, low=44, now=1.0)
            (Answer(is_jump=True, item=40), Answer(is_jump=True, item=40))
        """
        later = [start for start, to in self._jumps if to > asked]
        for start, to in self._jumps:
            if start <= asked < to:
                return Answer(True, to)
        if asked < self._end:
            return Answer(False, min([self._end, *later]))
        if asked < low:
            self._jumps.append((asked, low))
            return Answer(True, low)
        self._end, self._held_since = max(end, asked + 1), now
        return Answer(False, self._end)

    def held_from(self, slowest: int, now: float) -> int | None:
        """Returns the first item that is held; None if no item is held.

        Args:
            slowest: The first item that the slowest of the ranks still needs.
            now: The time in seconds.
        """
        return slowest if slowest < self._end and now - self._held_since < HOLD_SECONDS else None

    def forget(self, slowest: int) -> None:
        """Forgets jumps that all ranks have done.

        Args:
            slowest: The first item that the slowest of the ranks still needs.
        """
        self._jumps = [(start, to) for start, to in self._jumps if to > slowest]
