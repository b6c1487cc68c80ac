"""Two runs give the same batches and pixels, whatever the timing, and the training's random numbers are left alone."""

import random
import time

import numpy as np
import pytest
import torch
from loader_cases import Noisy, Stages, same
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader


def loader(point, workers, seed=1, dataset=None, **options):
    plain = DataLoader(dataset or Noisy(40), batch_size=8, shuffle=True, num_workers=workers)
    return EchoLoader(plain, 2.37, insertion_point=point, seed=seed, **options)


def test_the_number_of_workers_changes_which_examples_are_echoed_but_not_the_fresh_ones_and_a_seed_all():
    orders = []
    for workers in (0, 1, 2):
        batches = list(loader("after_augmentation", workers, dataset=Noisy(60)))
        orders.append(list(dict.fromkeys(index for batch in batches for index in batch[:, 0].tolist())))
    assert not same(list(loader("after_augmentation", 0, seed=2)), list(loader("after_augmentation", 0)))
    shortest = min(map(len, orders))
    assert shortest > 20  # of 60 at factor 2.37, over as many batches as the plain loader has
    assert orders[0][:shortest] == orders[1][:shortest] == orders[2][:shortest]


class Drawing:
    """A sampler that says how to repeat a pass, and draws from the global random states all the same."""

    def set_epoch(self, epoch):
        np.random.seed(epoch)

    def __iter__(self):
        for index in np.random.permutation(40).tolist():
            random.random(), torch.rand(1)
            yield index

    def __len__(self):
        return 40


@pytest.mark.parametrize("sampler", [None, Drawing()], ids=["shuffled", "sampler"])
@pytest.mark.parametrize(("point", "factor"), [("after_read", 2.37), ("after_batching", 1)])
def test_without_workers_the_random_states_of_the_training_are_untouched(point, sampler, factor):
    def states():
        return torch.get_rng_state(), np.random.get_state()[1].tolist(), np.random.get_state()[2], random.getstate()

    before = states()
    plain = DataLoader(Noisy(40), batch_size=8, shuffle=sampler is None or None, sampler=sampler)
    echoed = EchoLoader(plain, factor, insertion_point=point)
    for _ in range(2):
        for _ in echoed:
            now = states()
            assert torch.equal(now[0], before[0])
            assert now[1:] == before[1:]
    drawn = torch.rand(3), np.random.rand(), random.random()
    torch.set_rng_state(before[0])
    assert torch.equal(drawn[0], torch.rand(3))


class Delayed(Stages):
    """Takes its time to read, differently in every run."""

    def read(self, index):
        time.sleep(random.SystemRandom().random() * 0.002)
        return super().read(index)

    def augment(self, example):
        return example + torch.rand(1) / 2


@pytest.mark.grid
@pytest.mark.parametrize("workers", [2, 0])
@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_changing_factors_take_effect_at_the_same_batch_whatever_the_delays(point, workers):
    def run(step_seconds):
        echoed = loader(point, workers, dataset=Delayed(40))
        batches, counts = [], []
        for factor in (4, 1, 1.5, 8, 2, *[2] * 12):  # batches that are echoed up to 8 times are planned far ahead
            for batch in echoed:
                batches.append(batch)
                counts.append(echoed.last_batch_counts)
                time.sleep(random.SystemRandom().random() * step_seconds)
            echoed.factor = factor
        return batches, counts

    fast, slow = run(0.0), run(0.004)
    assert fast[1] == slow[1]
    assert same(fast[0], slow[0])
    fresh = [count.fresh for count in fast[1]]
    assert [8] * 5 in [fresh[i : i + 5] for i in range(4, len(fresh))], "factor 1 has come through"
    assert min(fresh) <= 1, "factor 8 has come through"
