"""Random states are seeded together, put back, kept apart; no two batches, examples or transforms draw the same numbers."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_cases import Holding

from lightning_echo.data.randomness import (
    BATCH,
    EXAMPLE,
    DrawingTrap,
    OwnRandomStates,
    PreservingIterator,
    Seeding,
    preserved_random_states,
    seed_all,
    seeders,
)


def draw():
    """Numbers of each of the three global generators; normal ones too, of which numpy and random keep one in store."""
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random(), random.gauss(0, 1)], np.random.randn()


@pytest.fixture(autouse=True)
def known_start():
    with preserved_random_states():
        seed_all(1)
        yield


def test_seeding_decides_all_three_generators_and_each_seed_otherwise():
    seeds, drawn = [0, 1, 2, 77, 2**31, 2**33 + 5, 2**64 - 1], []
    for seed in seeds:
        seed_all(seed)
        drawn.append(draw())
        seed_all(seed)
        assert draw() == drawn[-1]
    for numbers in zip(*drawn, strict=True):
        assert len({str(number) for number in numbers}) == len(seeds)


def test_seeding_is_that_of_the_generators_themselves_and_of_no_device(monkeypatch):
    """``torch.manual_seed`` would seed each GPU, and nothing would put that back."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds every GPU"))
    seed_all(123)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(123)))
    assert np.random.rand() == np.random.RandomState(123).rand()
    assert random.random() == random.Random(123).random()


def test_states_are_put_back_exactly_after_an_exception_too():
    np.random.randn()  # one normal number is in store from here on
    random.gauss(0, 1)
    with preserved_random_states():
        expected = draw()
    with pytest.raises(ZeroDivisionError), preserved_random_states():
        _ = seed_all(9), draw(), 1 / 0
    assert draw() == expected


def test_what_an_iterator_draws_is_not_missing_outside():
    with preserved_random_states():
        expected = [draw() for _ in range(2)]
    drawn = []
    for item in PreservingIterator(draw() for _ in range(2)):
        assert item == expected[len(drawn)]
        drawn.append(draw())
    assert drawn == expected


def test_own_states_and_those_outside_do_not_move_each_other_and_go_on_where_they_were_left():
    with preserved_random_states():
        undisturbed = [draw() for _ in range(6)]
    own, inside, outside = OwnRandomStates(), [], []
    for _ in range(3):
        with own:
            inside.append(draw())
        outside.append(draw())
    assert inside == outside == undisturbed[:3]
    with pytest.raises(ZeroDivisionError), own:
        _ = inside.append(draw()), 1 / 0
    with own:
        inside.append(draw())
    assert inside == undisturbed[:5]
    assert draw() == undisturbed[3]


DRAWS = {"torch": lambda: torch.rand(()), "numpy": np.random.rand, "random": random.random}


@pytest.mark.parametrize("count", [312, 624])
def test_a_trap_sees_so_many_draws_that_the_position_is_the_same_again(count):
    trap = DrawingTrap()
    trap.set()
    np.random.rand(count)
    assert trap.drawn_from() == "numpy"


def test_a_normal_number_in_store_is_not_what_is_drawn():
    """numpy and random draw two at once, and keep one: taking that moves nothing else."""
    trap = DrawingTrap()
    for draw_one, name in ((np.random.randn, "numpy"), (lambda: random.gauss(0, 1), "random")):
        draw_one()
        trap.set()
        draw_one()
        assert trap.drawn_from() == name


def test_a_trap_watches_all_of_them_and_making_one_draws_nothing():
    with preserved_random_states():
        expected = draw()
    generator = np.random.default_rng(0)
    trap = DrawingTrap([lambda: generator.bit_generator.state])
    assert draw() == expected
    trap.set()
    assert trap.drawn_from() == ""
    trap.set()
    for draw_one in (*DRAWS.values(), generator.random):
        draw_one()
    assert trap.drawn_from() == "torch and numpy and random and a generator that the data set holds"


class Albumentations:
    def __init__(self, transforms=()):
        self.transforms, self.seeds = list(transforms), []

    def set_random_seed(self, seed):
        self.seeds.append(seed)


class Monai:
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


def found_in(dataset, *transforms):
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
