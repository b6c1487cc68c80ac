"""What the proof reads, and what it finds out by itself; that it is right about each kind of data set, test_splits.py shows."""

import pickle
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_echo.split.describe import ReadRefused, SplitRefused, describe, locate, pruned
from lightning_echo.split.prove import indices_to_read, prove, read_plainly
from lightning_echo.split.staged import StagedDataset, uncut_stages


class Numbers(Dataset):
    def __init__(self, size=10, make=lambda index: index):
        self.size, self.make = size, make

    def __getitem__(self, index):
        return self.make(index)

    def __len__(self):
        return self.size


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


def test_inside_a_named_cut_they_are_those_of_the_data_set_inside():
    files = ConcatDataset([StagedDataset.of(Numbers(2), augment=abs, decode=abs), Numbers(3)])
    named = StagedDataset.of(files, augment=abs)
    assert to_read(named) == {0: (0, 4)}
    assert to_read(named, raw=True) == {2: (0, 1), 4: (2, 4)}


def proved(dataset, stages=uncut_stages, indices=(0, 1)):
    return prove(dataset, stages, read_plainly(dataset, list(indices)))


def test_it_begins_again_where_only_the_first_read_was_another_and_refuses_where_each_is():
    reads = []  # shared with throw-away copies, as a folder would be
    is_new = Numbers(make=lambda index: (index in reads, reads.append(index))[0])
    assert proved(is_new)[0] > 0
    with pytest.raises(SplitRefused, match=r"dataset\[0\] and dataset\[1\] came out differently when read again"):
        proved(Numbers(make=lambda index: (len(reads), reads.append(index))[0]))


@pytest.mark.parametrize("kind", [SplitRefused, ReadRefused])
def test_a_refusal_that_torch_has_made_again_from_its_message_names_a_hint_once(kind):
    again = kind(f"Caught {kind.__name__} in DataLoader worker process 0.\nOriginal Traceback ...\n{kind('it is round')}")
    assert str(again).count("it is round. ") == str(again).count("StagedDataset.of(") == 1
    assert str(again).startswith(f"Caught {kind.__name__} in")
    sent = pickle.loads(pickle.dumps(kind("it is round")))
    assert (sent.reason, isinstance(sent, ValueError)) == ("it is round", True)
    assert str(sent).startswith(f"the data set cannot be {kind.where}: it is round. ")


@settings(max_examples=20)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.data())
def test_an_index_leads_to_where_a_list_of_all_examples_has_it(lengths, data):
    everything = [(part, index) for part, length in enumerate(lengths) for index in range(length)]
    index = data.draw(st.integers(-len(everything), len(everything) - 1))
    assert locate(list(accumulate(lengths)), index) == everything[index]
