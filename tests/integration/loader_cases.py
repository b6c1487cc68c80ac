"""What the loader tests share: a covering sample, a data set that keeps its own log of reads, and who is still running.

Spawned workers import this module, so it imports little.
"""

import contextlib
import io
import itertools
import os
import struct
import threading
import time

import psutil
import torch
from torch.utils.data import Dataset

from lightning_echo import insertion
from lightning_echo.data import elsewhere

# Points that an EchoLoader cannot run by itself, and why.
_NOT_ALONE = {"after_transfer": "a Trainer's hooks put its batches on the device: trainer_runs.py, test_after_transfer.py"}
POINTS = tuple(point.value for point in insertion.POINTS if point not in _NOT_ALONE)
PREFETCH_DEPTH = 2  # batches that the fetching thread may hold
_ENTRY = struct.Struct("qq")


def pairwise(**values):
    """Dicts that together hold every pair of values of two names at least once."""
    from same_batches import covering

    return covering(values, (), lambda case: True)


def case_id(case):
    return "-".join(str(value) for value in case.values())


class ReadLog:
    """A file to which every process that reads an example adds a line: the data set's own count of source calls."""

    def __init__(self, path):
        self.path, self._file, self._pid, self._serial = path, None, 0, 0

    def add(self, index):
        """Notes a read and returns its number, which no other read in any process has."""
        if self._pid != os.getpid():
            self._pid, self._serial = os.getpid(), 0
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._serial += 1
        stamp = self._pid * 1_000_000 + self._serial
        os.write(self._file, _ENTRY.pack(stamp, index))
        return 0 if elsewhere._here_is_elsewhere else stamp  # a proof reads twice, and refuses what then differs

    def entries(self):
        """(stamp, index) of every read so far."""
        if not os.path.exists(self.path):
            return []
        with open(self.path, "rb") as file:
            return list(_ENTRY.iter_unpack(file.read()))

    def __getstate__(self):
        return {"path": self.path, "_file": None, "_pid": 0, "_serial": 0}

    def __setstate__(self, state):
        self.__dict__.update(state)


class Stages(Dataset):
    """Examples that say their index, read in three stages."""

    def __init__(self, length):
        self.length = length

    def read(self, index):
        return str(index).encode()

    def decode(self, raw):
        return torch.tensor([float(raw)])

    def augment(self, example):
        return example

    def __getitem__(self, index):
        return self.augment(self.decode(self.read(index)))

    def __len__(self):
        return self.length


class LoggedDataset(Stages):
    """An example is [index, number of the read, noise of the augmentation]."""

    def __init__(self, length, log):
        self.length, self.log = length, log

    def read(self, index):
        return _ENTRY.pack(index, self.log.add(index))

    def decode(self, raw):
        return torch.tensor(_ENTRY.unpack(raw))

    def augment(self, example):
        return torch.cat([example, torch.randint(2**40, (1,))])


class Values(Stages):
    """Nothing random."""

    def decode(self, raw):
        return {"index": int(raw), "value": torch.full((3,), float(raw))}


class Noisy(Stages):
    """Noise of all three global generators, of the source's own draws none."""

    def augment(self, example):
        import random

        import numpy as np

        return torch.cat([example, torch.rand(2), torch.tensor([random.random(), np.random.rand()])])


def epochs(loader, count):
    """The batches of ``count`` epochs, epoch by epoch."""
    return [list(loader) for _ in range(count)]


def take(loader, count):
    """The next ``count`` batches, over epoch boundaries; the last epoch may be cut short."""
    batches = []
    while len(batches) < count:
        batches.extend(itertools.islice(loader, count - len(batches)))
    return batches


def through_a_file(state):
    """Plain types only: Lightning's checkpoints are loaded with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_goes_on(make, count, every=1):
    """Checks that a run resumed after any batch of ``count`` epochs delivers the rest of an uninterrupted one, epoch by epoch."""
    running = make()
    states, delivered = [running.state_dict()], []
    for epoch in range(count):
        for batch in running:
            delivered.append((epoch, batch, running.last_batch_counts.fresh))
            states.append(running.state_dict())
    running.close()
    for step in range(0, len(delivered), every):
        resumed, (first, *_) = make(), delivered[step]
        resumed.load_state_dict(through_a_file(states[step]))
        rest = [(epoch, batch, resumed.last_batch_counts.fresh) for epoch in range(first, count) for batch in resumed]
        resumed.close()
        assert same(rest, delivered[step:]), f"resumed after {step} batches"


def same(left, right):
    """Whether two structures of tensors, containers and plain values are equal, types included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def plain_sizes(length, batch_size, drop_last):
    """Batch sizes of one epoch of a plain loader."""
    sizes = [min(batch_size, length - start) for start in range(0, length, batch_size)]
    return [size for size in sizes if size == batch_size] if drop_last else sizes


def workers():
    """The pids of this process's children."""
    return {child.pid for child in psutil.Process().children(recursive=True) if _runs(child)}


def _runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has just ended
        return False


@contextlib.contextmanager
def nothing_left_behind(seconds=10.0):
    """Checks that processes and threads that begin inside have ended; signalled ones may take a moment to be gone."""
    processes, threads = workers(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + seconds
    while (workers() - processes or set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers() - processes == set()
    assert set(threading.enumerate()) - threads == set()


def until(condition, seconds=20.0):
    """Waits for something that another process does in its own time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()
