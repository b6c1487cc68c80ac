"""A stream of the reader's items, over a reader that is told what to say."""

import pytest
import torch

from lightning_echo.share.attachment import Missed, NextReader
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.connecting import Place
from lightning_echo.share.packing import END, pack
from lightning_echo.share.stream import SharedBatches, SharedStream
from lightning_echo.share.stream_reading import At, first_item


def raw(value, at):
    """An item as it comes out of the window."""
    kind, parts, _ = pack(value)
    return kind, bytearray(b"".join(map(bytes, parts)) + at.to_bytes())


def passes(*lengths, first=0, make=lambda number, offset: 100 * number + offset):
    """The items of passes, in order, from the first item of a reader on."""
    found = []
    for number, length in enumerate(lengths, first):
        found += [raw(make(number, offset), At(number, offset)) for offset in range(length)]
        found.append((END, bytearray(At(number, length).to_bytes())))
    return dict(enumerate(found, first_item(first)))


class FakeReader:
    """Stands in for an `Attachment`: it has items, lets some be missed, and may be followed by another one."""

    def __init__(self, items, *, place=None, gone=(), batch_size=None, successor=None):
        self.items, self.gone, self.successor = items, set(gone), successor
        self.place, self.batch_size, self.wishes = place, batch_size, []
        self.low = 0

    def enter(self, wish):
        self.wishes.append(wish)
        first = min(self.items) if wish is None else wish
        item = first if self.place is None else self.place
        return Place(item, 1, item != first, self.batch_size)

    def taken(self, item):
        if item in self.gone:
            self.low = max(self.gone) + 1
            raise Missed(item, self.low)
        if item not in self.items:
            assert self.successor is not None, "asked for an item that there is not"
            self.items, self.successor = self.successor, None
            raise NextReader(min(self.items))
        kind, data = self.items[item]
        return kind, bytearray(data)


def stream_over(reader, **share):
    stream = SharedStream(ShareConfig("data", **share))
    stream.attach(reader)
    return stream


@pytest.mark.parametrize(
    ("place", "expected"),
    [(None, [[0, 1, 2, 3], [100], [200, 201]]), (2, [[2, 3], [100], [200, 201]]), (4, [[100], [200, 201]])],
    ids=["from the start", "within a pass: its rest", "at its end: the next one"],
)
def test_a_pass_ends_where_the_readers_does(place, expected):
    stream = stream_over(FakeReader(passes(4, 1, 2), place=place))
    assert [list(stream) for _ in expected] == expected


@pytest.mark.parametrize(
    ("gone", "expected", "missed"),
    [
        ([1, 2], [[0, 3], [100, 101, 102], [200]], 2),
        ([2, 3, 4], [[0, 1], [100, 101, 102], [200]], 2),  # the end of a pass is no example
        ([2, 3, 4, 5, 6], [[0, 1], [102], [200]], 4),
        ([2, 3, 4, 5, 6, 7], [[0, 1], [200]], 5),  # nothing of a pass but its end
        ([2, 3, 4, 5, 6, 7, 8], [[0, 1], [200]], 5),  # not even that
    ],
)
def test_what_is_missed_is_counted_and_passes_end_all_the_same(gone, expected, missed):
    stream = stream_over(FakeReader(passes(4, 3, 1), gone=gone), behind="skip")
    assert [list(stream) for _ in expected] == expected
    assert stream.missed == missed


@pytest.mark.parametrize("taken", range(7))
def test_a_state_goes_on_where_it_was_taken(taken):
    items = passes(3, 4)
    before = stream_over(FakeReader(items))
    found, state = [], before.state_dict()
    for number in range(2):
        for value in before:
            found.append((number, value))
            if len(found) == taken:
                state = before.state_dict()
    reader = FakeReader(items)
    # A reader that begins at a pass numbers its items from there.
    reader.items = passes(*((3, 4) if not state["pass"] else (4,)), first=state["pass"] or 0)
    stream = stream_over(reader)
    stream.load_state_dict(state)
    rest = list(stream)
    assert rest == [value for number, value in found[taken:] if number == (0 if taken <= 3 else 1)]
    assert reader.wishes == [None if not taken else first_item(state["pass"])]


class FakeWindow:
    def __init__(self, items):
        self.items, self.begin = items, min(items)

    def end_from(self, item):
        while item in self.items:
            item += 1
        return item

    def copy(self, item):
        return self.items.get(item)


@pytest.mark.parametrize(("published", "next_pass"), [(2, 1), (5, 1), (6, 2)])
def test_the_next_reader_begins_with_the_pass_after_what_was_published(published, next_pass):
    items = {item: data for item, data in passes(4, 4).items() if item < published}
    stream = stream_over(FakeReader(items), restart="pass")
    next(iter(stream))
    assert stream.follow(FakeWindow(items), 1) == first_item(next_pass)


# ---------------------------------------------------------------------- whole batches


def batches_over(size, reads):
    """The batches of a training of one batch size, over those of a reader of another one; two passes of 10 rows."""

    def rows(number, offset):
        first = offset * reads
        return torch.arange(100 * number + first, 100 * number + min(first + reads, 10))

    reader = FakeReader(passes(-(-10 // reads), -(-10 // reads), make=rows), batch_size=reads)
    return SharedBatches(stream_over(reader), None, size, None)


@pytest.mark.parametrize("reads", [1, 3, 7, 12])
@pytest.mark.parametrize("size", [1, 4, 10, 11])
def test_batches_are_cut_within_each_pass(size, reads):
    loader = batches_over(size, reads)
    for number in range(2):
        found = [batch.tolist() for batch in loader]
        assert found == [list(range(100 * number + first, 100 * number + min(first + size, 10))) for first in range(0, 10, size)]


@pytest.mark.parametrize(("size", "reads", "reads_again"), [(3, 5, 5), (3, 5, 4), (4, 2, 7), (2, 4, 2)])
def test_a_state_within_a_pass_goes_on_at_its_row_whatever_the_reader_reads(size, reads, reads_again):
    loader = batches_over(size, reads)
    found, states = [], []
    for batch in loader:
        found.append(batch.tolist())
        states.append(loader.state_dict())
    for number, state in enumerate(states, 1):
        resumed = batches_over(size, reads_again)
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == found[number:]
