"""Whole batches are kept while uses are left, and read again where they are lost; passes of a plain iterable are read forward."""

import random
import weakref
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from own_states import Ends, RollsOver

from lightning_echo.pipeline.batches import BatchEcho, PassOver, PassReader, count_examples
from lightning_echo.pipeline.requests import Step
from lightning_echo.pipeline.worker import Report


class Steps:
    """Stands in for `BatchRequests`: says what it was told to."""

    def __init__(self, *steps):
        self._steps = iter(steps)

    def step(self):
        return next(self._steps)


def step(position, *, read=False, fresh=False, stays_live=False, size=4, forget=()):
    return Step(position, read or fresh, fresh, stays_live, size, forget)


SECONDS = {"source": 0.5, "rest": 0.25, "collate": 0.125}


def with_seconds(read):
    return SimpleNamespace(read=lambda position: (read(position), Report(**SECONDS)))


def echo(*steps, read=lambda position: torch.full((4,), float(position))):
    return BatchEcho(Steps(*steps), with_seconds(read))


class TestEchoingBatches:
    def test_what_reading_looked_up_counts_for_fresh_examples_and_what_it_says_always_reaches_the_user(self):
        steps = step(0, fresh=True, stays_live=True), step(0), step(1, read=True, stays_live=True), step(1)
        source = SimpleNamespace(read=lambda position: (torch.zeros(4), Report(note=f"about {position}", hits=3, misses=1)))
        batches = BatchEcho(Steps(*steps), source)
        reports = [report for _, report in (next(batches) for _ in steps)]
        assert [report.note for report in reports] == ["about 0", "", "about 1", ""]
        assert [(report.hits, report.misses) for report in reports] == [(3, 1), (0, 0), (0, 0), (0, 0)]

    def test_a_loader_may_use_its_memory_again(self):
        slot = torch.zeros(2)
        fresh = [step(number, fresh=True, stays_live=number < 2) for number in range(3)]
        steps = fresh[0], fresh[1], step(0, stays_live=True), step(1), fresh[2], step(0)
        batches = echo(*steps, read=lambda position: slot.fill_(position))
        assert [batch.tolist() for batch, _ in (next(batches) for _ in range(6))] == [[i] * 2 for i in (0, 1, 0, 1, 2, 0)]

    def test_what_has_no_use_left_or_is_to_be_forgotten_is_let_go(self):
        held = weakref.WeakSet()

        class Batch(list):
            __hash__ = object.__hash__

            def __init__(self):
                super().__init__([0] * 4)
                held.add(self)

            def __deepcopy__(self, memo):
                return Batch()

        steps = [step(number, fresh=True, stays_live=True) for number in (0, 1)]
        steps += [step(0), step(2, fresh=True, forget=(1,))]
        batches, alive = echo(*steps, read=lambda position: Batch()), []
        for _ in steps:
            next(batches)
            alive.append(len(held))
        assert alive == [1, 2, 1, 0]

    def test_a_live_batch_that_is_held_nowhere_is_read_again_and_counted(self):
        batches = echo(step(5, read=True, stays_live=True), step(5))
        assert [next(batches)[1] for _ in range(2)] == [Report(0, 4, 4, **SECONDS), Report(0, 4)]


@dataclass
class Pairs:
    images: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(7, 3), 7),
        (torch.zeros(()), 1),
        ([torch.zeros(3, 2), torch.zeros(5)], 3),
        ((torch.zeros(3), "words"), 3),
        ({"name": ["a", "b", "c", "d"], "x": torch.zeros(4, 2)}, 4),
        ({"im_file": ["a", "b"], "cls": torch.zeros(5, 1), "img": torch.zeros(2, 3, 8, 8), "shape": ((8, 8), (8, 8))}, 2),
        ({"boxes": torch.zeros(7, 4), "sizes": [8, 8], "img": torch.zeros(3, 8)}, 7),  # nothing says more than the first tensor
        (UserDict(x=torch.zeros(4)), 4),
        (tuple(zip(*[(torch.zeros(3, 8, 8), {"boxes": torch.zeros(9, 4)})] * 5, strict=True)), 5),
        (([torch.zeros(6, 3)] * 2, torch.zeros(6)), 6),
        ("text", 1),
        (None, 1),
        (SimpleNamespace(batch_size=np.int64(7)), 7),
        (SimpleNamespace(batch_size=torch.Size([5, 2])), 5),
        (SimpleNamespace(batch_size=None, num_nodes=90), 90),
        (
            SimpleNamespace(
                node_stores=[SimpleNamespace(batch_size=4), SimpleNamespace(), SimpleNamespace(batch_size=2)], num_nodes=9
            ),
            6,
        ),
        ({"graph": SimpleNamespace(batch_size=7), "labels": torch.zeros(9)}, 7),
        ({"labels": torch.zeros(9), "graph": SimpleNamespace(batch_size=7)}, 9),
        ([SimpleNamespace(num_nodes=7)] * 3, 3),  # a list of graphs
        (UserDict(batch_size=torch.zeros(3), x=torch.zeros(4)), 3),
        (Pairs(torch.zeros(5, 2), torch.zeros(5)), 5),
    ],
)
def test_examples_of_an_unknown_batch_are_counted_as_collate_functions_usually_lay_them_out(batch, expected):
    assert count_examples(batch) == expected


class Passes:
    """A plain iterable of batches: 5 in each pass, told the number of the pass."""

    def __init__(self, length=5):
        self.length, self.log, self.epochs = length, [], []

    def __iter__(self):
        self.log.append("iter")
        for i in range(self.length):
            self.log.append(i)
            yield i, float(torch.rand(())), float(np.random.rand()), random.random()


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

    def test_an_iterable_that_yields_more_than_its_length_is_cut_and_one_that_ends_before_is_reported(self):
        assert firsts(PassReader(Passes(length=8), 5), range(10)) == [*range(5), *range(5)]
        reader = PassReader(Passes(length=3), 5)
        values(reader, range(3))
        with pytest.raises(RuntimeError, match=r"the loader ended after 3 batches, but its length is 5. Correct its __len__"):
            reader.read(3)


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
