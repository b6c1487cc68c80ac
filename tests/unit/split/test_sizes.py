"""What examples weigh is estimated from some that are spread over the data, and never ends anything."""

import time

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_echo.split.prove import find_split, weighed
from lightning_echo.split.staged import ExampleSize, StagedDataset, size_of, size_of_examples, sizes_joined, uncut_stages


class Sized(Dataset):
    """Examples of so many bytes. None: it cannot be read."""

    def __init__(self, sizes):
        self.sizes, self.read = sizes, []

    def __getitem__(self, index):
        self.read.append(index)
        torch.rand(1)
        return torch.zeros(self.sizes[index], dtype=torch.uint8)

    def __len__(self):
        return len(self.sizes)


class ByBatches(Sized):
    def __getitems__(self, indices):
        return [Sized.__getitem__(self, index) for index in indices]

    def __getitem__(self, index):
        raise AssertionError("it is read by batches")


@pytest.mark.parametrize("kind", [Sized, ByBatches])
def test_the_first_and_the_last_example_may_be_unlike_all_others_and_a_copy_is_read(kind):
    dataset, before = kind([10, *[1000] * 98, 10]), torch.get_rng_state()
    assert size_of_examples(dataset, uncut_stages) == ExampleSize(1000, (6 * 1000 + 2 * 10) // 8)
    assert dataset.read == []
    assert torch.equal(torch.get_rng_state(), before)


def test_only_what_can_be_read_is_weighed_and_an_example_that_raises_is_left_out():
    assert size_of_examples(Sized([9, None, 11, 10**6]), uncut_stages, [0, 1, 2]) == ExampleSize(11, 10)
    assert size_of_examples(Subset(Sized([9, None, 11]), [2]), uncut_stages) == ExampleSize(11, 11)


@pytest.mark.parametrize("dataset", [Sized([None] * 20), Sized([]), object()], ids=["all raise", "empty", "no length"])
def test_where_nothing_can_be_read_nothing_is_known(dataset):
    assert size_of_examples(dataset, uncut_stages) is None


@pytest.mark.timeout(60, method="thread")  # a timer of its own would be left alone, and no read be cut
def test_of_a_source_that_hangs_one_example_is_begun_however_long_its_stages_take_to_make():
    begun = []

    class Hangs(Sized):
        def __getitem__(self, index):
            begun.append(index)
            time.sleep(3)
            return super().__getitem__(index)

    def make(dataset):
        time.sleep(0.2)  # as the copy of a large data set; the timer of reads runs meanwhile
        return uncut_stages(dataset)

    assert size_of_examples(Hangs([10] * 20), make) is None
    assert begun == [0]


def test_the_largest_of_all_and_the_mean():
    sizes = [size_of(torch.zeros(1), torch.zeros(3)), ExampleSize(100, 100)]
    assert sizes == [(12, 8), (100, 100)]
    assert sizes_joined(sizes) == (100, 54)


class Quiet(Sized):
    def __getitem__(self, index):
        return torch.zeros(self.sizes[index], dtype=torch.uint8)


def test_a_split_that_is_weighed_keeps_the_largest_example_of_its_proof():
    parts = [StagedDataset.of(Quiet(sizes), augment=torch.neg) for sizes in ([1000] * 2, [10, *[2000] * 998, 10], [9000, 9000])]
    dataset = ConcatDataset(parts)
    split = find_split(dataset)
    assert (split.example_bytes, split.packed_bytes) == (9000, (1000 + 10 + 9000) // 3)
    assert weighed(dataset, split) == split.__class__(**{**vars(split), "packed_bytes": (1000 + 6 * 2000 + 9000) // 8})
    assert weighed(dataset, split, [2, 3, 1000]).example_bytes == 9000
