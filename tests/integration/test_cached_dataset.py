"""A `CachedDataset` in loaders: workers of any kind, a Trainer's validation, ranks, an `EchoLoader`, pickles and copies."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import CacheConfig, CachedDataset, EchoLoader, StagedDataset

COUNT, BATCH = 24, 4


class Images(StagedDataset):
    """Counts its reads, in whichever process they happen."""

    def __init__(self, values=300):
        self.values = values
        self.reads = torch.zeros(COUNT, dtype=torch.long).share_memory_()

    def load(self, index):
        self.reads[index] += 1
        return {"image": torch.full((self.values,), float(index)), "index": index}

    def augment(self, example):
        example["image"] += torch.rand(())  # in place
        return example

    def __len__(self):
        return COUNT


def batches_of(dataset, workers, method=None, epochs=3, **options):
    """All batches of some epochs under a seed."""
    torch.manual_seed(3)
    loader = DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
        generator=torch.Generator().manual_seed(1),
        **options,
    )
    return [batch for _ in range(epochs) for batch in loader]


def equal(left, right):
    for one, other in zip(left, right, strict=True):
        parts = zip(*(batch.values() if isinstance(batch, dict) else batch for batch in (one, other)), strict=True)
        assert all(torch.equal(first, second) for first, second in parts)


@pytest.mark.parametrize(
    ("workers", "method", "options"),
    [
        (0, None, {}),
        (2, "fork", {"persistent_workers": True}),
        pytest.param(2, "spawn", {"persistent_workers": True}, marks=pytest.mark.slow),
        pytest.param(2, "forkserver", {"persistent_workers": True}, marks=pytest.mark.slow),
    ],
)
def test_batches_are_those_of_the_data_set_itself_and_are_read_once(workers, method, options):
    dataset = Images()
    cached = CachedDataset(dataset, "1MiB")
    # A worker's seed does not depend on how it is started, and a fork is quicker.
    equal(batches_of(Images(), workers, method and "fork", **options), batches_of(cached, workers, method, **options))
    counts = cached.cache_counts
    assert (counts.examples, counts.hits, counts.misses) == (COUNT, 2 * COUNT, COUNT)
    audits = 2 * max(workers, 1) * (2 if workers and not options else 1)  # the 1st and 10th hit of each process
    assert COUNT < int(dataset.reads.sum()) <= COUNT + audits


def test_an_echo_loader_over_it_redoes_the_augmentation_and_cannot_cut_after_reading():
    cached = CachedDataset(Images(), "1MiB")
    uses = {}
    for batch in EchoLoader(DataLoader(cached, BATCH), 2, seed=1):
        for index, image in zip(batch["index"].tolist(), batch["image"], strict=True):
            uses.setdefault(index, []).append(image[0].item() - index)
    twice = [noises for noises in uses.values() if len(noises) == 2]
    assert twice
    assert all(one != other for one, other in twice)
    with pytest.raises(ValueError, match="CachedDataset has no read"):
        EchoLoader(DataLoader(cached, BATCH), 2, insertion_point="after_read")


RANKS = """
import sys, torch.distributed
sys.path.insert(0, {tests!r})
from test_cached_dataset import *
from torch.utils.data import Subset
rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group('gloo', init_method='file://' + store, rank=rank, world_size=2)
if rank == 0:  # no collective is in it
    alone = CachedDataset(Images(), '1MiB')
cached = CachedDataset(Images(), CacheConfig('1MiB', path=path, name='val'))
batches_of(Subset(cached, range(rank, COUNT, 2)), 1, 'fork', epochs=1)
torch.distributed.barrier()
print(cached.cache_counts.examples)
torch.distributed.destroy_process_group()
"""


@pytest.mark.program
def test_under_a_name_ranks_that_each_make_their_own_have_one_file_which_the_next_one_finds(tmp_path):
    path = tmp_path / "kept"
    path.mkdir()
    command = [sys.executable, "-c", RANKS.format(tests=os.path.dirname(__file__))]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].split() for rank in ranks] == [[str(COUNT)]] * 2
    cached = CachedDataset(Images(), CacheConfig("1MiB", path=str(path), name="val"))
    equal(batches_of(Images(), 0, epochs=1), batches_of(cached, 0, epochs=1))
    assert cached.cache_counts.misses == 0
    assert len(os.listdir(path)) == 1


COUNT_OF_MANY, TASKS = 300, 10


class Numbers(Dataset):
    """Examples of different sizes, in which each value tells whose it is."""

    def __getitem__(self, index):
        return torch.full((1 + index % 400,), index)

    def __len__(self):
        return COUNT_OF_MANY


def wrong_in(cached, order):
    return [index for index in order if not torch.equal(cached[index], Numbers()[index])]


def read_some(cached, seed):
    order = torch.randperm(COUNT_OF_MANY, generator=torch.Generator().manual_seed(seed))[:100].tolist()
    return os.getpid(), wrong_in(cached, order)


def cached_numbers():
    return CachedDataset(Numbers(), {"size": "64MiB", "hold": "whole"})


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_as_an_argument_of_a_pools_tasks_while_this_process_reads_no_record_is_wrong(method):
    cached = cached_numbers()
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        tasks = [pool.submit(read_some, cached, seed) for seed in range(TASKS)]
        assert wrong_in(cached, range(COUNT_OF_MANY)) == []
        results = [task.result(timeout=120) for task in tasks]
    assert [wrong for _, wrong in results] == [[]] * TASKS
    assert os.getpid() not in {process for process, _ in results}
    counts = cached.cache_counts
    assert (counts.examples, counts.hits + counts.misses) == (COUNT_OF_MANY, COUNT_OF_MANY + 100 * TASKS), "they have this cache"
    assert wrong_in(cached, range(COUNT_OF_MANY)) == []


def test_pickles_and_copies_keep_nothing_open_and_have_one_cache():
    cached = cached_numbers()
    before = os.listdir("/proc/self/fd")
    again = [make(cached) for make in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))) for _ in range(3)]
    assert os.listdir("/proc/self/fd") == before
    assert torch.equal(cached[7], Numbers()[7])
    assert wrong_in(again[-1], [7]) == []
    assert {(each.cache_counts.hits, each.cache_counts.misses) for each in again} == {(1, 1)}


def test_a_pickle_whose_process_is_gone_reads_everything_and_says_so_once():
    """As of a checkpoint that has it as a hyperparameter."""
    receives, sends = multiprocessing.Pipe(duplex=False)
    saves = multiprocessing.get_context("fork").Process(target=lambda: sends.send_bytes(pickle.dumps(cached_numbers())))
    saves.start()
    pickled = receives.recv_bytes()
    saves.join(60)
    again = pickle.loads(pickled)
    with pytest.warns(UserWarning, match="which has its examples, is gone") as said:
        assert wrong_in(again, [7, 8, 7, 8]) == []
    assert len(said) == 1
    counts = again.cache_counts
    assert (counts.examples, counts.size, counts.hits, counts.misses) == (0, 0, 0, 4)
