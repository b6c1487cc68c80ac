"""The window: what is written is read, nothing that is needed is overwritten, and nobody but its writers may write."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.share.window import CHUNK, Closed, Ring, TooLargeError, Window


@pytest.fixture
def make():
    made = []

    def window(size_bytes=4096, workers=1, begin=0):
        made.append(Window.create(size_bytes, workers, begin))
        return made[-1]

    yield window
    for each in made:
        each.close()


def content(item, size):
    return bytes([item % 251]) * size


def test_what_was_put_is_copied_out_with_its_kind_whatever_it_is_made_of(make):
    window, pieces = make(), [bytes([number % 256]) for number in range(3000)]
    ring = Ring(window, 0)
    ring.put(0, 2, [b"ab", b"", np.arange(3, dtype=np.uint8)], 5)
    assert window.copy(0) == (2, bytearray(b"ab\0\1\2"))
    assert (window.copy(1), window.end_from(0), window.last_written) == (None, 1, 0)
    ring.put(1, 0, pieces, 3000)
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
        ring = Ring(window, 0)
        for item, size in enumerate(sizes, begin):
            while (start := ring._room(item, max(-(-size // 16) * 16, 16))) is None:
                assert window.low < item, "an empty ring has room"
                window.low += 1
            del start
            ring.put(item, 0, [content(item, size)], size)
            for other in range(max(window.low, begin), item + 1):
                assert window.copy(other) == (0, bytearray(content(other, sizes[other - begin])))
            window.low = max(window.low, item - lag)
    finally:
        window.close()


def test_a_slot_is_taken_again_only_when_its_item_may_go(make):
    window = make(size_bytes=2**16)
    ring = Ring(window, 0)
    for item in range(window.slots):
        ring.put(item, 0, [b""], 0)
    assert ring._room(window.slots, 16) is None
    window.low = 1
    ring.put(window.slots, 0, [b"x"], 1)
    assert window.copy(0) is None
    assert window.copy(1) == (0, bytearray())
    assert window.copy(window.slots) == (0, bytearray(b"x"))


def test_a_worker_without_room_waits_says_so_and_goes_on(make):
    window = make(size_bytes=4096)
    ring = Ring(window, 0)
    ring.put(0, 0, [bytes(3000)], 3000)
    writer = threading.Thread(target=ring.put, args=(1, 0, [bytes(3000)], 3000))
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
    window = make()
    ring = Ring(window, 0, lambda: ending == "orphan")
    ring.put(0, 0, [bytes(3000)], 3000)
    if ending == "closed":
        window.close_for_writers()
    with pytest.raises(Closed):
        ring.put(1, 0, [bytes(3000)], 3000)


def test_a_training_can_neither_write_nor_shrink_it(make):
    window = make()
    Ring(window, 0).put(0, 0, [b"kept"], 4)
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
    with pytest.raises(TooLargeError, match="takes 5,000 bytes, and each of the 2 workers has 4,096"):
        Ring(make(size_bytes=8192, workers=2), 1).put(0, 0, [bytes(5000)], 5000)
    with pytest.raises(ValueError, match="up to 198 workers, got 200"):
        Window.create(4096, 200, 0)
    for size in (10, 8192):
        (tmp_path / "file").write_bytes(bytes(size))
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        with pytest.raises(ValueError, match="this is not a window"):
            Window(descriptor, can_write=False)
        os.close(descriptor)


def test_a_copy_of_what_was_overwritten_meanwhile_is_thrown_away(make, monkeypatch):
    window = make()
    Ring(window, 0).put(0, 0, [b"old"], 3)
    assert window.copy(0) == (0, bytearray(b"old"))
    memory = window._bytes

    class Overwritten:
        def __getitem__(self, place):
            window._rows[0, 0] = 0  # a worker takes the stamp away while the bytes are copied
            return memory[place]

    monkeypatch.setattr(window, "_bytes", Overwritten())
    assert window.copy(0) is None


@pytest.mark.parametrize("begin", [0, 40])
def test_all_that_a_worker_was_to_write_before_the_item_that_it_is_at_is_written(make, begin):
    window = make(2**16, workers=2, begin=begin)
    rings = [Ring(window, number) for number in range(2)]
    at = [begin, (begin // CHUNK + 1) * CHUNK]
    assert [window.item_of(number) for number in range(2)] == at
    for number, count in ((0, 3), (1, CHUNK)):
        for item in range(at[number], at[number] + count):
            rings[number].put(item, 0, [b"a"], 1)
    assert [window.item_of(number) for number in range(2)] == [begin + 3, at[1] + CHUNK]
    assert window.unfinished_from == begin + 3
    rings[0].note_present(at[1] + 2 * CHUNK)
    assert window.unfinished_from == at[1] + CHUNK
    window.low = at[1] + CHUNK + 1
    assert window.unfinished_from == at[1] + CHUNK + 1
