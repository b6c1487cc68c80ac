"""A `CachedDataset` that is pickled: an argument of a pool's tasks, a hyperparameter in a checkpoint, a deep copy."""

import copy
import multiprocessing
import os
import pickle
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch.utils.data import Dataset

from lightning_echo import CachedDataset
from lightning_echo.cache.record import decode

COUNT, TASKS = 1500, 30


class Numbers(Dataset):
    """Examples of different sizes, in which each value tells whose it is. Subclasses of torch's `Dataset` may be held whole."""

    def __getitem__(self, index):
        return torch.full((1 + index % 400,), index)

    def __len__(self):
        return COUNT


def wrong_in(cached, order):
    return [index for index in order if not torch.equal(cached[index], Numbers()[index])]


def read_some(cached, seed):
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed))[:200].tolist()
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
        assert wrong_in(cached, range(COUNT)) == []
        results = [task.result(timeout=120) for task in tasks]
    assert [wrong for _, wrong in results] == [[]] * TASKS
    assert os.getpid() not in {process for process, _ in results}
    counts = cached.cache_counts
    assert counts.examples == COUNT, "no record was lost"
    assert counts.hits + counts.misses == COUNT + 200 * TASKS, "the tasks have this cache"
    arena = cached._cached_by.node.arena
    assert all(torch.equal(decode(arena.get(index)), Numbers()[index]) for index in range(COUNT))


def test_pickles_and_copies_keep_nothing_open():
    cached = cached_numbers()
    before = os.listdir("/proc/self/fd")
    again = [make(cached) for make in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))) for _ in range(3)]
    assert os.listdir("/proc/self/fd") == before
    assert torch.equal(cached[7], Numbers()[7])
    assert wrong_in(again[-1], [7]) == []
    assert {(each.cache_counts.hits, each.cache_counts.misses) for each in again} == {(1, 1)}, "all have one cache"


def test_a_checkpoint_that_has_it_as_a_hyperparameter_can_be_loaded_when_its_process_is_gone(tmp_path):
    import lightning  # spawned workers of the other test need not wait for it

    class Model(lightning.LightningModule):
        def __init__(self, validated):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(1, 1)

    path = str(tmp_path / "model.ckpt")

    def save():
        cached = cached_numbers()
        assert torch.equal(cached[7], Numbers()[7])
        trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
        trainer.strategy.connect(Model(cached))
        trainer.save_checkpoint(path)

    saves = multiprocessing.get_context("fork").Process(target=save)
    saves.start()
    saves.join(60)
    assert saves.exitcode == 0
    again = Model.load_from_checkpoint(path, weights_only=False).hparams.validated
    with pytest.warns(UserWarning, match="which has its examples, is gone") as said:
        assert wrong_in(again, [7, 8, 7, 8]) == []
    assert len(said) == 1
    counts = again.cache_counts
    assert (counts.examples, counts.size, counts.hits, counts.misses) == (0, 0, 0, 4)
