"""An arena holds each record once, whole, for all processes of a node, whatever happens to those that write into it."""

import errno
import gc
import multiprocessing
import os
import pickle
import random
import resource
import signal
import threading
import time
import zlib

import numpy as np
import pytest

from lightning_echo.cache import arena as arena_module
from lightning_echo.cache.arena import Arena, ArenaError

MIB = 2**20
STEP = arena_module._GROWTH_STEP_BYTES


def record_of(key):
    """A record that tells whether it is whole, and whose it is."""
    body = random.Random(key).randbytes(50 + 977 * key % 4000)
    return zlib.crc32(body).to_bytes(4, "little") + key.to_bytes(4, "little") + body


def held(arena):
    keys = [key for key in range(arena.keys) if key in arena]
    assert all(bytes(arena.get(key)) == record_of(key) for key in keys)
    return keys


def bytes_of_all(keys):
    return sum(-(-(8 + len(record_of(key))) // 64) * 64 for key in range(keys))


def fill(arena, seed, keys):
    for key in random.Random(seed).sample(range(keys), keys):
        arena.put(key, [record_of(key)])


def in_a_fork(target, *args):
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    def make(keys, budget_bytes):
        if request.param == "memory":
            return Arena.create(keys, budget_bytes)
        return Arena.create_file(str(tmp_path / "arena"), keys, budget_bytes)

    return make


class TestHolding:
    def test_what_was_put_is_got_once_and_never_replaced(self, make):
        arena = make(100, MIB)
        for key in range(0, 100, 3):
            assert arena.put(key, [record_of(key)[:10], b"", record_of(key)[10:]])
            assert not arena.put(key, [b"second"])
        assert held(arena) == list(range(0, 100, 3))
        assert arena.get(1) is None
        assert arena.put(2, [])
        assert bytes(arena.get(2)) == b"", "an empty record is one"
        assert arena.counts.records == 35

    def test_it_takes_no_more_than_its_budget_and_is_frozen_then(self, make):
        arena = make(1000, 100_000)
        added = [arena.put(key, [bytes(992)]) for key in range(1000)]
        assert added == [True] * 97 + [False] * 903, "1,024 bytes each, with the length and to the next multiple of 64"
        assert arena.counts == (97 * 1024, 97, True)
        assert not arena.put(999, [b""]), "frozen"

    def test_a_record_larger_than_what_is_left_is_passed_over_while_much_is_left(self, make):
        arena = make(10, 100_000)
        assert [arena.put(key, [bytes(size)]) for key, size in enumerate((50_000, 60_000))] == [True, False]
        assert not arena.counts.is_frozen
        assert [arena.put(key, [bytes(size)]) for key, size in enumerate((40_000, 20_000), 2)] == [True, False]
        assert arena.counts.is_frozen

    def test_lengths_tell_what_can_be_read_what_is_being_written_and_what_is_missing(self, make):
        arena = make(20, MIB)
        for key in (3, 7, 0):
            arena.put(key, [record_of(key)])
        arena.put(9, [b""])
        arena._file.set_word(11, arena_module.CLAIMED)
        expected = [len(record_of(7)), -1, -2, len(record_of(3)), 0, len(record_of(7)), -2, len(record_of(0))]
        assert arena.lengths_of(np.array([7, 11, -1, 3, 9, 7, 19, 0])).tolist() == expected
        assert arena.lengths_of(np.array([], dtype=np.int64)).tolist() == []


def failing(monkeypatch, arena, number):
    """From now on each record fails with an error; header and index can be written."""
    write = arena_module.write

    def fails(fd, parts, offset):
        if offset > arena._file.start:
            raise OSError(number, os.strerror(number))
        write(fd, parts, offset)

    monkeypatch.setattr(arena_module, "write", fails)


class TestRunningShort:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_freezes_it(self, make, monkeypatch, number):
        arena = make(10, MIB)
        assert arena.put(0, [record_of(0)])
        failing(monkeypatch, arena, number)
        assert not arena.put(1, [b"does not"])
        assert arena.counts[1:] == (1, True)
        assert arena.shortage == f"no more can be written: {os.strerror(number)}"
        assert held(arena) == [0]

    def test_another_error_is_one_and_the_key_is_never_held(self, make, monkeypatch):
        arena = make(10, MIB)
        assert arena.put(0, [record_of(0)])
        with monkeypatch.context() as patched:
            failing(patched, arena, errno.EIO)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                arena.put(1, [b"x"])
        assert arena.get(1) is None
        assert not arena.counts.is_frozen
        assert arena.put(2, [record_of(2)])
        monkeypatch.setattr(os, "pwritev", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match="broken"):
            arena.put(3, [b"x"])

    def test_a_system_that_takes_a_part_of_a_record_and_then_refuses_freezes_it(self, tmp_path):
        arena, before = Arena.create_file(str(tmp_path / "arena"), 10, 10 * MIB), resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, before[1]))
            added = [arena.put(key, [bytes(MIB)]) for key in range(5)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert added == [True, True, False, False, False]
        assert (arena.counts.is_frozen, arena.get(0), arena.get(2)) == (True, bytes(MIB), None)

    def test_below_the_reserve_it_is_frozen(self, monkeypatch):
        left = [5 * STEP]
        monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: left[0])
        arena = Arena.create(1000, 100 * STEP, reserve_bytes=3 * STEP)
        assert arena.put(0, [record_of(0)])
        left[0] = 4 * STEP - 1
        assert arena.put(1, [record_of(1)]), "in the step that was allowed"
        assert not arena.put(2, [memoryview(bytes(STEP))])
        assert (arena.counts.is_frozen, arena.shortage) == (True, "memory is running short")
        assert held(arena) == [0, 1]
        left[0] = None  # a system that does not tell
        assert Arena.create(10, MIB, reserve_bytes=2**60).put(0, [b"x"])


class TestSeveralProcesses:
    @pytest.mark.parametrize("method", ["threads", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_all_hold_the_same_each_once(self, make, method):
        arena = make(300, 10 * MIB)
        start = threading.Thread if method == "threads" else multiprocessing.get_context(method).Process
        writers = [start(target=fill, args=(arena, seed, 300)) for seed in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        assert method == "threads" or [writer.exitcode for writer in writers] == [0] * 3
        assert held(arena) == list(range(300))
        assert arena.counts[:2] == (bytes_of_all(300), 300)

    def test_a_process_has_one_descriptor_of_it_which_the_last_arena_takes_along(self):
        arena = Arena.create(10, MIB)
        fd, before = arena._file.fd, os.listdir("/proc/self/fd")
        again = [*(Arena.attach(arena.address) for _ in range(3)), pickle.loads(pickle.dumps(arena))]
        assert os.listdir("/proc/self/fd") == before
        assert all(each._file is arena._file for each in again), "closing another descriptor would drop the lock"
        assert all(each.put(number, [b"x"]) for number, each in enumerate(again))
        del arena
        assert again[0].get(1) == b"x"
        again.clear()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_a_lock_that_another_thread_has_when_a_process_is_forked(self):
        arena = Arena.create(10, MIB)
        with arena._file.threads:
            child = in_a_fork(arena.put, 3, [b"x"])
            child.join(30)
        assert child.exitcode == 0
        assert bytes(arena.get(3)) == b"x"


def fill_and_wait(arena, seed, keys):
    fill(arena, seed, keys)
    time.sleep(60)


@pytest.mark.grid
@pytest.mark.parametrize("attempt", range(6))
def test_a_writer_that_is_killed_leaves_no_wrong_byte_and_no_lock(make, attempt):
    keys = 1500
    arena = make(keys, 100 * MIB)
    killed = in_a_fork(fill_and_wait, arena, attempt, keys)
    wanted = 1 + 200 * attempt
    while arena.counts.records < wanted:
        assert killed.is_alive()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert wanted <= len(held(arena)) < keys
    fill(arena, 0, keys)
    assert keys - len(held(arena)) <= 1, "that which was being written"


def test_a_writer_that_is_killed_with_the_lock_loses_it(make):
    arena = make(10, MIB)
    reader, writer = os.pipe()

    def hold():
        os.write(writer, b"x")
        time.sleep(60)

    killed = in_a_fork(arena._file.locked, hold)
    os.read(reader, 1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert arena.put(0, [b"x"])
    os.close(reader)
    os.close(writer)


class TestPickles:
    def test_after_the_end_of_its_process_hold_nothing_take_nothing_and_say_why(self):
        receives, sends = multiprocessing.Pipe(duplex=False)
        process = in_a_fork(lambda: sends.send_bytes(pickle.dumps(Arena.create(10, MIB))))
        pickled = receives.recv_bytes()
        process.join(60)
        again = pickle.loads(pickled)
        assert (again.keys, again.get(3), again.put(4, [b"x"]), again.counts.is_frozen) == (10, None, False, True)
        assert f"process {process.pid}, which has its examples, is gone" in again.shortage

    @pytest.mark.parametrize("other", ["another arena", "a terminal"])
    def test_never_take_what_has_the_number_of_the_descriptor_by_now(self, other, monkeypatch):
        arena, another = Arena.create(10, MIB), Arena.create(10, MIB)
        terminal = os.open("/dev/ptmx", os.O_RDWR)  # each time that it is opened there is one more
        assert arena.put(3, [b"some bytes"])
        assert another.put(3, [b"of another one"])
        pickled, address, fd = pickle.dumps(arena), arena.address, arena._file.fd
        del arena
        gc.collect()
        os.dup2(terminal if other == "a terminal" else another._file.fd, fd)
        opened = []
        monkeypatch.setattr(os, "open", lambda path, *args, open=os.open: opened.append(str(path)) or open(path, *args))
        with pytest.raises(ArenaError):
            Arena.attach(address)
        again = pickle.loads(pickled)
        assert (again.get(3), again.counts.is_frozen) == (None, True)
        assert again.shortage
        assert (f"/proc/{os.getpid()}/fd/{fd}" in opened) == (other == "another arena")
        os.close(fd)
        os.close(terminal)
