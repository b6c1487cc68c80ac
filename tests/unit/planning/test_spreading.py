"""Rearranging the start of a pass: what has been seen too recently waits, and nothing is left out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.planning.spreading import identity, spread


def test_takes_what_has_not_been_seen_for_long_enough_and_comes_first():
    # The pass before ended with a, b, c, d; each must stay away for three slots.
    seen = {"b": 3, "c": 2, "d": 1}
    ranks, looked_at = spread("dxcaybz", seen, 3)
    assert [looked_at[rank] for rank in ranks] + list("dxcaybz")[len(looked_at) :] == list("xcdaybz")


def test_moves_nothing_where_nothing_returns_too_soon():
    ranks, looked_at = spread(iter("abcdefgh"), {"g": 1, "h": 3}, 3)
    assert ranks == list(range(len(ranks)))
    assert looked_at == list("abcdefgh")[: len(ranks)]


def test_goes_on_where_a_sampler_itself_asks_again_too_soon():
    ranks, looked_at = spread("aaa", {"a": 1}, 3)
    assert sorted(ranks) == [0, 1, 2]
    assert looked_at == ["a"] * 3


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 12), st.integers(0, 12))
def test_keeps_indices_apart_and_leaves_none_out(before, after, distance, dropped):
    before, after = before[: 12 - dropped], after
    distance = min(distance, len(before))
    seen = {index: distance - i for i, index in enumerate(before[len(before) - distance :])} if distance else {}
    ranks, looked_at = spread(iter(after), seen, distance)
    rearranged = [looked_at[rank] for rank in ranks] + after[len(looked_at) :]
    assert sorted(rearranged) == sorted(after)
    stream = before + rearranged
    last = {}
    for slot, index in enumerate(stream):
        assert slot - last.get(index, -99) >= distance
        last[index] = slot


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (torch.tensor(3), torch.tensor(3), torch.tensor(4)),
        (np.int64(3), 3, 4),
        ([1, torch.tensor(2)], (1, 2), [1, 3]),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        ("3", "3", 3),
    ],
)
def test_entries_are_the_same_index_where_they_are_equal(one, same, other):
    assert identity(one) == identity(same) != identity(other)
    assert hash(identity(one)) == hash(identity(same))
