"""A training's connections to readers, one after the other."""

import socket
import threading

import pytest

from lightning_echo.share.attachment import Group, Link, Place, Succession
from lightning_echo.share.process import ReaderError

WITHIN_SECONDS = 20.0


class Reader:
    """The other end of a link."""

    def __init__(self, item):
        here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = Link(here, -1, self, Place(item, 0, False))
        self.is_window_closed = False

    def close(self):  # as a window
        self.is_window_closed = True

    def die(self):
        self.there.close()


@pytest.fixture
def readers():
    made = [Reader(item) for item in (0, 10, 20)]
    yield made
    for reader in made:
        reader.die()
        reader.link.connection.close()


def test_it_attaches_to_reader_after_reader_while_the_training_still_takes_from_the_first(readers):
    asked, attached = [], threading.Event()

    def succeed(link, is_over):
        assert not is_over()
        asked.append(link.place.item)
        if len(asked) == 2:
            attached.set()
        return readers[len(asked)].link

    succession = Succession(readers[0].link, succeed)
    assert succession.following(0.0) is None
    readers[0].die()
    readers[1].die()
    assert attached.wait(WITHIN_SECONDS)
    assert asked == [0, 10]
    for reader in readers[1:]:
        while succession.following(WITHIN_SECONDS) is not reader.link:
            pass
        succession.go_over()
    assert succession.following(0.0) is None
    succession.end()


def test_the_error_comes_after_the_readers_before_it(readers):
    def succeed(link, is_over):
        if link is readers[0].link:
            return readers[1].link
        raise OSError("no process could be started")

    succession = Succession(readers[0].link, succeed)
    readers[0].die()
    readers[1].die()
    assert succession.following(WITHIN_SECONDS) is readers[1].link
    succession.go_over()
    succession._thread.join(WITHIN_SECONDS)
    with pytest.raises(ReaderError, match="no other reader could begin: no process could be started"):
        succession.following(0.0)
    succession.end()


def test_at_its_end_it_leaves_closes_what_nobody_has_used_and_asks_for_no_other_reader(readers):
    succession = Succession(readers[0].link, lambda link, is_over: readers[1].link)
    readers[0].die()
    assert succession.following(WITHIN_SECONDS) is readers[1].link
    succession.end()
    assert readers[1].is_window_closed
    assert readers[1].there.recv(1) == b""
    Succession(readers[2].link, lambda link, is_over: pytest.fail("it attaches to another reader")).end()
    assert readers[2].there.recv(1) == b""


def test_a_round_has_an_item_for_each_rank_and_the_rest_of_a_pass_counts_for_the_round_before():
    group = Group("g", ranks=3, pass_items=8)
    assert [group.round_of(item) for item in range(10)] == [0, 0, 0, 3, 3, 3, 3, 3, 8, 8]
    assert [Group("g", ranks=4, pass_items=3).round_of(item) for item in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert [Group.of_one().round_of(item) for item in (0, 5)] == [0, 5]
