"""The pool of a worker: bounded, in order, each error at its turn; and when threads read at all."""

import random
import re
import threading
import time
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch

from lightning_echo.data.randomness import preserved_random_states, quick_states, seed_all
from lightning_echo.pipeline import reads as module
from lightning_echo.pipeline.reads import NOTHING_READ, Abandoned, Pools, ReadAhead, ReadPool, most_ahead_bytes
from lightning_echo.split.reading import Part, ReadPart, Reads
from lightning_echo.split.staged import Stages, unchanged


class Storage:
    """Reads that end when they are told to. Without that they end at once."""

    def __init__(self, item_bytes=0):
        self.item_bytes = item_bytes
        self.read_by: list[tuple[int, bool]] = []  # index, and whether a thread of the pool has read it
        self.under_way = self.most_under_way = 0
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}
        self._lock = threading.Lock()

    def hold(self, *indices):
        for index in indices:
            self.gates[str(index)] = threading.Event()

    def release(self, index):
        self.gates[str(index)].set()

    def read(self, index):
        with self._lock:
            self.read_by.append((index, threading.current_thread().name.startswith("lightning_echo-read")))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if gate := self.gates.get(str(index)):
                assert gate.wait(10)
            if error := self.errors.get(str(index)):
                raise error
            return bytes(self.item_bytes) + str(index).encode()
        finally:
            with self._lock:
                self.under_way -= 1

    @property
    def started(self):
        return [index for index, _ in self.read_by]


class Ours(ReadPart):
    """A part whose threads read from a `Storage`."""

    def make(self, dataset, until):
        return Reads(lambda: dataset.read, lambda index, item: item)


def pool_of(storage, threads=2, *, is_auto=False, most_bytes=10**9, is_held=lambda index: False, item_bytes=0, is_ours=True):
    stages = Stages(storage.read, unchanged, reused=("load",), redone=())
    ahead = ReadAhead(
        part=Ours(Part.raw, is_ours=is_ours, item_bytes=item_bytes),
        until=None,
        threads=threads,
        most_bytes=most_bytes,
        is_auto=is_auto,
        pools=Pools(),
    )
    return ReadPool(ahead, storage, stages, is_held), stages, ahead.pools


def until(holds):
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_reads_are_begun_in_order_and_at_most_so_many_are_under_way():
    storage = Storage()
    storage.hold(*range(20))
    pool, stages, pools = pool_of(storage, threads=3)
    pool.begin([0, 1], list(range(2, 20)), ())
    until(lambda: storage.under_way == 3)
    assert sorted(storage.started) == [0, 1, 2]
    storage.release(2)
    until(lambda: len(storage.started) == 4)
    assert storage.started[3] == 3
    for index in range(20):
        storage.release(index)
    assert [stages.load(index) for index in (0, 1)] == [b"0", b"1"]
    for index in range(2, 20):
        pool.begin([index], (), ())
        assert stages.load(index) == str(index).encode()
    assert Counter(storage.started) == Counter(range(20))
    assert storage.most_under_way == 3
    pools.close()


def test_what_is_asked_for_and_was_not_foreseen_is_read_first():
    storage = Storage()
    storage.hold(0, 1)
    pool, stages, pools = pool_of(storage, threads=1)
    pool.begin([0], [1, 2, 3], ())
    storage.release(0)
    assert stages.load(0) == b"0"
    until(lambda: storage.under_way == 1)
    pool.begin([7], [4], ())
    storage.release(1)
    assert stages.load(7) == b"7"
    until(lambda: len(storage.started) == 6)
    assert storage.started == [0, 1, 7, 2, 3, 4]
    pools.close()


def test_so_many_bytes_are_read_ahead_and_what_is_asked_for_is_read_all_the_same():
    storage = Storage(item_bytes=1000)
    pool, stages, pools = pool_of(storage, threads=1, most_bytes=3500, item_bytes=1000)
    pool.begin([0], list(range(1, 30)), ())
    assert len(stages.load(0)) == 1001
    until(lambda: len(storage.started) == 4)
    time.sleep(0.05)
    assert storage.started == [0, 1, 2, 3]  # three more are ahead
    pool.begin(list(range(1, 11)), (), ())
    assert [len(stages.load(index)) for index in range(1, 11)] == [1001] * 9 + [1002]
    until(lambda: len(storage.started) == 14)
    pools.close()


def test_a_read_under_way_takes_the_room_of_the_largest_item_so_far():
    storage = Storage(item_bytes=1000)
    storage.hold(*range(1, 9))
    pool, stages, pools = pool_of(storage, threads=8, most_bytes=3500, item_bytes=10)
    pool.begin([0], (), ())
    assert len(stages.load(0)) == 1001
    pool.begin([], range(1, 9), ())
    until(lambda: storage.under_way == 3)
    time.sleep(0.05)
    assert storage.under_way == 3
    for index in range(1, 9):
        storage.release(index)
    pools.close()


class DrawsWhenReleased(Storage):
    """A read draws random numbers once it is released."""

    def read(self, index):
        found = super().read(index)
        if str(index) in self.gates:
            torch.rand(1), np.random.rand(), random.random()
        return found


def test_what_threads_draw_while_the_worker_waits_moves_no_random_state_and_they_read_no_more():
    storage = DrawsWhenReleased()
    storage.hold(0)
    pool, stages, pools = pool_of(storage, is_ours=False)
    with preserved_random_states():
        pool.begin([0], [1], ())
        until(lambda: storage.under_way)
        seed_all(7)
        threading.Timer(0.2, storage.release, [0]).start()
        pool._plain = lambda index: quick_states()
        found = stages.load(0)
        seed_all(7)
        assert found == quick_states()
        assert "random numbers were drawn while threads read example 0" in pool.take_note()
        assert pool.take_note() == ""
    pool.begin([1], (), ())
    pool._plain = lambda index: "by itself"
    assert stages.load(1) == "by itself"
    pools.close()


class Draws(Storage):
    """Each read draws random numbers, and yet returns the same."""

    def read(self, index):
        torch.rand(1), np.random.rand(), random.random()
        return super().read(index)


def test_what_is_drawn_while_an_example_is_compared_ends_no_training_and_threads_read_no_more():
    storage = Draws()
    pool, stages, pools = pool_of(storage, is_ours=False)
    pool.begin([0], [1], ())
    until(lambda: sorted(storage.started) == [0, 1])
    until(lambda: not pool._under_way)  # so no wait is watched
    with preserved_random_states():
        seed_all(7)
        pool._plain = lambda index: quick_states()
        found = stages.load(0)
        seed_all(7)
        assert found == quick_states(), "the comparison has moved no random state, and the example was read as without threads"
    assert "random numbers were drawn while threads read example 0" in pool.take_note()
    pool._plain = lambda index: f"{index} by itself"
    pool.begin([1], (), ())
    assert stages.load(1) == "1 by itself"
    pools.close()


class DrawsAndHangs(Storage):
    """The read of one index draws random numbers once that is allowed, and ends when it is released."""

    def __init__(self, index):
        super().__init__()
        self.index, self.is_reached, self.may_draw = index, threading.Event(), threading.Event()
        self.hold(index)

    def read(self, index):
        if index == self.index:
            self.is_reached.set()
            assert self.may_draw.wait(10)
            torch.rand(1)
        return super().read(index)


def test_a_comparison_that_waits_when_threads_stop_is_not_taken_for_an_example():
    """The 100th read is to be compared while the only thread is in another read, which draws random numbers.

    What has arrived is not waited for, so this wait is one of the first, of which each is watched.
    """
    storage = DrawsAndHangs(100)
    pool, stages, pools = pool_of(storage, threads=1, is_ours=False)
    pool.foresee(range(110))
    found = []

    def take(so_many):
        index = pool.next_read(0.2)
        if index is not NOTHING_READ:
            assert stages.load(index) == str(index).encode()
            found.append(index)
        return len(found) == so_many

    assert storage.is_reached.wait(10)
    until(lambda: take(100))
    threading.Timer(0.05, storage.may_draw.set).start()
    until(lambda: take(109))
    storage.release(100)
    until(lambda: take(110))
    assert pool.next_read(0.05) is NOTHING_READ
    assert sorted(found) == list(range(110)), "each once"
    assert "draw" in pool.take_note()
    pools.close()


def test_an_error_is_raised_at_its_turn_and_what_is_dropped_or_held_by_a_cache_is_not_read():
    storage = Storage()
    storage.errors["2"] = ValueError("broken")
    storage.hold(0)
    pool, stages, pools = pool_of(storage, threads=1, is_held=lambda index: index == 5)
    pool.begin([0], [1, 2, 3, 4, 5, 6], ())
    pool.begin([0], (), [3, 4])  # the first batch has failed
    storage.release(0)
    assert stages.load(0) == b"0"
    pool.begin([1, 2], (), ())
    assert stages.load(1) == b"1"
    with pytest.raises(ValueError, match="broken"):
        stages.load(2)
    pool.begin([6], (), ())
    assert stages.load(6) == b"6"
    assert set(storage.started) == {0, 1, 2, 6}
    assert stages.load(5) == b"5"  # asked for all the same: read by itself
    assert storage.read_by[-1] == (5, False)
    pools.close()


def test_a_read_under_way_that_is_dropped_and_told_again_is_read_for_the_second_telling():
    storage = Storage()
    storage.hold(1)
    pool, stages, pools = pool_of(storage, threads=2)
    pool.begin([0], [1], ())
    assert stages.load(0) == b"0"
    until(lambda: storage.under_way == 1)
    pool.begin([], [1], [1])
    storage.release(1)
    pool.begin([1], (), ())
    assert stages.load(1) == b"1"
    pools.close()
    assert pool._bytes == 0


def test_an_index_that_is_told_twice_is_read_for_each_and_an_index_may_be_any_object():
    storage = Storage()
    pool, stages, pools = pool_of(storage)
    pool.begin([[1, 2], "name"], [[1, 2], 3, 3], ())
    assert [stages.load([1, 2]), stages.load("name")] == [b"[1, 2]", b"name"]
    pool.begin([3, 3, [1, 2]], (), ())
    assert [stages.load(3), stages.load(3), stages.load([1, 2])] == [b"3", b"3", b"[1, 2]"]
    assert len(storage.started) == 5
    pools.close()


def test_a_pool_that_waits_says_for_which_read_and_ends_when_the_loader_is_closed():
    storage = Storage()
    storage.hold(0, 1)
    pool, stages, pools = pool_of(storage)
    pool.begin([0], (), ())
    threading.Timer(0.3, storage.release, [0]).start()
    said = []
    threading.Timer(0.2, lambda: said.append(pools.who_waits())).start()
    assert stages.load(0) == b"0"
    assert re.fullmatch(r"example 0 of the data set is not read after 0\.\d+ s", said[0])
    assert pools.who_waits() == ""
    pool.begin([1], (), ())
    threading.Timer(0.1, pools.close).start()
    with pytest.raises(Abandoned, match="the loader was closed while example 1"):
        stages.load(1)
    storage.release(1)
    until(lambda: not any(thread.name.startswith("lightning_echo-read") for thread in threading.enumerate()))


def test_the_mean_number_under_way_is_that_of_the_time_between_two_questions():
    storage = Storage()
    storage.hold(*range(4))
    pool, _, pools = pool_of(storage, threads=4)
    pool.mean_in_flight()
    time.sleep(0.1)
    assert pool.mean_in_flight() == 0
    pool.begin([0, 1, 2], (), ())
    until(lambda: storage.under_way == 3)
    pool.mean_in_flight()
    time.sleep(0.1)
    assert pool.mean_in_flight() == pytest.approx(3, abs=0.01)
    for index in range(4):
        storage.release(index)
    pools.close()


# ---------------------------------------------------------------------- "auto"


def with_waits(monkeypatch, pool, seconds):
    """Lets each read that the worker does by itself say that it has waited for so long."""
    monkeypatch.setattr(pool, "_measured", lambda index: (pool._plain(index), next(seconds)))


def by_threads(storage, pool, stages, numbers):
    before = len(storage.read_by)
    for index in numbers:
        pool.begin([index], (), ())
        assert stages.load(index) == str(index).encode()
    return sum(is_thread for _, is_thread in storage.read_by[before:])


@pytest.mark.parametrize(
    ("seconds", "is_on"),
    [(0.0004, False), (0.0006, True), ((0, 0, 0, 0, 0.001, 0, 0, 0), False), ((0,) * 63 + (0.05,), True)],
)
def test_threads_read_once_reads_wait_most_of_the_time_or_long_on_average(seconds, is_on, monkeypatch):
    storage = Storage()
    pool, stages, pools = pool_of(storage, is_auto=True)
    waits = (seconds if isinstance(seconds, float) else seconds[number % len(seconds)] for number in count())
    with_waits(monkeypatch, pool, waits)
    by_threads(storage, pool, stages, range(300))
    assert (by_threads(storage, pool, stages, range(20)) == 20) is is_on
    pools.close()


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_nothing_is_kept_of_what_was_read_whether_threads_read_or_not(seconds, monkeypatch):
    storage = Storage()
    pool, stages, pools = pool_of(storage, is_auto=True)
    with_waits(monkeypatch, pool, iter(lambda: seconds, None))
    pool.begin([], range(5), ())
    for index in range(500):
        pool.begin([index], [index + 5], ())
        stages.load(index)
    pool.begin([], (), ())
    assert len(pool._todo) <= 5
    assert len(pool._foreseen) == 5
    assert not pool._asked
    pools.close()


def test_threads_stop_after_three_probes_in_a_row_that_do_not_wait_and_begin_again(monkeypatch):
    storage, wait = Storage(), [0.001]
    monkeypatch.setattr(module, "_PROBE_EVERY", 10)
    pool, stages, pools = pool_of(storage, is_auto=True)
    with_waits(monkeypatch, pool, iter(lambda: wait[0], None))
    by_threads(storage, pool, stages, range(20))
    assert by_threads(storage, pool, stages, range(40)) == 36  # one in ten is left to the worker
    wait[0] = 0.0
    assert by_threads(storage, pool, stages, range(20)) == 18
    wait[0] = 0.001
    by_threads(storage, pool, stages, range(10))
    wait[0] = 0.0
    by_threads(storage, pool, stages, range(30))
    assert by_threads(storage, pool, stages, range(20)) == 0
    wait[0] = 0.001
    by_threads(storage, pool, stages, range(40))
    assert by_threads(storage, pool, stages, range(20)) == 18
    pools.close()


def test_a_thread_that_computes_or_waits_for_a_processor_does_not_wait_for_its_storage():
    busy = module.BusyTime()
    before, began = busy.seconds(), time.perf_counter()
    while time.perf_counter() - began < 0.1:
        pass
    assert time.perf_counter() - began - (busy.seconds() - before) < 0.02
    before, began = busy.seconds(), time.perf_counter()
    time.sleep(0.05)
    assert time.perf_counter() - began - (busy.seconds() - before) > 0.04
    busy.close()


def test_the_memory_ahead_and_the_window_are_bounded():
    assert most_ahead_bytes(None) == most_ahead_bytes(10**12) == 2**30
    assert most_ahead_bytes(2**30) == 2**30 // 20
    part = ReadPart(Part.raw, is_ours=True, item_bytes=1000)

    def window(threads, most_bytes, pass_length):
        return ReadAhead(part, None, threads, most_bytes, False, Pools()).window(pass_length)

    assert window(32, 10**9, 10**6) == 16 * 32
    assert window(8, 10**9, 10**6) == 256
    assert window(8, 50_000, 10**6) == 50
    assert window(8, 10, 10**6) == 8  # so many are under way in any case
    assert window(8, 10**9, 100) == 25
    assert window(8, 10**9, 10) == 16
