"""A loader that is never rebuilt is read forward, pass after pass; a resumed run finds its place by the loader's own state."""

import random

import numpy as np
import pytest
import torch
from own_states import Ends, RollsOver

from lightning_echo.pipeline.batches import PassOver, PassReader


class Passes:
    """A plain iterable of batches: 5 in each pass, told the number of the pass."""

    def __init__(self, length=5):
        self.length, self.log, self.epochs = length, [], []

    def __iter__(self):
        self.log.append("iter")
        for i in range(self.length):
            self.log.append(i)
            yield i, float(torch.rand(())), float(np.random.rand()), random.random()


class Told(Passes):
    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Watched(Ends):
    """Remembers what it was told, and when its state was loaded."""

    def __init__(self, lengths):
        super().__init__(*lengths)
        self.log = []

    def set_epoch(self, epoch):
        self.log.append(epoch)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.log.append("state")


def noise():
    """The states of the three global generators."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def values(reader, positions):
    return [reader.read(position)[0] for position in positions]


def firsts(reader, positions):
    return [batch[0] for batch in values(reader, positions)]


class TestReading:
    def test_ascending_positions_iterate_each_pass_once_a_resumed_run_from_the_start_of_that_of_its_oldest_batch(self):
        source = Passes()
        assert firsts(PassReader(source, 5), range(12)) == [*range(5), *range(5), 0, 1]
        assert source.log == ["iter", *range(5), "iter", *range(5), "iter", 0, 1]
        source = Passes()
        reader = PassReader(source, 5)
        reader.seek(12)
        reader.may_come_late = frozenset([])
        assert firsts(reader, range(13, 17)) == [3, 4, 0, 1]
        assert source.log == ["iter", *range(5), "iter", 0, 1]

    @pytest.mark.parametrize("order", [(6, 8, 9, 10), (9, 6, 10, 8), (10, 9, 8, 6)])
    def test_what_is_expected_may_be_asked_for_after_later_ones(self, order):
        source, reader = Passes(), PassReader(Passes(), 5)
        expected = dict(enumerate(values(PassReader(source, 5), range(11))))
        reader.seek(6)
        reader.may_come_late = frozenset([6, 8, 9])
        assert {position: reader.read(position)[0] for position in order} == {position: expected[position] for position in order}

    def test_a_pass_that_is_read_again_draws_the_same_random_numbers_and_none_of_the_training(self):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        before = noise()
        batches = values(PassReader(Passes(), 5, seed=3), range(15))
        assert noise() == before
        assert len(set(batches)) == 15
        resumed = PassReader(Passes(), 5, seed=3)
        resumed.seek(7)
        assert values(resumed, range(7, 15)) == batches[7:]
        assert values(PassReader(Passes(), 5, seed=4), [0]) != batches[:1]

    def test_the_number_of_the_pass_is_told_once_to_the_loader_and_to_its_samplers(self):
        """Lightning does not find the samplers in an `EchoLoader`."""
        source = Told()
        source.sampler = Told()
        source.batch_sampler = Told()
        source.batch_sampler.sampler = Told()
        values(PassReader(source, 5), range(11))
        told = source, source.sampler, source.batch_sampler, source.batch_sampler.sampler
        assert [each.epochs for each in told] == [[0, 1, 2]] * 4
        source = Told()
        source.sampler = source.batch_sampler = source
        values(PassReader(source, 5), range(6))
        assert source.epochs == [0, 1]

    def test_an_iterable_that_yields_more_than_its_length_is_cut_and_one_that_ends_before_is_reported(self):
        assert firsts(PassReader(Passes(length=8), 5), range(10)) == [*range(5), *range(5)]
        reader = PassReader(Passes(length=3), 5)
        values(reader, range(3))
        with pytest.raises(RuntimeError, match=r"the loader ended after 3 batches, but its length is 5. Correct its __len__"):
            reader.read(3)


class TestWithoutALength:
    def test_the_end_of_a_pass_is_said_once_and_the_same_position_is_the_first_of_the_next(self):
        source = Told(length=3)
        reader = PassReader(source, None)
        for first in (0, 3, 6):
            assert firsts(reader, range(first, first + 3)) == [0, 1, 2]
            with pytest.raises(PassOver):
                reader.read(first + 3)
        assert source.epochs == [0, 1, 2]

    def test_a_state_between_two_passes_begins_the_next(self):
        source = Told(length=3)
        reader = PassReader(source, None)
        values(reader, range(3))
        with pytest.raises(PassOver):
            reader.read(3)
        state = reader.state(3)
        assert state == {"passes": [[1, 3]]}
        resumed = PassReader(Told(length=3), None)
        resumed.load(state)
        resumed.seek(3)
        assert firsts(resumed, range(3, 6)) == [0, 1, 2]
        assert resumed._batches.epochs == [1]


KINDS = {"ends": Ends, "rolls over": RollsOver}


def run(reader, count):
    """The next ``count`` batches, with None where a pass ends; the states before each."""
    found, states, position = [], [], reader.position
    while len(found) < count:
        states.append(reader.state(position))
        try:
            found.append(reader.read(position)[0])
            position += 1
        except PassOver:
            found.append(None)
    return found, states


class TestALoaderWithAStateOfItsOwn:
    @pytest.mark.parametrize("kind", KINDS)
    def test_with_a_length_a_run_goes_on_from_every_state_without_reading_anything_twice(self, kind):
        batches, states = run(PassReader(KINDS[kind](4), 4), 14)
        assert batches == [100 * (i // 4) + i % 4 for i in range(14)]
        for position, state in enumerate(states):
            loader = KINDS[kind](4)
            resumed = PassReader(loader, 4)
            resumed.load(state)
            resumed.seek(position)
            assert values(resumed, range(position, 14)) == batches[position:]
            assert loader.read <= 14 - position

    @pytest.mark.parametrize("kind", KINDS)
    def test_without_a_length_too(self, kind):
        lengths = [3, 1, 4, 2, 5, 9]
        batches, states = run(PassReader(KINDS[kind](*lengths), None), 14)
        assert batches == [0, 1, 2, None, 100, None, 200, 201, 202, 203, None, 300, 301, None]
        for at, state in enumerate(states):
            if kind == "rolls over" and batches[at] is None:
                continue  # its state is that of the next pass already, and nobody knows a length
            resumed = PassReader(KINDS[kind](*lengths), None)
            resumed.load(state)
            position = sum(batch is not None for batch in batches[:at])
            resumed.seek(position)
            assert run(resumed, 14 - at)[0] == batches[at:]

    @pytest.mark.parametrize("length", [4, None], ids=["sized", "unsized"])
    def test_a_resumed_loader_is_told_its_pass_once_before_its_state_is_loaded_and_later_ones_as_they_begin(self, length):
        reader = PassReader(Watched([4] * 9), length)
        run(reader, 6)
        at = 6 if length else 5  # without a length the end of the first pass is one of the six
        resumed = PassReader(Watched([4] * 9), length)
        resumed.load(reader.state(at))
        resumed.seek(at)
        run(resumed, 2)
        assert resumed._batches.log == [1, "state"]
        resumed.take(2)
        run(resumed, 3)
        assert resumed._batches.log == [1, "state", 2]

    def test_an_order_that_was_drawn_when_the_loader_was_made_is_that_of_the_resumed_run_from_its_first_batch_on(self):
        loader = Ends(3)
        loader.number = 7
        reader = PassReader(loader, 3)
        assert values(reader, range(2)) == [700, 701]
        resumed = PassReader(Ends(3), 3)
        resumed.load(reader.state(0))
        resumed.seek(0)
        assert values(resumed, range(3)) == [700, 701, 702]

    def test_states_are_kept_only_while_they_may_be_asked_for(self):
        reader = PassReader(Ends(50), 50)
        values(reader, range(20))
        reader.prune(15)
        assert reader.state(15)["loader"] == {"position": 15, "state": {"at": 15, "number": 0}}
        assert "loader" not in reader.state(14)
