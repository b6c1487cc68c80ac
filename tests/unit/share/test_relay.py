"""A relay beside a node that is played by the test, and what the actor runs there, called as Ray would call it."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import ray as handing
from lightning_echo.share.packing import ERROR, HELD, Chunk, ChunkError, Piece, unpack
from lightning_echo.share.process import ReaderError, run_reader
from lightning_echo.share.ray import FarLost, Handing, Relay
from lightning_echo.share.server import Start
from lightning_echo.share.sharing import status_of
from lightning_echo.share.window import CacheState

DEADLINE_SECONDS = 20
FRESH = Start(0, False, "now")


class PlayedFar:
    def __init__(self, *chunks, fails_after=None):
        self.chunks, self.fails_after = list(chunks), fails_after
        self.entered, self.left, self.asked, self.needed, self.needs = [], [], 0, 0, []

    def enter(self, relay, start):
        self.entered.append((relay, start))

    def ask(self, relay, needed):
        assert relay == self.entered[0][0]
        assert needed >= self.needed
        self.asked, self.needed = self.asked + 1, needed
        return self.asked

    def chunk(self, asked):
        assert asked == self.asked, "one request at a time"
        if self.fails_after is not None and self.asked > self.fails_after:
            raise FarLost("it is gone")
        if self.chunks:
            return self.chunks.pop(0)
        time.sleep(0.01)
        return Chunk(0, [])

    def stay(self, relay, need_nanoseconds):
        self.needs.append(need_nanoseconds)
        return 3, CacheState(7, 700, 1000, 0, 2)

    def leave(self, relay):
        self.left.append(relay)


def chunk(first, count, size=10):
    return Chunk(first, [Piece(0, bytes([item]) * size) for item in range(first, first + count)], 2000, 500)


def until(holds):
    end = time.monotonic() + DEADLINE_SECONDS
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.002)
    return found


class Here:
    closed = False
    window = None

    def close(self):
        self.closed = True


@contextmanager
def relaying(far, start=FRESH, window_bytes=2**14):
    """Gives the relay, a function that returns what it reads with, and what was lost."""
    lost, said, here = [], [], Here()
    relay = Relay(far, window_bytes, said.append)
    try:
        yield relay, lambda: relay.begin(start, lambda: here, lost.append), lost, said, here
    finally:
        relay.leave()
    assert [thread.name for thread in threading.enumerate() if "relay" in thread.name] == []


def test_what_comes_is_in_the_window_at_its_items():
    far = PlayedFar(Chunk(0, []), chunk(5, 3), chunk(8, 2))
    with relaying(far) as (relay, begin, lost, _, _):
        reads = until(begin)
        window = reads.window
        until(lambda: window.has(9))
        assert window.begin == 5
        assert [window.copy(item) for item in range(5, 10)] == [(0, bytearray([item]) * 10) for item in range(5, 10)]
        assert window.seconds_per_example == pytest.approx(2e-6)
        assert window.cpu_seconds_per_example == pytest.approx(5e-7)
        until(lambda: relay.nodes == 3)
        until(lambda: far.needed == 10)
        assert lost == []
        ((name, start),) = far.entered
        assert start == FRESH
    assert far.left == [name]


def test_what_the_cache_of_the_other_node_held_and_holds_is_in_the_window():
    far = PlayedFar(Chunk.from_array(Chunk(0, [Piece(HELD, b"a"), Piece(0, b"b")]).to_array()))
    with relaying(far) as (_, begin, _, _, _):
        reads = until(begin)
        until(lambda: reads.window.has(1))
        assert [reads.window.copy(item) for item in (0, 1)] == [(HELD, bytearray(b"a")), (0, bytearray(b"b"))]
        assert reads.window.cache == reads.cache_state == CacheState(7, 700, 1000, 0, 2)


@pytest.mark.parametrize(
    ("far", "message"),
    [
        (PlayedFar(chunk(0, 2), fails_after=1), "it is gone"),
        (PlayedFar(chunk(0, 2), chunk(3, 1)), "examples are missing: after 1 came 3"),
    ],
    ids=["lost", "missing"],
)
def test_a_node_that_is_lost_ends_it_with_the_reason(far, message):
    with relaying(far) as (_, begin, lost, _, _):
        until(begin)
        (error,) = until(lambda: lost)
        assert isinstance(error, FarLost)
        assert str(error) == message


def test_who_goes_on_and_comes_too_late_reads_for_itself_and_who_is_new_enters_where_the_others_are():
    far = PlayedFar(chunk(12, 4))
    with relaying(far, Start(10, True, "now")) as (relay, begin, _, said, here):
        assert until(begin) is here
        assert said == ["this node needs item 10, and the other one has items from 12 on: it reads for itself"]
        assert relay.nodes == 0
        assert len(far.left) == 1
    with relaying(PlayedFar(chunk(12, 4))) as (_, begin, _, said, here):
        assert until(begin) is not here
        assert said == []


def test_an_example_that_is_larger_than_this_window_is_an_error_at_its_item():
    with relaying(PlayedFar(chunk(0, 1, size=5000), chunk(1, 1)), window_bytes=4096) as (_, begin, lost, _, _):
        window = until(begin).window
        until(lambda: window.has(1))
        kind, data = window.copy(0)
        assert kind == ERROR
        with pytest.raises(Exception, match=r"give share\.window more"):
            unpack(kind, data)
        assert lost == []


pieces = st.lists(st.builds(Piece, st.integers(0, 255), st.binary(max_size=40)), max_size=6)


@given(first=st.integers(0, 2**62), given=pieces, nanoseconds=st.integers(0, 2**62), cpu=st.integers(0, 2**62))
def test_what_goes_in_comes_out(first, given, nanoseconds, cpu):
    array = Chunk(first, given, nanoseconds, cpu).to_array()
    assert array.dtype == np.uint8
    found = Chunk.from_array(array)
    assert (found.first, found.nanoseconds, found.cpu_nanoseconds) == (first, nanoseconds, cpu)
    assert [(kind, bytes(data)) for kind, data in found.pieces] == [tuple(piece) for piece in given]


def test_what_is_no_chunk_is_refused():
    array = Chunk(3, [Piece(0, b"abc"), Piece(1, b"de")]).to_array()
    for end in range(len(array)):
        with pytest.raises(ChunkError, match="chunk"):
            Chunk.from_array(array[:end])
    with pytest.raises(ChunkError, match="says that its examples have 5 bytes, and they have 6"):
        Chunk.from_array(np.concatenate([array[:1], array]))


LENGTH = 50
PRINT = {"data set": "numbers"}


@pytest.fixture
def own_folder(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))


@pytest.fixture
def reader(own_folder):
    """A reader of 50 numbers in the order of their indices, whose window holds a few of them."""
    source, failures, ready = kind_of(DataLoader(range(LENGTH), num_workers=1)), [], threading.Event()

    def run():
        try:
            options = {"data_fingerprint": PRINT, "window_bytes": 4096, "linger_seconds": 0.2, "when_ready": ready.set}
            run_reader("n", source, **options)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(DEADLINE_SECONDS)
    yield
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert failures == []


def asked_for(actor, relay, needed=0):
    """The examples that a relay is given when it asks, with their items."""
    first, pieces, _, _ = Chunk.from_array(actor.take(relay, needed))
    return [(first + place, unpack(kind, bytearray(data))) for place, (kind, data) in enumerate(pieces)]


def taken(actor, relay, count):
    """So many examples of a relay or more; it needs all of them."""
    found = []
    until(lambda: found.extend(asked_for(actor, relay)) or len(found) >= count)
    return found


def test_each_relay_has_each_item_once_and_in_order(reader):
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    try:
        for relay in "ab":
            actor.enter(relay, f"node {relay}", 0, False, "now")
        found = {"a": [], "b": []}
        until(lambda: status_of("n")["count"] == 2)
        # Each relay connects in a thread of its own, so either may be first.
        assert sorted(one["label"] for one in status_of("n")["trainings"]) == ["node a", "node b"]

        def ask_both():
            for relay, items in found.items():
                items += asked_for(actor, relay, len(items))
            return min(map(len, found.values())) >= 2 * LENGTH

        until(ask_both)
        for items in found.values():
            assert [item for item, _ in items] == list(range(len(items)))
            assert [value for _, value in items] == [item % LENGTH for item, _ in items]
        assert actor.stay("a", 0) == (1, CacheState()), "the other relay: no training of this node"
    finally:
        actor.leave("a")
        actor.leave("b")


def test_a_relay_that_says_nothing_is_let_go(reader, monkeypatch):
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    actor.enter("a", "node a", 0, False, "now")
    taken(actor, "a", 1)
    monkeypatch.setattr(handing, "MOST_SILENT_SECONDS", 0.3)
    until(lambda: (status_of("n") or {"count": 0})["count"] == 0)
    with pytest.raises(ReaderError, match=r"10\.0\.0\.1 has let this node go, since it was silent"):
        actor.take("a", 0)
    with pytest.raises(ReaderError, match="has let this node go"):
        actor.stay("a", 0)


def test_a_relay_that_follows_a_dead_one_of_its_node_is_one(reader):
    actor = Handing("n", "node 1", "10.0.0.1", PRINT)
    actor.enter("dead", "node a", 0, False, "now")
    before = taken(actor, "dead", 3)
    actor.enter("next", "node a", before[-1][0] + 1, True, "now")
    try:
        assert taken(actor, "next", 3)[0][0] == before[-1][0] + 1
        until(lambda: status_of("n")["count"] == 1)
        with pytest.raises(ReaderError, match="has let this node go"):
            actor.take("dead", 0)
    finally:
        actor.leave("next")
