"""The order of a user's sampler: followed pass by pass, asked for no more than is needed, and found again."""

import random

import numpy as np
import pytest
import torch
from samplers import BATCH_SAMPLERS, SAMPLERS, CountingSampler, passes_of
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_echo.data.randomness import seed_all
from lightning_echo.pipeline.requests import SamplerOrder, draws_by_itself


@pytest.mark.parametrize("name", [*SAMPLERS, *BATCH_SAMPLERS])
def test_a_sampler_is_followed_pass_by_pass_and_says_that_it_can_be_found_again(name):
    make = {**SAMPLERS, **BATCH_SAMPLERS}[name]
    length = len(make(0))
    order = SamplerOrder(make(0), length, length, seed=0)
    assert [order.take(length) for _ in range(4)] == passes_of(make(0), 4)
    assert order.exact or name == "SequentialSampler"


def test_a_sampler_is_asked_for_a_pass_only_when_its_first_item_is_needed_and_read_no_further_than_that():
    asked, read, told = [], [], []

    class Watched(SequentialSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

        def __iter__(self):
            asked.append(len(asked))
            for index in super().__iter__():
                read.append(index)
                yield index

    order = SamplerOrder(Watched(range(10)), 10, 10, seed=0)
    for count, passes in ((0, 0), (10, 1), (1, 2)):
        order.take(count)
        assert asked == told == list(range(passes))
    read.clear()
    order = SamplerOrder(Watched(range(1000)), 1000, 1000, distance=10, seed=0)
    order.begin_spreading()
    order.take(5)
    assert len(read) <= 6
    told.clear()
    SamplerOrder(BatchSampler(Watched(range(10)), 5, drop_last=False), 2, 2, seed=0).take(6)
    assert told == [0, 1, 2], "also the sampler inside a batch sampler"


def test_a_sampler_without_a_generator_is_lent_one_so_that_a_pass_depends_on_the_seed_alone():
    sampler = RandomSampler(range(30))
    state = torch.get_rng_state()
    first, again, other = (SamplerOrder(sampler, 30, 30, seed=seed) for seed in (1, 1, 2))
    passes = [first.take(30) for _ in range(3)]
    assert [again.take(30) for _ in range(3)] == passes != [other.take(30) for _ in range(3)]
    assert all(sorted(indices) == list(range(30)) for indices in passes)
    assert len(set(map(tuple, passes))) == 3
    batches = BatchSampler(sampler, 4, drop_last=False)
    first, again = (SamplerOrder(batches, 8, 8, seed=1) for _ in range(2))
    assert first.take(24) == again.take(24), "also inside a batch sampler"
    assert sampler.generator is None
    assert torch.equal(torch.get_rng_state(), state)


class PartlyByGenerator(Sampler):
    """Takes a ``generator`` and draws from it only in part, as torchgeo's ``RandomGeoSampler``; the rest from everywhere."""

    def __init__(self, generator=None):
        self.generator = generator

    def __iter__(self):
        for _ in range(20):
            area = int(torch.multinomial(torch.ones(10), 1))
            yield area, int(torch.randint(10, (), generator=self.generator)), np.random.randint(10), random.randrange(10)

    def __len__(self):
        return 20


class PartlyInBatches(PartlyByGenerator):
    """Looks like a batch sampler of torch's."""

    batch_size = 1

    def __init__(self, generator=None):
        super().__init__(generator)
        self.sampler = RandomSampler(range(20))

    def __iter__(self):
        yield from ([index, *drawn] for index, drawn in zip(self.sampler, super().__iter__(), strict=True))


@pytest.mark.parametrize(
    "make", [PartlyByGenerator, PartlyInBatches, lambda: PartlyByGenerator(torch.Generator().manual_seed(3))]
)
def test_whoever_draws_from_the_global_states_does_so_from_states_of_its_own(make):
    first, again, other = (SamplerOrder(make(), 20, 20, seed=seed) for seed in (1, 1, 2))
    seed_all(7)
    undisturbed = torch.rand(6).tolist(), np.random.rand(6).tolist(), [random.random() for _ in range(6)]
    seed_all(7)
    mixed = [], [], []
    taken = []
    for _ in range(6):
        taken += first.take(7)
        for numbers, draw in zip(mixed, (lambda: float(torch.rand(())), np.random.rand, random.random), strict=True):
            numbers.append(draw())
    assert mixed == undisturbed  # the training's
    assert again.take(42) == taken != other.take(42)
    assert len(set(map(str, taken))) == 42
    resumed = SamplerOrder(make(), 20, 20, seed=1)
    resumed.load(first.state(27))
    resumed.seek(27)
    assert resumed.take(15) == taken[27:]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(range(5)), True),
        (BatchSampler(SequentialSampler(range(5)), 2, False), True),
        (DistributedSampler(range(6), num_replicas=2, rank=0), True),
        (PartlyByGenerator(torch.Generator()), False),
        (BatchSampler(PartlyByGenerator(), 2, False), False),
        (PartlyInBatches(), False),
        (type("Own", (RandomSampler,), {})(range(5)), False),
        (CountingSampler(5, 0), False),
    ],
)
def test_only_torchs_own_classes_are_known_to_leave_the_global_states_alone(sampler, expected):
    assert draws_by_itself(sampler) is expected
