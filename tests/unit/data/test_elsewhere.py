"""Reading in a process that ends: nothing of it is left here, and nothing that happens there ends a training."""

import logging
import os
import random
import signal
import threading
from multiprocessing import get_context, parent_process

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_echo.data import elsewhere
from lightning_echo.data.elsewhere import NotRead, read_elsewhere

in_both_ways = pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["no workers", "workers"])


class Prepared(Dataset):
    """Says which process has read it, and what ``prepare`` has set there."""

    prepared_by = None

    def __getitem__(self, index):
        return os.getpid(), self.prepared_by

    def __len__(self):
        return 4


def prepare(worker):
    get_worker_info().dataset.prepared_by = os.getpid()


def first(dataset):
    return dataset[0]


@in_both_ways
def test_the_data_set_is_read_in_another_process_which_ends(options):
    dataset = Prepared()
    reader, prepared_by = read_elsewhere(DataLoader(dataset, worker_init_fn=prepare, **options), first)
    assert reader != os.getpid()
    assert prepared_by == (reader if options else None), "a worker is set up as the training's, and without workers nothing is"
    assert dataset.prepared_by is None
    with pytest.raises(ChildProcessError):
        os.waitpid(reader, 0)


def test_a_spawned_worker_gets_the_data_set_too_and_what_cannot_be_sent_there_is_not_read():
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    reader, prepared_by = read_elsewhere(DataLoader(Prepared(), worker_init_fn=prepare, **options), first)
    assert reader == prepared_by != os.getpid()
    local = type("Local", (Prepared,), {"__qualname__": "make.<locals>.Local"})
    assert "Can't pickle" in read_elsewhere(DataLoader(local(), **options), first).reason


@in_both_ways
def test_the_random_states_do_not_move(options):
    def noise(dataset):
        return torch.rand(1), np.random.rand(), random.random()

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = noise(None)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    read_elsewhere(DataLoader(Prepared(), **options), noise)
    assert noise(None) == expected


@in_both_ways
def test_a_file_that_is_open_already_keeps_its_position(options, tmp_path):
    (tmp_path / "data").write_bytes(bytes(range(200)) * 100)
    with open(tmp_path / "data", "rb") as file:

        def read_on(dataset):
            return file.read(3), file.seek(10_000), file.read(5)

        assert read_elsewhere(DataLoader([1], **options), read_on) == (b"\0\1\2", 10_000, bytes(range(5)))
        assert (file.read(2), file.seek(0), file.read(2)) == (b"\0\1", 0, b"\0\1")


@in_both_ways
def test_an_error_of_the_data_set_comes_back_with_its_traceback(options):
    def missing(dataset):
        raise FileNotFoundError("7.png")

    answer = read_elsewhere(DataLoader([1], **options), missing)
    assert answer.reason == "reading an example raised FileNotFoundError: 7.png"
    assert (type(answer.error), answer.error.args) == (FileNotFoundError, ("7.png",))
    assert 'raise FileNotFoundError("7.png")' in str(answer.error.__cause__)


class TwoValues(Exception):
    """Can be pickled, and not made again."""

    def __init__(self, one, two):
        super().__init__(one)


def odd(dataset):
    raise TwoValues(1, 2)


def cuda(dataset):
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


@in_both_ways
def test_what_fails_there_is_no_answer_and_no_error(options):
    for function, reason in (
        (odd, "reading an example raised TwoValues: 1"),
        (cuda, "reading an example raised RuntimeError: Cannot re-initialize CUDA"),
        (lambda dataset: lambda: 1, "what was read cannot be sent (Can't pickle local object"),
        (lambda dataset: os._exit(3), "exit"),
        (lambda dataset: os.kill(os.getpid(), signal.SIGKILL), ""),
    ):
        answer = read_elsewhere(DataLoader([1], **options), function)
        assert isinstance(answer, NotRead)
        assert reason in answer.reason
        assert answer.error is None
    assert torch.cat([torch.zeros(1), *DataLoader([1.0], num_workers=1)]).tolist() == [0, 1], "workers start as before"


def test_a_process_that_stands_still_is_ended_and_one_that_works_is_not(monkeypatch, caplog):
    for name, seconds in (("_STILL_SECONDS", 0.6), ("_LOOK_SECONDS", 0.1), ("_SAID_AFTER_SECONDS", 0.3)):
        monkeypatch.setattr(elsewhere, name, seconds)

    def work(dataset):
        begin = os.times().user
        while os.times().user < begin + 1.0:
            sum(range(10_000))
        return "worked"

    assert "did nothing for 0.6 seconds" in read_elsewhere(DataLoader([1]), lambda dataset: threading.Event().wait()).reason
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lightning_echo"):
        assert read_elsewhere(DataLoader([1]), work) == "worked"
    assert "before the training takes more than" in caplog.text


def begins_without_parent(connection):
    parent_process().join()
    elsewhere._begin()
    connection.send("it lives on")


def starts_another_and_dies(context, connection):
    context.Process(target=begins_without_parent, args=(connection,)).start()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_whose_parent_is_killed_while_it_begins_does_not_live_on(method):
    context = get_context(method)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=starts_another_and_dies, args=(context, there))
    process.start()
    there.close()
    process.join()
    assert here.poll(60)
    with pytest.raises(EOFError):
        here.recv()
