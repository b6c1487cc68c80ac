"""Random states are seeded together, put back exactly, and kept apart where a user's iterator has its own."""

import random

import numpy as np
import pytest
import torch

from lightning_echo.data.randomness import (
    DrawingTrap,
    OwnRandomStates,
    PreservingIterator,
    preserved_random_states,
    seed_all,
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


@pytest.mark.parametrize("name", DRAWS)
def test_a_trap_names_the_generator_that_was_drawn_from(name):
    trap = DrawingTrap()
    for _ in range(2):
        trap.set()
        assert trap.drawn_from() == ""
        trap.set()
        DRAWS[name]()
        assert trap.drawn_from() == name


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
