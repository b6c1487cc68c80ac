"""The workers of a reader: they begin, end and die, and what they leave in the window says what is missing."""

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkProcess

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import reading as reading_module
from lightning_echo.share.packing import unpack
from lightning_echo.share.parts import Chunk
from lightning_echo.share.reading import Preparation, Reading, Recipe, WorkerStart, order_of
from lightning_echo.share.window import CHUNK, Lane, Window

LENGTH = 61


def reading_kind():
    return kind_of(DataLoader(range(LENGTH), num_workers=1))


@contextmanager
def suppress_unraisable():
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    yield
    sys.unraisablehook = hook


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def says_which_are_open(connection, sockets):
    WorkerStart(lambda: sockets, None)(0)
    connection.send([number for number in sockets if os.path.exists(f"/proc/self/fd/{number}")])


def test_a_forked_worker_closes_the_sockets_of_the_reader_that_are_open_when_it_begins():
    sockets = [*socket.socketpair(), *socket.socketpair()]
    numbers = [each.fileno() for each in sockets]
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=says_which_are_open, args=(there, numbers))
    worker.start()
    assert here.poll(60)
    assert here.recv() == []
    worker.join()
    assert all(os.path.exists(f"/proc/self/fd/{number}") for number in numbers)
    for each in sockets:
        each.close()


def dies(worker):
    os.kill(os.getpid(), signal.SIGKILL)


def test_where_a_worker_dies_while_it_is_started_it_is_known_at_which_item(monkeypatch):
    """torch raises its error in the main thread, wherever that is: here while it asks the worker for more."""
    put = _MultiProcessingDataLoaderIter._try_put_index

    def put_slowly(self):
        put(self)
        time.sleep(20)  # the error interrupts it

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_put_index", put_slowly)
    loader = DataLoader(range(LENGTH), num_workers=1, worker_init_fn=dies)
    reading = Reading(kind_of(loader), 0, 5, 2**16, pytest.fail)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        reading.start()
    assert reading.lost_at() == 5
    reading.close()


def test_workers_read_nothing_before_all_of_them_have_begun(monkeypatch):
    """A worker that the user's code kills meanwhile would end the start with torch's error, before any training had its place."""
    begin, written = Reading._begin_worker, []

    def begin_slowly(self):
        begin(self)
        time.sleep(0.3)
        written.append(self.window.last_written)

    monkeypatch.setattr(Reading, "_begin_worker", begin_slowly)
    reading = Reading(kind_of(DataLoader(range(LENGTH), num_workers=2)), 0, 0, 2**16, pytest.fail)
    reading.start()
    assert written == [-1, -1]
    wait_until(lambda: reading.window.end_from(0) >= 2 * CHUNK)
    reading.close()


class Waiting:
    """Data of which each example takes a fifth of the window."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return bytes(800)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_waits_for_room_has_not_died_of_an_item():
    reading = Reading(kind_of(DataLoader(Waiting(), num_workers=1)), 0, 0, 4096, lambda error: None)
    reading.start()
    wait_until(lambda: reading.window.waits(0))
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    with suppress(RuntimeError):  # torch's, in the main thread
        wait_until(reading.has_lost_worker)
    assert reading.has_lost_worker()
    assert reading.lost_at() is None
    reading.close()


def test_a_worker_begins_although_sockets_were_closed_since_the_reader_began():
    """Such as that of who has asked for its status."""
    here, there = socket.socketpair()
    sockets = [here.fileno(), there.fileno()]
    reading = Reading(kind_of(DataLoader(range(LENGTH), num_workers=1)), 0, 0, 2**16, pytest.fail, lambda: sockets)
    reading.start()
    there.close()
    sockets.pop()
    reading.want(2)
    assert reading.workers == 2
    wait_until(lambda: reading.window.lanes == 2)  # the second one has begun
    reading.close()
    here.close()


def test_a_worker_that_leaves_a_chunk_before_its_end_writes_no_later_one():
    window = Window.create(4096, 1, 0)
    preparation = Preparation(Waiting(), lambda: Lane(window, 0), Recipe(0))
    wanted = [0, 1, 2, *range(9, CHUNK)]
    window.close_for_writers()
    assert preparation.fetch(Chunk(0, wanted, list(range(CHUNK)), [], [])) == (0,)
    missing = next(item for item in wanted if not window.has(item))
    assert window.unfinished_from == missing
    assert preparation.fetch(Chunk(CHUNK, [CHUNK], list(range(CHUNK)), [], [])) == (0,)
    assert window.unfinished_from == missing


def test_a_worker_that_the_system_cannot_start_is_left_out_and_the_others_go_on(monkeypatch, caplog):
    reading = Reading(kind_of(DataLoader(range(LENGTH), num_workers=1)), 0, 0, 2**16, pytest.fail)
    reading.start()
    start = ForkProcess.start
    left = [1]

    def start_few(self):
        if not left:
            raise BlockingIOError(11, "no process is left")
        left.pop()
        start(self)

    monkeypatch.setattr(ForkProcess, "start", start_few)
    for _ in range(4):
        reading.want(4)
    assert caplog.text.count("a worker cannot be started") == 1, "it is tried again when another number is wanted"
    assert "a worker cannot be started, so that there are fewer than 4: [Errno 11] no process is left" in caplog.text
    assert reading.workers == 2
    wait_until(lambda: reading.window.lanes == 2)
    taken = 0
    while taken < 8 * CHUNK:
        while reading.window.has(taken):
            taken += 1
        reading.window.low = taken
    reading.want(1)
    end = time.monotonic() + 60
    while reading.workers > 1 or reading.window.lanes > 1:  # one ends, after what it has been given
        reading.window.low = reading.window.end_from(reading.window.low)
        assert time.monotonic() < end
    reading.close()


def test_workers_that_take_long_to_begin_do_so_one_after_the_other_while_the_reader_serves(monkeypatch):
    """A spawned one takes seconds. A worker that was wanted and had no place begins when there is one."""
    monkeypatch.setattr(reading_module, "_MOST_BEGINNING_SECONDS", 0)
    reading = Reading(kind_of(DataLoader(range(LENGTH), num_workers=1)), 0, 0, 2**16, pytest.fail)
    reading.start()
    found = []
    for _ in range(4):
        reading.want(4)
        found.append(reading.workers)
    assert found == [2, 3, 4, 4]
    reading.want(0)
    assert (reading.workers, reading._dealing.ending) == (4, set()), "nobody asks for any: as many as before"
    monkeypatch.setattr(reading_module, "MOST_LANES", 4)
    reading.want(1)
    reading.want(4)
    assert reading.workers == 4, "those that end have the places of the new ones"

    def begin_again():
        reading.window.low = reading.window.end_from(reading.window.low)
        reading.want(4)
        return len(reading._workers.keys() - reading._dealing.ending) == 4

    wait_until(begin_again)
    reading.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning_echo-reading", "QueueFeederThread"])
def test_a_worker_for_which_no_thread_is_left_is_left_out_and_every_item_is_read_once(monkeypatch, caplog, name):
    """The first thread asks the worker, the second one is torch's, which is started when the worker has a chunk already."""
    reading = Reading(kind_of(DataLoader(range(LENGTH), num_workers=1)), 0, 0, 2**16, pytest.fail)
    reading.start()
    start, fails = threading.Thread.start, [True]

    def start_few(self):
        if fails and self.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with suppress_unraisable():  # torch's iterator wants to tell its worker that it ends
        reading.want(3)
        gc.collect()
    assert "a worker cannot be started, so that there are fewer than 3: [Errno 11] can't start new thread" in caplog.text
    assert reading.workers == reading.window.lanes == len(multiprocessing.active_children()) == 1
    fails.clear()
    reading.want(2)
    assert reading.workers == 2
    taken = []
    while len(taken) < 9 * CHUNK:
        item = len(taken)
        wait_until(lambda item=item: reading.window.has(item))
        kind, data = reading.window.copy(item)
        taken.append(unpack(kind, data))
        reading.window.low = item
    expected = order_of(reading_kind(), 0)
    expected.seek(0)
    assert taken == expected.take(len(taken))
    reading.close()


def test_a_reader_for_which_not_even_one_worker_can_be_started_says_so(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    reading = Reading(reading_kind(), 0, 0, 2**16, pytest.fail)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="can't start new thread"):
        reading.start()
    reading.close()


def test_workers_for_which_nothing_is_left_are_not_begun_again_and_again(monkeypatch):
    """A reader that reads again, up to an item, wants its workers until all that they have read is taken."""
    begun, begin = [], Reading._begin_worker
    monkeypatch.setattr(Reading, "_begin_worker", lambda self: begun.append(self) or begin(self))
    reading = Reading(reading_kind(), 0, 5, 2**16, pytest.fail, end=5 + 3 * CHUNK)
    reading.want(16)
    reading.start()
    wait_until(lambda: reading.want(16) or not reading.workers)
    for _ in range(20):
        reading.want(16)
    assert reading.window.end_from(5) == 5 + 3 * CHUNK
    assert len(begun) <= 4, "there are four chunks, of which the first and the last are not whole"
    reading.close()


class Broken:
    """A sampler of the user's that fails after a while, as a file does."""

    def __len__(self):
        return 400

    def __iter__(self):
        yield from range(2 * CHUNK)
        raise OSError("the file of the order is gone")


def test_an_error_of_the_sampler_is_never_taken_for_one_of_the_system():
    """What it was asked for would be lost without a word."""
    large, lost = [bytes(300)] * 400, []  # so that the first worker waits for room in its first chunk
    reading = Reading(kind_of(DataLoader(large, sampler=Broken(), num_workers=1)), 0, 0, 4096, lost.append)
    reading.start()
    reading.want(2)
    wait_until(lambda: lost)
    assert [str(error) for error in lost] == ["the file of the order is gone"]
    reading.close()


class Second:
    """A ``worker_init_fn``: the second worker waits until it may begin, or dies."""

    def __init__(self, may_begin=None):
        self.may_begin = may_begin

    def __call__(self, worker):
        if worker == 1 and self.may_begin is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if worker == 1:
            self.may_begin.wait(60)


def test_a_worker_that_takes_long_to_begin_holds_up_nobody_and_then_reads_too():
    """Nobody could take what it was told to read. A spawned one takes seconds."""
    second = Second(multiprocessing.Event())
    reading = Reading(kind_of(DataLoader(range(LENGTH), num_workers=1, worker_init_fn=second)), 0, 0, 2**16, pytest.fail)
    reading.start()
    reading.want(2)

    def goes_on(end):
        reading.window.low = reading.window.end_from(reading.window.low)
        return reading.window.low >= end

    wait_until(lambda: goes_on(20 * CHUNK))
    assert (reading.workers, reading.window.lanes) == (2, 1)
    second.may_begin.set()
    wait_until(lambda: reading.window.lanes == 2)
    end = reading.window.low + 20 * CHUNK
    wait_until(lambda: goes_on(end))
    reading.close()


@pytest.mark.slow
def test_a_worker_that_dies_before_it_has_begun_has_died_at_the_first_item_that_nobody_has():
    loader = DataLoader(Waiting(), num_workers=1, worker_init_fn=Second())
    reading = Reading(kind_of(loader), 0, 0, 4096, lambda error: None)
    reading.start()
    wait_until(lambda: reading.window.waits(0))
    with suppress(RuntimeError):  # torch's, in the main thread
        reading.want(2)
        wait_until(reading.has_lost_worker)
    assert reading.lost_at() == 2 * CHUNK
    reading.close()
