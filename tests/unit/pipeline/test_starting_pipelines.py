"""A pipeline is put together so that each rank gets its share, and nothing of the training or of the loader is disturbed."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, default_collate

from lightning_echo import InsertionPoint
from lightning_echo.pipeline.choice import choose
from lightning_echo.pipeline.kinds import Opening, kind_of
from lightning_echo.pipeline.pipelines import Launch, Start, rank_key

LENGTH, BATCH = 24, 4
NOTHING = {"plan": None, "order": None}


def start(loader, point, factor=1.0, *, replicas=1, rank=0, buffer_size=16, state=NOTHING, worker_init_fn=None):
    choice = choose(kind_of(loader), InsertionPoint(point))
    kind = kind_of(loader).at(choice.point)
    layout = kind.layout(replicas)
    shape = kind.shape(layout, buffer_size, 0)
    launch = Launch(seed=0, factor=factor, state=state, begin_at=Start(0, 0), worker_init_fn=worker_init_fn)
    return kind.open(Opening(launch=launch, choice=choice, layout=layout, shape=shape, rank=rank, key=rank_key(0, rank)))


def batches_of(pipeline, count, first=0):
    return [pipeline.next_batch(number) for number in range(first, first + count)]


@pytest.mark.parametrize("point", ["after_augmentation", "after_batching"])
def test_each_rank_gets_the_share_that_a_distributed_sampler_gives_it_of_a_pass_that_all_shuffle(point):
    shares = []
    for rank in range(2):
        pipeline = start(DataLoader(range(LENGTH), BATCH), point, replicas=2, rank=rank)
        found = [index for batch, _ in batches_of(pipeline, 3) for index in batch.tolist()]
        assert found == list(DistributedSampler(range(LENGTH), 2, rank, shuffle=False))
        pipeline = start(DataLoader(range(LENGTH), BATCH, shuffle=True), point, replicas=2, rank=rank)
        shares += [index for batch, _ in batches_of(pipeline, 3) for index in batch.tolist()]
    assert sorted(shares) == list(range(LENGTH)) != shares


@pytest.mark.parametrize("point", ["after_batching", "after_transfer"])
def test_a_collate_function_that_uses_its_memory_again_does_not_change_what_is_held(point):
    memory = torch.zeros(BATCH, dtype=torch.int64)

    def collate(examples):
        return memory.copy_(default_collate(examples))

    pipeline = start(DataLoader(range(LENGTH), BATCH, collate_fn=collate), point, 4.0)
    seen, live = [], {}
    for number in range(40):  # each is looked at before the next one is made: the loader may use the memory of a first use again
        batch, report = pipeline.next_batch(number)
        value = (batch.host if point == "after_transfer" else batch).tolist()
        if report.fresh:
            first = BATCH * len(seen) % LENGTH
            seen.append(list(range(first, first + BATCH)))
            assert value == seen[-1]
        assert value in seen
        if point == "after_transfer":
            assert live.setdefault(batch.live, value) == value, "each live batch keeps its own"
    assert len(seen) > 5


class Drawing(Sampler):
    """A sampler of a user's that draws from a global generator."""

    def __iter__(self):
        yield from sorted(range(LENGTH), key=lambda index: random.random())

    def __len__(self):
        return LENGTH


@pytest.mark.parametrize("point", ["after_augmentation", "after_batching"])
@pytest.mark.parametrize(
    "sampler", [Drawing(), RandomSampler(range(LENGTH), generator=torch.default_generator)], ids=["own", "torch"]
)
def test_a_sampler_that_draws_leaves_the_random_states_of_the_training_alone(point, sampler):
    pipeline = start(DataLoader(range(LENGTH), BATCH, sampler=sampler), point, 2.0)
    before = random.getstate(), torch.get_rng_state().tolist()
    assert len(batches_of(pipeline, 20)) == 20
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(400))


@pytest.mark.parametrize(("workers", "each"), [(0, 48), (1, 48), (3, 16)])
def test_the_workers_of_a_stream_share_the_buffer_out(workers, each):
    kind = kind_of(DataLoader(Stream(), BATCH, num_workers=workers))
    assert kind.shape(kind.layout(1), 48, 0).buffer_size == each
