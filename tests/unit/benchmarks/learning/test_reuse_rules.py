"""The rules of the study of reuse, on cases worked out by hand."""

from __future__ import annotations

import math

import pytest
from learning.reuse.rules import (
    Cell,
    default_reuse,
    falling_stays,
    is_tie,
    largest_factor,
    wins,
)
from learning.rules import Interval

BETTER, OPEN, WORSE = Interval(0.7, 0.8, 0.9), Interval(0.8, 0.97, 1.2), Interval(1.05, 1.2, 1.4)


def cells(glyphs: list[Interval], language: list[Interval]) -> list[Cell]:
    """At R = 4, 8, 16."""
    by_task = {"glyphs": glyphs, "language_model": language}
    return [Cell(task, ratio, one) for task, some in by_task.items() for ratio, one in zip((4, 8, 16), some, strict=True)]


LEVEL = cells([OPEN] * 3, [OPEN] * 3)
WON = cells([BETTER, OPEN, OPEN], [OPEN, OPEN, BETTER])


class TestTies:
    @pytest.mark.parametrize(
        ("steps", "best", "expected"),
        [
            ([600, 620, 640], [600, 600, 600], True),  # 20 later in the mean
            ([600, 621, 640], [600, 600, 600], False),
            ([500, 500, math.inf], [600, 600, 600], False),  # one seed less
            ([620, math.inf, 620], [math.inf, 600, 600], True),
            ([math.inf] * 3, [math.inf] * 3, True),
        ],
    )
    def test_are_as_many_seeds_at_the_target_one_evaluation_later_at_most(self, steps, best, expected) -> None:
        assert is_tie(steps, best, spacing_steps=20) is expected


class TestDefaultRule:
    def test_wins_with_a_confirmed_cell_in_each_task_and_none_contradicted(self) -> None:
        assert wins(WON)
        assert not wins(LEVEL)
        assert not wins(cells([BETTER] * 3, [OPEN] * 3))
        assert not wins(cells([BETTER] * 3, [BETTER, BETTER, WORSE]))
        assert not wins([])

    def test_is_each_memory_or_the_falling_share(self) -> None:
        assert default_reuse(LEVEL, LEVEL, LEVEL) == "each"
        assert default_reuse(WON, LEVEL, LEVEL) == "memory"
        assert default_reuse(WON, WON, LEVEL) == "memory"  # the falling share has to beat the winner
        assert default_reuse(WON, LEVEL, WON) == "falling"
        assert default_reuse(LEVEL, WON, LEVEL) == "falling"

    def test_the_falling_share_stays_for_one_ratio_at_which_all_tasks_confirm_it(self) -> None:
        assert falling_stays(cells([WORSE, BETTER, OPEN], [OPEN, BETTER, WORSE]))
        assert not falling_stays(WON)  # of one task at R = 4, of the other one at 16
        assert not falling_stays([])


class TestMaxFactor:
    def test_is_the_largest_factor_at_which_both_tasks_keep_to_the_steps(self) -> None:
        fits, just, misses = Interval(0.9, 1, 1.1), Interval(1, 1.2, 1.25), Interval(1, 1.1, 1.26)
        assert largest_factor({4: [fits, fits], 8: [fits, fits], 16: [fits, just], 32: [just, misses]}) == 16
