"""The reader's side of the socket: whatever a peer sends ends its own connection at most; who waits for whom after a death."""

import json
import os
import re
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.config import Gone, new_socket, receive, send
from lightning_echo.share.server import CannotBegin, Server, Training

HELLO = {
    **{"label": "test", "behind": "wait", "join": "now", "wait_for": 2, "wait_seconds": 600, "wish": None},  # nothing is read
    **{"goes_on": False, "group": "g", "ranks": 1, "print": {"data set": "range of 8"}},
}


def listening(path, length):
    listener = new_socket()
    listener.bind(path)
    listener.listen()
    options = {"data_print": {"data set": f"range of {length}"}, "window_bytes": 8192, "linger_seconds": 0.2}
    return Server(listener, kind_of(DataLoader(range(length), num_workers=1)), seed=0, **options)


def connected(path):
    connection = new_socket()
    connection.settimeout(15)
    connection.connect(path)
    return connection


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "s")
    server, failures = listening(path, 8), []

    def run():
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    keeper = connected(path)
    thread.start()
    send(keeper, {"hello": {**HELLO, "group": "keeper"}})
    yield path
    assert thread.is_alive(), "what peers sent has ended the reader"
    keeper.close()
    thread.join(10)
    assert not thread.is_alive()
    assert failures == []


def status(path):
    with connected(path) as connection:
        send(connection, {"status": 1})
        return receive(connection)[0]["status"]


def test_it_says_who_is_there(path):
    said = status(path)
    assert (said["count"], said["length"], said["data"]) == (1, 8, "range of 8")
    assert said["trainings"] == [{"pid": said["pid"], "label": "test", "behind": "wait", "at": None}]


def hello(**changed):
    return {"hello": {**HELLO, **changed}}


ASK = {"ask": {"round": 0, "end": 8, "need": 0}}


@pytest.mark.parametrize(
    "messages",
    [
        [b"{"],
        [b"[]"],
        [{"unknown": 1}],
        [{"at": 1}],
        [{"ask": 1}],
        [ASK],
        [hello(wait_for=10), ASK],
        [{"hello": 1}],
        [{"hello": {}}],
        [hello(behind="hurry")],
        [hello(wait_for=-1)],
        [hello(wish=2**70)],
        [hello(wish=1.5)],
        [hello(print=7)],
        [hello(print={"data set": 1.5})],
        [hello(wait_seconds=10**400)],
        [hello(wait_seconds=float("inf"))],
        [hello(wait_for=10), hello()],
        [hello(wait_for=10), {"at": 3}],
    ],
    ids=str,
)
def test_a_wrong_message_ends_the_connection_that_it_came_over(path, messages):
    with connected(path) as connection:
        with suppress(BrokenPipeError):
            for message in messages:
                connection.send(message if isinstance(message, bytes) else json.dumps(message).encode())
        with pytest.raises(Gone):
            deque(iter(lambda: receive(connection), None))
    assert status(path)["count"] == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
near_hello = {name: json_values | st.just(value) for name, value in hello(wait_for=9)["hello"].items()}
one_field = [st.fixed_dictionaries({name: json_values}) for name in ("at", "ask")]
of_hello = st.fixed_dictionaries({"hello": st.fixed_dictionaries({}, optional=near_hello)})
bad = st.binary(min_size=1, max_size=300) | st.one_of(json_values, of_hello, *one_field).map(
    lambda value: json.dumps(value).encode()
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(bad, min_size=1, max_size=50))
def test_random_messages_end_nothing_but_their_connection(path, messages):
    with connected(path) as connection, suppress(BrokenPipeError, ConnectionResetError):
        for message in messages:
            connection.send(message)
    end = time.monotonic() + 10
    while status(path)["count"] != 1:
        assert time.monotonic() < end


def test_other_data_is_refused_with_what_differs(path):
    with connected(path) as connection:
        send(connection, hello(print={"data set": "range of 9"}))
        message, _ = receive(connection)
        assert message["refused"] == "data set: range of 9 and range of 8"
        assert re.fullmatch(rf"process {os.getpid()}, started \d+ s ago by serve", message["whose"])
        with pytest.raises((Gone, socket.timeout)):
            receive(connection)


@pytest.fixture
def idle_server():
    """Makes servers that listen to nobody and read nothing."""
    made = []

    def make(**options):
        data = {"data_print": {}, "window_bytes": 8192, "linger_seconds": 0.2}
        made.append(Server(new_socket(), kind_of(DataLoader(range(8), num_workers=1)), seed=0, **data, **options))
        return made[-1]

    yield make
    for server in made:
        server._peers.clear()  # they have no connections
        server.close()


def comes(server, **options):
    defaults = {"pid": 1, "label": "", "behind": "wait", "join": "now", "wait_for": 1, "wish": None, "goes_on": False, "ranks": 1}
    server._trainings.all.append(Training(**{**defaults, **options}))
    return server._trainings.all[-1]


def window_from(item):
    return SimpleNamespace(begin=item, low=item, trainings=0, slowest_need_nanoseconds=0, slowest_label="")


def low_of(server):
    server._move_low()
    return server._reading.window.low


@pytest.mark.parametrize("knows_count", [True, False])
def test_after_a_reader_has_died_nothing_is_overwritten_until_its_trainings_are_back(idle_server, knows_count):
    """A reader that a new training has started cannot know how many the dead one had: for a moment."""
    server = idle_server(**({"expected": 2} if knows_count else {"follows": True}))
    server._reading = SimpleNamespace(window=window_from(0), close=lambda: None)
    comes(server, group="a", goes_on=True).cursor = 5
    assert low_of(server) == 0
    new = comes(server, group="c")  # it counts for none of them
    new.cursor = 7
    assert low_of(server) == 0
    if knows_count:
        server._trainings.all.remove(new)
        comes(server, group="b", goes_on=True).cursor = 4
        assert (low_of(server), server._reading.window.trainings) == (4, 2)
        server._trainings.all.pop()  # from now on it may leave as any other
    else:
        server._begun -= 60
    assert low_of(server) == 5


def test_a_reader_that_follows_a_dead_one_lets_nobody_in_before_its_trainings(idle_server, monkeypatch):
    """A new training would begin at the start, and those of the dead reader would wait until all before them was read again."""
    server, begun = idle_server(follows=True), []

    class Begun(Exception):
        pass

    def begin(item):
        begun.append(item)
        raise Begun

    monkeypatch.setattr(server, "_begin", begin)
    comes(server, group="new")
    server._let_enter()
    assert begun == []
    comes(server, group="old", wish=40, goes_on=True)
    with pytest.raises(Begun):
        server._let_enter()
    server._trainings.all.pop()
    server._begun -= 60  # nobody has come
    with pytest.raises(Begun):
        server._let_enter()
    assert begun == [40, 0]


@pytest.mark.parametrize(("lost_at", "kind"), [(7, RuntimeError), (None, CannotBegin)])
def test_a_workers_death_that_is_told_while_a_training_enters_keeps_nobody_out(idle_server, monkeypatch, lost_at, kind):
    """torch raises its error in the main thread, wherever that is."""
    server = idle_server()

    def enter():
        raise RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. ")

    monkeypatch.setattr(server, "_let_enter", enter)
    monkeypatch.setattr(server, "_reading", SimpleNamespace(lost_at=lambda: lost_at, close=lambda: None))
    with pytest.raises(kind, match="is killed by signal") as found:
        server._let_enter_or_fail()
    assert type(found.value) is kind


@pytest.mark.parametrize("knows_place", [False, True])
def test_a_training_that_does_not_know_its_place_hears_that_another_reader_follows(idle_server, monkeypatch, knows_place):
    """It has entered, but the worker died before it was told so."""
    server, said = idle_server(), []
    monkeypatch.setattr(server, "_peers", {1: SimpleNamespace(knows_place=knows_place, training=SimpleNamespace(cursor=3))})
    monkeypatch.setattr(server, "_reading", SimpleNamespace(lost_at=lambda: 3, close=lambda: None))
    monkeypatch.setattr(server, "_try_to_send", lambda peer, message: said.append(message))
    server._say_why(RuntimeError("killed"))
    assert said == [{"failed": "killed", "at": 3} if knows_place else {"over": "killed", "at": 3}]


class PlayedElsewhere:
    """Another node whose examples begin at an item, or at the one that is wished for."""

    nodes = 1

    def __init__(self, first=None):
        self.first, self.starts = first, []

    def begin(self, start, read_here, when_lost):
        self.starts.append(start.item)
        window = window_from(start.item if self.first is None else self.first)
        return SimpleNamespace(window=window, close=lambda: None)

    def leave(self):
        pass


def enters(server, **training):
    server._peers[len(server._peers)] = SimpleNamespace(training=comes(server, **training))
    server._let_enter()


@pytest.mark.parametrize("how_many", [1, 2])
def test_a_reader_over_a_cluster_waits_for_all_that_a_dead_one_had(idle_server, monkeypatch, how_many):
    server = idle_server(follows=True, expected=2, gather_seconds=20.0)
    elsewhere = server._elsewhere = PlayedElsewhere()
    monkeypatch.setattr(server, "_tell_place", lambda *args: None)
    enters(server, group="a", wish=40, goes_on=True)
    assert elsewhere.starts == [], "another one is missing"
    if how_many == 2:
        enters(server, group="b", wish=25, goes_on=True)
    else:
        server._begun -= 30  # it does not come
        server._let_enter()
    assert elsewhere.starts == [25 if how_many == 2 else 40], "the earliest item"


@pytest.mark.parametrize(("wish", "first", "is_late"), [(None, 30, True), (None, 0, False), (30, 30, False), (20, 30, True)])
def test_who_enters_after_what_another_node_has_fetched_is_told_so(idle_server, monkeypatch, wish, first, is_late):
    server, told = idle_server(), []
    server._elsewhere = PlayedElsewhere(first)
    monkeypatch.setattr(server, "_tell_place", lambda peer, reading, place, others, is_late: told.append((place, is_late)))
    enters(server, group="a", wish=wish)
    assert told == [(first, is_late)]


def test_who_has_left_before_another_one_comes_is_not_at_work_whatever_is_still_unheard(tmp_path):
    path = str(tmp_path / "s")
    thread = threading.Thread(target=listening(path, 64).run)
    first, second = connected(path), connected(path)
    first_hello = hello(print={"data set": "range of 64"}, wait_for=1)
    send(first, first_hello)
    thread.start()
    welcome, descriptors = receive(first)
    assert welcome["welcome"]["place"] == 0
    for item in range(1, 60):
        send(first, {"at": item, "need": 0})
    first.shutdown(socket.SHUT_RDWR)  # the forked worker holds the socket open
    first.close()
    send(second, {"hello": {**first_hello["hello"], "group": "another"}})
    welcome, more = receive(second)
    second.shutdown(socket.SHUT_RDWR)
    second.close()
    thread.join(30)
    for descriptor in (*descriptors, *more):
        os.close(descriptor)
    assert (welcome["welcome"]["place"], welcome["welcome"]["others"]) == (0, 0)
