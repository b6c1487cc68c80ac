"""Data sets are split where they can be, and the split is proved: nested ones, stages as methods, gaps, whole batches."""

import random

import numpy as np
import pytest
import torch
from split_cases import CALLED, CROP_AND_FLIP, Arrays, Staged, flip_or_not, noisy, proved, same, seed
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split, make_stages
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


class ShapeOfStaged:
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


class Rows(Dataset):
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


def test_augmentation_of_a_whole_batch_at_once_is_refused():
    class Mixed(Rows):
        def __getitems__(self, indices):
            rows = torch.stack([torch.full((1, 1, 4), float(index)) for index in indices])
            if self.transform is not None:
                rows = self.transform(rows)
            return list(zip(rows, indices, strict=True))

    with pytest.raises(SplitRefused, match=r"looks at what its transform returns \(__iter__\)"):
        find_split(Mixed(transform=v2.RandomHorizontalFlip()))
