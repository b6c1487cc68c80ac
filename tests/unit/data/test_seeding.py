"""Generators of transforms and data sets are found, and no two batches, examples or transforms draw the same numbers."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

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


class Data(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)


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


def drawn():
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_they_are_found_in_data_sets_containers_and_chains_of_transforms():
    one, two, three, four, five = Albumentations(), Monai(), Monai(), Monai(), Albumentations()
    chain = type("Compose", (), {})()
    chain.transforms = [two, OtherState()]
    inner = Data(transform=chain, by_name={"image": three})
    dataset = Data(dataset=inner, transform=one, steps=[four, (five,)])
    assert found_in(dataset, one, two, three, four, five) == [True] * 5


def test_a_transform_that_seeds_its_members_itself_is_seeded_alone():
    inner = Albumentations()
    outer = Albumentations([inner])
    assert found_in(Data(transform=outer), outer, inner) == [True, False]


def test_one_that_is_held_twice_is_seeded_once_and_circles_end():
    one, dataset = Monai(), Data()
    dataset.transform, dataset.same, dataset.itself = one, one, [dataset]
    assert len(seeders(dataset)) == 1
    assert found_in(dataset, one) == [True]


def test_what_a_stream_shuffles_by_is_left_alone_and_its_transform_is_not():
    transform = Monai()
    assert found_in(Stream(transform), transform) == [True]


def test_an_object_that_answers_to_any_name_is_not_called():
    class Anything:
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: 1 / 0

    assert seeders(Data(transform=Anything())) == {}


def test_each_batch_and_example_of_each_rank_draws_numbers_of_its_own_and_the_same_ones_again():
    seen = []
    for key in (1, 2):
        seeding = Seeding(Data(), key)
        for purpose in (BATCH, EXAMPLE):
            for number in range(50):
                seeding.seed(purpose, number)
                first = drawn()
                seeding.seed(purpose, number)
                assert drawn() == first
                seen.append(first)
    for each in zip(*seen, strict=True):
        assert len(set(each)) == len(seen), "in each of the three generators"


def test_two_transforms_never_get_the_same_seed():
    one, two = Monai(), Albumentations()
    seeding = Seeding(Data(transforms=[one, two]), 7)
    for number in range(20):
        seeding.seed(EXAMPLE, number)
    assert len({*one.seeds, *two.seeds}) == 40
    assert all(0 <= seed < 2**31 for seed in one.seeds + two.seeds)
