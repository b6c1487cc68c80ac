"""What a data set opens at its first read is opened by each worker itself: nothing is read in the training's process before.

`Opened` stands for a handle. The process that has opened it is the only one that may read through it: there is a file position,
a lock of LMDB, the thread pool of polars. In another process it gives wrong values, or waits forever.
"""

import copy
import functools
import os
import threading

import pytest
import torch
from loader_cases import epochs
from torch.utils.data import DataLoader, Dataset

from lightning_echo import CachedDataset, EchoLoader
from lightning_echo.analysis.parts import cuts
from lightning_echo.doctor.looking import look

LENGTH, WRONG = 24, -1


class Opened:
    """A handle, opened at the first read."""

    def __init__(self):
        self.process = None

    def read(self, index):
        if self.process is None:
            self.process = os.getpid()
        return torch.tensor(index if self.process == os.getpid() else WRONG)


class DeepCopied(Opened):
    def __deepcopy__(self, memo):
        return self

    __copy__ = copy.copy


class Locked(Opened):
    """As polars: its threads are started at the first read, and whoever inherits them waits forever for an answer."""

    def read(self, index):
        if int(super().read(index)) == WRONG:
            threading.Event().wait()
        return torch.tensor(index)


class Reader(Dataset):
    """Reads through what it holds; ``opened`` returns that."""

    def __init__(self, opened):
        self.opened = opened

    def __getitem__(self, index):
        return self.transform(self.opened().read(index))

    def __len__(self):
        return LENGTH

    @staticmethod
    def transform(value):
        return value


class InAttribute(Reader):
    def __init__(self, kind):
        self.handle = kind()

    def opened(self):
        return self.handle


IN_GLOBAL = [Opened(), Locked()]


@functools.lru_cache
def cached_handle(path):
    return Opened()


def in_closure():
    handle = Opened()
    return lambda: handle


KINDS = {
    "__deepcopy__": lambda: InAttribute(DeepCopied),
    "a pool of threads": lambda: InAttribute(Locked),
    "a pool of threads in a global": lambda: Reader(lambda: IN_GLOBAL[1]),
    "lru_cache": lambda: Reader(lambda: cached_handle("path")),
    "a closure": lambda: Reader(in_closure()),
}
USES = {
    "echoed": {"factor": 2},
    "not split": {"factor": 2, "insertion_point": "after_augmentation"},
    "cached": {"factor": 1, "cache": {"size": "2MiB"}},
    "cached whole": {"factor": 1, "cache": {"size": "2MiB", "hold": "whole"}},
    "cached under a name": {"factor": 1, "cache": {"size": "2MiB", "name": "train"}},
}


def was_opened_here(dataset):
    """Whether a handle of this process is open."""
    return any(handle.process is not None for handle in (*IN_GLOBAL, cached_handle("path"), dataset.opened()))


def made(dataset, use, tmp_path, workers):
    options = dict(USES[use])
    if use == "cached under a name":
        options["cache"] = {**options["cache"], "path": str(tmp_path)}
    return EchoLoader(DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers), seed=1, **options)


@pytest.mark.grid
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_worker_reads_through_a_handle_of_the_trainings_process(kind, use, tmp_path):
    dataset = KINDS[kind]()
    loader = made(dataset, use, tmp_path, 1)
    found = [index for epoch in epochs(loader, 2) for batch in epoch for index in batch.tolist()]
    loader.close()
    assert set(found) == set(range(LENGTH))
    assert not was_opened_here(dataset)


@pytest.mark.parametrize("use", ["echoed", "cached whole"])
def test_without_workers_nothing_is_read_here_before_the_training_reads(use, tmp_path):
    dataset = InAttribute(Opened)
    loader = made(dataset, use, tmp_path, 0)
    assert not was_opened_here(dataset)
    loader.settle() if use.startswith("cached") else None
    assert not was_opened_here(dataset)
    assert {index for epoch in epochs(loader, 2) for batch in epoch for index in batch.tolist()} == set(range(LENGTH))


def test_a_cached_data_set_reads_nothing_when_it_is_made_and_doctor_and_analysis_look_elsewhere():
    dataset = Reader(lambda: IN_GLOBAL[0])
    cached = CachedDataset(dataset, "2MiB")
    loader = DataLoader(dataset, batch_size=4)
    assert look(loader).choice.point == "before_augmentation"
    assert cuts(loader).before_augmenting is not None
    assert not was_opened_here(dataset)
    assert sorted(torch.cat(list(DataLoader(cached, 4, num_workers=2))).tolist()) == list(range(LENGTH))
