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
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_seeding_decides_all_three_generators(seed):
    seed_all(seed)
    first = draw()
    draw()
    seed_all(seed)
    assert draw() == first


def test_different_seeds_give_different_numbers_everywhere():
    seeds, drawn = [0, 1, 2, 77, 2**31], []
    for seed in seeds:
        seed_all(seed)
        drawn.append(draw())
    for numbers in zip(*drawn, strict=True):
        assert len({str(number) for number in numbers}) == len(seeds)


def test_seeding_is_that_of_the_generators_themselves():
    seed_all(123)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(123)))
    assert np.random.rand() == np.random.RandomState(123).rand()
    assert random.random() == random.Random(123).random()


def test_no_gpu_is_seeded(monkeypatch):
    """``torch.manual_seed`` would do it, and nothing would put it back."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds every GPU"))
    seed_all(3)


def test_states_are_put_back_exactly():
    np.random.randn()  # one normal number is in store from here on
    random.gauss(0, 1)
    with preserved_random_states():
        expected = draw()
    with preserved_random_states():
        seed_all(9)
        draw()
    assert draw() == expected


def test_states_are_put_back_after_an_exception_too():
    with preserved_random_states():
        expected = draw()
    with pytest.raises(ZeroDivisionError), preserved_random_states():
        _ = draw(), 1 / 0
    assert draw() == expected


def test_what_an_iterator_draws_is_not_missing_outside():
    with preserved_random_states():
        expected = [draw() for _ in range(2)]
    items = PreservingIterator(draw() for _ in range(2))
    drawn = []
    for item in items:
        assert item == expected[len(drawn)]
        drawn.append(draw())
    assert drawn == expected


def test_own_states_go_on_where_they_were_left():
    """In a loop in which training draws nothing, an iterator must not draw the same numbers again and again."""
    own, drawn = OwnRandomStates(), []
    for _ in range(3):
        with own:
            drawn.append(draw())
    with preserved_random_states():
        expected = [draw() for _ in range(3)]
    assert drawn == expected


def test_own_states_and_those_outside_do_not_move_each_other():
    with preserved_random_states():
        undisturbed = [draw() for _ in range(6)]
    own, inside, outside = OwnRandomStates(), [], []
    for _ in range(3):
        with own:
            inside.append(draw())
        outside.append(draw())
    assert inside == undisturbed[:3]
    assert outside == undisturbed[:3]


def test_own_states_survive_an_exception():
    own = OwnRandomStates()
    with preserved_random_states():
        expected = [draw(), draw()]
    with pytest.raises(ZeroDivisionError), own:
        _ = draw(), 1 / 0
    with own:
        assert draw() == expected[1]
    assert draw() == expected[0]


DRAWS = {
    "torch": lambda: torch.rand(()),
    "numpy": np.random.rand,
    "random": random.random,
}


class TestTrap:
    @pytest.mark.parametrize("name", DRAWS)
    def test_the_generator_that_was_drawn_from_is_named(self, name):
        trap = DrawingTrap()
        for _ in range(2):
            trap.set()
            assert trap.drawn_from() == ""
            trap.set()
            DRAWS[name]()
            assert trap.drawn_from() == name

    @pytest.mark.parametrize("count", [312, 624])
    def test_so_many_that_the_position_is_the_same_again(self, count):
        trap = DrawingTrap()
        trap.set()
        np.random.rand(count)
        assert trap.drawn_from() == "numpy"

    def test_a_normal_number_in_store_is_not_what_is_drawn(self):
        """numpy and random draw two at once, and keep one: taking that moves nothing else."""
        trap = DrawingTrap()
        for draw_one, name in ((np.random.randn, "numpy"), (lambda: random.gauss(0, 1), "random")):
            draw_one()
            trap.set()
            draw_one()
            assert trap.drawn_from() == name

    def test_all_of_them(self):
        generator = np.random.default_rng(0)
        trap = DrawingTrap([lambda: generator.bit_generator.state])
        trap.set()
        assert trap.drawn_from() == ""
        trap.set()
        for draw_one in (*DRAWS.values(), generator.random):
            draw_one()
        assert trap.drawn_from() == "torch and numpy and random and a generator that the data set holds"

    def test_making_one_draws_nothing(self):
        seed_all(5)
        expected = draw()
        seed_all(5)
        DrawingTrap()
        assert draw() == expected
