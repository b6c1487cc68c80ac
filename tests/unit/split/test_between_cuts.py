"""The way from a raw item to a loaded example, proved."""

from pathlib import Path

import pytest
import torch
from raw_cases import RANDOM, Letters
from split_cases import noisy
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import ImageFolder

from lightning_echo import StagedDataset
from lightning_echo.data.difference import difference
from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import Split, find_split, make_decoding, make_stages, prove_decoding


def assert_decodes(dataset, indices):
    raw, loaded = find_split(dataset, raw=True), find_split(dataset)
    prove_decoding(dataset, raw, loaded)
    two, one = make_decoding(dataset, raw, loaded), make_stages(dataset, loaded.conventions)
    for index in indices:
        assert difference(two.augment(index, two.load(index)), one.load(index)) is None
    return two


def test_a_staged_data_set_decodes_and_does_not_augment():
    two = assert_decodes(Letters(), range(5))
    assert two.load(1) == b"bbb"
    assert two.augment(1, b"bbb") == ["b", "b", "b"]


def test_an_image_folder_decodes_and_applies_what_is_not_random_also_inside_others(images):
    folder = ImageFolder(str(images), RANDOM, target_transform=lambda target: target + 100)
    two = assert_decodes(folder, range(6))
    content, target = two.load(0)
    assert content == Path(folder.samples[0][0]).read_bytes()
    image, after = two.augment(0, (content, target))
    assert (image.size, after) == ((16, 12), 0), "a function that nobody knows may draw: it comes after the cut"
    assert_decodes(ConcatDataset([Subset(folder, [3]), folder, Letters()]), [0, 1, 6, 9, 13])


def test_a_named_cut_that_is_read_inside_decodes_all_that_stands_before_it():
    class Plain(Letters):
        def augment(self, example):
            return [*example, "!"]

    two = assert_decodes(StagedDataset.of(Plain(), augment=lambda example: [*example, noisy(0)]), range(5))
    assert two.augment(2, two.load(2)) == ["c", "c", "c", "!"]


class More(Letters):
    """Loads something else than it reads and decodes."""

    def load(self, index):
        return [*super().load(index), "more"]

    def augment(self, example):
        return example[:3]


class Draws(Letters):
    def load(self, index):
        return ["x"]

    def decode(self, raw):
        torch.rand(1)
        return ["x"]

    def augment(self, example):
        return example


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (More(), r"dataset\[0\] is loaded otherwise than it is read and decoded"),
        (Draws(), "decoding draws random numbers from torch"),
    ],
)
def test_another_load_than_read_and_decode_or_a_decode_that_draws_is_refused(dataset, reason):
    raw = Split(("read",), ("decode", "augment"), 3, find_split(Letters(), raw=True).conventions, raw=True)
    with pytest.raises(SplitRefused, match=reason):
        prove_decoding(dataset, raw, find_split(dataset))
