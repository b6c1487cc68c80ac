"""Rows of whole batches: cut and joined again they are as they were."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_echo.data.difference import difference
from lightning_echo.share.pipeline import cut, joined, rows_of


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def batch_of(first, stop):
    """A batch with a leaf of each kind; row ``n`` of each says ``n``."""
    numbers = torch.arange(first, stop)
    return {
        "pair": Pair(numbers[:, None].expand(-1, 3), numbers),
        "array": np.arange(first, stop),
        "names": [str(number) for number in range(first, stop)],
        "both": (numbers.float(), [numbers]),
    }


def assert_is(found, first, stop):
    """Checks that a batch has these rows, and the containers of `batch_of`."""
    assert (type(found["pair"]), type(found["both"])) == (Pair, tuple)
    assert difference([found], [batch_of(first, stop)]) is None


@settings(max_examples=30)
@given(st.integers(1, 40), st.data())
def test_what_is_cut_and_joined_has_the_same_rows(count, data):
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    whole = batch_of(0, count)
    assert rows_of(whole) == count
    assert_is(cut(whole, start, stop), start, stop)
    middle = data.draw(st.integers(start + 1, stop))
    parts = [cut(whole, start, middle), *([cut(whole, middle, stop)] if middle < stop else [])]
    assert_is(joined(parts), start, stop)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, "3, 4"),
        ({"a": torch.zeros(3), "b": ["x", "y"]}, "2, 3"),
        ({"a": torch.zeros(3), "b": 7}, "3, None"),
        (torch.tensor(1.0), "None"),
        ({}, "none"),
    ],
)
def test_a_batch_whose_leaves_have_no_common_number_of_rows_is_refused(batch, found):
    with pytest.raises(ValueError, match=rf"leaves must have one number of rows, got {found}\. Give the loader"):
        rows_of(batch)
