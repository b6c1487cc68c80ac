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
def test_a_process_of_a_noting_context_that_was_killed_is_told_with_its_pid_and_signal(method):
    workers, given = WorkerProcesses(), multiprocessing.get_context(method)
    assert workers.noted_by(given).get_start_method() == method
    assert workers.noted_by(None).get_start_method() == multiprocessing.get_start_method()
    workers.noted_by(None).Process(target=os._exit)  # one that is made and not started is not lost
    assert workers.lost() is None
    process = a_process(workers, signal.pause, method=method)
    assert type(process) is given.Process
    assert given.Process is type(given).Process, "the user's context is as it was"
    assert workers.lost(within=0.01) is None, "one that lives is not waited for any longer"
    threading.Timer(0.05, process.kill).start()
    expected = f"DataLoader worker (pid {process.pid}) is killed by signal: Killed."
    assert str(workers.lost(within=PATIENCE)) == expected, "one that is dying is waited for"
    process.join()


def test_a_process_that_ended_by_itself_is_told_with_its_status_unless_that_is_0():
    workers = WorkerProcesses()
    a_process(workers, os._exit, 0).join()
    assert workers.lost() is None
    process = a_process(workers, os._exit, 3)
    process.join()
    assert str(workers.lost()).startswith(f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code 3. ")


@pytest.mark.parametrize("kills", [False, True])
def test_the_others_are_ended_where_one_has_died_and_without_a_word_of_torchs(kills, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value))
    workers = WorkerProcesses()
    iterator = iter(DataLoader(range(30), num_workers=2, multiprocessing_context=workers.noted_by(None)))
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
        assert [process.exitcode for process in others] == [0]
    else:
        assert len(list(iterator)) == 29
    del iterator
    assert reported == []
