"""How a training finds a reader, and how it ends where readers fail or are killed before they have answered."""

import logging
import os
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import connecting, server
from lightning_echo.share.config import ShareConfig, new_socket, send, socket_of
from lightning_echo.share.connecting import Connector, Group
from lightning_echo.share.process import Payload, ReaderError, run_reader
from lightning_echo.share.same_data import loader_of, parts_of

WITHIN_SECONDS = 60
DATA = {"data set": "range of 64"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(tmp_path))


class Sampler:
    def __init__(self, yields):
        self.yields = yields

    def __len__(self):
        return 64

    def __iter__(self):
        if self.yields is None:
            raise KeyError("there are no weights")
        return iter(range(self.yields))


def reads(name, data=DATA, linger_seconds=0.2, **options):
    """A reader in a thread in place of a process."""
    loader = DataLoader(range(64), **{"num_workers": 1, **options})
    source = kind_of(loader_of(parts_of(kind_of(loader)), 0))
    ready = threading.Event()

    def run():
        with suppress(RuntimeError):  # which ends its process, and is in its log
            run_reader(
                name, source, data_fingerprint=data, window_bytes=8192, linger_seconds=linger_seconds, when_ready=ready.set
            )

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(WITHIN_SECONDS)
    return thread


def is_killed(name, says=None):
    """A reader that is killed when a training has said hello; or whose worker dies then, which it says."""
    with suppress(FileNotFoundError):  # of the one before it
        os.unlink(socket_of(name))
    listener = new_socket()
    listener.bind(socket_of(name))
    listener.listen()

    def run():
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                if says is not None:
                    send(connection, says)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def dies_at(item):
    return partial(is_killed, says={"over": "killed by signal", "at": item})


def is_mute(name):
    """A process that listens and never answers."""
    listener = new_socket()
    listener.bind(socket_of(name))
    listener.listen()
    return listener


def is_killed_early(name):
    return None


@pytest.fixture
def started(monkeypatch):
    """What is started in place of processes, in this order; and which of these were started."""
    wanted, threads = [], []

    def start(name, payload):
        assert wanted, "one more reader is started"
        threads.append(wanted.pop(0)(name))
        return threads[-1] is not None

    monkeypatch.setattr(connecting, "start_reader", start)
    yield wanted, threads
    for thread in threads:
        if thread is not None:
            thread.join(WITHIN_SECONDS)
            assert not thread.is_alive()


def connector(data=DATA, name="data", **share):
    return Connector(ShareConfig(name, **share), lambda _: Payload([], {}, b""), data, Group.of_one())


def enters(each):
    link = each.connect(None, goes_on=False)
    link.hang_up()
    link.close()
    return link.place.item


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sampler": Sampler(None)}, "KeyError: 'there are no weights'"),
        ({"sampler": Sampler(40)}, "the sampler yielded too few items in pass 0: its length is 64"),
    ],
)
def test_what_keeps_the_reader_from_beginning_ends_all_trainings_with_the_reason_after_one_start(started, options, reason):
    wanted, _ = started
    wanted.append(lambda name: reads(name, **options))
    errors = []

    def trains():
        with pytest.raises(ReaderError) as error:
            enters(connector(wait_for=2))
        errors.append(str(error.value))

    trainings = [threading.Thread(target=trains) for _ in range(2)]
    for training in trainings:
        training.start()
    for training in trainings:
        training.join(WITHIN_SECONDS)
    assert len(errors) == 2
    for error in errors:
        assert reason in error
    assert wanted == []


@pytest.mark.parametrize("readers", [[is_killed, reads], [is_killed_early, reads], [dies_at(5), dies_at(6), reads]])
def test_after_a_reader_that_was_killed_or_whose_worker_died_another_is_started(started, readers):
    wanted, threads = started
    wanted += readers
    assert enters(connector()) == 0
    assert len(threads) == len(readers)


@pytest.mark.parametrize(
    ("restart", "several", "said"),
    [
        (True, [is_killed, is_killed], "has died twice before it answered"),
        (True, [is_killed_early, is_killed], "has died twice before it answered"),
        (False, [is_killed], "has died before it answered"),
        (False, [is_killed_early], "has died before it answered"),
        (True, [dies_at(5), dies_at(5)], r"has died twice at item 5 \(killed by signal\)"),
        (True, [dies_at(5), dies_at(6), dies_at(5)], r"has died twice at item 5 \(killed by signal\)"),
    ],
)
def test_a_second_one_is_an_error_and_without_restart_the_first(started, restart, several, said):
    wanted, threads = started
    wanted += several
    with pytest.raises(ReaderError, match=said):
        enters(connector(restart=restart))
    assert len(threads) == len(several)


EVEN = SimpleNamespace(part=None, item=lambda member: 2 * member, member_from=lambda item: (item + 1) // 2)


@pytest.mark.parametrize(
    ("items", "wish", "deaths", "said"),
    [
        (EVEN, None, [5] * 3, ""),  # an item of others
        (EVEN, None, [5] * 4, r"has died 4 times at item 5 \(killed by signal\)"),
        (EVEN, None, [6] * 2, r"has died twice at item 6 \(killed by signal\)"),
        (EVEN, 8, [6] * 3, ""),  # it has had that one
        (EVEN, 8, [8] * 2, r"has died twice at item 8 \(killed by signal\)"),
    ],
)
def test_readers_that_die_at_what_a_training_does_not_need_end_it_later(started, items, wish, deaths, said):
    """The trainings that need it end first."""
    wanted, threads = started
    wanted += [*map(dies_at, deaths), *([] if said else [reads])]
    attaching = Connector(ShareConfig("data"), lambda _: Payload([], {}, b""), DATA, Group.of_one(), items=items)
    with pytest.raises(ReaderError, match=said) if said else nullcontext():
        link = attaching.connect(wish, goes_on=False)
        link.hang_up()
        link.close()
    assert len(threads) == len(deaths) + (not said)


def test_readers_of_other_trainings_that_are_killed_before_they_answer_are_no_error(started):
    """A reader that another training starts dies with that training if it is killed meanwhile."""
    wanted, threads = started
    wanted.append(reads)
    others = [is_killed("data")]

    def killed_again(*args, had=connecting.receive):
        if len(others) < 3:
            others.append(is_killed("data"))
        return had(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "receive", killed_again)
        assert enters(connector()) == 0
    assert len(others) == 3
    assert len(threads) == 1
    for thread in others:
        thread.join(WITHIN_SECONDS)


def test_one_of_its_own_and_then_one_of_another_training_are_no_error(started):
    wanted, threads = started
    others = []

    def is_killed_early_and_another_begins(name):
        others.append(is_killed(name))

    wanted += [is_killed_early_and_another_begins, reads]
    assert enters(connector()) == 0
    assert len(threads) == 2
    others[0].join(WITHIN_SECONDS)


def answers_soon(monkeypatch):
    """Readers say every 0.1 s that they are there, and are taken for mute after 2 s."""
    monkeypatch.setattr(connecting, "_MOST_MUTE_SECONDS", 2.0)
    monkeypatch.setattr(server, "_TELL_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(server, "_TELL_AGAIN_SECONDS", 0.1)


@pytest.mark.slow
def test_a_listener_that_does_not_answer_is_replaced_and_that_is_said(started, monkeypatch, caplog):
    answers_soon(monkeypatch)
    wanted, threads = started
    wanted.append(reads)
    with is_mute("data"):
        assert enters(connector()) == 0
    assert len(threads) == 1
    assert "does not answer for 2 s: another one is started in its place" in caplog.text


def test_a_reader_that_waits_for_others_is_not_taken_for_a_mute_one_and_begins_after_a_while(started, monkeypatch, caplog):
    answers_soon(monkeypatch)
    caplog.set_level(logging.INFO, "lightning_echo")
    wanted, threads = started
    wanted.append(reads)
    began = time.monotonic()
    assert enters(connector(wait_for=2, wait_seconds=2.5)) == 0
    assert time.monotonic() - began > 2.5
    assert len(threads) == 1
    assert "waits for other trainings (wait_for=2)" in caplog.text
    assert "begins with 1 of 2 trainings (wait_for): no more have come within 2.5 s (wait_seconds)" in caplog.text
