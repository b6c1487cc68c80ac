"""A training that is killed: its workers end, and print nothing."""

import os
import signal
import subprocess
import sys

import pytest

from lightning_echo.pipeline import worker

pytestmark = pytest.mark.timeout(60)

ALONE = [sys.executable, "-W", "ignore", "-c"]  # an option: a new interpreter, and not a fork of the tests' server

PROGRAM = """
import multiprocessing.connection, os, signal, sys
from torch.utils.data import DataLoader, TensorDataset
import torch
from lightning_echo import EchoLoader

def die(*args):  # where this process asks a worker for the memory of a batch
    os.kill(os.getpid(), signal.SIGKILL)

multiprocessing.connection.answer_challenge = die
plain = DataLoader(TensorDataset(torch.zeros(64, 3)), 4, num_workers=2)
next(iter(EchoLoader(plain, sys.argv[1], insertion_point="after_augmentation") if sys.argv[1:] else plain))
"""


@pytest.mark.slow
def test_the_workers_of_a_killed_training_end_without_a_traceback():
    killed = subprocess.run([*ALONE, PROGRAM, "demand"], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert "Traceback" not in killed.stderr


@pytest.mark.slow
def test_the_worker_of_a_plain_loader_prints_one():
    """So the test above tests something."""
    killed = subprocess.run([*ALONE, PROGRAM], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert "ConnectionResetError" in killed.stderr


@pytest.mark.parametrize(
    ("error", "ends", "is_shown"),
    [(ConnectionResetError(), True, False), (EOFError(), True, False), (OSError(), True, True), (EOFError(), False, True)],
)
def test_only_a_connection_that_breaks_with_the_end_of_the_training_is_hidden(monkeypatch, error, ends, is_shown):
    shown = []
    monkeypatch.setattr(worker, "_ORPHANED_SECONDS", 0.05)
    monkeypatch.setattr(sys, "excepthook", lambda *what: shown.append(what))
    parents = iter([7, 7, 7] + [1 if ends else 7] * 100)
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    worker.hide_end_of_training()
    sys.excepthook(type(error), error, None)
    assert shown == ([(type(error), error, None)] if is_shown else [])
