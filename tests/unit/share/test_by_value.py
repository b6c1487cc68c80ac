"""Workers of a reader: spawned with classes and functions of the training's script, or begun when the reader is dead already."""

import multiprocessing
import os
import threading
import types
from functools import partial

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.packing import unpack
from lightning_echo.share.process import payload_of
from lightning_echo.share.reading import Reading, WorkerStart
from lightning_echo.share.stream_reading import At, StreamReading

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
    reading.start()
    try:
        while not reading.window.has(9):
            assert not has_lost.wait(0.01), lost
        kind, data = reading.window.copy(9)
    finally:
        reading.close()
    if name == "Streamed":
        At.cut_from(data)
    assert unpack(kind, data) == (7, 81)


def start(parent, worker):
    """Runs what a worker runs first, in a process whose parent in the system has this number; None: as it is."""
    if parent is not None:
        os.getppid = lambda: parent
    WorkerStart(tuple, partial(os._exit))(worker)


@pytest.mark.parametrize(
    ("method", "parent", "status"),
    [
        ("fork", None, 7),  # the user's function runs, which ends the process
        ("fork", 1, 1),  # the reader is dead, though another worker still holds its pipe open
        ("spawn", None, 7),
        ("forkserver", None, 7),  # whose parent is the server
    ],
)
def test_a_forked_worker_whose_parent_has_changed_has_lost_its_reader(method, parent, status):
    process = multiprocessing.get_context(method).Process(target=start, args=(parent, 7))
    process.start()
    process.join(60)
    assert process.exitcode == status


class Locked:
    """An object with a lock, which refers to itself, too; it may keep it to itself when it is pickled."""

    def __init__(self, hides=False):
        self.lock, self.me, self.hides = threading.Lock(), self, hides

    def __getstate__(self):
        return {**vars(self), "lock": None} if self.hides else vars(self)


class Refuses:
    def __reduce__(self):
        raise OSError("has an open file")


class Held(list):
    def __init__(self, *held):
        super().__init__(range(8))
        self.held = held


@pytest.mark.parametrize(
    ("held", "path"),
    [
        ([{"crop": Locked()}], "dataset.held[0][0]['crop'].lock (type lock)"),
        (Locked(), "dataset.held[0].lock (type lock)"),
        (Refuses(), "dataset.held[0] (type Refuses)"),
        ((Locked(hides=True), Refuses()), "dataset.held[0][1] (type Refuses)"),
        (partial(print, Refuses()), "dataset.held[0] (type partial)"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_path(held, path):
    loader = DataLoader(Held(held), num_workers=1)
    with pytest.raises(TypeError) as raised:
        payload_of(ShareConfig("locked"), kind_of(loader), {})
    assert f"share='locked' is impossible here: {path} cannot be sent to the reader's process" in str(raised.value)


def test_a_sampler_that_cannot_be_sent_is_named():
    loader = DataLoader(range(8), sampler=Held(Refuses()))
    with pytest.raises(TypeError, match=r"here: sampler\.held\[0\] \(type Refuses\) cannot be sent .*has an open file"):
        payload_of(ShareConfig("locked"), kind_of(loader), {})
