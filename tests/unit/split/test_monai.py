"""MONAI by its shape: a ``Compose`` that runs ranges of its members, traits that say what is random, data sets that cache.

The classes here do what MONAI's of the same names do, in a few lines each. They have its names, since it is known by these.
"""

import copy

import numpy as np
import pytest
import torch
from split_cases import same
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_echo.split.describe import SplitRefused, cut_chain, is_deterministic
from lightning_echo.split.prove import find_split, make_stages


def of_monai(module):
    def named(kind):
        kind.__module__, kind.__qualname__ = f"monai.{module}", kind.__name__
        return kind

    return named


@of_monai("transforms.traits")
class RandomizableTrait:
    pass


@of_monai("transforms.traits")
class LazyTrait:
    lazy = False


@of_monai("transforms.transform")
class Transform:
    pass


@of_monai("transforms.transform")
class Randomizable:
    R = np.random.RandomState()

    def set_random_state(self, seed=None, state=None):
        self.R = np.random.RandomState(seed) if state is None else state
        return self


@of_monai("transforms.compose")
class Compose(Randomizable, Transform):
    def __init__(self, transforms=(), lazy=False):
        self.transforms, self.lazy = list(transforms), lazy

    def __len__(self):
        return len(self.transforms)

    def __call__(self, value, start=0, end=None, threading=False, lazy=None):
        del threading, lazy
        for member in self.transforms[start:end]:
            value = member(value)
        return value

    def set_random_state(self, seed=None, state=None):
        super().set_random_state(seed, state)
        for member in self.transforms:
            if isinstance(member, Randomizable):
                member.set_random_state(seed=self.R.randint(2**31))
        return self


@of_monai("transforms.compose")
class OneOf(Compose):
    pass


@of_monai("transforms.intensity.array")
class Scale(Transform):
    def __init__(self, by=2.0):
        self.by = by

    def __call__(self, value):
        return value * self.by


@of_monai("transforms.spatial.array")
class Spacing(Transform, LazyTrait):
    def __call__(self, value):
        return value + 1


@of_monai("transforms.intensity.array")
class RandNoise(Randomizable, RandomizableTrait, Transform):
    def __call__(self, value):
        return value + float(self.R.rand())


@of_monai("transforms.utility.array")
class Lambda(Transform):
    def __init__(self, func):
        self.func = func

    def __call__(self, value):
        return self.func(value)


class Plain(Dataset):
    def __init__(self, data, transform):
        self.data, self.transform = data, transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self._transform(index)

    def _transform(self, index):
        return self.transform(self.data[index]) if self.transform is not None else self.data[index]


def first_random(compose):
    found = (place for place, member in enumerate(compose.transforms) if isinstance(member, RandomizableTrait))
    return next(found, len(compose.transforms))


class Cache(Plain):
    """MONAI's ``CacheDataset``: runs what is not random when it is made, and the rest at each read."""

    def __init__(self, data, transform):
        super().__init__(data, transform)
        self.cached = [transform(item, end=first_random(transform), threading=True) for item in data]

    def _transform(self, index):
        assert isinstance(self.transform, Compose)
        return self.transform(copy.deepcopy(self.cached[index]), start=first_random(self.transform))


def items(count=6):
    return [torch.arange(3.0) + 10 * number for number in range(count)]


@pytest.mark.parametrize(
    ("members", "lazy", "reused", "redone"),
    [
        ([Scale(), Scale(3.0), RandNoise(), Scale(5.0)], False, ["Scale", "Scale"], ["RandNoise", "Scale"]),
        ([Scale(), Scale()], False, ["Scale", "Scale"], []),
        ([RandNoise(), Scale()], False, [], ["RandNoise", "Scale"]),
        # Where resampling may be put off it stays together: the lazy members before and after the cut would resample twice.
        ([Scale(), Spacing(), RandNoise()], True, ["Scale"], ["Spacing", "RandNoise"]),
        ([Scale(), Spacing(), RandNoise()], None, ["Scale"], ["Spacing", "RandNoise"]),
        ([Scale(), Spacing()], True, ["Scale", "Spacing"], []),
        ([v2.Resize(8), v2.RandomCrop(4)], False, ["Resize"], ["RandomCrop"]),
    ],
)
def test_it_is_cut_before_the_first_random_member(members, lazy, reused, redone):
    parts = cut_chain(Compose(members, lazy=lazy))
    assert [[name for part in side for name in part.names] for side in parts] == [reused, redone]
    if reused == ["Scale", "Scale"]:
        assert torch.equal(parts[0][0](torch.ones(1)), members[1](members[0](torch.ones(1))))


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Scale(), True),
        (Compose([Scale(), Compose([Scale()])]), True),
        (Compose([Scale(), Compose([RandNoise()])]), False),
        (RandNoise(), False),
        (Lambda(lambda value: value), False),
        (Lambda(v2.Resize(8)), True),
        (Lambda([v2.RandomCrop(8)]), False),
        (Lambda({"image": lambda value: value}), False),
        (Lambda({"image": Scale()}), True),
        (Scale(np.float32), True),
        (OneOf([Scale()]), False),  # chooses
        (type("Scale", (Scale,), {})(), False),  # a user's own
    ],
)
def test_its_transforms_say_themselves_whether_they_are_random_but_for_code_of_others(transform, expected):
    assert is_deterministic(transform) is expected


@pytest.mark.parametrize("kind", [Plain, Cache])
def test_its_data_sets_are_split_and_each_use_is_what_they_return(kind):
    transform = Compose([Scale(), RandNoise(), Scale(3.0)])
    dataset = kind(items(), transform)
    find_split(dataset)  # proves it
    stages = make_stages(dataset)
    assert (stages.reused[-1], stages.redone) == ("Scale", ("RandNoise", "Scale"))
    for index in range(len(dataset)):
        loaded = stages.load(index)
        uses = []
        for use in (1, 2):
            transform.set_random_state(seed=use)
            plain = dataset[index]
            transform.set_random_state(seed=use)
            uses.append(stages.augment(index, copy.deepcopy(loaded)))
            assert same(uses[-1], plain)
        assert not torch.equal(*uses)


def test_a_cache_that_cuts_later_than_is_known_to_be_safe_is_refused():
    """Its first part holds a function of the user's: it may draw, and what is cached would be drawn once."""
    with pytest.raises(SplitRefused, match=r"start=2 \(and Lambda, number 1, counts as random\)"):
        find_split(Cache(items(), Compose([Scale(), Lambda(lambda value: value + 1), RandNoise()])))
