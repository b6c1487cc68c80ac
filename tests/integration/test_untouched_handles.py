"""What a data set opens at its first read is opened by each worker itself: nothing is read in the training's process before.

`Opened` stands for a handle. The process that has opened it is the only one that may read through it: there is a file position,
a lock of LMDB, the thread pool of polars. In another process it gives wrong values, or waits forever.
"""

import copy
import functools
import io
import logging
import os
import threading
from collections import UserDict

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


class WithLogger(Opened):
    def __init__(self):
        super().__init__()
        self.logger, self.buffer, self.many = logging.getLogger("reader"), io.BytesIO(), [0] * 100_001


class Reduced(Opened):
    def __reduce__(self):
        return Reduced, ()


class DeepCopied(Opened):
    def __deepcopy__(self, memo):
        return self

    __copy__ = copy.copy


class Mapped(UserDict, Opened):
    def __init__(self):
        UserDict.__init__(self)
        Opened.__init__(self)


class Locked(Opened):
    """As polars: its threads are started at the first read, and whoever inherits them waits forever for an answer."""

    def read(self, index):
        if int(super().read(index)) == WRONG:
            threading.Event().wait()
        return torch.tensor(index)


class Frozen(Dataset):
    """Reads through what it holds, in an attribute."""

    def __init__(self, kind):
        self.handle = kind()

    def opened(self):
        return self.handle

    def __getitem__(self, index):
        return self.transform(self.opened().read(index))

    def __len__(self):
        return LENGTH

    @staticmethod
    def transform(value):
        return value


IN_GLOBAL, LOCAL = [Opened(), Locked()], threading.local()


@functools.lru_cache
def cached_handle(path):
    return Opened()


class InGlobal(Frozen):
    def opened(self):
        return IN_GLOBAL[0]


class InGlobalLocked(Frozen):
    def opened(self):
        return IN_GLOBAL[1]


class InClass(Frozen):
    shared = Opened()

    def opened(self):
        return self.shared


class InLruCache(Frozen):
    def opened(self):
        return cached_handle("path")


class InThreadLocal(Frozen):
    def opened(self):
        if not hasattr(LOCAL, "handle"):
            LOCAL.handle = Opened()
        return LOCAL.handle


class InClosure(Frozen):
    def __init__(self, kind):
        self.opened = self.closed_over(kind())

    @staticmethod
    def closed_over(handle):
        return lambda: handle


KINDS = {
    "a logger, a BytesIO and many members": lambda: Frozen(WithLogger),
    "__reduce__": lambda: Frozen(Reduced),
    "__deepcopy__": lambda: Frozen(DeepCopied),
    "UserDict": lambda: Frozen(Mapped),
    "a pool of threads": lambda: Frozen(Locked),
    "a global": lambda: InGlobal(Opened),
    "a pool of threads in a global": lambda: InGlobalLocked(Opened),
    "a class": lambda: InClass(Opened),
    "lru_cache": lambda: InLruCache(Opened),
    "threading.local": lambda: InThreadLocal(Opened),
    "a closure": lambda: InClosure(Opened),
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
    return any(handle.process is not None for handle in (*IN_GLOBAL, InClass.shared, cached_handle("path"), dataset.opened()))


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
    loader = made(dataset, use, tmp_path, 2)
    found = [index for epoch in epochs(loader, 2) for batch in epoch for index in batch.tolist()]
    loader.close()
    assert set(found) == set(range(LENGTH))
    assert not was_opened_here(dataset)


@pytest.mark.parametrize("use", USES)
def test_without_workers_nothing_is_read_here_before_the_training_reads(use, tmp_path):
    dataset = InGlobal(Opened)
    loader = made(dataset, use, tmp_path, 0)
    assert not was_opened_here(dataset)
    loader.settle() if use.startswith("cached") else None
    assert not was_opened_here(dataset)
    try:
        assert {index for epoch in epochs(loader, 2) for batch in epoch for index in batch.tolist()} == set(range(LENGTH))
    finally:
        IN_GLOBAL[0].process = None


def test_a_cached_data_set_reads_nothing_when_it_is_made():
    dataset = InGlobal(Opened)
    cached = CachedDataset(dataset, "2MiB")
    assert not was_opened_here(dataset)
    assert sorted(torch.cat(list(DataLoader(cached, 4, num_workers=2))).tolist()) == list(range(LENGTH))


def test_the_doctor_and_the_analysis_look_at_it_elsewhere():
    dataset = InGlobal(Opened)
    for workers in (0, 2):
        loader = DataLoader(dataset, batch_size=4, num_workers=workers)
        assert look(loader).choice.point == "before_augmentation"
        assert cuts(loader).before_augmenting is not None
        assert not was_opened_here(dataset)
