"""A worker of a reader that has died before the worker could ask to end with it."""

import multiprocessing
import os
from functools import partial

import pytest

from lightning_echo.share.reading import WorkerStart


def start(parent, worker):
    """Runs what a worker runs first, in a process whose parent in the system has this number; None: as it is."""
    if parent is not None:
        os.getppid = lambda: parent
    WorkerStart([], partial(os._exit))(worker)


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
