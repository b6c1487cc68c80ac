"""Random numbers before the cut that two equal reads under equal seeds do not show: no such example is ever echoed."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_echo import EchoLoader
from lightning_echo.split.check import WHOLE, WatchedStages
from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import check_deterministic, find_split, make_stages


def seldom(generator):
    return 1000 if generator.random() < 0.02 else 0


class Noisy(Dataset):
    """Adds, before its transform, what ``draw`` returns: seldom another number than 0."""

    def __init__(self, length=64):
        self.length, self.transform = length, float

    def draw(self, index):
        return 0

    def __getitem__(self, index):
        return self.transform(index + self.draw(index))

    def __len__(self):
        return self.length


class FromTheWorkersSeed(Noisy):
    def draw(self, index):
        info = get_worker_info()
        return 0.0 if info is None else np.random.default_rng(info.seed + index).random()


GLOBAL_RNG, late_rng = np.random.default_rng(), None


def from_the_seed(self, index):
    return np.random.default_rng(torch.initial_seed() + index).random()


def made_late(self, index):
    self.rng = getattr(self, "rng", None) or np.random.default_rng()
    return seldom(self.rng)


def made_late_inside(self, index):
    return seldom(self.inside.setdefault("rng", random.Random()))


def helper():
    return seldom(GLOBAL_RNG)


def made_late_in_a_global(self, index):
    global late_rng
    if late_rng is None:
        late_rng = np.random.default_rng()
    return seldom(late_rng)


def in_a_default(self, index, rng=np.random.default_rng()):  # noqa: B008 - the point
    return seldom(rng)


def in_a_closure(rng):
    return lambda index: seldom(rng)


@pytest.mark.parametrize(
    ("draw", "attributes"),
    [
        (from_the_seed, {}),
        (made_late, {}),
        (made_late_inside, {"inside": {}}),
        (lambda self, index: helper(), {}),
        (made_late_in_a_global, {}),
        (in_a_default, {}),
        (None, {"draw": in_a_closure(np.random.default_rng())}),
    ],
    ids=["a seed", "made late", "made late inside", "a global of a function", "late in a global", "a default", "a closure"],
)
def test_what_depends_on_a_seed_or_draws_from_a_generator_wherever_it_is_is_neither_split_nor_held_whole(draw, attributes):
    dataset = type("Own", (Noisy,), {"draw": draw})()
    vars(dataset).update(attributes)
    with pytest.raises(SplitRefused, match=r"under|draws random numbers from a generator that the data set holds"):
        find_split(dataset)
    with pytest.raises(SplitRefused):
        check_deterministic(dataset, [0, 63])


@pytest.mark.parametrize(
    "draw", [random.random, np.random.random, lambda: float(torch.rand(1))], ids=["random", "numpy", "torch"]
)
def test_what_draws_for_some_examples_is_not_held_whole(draw):
    dataset = Noisy()
    dataset.draw = lambda index: draw() if index else 0
    with pytest.raises(SplitRefused, match=r"dataset\[1\] is another example when it is read again"):
        check_deterministic(dataset, [0, 1])


def test_the_seed_of_a_worker_is_one_of_them():
    loader = DataLoader(FromTheWorkersSeed(), 8, num_workers=1)
    assert EchoLoader(loader, 2).insertion_point == "after_augmentation"
    with pytest.raises(ValueError, match="another example when it is read again"):
        EchoLoader(loader, 1, cache={"size": "1MiB", "hold": "whole"})


class LateOf(Noisy):
    """Begins to draw at a certain read."""

    rng, reads = None, 0

    def __init__(self, first):
        super().__init__(1000)
        self.first = first

    def draw(self, index):
        self.reads += 1
        if self.reads < self.first:
            return 0
        self.rng = self.rng or np.random.default_rng()
        return self.rng.random()


@pytest.mark.parametrize(("first", "batch"), [(1, 0), (10, 1), (60, 12)])
def test_a_generator_that_is_made_in_a_worker_is_found_at_the_1st_10th_and_100th_read(first, batch):
    dataset = LateOf(first)
    stages, whole = WatchedStages(make_stages(dataset), dataset, refusal=None), []
    for number in range(14):
        for _ in range(2):
            stages.begin()
            loaded = [stages.load(8 * number + place) for place in range(8)]
            if not stages.must_repeat():
                break
        stages.end()
        whole.append(loaded == [WHOLE] * 8)
    assert whole == [number >= batch for number in range(14)]


def test_what_comes_after_the_cut_may_depend_on_seeds():
    dataset = Noisy()
    dataset.transform = lambda value: value + np.random.default_rng(torch.initial_seed()).random()
    assert find_split(dataset).redone
