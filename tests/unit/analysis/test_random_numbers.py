"""Random numbers are afterwards what they were, also where what drew them failed."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_echo import EchoLoader
from lightning_echo.analysis.random_numbers import random_numbers_kept

DATASET = list(range(20))


def of_loader(generator):
    return DataLoader(DATASET, shuffle=True, generator=generator)


def echoed(generator):
    return EchoLoader(of_loader(generator), 2)


def of_sampler(generator):
    return DataLoader(DATASET, sampler=RandomSampler(DATASET, generator=generator))


def of_batches(generator):
    return DataLoader(DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET, generator=generator), 2, drop_last=False))


def of_examples(generator):
    return DataLoader(DATASET, batch_size=None, sampler=RandomSampler(DATASET, generator=generator))


def drawn():
    return [torch.rand(1).item(), np.random.rand(), random.random()]


def fails_when_drawn():
    drawn()
    raise ZeroDivisionError


def test_those_of_this_process_are_put_back_after_an_error():
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    expected = drawn()
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    with pytest.raises(ZeroDivisionError), random_numbers_kept():
        fails_when_drawn()
    assert drawn() == expected


@pytest.mark.parametrize("loader_of", [of_loader, echoed, of_sampler, of_batches, of_examples])
def test_so_are_the_generators_of_a_loader(loader_of):
    generator = torch.Generator().manual_seed(4)
    loader, before = loader_of(generator), generator.get_state()
    with random_numbers_kept() as show:
        show(loader)
        list(loader)
        assert not torch.equal(generator.get_state(), before)
        show(loader)  # what it is by now does not count
    assert torch.equal(generator.get_state(), before)


def test_a_generator_that_is_not_torchs_is_left_alone():
    expected = np.random.default_rng(5).random(2).tolist()
    loader = SimpleNamespace(generator=np.random.default_rng(5))
    with random_numbers_kept() as show:
        show(loader)
        first = loader.generator.random()
    assert [first, loader.generator.random()] == expected
