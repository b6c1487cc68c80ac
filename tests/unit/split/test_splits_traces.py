"""Splitting leaves no trace in the user's objects or in files that are opened late; whole batches are read as before."""

import random

import numpy as np
import pytest
import torch
from split_cases import CALLED, CROP_AND_FLIP, Arrays, Staged, flip_or_not, of_getitem, proved, same, seed, sent
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.transforms import v2

from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import StagedDataset


@pytest.mark.parametrize("fails", [False, True])
def test_the_random_states_are_put_back(fails):
    dataset = of_getitem(lambda self, index: 1 / 0, transform=CROP_AND_FLIP) if fails else Arrays(transform=CROP_AND_FLIP)
    seed(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    seed(3)
    try:
        find_split(dataset)
    except ZeroDivisionError:
        assert fails
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_each_example_is_read_once_by_itself_and_twice_in_stages_and_making_stages_reads_nothing():
    reads = []

    class Recorded(Arrays):
        def image(self, index):
            reads.append(index)
            return super().image(index)

    dataset = Recorded(transform=CROP_AND_FLIP)
    make_stages(ConcatDataset([Subset(dataset, [0, 1]), dataset]))
    assert reads == []
    find_split(dataset)
    assert reads == [0, 5, 0, 5, 0, 5]
    reads.clear()
    find_split(Subset(dataset, [4]))
    assert reads == [4, 4, 4]


def test_a_split_can_be_sent_to_workers_and_printed():
    split = find_split(Arrays(transform=CROP_AND_FLIP))
    assert sent(split) == split
    assert str(split) == "reuse [load, Resize], redo [RandomCrop, RandomHorizontalFlip]"


class Rows(Dataset):
    """A data set that reads whole batches."""

    calls = []  # noqa: RUF012 - of all copies

    def __init__(self, transform=None):
        self.transform = transform

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        rows = [torch.full((1, 1, 4), float(index)) for index in indices]
        if self.transform is not None:
            rows = [self.transform(row) for row in rows]
        return list(zip(rows, indices, strict=True))

    def __len__(self):
        return 20


@pytest.fixture
def calls():
    Rows.calls.clear()
    return Rows.calls


def test_a_batch_stays_one_call(calls):
    subset = Subset(Subset(Rows(transform=v2.Compose([v2.Pad(1), CALLED])), range(10, 20)), [5, 3, 1])
    stages = make_stages(subset, find_split(subset).conventions)
    assert calls == [[15, 11]] * 3  # by itself, and twice in stages
    calls.clear()
    loaded = stages.load_many([2, 0])
    assert calls == [[11, 15]]
    assert [image.shape for image, _ in loaded] == [(1, 3, 6), (1, 3, 6)], "what comes before the cut is applied to each"
    seed(1)
    augmented = [stages.augment(index, example) for index, example in zip([2, 0], loaded, strict=True)]
    seed(1)
    assert same(augmented, subset.__getitems__([2, 0]))


def test_a_named_cut_reads_a_batch_in_one_call(calls):
    _, stages = proved(StagedDataset.of(Rows(), augment=flip_or_not))
    calls.clear()
    assert [label for _, label in stages.load_many([4, 6, 2])] == [4, 6, 2]
    assert calls == [[4, 6, 2]]


def test_without_a_getitems_of_its_own_there_is_no_batched_loading():
    for dataset in (Arrays(transform=CROP_AND_FLIP), Staged()):
        assert make_stages(Subset(dataset, [0, 1])).load_many is None


def test_augmentation_of_a_whole_batch_at_once_is_refused():
    class Mixed(Rows):
        def __getitems__(self, indices):
            rows = torch.stack([torch.full((1, 1, 4), float(index)) for index in indices])
            if self.transform is not None:
                rows = self.transform(rows)
            return list(zip(rows, indices, strict=True))

    with pytest.raises(SplitRefused, match=r"looks at what its transform returns \(__iter__\)"):
        find_split(Mixed(transform=v2.RandomHorizontalFlip()))
