"""The reader's side of the socket: what a peer sends ends its own connection at most; who enters where and waits for whom."""

import fcntl
import json
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.config import Gone, new_socket, receive, send
from lightning_echo.share.parts import Wanted
from lightning_echo.share.places import HOLD_SECONDS, Agreement, Training, Trainings
from lightning_echo.share.server import CannotBegin, Server
from lightning_echo.share.window import CacheState

HELLO = {
    **{"label": "test", "behind": "wait", "join": "now", "wait_for": 2, "wait_seconds": 600, "wish": None},  # nothing is read
    **{"late": 0.1, "goes_on": False, "group": "g", "ranks": 1, "workers": 1, "fingerprint": {"data set": "range of 8"}},
}


def listening(path, length):
    listener = new_socket()
    listener.bind(path)
    listener.listen()
    options = {"data_fingerprint": {"data set": f"range of {length}"}, "window_bytes": 8192, "linger_seconds": 0.2}
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
    send(keeper, hello(group="keeper"))
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


def hello(**changed):
    return {"hello": {**HELLO, "lacks_from": None, "expected": 0, **changed}}


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
        [hello(goes_on=True, lacks_from=-1)],
        [hello(goes_on=True, lacks_from="0")],
        [hello(goes_on=True, expected=-1)],
        [hello(fingerprint=7)],
        [hello(fingerprint={"data set": 1.5})],
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


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def memory(data, seals=SEALS):
    """The descriptor of a memfd, as a part of a data set travels: of 8 examples in one byte."""
    descriptor = os.memfd_create("part", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def pipe():
    here, there = os.pipe()
    os.close(there)
    return here


DESCRIPTORS = {
    "a pipe": lambda: [pipe()],
    "a device that never ends": lambda: [os.open("/dev/zero", os.O_RDONLY)],
    "a folder": lambda: [os.open("/", os.O_RDONLY)],
    "memory that can change": lambda: [memory(b"\1", SEALS & ~fcntl.F_SEAL_WRITE)],
    "too much": lambda: [memory(b"\1\0")],
    "too little": lambda: [memory(b"")],
    "no example": lambda: [memory(b"\0")],
    "two": lambda: [memory(b"\1"), memory(b"\1")],
    "three": lambda: [memory(b"\1"), memory(b"\1"), memory(b"\1")],
}


def send_with(connection, message, descriptors):
    """Sends a message with descriptors, and closes them here. Returns what they are of."""
    try:
        socket.send_fds(connection, [message], descriptors)
        return {os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def are_closed(files):
    """Waits until no descriptor of these files is open in this process, in which the server is."""

    def open_files():
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # closed just now
                yield os.readlink(f"/proc/self/fd/{descriptor}")

    end = time.monotonic() + 10
    while left := files & set(open_files()):
        assert time.monotonic() < end, left
        time.sleep(0.01)


@pytest.mark.parametrize("what", DESCRIPTORS)
def test_a_descriptor_that_is_not_of_a_part_ends_the_connection_that_it_came_over_and_is_closed(path, what):
    with connected(path) as connection:
        files = send_with(connection, json.dumps(hello(wait_for=10)).encode(), DESCRIPTORS[what]())
        with pytest.raises(Gone):
            receive(connection)
    assert files
    are_closed(files)
    assert status(path)["count"] == 1


def test_the_descriptor_of_a_part_is_closed_as_soon_as_it_was_read_and_one_that_is_of_no_use_too(path):
    with connected(path) as connection:
        files = send_with(connection, json.dumps(hello(wait_for=10)).encode(), [memory(b"\x0f")])
        files |= send_with(connection, b'{"status": 1}', [memory(b"\1")])
        assert sorted(one["share"] for one in receive(connection)[0]["status"]["trainings"]) == [0.5, 1.0]
        are_closed(files)


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
@given(st.lists(st.tuples(bad, st.none() | st.tuples(st.binary(max_size=2), st.integers(0, SEALS))), min_size=1, max_size=50))
def test_random_messages_end_nothing_but_their_connection(path, messages):
    files = set()
    with connected(path) as connection, suppress(BrokenPipeError, ConnectionResetError):
        for message, part in messages:
            files |= send_with(connection, message, [] if part is None else [memory(*part)])
    end = time.monotonic() + 10
    while status(path)["count"] != 1:
        assert time.monotonic() < end
    are_closed(files)


@pytest.fixture
def idle_server():
    """Makes servers that listen to nobody and read nothing."""
    made = []

    def make(**options):
        data = {"data_fingerprint": {}, "window_bytes": 8192, "linger_seconds": 0.2}
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
    server._reading = SimpleNamespace(window=window_from(0), cache_state=CacheState(), close=lambda: None)
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


def test_a_training_of_a_dead_reader_that_has_come_and_has_not_entered_yet_loses_nothing(idle_server):
    """Others have taken more meanwhile: what they do not need any more is what it needs first."""
    server = idle_server(expected=2)
    server._reading = SimpleNamespace(window=window_from(0), cache_state=CacheState(), close=lambda: None)
    comes(server, group="a", goes_on=True).cursor = 9
    late = comes(server, group="b", goes_on=True, wish=4)
    assert low_of(server) == 0
    late.cursor, late.ranks = 4, 3
    assert low_of(server) == 4
    assert server._reading.window.ranks == 3, "what they take at once must have room there"


@pytest.mark.parametrize("has_entered", [True, False])
def test_the_next_reader_finds_the_socket_of_one_that_failed_if_trainings_go_on(idle_server, has_entered):
    """It must begin where they are, whoever comes first. If none has entered, nobody goes on."""
    removed = []
    server = idle_server(when_over=lambda: removed.append("socket"))
    comes(server, group="a").cursor = 9 if has_entered else None
    server._say_why(RuntimeError("a worker has died"))
    server._let_nobody_come()
    assert removed == ([] if has_entered else ["socket"])
    assert server._listener.fileno() == -1, "nobody comes any more"


def test_what_a_training_of_a_dead_reader_needs_is_kept_until_it_has_entered(idle_server):
    """Between its hello and its entry, the reader hears from others."""
    server = idle_server(expected=2)
    server._reading = SimpleNamespace(window=window_from(3), cache_state=CacheState(), close=lambda: None)
    comes(server, group="a", goes_on=True).cursor = 5
    other = comes(server, group="b", goes_on=True, wish=3)
    assert low_of(server) == 3
    (entry,) = server._trainings.entries(3, 3)
    assert (entry.place, entry.is_late) == (3, False)
    other.cursor = 4
    assert low_of(server) == 4


@pytest.mark.parametrize(("expected", "everything"), [(1, False), (2, True)])
def test_a_reader_that_follows_a_dead_one_reads_what_its_trainings_want_as_soon_as_all_have_come(
    idle_server, monkeypatch, expected, everything
):
    """What nobody wants may be what has killed the reader before."""
    server, wanted = idle_server(follows=True, expected=expected), Wanted(0)
    window = window_from(0)
    monkeypatch.setattr(server, "_reading", SimpleNamespace(window=window, wanted=wanted, cache_state=CacheState(), close=int))
    comes(server, group="a", goes_on=True, wish=2, part=np.array([0b00001111], np.uint8))
    server._settle()
    assert wanted.settle(8, range(8)) == [everything or index < 4 for index in range(8)]
    assert window.read_in_pass == (8 if everything else 4)


def test_a_reader_that_follows_a_dead_one_waits_for_all_ranks_of_a_training_before_it_begins(idle_server, monkeypatch):
    """One of them may need an earlier item than the others who have come."""
    server, begun = idle_server(follows=True, expected=2), []
    monkeypatch.setattr(server, "_begin", begun.append)
    comes(server, group="a", wish=9, goes_on=True)
    comes(server, group="b", wish=8, goes_on=True).ranks = 2
    server._let_enter()
    assert begun == []
    comes(server, group="b", wish=8, goes_on=True).ranks = 2
    server._let_enter()
    assert begun == [8]


def test_what_another_node_reads_is_everything_and_its_trainings_take_it_too(idle_server, monkeypatch):
    server = idle_server(elsewhere=SimpleNamespace(nodes=2, leave=int))
    window = window_from(0)
    monkeypatch.setattr(server, "_reading", SimpleNamespace(window=window, wanted=None, cache_state=CacheState(), close=int))
    comes(server, group="a", part=np.array([0b00001111], np.uint8), share=0.5).cursor = 0
    server._settle()
    server._move_low()
    assert (window.read_in_pass, window.taken_in_pass) == (8, 20)


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


@pytest.mark.parametrize(("length", "said"), [(64, "welcome"), (32, "over")])  # over: the training starts a reader of its data
def test_who_has_left_before_another_one_comes_is_not_at_work_whatever_is_still_unheard(tmp_path, length, said):
    path = str(tmp_path / "s")
    thread = threading.Thread(target=listening(path, 64).run)
    first, second = connected(path), connected(path)
    first_hello = hello(fingerprint={"data set": "range of 64"}, wait_for=1)
    send(first, first_hello)
    thread.start()
    welcome, descriptors = receive(first)
    assert welcome["welcome"]["place"] == 0
    for item in range(1, 60):
        send(first, {"at": item, "need": 0})
    first.shutdown(socket.SHUT_RDWR)  # the forked worker holds the socket open
    first.close()
    send(second, {"hello": {**first_hello["hello"], "group": "another", "fingerprint": {"data set": f"range of {length}"}}})
    answer, more = receive(second)
    second.shutdown(socket.SHUT_RDWR)
    second.close()
    thread.join(30)
    for descriptor in (*descriptors, *more):
        os.close(descriptor)
    assert list(answer) == [said]
    assert said == "over" or (answer["welcome"]["place"], answer["welcome"]["others"]) == (0, 0)


def training(**options):
    defaults = {"pid": 1, "label": "one", "behind": "wait", "join": "now", "wait_for": 1, "wish": None}
    return Training(**{**defaults, "goes_on": False, "group": str(id(object())) + str(len(options)), "ranks": 1, **options})


def come(trainings, begin=0, low=0, **options):
    """Lets a training come; returns its entry, or None if it waits."""
    trainings.all.append(training(group=f"g{len(trainings.all)}", **options))
    return next((one for one in trainings.entries(begin, low) if one.training is trainings.all[-1]), None)


@pytest.mark.parametrize(
    ("join", "wish", "goes_on", "place", "is_late"),
    [
        ("now", None, False, 130, True),  # where the fastest is
        ("pass", None, False, 200, True),  # or at the next pass
        # One that stood somewhere continues there, if that is in the window.
        *[("now", 60, False, 60, False), ("now", 40, False, 130, True), ("now", 150, False, 130, True)],
        *[("now", 150, True, 150, False), ("now", 40, True, 50, True)],
    ],
)
def test_where_one_enters_that_comes_when_others_are_at_work(join, wish, goes_on, place, is_late):
    trainings = Trainings(100)
    come(trainings).training.cursor = 130
    come(trainings).training.cursor = 50
    entry = come(trainings, low=50, join=join, wish=wish, goes_on=goes_on)
    assert (entry.place, entry.others, entry.is_late) == (place, 2, is_late)


@pytest.mark.parametrize(("join", "place"), [("now", 130), ("pass", 200)])
def test_one_that_comes_with_or_after_those_of_a_dead_reader_finds_them_at_work(join, place):
    trainings = Trainings(100)
    come(trainings, begin=130, low=130, wish=130, goes_on=True)
    entry = come(trainings, begin=130, low=130, join=join)
    assert (entry.place, entry.is_late) == (place, True), "though nothing was taken"
    trainings = Trainings(100)
    trainings.all += [training(group="new", join=join), training(group="old", wish=130, goes_on=True)]
    assert trainings.begin_at(0.0) == 130
    old, new = trainings.entries(130, 130)
    assert (old.training.group, old.place, old.is_late, old.others) == ("old", 130, False, 0)
    assert (new.training.group, new.place, new.is_late, new.others) == ("new", place, True, 1)


@pytest.mark.parametrize("behind", ["wait", "skip"])
def test_one_that_waits_for_the_next_pass_is_not_the_fastest(behind):
    trainings = Trainings(100)
    come(trainings, behind=behind)
    at_work = trainings.all[0]
    at_work.cursor = 20
    assert come(trainings, low=20, join="pass").place == 100
    assert trainings.low(0, 0.0) == 20, "what the one at work takes is kept, though it alone would skip"
    assert come(trainings, low=20).place == 20
    trainings.all.pop()
    at_work.cursor = 120
    assert trainings.low(20, 0.0) == 100, "the other one is waited for"


def test_those_of_a_dead_reader_have_begun_although_they_have_taken_nothing_here():
    trainings = Trainings(1000)
    come(trainings, wish=700, goes_on=True, begin=100, low=100)
    come(trainings, wish=100, goes_on=True, begin=100, low=100)
    assert come(trainings, begin=100, low=100).place == 700, "where the fastest one is"


def test_ranks_enter_together():
    trainings = Trainings(100)
    trainings.all.append(training(group="a", ranks=2))
    assert trainings.begin_at(0.0) is None
    assert trainings.entries(0, 0) == []
    trainings.all.append(training(group="a", ranks=2))
    assert [entry.place for entry in trainings.entries(0, 0)] == [0, 0]
    assert trainings.count == 1


@given(st.lists(st.tuples(st.sampled_from(["wait", "skip"]), st.integers(0, 100)), max_size=6), st.integers(0, 50))
def test_low_is_that_of_the_slowest_that_is_waited_for_and_never_falls(cursors, before):
    trainings = Trainings(100)
    trainings.all = [training(behind=behind, group=str(number)) for number, (behind, _) in enumerate(cursors)]
    for one, (_, cursor) in zip(trainings.all, cursors, strict=True):
        one.cursor = cursor
    waited_for = [cursor for behind, cursor in cursors if behind == "wait"]
    low = trainings.low(before, 0.0)
    if waited_for:
        assert low == max(before, min(waited_for))
        assert trainings.slowest().cursor == min(waited_for)
    else:
        assert low == max([before, *(cursor for _, cursor in cursors)])
        assert trainings.slowest() is None


class Rank:
    """Asks for one round after the other, and goes where it is told."""

    def __init__(self, agreement, block):
        self.agreement, self.block = agreement, block
        self.next = self.until = 0
        self.taken = []

    def step(self, low):
        if self.next >= self.until:
            is_jump, item = self.agreement.answer(self.next, self.next + self.block, low, 0.0)
            if is_jump:
                self.next = item
                return
            self.until = item
        self.taken.append(self.next)
        self.next += 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=200), st.integers(1, 9))
def test_all_ranks_take_the_same_rounds(moves, block):
    agreement, low = Agreement(), 0
    ranks = [Rank(agreement, block) for _ in range(3)]
    for number, step in moves:
        low += step if step > 20 else 0  # the window moves on now and then
        ranks[number].step(low)
        agreement.forget(min(rank.next for rank in ranks))
    longest = max((rank.taken for rank in ranks), key=len)
    for rank in ranks:
        assert rank.taken == longest[: len(rank.taken)]
    assert longest == sorted(set(longest))


def test_what_was_agreed_on_is_held_for_the_slowest_for_a_moment_and_what_all_have_jumped_over_forgotten():
    agreement = Agreement()
    assert agreement.held_from(0, 0.0) is None
    agreement.answer(0, 8, 0, now=1.0)
    assert agreement.held_from(3, 1.0) == 3
    assert agreement.held_from(8, 1.0) is None
    assert agreement.held_from(3, 1.0 + HOLD_SECONDS) is None
    agreement = Agreement()
    agreement.answer(0, 8, low=20, now=0.0)
    assert agreement.answer(4, 8, low=50, now=0.0) == (True, 20)
    agreement.forget(20)
    assert agreement.answer(4, 8, low=50, now=0.0) == (True, 50)


@pytest.mark.parametrize(("has_lost", "kind"), [(True, RuntimeError), (False, CannotBegin)])
def test_a_workers_death_that_is_told_while_a_training_enters_keeps_nobody_out(idle_server, monkeypatch, has_lost, kind):
    """torch raises its error in the main thread, wherever that is."""
    server = idle_server()

    def enter():
        raise RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. ")

    monkeypatch.setattr(server, "_let_enter", enter)
    monkeypatch.setattr(server, "_reading", SimpleNamespace(has_lost_worker=lambda: has_lost, close=lambda: None))
    with pytest.raises(kind, match="is killed by signal") as found:
        server._let_enter_or_fail()
    assert type(found.value) is kind


def test_a_worker_that_dies_while_it_is_started_keeps_nobody_out(idle_server, monkeypatch):
    server = idle_server()

    def dies():
        raise RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. ")

    dying = SimpleNamespace(want=int, start=dies, has_lost_worker=lambda: True, close=int, wanted=None, window=window_from(64))
    monkeypatch.setattr(server, "_read", lambda *_: dying)
    monkeypatch.setattr(server, "_let_enter", lambda: server._begin(64))
    with pytest.raises(RuntimeError, match="is killed by signal") as found:
        server._let_enter_or_fail()
    assert type(found.value) is RuntimeError


@pytest.mark.parametrize("knows_place", [False, True])
def test_a_training_that_does_not_know_its_place_hears_that_another_reader_follows(idle_server, monkeypatch, knows_place):
    """It has entered, but the worker died before it was told so."""
    server, said = idle_server(), []
    monkeypatch.setattr(server, "_peers", {1: SimpleNamespace(knows_place=knows_place, training=SimpleNamespace(cursor=3))})
    monkeypatch.setattr(server, "_reading", SimpleNamespace(lost_at=lambda: 3, close=lambda: None))
    monkeypatch.setattr(server, "_try_to_send", lambda peer, message: said.append(message))
    server._say_why(RuntimeError("killed"))
    assert said == [{"failed": "killed", "at": 3} if knows_place else {"over": "killed", "at": 3}]


def test_a_reader_that_follows_waits_a_moment_for_those_that_need_earlier_items(idle_server, monkeypatch):
    """One that came late, and was catching up when the reader died, may be much further back than the others."""
    server, begun = idle_server(expected=2), []
    monkeypatch.setattr(server, "_begin", lambda item: begun.append(item))
    comes(server, group="far", wish=7, goes_on=True)
    server._let_enter()
    assert begun == []
    comes(server, group="back", wish=1, goes_on=True)
    server._let_enter()
    assert begun == [1]
    server._trainings.all.pop()
    server._begun -= 60  # the other one does not come any more
    server._let_enter()
    assert begun == [1, 7]


@pytest.mark.parametrize("place", [0, 37])
def test_the_first_one_enters_at_the_start_or_where_it_wishes_and_before_anything_was_taken_nobody_is_late(place):
    trainings = Trainings(100)
    trainings.all.append(training(wish=place or None))
    assert trainings.begin_at(0.0) == place
    (entry,) = trainings.entries(place, place)
    assert (entry.place, entry.others, entry.is_late) == (place, 0, False)
    assert come(trainings, begin=place, low=place, wish=place).is_late is False
    assert come(trainings, begin=place, low=place).is_late is (place > 0), "within a pass the reader follows a dead one"
