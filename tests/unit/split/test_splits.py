"""Data sets are split where they can be, and the split is proved: nested ones, those with stages as methods, those with gaps."""

import random

import numpy as np
import pytest
import torch
from split_cases import CROP_AND_FLIP, Arrays, Staged, flip_or_not, noisy, of_getitem, proved
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split
from lightning_echo.split.staged import StagedDataset


def test_subset_concat_and_random_split_in_any_order(images):
    resized = v1.Compose([v1.Resize((9, 9)), v1.RandomCrop(4), v1.ToTensor()])
    padded = v1.Compose([v1.Pad(1), v1.RandomCrop(4), v1.ToTensor()])
    files = datasets.ImageFolder(images, transform=resized)
    fakes = datasets.FakeData(7, (3, 12, 12), transform=padded)
    part, rest = random_split(files, [4, 4])
    for dataset in (
        Subset(Subset(files, [5, 4, 3]), [2, 0]),
        ConcatDataset([part, rest, fakes]),
        ConcatDataset([Subset(fakes, [6]), ConcatDataset([part, Subset(fakes, [])]), files]),
        Subset(ConcatDataset([files, fakes]), [14, 0, 7, 8]),
        Subset(ConcatDataset([files, fakes]), torch.tensor([-1, 1, -10])),
    ):
        split, _ = proved(dataset, is_sent=True)
        assert set(split.reused) <= {"load", "Resize", "Pad"}
        assert split.redone == ("RandomCrop", "ToTensor")
    assert dataset.indices.tolist() == [-1, 1, -10]


def test_each_data_set_inside_is_proved_on_what_is_presented_of_it():
    read = {}

    class Recorded(Arrays):
        def image(self, index):
            read.setdefault(self.name, []).append(int(index))
            return super().image(index)

    a, b, c = (Recorded(transform=CROP_AND_FLIP, name=name) for name in "abc")
    inside = ConcatDataset([Subset(a, [4, 1, 2]), b, Subset(a, [3, 5])])
    find_split(Subset(ConcatDataset([inside, c]), [1, 9, 8, 4, 2, 6]))
    assert {name: sorted(set(indices)) for name, indices in read.items()} == {"a": [1, 2], "b": [3, 5]}
    assert all(read[name].count(index) == 3 for name in read for index in set(read[name])), "by itself, and twice in stages"


def test_one_wrong_data_set_inside_is_enough_to_refuse():
    good = Arrays(transform=CROP_AND_FLIP)
    wrong = of_getitem(lambda self, index: (self.transform(self.transform(self.image(index))), index), transform=CROP_AND_FLIP)
    assert find_split(ConcatDataset([good, good])).redone == ("RandomCrop", "RandomHorizontalFlip")
    with pytest.raises(SplitRefused, match="calls its transform 2 times"):
        find_split(ConcatDataset([good, wrong]))
    with pytest.raises(SplitRefused, match="TensorDataset has neither"):
        find_split(ConcatDataset([good, TensorDataset(torch.zeros(3))]))


class ShapeOfStaged:
    """The protocol without the base class."""

    load, augment, __len__ = Staged.load, Staged.augment, Staged.__len__

    def __getitem__(self, index):
        return self.augment(self.load(index))


@pytest.mark.parametrize(
    "dataset",
    [Staged(), ShapeOfStaged(), StagedDataset.of(Arrays(transform=v2.Pad(1)), augment=flip_or_not), Subset(Staged(), [3, 1])],
    ids=["inherited", "protocol", "named cut on deterministic transforms", "inside a subset"],
)
def test_the_stages_are_the_data_sets_own(dataset):
    split, _ = proved(dataset, is_sent=True)
    assert (split.reused, split.redone, split.conventions) == (("load",), ("augment",), (Convention.protocol,))


def test_a_generator_that_the_data_set_holds_may_augment():
    class OwnGenerator(Staged):
        def __init__(self):
            self.rng = np.random.default_rng(1)

        def augment(self, example):
            return example[0] + self.rng.random(), example[1]

    dataset = OwnGenerator()
    assert find_split(dataset).redone == ("augment",)
    assert dataset.rng.random() == np.random.default_rng(1).random()


def loads(draw):
    return {"load": lambda self, index: (torch.zeros(2) + draw(self), index)}


def remembering(self, index):
    self.last = index
    return Staged.load(self, index)


def drawing_more(self, index):
    item = Staged.__getitem__(self, index)
    return item if random.random() < 2 else None


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        (loads(lambda self: torch.rand(2)), r"would be reused \(load\) draws random numbers from torch"),
        (loads(lambda self: noisy(0)), "draws random numbers from numpy"),
        (loads(lambda self: random.random()), "draws random numbers from random"),
        (loads(lambda self: self.rng.random()) | {"rng": np.random.default_rng(0)}, "from a generator that the data set holds"),
        (
            {"load": remembering, "augment": lambda self, example: (example[0] + self.last, example[1])},
            r"dataset\[0\] is not what .* return .* \(at \[0\]: tensors",
        ),
        (
            {"__getitem__": lambda self, index: Staged.__getitem__(self, index)[0]},
            r"dataset\[0\] is not what .* \(a Tensor and a t",
        ),
        ({"__getitem__": drawing_more}, r"same random numbers .* by itself and in stages"),
    ],
    ids=["torch", "numpy", "random", "own generator", "needs what the last load left", "more than its stages", "draws more"],
)
def test_stages_that_are_not_what_the_data_set_returns_are_refused(methods, reason):
    with pytest.raises(SplitRefused, match=reason):
        find_split(type("Own", (Staged,), methods)())


class WithGaps(Arrays):
    """Returns None for an example that it cannot read, as data sets do whose collate function leaves such out."""

    def __getitem__(self, index):
        return None if index in self.gaps else super().__getitem__(index)


class ManyWithGaps(WithGaps):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [WithGaps, ManyWithGaps])
@pytest.mark.parametrize("gap", [0, 2, 5])
def test_none_in_the_place_of_an_example_stays_none(kind, gap):
    dataset = kind(transform=CROP_AND_FLIP, gaps=[gap])
    _, stages = proved(dataset, is_sent=True)
    if stages.load_many is not None:
        loaded = stages.load_many(list(range(len(dataset))))
        assert [place for place, example in enumerate(loaded) if example is None] == [gap]


def test_of_none_alone_nothing_is_proved():
    with pytest.raises(SplitRefused, match=r"it returns None for dataset\[0\] and dataset\[\d+\]"):
        find_split(WithGaps(transform=CROP_AND_FLIP, gaps=range(6)))
