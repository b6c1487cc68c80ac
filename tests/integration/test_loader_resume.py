"""A run resumed from any step delivers the rest of the uninterrupted one, bit by bit."""

import random

import numpy as np
import pytest
import torch
from loader_cases import POINTS, LoggedDataset, Noisy, ReadLog, assert_goes_on, same, take, through_a_file
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler

from lightning_echo import EchoLoader

BATCHES, EPOCHS = 5, 2


BY_EACH_RULE = pytest.mark.parametrize("reuse", ["memory", "each"])


def loader(point="after_augmentation", workers=0, factor=2.37, dataset=None, reuse="memory", **options):
    options = {"shuffle": "sampler" not in options, **options}
    plain = DataLoader(dataset or Noisy(19), batch_size=4, num_workers=workers, **options)
    return EchoLoader(plain, factor, insertion_point=point, reuse=reuse, seed=1)


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", POINTS)
@BY_EACH_RULE
def test_a_run_resumed_after_any_batch_goes_on_as_the_uninterrupted_one(point, workers, reuse):
    def make():
        return loader(point, workers, reuse=reuse)

    assert_goes_on(make, EPOCHS, 3)


class Stateful(Sampler):
    """Goes through an order that its state alone decides."""

    def __init__(self):
        self.passes = 0

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]

    def __len__(self):
        return 19

    def __iter__(self):
        self.passes += 1
        return iter([(7 * self.passes + 3 * i) % 19 for i in range(19)])


class GlobalSampler(Sampler):
    """Draws from the global random state, or rather from states of its own that are put in that place."""

    def __len__(self):
        return 19

    def __iter__(self):
        return iter(torch.randperm(19).tolist())


SAMPLERS = {
    "subset": lambda: {"sampler": SubsetRandomSampler(range(19))},
    "own_generator": lambda: {"sampler": SubsetRandomSampler(range(19), torch.Generator().manual_seed(3))},
    "stateful": lambda: {"sampler": Stateful()},
    "set_epoch": lambda: {"sampler": DistributedSampler(range(19), num_replicas=1, rank=0)},
    "global": lambda: {"sampler": GlobalSampler()},
    "sequential": lambda: {"shuffle": False},
}


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:lightning_echo. GlobalSampler has neither state_dict")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("sampler", [*SAMPLERS, "of batches"])
def test_a_users_sampler_with_a_state_or_a_generator_is_resumed_exactly(sampler, point):
    def make():
        if sampler == "of batches":
            shuffled = RandomSampler(range(19), generator=torch.Generator().manual_seed(3))
            return EchoLoader(DataLoader(Noisy(19), batch_sampler=BatchSampler(shuffled, 4, False)), 2, seed=1)
        return loader(point, **SAMPLERS[sampler]())

    assert_goes_on(make, EPOCHS, 4)


class RandomBatches:
    """A plain iterable of batches, that draws from all three global random states."""

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for i in torch.randperm(BATCHES).tolist():
            yield torch.tensor([i, random.random(), np.random.rand()], dtype=torch.float64)


class EagerBatches:
    """One with a state, that draws where it begins, and more where it begins from a state, as torchdata's loader does."""

    def __init__(self):
        self.at, self.loaded = 0, None

    def __len__(self):
        return BATCHES

    def __iter__(self):
        (self.at, is_loaded), self.loaded = (0, False) if self.loaded is None else (self.loaded, True), None
        torch.rand(3 if is_loaded else 1)
        return self._rest()

    def _rest(self):
        while self.at < BATCHES:
            self.at += 1
            yield torch.tensor([self.at, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.loaded = state["at"]


@pytest.mark.grid
@pytest.mark.parametrize("batches", [RandomBatches, EagerBatches, lambda: list(torch.arange(10).view(5, 2))])
@pytest.mark.parametrize("factor", [1, 2.5])
@BY_EACH_RULE
def test_plain_iterables_of_batches_are_resumed_exactly(batches, factor, reuse):
    def make():
        return EchoLoader(batches(), factor, reuse=reuse, seed=1)

    assert_goes_on(make, EPOCHS)


def test_a_sampler_without_state_or_generator_says_once_that_resuming_is_not_exact():
    first = loader(sampler=GlobalSampler())
    take(first, 3)
    resumed = loader(sampler=GlobalSampler())
    resumed.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match="GlobalSampler has neither state_dict and load_state_dict, nor a torch generator"
    ) as said:
        take(resumed, 12)
    assert len(said) == 1


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@BY_EACH_RULE
def test_what_was_live_is_read_again_once_and_counted(tmp_path, workers, reuse):
    def make(name):
        return loader("after_augmentation", workers, 4, LoggedDataset(19, ReadLog(tmp_path / name)), reuse=reuse)

    first = make("first")
    take(first, 8)
    counts = first.counts
    resumed = make("resumed")
    resumed.load_state_dict(first.state_dict())
    at_construction = len((log := resumed.loader.dataset.log).entries())
    assert resumed.counts == counts
    take(resumed, 12)
    resumed.close()
    assert 0 < resumed.counts.refetched <= resumed.buffer_size
    reads = len(log.entries()) - at_construction
    in_flight = 6 * 4 if workers else 0
    assert 0 <= reads - (resumed.counts.fresh - counts.fresh) - resumed.counts.refetched <= in_flight
    assert resumed.counts.delivered == 20 * 4 - 4  # each pass of 19 ends with a batch of 3


@BY_EACH_RULE
def test_a_pending_change_of_the_factor_survives_resuming(reuse):
    def make():
        return loader(workers=2, factor=4, dataset=Noisy(39), reuse=reuse)

    def run(cut):
        running, delivered = make(), []
        for epoch in range(3):
            for batch in running:
                delivered.append(batch)
                if len(delivered) == cut:
                    state, running = through_a_file(running.state_dict()), make()
                    running.load_state_dict(state)
                    break
            if len(delivered) == cut:
                delivered += list(running)
            running.factor = (1.5, 3, 1)[epoch]
        return delivered

    expected = run(None)
    for cut in (14, 21):
        assert same(run(cut), expected)
