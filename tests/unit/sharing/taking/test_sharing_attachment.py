"""What a training reckons with of the trainings that share its reading."""

import socket
from types import SimpleNamespace

import pytest

from lightning_echo.sharing.packing import pack
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.sharing.taking.attachment import Attachment, Group


def attached(own, slowest, reader, trainings=2):
    """An attachment to a reader whose window says this; times per example in milliseconds."""
    attachment = Attachment(ShareConfig("a"), lambda: pytest.fail("a reader is started"), {})
    window = SimpleNamespace(slowest_need_nanoseconds=int(slowest * 1e6), seconds_per_example=reader / 1000, trainings=trainings)
    attachment._link = SimpleNamespace(window=window)
    attachment.need_nanoseconds = int(own * 1e6)
    return attachment


@pytest.mark.parametrize(
    ("own", "slowest", "reader", "seconds", "most"),
    [
        (1, 2, 0.1, 0.002, 2.0),  # twice as fast as the slowest
        (2, 2, 0.1, 0.0001, 1.0),  # the slowest itself: only the reader counts
        (1, 2, 4, 0.004, 4.0),  # the reader is slower than all
        (3, 3, 6, 0.006, 2.0),
    ],
)
def test_examples_come_as_fast_as_the_reader_or_the_slowest_other_training(own, slowest, reader, seconds, most):
    attachment = attached(own, slowest, reader)
    assert attachment.seconds_per_example == pytest.approx(seconds)
    assert attachment.most_factor == pytest.approx(most)


def test_alone_or_before_anything_is_known_no_factor_is_too_large():
    assert attached(1, 2, 1, trainings=1).most_factor is None
    assert attached(0, 2, 1).most_factor is None
    unattached = Attachment(ShareConfig("a"), lambda: pytest.fail("a reader is started"), {})
    assert (unattached.most_factor, unattached.seconds_per_example, unattached.trainings) == (None, 0.0, 0)


class Shelf:
    """A window that has all items up to one."""

    low, trainings = 0, 1

    def __init__(self, end):
        self.end = end

    def has(self, item):
        return item < self.end

    def copy(self, item):
        kind, parts, _ = pack({"item": item})
        return (kind, bytearray(b"".join(map(bytes, parts)))) if self.has(item) else None


def taking(ranks=1):
    attachment = Attachment(ShareConfig("a"), lambda: pytest.fail("a reader is started"), {}, group=Group("g", ranks))
    attachment._link = SimpleNamespace(window=Shelf(20), connection=None)
    attachment._told = 1000  # the reader hears nothing here
    return attachment


@pytest.mark.parametrize(("trainings", "ranks", "saved"), [(1, 1, 0.0), (2, 1, 5.0), (4, 1, 7.5), (4, 2, 3.75)])
def test_what_sharing_saves_is_the_others_share_of_what_its_examples_took(trainings, ranks, saved):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    attachment = Attachment(ShareConfig("a"), lambda: pytest.fail("a reader is started"), {}, group=Group("g", ranks))
    window = Shelf(200)
    window.trainings, window.cpu_seconds_per_example = trainings, 0.1
    attachment._link = SimpleNamespace(window=window, connection=here)
    for item in range(100):
        attachment.take(item)
    here.close()
    there.close()
    assert attachment.saved_cpu_seconds == pytest.approx(saved)  # of 100 examples of 0.1 s


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


def test_the_last_item_may_be_taken_again_where_ranks_fill_a_pass_up():
    attachment = taking(ranks=2)
    assert [attachment.take(item)["item"] for item in (5, 7, 7)] == [5, 7, 7]
    with pytest.raises(RuntimeError, match="item 5 is asked for again"):
        attachment.take(5)
