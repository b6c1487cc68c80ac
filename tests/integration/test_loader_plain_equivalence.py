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


class EpochSampler(Sampler):
    """Its order depends on what ``set_epoch`` said last."""

    epoch = 0

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
    "backwards": lambda: range(LENGTH - 1, -1, -1),
    "part": lambda: SequentialSampler(range(10)),  # over something else than the data set
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), 13, generator=generator()),
    "subset": lambda: SubsetRandomSampler(range(3, LENGTH), generator=generator()),
    "random": lambda: RandomSampler(range(LENGTH), generator=generator()),
    "with_replacement": lambda: RandomSampler(range(LENGTH), True, 40, generator=generator()),
}


def plain_loader(sampler, workers, batch_size, drop_last):
    options = {"batch_size": batch_size, "sampler": SAMPLERS[sampler](), "num_workers": workers, "drop_last": drop_last}
    return DataLoader(Values(LENGTH), **options)


@pytest.mark.parametrize(
    "case",
    pairwise(sampler=tuple(SAMPLERS), point=POINTS, workers=(0, 1), batch_size=(7, 4), drop_last=(False, True)),
    ids=case_id,
)
def test_factor_1_delivers_the_plain_loaders_batches_in_its_order_epoch_after_epoch(case):
    point = case.pop("point")
    expected = epochs(plain_loader(**{**case, "workers": 0}), 3)
    echoed = EchoLoader(plain_loader(**case), 1, insertion_point=point, seed=0)
    assert len(echoed) == len(expected[0])
    assert same(epochs(echoed, 3), expected)
    assert echoed.counts.echoed == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Values(LENGTH), batch_sampler=BatchSampler(SAMPLERS["random"](), 4, False)),
        lambda: [torch.arange(4), torch.arange(4, 6), torch.arange(6, 7)],
    ],
    ids=["batch sampler", "iterable"],
)
def test_factor_1_delivers_the_batches_of_a_users_own(make):
    plain = make()
    assert same(epochs(EchoLoader(make(), 1, seed=0), 3), [list(plain) for _ in range(3)])


@pytest.mark.parametrize(
    "options", [{"batch_size": 7, "sampler": EpochSampler()}, {"batch_sampler": BatchSampler(EpochSampler(), 7, False)}]
)
def test_a_sampler_with_set_epoch_is_told_the_number_of_the_pass_also_inside_a_batch_sampler(options):
    echoed = EchoLoader(DataLoader(Values(LENGTH), **options), 1)
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


@pytest.mark.parametrize(("at_once", "workers"), [(True, 0), (False, 0), (False, 1)])
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


def order_of(length=LENGTH, *, workers=0, batch_size=4, **options):
    """The indices of each pass with ``shuffle=True``, at factor 1."""
    plain = DataLoader(Values(length), batch_size=batch_size, shuffle=True, num_workers=workers)
    echoed = EchoLoader(plain, 1, insertion_point="after_augmentation", seed=0, **options)
    return [[int(index) for batch in epoch for index in batch["index"]] for epoch in epochs(echoed, 3)]


@pytest.mark.parametrize("other", [{"workers": 1}, {"buffer_size": 5}, {"batch_size": 7}], ids=str)
def test_the_shuffled_order_depends_on_seed_and_pass_alone(other):
    assert order_of(**other) == order_of()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shuffled_order_is_the_same_one_dealt_out_to_any_number_of_ranks(ranks):
    dealt = [order_of(24, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    together = [list(itertools.chain(*zip(*orders, strict=True))) for orders in zip(*dealt, strict=True)]
    assert together == order_of(24)
