"""Factor 1 is the plain loader: the expectation is always a bare ``DataLoader`` of the same making."""

import itertools
import threading

import pytest
import torch
from loader_cases import POINTS, Values, epochs, same
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo import EchoLoader

LENGTH = 21


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


@pytest.mark.parametrize(("sampler", "point"), list(zip(SAMPLERS, itertools.cycle(POINTS), strict=False)))
@pytest.mark.parametrize(("workers", "batch_size", "drop_last"), [(0, 7, True), (1, 4, False)])
def test_factor_1_delivers_the_plain_loaders_batches_in_its_order_epoch_after_epoch(
    sampler, point, workers, batch_size, drop_last
):
    expected = epochs(plain_loader(sampler, 0, batch_size, drop_last), 2)
    echoed = EchoLoader(plain_loader(sampler, workers, batch_size, drop_last), 1, insertion_point=point, seed=0)
    assert len(echoed) == len(expected[0])
    assert same(epochs(echoed, 2), expected)
    assert echoed.counts.echoed == 0


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
