"""Factor 1 is the plain loader: the expectation is always a bare ``DataLoader`` of the same making."""

import itertools
import threading

import pytest
import torch
from loader_cases import POINTS, Values, case_id, epochs, pairwise, same
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo import EchoLoader

LENGTH = 21


class Backwards(Sampler):
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(range(LENGTH - 1, -1, -1))


class EpochSampler(Sampler):
    """Its order depends on what ``set_epoch`` said last."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def generator():
    return torch.Generator().manual_seed(11)


SAMPLERS = {
    "sequential": lambda: None,
    "backwards": Backwards,
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), LENGTH, generator=generator()),
    "weighted_fewer": lambda: WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), 13, generator=generator()),
    "subset": lambda: SubsetRandomSampler(range(3, LENGTH), generator=generator()),
    "random": lambda: RandomSampler(range(LENGTH), generator=generator()),
    "random_with_replacement": lambda: RandomSampler(range(LENGTH), True, 40, generator=generator()),
}


def plain_loader(sampler, workers, batch_size, drop_last):
    return DataLoader(
        Values(LENGTH), batch_size=batch_size, sampler=SAMPLERS[sampler](), num_workers=workers, drop_last=drop_last
    )


@pytest.mark.parametrize(
    "case",
    pairwise(sampler=tuple(SAMPLERS), workers=(0, 2), batch_size=(7, 4), drop_last=(False, True), point=POINTS),
    ids=case_id,
)
def test_factor_1_delivers_the_plain_loaders_batches_in_its_order_epoch_after_epoch(case):
    point = case.pop("point")
    expected = epochs(plain_loader(**{**case, "workers": 0}), 3)
    echoed = EchoLoader(plain_loader(**case), 1, insertion_point=point, seed=0)
    assert len(echoed) == len(expected[0])
    assert same(epochs(echoed, 3), expected)
    assert echoed.counts.echoed == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_factor_1_delivers_the_batches_of_a_users_own_batch_sampler(workers):
    def plain(workers):
        sampler = RandomSampler(range(LENGTH), generator=generator())
        return DataLoader(Values(LENGTH), batch_sampler=BatchSampler(sampler, 4, False), num_workers=workers)

    assert same(epochs(EchoLoader(plain(workers), 1, seed=0), 3), epochs(plain(0), 3))


def test_factor_1_delivers_what_a_plain_iterable_of_batches_yields():
    batches = [torch.arange(4), torch.arange(4, 6), torch.arange(6, 7)]
    assert same(epochs(EchoLoader(batches, 1), 2), [batches, batches])


def test_a_sampler_with_set_epoch_is_told_the_number_of_the_pass():
    echoed = EchoLoader(DataLoader(Values(LENGTH), batch_size=7, sampler=EpochSampler()), 1, insertion_point="after_augmentation")
    for epoch in range(3):
        expected = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert [int(index) for batch in echoed for index in batch["index"]] == expected


def test_a_sampler_inside_the_users_batch_sampler_is_told_the_pass_too():
    sampler = BatchSampler(EpochSampler(), 7, False)
    echoed = EchoLoader(DataLoader(Values(LENGTH), batch_sampler=sampler), 1)
    for epoch in range(3):
        expected = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert [int(index) for batch in echoed for index in batch["index"]] == expected


class GlobalSampler(Sampler):
    """Draws from the global random state, as many samplers of users do: at once, or as it goes."""

    def __init__(self, at_once):
        self.at_once = at_once

    def __len__(self):
        return LENGTH

    def __iter__(self):
        if self.at_once:
            yield from torch.randperm(LENGTH).tolist()
        else:
            for _ in range(LENGTH):
                yield int(torch.randint(10**6, ())) % LENGTH


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_from_the_global_random_state_draws_anew_in_every_batch_and_pass(at_once, workers):
    def orders():
        plain = DataLoader(Values(LENGTH), batch_size=7, sampler=GlobalSampler(at_once), num_workers=workers)
        echoed = EchoLoader(plain, 1, insertion_point="after_augmentation", seed=0)
        return [tuple(batch["index"].tolist()) for epoch in epochs(echoed, 4) for batch in epoch]

    first = orders()
    assert len(set(first)) == 12
    torch.rand(3)  # what the training draws is no matter
    assert orders() == first


class Witness:
    """Says in which threads it was iterated."""

    def __init__(self, items):
        self.items, self.threads = items, set()

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        for item in self.items:
            self.threads.add(threading.current_thread())
            yield item


class WitnessWithGenerator(Witness):
    """May draw from its generator only in part."""

    generator = None


class WitnessOfEpochs(Witness):
    def set_epoch(self, epoch):
        pass


class Witnessed(DataLoader):
    def __iter__(self):
        self.witness = getattr(self, "witness", None) or Witness([0])
        list(self.witness)
        return super().__iter__()


def test_what_may_draw_from_the_global_random_states_runs_in_the_training_thread():
    """Beside it, in the prefetching thread, both would get each other's numbers, as timing has it."""
    for kind in (Witness, WitnessWithGenerator, WitnessOfEpochs):
        sampler = kind(range(LENGTH))
        epochs(EchoLoader(DataLoader(Values(LENGTH), batch_size=7, sampler=sampler, num_workers=1), 1), 2)
        assert sampler.threads == {threading.main_thread()}
    plain = Witnessed(Values(LENGTH), batch_size=7, num_workers=1)
    epochs(EchoLoader(plain, 1), 2)
    assert plain.witness.threads == {threading.main_thread()}


def order_of(length, *, passes, seed=0, workers=0, batch_size=4, **options):
    """The indices of each pass with ``shuffle=True``, at factor 1."""
    plain = DataLoader(Values(length), batch_size=batch_size, shuffle=True, num_workers=workers)
    echoed = EchoLoader(plain, 1, insertion_point="after_augmentation", seed=seed, **options)
    return [[int(index) for batch in epoch for index in batch["index"]] for epoch in epochs(echoed, passes)]


def test_shuffling_delivers_every_example_once_per_pass_in_a_new_order():
    passes = order_of(LENGTH, passes=5)
    for order in passes:
        assert sorted(order) == list(range(LENGTH))
    assert len(set(map(tuple, passes))) == 5
    assert order_of(LENGTH, passes=5, seed=1) != passes


@pytest.mark.parametrize("other", [{"workers": 2}, {"buffer_size": 5}, {"batch_size": 7}], ids=str)
def test_the_shuffled_order_depends_on_seed_and_pass_alone(other):
    assert order_of(LENGTH, passes=3, **other) == order_of(LENGTH, passes=3)


def test_the_shuffled_order_is_the_same_one_dealt_out_to_any_number_of_ranks():
    alone = order_of(24, passes=3)
    for ranks in (2, 3):
        dealt = [order_of(24, passes=3, num_replicas=ranks, rank=rank) for rank in range(ranks)]
        together = [list(itertools.chain(*zip(*orders, strict=True))) for orders in zip(*dealt, strict=True)]
        assert together == alone


def test_shuffling_of_torch_generators_seed_is_taken_where_no_seed_is_given():
    def order(torch_seed):
        plain = DataLoader(Values(LENGTH), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(torch_seed))
        return [int(index) for batch in EchoLoader(plain, 1, insertion_point="after_augmentation") for index in batch["index"]]

    assert order(1) == order(1) != order(2)


def test_a_sequential_sampler_over_something_else_than_the_data_set_is_the_users_own():
    plain = DataLoader(Values(LENGTH), batch_size=4, sampler=SequentialSampler(range(10)))
    assert [batch["index"].tolist() for batch in EchoLoader(plain, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
