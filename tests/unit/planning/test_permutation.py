"""Permutations that can be entered anywhere: each number once, and none likelier than another."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from lightning_echo.planning.permutation import permute


class TestPermutations:
    @pytest.mark.parametrize("length", [*range(1, 70), 97, 128, 1000, 4097])
    def test_hold_each_number_once(self, length):
        for key in range(5):
            assert sorted(permute(np.arange(length, dtype=np.uint64), length, key)) == list(range(length))

    def test_can_be_looked_up_anywhere(self):
        whole = permute(np.arange(1000, dtype=np.uint64), 1000, 3)
        slots = np.array([999, 0, 500, 500, 31], dtype=np.uint64)
        assert permute(slots, 1000, 3).tolist() == whole[slots].tolist()
        assert slots.tolist() == [999, 0, 500, 500, 31], "what is asked for is left as it was"

    def test_differ_by_key(self):
        found = {tuple(permute(np.arange(50, dtype=np.uint64), 50, key)) for key in range(500)}
        assert len(found) == 500

    @pytest.mark.parametrize("length", [2, 3, 5, 8, 13, 29])
    def test_put_every_number_in_every_slot_equally_often(self, length):
        keys = 100 * length
        counts = np.zeros((length, length))
        for key in range(keys):
            counts[np.arange(length), permute(np.arange(length, dtype=np.uint64), length, key)] += 1
        statistic = ((counts - keys / length) ** 2 / (keys / length)).sum()
        freedom = (length - 1) ** 2
        assert statistic < freedom + 6 * math.sqrt(2 * freedom)

    @pytest.mark.parametrize("length", [3, 4])
    def test_are_all_equally_likely(self, length):
        keys = 200 * math.factorial(length)
        counts = Counter(tuple(permute(np.arange(length, dtype=np.uint64), length, key).tolist()) for key in range(keys))
        expected, freedom = keys / math.factorial(length), math.factorial(length) - 1
        statistic = sum((counts[order] - expected) ** 2 / expected for order in permutations(range(length)))
        assert statistic < freedom + 6 * math.sqrt(2 * freedom)

    def test_do_not_keep_neighbours_together(self):
        """In how many of 2,000 permutations of 100 does 42 follow 41 at once? In one of 100."""
        together = 0
        for key in range(2000):
            values = permute(np.arange(100, dtype=np.uint64), 100, key).tolist()
            together += values.index(42) == values.index(41) + 1
        assert 5 <= together <= 45
