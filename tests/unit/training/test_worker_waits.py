"""The waiting of workers: from processes as the system shows them, and from a clock and processes that are made up."""

import math
import os
import select
import socket
import struct
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.data.machine import busy_seconds, has_no_request
from lightning_echo.training.waits import WorkerWaits, watched_loader


class Children:
    """Processes that compute for a share of the time."""

    def __init__(self, *shares):
        self.now, self.shares = 0.0, list(shares)

    def busy(self):
        return {pid: None if share is None else 100 + share * self.now for pid, share in enumerate(self.shares)}

    def fraction(self, workers, steps, seconds=0.5):
        waits = WorkerWaits(workers, lambda: self.now, self.busy)
        for _ in range(steps):
            self.now += seconds
            waits.end_step()
        return waits.fraction


@pytest.mark.parametrize(
    ("shares", "workers", "fraction"),
    [
        ((0.1,), 1, 0.9),
        ((0.1, 0.3), 2, 0.8),
        ((0.0, 0.8, 0.0, 0.6), 2, 0.3),  # the workers of a validation have nothing to do
        ((1.2,), 1, 0.0),  # threads of its own
        ((0.1, None), 1, 0.9),
        ((0.1, None), 2, math.nan),  # one has ended, or cannot be looked at
        ((), 1, math.nan),
        ((0.1,), 0, math.nan),  # no workers, or they are not looked at
    ],
)
def test_workers_wait_for_what_the_busiest_of_the_children_do_not_compute(shares, workers, fraction):
    assert Children(*shares).fraction(workers, 20) == pytest.approx(fraction, nan_ok=True)


def test_an_epoch_is_looked_at_after_4_8_16_steps_and_each_epoch_by_itself():
    children = Children(1.0)
    assert math.isnan(children.fraction(1, 7))
    waits, looks = WorkerWaits(1, lambda: children.now, lambda: looks.append(children.now) or children.busy()), []
    for _ in range(100):
        children.now += 1
        waits.end_step()
    began = children.now - 100
    assert [look - began for look in looks] == [4, 8, 16, 32, 64]
    waits.begin_epoch()
    assert math.isnan(waits.fraction)
    children.shares = [0.25]
    children.now += 1000  # what happens between epochs does not count
    for _ in range(20):
        children.now += 1
        waits.end_step()
    assert waits.fraction == pytest.approx(0.75)


def test_a_process_is_busy_while_it_computes_or_is_ready_to(tmp_path):
    """Of 10 seconds on a processor, 5 ready for one: 15. Its other threads may have computed for longer: 20 + 10 ticks."""
    folder, ticks = tmp_path / "7", os.sysconf("SC_CLK_TCK")
    folder.mkdir()
    (folder / "schedstat").write_text("10000000000 5000000000 123\n")
    for user, expected in ((1, 15.0), (20, 30.0)):
        system = 10 if user > 1 else 0
        (folder / "stat").write_text(f"7 (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {user * ticks} {system * ticks} 0 0")
        assert busy_seconds(7, tmp_path) == pytest.approx(expected)
    (folder / "stat").write_text("7 (cut")
    assert busy_seconds(7, tmp_path) is None
    (folder / "schedstat").unlink()
    assert busy_seconds(7, tmp_path) is None
    assert busy_seconds(8, tmp_path) is None


@pytest.mark.skipif(busy_seconds(os.getpid()) is None, reason="this system does not count it")
def test_this_process_is_busy_as_its_clock_of_processor_time_says():
    before, cpu = busy_seconds(os.getpid()), time.thread_time()
    while time.thread_time() < cpu + 0.1:
        pass
    after = busy_seconds(os.getpid())
    assert after - before >= 0.08
    time.sleep(0.5)
    assert busy_seconds(os.getpid()) - after < 0.4


def test_a_worker_has_no_request_while_it_polls_for_five_seconds(tmp_path):
    folder = polling(tmp_path / "7")
    for text, expected in (
        ("7 0x7ffd 0x1 0x1388 0x0 0x0 0x0 0x7ffd 0x7f\n", True),  # poll, for 5,000 ms
        ("7 0x7ffd 0x1 0x1387 0x0 0x0 0x0 0x7ffd 0x7f\n", True),
        ("7 0x7ffd 0x2 0x1388 0x0 0x0 0x0 0x7ffd 0x7f\n", False),  # for one of two
        ("7 0x7ffd 0x1 0xffffffff 0x0 0x0 0x0 0x7ffd 0x7f\n", False),  # poll without an end
        ("7 0x7ffd 0x1 0x2710 0x0 0x0 0x0 0x7ffd 0x7f\n", False),  # for 10 s
        ("230 0x1 0x0 0x1388 0x0 0x0 0x0 0x7ffd 0x7f\n", False),  # clock_nanosleep
        ("running\n", False),
        ("-1 0x7ffd 0x7f\n", False),  # it waits, and for no system call
        ("", False),
        ("7 x y z", None),
    ):
        (folder / "syscall").write_text(text)
        assert has_no_request(7, tmp_path, "x86_64") is expected, text
    assert has_no_request(7, tmp_path, "aarch64") is None
    assert has_no_request(8, tmp_path, "x86_64") is None


@pytest.mark.parametrize("polled", ["socket:[7]", "anon_inode:[eventpoll]", "/dev/null", None])
def test_a_worker_that_polls_something_else_than_a_pipe_for_five_seconds_is_at_work(tmp_path, polled):
    folder = polling(tmp_path / "7")
    assert has_no_request(7, tmp_path, "x86_64")
    (folder / "fd" / "5").unlink()
    if polled is not None:  # else the process has gone on meanwhile
        (folder / "fd" / "5").symlink_to(polled)
    assert has_no_request(7, tmp_path, "x86_64") is False
    (folder / "mem").write_bytes(b"")
    assert has_no_request(7, tmp_path, "x86_64") is False
    (folder / "mem").unlink()
    assert has_no_request(7, tmp_path, "x86_64") is None, "the system does not show it"


def polling(folder):
    """A process that polls its descriptor 5, which is a pipe, for five seconds."""
    (folder / "fd").mkdir(parents=True)
    (folder / "fd" / "5").symlink_to("pipe:[7]")
    with open(folder / "mem", "wb") as memory:
        memory.seek(0x7FFD)
        memory.write(struct.pack("ihh", 5, 1, 0))
    (folder / "syscall").write_text("7 0x7ffd 0x1 0x1388 0x0 0x0 0x0 0x7ffd 0x7f\n")
    return folder


class Rests(torch.utils.data.Dataset):
    """Its fifth example takes a minute: it sleeps, or waits for a server that does not answer, for five seconds at a time."""

    def __init__(self, polls):
        self.polls = polls

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4 and not self.polls:
            time.sleep(60)
        if index == 4:
            ours, _theirs = socket.socketpair()
            waiting = select.poll()
            waiting.register(ours, select.POLLIN)
            for _ in range(12):
                waiting.poll(5000)
        return index


@pytest.mark.skipif(has_no_request(os.getpid()) is None, reason="this system does not tell")
@pytest.mark.parametrize("polls", [False, True], ids=["sleeps", "polls a socket"])
def test_a_worker_of_torch_without_a_request_is_told_from_one_that_reads(polls):
    batches = iter(DataLoader(Rests(polls), num_workers=1, prefetch_factor=2))
    worker = batches._workers[0].pid  # as multiprocessing.active_children() has it, where only one loader has workers
    end = time.monotonic() + 60
    while not has_no_request(worker):  # two batches are done, and no more was asked for
        assert time.monotonic() < end, "a worker that has nothing to do is not seen"
        time.sleep(0.01)
    for _ in range(3):
        next(batches)
    time.sleep(0.5)
    looks = []
    for _ in range(20):
        looks.append(has_no_request(worker))
        time.sleep(0.01)
    assert looks == [False] * 20, "it is at the fifth example"


def test_glances_at_the_busiest_children_say_how_long_the_workers_had_no_request():
    """Two workers, of which one never has a request, and a worker of a validation that never has one either."""
    children, asked = Children(0.0, 0.5, 0.4), []

    def has_none(pid):
        asked.append((children.now, pid))
        return pid in (0, 2)

    waits = WorkerWaits(2, lambda: children.now, children.busy, has_none)
    for step in range(1, 201):
        children.now += 0.02
        waits.end_step()
        if step == 40:
            assert math.isnan(waits.no_request), "there are too few glances"
    assert waits.no_request == pytest.approx(0.5)
    assert {pid for _, pid in asked} == {0, 1, 2}
    times = [now for now, _ in asked]
    assert min(after - before for before, after in pairwise(times)) >= 0.05
    waits.begin_epoch()
    assert math.isnan(waits.no_request)


def test_a_system_that_does_not_tell_is_not_asked_again_and_again():
    children, asked = Children(0.5), []
    waits = WorkerWaits(1, lambda: children.now, children.busy, asked.append)  # returns None
    for _ in range(100):
        children.now += 1
        waits.end_step()
    assert math.isnan(waits.no_request)
    assert asked == [0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class SaysSo(StagedDataset):
    reads_concurrently = True

    def __len__(self):
        return 8

    def read(self, index):
        return index

    def decode(self, raw):
        return torch.tensor([float(raw)])

    def augment(self, example):
        return example


def test_a_single_loader_with_workers_over_examples_is_watched_unless_threads_read_ahead_in_it():
    plain = DataLoader(torch.arange(8), num_workers=1)
    assert watched_loader(plain) is plain
    assert watched_loader(EchoLoader(plain, 1, reads_in_flight=1)) is plain
    assert watched_loader(EchoLoader(DataLoader(SaysSo(), num_workers=1), 1, reads_in_flight=4)) is None
    others = [DataLoader(torch.arange(8)), DataLoader(Stream(), num_workers=1), [plain, plain], SimpleNamespace(num_workers=2)]
    assert [watched_loader(other) for other in others] == [None] * 4
