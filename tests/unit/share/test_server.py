"""The reader's side of the socket: whatever a peer sends ends its own connection at most."""

import json
import os
import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.config import Gone, new_socket, receive, send
from lightning_echo.share.server import CannotBegin, Server, Training

HELLO = {
    "label": "test",
    "behind": "wait",
    "join": "now",
    "wait_for": 2,  # so that nothing is read
    "wait_seconds": 600,
    "wish": None,
    "goes_on": False,
    "group": "g",
    "ranks": 1,
    "print": {"data set": "range of 8"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "s")
    listener = new_socket()
    listener.bind(path)
    listener.listen()
    source = kind_of(DataLoader(range(8), num_workers=1))
    server = Server(listener, source, seed=0, data_print={"data set": "range of 8"}, window_bytes=8192, linger_seconds=0.2)
    failures = []

    def run():
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    keeper = new_socket()
    keeper.connect(path)
    thread.start()
    send(keeper, {"hello": {**HELLO, "group": "keeper"}})
    yield path
    assert thread.is_alive(), "what peers sent has ended the reader"
    keeper.close()
    thread.join(10)
    assert not thread.is_alive()
    assert failures == []


def status(path):
    with new_socket() as connection:
        connection.settimeout(10)
        connection.connect(path)
        send(connection, {"status": 1})
        return receive(connection)[0]["status"]


def test_it_says_who_is_there(path):
    said = status(path)
    assert (said["count"], said["length"], said["data"]) == (1, 8, "range of 8")
    assert said["trainings"] == [{"pid": said["pid"], "label": "test", "behind": "wait", "at": None}]


def ends(path, *messages):
    """Whether a peer that sends these is let go; the others are served all the same."""
    with new_socket() as connection:
        connection.settimeout(10)
        connection.connect(path)
        for message in messages:
            try:
                connection.send(message if isinstance(message, bytes) else json.dumps(message).encode())
            except BrokenPipeError:
                break
        try:
            while True:
                receive(connection)
        except Gone:
            is_ended = True
    assert status(path)["count"] == 1
    return is_ended


@pytest.mark.parametrize(
    "messages",
    [
        [b"{"],
        [b"[]"],
        [{"unknown": 1}],
        [{"at": 1}],
        [{"ask": 1}],
        [{"ask": {"round": 0, "end": 8, "need": 0}}],
        [{"hello": {**HELLO, "wait_for": 10}}, {"ask": {"round": 0, "end": 8, "need": 0}}],
        [{"hello": 1}],
        [{"hello": {}}],
        [{"hello": {**HELLO, "behind": "hurry"}}],
        [{"hello": {**HELLO, "wait_for": -1}}],
        [{"hello": {**HELLO, "wish": 2**70}}],
        [{"hello": {**HELLO, "wish": 1.5}}],
        [{"hello": {**HELLO, "print": 7}}],
        [{"hello": {**HELLO, "print": {"data set": 1.5}}}],
        [{"hello": {**HELLO, "wait_seconds": 10**400}}],
        [{"hello": {**HELLO, "wait_seconds": float("inf")}}],
        [{"hello": {**HELLO, "wait_for": 10}}, {"hello": HELLO}],
        [{"hello": {**HELLO, "wait_for": 10}}, {"at": 3}],
    ],
    ids=str,
)
def test_a_wrong_message_ends_the_connection_that_it_came_over(path, messages):
    assert ends(path, *messages)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
fields = st.fixed_dictionaries(
    {}, optional={name: json_values | st.just(value) for name, value in {**HELLO, "wait_for": 9}.items()}
)
bad = (
    st.binary(min_size=1, max_size=300)
    | st.builds(lambda value: json.dumps(value).encode(), json_values)
    | st.builds(lambda hello: json.dumps({"hello": hello}).encode(), fields)
    | st.builds(lambda at: json.dumps({"at": at}).encode(), json_values)
    | st.builds(lambda ask: json.dumps({"ask": ask}).encode(), json_values)
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(bad, min_size=1, max_size=50))
def test_random_messages_end_nothing_but_their_connection(path, messages):
    """50 messages on average over 200 examples: the 10,000 that the project asks for."""
    with new_socket() as connection:
        connection.settimeout(10)
        connection.connect(path)
        for message in messages:
            try:
                connection.send(message)
            except (BrokenPipeError, ConnectionResetError):
                break
    end = time.monotonic() + 10
    while status(path)["count"] != 1:
        assert time.monotonic() < end


def test_other_data_is_refused_with_what_differs(path):
    with new_socket() as connection:
        connection.settimeout(10)
        connection.connect(path)
        send(connection, {"hello": {**HELLO, "print": {"data set": "range of 9"}}})
        message, _ = receive(connection)
        assert message["refused"] == "data set: range of 9 and range of 8"
        assert re.fullmatch(rf"process {os.getpid()}, started \d+ s ago by serve", message["whose"])
        with pytest.raises((Gone, socket.timeout)):
            receive(connection)


def test_after_a_reader_has_died_nothing_is_overwritten_until_its_trainings_are_back():
    server = Server(
        new_socket(),
        kind_of(DataLoader(range(8), num_workers=1)),
        seed=0,
        data_print={},
        window_bytes=8192,
        linger_seconds=0.2,
        expected=2,
    )
    window = SimpleNamespace(low=0, trainings=0, slowest_need_nanoseconds=0, slowest_label="")
    server._reading = SimpleNamespace(window=window, close=lambda: None)
    options = {"pid": 1, "label": "", "behind": "wait", "join": "now", "wait_for": 1, "wish": None, "goes_on": True, "ranks": 1}
    server._trainings.all.append(Training(**options, group="a", cursor=5))
    server._move_low()
    assert (window.low, window.trainings) == (0, 1)
    new = Training(**{**options, "goes_on": False}, group="c", cursor=7)
    server._trainings.all.append(new)  # it counts for none of them
    server._move_low()
    assert window.low == 0
    server._trainings.all.remove(new)
    server._trainings.all.append(Training(**options, group="b", cursor=4))
    server._move_low()
    assert (window.low, window.trainings) == (4, 2)
    server._trainings.all.pop()  # from now on it may leave as any other
    server._move_low()
    assert window.low == 5
    server.close()


def test_a_reader_that_a_new_training_has_started_after_another_ones_death_overwrites_nothing_for_a_moment():
    """It cannot know how many trainings the dead one had."""
    source = kind_of(DataLoader(range(8), num_workers=1))
    options = {"seed": 0, "data_print": {}, "window_bytes": 8192, "linger_seconds": 0.2}
    server = Server(new_socket(), source, **options, follows=True)
    window = SimpleNamespace(low=0, trainings=0, slowest_need_nanoseconds=0, slowest_label="")
    server._reading = SimpleNamespace(window=window, close=lambda: None)
    one = {"pid": 1, "label": "", "behind": "wait", "join": "now", "wait_for": 1, "wish": None, "goes_on": True, "ranks": 1}
    server._trainings.all.append(Training(**one, group="a", cursor=5))
    server._move_low()
    assert window.low == 0
    server._begun -= 60
    server._move_low()
    assert window.low == 5
    server.close()


def test_a_reader_that_follows_a_dead_one_lets_nobody_in_before_its_trainings(monkeypatch):
    """A new training would begin at the start, and those of the dead reader would wait until all before them was read again."""
    server = Server(
        new_socket(),
        kind_of(DataLoader(range(8), num_workers=1)),
        seed=0,
        data_print={},
        window_bytes=8192,
        linger_seconds=0.2,
        follows=True,
    )
    begun = []

    class Begun(Exception):
        pass

    def begin(item):
        begun.append(item)
        raise Begun

    monkeypatch.setattr(server, "_begin", begin)
    options = {"pid": 1, "label": "", "behind": "wait", "join": "now", "wait_for": 1, "ranks": 1}
    server._trainings.all.append(Training(**options, group="new", wish=None, goes_on=False))
    server._let_enter()
    assert begun == []
    server._trainings.all.append(Training(**options, group="old", wish=40, goes_on=True))
    with pytest.raises(Begun):
        server._let_enter()
    assert begun == [40]
    server._trainings.all.pop()
    server._begun -= 60  # nobody has come
    with pytest.raises(Begun):
        server._let_enter()
    assert begun == [40, 0]
    server.close()


def idle_server(**options):
    """A server that listens to nobody and reads nothing."""
    data = {"data_print": {}, "window_bytes": 8192, "linger_seconds": 0.2}
    return Server(new_socket(), kind_of(DataLoader(range(8), num_workers=1)), seed=0, **data, **options)


@pytest.mark.parametrize(("lost_at", "kind"), [(7, RuntimeError), (None, CannotBegin)])
def test_a_worker_whose_death_is_told_while_a_training_enters_is_not_what_keeps_trainings_out(monkeypatch, lost_at, kind):
    """torch raises its error in the main thread, wherever that is."""
    server = idle_server()
    killed = RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. ")

    def enter():
        raise killed

    monkeypatch.setattr(server, "_let_enter", enter)
    monkeypatch.setattr(server, "_reading", SimpleNamespace(lost_at=lambda: lost_at, close=lambda: None))
    with pytest.raises(kind, match="is killed by signal") as found:
        server._let_enter_or_fail()
    assert type(found.value) is kind
    server.close()


@pytest.mark.parametrize("knows_place", [False, True])
def test_a_training_that_does_not_know_its_place_hears_of_a_death_that_another_reader_follows(monkeypatch, knows_place):
    """It has entered, but the worker died before it was told so."""
    server = idle_server()
    said = []
    peer = SimpleNamespace(knows_place=knows_place, training=SimpleNamespace(cursor=3))
    monkeypatch.setattr(server, "_peers", {1: peer})
    monkeypatch.setattr(server, "_reading", SimpleNamespace(lost_at=lambda: 3, close=lambda: None))
    monkeypatch.setattr(server, "_try_to_send", lambda peer, message: said.append(message))
    server._say_why(RuntimeError("killed"))
    assert said == [{"failed": "killed", "at": 3} if knows_place else {"over": "killed", "at": 3}]
    server._peers.clear()
    server.close()


# ---------------------------------------------------------------------- one reader over a cluster

OPTIONS = {"pid": 1, "label": "", "behind": "wait", "join": "now", "wait_for": 1, "ranks": 1}


def cluster_server(monkeypatch, elsewhere, **options):
    """A server, and where those who enter are told to begin: the place, and whether that is late."""
    server, told = idle_server(**options), []
    server._elsewhere = elsewhere
    monkeypatch.setattr(server, "_tell_place", lambda peer, reading, place, others, is_late: told.append((place, is_late)))
    return server, told


class PlayedElsewhere:
    """Another node whose examples begin at an item, or at the one that is wished for."""

    nodes = 1

    def __init__(self, first=None):
        self.first, self.starts = first, []

    def begin(self, start, read_here, when_lost):
        self.starts.append(start)
        begin = start.item if self.first is None else self.first
        window = SimpleNamespace(begin=begin, low=begin, trainings=0, slowest_need_nanoseconds=0, slowest_label="")
        return SimpleNamespace(window=window, close=lambda: None)

    def leave(self):
        pass


def comes(server, **training):
    peer = SimpleNamespace(training=Training(**{**OPTIONS, "wish": None, "goes_on": False, **training}))
    server._peers[len(server._peers)] = peer
    server._trainings.all.append(peer.training)
    server._let_enter()


def ended(server):
    server._peers.clear()  # they have no connections
    server.close()


@pytest.mark.parametrize("how_many", [1, 2])
def test_a_reader_over_a_cluster_waits_for_all_that_a_dead_one_had_and_begins_at_the_earliest_item(monkeypatch, how_many):
    elsewhere = PlayedElsewhere()
    server, _ = cluster_server(monkeypatch, elsewhere, follows=True, expected=2, gather_seconds=20.0)
    comes(server, group="a", wish=40, goes_on=True)
    assert elsewhere.starts == [], "another one is missing"
    if how_many == 2:
        comes(server, group="b", wish=25, goes_on=True)
    else:
        server._begun -= 30  # it does not come
        server._let_enter()
    assert [start.item for start in elsewhere.starts] == [25 if how_many == 2 else 40]
    ended(server)


@pytest.mark.parametrize(("wish", "first", "is_late"), [(None, 30, True), (None, 0, False), (30, 30, False), (20, 30, True)])
def test_who_enters_after_what_another_node_has_fetched_is_told_that_it_comes_late(monkeypatch, wish, first, is_late):
    server, told = cluster_server(monkeypatch, PlayedElsewhere(first))
    comes(server, group="a", wish=wish)
    assert told == [(first, is_late)]
    ended(server)


def test_who_has_left_before_another_one_comes_is_not_at_work_whatever_it_has_not_been_heard_of(tmp_path):
    path = str(tmp_path / "s")
    listener = new_socket()
    listener.bind(path)
    listener.listen()
    source = kind_of(DataLoader(range(64), num_workers=1))
    server = Server(listener, source, seed=0, data_print={"data set": "range of 64"}, window_bytes=8192, linger_seconds=0.2)
    hello = {**HELLO, "print": {"data set": "range of 64"}, "wait_for": 1}
    thread = threading.Thread(target=server.run)
    first, second = new_socket(), new_socket()
    for connection in (first, second):
        connection.settimeout(15)
        connection.connect(path)
    send(first, {"hello": hello})
    thread.start()
    welcome, descriptors = receive(first)
    assert welcome["welcome"]["place"] == 0
    for item in range(1, 60):
        send(first, {"at": item, "need": 0})
    first.shutdown(socket.SHUT_RDWR)  # the forked worker holds the socket open
    first.close()
    send(second, {"hello": {**hello, "group": "another"}})
    welcome, more = receive(second)
    second.shutdown(socket.SHUT_RDWR)
    second.close()
    thread.join(30)
    for descriptor in (*descriptors, *more):
        os.close(descriptor)
    assert (welcome["welcome"]["place"], welcome["welcome"]["others"]) == (0, 0)
