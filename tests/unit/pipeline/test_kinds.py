"""The kind of a loader, what follows from it, how its passes are cut, and what a rebuilt loader keeps of the user's."""

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper as lightning_wrapper
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper as other_wrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.plan.plan import Reuse

DATA = TensorDataset(torch.arange(12))
OTHER = TensorDataset(torch.arange(12))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Drawing(Sampler):
    """Draws from the global random states, for all that anybody knows."""

    def __iter__(self):
        return iter(range(12))

    def __len__(self):
        return 12


class WithoutLength(Sampler):
    def __iter__(self):
        return iter(range(12))


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("loader", "order"),
    [
        (DataLoader(DATA, 4), "sequential"),
        (DataLoader(DATA, 4, shuffle=True), "shuffled"),
        (DataLoader(DATA, 4, shuffle=True, generator=GENERATOR), "shuffled"),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA)), "shuffled"),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=GENERATOR)), ""),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)), ""),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=5)), ""),
        (DataLoader(DATA, 4, sampler=RandomSampler(OTHER)), ""),
        (DataLoader(DATA, 4, sampler=SequentialSampler(OTHER)), ""),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=False)), ""),
    ],
)
def test_the_order_is_drawn_here_only_where_it_is_that_of_the_data_set_or_what_shuffle_makes(loader, order):
    kind = kind_of(loader)
    assert (kind.is_sequential, kind.is_shuffled) == (order == "sequential", order == "shuffled")


@pytest.mark.parametrize(
    ("loader", "may"),
    [
        (DataLoader(DATA, 2), True),
        (DataLoader(DATA, 2, sampler=RandomSampler(DATA, generator=GENERATOR)), True),
        (DataLoader(DATA, 2, sampler=SubsetRandomSampler([3, 4])), True),
        (DataLoader(DATA, 2, sampler=Drawing()), False),
        ([torch.zeros(4)], False),
        (DataLoader(Stream(), 4), False),
    ],
)
def test_a_thread_may_fetch_where_a_rebuilt_loader_leaves_the_random_states_of_the_training_alone(loader, may):
    assert kind_of(loader).may_run_in_thread is may


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({}, 0),
        ({"shuffle": True}, 0),
        ({"sampler": SubsetRandomSampler([7, 3])}, 7),
        ({"sampler": SubsetRandomSampler([])}, "empty"),
        ({"sampler": WeightedRandomSampler([1.0] * 12, 12)}, 0),
        ({"sampler": SequentialSampler(OTHER)}, None),
        ({"sampler": Drawing()}, None),
        ({"batch_sampler": SubsetRandomSampler([[0, 1], [2]]), "batch_size": 1}, None),
        ({"num_workers": 1, "worker_init_fn": print}, 0),
        ({"num_workers": 0, "worker_init_fn": print}, 0),
    ],
)
def test_an_example_is_read_beforehand_only_by_an_index_that_the_plain_loader_would_read(options, index):
    if index == "empty":
        with pytest.raises(ValueError, match="loader is empty: it has no batch"):
            kind_of(DataLoader(DATA, **options))
    else:
        assert kind_of(DataLoader(DATA, **options)).readable_index == index


def test_a_sampler_that_deals_out_to_ranks_is_seen_also_inside_a_batch_sampler_and_on_a_loader_of_ones_own():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    assert kind_of(DataLoader(DATA, 2, sampler=sampler)).shards_itself
    assert kind_of(DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, drop_last=False))).shards_itself
    assert not kind_of(DataLoader(DATA, 2)).shards_itself

    class Sharding(list):
        num_replicas, rank = 2, 0

    assert kind_of(Sharding([1])).shards_itself
    assert not kind_of([1]).shards_itself


def test_the_length_is_asked_for_anew_and_needed_only_where_the_loader_is_rebuilt():
    batches = [1, 2]
    kind = kind_of(batches)
    batches.append(3)
    assert kind.length == 3
    assert kind_of(DataLoader(Stream(), 4)).length is None
    with pytest.raises(TypeError, match=r"loader must have a length.*Give its sampler \(or its data set\) a __len__"):
        kind_of(DataLoader(DATA, 2, sampler=WithoutLength()))


class SizedStream(Stream):
    def __len__(self):
        return 8


OF = {
    "indexed": DataLoader(DATA, 5, num_workers=2, prefetch_factor=3),
    "own batches": DataLoader(DATA, batch_sampler=[[0, 1], [2], [3, 4]], num_workers=2),
    "stream": DataLoader(Stream(), 4, num_workers=2),
    "sized stream": DataLoader(SizedStream(), 4, num_workers=2),
    "iterable": [torch.zeros(4)] * 6,
}
EXAMPLES, BATCHES = InsertionPoint.after_augmentation, InsertionPoint.after_batching


# Worked out by hand from the loaders above: passes of 12 examples in batches of 5, of 3 own batches, of 8 examples of a stream.
# DEPTH is 2. Of 2 workers 6 (prefetch_factor=3) or 4 batches are asked ahead; with whole batches and factor 4, see `lookahead`.
@pytest.mark.parametrize(
    ("name", "point", "items", "expected", "has_length", "resumes", "own_passes", "counted", "ahead", "fills"),
    [
        ("indexed", EXAMPLES, 12, 12, (True, True), True, False, "examples", (6 + 2, 6 + 2), [4, 2]),
        ("indexed", BATCHES, 3, 3, (True, True), True, False, "examples", (6 + 3 + 2, (6 + 3) * 5 + 2), [20, 1]),
        ("own batches", BATCHES, 3, 3, (True, True), True, False, "batches", (4 + 3 + 2, (4 + 3) * 5 + 2), [20, 1]),
        ("stream", EXAMPLES, 0, None, (False, False), False, True, "batches", (4 + 2, 4 + 2), [5, 2]),
        ("stream", BATCHES, 0, None, (False, False), False, True, "batches", (1, 1), [20, 1]),
        ("sized stream", EXAMPLES, 8, 8, (True, False), False, True, "batches", (4 + 2, 4 + 2), [5, 2]),
        ("sized stream", BATCHES, 2, 2, (True, True), False, False, "batches", (0, 0), [20, 1]),
        ("iterable", BATCHES, 6, 6, (True, True), True, False, "batches", (0, 0), [20, 1]),
    ],
)
def test_the_passes_of_a_kind_how_far_it_plans_ahead_and_when_its_buffer_of_20_is_full(
    name, point, items, expected, has_length, resumes, own_passes, counted, ahead, fills
):
    kind = kind_of(OF[name]).at(point)
    layout = kind.layout(1)
    assert (kind.items_per_pass(layout), kind.expected_items(layout)) == (items, expected)
    assert (kind.has_length("fixed"), kind.has_length("full_pass")) == has_length
    assert (kind.resumes, kind.reads_own_passes, kind.laid_out) == (resumes, own_passes, counted)
    assert (kind.lookahead(1.0), kind.lookahead(4.0)) == ahead
    assert [kind.filling_batches(layout, 20, reuse) for reuse in (Reuse.each, Reuse.memory)] == fills


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 6, 7, 13, 43])
def test_the_layout_of_a_pass_is_what_a_loader_with_a_distributed_sampler_delivers(length, drop_last, replicas):
    sampler = DistributedSampler(range(length), num_replicas=replicas, rank=0, shuffle=False)
    sizes = [len(batch) for batch in DataLoader(range(length), batch_size=6, sampler=sampler, drop_last=drop_last)]
    plain = DataLoader(range(length), batch_size=6, drop_last=drop_last)
    if not len(plain):
        with pytest.raises(ValueError, match="has no batch"):
            kind_of(plain)
    else:
        layout = kind_of(plain).layout(replicas)
        assert layout.batches_per_pass == len(sizes), "none where the share of a rank is smaller than a batch"
        assert (layout.batch_size, layout.last_batch_size) == (6, sizes[-1] if sizes else 6)
        assert (layout.pass_length, layout.length, layout.replicas) == (sum(sizes), length, replicas)


class ToldSampler(Drawing):
    def set_epoch(self, number): ...


def test_a_sampler_of_the_users_hears_the_number_of_a_pass_and_those_of_torch_and_of_both_lightnings_do_not():
    sampler = ToldSampler()
    assert kind_of(DataLoader(DATA, 4, sampler=sampler)).hearers() == (sampler,)
    wrapped = [kind(RandomSampler(DATA), num_replicas=2, rank=0) for kind in (lightning_wrapper, other_wrapper)]
    for others in (DistributedSampler(DATA, 2, 0), *wrapped):
        assert kind_of(DataLoader(DATA, 4, sampler=others)).hearers() == ()
