"""Echo on demand when a worker is killed or stopped, or reads fail: an error, or no example lost and none fresh twice."""

import multiprocessing
import os
import random
import signal
import threading
import time
from itertools import count, islice

import pytest
import torch
from demand_cases import Ledger, ReadAndDecode, Recorder, Serials, batches_of, on_demand
from torch.utils.data import IterableDataset

pytestmark = pytest.mark.timeout(120)

BATCH = 4


class Endless(IterableDataset):
    """A stream. An example is its number, a time, and the process that reads it, and takes some milliseconds."""

    def __iter__(self):
        for number in count():
            time.sleep(0.005)
            yield torch.tensor([number, time.monotonic_ns(), os.getpid()])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dataset", [Serials(10_000, slowest=0.02), Endless()], ids=["by index", "a stream"])
def test_a_worker_that_is_killed_is_an_error_though_memory_holds_enough_to_echo(dataset, workers):
    loader = on_demand(dataset, workers=workers, batch_size=BATCH, max_factor=1000)
    run = batches_of(loader)
    for _ in islice(run, 40):
        time.sleep(0.001)
    assert loader.counts.delivered < 100 * loader.counts.fresh, "the account lends many more"
    os.kill(int(next(run)[0, 2]), signal.SIGKILL)
    taken = []
    with pytest.raises(RuntimeError, match=r"worker \(pid\(?s?\)? ?\d+\) (is killed by signal: Killed|exited unexpectedly)"):
        taken.extend(islice(run, 1000))
    assert len(taken) < 10 * workers, "only what was under way"
    loader.close()


def test_a_worker_that_is_stopped_for_a_second_loses_nothing_and_repeats_nothing():
    loader, ledger = on_demand(Serials(60, slowest=0.01), batch_size=BATCH), Ledger(60)
    run = batches_of(loader)
    for _ in range(2):
        for batch in islice(run, 20):
            ledger.enter(batch)
        before, pid = len(ledger.fresh), int(batch[0, 2])
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
        timer.start()
        for batch in islice(run, 40):
            ledger.enter(batch)
            time.sleep(0.001)
        timer.join()
        assert len(ledger.fresh) > before
    ledger.check(loader)
    loader.close()


class Lost(Exception):
    """Only the data sets of this file raise it."""


class Failing:
    """Of each ``once_in`` reads of an example, three in a row fail, in whichever processes; the first ones at random."""

    def __init__(self, length, seed, once_in=30):
        self.counts, self.once_in, self.is_on = multiprocessing.Array("q", length), once_in, True
        for index in range(length):
            self.counts[index] = random.Random(f"{seed} {index}").randrange(once_in)

    def raise_sometimes(self, index):
        if self.is_on:
            with self.counts.get_lock():
                self.counts[index] += 1
                number = self.counts[index] % self.once_in
            if number < 3:
                raise Lost(f"the network has lost {index}")


class FailingSerials(Serials):
    def __init__(self, length, failing):
        super().__init__(length, slowest=0.001)
        self.failing = failing

    def __getitem__(self, index):
        self.failing.raise_sometimes(index)
        return super().__getitem__(index)


class FailingReads(ReadAndDecode):
    def __init__(self, length, failing):
        super().__init__(length, slowest=0.001)
        self.failing = failing

    def read(self, index):
        self.failing.raise_sometimes(index)
        return super().read(index)


def play(loader, enter, check, errors=5):
    """Trains over so many errors in one process, and until two passes are complete."""
    seen, length = 0, loader.loader.dataset.length
    while seen < errors:
        try:
            for batch in loader:
                enter(batch)
        except Lost:
            seen += 1
            check(loader)
    loader.loader.dataset.failing.is_on = False  # in the workers that start from here on
    loader.close()
    for batch in islice(batches_of(loader), 1000):
        enter(batch)
        if loader.state_dict()["demand"]["frontier"] >= 2 * length:
            break
    else:
        pytest.fail("an example of the first two passes is missing")
    check(loader)
    loader.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_run_goes_on_after_random_errors_of_reads_without_losing_or_repeating_an_example(seed):
    ledger = Ledger(40)
    play(on_demand(FailingSerials(40, Failing(40, seed)), batch_size=BATCH), ledger.enter, ledger.check)
    assert min(ledger.fresh.count(index) for index in range(40)) >= 2


def test_the_same_where_threads_read(monkeypatch):
    recorder = Recorder(monkeypatch)
    options = {"reads_in_flight": 6, "insertion_point": "before_augmentation", "batch_size": BATCH}

    def enter(batch):
        assert batch[:, 1].tolist() == [2 * index for index in batch[:, 0].tolist()]

    failing = Failing(40, 3)
    failing.is_on = False  # while the split is proved
    loader = on_demand(FailingReads(40, failing), **options)
    failing.is_on = True
    play(loader, enter, recorder.check)
