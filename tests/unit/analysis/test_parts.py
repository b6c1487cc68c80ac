"""Where data echoing can cut a loader's data set, and the functions of each part."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import StagedDataset
from lightning_echo.analysis.parts import both_halves, cuts, first_half, second_half, whole
from lightning_echo.split.prove import make_stages

LATE = ("after_augmentation", "after_batching", "after_transfer")


class Halved(StagedDataset):
    """Loading multiplies by ten, augmenting adds one."""

    def __len__(self):
        return 8

    def load(self, index):
        return torch.tensor([10 * index])

    def augment(self, example):
        return example + 1


class Staged(StagedDataset):
    """The same, and reading is apart from decoding."""

    def __len__(self):
        return 8

    def read(self, index):
        return index

    def decode(self, raw):
        return torch.tensor([10 * raw])

    def augment(self, example):
        return example + 1


class Plain(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index])


MAKE = partial(make_stages, conventions=None)


@pytest.mark.parametrize(
    ("dataset", "is_cut", "points"),
    [
        (Staged(), (True, True), ("after_read", "before_augmentation", *LATE)),
        (Halved(), (False, True), ("before_augmentation", *LATE)),
        (Plain(), (False, False), LATE),
    ],
    ids=["read, decode and augment", "load and augment", "neither"],
)
def test_a_data_set_is_cut_where_it_can_be(dataset, is_cut, points):
    found = cuts(DataLoader(dataset, batch_size=2))
    assert (found.after_reading is not None, found.before_augmenting is not None) == is_cut
    assert found.points == points


def test_the_cuts_are_those_after_reading_and_before_the_augmentation():
    found = cuts(DataLoader(Staged(), batch_size=2))
    assert found.after_reading(Staged()).load(3) == 3
    assert found.before_augmenting(Staged()).load(3).tolist() == [30]


def test_both_halves_together_make_the_whole_examples():
    halves = both_halves(MAKE, Halved())
    items = halves.first([1, 4])
    assert [item.item() for item in items] == [10, 40]
    assert [example.item() for example in halves.second([1, 4], items)] == [11, 41]
    assert [example.item() for example in whole(Halved()).first([1, 4])] == [11, 41]


def test_a_half_alone_has_one_function():
    first = first_half(MAKE, Halved())
    assert [item.item() for item in first.first([1, 4])] == [10, 40]
    assert first.second is None
    assert whole(Halved()).second is None


def test_the_second_half_loads_an_item_only_if_it_is_not_in_memory():
    second = second_half(MAKE, {1: torch.tensor([500])}, Halved())
    assert [example.item() for example in second.first([1, 4])] == [501, 41]
    assert second.second is None


def test_the_second_half_does_not_edit_the_items_in_memory():
    class Edits(Halved):
        def augment(self, example):
            return example.add_(1)

    items = {1: torch.tensor([500])}
    second = second_half(MAKE, items, Edits())
    assert [second.first([1])[0].item() for _ in range(2)] == [501, 501]
    assert items[1].item() == 500
