"""Trainings and readers that die, stop or fail, while others go on."""

import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from sharing_runs import (
    FORK,
    Deadly,
    Numbers,
    closing,
    end_readers,
    epochs_of,
    examples,
    in_process,
    indices,
    kill_reader,
    loader_of,
    status,
    together,
    wait_until,
)
from torch.utils.data import DataLoader

from lightning_echo.share.config import new_socket, receive, send, socket_of
from lightning_echo.share.packing import SharedReadError
from lightning_echo.share.parts import sealed
from lightning_echo.share.process import ReaderError
from lightning_echo.share.sharing import serve

LENGTH = 240
NOBODY = 65534


pytestmark = pytest.mark.usefixtures("own_folder")


def trains_for_ever(connection, options, forks=False):
    """A training in a process of its own, which says when it has had a batch; with ``forks`` it has a child that lives on."""
    loader = loader_of(Numbers(LENGTH), 8, **options)
    for _ in range(10**9):
        for batch in loader:
            assert len(batch["index"])
            if forks:
                child = FORK.Process(target=time.sleep, args=(60,), daemon=True)
                child.start()
                connection.send(child.pid)
                forks = False
            connection.send("batch")
            time.sleep(0.002)


def all_of(batches):
    return sorted(index for batch in batches for index in batch["index"].tolist())


def test_a_training_that_is_killed_is_out_at_once_also_if_a_child_of_it_lives_on_and_stops_nobody():
    options = {"window": 2**13, "wait_for": 2, "linger_seconds": 5}
    with in_process(trains_for_ever, options, True) as (process, other):
        loader = loader_of(Numbers(LENGTH), 8, **options)
        epochs = iter(loader)
        had = [next(epochs) for _ in range(4)]
        child = other.recv()
        assert other.recv() == "batch"
        os.kill(process.pid, signal.SIGKILL)
        had += list(epochs)
        assert all_of(had) == list(range(LENGTH))
        wait_until(lambda: status()["count"] == 1, "the killed training is out")
        loader.close()
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_trainings_that_are_killed_at_any_moment_cost_the_others_nothing():
    loader = loader_of(Numbers(LENGTH), 8, window=2**13, linger_seconds=5)
    generator, over, moments = random.Random(0), [], 20

    def train():
        epochs = []
        try:
            while not over:
                epochs += epochs_of(loader, 1, lambda: time.sleep(0.002))
        finally:
            loader.close()
        return epochs

    def kill():
        wait_until(lambda: _written() > 0, "the reader reads")
        try:
            for _ in range(moments):
                with in_process(trains_for_ever, {"window": 2**13, "linger_seconds": 5}) as (process, _):
                    time.sleep(generator.random() * 0.4)  # before it has come, while it enters, within a batch, between two
                    os.kill(process.pid, signal.SIGKILL)
                wait_until(lambda: status()["count"] == 1, "the killed training is out")
        finally:
            over.append(True)

    epochs, _ = together(train, kill)
    assert len(epochs) > 3
    for epoch in epochs:
        assert sorted(indices(epoch)) == list(range(LENGTH))


@pytest.mark.slow
def test_a_training_that_is_stopped_holds_a_window_that_waits_for_it_and_then_all_go_on(caplog):
    options = {"window": 2**13, "wait_for": 2}
    loader = loader_of(Numbers(LENGTH), 8, **options)

    caplog.set_level(logging.INFO, "lightning_echo")
    with in_process(trains_for_ever, options) as (process, other):

        def stop():
            assert other.recv() == "batch"
            os.kill(process.pid, signal.SIGSTOP)
            try:
                before = loader.sharing.waited.for_peers
                wait_until(lambda: loader.sharing.waited.for_peers > before + 4, "the window is full, and that was said")
                return status()["slowest"]
            finally:
                os.kill(process.pid, signal.SIGCONT)

        epochs, slowest = together(closing(loader, 2), stop)
    assert slowest.endswith(f"(process {process.pid})")
    assert f"waits for {slowest}, which is slower" in caplog.text
    waited = loader.sharing.waited
    assert max(waited.by_peer, key=waited.by_peer.get) == slowest
    assert sum(waited.by_peer.values()) == pytest.approx(waited.for_peers)
    for epoch in epochs:
        assert sorted(indices(epoch)) == list(range(LENGTH))


@pytest.mark.slow
def test_a_reader_that_is_killed_twice_loses_nothing():
    share = {"window": 2**14, "wait_for": 2, "linger_seconds": 5, "workers": 2}
    loaders, done = [loader_of(Numbers(LENGTH, seconds=0.001), size, **share) for size in (8, 5)], []
    taken = Counter()

    def takes(size):
        def before_batch():
            taken[size] += size
            time.sleep(0.004)

        return before_batch

    def killer():
        read = 100
        for _ in range(2):
            wait_until(lambda: min(taken[8], taken[5]) > read or done, "examples are read")  # noqa: B023
            if not done:
                # What the next reader is killed at is then another example, whatever the workers of this one have left out.
                read = _written() + 50
                pid = kill_reader()
                wait_until(lambda: _pid() not in (None, pid) or done, "another reader")  # noqa: B023
        return len(done)

    first, second, ended = together(*(closing(each, 6, takes(each.batch_size), done) for each in loaders), killer)
    assert ended == 0, "the kills came while all were at work"
    assert [sorted(indices(epoch)) for epoch in first] == [list(range(LENGTH))] * 6
    assert [examples(epoch) for epoch in first] == [examples(epoch) for epoch in second]


def _said():
    """What the reader says of itself, if there is one."""
    try:
        return status()
    except (OSError, KeyError):
        return {"pid": None, "written": 0, "trainings": []}


def _written():
    return _said()["written"]


def _pid():
    return _said()["pid"]


def test_without_restart_a_dead_reader_is_an_error():
    loader = loader_of(Numbers(10_000), 8, restart=False)
    epoch = iter(loader)
    next(epoch)
    kill_reader()
    with pytest.raises(ReaderError, match=r"has died, and share\.restart is False"):
        list(epoch)
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize(("at", "workers"), [(0, 1), (70, 2)])
def test_readers_whose_workers_die_twice_at_one_example_are_an_error_for_all_and_no_endless_row(at, workers, caplog):
    caplog.set_level(logging.INFO, "lightning_echo")

    def run():
        loader = loader_of(Deadly(4096, at), 8, shuffle=False, workers=workers, wait_for=2)
        epoch, had = iter(loader), []
        try:
            for _ in range(at // 8):
                had += next(epoch)["index"].tolist()
            with pytest.raises(ReaderError, match=rf"has died twice at item {at} .*is killed by signal: Killed"):
                next(epoch)
        finally:
            loader.close()
        return had

    for had in together(run, run):
        assert had == list(range(at // 8 * 8))
    # A training that is not in the second reader yet when that dies has seen one death, and starts another one.
    assert 2 <= caplog.text.count("is started, which takes") <= 3


class Waits(Numbers):
    """In a worker of a reader, it reads nothing before a file is there."""

    def __init__(self, length, mark):
        super().__init__(length)
        self.mark, self.maker = str(mark), os.getpid()

    def __getitem__(self, index):
        is_in_reader = self.maker not in (os.getpid(), os.getppid())
        while is_in_reader and not os.path.exists(self.mark):
            time.sleep(0.01)
        return super().__getitem__(index)


def test_a_reader_that_is_killed_before_its_first_example_is_followed_by_another_one(tmp_path):
    def kill():
        wait_until(lambda: [one["at"] for one in _said()["trainings"]] == [0, 0], "both are in")
        assert _written() == 0
        kill_reader()
        (tmp_path / "reads").touch()

    trainings = [closing(loader_of(Waits(LENGTH, tmp_path / "reads"), 8, wait_for=2), 1) for _ in range(2)]
    *found, _ = together(*trainings, kill)
    for (epoch,) in found:
        assert sorted(indices(epoch)) == list(range(LENGTH))


def test_a_worker_of_the_reader_that_is_killed_loses_nothing(tmp_path):
    loader = loader_of(Deadly(LENGTH, 100, tmp_path / "killed"), 8, workers=2, window=2**14)
    epochs = closing(loader, 2)()
    assert (tmp_path / "killed").exists()
    assert [sorted(indices(epoch)) for epoch in epochs] == [list(range(LENGTH))] * 2


def test_files_of_the_working_folder_with_the_names_of_modules_do_not_end_a_reader(tmp_path, monkeypatch):
    for name in ("queue.py", "typing.py", "torch.py", "lightning_echo.py"):
        (tmp_path / name).write_text("raise RuntimeError('the reader must not import this')")
    monkeypatch.chdir(tmp_path)
    (epoch,) = closing(loader_of(Numbers(32), 8), 1)()
    assert sorted(indices(epoch)) == list(range(32))


def test_with_a_factor_above_1_batches_of_more_than_a_third_of_a_pass_are_said_to_repeat_an_index(caplog):
    loader = loader_of(Numbers(60), 24, factor=2)
    closing(loader, 8)()
    assert "may hold an index twice, since a batch of 24 examples is larger than the 20 that the reader keeps" in caplog.text
    assert loader.counts.fresh <= loader.counts.delivered / 2 + 24


def test_an_exception_in_the_data_set_reaches_every_training_with_type_message_and_index():
    def run(batch_size):
        loader = loader_of(Numbers(64, fails_at=40), batch_size, shuffle=False, wait_for=2)
        epoch, had = iter(loader), 0
        for _ in range(40 // batch_size):
            had += len(next(epoch)["index"])
        with pytest.raises(ValueError, match=r"this example is broken.*reading example 40 of the data set"):
            next(epoch)
        loader.close()
        return had

    assert together(lambda: run(8), lambda: run(5)) == [40, 40]


class Returns(Numbers):
    """Has something else at one index."""

    def __init__(self, make):
        super().__init__(32)
        self.make = make

    def __getitem__(self, index):
        return self.make() if index == 9 else super().__getitem__(index)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: {"deep": [1, {"odd": torch.Generator()}]},
            *(TypeError, r"example\['deep'\]\[1\]\['odd'\] is a torch._C.Generator, which cannot be shared"),
        ),
        (lambda: torch.zeros(10_000), SharedReadError, r"takes 40,\d+ bytes, and the window has 8,192 bytes"),
    ],
    ids=["kind", "size"],
)
def test_what_cannot_be_handed_on_is_an_error_that_names_it(make, error, said):
    loader = loader_of(Returns(make), 8, shuffle=False, window=8192)
    with pytest.raises(error, match=said):
        list(loader)
    loader.close()


class Unsendable(Numbers):
    def __reduce__(self):
        raise TypeError("has an open file")


def _serves(connection, dataset):
    serve(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1), "data")


def test_data_that_cannot_be_sent_is_refused_with_the_reason_and_a_reader_by_hand_reads_it():
    loader = loader_of(Unsendable(32), 8)
    with pytest.raises(TypeError, match=r"cannot be sent to the reader's process .*has an open file") as refused:
        next(iter(loader))
    assert "python train.py share --name data" in str(refused.value)
    loader.close()
    with in_process(_serves, Unsendable(32)):
        wait_until(lambda: _pid() is not None, "the reader has begun")
        (epoch,) = closing(loader_of(Unsendable(32), 8), 1)()
    assert sorted(indices(epoch)) == list(range(32))


def test_data_that_is_heavy_to_send_is_sent_with_a_warning_that_names_the_better_way(monkeypatch):
    monkeypatch.setattr("lightning_echo.share.process._HEAVY_BYTES", 2**22)
    numbers = Numbers(32)
    numbers.heavy = torch.zeros(2**22 + 1, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"sends 4 MiB of data .* python train\.py share --name data"):
        (epoch,) = closing(loader_of(numbers, 8), 1)()
    assert sorted(indices(epoch)) == list(range(32))


def test_nothing_listens_on_a_network_and_the_folder_is_ones_own():
    loader = loader_of(Numbers(64), 8)
    next(iter(loader))
    pid = status()["pid"]
    inodes = {os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd") if _is_socket(pid, each)}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = f"/proc/{pid}/net/{table}"
        rows = Path(path).read_text().splitlines()[1:] if os.path.exists(path) else []
        assert not {f"socket:[{row.split()[9]}]" for row in rows} & inodes
    assert inodes
    loader.close()


def _is_socket(pid, descriptor):
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("socket:")
    except FileNotFoundError:
        return False


def _as_another_user(connection, path, message, part):
    """Tries to speak to a reader as another user; says what came of it."""
    with sealed(np.array(part, np.uint8)) if part else nullcontext() as descriptor:
        os.setuid(NOBODY)
        with new_socket() as peer:
            try:
                peer.settimeout(30)
                peer.connect(path)
                send(peer, message, [descriptor] if part else [])
                connection.send(str(receive(peer)))
            except (OSError, ConnectionError) as error:
                connection.send(type(error).__name__)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("message", "part"), [({"status": 1}, []), ({"hello": {}}, [255] * 8)], ids=["status", "part"])
def test_another_user_is_refused_by_the_folder_and_by_the_reader(monkeypatch, message, part):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("LIGHTNING_ECHO_SHARED", folder)
        loader = loader_of(Numbers(64), 8)
        epoch = iter(loader)
        first = next(epoch)
        path = Path(socket_of("data"))
        path.chmod(0o777)
        for mode, said in ((0o700, "PermissionError"), (0o755, "Gone")):
            path.parent.chmod(mode)
            with in_process(_as_another_user, str(path), message, part) as (_, other):
                assert other.poll(60)
                assert other.recv() == said, oct(mode)
        path.parent.chmod(0o700)
        assert len([first, *epoch]) == 8
        assert status()["count"] == 1
        loader.close()
        end_readers()
