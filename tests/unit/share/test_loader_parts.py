"""What the reader gets of a loader, and samplers that are found again at any pass."""

import pickle
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from lightning_echo.data.randomness import seed_all
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.same_data import ReplayedSampler, Unit, loader_of, parts_of, unit_of


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class OwnWay(DataLoader):
    def __iter__(self):
        return iter([torch.zeros(2)])


LOADERS = {
    Unit.indexed: [
        DataLoader(range(8), batch_size=2),
        DataLoader(range(8), shuffle=True, generator=torch.Generator()),
    ],
    Unit.streamed: [DataLoader(Stream(), batch_size=2)],
    Unit.examples_of_batch: [DataLoader(range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 3, False))],
    Unit.batch: [
        DataLoader(Stream(), batch_size=None),
        DataLoader(range(8), batch_size=None),
        OwnWay(range(8)),
        [[0, 1], [2, 3]],
    ],
}


@pytest.mark.parametrize(("unit", "loader"), [(unit, loader) for unit, loaders in LOADERS.items() for loader in loaders])
def test_a_loader_that_is_put_together_again_shares_the_same(unit, loader):
    assert unit_of(kind_of(loader)) is unit
    parts = parts_of(kind_of(loader))
    again = kind_of(loader_of(pickle.loads(pickle.dumps(parts)), seed=1))
    assert unit_of(again) is unit


def test_a_generator_of_the_trainings_does_not_reach_the_reader():
    sampler = RandomSampler(range(8), generator=torch.Generator())
    assert parts_of(kind_of(DataLoader(range(8), sampler=sampler)))["sampler"].generator is None
    assert sampler.generator is not None


class Remembering(Sampler):
    """Its order depends on how often it was iterated, on two generators, and on the pass that it was told."""

    def __init__(self, dataset):
        self.dataset, self.times, self.told = dataset, 0, []
        self.generator = torch.Generator()

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, number):
        self.told.append(number)

    def __iter__(self):
        order = torch.randperm(len(self), generator=self.generator).tolist()
        places = random.sample(range(len(self)), len(self))
        yield from (1000 * self.times + 100 * self.told[-1] + order[place] for place in places)
        self.times += 1  # when the pass has ended


def passes_of(sampler, *numbers):
    """The orders of these passes, as the reader asks for them."""
    found = []
    for number in numbers:
        sampler.set_epoch(number)
        seed_all(number)  # of no account
        found.append(list(sampler))
    return found


def test_a_sampler_with_a_memory_has_the_same_pass_wherever_a_reader_begins():
    dataset = range(6)
    in_order = passes_of(ReplayedSampler(Remembering(dataset), dataset, 5), 0, 1, 2, 3)
    assert [each[0] // 1000 for each in in_order] == [0, 1, 2, 3]
    assert in_order[0] != [index - 1100 for index in in_order[1]]
    for number in range(4):
        assert passes_of(ReplayedSampler(Remembering(dataset), dataset, 5), number) == [in_order[number]]
    assert passes_of(ReplayedSampler(Remembering(dataset), dataset, 5), 2, 0, 1, 3) == [in_order[each] for each in (2, 0, 1, 3)]
    one, other = Remembering(dataset), Remembering(dataset)
    other.generator.manual_seed(99)
    assert passes_of(ReplayedSampler(one, dataset, 5), 0) == passes_of(ReplayedSampler(other, dataset, 5), 0)
    assert passes_of(ReplayedSampler(one, dataset, 5), 0) != passes_of(ReplayedSampler(one, dataset, 6), 0)


def test_the_data_set_is_not_copied_and_a_generator_of_the_trainings_not_sent():
    dataset = list(range(6))
    replayed = ReplayedSampler(Remembering(dataset), dataset, 5)
    iter(replayed)
    assert replayed._sampler.dataset is dataset
    sampler = RandomSampler(range(8), generator=torch.Generator())
    assert parts_of(kind_of(DataLoader(range(8), sampler=sampler)))["sampler"].generator is None
    assert sampler.generator is not None
