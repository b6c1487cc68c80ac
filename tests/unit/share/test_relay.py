"""A relay beside a node that is played by the test: what comes is written, what is missing or late is seen, nothing hangs."""

import threading
import time
from contextlib import contextmanager

import pytest

from lightning_echo.share.ray import Chunk, FarLost, Piece, Relay
from lightning_echo.share.server import Start
from lightning_echo.share.window import ERROR, unpack

DEADLINE_SECONDS = 20
FRESH = Start(0, False, "now")


class PlayedFar:
    """A node that has given chunks, then none."""

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
        return 3

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
    """Stands for workers of this node."""

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


def test_a_full_window_asks_for_no_more():
    far = PlayedFar(*[chunk(first, 2, size=1000) for first in range(0, 100, 2)])
    with relaying(far, window_bytes=8192) as (_, begin, _, _, _):
        window = until(begin).window
        until(lambda: window.is_full)
        asked = far.asked
        time.sleep(0.1)
        assert far.asked == asked < 8
        window.low = 4
        until(lambda: far.asked > asked)


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


def test_nobody_is_let_in_before_the_first_example_also_if_it_is_lost():
    with relaying(PlayedFar()) as (_, begin, lost, _, _):
        assert [begin() for _ in range(5)] == [None] * 5
        assert lost == []
    with relaying(PlayedFar(fails_after=0)) as (_, begin, lost, _, _):
        assert begin() is None
        until(lambda: lost)
        assert begin() is None


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
