"""What the proof reads, and what it finds out by itself; that it is right about each kind of data set, test_splits.py shows."""

from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_echo.split.describe import SplitRefused, describe, pruned
from lightning_echo.split.prove import ignores_index, indices_to_read, prove, read_plainly
from lightning_echo.split.staged import StagedDataset, Stages, unchanged, uncut_stages


class Numbers(Dataset):
    """Its example is what ``make`` returns for an index."""

    def __init__(self, size=10, make=lambda index: index):
        self.size, self.make = size, make

    def __getitem__(self, index):
        return self.make(index)

    def __len__(self):
        return self.size


class Endless(Dataset):
    def __getitem__(self, index):
        return index


class EndlessRaw(Endless):
    read = decode = staticmethod(abs)


class Recorded(Sequence):
    """1,000 places; notes at which it is asked."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 1000

    def __getitem__(self, place):
        self.asked.append(place)
        return place


def to_read(dataset, indices=None, *, raw=False):
    """The indices that the proof reads, by the number of the leaf in the description."""
    return indices_to_read(pruned(describe(dataset), raw), dataset, indices)


def test_the_first_and_the_last_index_that_lead_to_each_leaf_are_read():
    one, other = Numbers(3), Numbers(10)
    dataset = ConcatDataset([one, Subset(other, [7, 2]), one])  # the leaves are number 1 and, inside the subset, number 3
    assert to_read(dataset) == {1: (0, 7), 3: (3, 4)}
    assert to_read(dataset, [6, 4, 0]) == {1: (6, 0), 3: (4, 4)}
    assert to_read(Subset(dataset, [4, 5, 3])) == {2: (1, 1), 4: (0, 2)}
    assert to_read(dataset, [1, 2]) == {1: (1, 2)}, "a leaf to which no index leads is left out"
    assert to_read(dataset, []) == {}


def test_indices_may_be_negative_and_tensors():
    dataset = ConcatDataset([Numbers(3), Numbers(2)])
    assert to_read(dataset, [-1, -5]) == {1: (-5, -5), 2: (-1, -1)}
    (first, last) = to_read(dataset, list(torch.tensor([0, 2])))[1]
    assert (int(first), int(last)) == (0, 2)


def test_no_more_are_looked_at_than_needed():
    indices, (one, other) = Recorded(), (Numbers(1), Numbers(1))
    assert to_read(ConcatDataset([one, other] * 500), indices) == {1: (0, 998), 2: (1, 999)}
    assert indices.asked == [0, 1, 999, 998]


def test_inside_a_named_cut_they_are_those_of_the_data_set_inside():
    files = ConcatDataset([StagedDataset.of(Numbers(2), augment=abs, decode=abs), Numbers(3)])
    named = StagedDataset.of(files, augment=abs)
    assert to_read(named) == {0: (0, 4)}
    assert to_read(named, raw=True) == {2: (0, 1), 4: (2, 4)}


def test_of_a_data_set_without_a_length_the_first_is_read():
    assert to_read(Endless()) == to_read(StagedDataset.of(Endless(), augment=abs)) == {0: (0, 0)}
    assert to_read(StagedDataset.of(EndlessRaw(), augment=abs), raw=True) == {1: (0, 0)}
    assert to_read(Numbers(1)) == {0: (0, 0)}
    assert to_read(Numbers(0)) == {}


class Next(Dataset):
    """Returns what comes next, whatever it is asked for; and the index, where that is wanted."""

    def __init__(self, with_index=False):
        self.with_index, self.count = with_index, 0

    def __getitem__(self, index):
        self.count += 1
        return self.count, self.with_index and index


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Next(), True),
        (Next(with_index=True), False),
        (Numbers(), False),
        (StagedDataset.of([5, 5], augment=abs), False),
        (Numbers(make=lambda index: 1 / 0), False),
    ],
    ids=["next", "next and index", "by index", "all alike", "broken"],
)
def test_a_data_set_ignores_its_index_if_it_goes_on_and_gives_the_same_for_two(dataset, expected):
    assert ignores_index(dataset, 0, 1) is expected
    assert vars(dataset).get("count", 0) == 0


def proved(dataset, stages=uncut_stages, indices=(0, 1)):
    return prove(dataset, stages, read_plainly(dataset, list(indices)))


def test_the_proof_returns_the_bytes_of_the_largest_loaded_example():
    growing = Numbers(make=lambda index: torch.zeros(1000 * index, dtype=torch.uint8))
    for indices in ([1, 9], [9, 1]):
        assert 9000 <= proved(growing, indices=indices)[0] < 9200


def test_another_number_of_examples_is_refused():
    stages = Stages(lambda index: index, unchanged, reused=("load",), redone=(), load_many=lambda indices: [0])
    with pytest.raises(SplitRefused, match="returned 1 examples for 2 indices"):
        proved(Numbers(), lambda _: stages)


def test_it_begins_again_where_only_the_first_read_was_another_and_refuses_where_each_is():
    reads = []  # shared with throw-away copies, as a folder would be
    is_new = Numbers(make=lambda index: (index in reads, reads.append(index))[0])
    assert proved(is_new)[0] > 0
    with pytest.raises(SplitRefused, match=r"dataset\[0\] and dataset\[1\] came out differently when read again"):
        proved(Numbers(make=lambda index: (len(reads), reads.append(index))[0]))


def test_the_stages_may_edit_what_they_get():
    loaded = torch.zeros(2)
    stages = Stages(lambda index: loaded, lambda index, example: example.add_(1), reused=("load",), redone=("add",))
    assert proved(Numbers(make=lambda index: torch.ones(2)), lambda _: stages)[0] >= 8
    assert loaded.tolist() == [0, 0]
