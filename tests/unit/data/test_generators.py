"""Random generators of a data set: each is found at its place, also after another one was put there."""

import functools
import random

import numpy as np
import pytest
import torch
from data_cases import Holding, Slotted
from torch.utils.data import Dataset, Subset

from lightning_echo.data.randomness import places_of_generators
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import find_split, make_stages


class Noise:
    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __call__(self, value):
        return value + self.rng.random()


class Born(Noise):
    """Its class makes instances in a way of its own, as MONAI's dictionary transforms."""

    def __new__(cls):
        return super().__new__(cls)


class Sharing:
    """All instances draw from one generator until they are seeded, as MONAI's transforms."""

    R = np.random.RandomState(1)

    def __call__(self, value):
        return value + self.R.rand()

    def set_random_state(self, seed=None, state=None):
        self.R = np.random.RandomState(seed)
        return self


def found_in(dataset):
    return sorted(id(place.held) for place in places_of_generators(dataset))


def test_those_of_the_data_sets_and_of_what_they_hold():
    inner = Holding(rng=torch.Generator(), noise=Noise(), born=Born(), transform=Noise())
    outer = Holding(parts=[Subset(inner, [0]), inner], more={"py": random.Random(2)}, bag={random.Random(3)}, itself=None)
    outer.itself = outer  # is followed once
    expected = [inner.rng, inner.noise.rng, inner.born.rng, inner.transform.rng, outer.more["py"], *outer.bag]
    assert found_in(outer) == sorted(map(id, expected))


def test_what_a_method_or_a_partial_function_draws_from():
    rng, other, bound = np.random.default_rng(1), random.Random(2), Noise()
    dataset = Holding(draw=rng.normal, noise=bound.__call__, shuffle=functools.partial(sorted, key=other))
    assert found_in(dataset) == sorted(map(id, [rng, other, bound.rng]))


def test_one_that_takes_the_place_of_another_is_found_there():
    dataset = Holding(noise=Sharing(), plain=Noise(), slot=Slotted(random.Random(1)), listed=[random.Random(2)])
    places = places_of_generators(dataset)

    def held():
        return {dataset.noise.R, dataset.plain.rng, dataset.slot.value, *dataset.listed}

    assert {place.held for place in places} == held()
    dataset.noise.set_random_state(seed=3)
    dataset.plain.rng, dataset.slot.value, dataset.listed[0] = np.random.default_rng(7), random.Random(2), random.Random(3)
    assert {place.held for place in places} == held()
    before = [place.state() for place in places if place.held is dataset.slot.value]
    dataset.slot.value.random()
    assert before != [place.state() for place in places if place.held is dataset.slot.value]
    del dataset.plain.rng, dataset.slot.value
    dataset.listed.clear()
    assert [place.state() for place in places if place.held is not dataset.noise.R] == [None] * 3


class Inner(Dataset):
    def __init__(self, noise):
        self.transform = noise

    def __getitem__(self, index):
        return self.transform(float(index))

    def __len__(self):
        return 8


class Outer(Inner):
    def __init__(self, read):
        self.read, self.transform = read, lambda value: value + float(torch.rand(()))

    def __getitem__(self, index):
        return self.transform(self.read(index) if callable(self.read) else self.read[index])


@pytest.mark.parametrize("noise", [Noise, Born, Sharing])
@pytest.mark.parametrize("wrap", [lambda noise: noise, Inner, lambda noise: Subset(Inner(noise), range(8))])
def test_a_split_that_would_freeze_what_is_drawn_inside_is_refused(noise, wrap):
    """The inner data set's augmentation would be reused with the example."""
    with pytest.raises(SplitRefused, match="draws random numbers from a generator that the data set holds"):
        find_split(Outer(wrap(noise())))


def test_a_generator_that_is_put_in_later_is_watched_too():
    dataset = Outer(Sharing())
    stages = WatchedStages(make_stages(dataset), dataset, refusal=None)
    dataset.read.set_random_state(seed=5)  # as a worker's seeding does
    stages.begin()
    stages.load(0)
    assert stages.must_repeat()
