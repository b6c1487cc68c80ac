"""The order of a user's sampler, and that of all ranks at once, which gives each rank what its own order gives it."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import SAMPLERS, CountingSampler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_echo.data.randomness import seed_all
from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.pipeline.requests import (
    AllRanksOrder,
    BatchedOrder,
    BatchRequests,
    ExampleRequests,
    RequestsInRounds,
    SamplerOrder,
    draws_by_itself,
    samplers_of_ranks,
)
from lightning_echo.plan.memory import make_plan


def test_a_sampler_is_asked_for_a_pass_and_told_its_number_only_when_its_first_item_is_needed():
    asked, told = [], []

    class Watched(SequentialSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

        def __iter__(self):
            asked.append(len(asked))
            yield from super().__iter__()

    order = SamplerOrder(Watched(range(10)), 10, 10, seed=0)
    for count, passes in ((0, 0), (10, 1), (1, 2)):
        order.take(count)
        assert asked == told == list(range(passes))
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


@pytest.mark.parametrize("distance", [0, 3])
def test_a_state_may_be_asked_for_at_each_moment_in_which_the_sampler_runs(distance):
    taken, states, looks = [], [], []

    class Watched(Sampler):
        def __init__(self):
            self.generator = torch.Generator().manual_seed(5)

        def __len__(self):
            return 10

        def set_epoch(self, epoch):
            self.look()

        def __iter__(self):
            self.look()
            for index in torch.randperm(10, generator=self.generator).tolist():
                self.look()
                yield index

        def look(self):
            if looks:
                states.append((len(taken), looks[0].state(len(taken))))

    def make():
        found = SamplerOrder(Watched(), 10, 10, distance=distance, seed=3)
        if distance:
            found.begin_spreading()
        return found

    order = make()
    looks.append(order)
    for _ in range(15):
        taken += order.take(3)
        order.prune(len(taken) - 2)
    looks.clear()
    for at, state in states:
        resumed = make()
        resumed.load(copy.deepcopy(state))
        resumed.seek(at)
        assert resumed.take(45 - at) == taken[at:], at
    assert len(states) > 45


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


def own_and_all(loader, replicas, rank, distance, seed=3):
    kind = kind_of(loader).at(InsertionPoint.after_batching)  # which puts the random states back
    layout = kind.layout(replicas)
    own = kind.order(layout, distance, seed, rank)
    kind = kind_of(copy.deepcopy(loader)).at(InsertionPoint.after_batching)  # the two do not draw from one generator
    return own, AllRanksOrder(kind.order(layout, distance, seed, rank, is_whole=True), replicas, rank)


def plain(length, shuffle):
    return DataLoader(range(length), batch_size=3, shuffle=shuffle)


orders = st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 4), st.integers(0, 9))


@settings(max_examples=20)
@given(orders, st.integers(0, 100), st.integers(0, 60), st.integers(1, 60))
def test_a_rank_gets_what_its_own_order_gives_it_wherever_it_is_entered_and_when_passes_are_spread(
    which, first, spread_at, count
):
    length, shuffle, replicas, distance = which
    columns, rows = [], []
    for rank in range(replicas):
        both = own_and_all(plain(length, shuffle), replicas, rank, distance)
        seen = []
        for order in both:
            order.seek(first)
            taken = order.take(spread_at)
            order.begin_spreading()
            seen.append([*taken, *order.take(count)])
            assert order.position == first + spread_at + count
        assert seen[0] == seen[1]
        assert both[0].state(first) == both[1].state(first)
        columns.append(seen[0])
        rows.append([entry for row in both[1].taken for entry in row])
    assert rows == [[entry for row in zip(*columns, strict=True) for entry in row]] * replicas


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_order_of_a_sampler_is_the_same_too_and_goes_on_from_the_same_state(name, replicas):
    loader = DataLoader(range(20), batch_size=3, sampler=SAMPLERS[name](0))
    own, of_all = own_and_all(loader, replicas, replicas - 1, 2)
    for order in (own, of_all):
        order.begin_spreading()
    assert own.take(25) == of_all.take(25)
    assert own.exact == of_all.exact
    state = of_all.state(20)
    expected = own.take(30)
    for again in own_and_all(loader, replicas, replicas - 1, 2):
        again.load(copy.deepcopy(state))
        again.seek(20)
        assert again.take(35)[5:] == expected


class Asked:
    """Stands in for an exchange, and for the rounds of it."""

    def __init__(self):
        self.exchange, self.rows = self, []

    def ask(self, rows):
        self.rows.append(rows)


def requests_of_rank(by_batches, factor, rank, *, exchanges, position=0):
    point = InsertionPoint.after_batching if by_batches else InsertionPoint.after_augmentation
    kind = kind_of(DataLoader(range(30), batch_size=4, shuffle=True)).at(point)
    layout = kind.layout(2)
    shape = kind.shape(layout, 16, 3)
    own, of_all = own_and_all(kind.loader, 2, rank, shape.distance)
    order = of_all if exchanges else own
    plan = make_plan(shape, factor)
    plan.position = position
    if by_batches:
        made = BatchRequests(plan, BatchedOrder(order, layout.batch_size, layout.last_batch_size, layout.batches_per_pass))
    else:
        made = ExampleRequests(plan, order, whole_calls=False)
    asked = Asked()
    return RequestsInRounds(made, asked, of_all if exchanges else None), asked


@pytest.mark.parametrize("by_batches", [False, True])
@pytest.mark.parametrize("factor", [1, 2.37])
def test_a_leader_asks_in_each_round_for_what_all_ranks_read_for_their_request_of_that_number(by_batches, factor):
    leader, asked = requests_of_rank(by_batches, factor, 0, exchanges=True)
    others = [requests_of_rank(by_batches, factor, rank, exchanges=False)[0] for rank in range(2)]
    for number in range(40):
        mine, *of_ranks = next(leader), *map(next, others)
        assert [request.round for request in (mine, *of_ranks)] == [number] * 3
        assert mine == of_ranks[0], "the leader's own request is what it is without an exchange"
        rows = asked.rows[number]
        flat = [index for row in rows for index in (row if isinstance(row, list) else [row])]
        assert sorted(flat) == sorted(index for request in of_ranks for index in request.indices[: request.fresh])


@pytest.mark.parametrize("distance", [0, 4])
def test_orders_of_ranks_are_those_of_their_distributed_samplers_also_when_passes_are_spread(distance):
    def own(rank):
        return SamplerOrder(DistributedSampler(range(37), 3, rank, seed=8), 13, 13, 1, 0, distance, seed=5)

    samplers = samplers_of_ranks(DistributedSampler(range(37), 3, 1, seed=8))
    of_ranks = [SamplerOrder(each, 13, 13, 1, 0, distance, seed=5) for each in samplers]
    mine, alone = AllRanksOrder(of_ranks, 3, 1), [own(rank) for rank in range(3)]
    for order in (mine, *alone):
        order.begin_spreading()
    for count in (5, 0, 13, 30):
        columns = [order.take(count) for order in alone]
        assert mine.take(count) == columns[1]
        assert mine.taken.pop() == [columns[rank][place] for place in range(count) for rank in range(3)]
    assert mine.position == 48
    assert mine.exact
    assert mine.state(30) == alone[1].state(30)
    again = AllRanksOrder([own(rank) for rank in range(3)], 3, 1)
    again.load(alone[1].state(30))
    again.seek(30)
    expected = own(1)
    expected.begin_spreading()
    assert again.take(20) == expected.take(50)[30:]
