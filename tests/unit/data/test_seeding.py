"""Generators of transforms and data sets are found, and no two batches, examples or transforms draw the same numbers."""

import random
from types import SimpleNamespace

import numpy as np
import torch
from data_cases import Holding
from torch.utils.data import IterableDataset

from lightning_echo.data.randomness import BATCH, EXAMPLE, Seeding, seeders


class Albumentations:
    """A transform with ``set_random_seed``."""

    def __init__(self, transforms=()):
        self.transforms, self.seeds = list(transforms), []

    def set_random_seed(self, seed):
        self.seeds.append(seed)


class Monai:
    """A transform with ``set_random_state``."""

    def __init__(self):
        self.seeds = []

    def set_random_state(self, seed=None, state=None):
        self.seeds.append(seed)


class OtherState:
    def set_random_state(self, state):
        raise AssertionError("it takes no seed")


class Anything:
    """Answers to any name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 1 / 0


class Stream(IterableDataset):
    def __init__(self, transform):
        self.transform = transform

    def __iter__(self):
        return iter(())

    def set_random_state(self, seed=None):
        raise AssertionError("it shuffles by it in step in all workers")


def found_in(dataset, *transforms):
    """Returns which of the transforms a seed reaches."""
    for place, seed in enumerate(seeders(dataset).values()):
        seed(place)
    return [bool(transform.seeds) for transform in transforms]


def test_they_are_found_in_data_sets_containers_and_chains_of_transforms():
    one, two, three, four, five, inside = Albumentations(), Monai(), Monai(), Monai(), Albumentations(), Albumentations()
    inner = Holding(transform=SimpleNamespace(transforms=[two, OtherState(), Anything()]), by_name={"image": three})
    dataset = Holding(dataset=inner, transform=one, steps=[four, (five,)], same=one, alone=Albumentations([inside]))
    dataset.itself = [dataset]
    assert len(seeders(dataset)) == 6
    assert found_in(dataset, one, two, three, four, five, dataset.alone) == [True] * 6
    assert inside.seeds == [], "one that seeds its members itself is seeded alone"


def test_what_a_stream_shuffles_by_is_left_alone_and_its_transform_is_not():
    transform = Monai()
    assert found_in(Stream(transform), transform) == [True]


def test_each_batch_and_example_of_each_rank_draws_numbers_of_its_own_and_the_same_ones_again():
    def drawn():
        return float(torch.rand(())), float(np.random.rand()), random.random()

    seen = []
    for key in (1, 2):
        seeding = Seeding(Holding(), key)
        for purpose in (BATCH, EXAMPLE):
            for number in range(50):
                seeding.seed(purpose, number)
                seen.append(drawn())
                seeding.seed(purpose, number)
                assert drawn() == seen[-1]
    for each in zip(*seen, strict=True):
        assert len(set(each)) == len(seen), "in each of the three generators"


def test_two_transforms_never_get_the_same_seed():
    one, two = Monai(), Albumentations()
    seeding = Seeding(Holding(transforms=[one, two]), 7)
    for number in range(20):
        seeding.seed(EXAMPLE, number)
    assert len({*one.seeds, *two.seeds}) == 40
    assert all(0 <= seed < 2**31 for seed in one.seeds + two.seeds)
