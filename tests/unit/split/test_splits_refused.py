"""What only looks as if it could be split is refused, and why is said; exceptions are the data set's own."""

import random
import threading

import pytest
import torch
from split_cases import CALLED, CROP_AND_FLIP, Arrays, of_getitem, proved
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split, make_stages


def annotated(self, name: str):
    raise AssertionError("called")


@pytest.mark.parametrize(
    "methods",
    [
        {"load": "data.csv", "augment": True},
        {"load": lambda self, path: open(path)},  # noqa: SIM115 - never called: open(0) would close standard input
        {"load": lambda self, image_file: open(image_file)},  # noqa: SIM115
        {"load": lambda self, name, mode: open(name, mode)},  # noqa: SIM115
        {"load": lambda self, name: {}[name]},  # tried, and refused by the proof
        {"load": annotated},
    ],
    ids=["not callable", "path", "file", "two arguments", "name", "annotated"],
)
def test_an_unrelated_load_and_augment_do_not_count(methods):
    kind = type("Unrelated", (Arrays,), {"augment": lambda self, factor: self.images * factor, **methods})
    split, _ = proved(kind(transform=CROP_AND_FLIP))
    assert (split.conventions, split.redone) == ((Convention.transform,), ("RandomCrop", "RandomHorizontalFlip"))


class Unrelated(Arrays):
    def load(self, name):
        raise FileNotFoundError(name)

    def augment(self, factor):
        return factor


def test_where_all_ways_fail_the_reasons_are_given():
    dataset = of_getitem(lambda self, index: self.image(index), Unrelated)
    del dataset.transform
    with pytest.raises(SplitRefused, match=r"loading .* raised FileNotFoundError: 0") as refused:
        find_split(dataset)
    assert isinstance(refused.value.__cause__, FileNotFoundError)
    twice = of_getitem(WRONG["twice"][0], Unrelated, transform=v2.RandomHorizontalFlip())
    with pytest.raises(SplitRefused, match=r"by load.*FileNotFoundError.*; by transform.* 2 times"):
        find_split(twice)


WRONG = {
    "twice": (lambda self, index: (self.transform(self.transform(self.image(index))), index), "2 times"),
    "through another attribute": (lambda self, index: (self.hidden(self.image(index)), index), "0 times where 1 would be"),
    "after another random one": (
        lambda self, index: (self.transform(self.hidden(self.image(index))), index),
        "draws random numbers from torch",
    ),
    "with more behind": (
        lambda self, index: (self.transform(self.image(index)).float() / 255, index),
        r"looks at what its transform returns \(float\)",
    ),
    "by keyword": (lambda self, index: (self.transform(image=self.image(index)), index), r"by keyword \(image\)"),
    "beside a draw of its own": (
        lambda self, index: (self.transform(self.image(index)), index + random.random()),
        "draws random numbers from random",
    ),
    "with what cannot be copied": (
        lambda self, index: (self.transform(self.image(index)), threading.Lock()),
        r"augmenting dataset\[0\] .* TypeError: .*_thread.lock",
    ),
}


class Rare:
    """A flip that hardly ever happens, so that equal values prove nothing."""

    def __init__(self):
        self.flip = v2.RandomHorizontalFlip(1e-6)

    def __call__(self, image):
        return self.flip(image)


@pytest.mark.parametrize("way", WRONG)
def test_a_transform_that_is_used_in_another_way_is_refused(way):
    use, reason = WRONG[way]
    with pytest.raises(SplitRefused, match=reason) as refused:
        find_split(of_getitem(use, transform=Rare(), hidden=Rare()))
    assert str(refused.value).endswith("or use insertion_point='after_augmentation'")
    assert "StagedDataset" in str(refused.value)
    assert "StagedDataset" not in refused.value.reason


def test_the_order_of_image_and_target_counts_where_both_draw():
    """Also where it is another one than in the examples that the proof has read."""

    def getitem(self, index):
        target = self.target_transform(index)
        return self.transform(self.image(index)), target

    with pytest.raises(SplitRefused, match="it calls its target_transform before the transform of the image"):
        make_stages(of_getitem(getitem, transform=CALLED, target_transform=CALLED)).load(1)
    for transforms in ((v2.Identity(), CALLED), (CALLED, v2.Identity())):
        dataset = of_getitem(getitem, transform=transforms[0], target_transform=transforms[1])
        assert make_stages(dataset).load(1)[1] == 1


generator = random.Random(0)


class Stream(IterableDataset):
    transform = abs

    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (TensorDataset(torch.zeros(3)), "TensorDataset has neither load"),
        (Subset([1, 2, 3], [0]), "list has neither load"),
        (Subset(Arrays(transform=abs), []), "it holds no example"),
        *[(of_getitem(lambda self, i: self.image(i), transform=value), "Own has neither") for value in ("resize", {"size": 3})],
        (Stream(), "Stream is a stream"),
        (Arrays(transform=lambda image: image + generator.randrange(10**6)), "differently when read again under the same seeds"),
    ],
    ids=["no stages", "in a subset", "empty", "a word", "a dictionary", "stream", "draws that cannot be repeated"],
)
def test_nothing_to_split_or_to_prove(dataset, reason):
    with pytest.raises(SplitRefused, match=reason):
        find_split(dataset)


def broken(self, index):
    raise OSError(f"cannot read {index}")


def picky(self, index):
    assert self.transform is CALLED  # a placeholder is not
    return self.transform(self.image(index)), index


def test_the_exceptions_of_data_set_and_transform_come_through_and_those_of_the_stages_alone_are_refusals():
    with pytest.raises(OSError, match="cannot read 0"):
        find_split(of_getitem(broken, transform=CROP_AND_FLIP))
    with pytest.raises(ZeroDivisionError):
        find_split(Arrays(transform=lambda image: image + 1 // 0))
    with pytest.raises(SplitRefused, match=r"loading dataset\[0\] .* raised Assertion") as got:
        find_split(of_getitem(picky, transform=CALLED))
    assert isinstance(got.value.__cause__, AssertionError)
