"""The way from a raw item to a loaded example, proved; and data sets that return the same each time."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_echo import StagedDataset
from lightning_echo.data.difference import difference
from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import Split, check_deterministic, find_split, make_decoding, make_stages, prove_decoding


class Letters(StagedDataset):
    def read(self, index):
        return bytes([97 + index]) * 3

    def decode(self, raw):
        return list(raw.decode())

    def augment(self, example):
        return [*example, random.random()]

    def __len__(self):
        return 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for number in range(6):
        (root / "ab"[number % 2]).mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "ab"[number % 2] / f"{number}.png")
    transform = v2.Compose([v2.Resize(10), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    return ImageFolder(str(root), transform, target_transform=lambda target: target + 100)


def splits_of(dataset):
    return find_split(dataset, raw=True), find_split(dataset)


def assert_decodes(dataset, indices):
    raw, loaded = splits_of(dataset)
    prove_decoding(dataset, raw, loaded)
    two, one = make_decoding(dataset, raw, loaded), make_stages(dataset, loaded.conventions)
    for index in indices:
        assert difference(two.augment(index, two.load(index)), one.load(index)) is None
    return two


def test_a_staged_data_set_decodes_and_does_not_augment():
    two = assert_decodes(Letters(), range(5))
    assert two.load(1) == b"bbb"
    assert two.augment(1, b"bbb") == ["b", "b", "b"]


def test_an_image_folder_decodes_and_applies_what_is_not_random(folder):
    two = assert_decodes(folder, range(6))
    content, target = two.load(0)
    assert content == Path(folder.samples[0][0]).read_bytes()
    image, after = two.augment(0, (content, target))
    assert (image.size, after) == ((15, 10), 0), "a function that nobody knows may draw: it comes after the cut"


def test_subsets_and_concatenations_find_the_data_set_inside(folder):
    assert_decodes(Subset(folder, [5, 1]), [0, 1])
    assert_decodes(ConcatDataset([Subset(folder, [3]), folder, Letters()]), [0, 1, 6, 7, 11])


def test_a_named_cut_that_is_read_inside_decodes_all_that_stands_before_it():
    class Plain(Letters):
        def augment(self, example):
            return [*example, "!"]

    dataset = StagedDataset.of(Plain(), augment=lambda example: [*example, random.random()])
    two = assert_decodes(dataset, range(5))
    assert two.augment(2, two.load(2)) == ["c", "c", "c", "!"]


def test_a_load_of_its_own_that_gives_something_else_than_read_and_decode_is_refused():
    class Other(Letters):
        def load(self, index):
            return [*super().load(index), "more"]

        def augment(self, example):
            return example[:3]

    dataset = Other()
    conventions = splits_of(Letters())[0].conventions
    raw = Split(("read",), ("decode", "augment"), 3, conventions, raw=True)
    with pytest.raises(SplitRefused, match=r"dataset\[0\] is loaded otherwise than it is read and decoded"):
        prove_decoding(dataset, raw, find_split(dataset))


def test_a_decode_that_draws_random_numbers_is_refused():
    class Other(Letters):
        def load(self, index):
            return ["x"]

        def decode(self, raw):
            torch.rand(1)
            return ["x"]

        def augment(self, example):
            return example

    raw = Split(("read",), ("decode",), 3, splits_of(Letters())[0].conventions, raw=True)
    with pytest.raises(SplitRefused, match="decoding draws random numbers from torch"):
        prove_decoding(Other(), raw, find_split(Other()))


class TestDeterministic:
    def test_a_data_set_that_returns_the_same_has_the_bytes_of_its_largest_example(self):
        assert check_deterministic([torch.zeros(10), torch.zeros(100)], [0, 1]).largest >= 400

    @pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(1)], ids=["random", "numpy", "torch"])
    def test_a_data_set_that_draws_is_refused(self, draw):
        class Draws(Dataset):
            def __getitem__(self, index):
                return index, draw() if index else 0

            def __len__(self):
                return 2

        with pytest.raises(SplitRefused, match=r"dataset\[1\] is another example when it is read again"):
            check_deterministic(Draws(), [0, 1])

    def test_the_random_states_of_the_program_stay(self):
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        check_deterministic([1, 2], [0, 1])
        assert torch.equal(torch.rand(2), expected)
