"""What the proof reads, and what it finds out by itself; that it is right about each kind of data set, test_splits.py shows."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from split_cases import seed
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_echo.split.describe import SplitRefused, describe, pruned
from lightning_echo.split.prove import ignores_index, indices_to_read, prove, read_plainly
from lightning_echo.split.staged import StagedDataset, Stages, unchanged, uncut_stages


class Numbers(Dataset):
    def __init__(self, size=10):
        self.size = size

    def __getitem__(self, index):
        return index

    def __len__(self):
        return self.size


def to_read(dataset, indices=None, *, raw=False):
    """The indices that the proof reads, by the number of the leaf in the description."""
    return indices_to_read(pruned(describe(dataset), raw), dataset, indices)


class TestIndices:
    def test_they_are_the_first_and_the_last_that_lead_to_each_leaf(self):
        one, other = Numbers(3), Numbers(10)
        dataset = ConcatDataset([one, Subset(other, [7, 2]), one])  # the leaves are number 1 and, inside the subset, number 3
        assert to_read(dataset) == {1: (0, 7), 3: (3, 4)}
        assert to_read(dataset, [6, 4, 0]) == {1: (6, 0), 3: (4, 4)}
        assert to_read(Subset(dataset, [4, 5, 3])) == {2: (1, 1), 4: (0, 2)}

    def test_a_leaf_to_which_no_index_leads_is_left_out(self):
        dataset = ConcatDataset([Numbers(3), Numbers(2)])
        assert to_read(dataset, [1, 2]) == {1: (1, 2)}
        assert to_read(dataset, []) == {}

    def test_indices_may_be_negative_and_tensors(self):
        dataset = ConcatDataset([Numbers(3), Numbers(2)])
        assert to_read(dataset, [-1, -5]) == {1: (-5, -5), 2: (-1, -1)}
        (first, last) = to_read(dataset, list(torch.tensor([0, 2])))[1]
        assert (int(first), int(last)) == (0, 2)

    def test_no_more_are_looked_at_than_needed(self):
        looked_at = []

        class Recorded(Sequence):
            def __len__(self):
                return 1000

            def __getitem__(self, place):
                looked_at.append(place)
                return place

        evens_and_odds = [Numbers(1) for _ in range(1000)]
        one, other = Numbers(1), Numbers(1)
        evens_and_odds[::2], evens_and_odds[1::2] = [one] * 500, [other] * 500
        assert to_read(ConcatDataset(evens_and_odds), Recorded()) == {1: (0, 998), 2: (1, 999)}
        assert looked_at == [0, 1, 999, 998]

    def test_inside_a_named_cut_they_are_those_of_the_data_set_inside(self):
        files = ConcatDataset([StagedDataset.of(Numbers(2), augment=abs, decode=abs), Numbers(3)])
        named = StagedDataset.of(files, augment=abs)
        assert to_read(named) == {0: (0, 4)}
        assert to_read(named, raw=True) == {2: (0, 1), 4: (2, 4)}

    def test_of_a_data_set_without_a_length_the_first_is_read(self):
        class Endless(Dataset):
            def __getitem__(self, index):
                return index

        class EndlessRaw(Endless):
            read = decode = staticmethod(abs)

        assert to_read(Endless()) == to_read(StagedDataset.of(Endless(), augment=abs)) == {0: (0, 0)}
        assert to_read(StagedDataset.of(EndlessRaw(), augment=abs), raw=True) == {1: (0, 0)}
        assert to_read(Numbers(1)) == {0: (0, 0)}
        assert to_read(Numbers(0)) == {}


class Next(Dataset):
    """Returns what comes next, whatever it is asked for."""

    def __init__(self):
        self.count = 0

    def __getitem__(self, index):
        self.count += 1
        return self.count


class NextAndIndex(Next):
    def __getitem__(self, index):
        return super().__getitem__(index), index


class Broken(Next):
    def __getitem__(self, index):
        raise OSError("no such file")


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Next(), True),
        (NextAndIndex(), False),
        (Numbers(), False),
        (StagedDataset.of([5, 5], augment=abs), False),
        (Broken(), False),
    ],
    ids=["next", "next and index", "by index", "all alike", "broken"],
)
def test_a_data_set_ignores_its_index_if_it_goes_on_and_gives_the_same_for_two(dataset, expected):
    assert ignores_index(dataset, 0, 1) is expected
    assert vars(dataset).get("count", 0) == 0


class TestProof:
    def test_it_returns_the_bytes_of_the_largest_loaded_example(self):
        class Growing(Numbers):
            def __getitem__(self, index):
                return torch.zeros(1000 * index, dtype=torch.uint8)

        dataset = Growing()
        for indices in ([1, 9], [9, 1]):
            assert 9000 <= prove(dataset, uncut_stages, read_plainly(dataset, indices))[0] < 9200

    def test_the_random_states_are_put_back_and_do_not_matter(self):
        class Noisy(Numbers):
            def __getitem__(self, index):
                return torch.rand(()).item(), np.random.rand(), random.random()

        dataset = Noisy()
        seed(1)
        first = read_plainly(dataset, [0])
        following = torch.rand(()).item(), np.random.rand(), random.random()
        assert read_plainly(dataset, [0]).examples == first.examples
        seed(1)
        assert (torch.rand(()).item(), np.random.rand(), random.random()) == following

    def test_another_number_of_examples_is_refused(self):
        dataset = Numbers()
        stages = Stages(dataset.__getitem__, unchanged, reused=("load",), redone=(), load_many=lambda indices: [0])
        with pytest.raises(SplitRefused, match="returned 1 examples for 2 indices"):
            prove(dataset, lambda _: stages, read_plainly(dataset, [0, 1]))

    def test_it_begins_again_where_only_the_first_read_was_another(self):
        on_disk = {}  # shared with throw-away copies, as a folder would be

        class Saving(Numbers):
            def __getitem__(self, index):
                is_first = index not in on_disk
                on_disk[index] = "from disk"
                return "made" if is_first else "from disk"

        dataset = Saving()
        assert prove(dataset, uncut_stages, read_plainly(dataset, [0, 1]))[0] > 0

    def test_one_that_is_another_at_every_read_is_refused(self):
        reads = []

        class Changing(Numbers):
            def __getitem__(self, index):
                reads.append(index)
                return len(reads)

        dataset = Changing()
        with pytest.raises(SplitRefused, match=r"dataset\[0\] and dataset\[1\] came out differently when read again"):
            prove(dataset, uncut_stages, read_plainly(dataset, [0, 1]))

    def test_the_stages_may_edit_what_they_get(self):
        loaded = torch.zeros(2)
        stages = Stages(lambda index: loaded, lambda index, example: example.add_(1), reused=("load",), redone=("add",))

        class Ones(Numbers):
            def __getitem__(self, index):
                return torch.ones(2)

        dataset = Ones()
        assert prove(dataset, lambda _: stages, read_plainly(dataset, [0, 1]))[0] >= 8
        assert loaded.tolist() == [0, 0]
