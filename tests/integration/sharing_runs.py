"""Trainings that share, without Lightning: data sets, and loops in threads and in processes of their own."""

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from contextlib import contextmanager, suppress

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader
from lightning_echo.share.config import names, new_socket, receive, send, socket_of

FORK = multiprocessing.get_context("fork")
DEADLINE_SECONDS = 120  # without a batch, or without what is waited for
_moved = weakref.WeakKeyDictionary()  # when a thread has had a batch last, or what it has waited for


class Numbers(Dataset):
    """Example ``i`` is its index, noise, and bytes that follow from the index."""

    def __init__(self, length, seconds=0.0, fails_at=None):
        self.length, self.seconds, self.fails_at = length, seconds, fails_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        if index == self.fails_at:
            raise ValueError("this example is broken")
        return {"index": index, "noise": torch.rand(()), "data": torch.full((64,), index % 251, dtype=torch.uint8)}


class Deadly(Numbers):
    """Kills the process that reads one of its examples, but not the one that makes it; with ``mark``, a file, only once."""

    def __init__(self, length, at, mark=None):
        super().__init__(length)
        self.at, self.mark, self.maker = at, mark, os.getpid()

    def __getitem__(self, index):
        if index == self.at and os.getpid() != self.maker and not (self.mark and self.mark.exists()):
            if self.mark:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def loader_of(
    dataset, batch_size, *, factor=1, shuffle=True, workers=1, drop_last=False, options=None, reader_workers="sum", **share
):
    """An `EchoLoader` that shares its reading. ``reader_workers`` is the option ``workers``."""
    plain = DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=workers, drop_last=drop_last)
    share = {"name": "data", "linger_seconds": 0.5, "window": "1MiB", "workers": reader_workers, **share}
    return EchoLoader(plain, factor, share=share, **{"seed": 0, **(options or {})})


def rows(batch):
    """The examples of a batch: index and noise. What belongs to an index is checked. The thread that has had it does not hang."""
    _moved[threading.current_thread()] = time.monotonic()
    assert torch.equal(batch["data"], (batch["index"] % 251).to(torch.uint8)[:, None].expand(-1, 64))
    return list(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))


def epochs_of(loader, count, before_batch=lambda: None):
    """What so many epochs deliver: for each a list of batches."""
    found = []
    for _ in range(count):
        found.append([])
        for batch in loader:
            before_batch()
            found[-1].append(rows(batch))
    return found


def closing(loader, count, before_batch=lambda: None, left=None):
    """Returns a training of so many epochs, which leaves at its end, and is then in a list."""

    def run():
        try:
            return epochs_of(loader, count, before_batch)
        finally:
            if left is not None:
                left.append(loader)
            loader.close()

    return run


def sleeps(seconds):
    """Returns what a training does before a batch: nothing, for a while."""
    return lambda: time.sleep(seconds)


def resumed(make, batches, epochs):
    """All batches of a run, and those of one that is resumed from its state after so many batches with another reader."""
    loader, found, state = make(), [], None
    for _ in range(epochs):
        for batch in loader:
            found.append(rows(batch))
            if len(found) == batches:
                state = loader.state_dict()
    loader.close()
    end_readers()
    again, rest = make(), []
    again.load_state_dict(state)
    while len(rest) < len(found) - batches:
        rest += [rows(batch) for batch in again]
    again.close()
    return found, rest


def examples(epoch):
    """The examples of an epoch, in order."""
    return [example for batch in epoch for example in batch]


def indices(epoch):
    """Their indices."""
    return [index for index, _ in examples(epoch)]


def together(*trainings):
    """Runs functions in threads, at the same time; returns what they return, and raises what one of them raises.

    However long they take together on a busy machine, one of them hangs only if it has had nothing for ``DEADLINE_SECONDS``.
    """
    results, failures = [None] * len(trainings), []

    def run(number):
        try:
            results[number] = trainings[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(trainings))]
    for thread in threads:
        _moved[thread] = time.monotonic()
        thread.start()
    for thread in threads:
        while thread.is_alive() and (left := _moved[thread] + DEADLINE_SECONDS - time.monotonic()) > 0:
            thread.join(left)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a training hangs"
    return results


def status(name="data"):
    """What a reader says of itself."""
    with new_socket() as connection:
        connection.connect(socket_of(name))
        send(connection, {"status": 1})
        connection.settimeout(10)
        return receive(connection)[0]["status"]


def places(name="data"):
    """Where the trainings of a reader are that have entered; empty without a reader."""
    try:
        return [one["at"] for one in status(name)["trainings"] if one["at"] is not None]
    except (OSError, KeyError):
        return []


def reader_that_goes_on(count, over, before=None):
    """Waits until another reader than ``before`` has gone on with so many trainings, or all is ``over``; returns its number.

    A reader that dies where one died before is an error.
    """

    def pid():
        with suppress(OSError, KeyError):
            found = status()
            return found["pid"] if len(places()) == count else None

    wait_until(lambda: over or pid() not in (None, before), "another reader, with all trainings")
    start = min(places(), default=0)
    wait_until(lambda: over or min(places(), default=0) > start + 40, "the trainings go on")
    return pid()


def kill_reader(name="data"):
    """Kills a reader as it can be killed at any time; returns its number."""
    pid = status(name)["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def end_readers():
    """Ends all readers of the folder, after the loaders that a test has dropped: they would start another one in their place."""
    gc.collect()
    for name in names():
        with suppress(ConnectionError, FileNotFoundError, TimeoutError, ProcessLookupError):
            kill_reader(name)


def wait_until(holds, what):
    """Waits until a condition holds."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.005)
    _moved[threading.current_thread()] = time.monotonic()


def _with_one_thread(run, *args):
    """What OpenMP's threads did in the parent, a forked child waits for in vain."""
    torch.set_num_threads(1)
    run(*args)


@contextmanager
def in_process(run, *args):
    """Runs ``run(connection, *args)`` in a process of its own; gives the process and the other end of the connection."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=_with_one_thread, args=(run, there, *args), daemon=False)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        if process.is_alive():
            process.kill()
        process.join(10)
        here.close()
