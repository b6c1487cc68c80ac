"""The key of an example does not depend on the way that leads to it, and no two examples have one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from lightning_echo import StagedDataset
from lightning_echo.cache.reads import Keys


class Numbers(Dataset):
    """Its examples are all different: 1000 times the number of the data set, and the index."""

    def __init__(self, number, length):
        self.number, self.length = number, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return 1000 * self.number + range(self.length)[index]


@st.composite
def data_sets(draw):
    readers = [Numbers(number, draw(st.integers(1, 6))) for number in range(draw(st.integers(1, 3)))]

    def nested(depth):
        kind = draw(st.sampled_from(["reader", "subset", "concat", "cut"] if depth else ["reader"]))
        if kind == "reader":
            return draw(st.sampled_from(readers))
        if kind == "cut":
            return StagedDataset.of(nested(depth - 1), augment=abs)
        if kind == "concat":
            return ConcatDataset([nested(depth - 1) for _ in range(draw(st.integers(1, 3)))])
        inner = nested(depth - 1)
        return Subset(inner, draw(st.lists(st.integers(0, len(inner) - 1), min_size=1, max_size=6)))

    return nested(draw(st.integers(0, 3)))


@settings(max_examples=40, deadline=None)
@given(data_sets())
def test_a_key_belongs_to_one_example(dataset):
    keys = Keys(dataset)
    example_of = {}
    for index in range(len(dataset)):
        key = keys.of(index)
        assert 0 <= key < keys.count
        assert example_of.setdefault(key, dataset[index]) == dataset[index]


def test_parts_of_one_data_set_share_its_keys():
    base = Numbers(0, 20)
    parts = random_split(base, [12, 8], torch.Generator().manual_seed(0))
    assert sorted(Keys(part).of(index) for part in parts for index in range(len(part))) == list(range(20))
    both = Keys(ConcatDataset([base, base]))
    assert (both.count, both.of(27), both.of(7)) == (20, 7, 7)


def test_two_named_cuts_of_one_data_set_have_keys_of_their_own():
    base = Numbers(0, 5)
    both = ConcatDataset([StagedDataset.of(base, augment=abs, decode=decode) for decode in (float, str)])
    keys = Keys(both)
    assert keys.count == 10
    assert [keys.of(index) for index in range(10)] == list(range(10))


@pytest.mark.parametrize("index", [3, np.int64(3), torch.tensor(3), np.uint8(3)])
def test_an_index_may_be_any_integer(index):
    assert Keys(Numbers(0, 10)).of(index) == 3


def test_a_data_set_that_passes_indices_on_counts_from_the_end():
    numbers = Numbers(0, 10)
    assert Keys(ConcatDataset([numbers])).of(-1) == 9
    assert Keys(Subset(numbers, [4, 5])).of(-1) == 5


@pytest.mark.parametrize("index", ["cat", 3.0, (3,), None, 10, -1, -11])
def test_what_is_no_index_of_the_data_set_has_no_key(index):
    assert Keys(Numbers(0, 10)).of(index) is None


@settings(max_examples=30, deadline=None)
@given(data_sets(), st.data())
def test_the_keys_of_many_are_the_keys_of_each(dataset, data):
    keys = Keys(dataset)
    places = data.draw(st.lists(st.integers(-3, len(dataset) + 2), max_size=12))
    for indices in (places, [torch.tensor(place) for place in places], [*places, "a name"]):
        expected = [-1 if (key := of_or_none(keys, index)) is None else key for index in indices]
        assert keys.of_many(indices).tolist() == expected


def of_or_none(keys, index):
    """What `Keys.of` returns; None, too, where the data set itself refuses the index."""
    try:
        return keys.of(index)
    except (IndexError, TypeError):
        return None
