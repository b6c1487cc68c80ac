"""Data sets that only route indices, told by what they do; where an index leads, against Python's own lists."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_echo.protecting.objects import is_concat, is_subset
from lightning_echo.splitting.stages import locate


class Numbers(Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 4


class NamedSubset(Subset):
    name = "train"


class OwnSubset(Subset):
    def __getitem__(self, index):
        return -super().__getitem__(index)

    def __getitems__(self, indices):  # torch demands it of a subclass that has the other one
        return [self[index] for index in indices]


class OwnCalls(Subset):
    def __getitems__(self, indices):
        return [0 for _ in indices]


class OwnConcat(ConcatDataset):
    def __getitem__(self, index):
        return 0


@pytest.mark.parametrize(
    ("make", "subset", "concat"),
    [
        (lambda: Subset(Numbers(), [0, 2]), True, False),
        (lambda: NamedSubset(Numbers(), [0, 2]), True, False),
        (lambda: OwnSubset(Numbers(), [0, 2]), False, False),
        (lambda: OwnCalls(Numbers(), [0, 2]), False, False),
        (lambda: ConcatDataset([Numbers(), Numbers()]), False, True),
        (lambda: OwnConcat([Numbers(), Numbers()]), False, False),
        (Numbers, False, False),
        (lambda: [1, 2], False, False),
    ],
)
def test_only_one_that_reads_as_its_base_routes(make, subset, concat):
    assert (is_subset(make()), is_concat(make())) == (subset, concat)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.data())
def test_an_index_leads_to_where_a_list_of_all_examples_has_it(lengths, data):
    everything = [(part, index) for part, length in enumerate(lengths) for index in range(length)]
    index = data.draw(st.integers(-len(everything), len(everything) - 1))
    assert locate(list(accumulate(lengths)), index) == everything[index]
