"""The kind of a loader, what follows from it, and what a rebuilt loader keeps of the user's."""

import multiprocessing

import pytest
import torch
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
from lightning_echo.pipeline.kinds import Indexed, IndexedBatches, Opaque, OwnBatches, StreamBatches, kind_of
from lightning_echo.pipeline.kinds import Stream as Stream_
from lightning_echo.pipeline.prefetch import WorkerProcesses
from lightning_echo.pipeline.worker import Request
from lightning_echo.split.staged import uncut_stages

DATA = TensorDataset(torch.arange(12))
OTHER = TensorDataset(torch.arange(12))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class OwnIteration(DataLoader):
    def __iter__(self):
        return super().__iter__()


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


class Drawing(Sampler):
    """Draws from the global random states, for all that anybody knows."""

    def __iter__(self):
        return iter(range(12))

    def __len__(self):
        return 12


class WithoutLength(Sampler):
    def __iter__(self):
        return iter(range(12))


@pytest.mark.parametrize(
    ("loader", "kind", "by_batches"),
    [
        (DataLoader(DATA, 4), Indexed, IndexedBatches),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), OwnBatches, OwnBatches),
        (DataLoader(Stream(), 4), Stream_, StreamBatches),
        (DataLoader(Stream(), None), Opaque, Opaque),
        (DataLoader(DATA, None), Opaque, Opaque),
        (OwnIteration(DATA, 4), Opaque, Opaque),
        (OwnIterator(DATA, 4), Opaque, Opaque),
        ([torch.zeros(4)], Opaque, Opaque),
    ],
)
def test_only_a_loader_that_torch_makes_batches_for_is_rebuilt(loader, kind, by_batches):
    found = kind_of(loader)
    assert type(found) is kind
    assert type(found.at(InsertionPoint.after_batching)) is type(found.at(InsertionPoint.after_transfer)) is by_batches
    if not found.by_batches:
        assert found.at(InsertionPoint.after_augmentation) is found


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
    ("sampler", "may"),
    [
        (None, True),
        (RandomSampler(DATA, generator=GENERATOR), True),
        (SubsetRandomSampler([3, 4]), True),
        (Drawing(), False),
    ],
)
def test_a_thread_may_fetch_where_the_order_leaves_the_random_states_of_the_training_alone(sampler, may):
    assert kind_of(DataLoader(DATA, 2, sampler=sampler)).may_run_in_thread is may


def test_no_thread_reads_a_loader_that_is_not_rebuilt():
    assert not kind_of([torch.zeros(4)]).may_run_in_thread
    assert not kind_of(DataLoader(Stream(), 4)).may_run_in_thread


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0), ({"num_workers": 3}, 6), ({"num_workers": 3, "prefetch_factor": 4}, 12)],
)
def test_workers_are_asked_for_as_many_batches_ahead_as_torch_asks_for(options, expected):
    assert kind_of(DataLoader(DATA, 4, **options)).prefetched_batches == expected


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
        ({"num_workers": 1, "worker_init_fn": print}, 0),
        ({"num_workers": 0, "worker_init_fn": print}, 0),
    ],
)
def test_an_example_is_read_beforehand_only_by_an_index_that_the_plain_loader_would_read(options, index):
    if index == "empty":
        with pytest.raises(ValueError, match="loader is empty: it has no batch"):
            kind_of(DataLoader(DATA, 2, **options))
    else:
        assert kind_of(DataLoader(DATA, 2, **options)).readable_index == index


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


def whole(dataset):
    return uncut_stages(dataset)


def rebuilt(workers=None, **options):
    loader = DataLoader(DATA, 4, **options)
    requests = [Request(0, [0, 1], 2, [5, 3], bytes(2))]
    return kind_of(loader).rebuild(requests, whole, 7, workers or WorkerProcesses())


def test_a_rebuilt_loader_reads_what_is_requested_of_the_users_data_set():
    ((batch, report),) = rebuilt()
    assert [values.tolist() for values in batch] == [[5, 3]]
    assert (report.fresh, report.echoed, report.refetched) == (2, 0, 0)


def test_a_rebuilt_loader_keeps_the_options_of_the_users():
    started = []
    workers = WorkerProcesses(worker_init_fn=started.append)
    context = multiprocessing.get_context("spawn")
    loader = rebuilt(workers, num_workers=2, prefetch_factor=3, timeout=5, pin_memory=True, multiprocessing_context=context)
    assert (loader.num_workers, loader.prefetch_factor, loader.timeout, loader.pin_memory) == (2, 3, 5, True)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    loader.worker_init_fn(1)
    assert started == [1]


def test_a_rebuilt_loader_has_the_users_generator_or_one_of_its_own_so_that_making_its_iterator_draws_nothing():
    assert rebuilt(generator=GENERATOR).generator is GENERATOR
    before = torch.get_rng_state()
    iter(rebuilt())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader, r"got the class DataLoader: pass an instance, DataLoader\(\.\.\.\)"),
        (lambda: [1], "got function; pass the loader that it returns"),
        ([DataLoader(DATA)], "got a list of one loader; pass the loader itself"),
        ({"a": DataLoader(DATA)}, "got a dict of one loader; pass the loader itself"),
        ([DataLoader(DATA)] * 2, "got a list of loaders; wrap each of them in an EchoLoader"),
        (DATA, "got TensorDataset$"),
    ],
)
def test_what_is_no_loader_is_refused_with_a_hint(loader, said):
    with pytest.raises(TypeError, match=rf"^loader must be a .*{said}"):
        kind_of(loader)
