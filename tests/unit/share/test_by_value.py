"""Workers of a reader that are spawned, with classes and functions of the training's script."""

import os
import threading
import time
import types

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.reading import At, Reading, StreamReading
from lightning_echo.share.window import unpack

WITHIN_SECONDS = 60
SCRIPT = """
import functools
from torch.utils.data import Dataset, IterableDataset

@functools.lru_cache
def square(value):
    return value * value

class Read(Dataset):
    opened = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.opened, square(index)

    def open(self, worker):
        self.opened = 7

class Streamed(Read, IterableDataset):
    def __iter__(self):
        return (self[index] for index in range(64))
"""


def of_script(name):
    """An object of a script, in a process that has another main module, as a reader has."""
    script = types.ModuleType("__main__")
    exec(SCRIPT, vars(script))
    return getattr(script, name)()


@pytest.mark.parametrize(("name", "method"), [("Read", "spawn"), ("Streamed", "forkserver")])
def test_a_class_of_the_script_is_read_in_spawned_workers_and_worker_init_fn_gets_the_same_object(name, method):
    dataset = of_script(name)
    loader = DataLoader(dataset, num_workers=1, worker_init_fn=dataset.open, multiprocessing_context=method)
    lost, has_lost = [], threading.Event()

    def when_lost(error):
        lost.append(error)
        has_lost.set()

    reading = (Reading if name == "Read" else StreamReading)(kind_of(loader), 0, 0, 2**16, when_lost)
    try:
        while not reading.window.has(9):
            assert not has_lost.wait(0.01), lost
        kind, data = reading.window.copy(9)
    finally:
        reading.close()
    if name == "Streamed":
        At.cut_from(data)
    assert unpack(kind, data) == (7, 81)


class Dies:
    """A data set whose workers die at one index."""

    def __init__(self, at):
        self.at, self.maker = at, os.getpid()

    def __len__(self):
        return 640

    def __getitem__(self, index):
        if index == self.at and os.getpid() != self.maker:
            os._exit(3)
        return index


@pytest.mark.parametrize(("begin", "at"), [(45, 130), pytest.param(7, 7, marks=pytest.mark.slow)])
def test_a_reading_says_at_which_item_a_worker_has_died(begin, at):
    loader = DataLoader(Dies(at), num_workers=2)
    reading = Reading(kind_of(loader), 0, begin, 2**20, lambda error: None)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):  # from torch's signal handler
        time.sleep(WITHIN_SECONDS)
    try:
        assert reading.lost_at() == at
    finally:
        reading.close()
