"""Processes that a loader starts are noted, dead ones are told by what ended them, and those that live can be ended quietly."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.prefetch import WorkerProcesses

PATIENCE = 30  # seconds after which a test that hangs fails
METHODS = [method for method in ("fork", "spawn", "forkserver") if method in multiprocessing.get_all_start_methods()]


def a_process(workers, target, *args, method="fork"):
    process = workers.noted_by(multiprocessing.get_context(method)).Process(target=target, args=args)
    process.start()
    return process


@pytest.mark.parametrize("method", METHODS)
def test_a_context_makes_what_it_is_made_of_makes(method):
    given = multiprocessing.get_context(method)
    made = WorkerProcesses().noted_by(given)
    assert made.get_start_method() == method
    process = made.Process(target=os._exit, args=(0,))
    assert type(process) is given.Process
    process.start()
    process.join()
    assert process.exitcode == 0
    assert given.Process is type(given).Process, "the user's context is as it was"


def test_without_a_context_it_is_the_default_one():
    assert WorkerProcesses().noted_by(None).get_start_method() == multiprocessing.get_start_method()


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_was_killed_is_told_with_its_pid_and_signal(method):
    workers = WorkerProcesses()
    assert workers.lost() is None
    process = a_process(workers, signal.pause, method=method)
    assert workers.lost() is None
    process.kill()
    process.join()
    assert str(workers.lost()) == f"DataLoader worker (pid {process.pid}) is killed by signal: Killed."


def test_one_that_is_dying_is_waited_for():
    workers = WorkerProcesses()
    process = a_process(workers, signal.pause)
    threading.Timer(0.1, process.kill).start()
    assert str(workers.lost(within=PATIENCE)) == f"DataLoader worker (pid {process.pid}) is killed by signal: Killed."


def test_one_that_lives_is_not_waited_for_any_longer():
    workers = WorkerProcesses()
    process = a_process(workers, signal.pause)
    assert workers.lost(within=0.01) is None
    process.kill()


def test_a_process_that_ended_by_itself_is_told_with_its_status_unless_that_is_0():
    workers = WorkerProcesses()
    a_process(workers, os._exit, 0).join()
    assert workers.lost() is None
    process = a_process(workers, os._exit, 3)
    process.join()
    assert str(workers.lost()).startswith(f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code 3. ")


def test_one_that_is_made_and_not_started_is_not_lost():
    workers = WorkerProcesses()
    workers.noted_by(None).Process(target=os._exit)
    assert workers.lost() is None


@pytest.mark.parametrize("kills", [False, True])
def test_the_others_are_ended_where_one_has_died_and_without_a_word_of_torchs(kills, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value))
    workers = WorkerProcesses()
    loader = DataLoader(range(100), num_workers=3, multiprocessing_context=workers.noted_by(None))
    iterator = iter(loader)
    next(iterator)
    first, *others = workers._processes
    if kills:
        with contextlib.suppress(RuntimeError):  # of torch's handler, once and for all
            os.kill(first.pid, signal.SIGKILL)
            first.join(PATIENCE)
    workers.end_others()
    if kills:
        for process in others:
            process.join(PATIENCE)
        assert [process.exitcode for process in others] == [0, 0]
    else:
        assert len(list(iterator)) == 99
    del iterator
    assert reported == []
