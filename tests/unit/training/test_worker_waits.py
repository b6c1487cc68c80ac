"""The waiting of workers: from processes as the system shows them, and from a clock and processes that are made up."""

import math
import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.data.machine import busy_seconds
from lightning_echo.training.meters import WorkerWaits, watched_loader


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
