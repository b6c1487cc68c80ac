"""The window: what is written is read, nothing that is needed is overwritten, and nobody but its writers may write."""

import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_echo.share import window as window_module
from lightning_echo.share.window import CHUNK, MOST_LANES, Closed, Lane, TooLargeError, Window


@pytest.fixture
def make():
    made = []

    def window(size_bytes=4096, lanes=1, begin=0):
        made.append(Window.create(size_bytes, lanes, begin))
        return made[-1]

    yield window
    for each in made:
        each.close()


def content(item, size):
    return bytes([item % 251]) * size


def test_what_was_put_is_copied_out_with_its_kind_whatever_it_is_made_of(make):
    window, pieces = make(), [bytes([number % 256]) for number in range(3000)]
    lane = Lane(window, 0)
    lane.put(0, 2, [b"ab", b"", np.arange(3, dtype=np.uint8)], 5)
    assert window.copy(0) == (2, bytearray(b"ab\0\1\2"))
    assert (window.copy(1), window.end_from(0), window.last_written) == (None, 1, 0)
    lane.put(1, 0, pieces, 3000)
    assert window.copy(1) == (0, bytearray(b"".join(pieces)))


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=150),
    begin=st.integers(0, 100),
    lag=st.integers(0, 6),
    window_bytes=st.integers(1024, 4096),
)
def test_what_is_not_below_low_is_never_overwritten(sizes, begin, lag, window_bytes):
    window = Window.create(window_bytes, 1, begin)
    try:
        lane = Lane(window, 0)
        for item, size in enumerate(sizes, begin):
            puts_at_last(window, lane, item, [content(item, size)], size)
            for other in range(max(window.low, begin), item + 1):
                assert window.copy(other) == (0, bytearray(content(other, sizes[other - begin])))
            window.low = max(window.low, item - lag)
    finally:
        window.close()


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=150),
    begin=st.integers(0, 100),
    backs=st.dictionaries(st.integers(0, 150), st.integers(0, 40), max_size=20),
    window_bytes=st.integers(1024, 4096),
)
def test_what_it_reaches_back_to_is_there_and_stays(sizes, begin, backs, window_bytes):
    """``backs``: after which item, and how far back."""
    window = Window.create(window_bytes, 1, begin)
    try:
        lane, reached = Lane(window, 0), 0
        for item, size in enumerate(sizes, begin):
            puts_at_last(window, lane, item, [content(item, size)], size)
            window.low = item + 1  # taken at once
            if (back := backs.get(item - begin)) is not None:
                low = window.reach_back(item + 1 - back)
                assert low == window.low <= item + 1
                reached += item + 1 - low
            for other in range(window.low, item + 1):
                assert window.copy(other) == (0, bytearray(content(other, sizes[other - begin])))
        room = window_bytes - 4 * 916  # as much was certainly not overwritten
        assert reached or room < 0 or not any(back and at < len(sizes) for at, back in backs.items())
    finally:
        window.close()


def puts_at_last(window, lane, item, parts, size):
    """Puts an example. While it waits, ``low`` rises, one by one, at most up to that item."""

    def look():
        assert window.low < item, "there is no room, though nothing else is needed"
        window.low += 1
        return False

    lane._is_orphan = look  # it is asked while it waits
    lane.put(item, 0, parts, size)


def test_a_slot_is_taken_again_only_when_its_item_may_go(make):
    window = make(size_bytes=2**20)
    lane = Lane(window, 0)
    for item in range(window.slots):
        lane.put(item, 0, [b""], 0)
    assert lane._room(window.slots, 0) is None
    window.low = 1
    lane.put(window.slots, 0, [b"x"], 1)
    assert window.copy(0) is None
    assert window.copy(1) == (0, bytearray())
    assert window.copy(window.slots) == (0, bytearray(b"x"))


def test_a_worker_without_room_waits_says_so_and_goes_on(make):
    window = make(size_bytes=4096)
    lane = Lane(window, 0)
    lane.put(0, 0, [bytes(3000)], 3000)
    writer = threading.Thread(target=lane.put, args=(1, 0, [bytes(3000)], 3000))
    writer.start()
    while not window.is_blocked(1):
        assert writer.is_alive()
    assert [window.has(item) for item in (0, 1)] == [True, False]
    window.low = 1
    writer.join(10)
    assert [window.has(item) for item in (0, 1)] == [False, True]
    assert not window.is_blocked(1)


@pytest.mark.parametrize("ending", ["closed", "orphan"])
def test_a_worker_that_waits_ends_with_the_reader(make, ending):
    window, looks = make(), []

    def is_orphan():
        looks.append(1)
        if ending == "closed":
            window.close_for_writers()
        return ending == "orphan"

    lane = Lane(window, 0, is_orphan)
    lane.put(0, 0, [bytes(3000)], 3000)
    assert not looks, "there was room"
    with pytest.raises(Closed):
        lane.put(1, 0, [bytes(3000)], 3000)
    assert looks == [1]


def test_a_worker_reads_nothing_more_for_a_window_that_is_closed_though_there_is_room(make):
    window = make()
    lane = Lane(window, 0)
    lane.put(0, 0, [bytes(30)], 30)
    window.close_for_writers()
    with pytest.raises(Closed):
        lane.put(1, 0, [bytes(30)], 30)
    assert [window.has(item) for item in (0, 1)] == [True, False]


def test_a_training_can_neither_write_nor_shrink_it(make):
    window = make()
    Lane(window, 0).put(0, 0, [b"kept"], 4)
    descriptor = window.read_only_descriptor()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"x", 5000)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(descriptor, 0)
    seen = Window(descriptor, can_write=False)
    with pytest.raises((ValueError, TypeError)):
        seen._words[1] = 7
    with pytest.raises(PermissionError):
        os.ftruncate(window._descriptor, 4096)  # not even its maker
    assert seen.copy(0) == (0, bytearray(b"kept"))
    seen.close()


def test_what_is_no_window_or_cannot_be_one_is_refused(make, tmp_path):
    with pytest.raises(TooLargeError, match="takes 5,000 bytes, and the window has 4,096 bytes: give share"):
        Lane(make(size_bytes=4096), 0).put(0, 0, [bytes(5000)], 5000)
    for size in (10, 8192):
        (tmp_path / "file").write_bytes(bytes(size))
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        with pytest.raises(ValueError, match="this is not a window"):
            Window(descriptor, can_write=False)
        os.close(descriptor)


def test_what_ranks_take_at_once_must_have_room_also_if_they_come_while_it_waits(make):
    window = make(size_bytes=4096)
    lane = Lane(window, 0)
    window.ranks = 3
    lane.put(0, 0, [bytes(1000)], 1000)
    with pytest.raises(
        TooLargeError, match=r"takes 1,100 bytes, and the window has 4,096 bytes: give share\.window more, room for 4"
    ):
        lane.put(1, 0, [bytes(1100)], 1100)
    window.ranks = 1
    lane.put(1, 0, [bytes(2000)], 2000)
    lane._is_orphan = lambda: setattr(window, "ranks", 2)
    with pytest.raises(TooLargeError, match="since 2 ranks take as many at once"):
        lane.put(2, 0, [bytes(1500)], 1500)


def test_however_often_a_lane_looks_for_room_it_looks_at_each_record_once(make):
    """A training that is slower than its reader keeps the window full, of small examples perhaps."""
    window = make(size_bytes=2**20)
    lane, looked = Lane(window, 0), []
    item = 0
    while lane._room(item, 200) is not None:
        lane.go_to(item := item + 1)
    ring = window._rings[0]

    class Counted:
        def __getitem__(self, at):
            looked.append(at)
            return ring[at]

        __setitem__ = ring.__setitem__

    window._rings = [Counted(), window._rings[1]]
    for _ in range(200):
        window.low += 1
        assert lane._room(item, 200) is not None
        lane.go_to(item := item + 1)
        assert lane._room(item, 200) is None
    assert len(looked) < 200 * 30 + 4 * item


def _take_stamp(window):
    window._row_words[0] = 0


def _take_bytes(window):
    window.low = 1
    Lane(window, 0).put(1, 0, [bytes(window.ring_bytes)], window.ring_bytes)


@pytest.mark.parametrize("take_away", [_take_stamp, _take_bytes])
def test_a_copy_of_what_was_overwritten_meanwhile_is_thrown_away(make, monkeypatch, take_away):
    window = make()
    Lane(window, 0).put(0, 0, [b"old"], 3)
    assert window.copy(0) == (0, bytearray(b"old"))
    memory = window._bytes

    class Overwritten:
        def __getitem__(self, place):
            take_away(window)  # while the bytes are copied
            return memory[place]

    monkeypatch.setattr(window, "_bytes", Overwritten())
    assert window.copy(0) is None

    monkeypatch.undo()
    assert not window.has(0)


# ---------------------------------------------------------------------- lanes


@pytest.fixture
def nobody_waits(monkeypatch):
    """Lanes need not wait for long before they may use more of the side ring."""
    monkeypatch.setattr(window_module, "_MOST_WAIT_NANOSECONDS", -1)


def several(window, count):
    return [Lane(window, number) for number in range(count)]


@pytest.mark.parametrize("begin", [0, 40])
def test_all_that_a_lane_was_to_write_before_the_item_that_it_is_at_is_written(make, begin):
    window = make(2**16, lanes=0, begin=begin)
    at = [begin, (begin // CHUNK + 1) * CHUNK]
    for number in range(2):
        window.begin_lane(number, at[number])
    first, second = several(window, 2)
    assert window.unfinished_from == begin
    for lane, start, count in ((first, begin, 3), (second, at[1], CHUNK)):
        for item in range(start, start + count):
            lane.put(item, 0, [b"a"], 1)
    assert [window.at(number) for number in range(2)] == [begin + 3, at[1] + CHUNK]
    assert window.unfinished_from == begin + 3
    first.go_to(at[1] + 2 * CHUNK)
    assert window.unfinished_from == at[1] + CHUNK
    window.low = at[1] + CHUNK + 1
    assert window.unfinished_from == at[1] + CHUNK + 1


def test_of_a_chunk_whose_first_items_nobody_wants_the_first_one_that_is_written_has_a_place_for_sure(make):
    window = make(4096, lanes=2)
    first, second = several(window, 2)
    second.go_to(32)
    second.put(32, 0, [bytes(3000)], 3000)
    first.put(7, 0, [content(7, 2000)], 2000)
    assert window.copy(7) == (0, bytearray(content(7, 2000)))


def test_lanes_may_begin_and_end_and_each_says_at_which_item_it_is(make):
    window = make(2**16, lanes=0, begin=40)
    assert (window.lanes, window.is_full) == (0, False)
    for number in (0, 1):
        window.begin_lane(number, 40 + number * 24)
    first, second = several(window, 2)
    first.put(40, 0, [b"a"], 1)
    assert [window.at(0), window.at(1), window.lanes] == [41, 64, 2]
    second.go_to(96)
    assert window.at(1) == 96
    window.end_lane(0)
    assert window.lanes == 1
    first.note_prepared(2, 8_000, 2_000)
    second.note_prepared(2, 4_000, 2_000)
    assert window.seconds_per_example == pytest.approx(3e-6)
    assert window.cpu_seconds_per_example == pytest.approx(1e-6)
    window.begin_lane(0, 128)
    assert window.seconds_per_example == pytest.approx(1.5e-6)


def test_a_slot_changes_its_writer_when_its_item_is_over_also_for_the_lane_that_was_to_write_it(make):
    window = make(2**20, lanes=2)
    first, second = several(window, 2)
    first.put(0, 0, [b"first"], 5)
    second.go_to(window.slots)
    assert second._room(window.slots, 1) is None, "it is needed"
    window.low = 2 * window.slots  # who waits for nobody is there
    second.put(window.slots, 0, [b"second"], 6)
    assert (window.copy(0), window.copy(window.slots)) == (None, (0, bytearray(b"second")))
    second.go_to(window.slots + 1)
    assert second._room(window.slots + 1, 1) is None, "nobody needs item 1, but the first lane may be writing it"
    first.put(1, 0, [b"late"], 4)
    second.put(window.slots + 1, 0, [b"x"], 1)
    assert (window.copy(1), window.copy(window.slots + 1)) == (None, (0, bytearray(b"x")))


def test_bytes_that_a_lane_may_still_be_writing_are_given_to_nobody(make):
    window = make(4096, lanes=2)
    first, second = several(window, 2)
    assert first._room(0, 3000) is not None, "it has a place, and writes"
    second.go_to(32)
    window.low = 100
    assert second._room(32, 3000) is None
    first.go_to(64)
    assert second._room(32, 3000) is not None


@pytest.mark.parametrize("lanes", [1, 2, MOST_LANES])
def test_the_largest_example_is_as_large_as_the_window_however_many_lanes_there_are(make, lanes):
    window = make(4096, lanes=lanes)
    of_all = several(window, lanes)
    for number, lane in enumerate(of_all):
        lane.go_to(number * CHUNK)
    of_all[0].put(0, 0, [content(0, 4096)], 4096)
    assert window.copy(0) == (0, bytearray(content(0, 4096)))
    window.low = 1
    of_all[0].put(1, 0, [content(1, 4096)], 4096)
    assert (window.copy(0), window.copy(1)) == (None, (0, bytearray(content(1, 4096))))


def test_an_earlier_item_has_a_place_though_later_ones_have_filled_the_ring(make):
    window = make(4096, lanes=2)
    first, second = several(window, 2)
    second.go_to(32)
    second.put(32, 0, [bytes(3000)], 3000)
    for item in range(3):
        if item:
            assert first._room(item, 2000) is None, "the reserve has one place"
            assert second._room(33, 2000) is None, "and it is for the earliest item"
        window.low = item
        first.put(item, 0, [content(item, 2000)], 2000)
        assert [window.has(each) for each in range(3)] == [each == item for each in range(3)]
        assert window.copy(item) == (0, bytearray(content(item, 2000)))
    assert window.copy(32) == (0, bytearray(3000))
    assert window.reach_back(0) == 2, "the items before that one were in the reserve"


@given(
    sizes=st.lists(st.integers(0, 700), min_size=40, max_size=120),
    later=st.lists(st.integers(0, 900), min_size=1, max_size=1),
    kept=st.integers(1, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("nobody_waits")
def test_a_later_item_that_came_first_takes_no_room_from_those_before_it(sizes, later, kept):
    """As many as the ranks of a training take in a round are there at once, though the oldest record is one of a later item."""
    window = Window.create(8192, 2, 0)
    try:
        first, second = (Lane(window, number) for number in range(2))
        far = 1000
        second.go_to(far)
        for number, size in enumerate(later):
            second.put(far + number, 0, [content(far + number, size)], size)
            second.go_to(far)
        for item, size in enumerate(sizes):
            window.low = max(item - kept, 0)
            first._is_orphan = lambda item=item: pytest.fail(f"item {item} waits, and all others wait for it")
            first.put(item, 0, [content(item, size)], size)
            for other in range(window.low, item + 1):
                assert window.copy(other) == (0, bytearray(content(other, sizes[other])))
            for number, other in enumerate(later):
                assert window.copy(far + number) == (0, bytearray(content(far + number, other)))
    finally:
        window.close()


def test_a_later_item_leaves_a_quarter_to_the_earliest_one_and_lets_those_before_it_choose_first(make):
    window = make(4096, lanes=3)
    first, second, third = several(window, 3)
    for lane, item in ((first, 0), (second, 32), (third, 64)):
        lane.go_to(item)
    first.put(0, 0, [bytes(84)], 84)  # with its record it takes 112 bytes: three quarters are 27 of them
    assert second._room(32, 84) is None
    window.low = 5
    for item in range(1, 6):
        first.put(item, 0, [bytes(84)], 84)
    assert second._room(32, 84) is not None
    assert first._room(6, 84) is not None
    window._words[second._blocked] = 33  # as if it waited
    assert third._room(64, 0) is None
    assert first._room(7, 84) is not None


def test_items_that_nobody_wants_take_no_room_from_later_ones(make):
    """Each tenth item is wanted. 32 of these records take the ring, and so do 32 of all items if all are wanted."""
    window = make(4096, lanes=2)
    first, second = several(window, 2)
    second.go_to(320)
    for item in range(0, 200, 10):
        first.put(item, 0, [bytes(112)], 112)
        window.low = item
    assert not second._has_to_wait(320)
    second.go_to(1000)
    assert second._has_to_wait(1000)


def test_only_the_earliest_item_that_waits_makes_the_window_full_and_a_training_wait_for_others(make):
    window = make(4096, lanes=2)
    first, second = several(window, 2)
    second.go_to(32)
    window._words[second._blocked] = 33
    assert [window.is_blocked(item) for item in (0, 31, 32, 40)] == [False, False, True, True]
    assert not window.is_full
    window._words[first._blocked] = 1
    assert window.is_blocked(0)
    assert window.is_full


@given(
    sizes=st.lists(st.integers(0, 900), min_size=3 * CHUNK, max_size=5 * CHUNK),
    turns=st.lists(st.integers(0, 2), min_size=50, max_size=400),
    backs=st.dictionaries(st.integers(0, 400), st.integers(1, 60), max_size=10),
    window_bytes=st.integers(1024, 4096),
)
def test_what_it_reaches_back_to_is_there_and_stays_whichever_lane_has_written_it(sizes, turns, backs, window_bytes):
    """Lanes write in turns, as far as there is room. One training takes what is there, another one comes late, also again."""
    window = Window.create(window_bytes, 3, 0)
    try:
        lanes, chunks = (
            several(window, 3),
            [range(first, min(first + CHUNK, len(sizes))) for first in range(0, len(sizes), CHUNK)],
        )
        of_lanes = [list[int]() for _ in lanes]
        for lane in lanes:
            lane._is_orphan = lambda: True  # instead of waiting for room, it comes again later
        fast = slow = 0
        for turn, number in enumerate(turns):
            mine = of_lanes[number]
            if not mine and chunks:
                mine += chunks.pop(0)
            lanes[number].go_to(mine[0] if mine else len(sizes))
            if mine:
                with suppress(Closed):
                    lanes[number].put(mine[0], 0, [content(mine[0], sizes[mine[0]])], sizes[mine[0]])
                    del mine[0]
            while fast < len(sizes) and window.has(fast):
                fast += 1
            slow = slow + 1 if slow < fast and window.low == slow and turn not in backs else fast
            window.low = slow
            if turn in backs:
                slow = window.reach_back(fast - backs[turn])
                assert slow == window.low <= fast
            for other in range(window.low, fast):
                assert window.copy(other) == (0, bytearray(content(other, sizes[other])))
    finally:
        window.close()


@given(
    sizes=st.lists(st.integers(0, 700), min_size=3 * CHUNK, max_size=8 * CHUNK),
    turns=st.lists(st.integers(0, 3), min_size=4, max_size=60),
    kept=st.integers(0, 4),
    skipped=st.sampled_from([0, 2, 5]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("nobody_waits")
def test_lanes_never_all_wait_while_trainings_need_the_next_item(sizes, turns, kept, skipped):
    """Ranks keep up to ``kept`` items before the one that they wait for. Each ``skipped``-th item is wanted by nobody."""
    window = Window.create(8192, 4, 0)
    try:
        lanes, count, cursor, in_vain, turn = several(window, 4), len(sizes), 0, 0, 0
        chunks, of_lanes = (
            [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)],
            [list[int]() for _ in lanes],
        )
        for lane in lanes:
            lane._is_orphan = lambda: True  # instead of waiting for room, it comes again later
        while cursor < count:
            # in their random turns, and if nothing moves, one after the other
            number = turns[turn % len(turns)] if in_vain < 20 else turn % len(lanes)
            turn, in_vain = turn + 1, in_vain + 1
            mine = of_lanes[number]
            if not mine and chunks:
                mine += [item for item in chunks.pop(0) if not skipped or item % skipped]
            lanes[number].go_to(mine[0] if mine else count)
            if mine:
                with suppress(Closed):
                    lanes[number].put(mine[0], 0, [content(mine[0], sizes[mine[0]])], sizes[mine[0]])
                    del mine[0]
                    in_vain = 0
            while cursor < count and (window.has(cursor) or (skipped and not cursor % skipped)):
                cursor += 1
                in_vain = 0
            window.low = max(window.low, cursor - kept)
            for other in range(window.low, cursor):
                if not skipped or other % skipped:
                    assert window.copy(other) == (0, bytearray(content(other, sizes[other])))
            assert in_vain < 60, f"all wait, and trainings need item {cursor}"
    finally:
        window.close()


def test_threads_of_the_reader_hold_the_lock_of_a_window_one_after_the_other(make, monkeypatch):
    """That of the system is one of a process: where a second thread takes it, the first one that is done releases it for both."""
    window, inside, most = make(), [], []
    monkeypatch.setattr(window_module.fcntl, "lockf", lambda *_: None)

    def run():
        for _ in range(200):
            with window._locked():
                inside.append(1)
                time.sleep(0)  # another thread's turn
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 600


def test_a_worker_that_is_forked_while_a_thread_of_the_reader_holds_the_lock_is_not_locked_out(make):
    window = make()
    with window._thread_lock:  # of a thread that the child does not have
        child = os.fork()
        if child == 0:
            Lane(window, 0).put(0, 0, [b"kept"], 4)
            os._exit(0)
        end = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)[0]) == 0 and time.monotonic() < end:
            time.sleep(0.01)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended
    assert window.copy(0) == (0, bytearray(b"kept"))
