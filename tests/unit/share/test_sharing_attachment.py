"""What a training reckons with of those that share its reading, and its connections to readers, one after the other."""

import logging
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lightning_echo.share.attachment import Attachment, Missed
from lightning_echo.share.config import Gone, ShareConfig, new_socket, receive, send
from lightning_echo.share.connecting import Connector, Group, Link, Place, Succession, _Over
from lightning_echo.share.packing import pack
from lightning_echo.share.places import Agreement
from lightning_echo.share.process import ReaderError
from lightning_echo.share.window import CacheState


def linked(window, connection=None, item=0):
    return Link(connection, -1, window, Place(item, 0, False), [])


def attached(own, slowest, reader, trainings=2):
    """An attachment to a reader whose window says this; times per example in milliseconds."""
    attachment = Attachment(ShareConfig("a"), lambda _: pytest.fail("a reader is started"), {})
    window = SimpleNamespace(slowest_need_nanoseconds=int(slowest * 1e6), seconds_per_example=reader / 1000, trainings=trainings)
    attachment._link = linked(window)
    attachment.need_nanoseconds = int(own * 1e6)
    return attachment


@pytest.mark.parametrize(
    ("own", "slowest", "reader", "seconds", "most"),
    [
        (1, 2, 0.1, 0.002, 2.0),  # twice as fast as the slowest
        (2, 2, 0.1, 0.0001, 1.0),  # the slowest itself: only the reader counts
        (1, 2, 4, 0.004, 4.0),  # the reader is slower than all
    ],
)
def test_examples_come_as_fast_as_the_reader_or_the_slowest_other_training(own, slowest, reader, seconds, most):
    attachment = attached(own, slowest, reader)
    assert (attachment.seconds_per_example, attachment.most_factor) == (pytest.approx(seconds), pytest.approx(most))
    alone_or_unknown = [attached(own, slowest, reader, trainings=1), attached(0, slowest, reader)]
    assert [each.most_factor for each in alone_or_unknown] == [None, None]
    unattached = Attachment(ShareConfig("a"), lambda _: pytest.fail("a reader is started"), {})
    assert (unattached.most_factor, unattached.seconds_per_example, unattached.trainings) == (None, 0.0, 0)


@pytest.mark.parametrize(("options", "late"), [({}, 0.1), ({"late": 0.3}, 0.3), ({"cluster": "ray", "late": 0.3}, 0.0)])
def test_a_reader_is_asked_to_read_again_for_a_late_training_but_not_where_other_nodes_would_have_to(options, late):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connector = Connector(ShareConfig("a", **options), lambda _: pytest.fail("a reader is started"), {}, Group.of_one())
    with here, there:
        send(there, {"over": "ends"})
        with pytest.raises(_Over):
            connector._introduced(here, None, False, 0, None)
        assert receive(there)[0]["hello"]["late"] == late


class Shelf:
    low, slowest_label, last_written, begin, cpu_seconds_per_example = 0, "", 0, 0, 0.1
    cache = CacheState()
    read_in_pass = taken_in_pass = 0

    def __init__(self, end, trainings=1):
        self.end, self.trainings = end, trainings

    def end_from(self, item):
        return next(later for later in range(item, self.end + 1) if not self.has(later))

    def has(self, item):
        return self.low <= item < self.end

    def copy(self, item):
        kind, parts, _ = pack({"item": item})
        return (kind, bytearray(b"".join(map(bytes, parts)))) if self.has(item) else None


@pytest.mark.parametrize(("seconds", "said"), [(1.0, 1), (0.1, 0)])
def test_examples_that_come_one_a_second_are_a_wait_that_is_said(seconds, said, caplog, monkeypatch):
    """A full window has room for one more example each second: no single wait is long."""

    class Trickle(Shelf):
        slowest_label, clock = "train.py (process 7)", 0.0

        def has(self, item):
            return item < self.clock / seconds - 1

        def is_blocked(self, item):
            return True

    def look(item):
        window.clock += 0.01

    window = Trickle(0, trainings=2)
    attachment = taking(window)
    monkeypatch.setattr("time.perf_counter", lambda: window.clock)
    monkeypatch.setattr(attachment, "_look", look)
    caplog.set_level(logging.INFO, "lightning_echo")
    for item in range(8):
        attachment.take(item)
    assert caplog.text.count("waits for train.py (process 7), which is slower") == said
    assert attachment.waited.for_peers == pytest.approx(8 * seconds, abs=0.2 * seconds)


PASS = 100


def taking(window=None):
    attachment = Attachment(ShareConfig("a"), lambda _: pytest.fail("a reader is started"), {})
    attachment._link = linked(window or Shelf(20))
    attachment._told = 1000  # the reader hears nothing here
    return attachment


@contextmanager
def rank_of_two(window, tell_every=4):
    """A rank, and what its reader hears; the reader agrees to everything that is there, once for each round."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agreement, heard = Agreement(), []

    def answer():
        while True:
            try:
                message, _ = receive(there)
            except Gone:
                return
            heard.append(message)
            if (ask := message.get("ask")) is not None:
                is_jump, item = agreement.answer(ask["round"], ask["end"], window.low, 0.0)
                send(there, {"jump" if is_jump else "until": item})

    thread = threading.Thread(target=answer)
    thread.start()
    group = Group("g", 2, PASS)
    attachment = Attachment(
        ShareConfig("a"), lambda _: pytest.fail("a reader is started"), {}, tell_every=tell_every, group=group
    )
    attachment._link = linked(window, here)
    yield attachment, heard
    here.close()
    thread.join()
    there.close()


def test_a_rank_saves_its_part_asks_once_for_what_it_takes_at_once_and_says_when_it_has_it():
    with rank_of_two(Shelf(200, trainings=4), tell_every=8) as (attachment, heard):
        for item in range(1, 16, 2):
            attachment.take(item)
        assert attachment.saved_cpu_seconds == pytest.approx(0.6)
    assert [message["ask"]["round"] for message in heard if "ask" in message] == [0, 8]
    assert [message["at"] for message in heard if "at" in message][-1] == 16


def test_a_rank_keeps_a_round_until_it_needs_nothing_of_it():
    """Else the other rank's item of the round, or its own at the end of a pass, could be overwritten."""
    with rank_of_two(Shelf(200)) as (attachment, heard):
        attachment._tell(5)
        attachment._tell(PASS + 1)
    assert [message["at"] for message in heard] == [4, PASS]


def test_of_a_reader_from_which_nothing_was_taken_yet_all_that_it_has_published_is_still_to_come():
    attachment, wishes = taking(), []

    def connect(wish, **options):
        wishes.append((wish, options["goes_on"]))
        return SimpleNamespace(window=window)

    attachment._connector.connect = connect
    window = Shelf(20)
    window.low, window.last_written = 10, 19
    attachment._next = 5  # of the reader before it
    with new_socket() as connection:  # from which nothing has come
        attachment._succeed(linked(window, connection, 10), lambda: False)
    assert wishes == [(20, True)]


def test_what_is_gone_is_not_asked_for_again_when_a_reader_has_died():
    """A training for which the reader has not waited goes on behind that in the dead reader's window."""
    attachment, wishes, window = taking(), [], Shelf(20)
    attachment._connector.connect = lambda wish, **options: wishes.append(wish) or SimpleNamespace(window=window)
    window.low, attachment._next = 10, 5
    with new_socket() as connection:
        attachment._succeed(linked(window, connection, 0), lambda: False)
    assert wishes == [20]


def test_a_rank_that_comes_too_late_for_what_was_agreed_on_takes_later_items_once_each():
    window = Shelf(200)
    with rank_of_two(window, tell_every=8) as (attachment, _):
        had = [attachment.take(1)["item"]]
        window.low = 51  # it was stopped for a while
        had += [attachment.take(item)["item"] for item in (3, 5, 7)]
        assert had == [1, 51, 53, 55]
        assert attachment.missed == 24
        with pytest.raises(Missed):
            attachment.take(9)
        attachment.note_missed(24)  # the ranks go on at item 56: all that comes before is counted, or was taken
        assert [attachment.take(item)["item"] for item in (57, 59)] == [57, 59]
        assert attachment.missed == 24


def test_what_a_rank_has_taken_in_place_of_other_items_does_not_come_again():
    window = Shelf(200)
    with rank_of_two(window, tell_every=8) as (attachment, _):
        had = [attachment.take(1)["item"]]
        window.low = 5
        had += [attachment.take(item)["item"] for item in range(3, 97, 2)]
        assert had == [1, *range(5, 99, 2)]
        assert attachment.missed == 1, "item 3"
        # its own items of the next pass are 101, 103 ... 199; the rank takes one that it has not had, and then is where it was
        assert [attachment.take(item)["item"] for item in (97, 99, 101, 103)] == [99, 101, 103, 105]
        window.low = 120
        with pytest.raises(Missed):
            attachment.take(105)
        attachment.note_missed(60 - 52)  # positions, up to that of item 121: the one of 105 was taken
        assert attachment.missed == 1 + 7
        assert attachment.take(121)["item"] == 121


def test_what_is_kept_is_given_as_often_as_it_will_be_asked_for_and_is_its_own_each_time():
    attachment = taking()
    attachment.keep([7, 3, 7])
    assert attachment.take(10) == {"item": 10}
    first, second = attachment.take(7), attachment.take(7)
    assert first == second == {"item": 7}
    assert first is not second
    assert attachment.take(3) == {"item": 3}
    with pytest.raises(RuntimeError, match="item 7 is asked for again, and the training is at 11"):
        attachment.take(7)


@pytest.mark.parametrize("name", ["failed", "over"])
def test_why_a_reader_has_died_is_said_also_if_it_died_while_this_training_entered(name):
    attachment = taking()
    attachment._connector.connect = lambda wish, **options: linked(Shelf(20))

    def dies():
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here:
            send(there, {name: "its worker was killed", "at": 3})
            there.close()
            attachment._succeed(linked(Shelf(20), here), lambda: False)

    dies()
    with pytest.raises(ReaderError, match=r"has died twice at item 3 \(its worker was killed\)"):
        dies()


WITHIN_SECONDS = 20.0


class Reader:
    def __init__(self, item):
        here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = Link(here, -1, self, Place(item, 0, False), [])
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
