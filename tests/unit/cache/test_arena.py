"""An arena holds each record once, whole, for all processes of a node, whatever happens to those that write into it."""

import errno
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest

from lightning_echo.cache import arena as arena_file
from lightning_echo.cache import arena as arena_module
from lightning_echo.cache.arena import Arena, ArenaAddress, ArenaError

MIB = 2**20


def record_of(key, size=None):
    """A record that tells whether it is whole, and whose it is."""
    size = 50 + 977 * key % 4000 if size is None else size
    body = random.Random(key).randbytes(size)
    return zlib.crc32(body).to_bytes(4, "little") + key.to_bytes(4, "little") + body


def is_whole(data, key):
    data = bytes(data)
    return zlib.crc32(data[8:]).to_bytes(4, "little") == data[:4] and int.from_bytes(data[4:8], "little") == key


def held(arena):
    return [key for key in range(arena.keys) if key in arena]


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    def make(keys, budget_bytes):
        if request.param == "memory":
            return Arena.create(keys, budget_bytes)
        return Arena.create_file(str(tmp_path / "arena"), keys, budget_bytes)

    return make


class TestHolding:
    def test_what_was_put_is_got_and_nothing_else(self, make):
        arena = make(100, MIB)
        for key in range(0, 100, 3):
            assert arena.put(key, [record_of(key)[:10], b"", record_of(key)[10:]])
        assert held(arena) == list(range(0, 100, 3))
        assert all(bytes(arena.get(key)) == record_of(key) for key in held(arena))
        assert arena.get(1) is None
        assert arena.counts.records == 34

    def test_a_key_is_held_once_and_never_replaced(self, make):
        arena = make(3, MIB)
        assert arena.put(1, [b"first"])
        taken = arena.counts.bytes
        assert not arena.put(1, [b"second"])
        assert bytes(arena.get(1)) == b"first"
        assert arena.counts.bytes == taken

    def test_an_empty_record_is_a_record(self, make):
        arena = make(3, MIB)
        assert arena.put(2, [])
        assert bytes(arena.get(2)) == b""

    def test_it_takes_no_more_than_its_budget_and_is_frozen_then(self, make):
        arena = make(1000, 100_000)
        added = [arena.put(key, [bytes(992)]) for key in range(1000)]
        assert added == [True] * 97 + [False] * 903, "1,024 bytes each, with the length and to the next multiple of 64"
        assert arena.counts == (97 * 1024, 97, True)
        assert not arena.put(999, [b""]), "frozen"

    def test_a_record_larger_than_what_is_left_is_passed_over_while_much_is_left(self, make):
        arena = make(10, 100_000)
        assert arena.put(0, [bytes(50_000)])
        assert not arena.put(1, [bytes(60_000)])
        assert not arena.counts.is_frozen
        assert arena.put(2, [bytes(40_000)])
        assert not arena.put(3, [bytes(20_000)])
        assert arena.counts.is_frozen

    def test_a_budget_smaller_than_any_record_holds_nothing(self, make):
        arena = make(10, 1000)
        assert not any(arena.put(key, [bytes(2000)]) for key in range(10))
        assert arena.counts[:2] == (0, 0)

    def test_the_index_takes_eight_bytes_per_key(self):
        arena = Arena.create(10**7, MIB)
        assert os.fstat(arena._file.fd).st_blocks * 512 <= 8 * 10**7 + 2 * 4096
        assert arena.put(10**7 - 1, [b"last"])
        assert bytes(arena.get(10**7 - 1)) == b"last"


class TestRunningShort:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_freezes_it(self, make, monkeypatch, number):
        arena = make(10, MIB)
        assert arena.put(0, [b"fits"])
        write = arena_file.write

        def full(fd, parts, offset):
            if offset > arena._file.start:
                raise OSError(number, os.strerror(number))
            write(fd, parts, offset)

        monkeypatch.setattr(arena_file, "write", full)
        assert not arena.put(1, [b"does not"])
        assert arena.counts[1:] == (1, True)
        assert arena.get(1) is None
        assert bytes(arena.get(0)) == b"fits"

    def test_another_error_is_an_error(self, make, monkeypatch):
        arena = make(10, MIB)
        monkeypatch.setattr(os, "pwritev", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match="broken"):
            arena.put(1, [b"x"])

    def test_an_error_while_a_record_is_written_is_one_too_and_the_key_is_never_held(self, make, monkeypatch):
        arena, write = make(10, MIB), arena_file.write

        def broken(fd, parts, offset):
            if offset > arena._file.start:
                raise OSError(errno.EIO, "broken")
            write(fd, parts, offset)

        assert arena.put(0, [b"before"])
        with monkeypatch.context() as patched:
            patched.setattr(arena_file, "write", broken)
            with pytest.raises(OSError, match="broken"):
                arena.put(1, [b"x"])
        assert arena.get(1) is None
        assert not arena.counts.is_frozen
        assert arena.put(2, [b"after"])

    def test_a_limit_of_the_system_freezes_it(self, tmp_path):
        """As a full disk does: the system takes a part of the record, and then refuses."""
        arena = Arena.create_file(str(tmp_path / "arena"), 10, 10 * MIB)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, before[1]))
            added = [arena.put(key, [bytes(MIB)]) for key in range(5)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert added == [True, True, False, False, False]
        assert arena.counts.is_frozen
        assert all(arena.get(key) == bytes(MIB) for key in range(2))
        assert arena.get(2) is None

    def test_memory_is_asked_for_before_each_step_of_growth(self, monkeypatch):
        step = arena_module._GROWTH_STEP_BYTES
        asked = []

        def free():
            asked.append(arena.counts.bytes)
            return 100 * step

        monkeypatch.setattr(arena_module, "free_memory_bytes", free)
        arena = Arena.create(1000, 4 * step, reserve_bytes=step)
        for key in range(30):
            assert arena.put(key, [memoryview(bytes(step // 10))])
        assert [taken // (step // 10) for taken in asked] == [0, 9, 19, 29]

    def test_below_the_reserve_it_is_frozen(self, monkeypatch):
        step = arena_module._GROWTH_STEP_BYTES
        left = [5 * step]
        monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: left[0])
        arena = Arena.create(1000, 100 * step, reserve_bytes=3 * step)
        assert arena.put(0, [b"x"])
        left[0] = 4 * step - 1
        assert arena.put(1, [b"in the step that was allowed"])
        assert not arena.put(2, [memoryview(bytes(step))])
        assert arena.counts.is_frozen
        assert bytes(arena.get(1)) == b"in the step that was allowed"

    def test_a_system_that_does_not_tell_lets_it_grow(self, monkeypatch):
        monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: None)
        assert Arena.create(10, MIB, reserve_bytes=2**60).put(0, [b"x"])


def fill(arena, seed, keys):
    order = list(range(keys))
    random.Random(seed).shuffle(order)
    for key in order:
        arena.put(key, [record_of(key)])


class TestSeveralProcesses:
    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
    def test_all_hold_the_same(self, make, method):
        arena, context = make(300, 10 * MIB), multiprocessing.get_context(method)
        writers = [context.Process(target=fill, args=(arena, seed, 300)) for seed in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
            assert writer.exitcode == 0
        assert held(arena) == list(range(300))
        assert all(is_whole(arena.get(key), key) for key in range(300))
        assert arena.counts.records == 300
        assert arena.counts.bytes == sum(-(-(8 + len(record_of(key))) // 64) * 64 for key in range(300)), "each once"

    def test_threads_do_too(self, make):
        arena = make(300, 10 * MIB)
        writers = [threading.Thread(target=fill, args=(arena, seed, 300)) for seed in range(8)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert all(is_whole(arena.get(key), key) for key in range(300))
        assert arena.counts[:2] == (sum(-(-(8 + len(record_of(key))) // 64) * 64 for key in range(300)), 300)

    def test_a_process_of_the_same_user_finds_it_by_its_address(self):
        arena = Arena.create(10, MIB)
        program = (
            "from lightning_echo.cache.arena import Arena, ArenaAddress\n"
            f"arena = Arena.attach({arena.address!r})\n"
            "assert arena.put(5, [b'from outside'])\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ})
        assert bytes(arena.get(5)) == b"from outside"

    def test_an_address_of_nothing(self, tmp_path):
        with pytest.raises(OSError, match="No such file"):
            Arena.attach(ArenaAddress(os.getpid(), 10**6, b""))
        for path in (os.devnull, tmp_path / "other"):
            with open(path, "w") as other, pytest.raises(ArenaError, match="not a cache of lightning_echo"):
                Arena.attach(ArenaAddress(os.getpid(), other.fileno(), b""))

    def test_the_last_one_that_goes_takes_the_memory_along(self):
        arena = Arena.create(10, MIB)
        fd = arena._file.fd
        again = Arena.attach(arena.address)
        assert again._file is arena._file, "one descriptor in a process: closing another would drop the lock"
        del arena
        assert again.put(1, [b"x"])
        del again
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_a_second_descriptor_of_it_is_closed(self):
        arena = Arena.create(10, MIB)
        before = os.listdir("/proc/self/fd")
        again = [Arena.attach(arena.address) for _ in range(5)]
        assert os.listdir("/proc/self/fd") == before
        assert all(each.put(number, [b"x"]) for number, each in enumerate(again))

    def test_a_lock_that_another_thread_has_when_a_process_is_forked(self):
        arena = Arena.create(10, MIB)
        arena._file.threads.acquire()
        child = multiprocessing.get_context("fork").Process(target=arena.put, args=(3, [b"x"]))
        child.start()
        child.join(30)
        arena._file.threads.release()
        assert child.exitcode == 0
        assert bytes(arena.get(3)) == b"x"


def fill_again_and_again(arena, keys, seed):
    order = list(range(keys))
    random.Random(seed).shuffle(order)
    for key in order:
        arena.put(key, [record_of(key)])
    time.sleep(60)


@pytest.mark.grid
@pytest.mark.parametrize("attempt", range(20))
def test_a_writer_that_is_killed_leaves_no_wrong_byte_and_no_lock(make, attempt):
    keys = 3000
    arena, context = make(keys, 100 * MIB), multiprocessing.get_context("fork")
    killed = context.Process(target=fill_again_and_again, args=(arena, keys, attempt))
    killed.start()
    wanted = 1 + 120 * attempt
    while arena.counts.records < wanted:
        assert killed.is_alive()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    left = held(arena)
    assert wanted <= len(left) < keys
    assert all(is_whole(arena.get(key), key) for key in left)
    fill(arena, 0, keys)
    lost = set(range(keys)) - set(held(arena))
    assert len(lost) <= 1, "that which was being written"
    assert all(is_whole(arena.get(key), key) for key in held(arena))


def test_a_writer_that_is_killed_with_the_lock_loses_it(make):
    arena = make(10, MIB)
    reader, writer = os.pipe()

    def hold():
        os.write(writer, b"x")
        time.sleep(60)

    killed = multiprocessing.get_context("fork").Process(target=arena._file.locked, args=(hold,))
    killed.start()
    os.read(reader, 1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert arena.put(0, [b"x"])
    os.close(reader)
    os.close(writer)


class TestFiles:
    def test_are_opened_again_with_all_that_they_hold(self, tmp_path):
        path = str(tmp_path / "arena")
        arena = Arena.create_file(path, 10, MIB)
        arena.put(4, [record_of(4)])
        del arena
        again = Arena.open_file(path)
        assert (again.keys, again.budget_bytes, again.counts.records) == (10, MIB, 1)
        assert is_whole(again.get(4), 4)
        assert again.put(5, [record_of(5)])

    def test_are_for_this_user_alone(self, tmp_path, monkeypatch):
        path = tmp_path / "arena"
        Arena.create_file(str(path), 10, MIB)
        assert path.stat().st_mode & 0o777 == 0o600
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        with pytest.raises(ArenaError, match="belongs to another user"):
            Arena.open_file(str(path))

    @pytest.mark.parametrize("content", [b"", b"something else", b"lightecho0" + bytes(5000)], ids=["empty", "text", "version"])
    def test_of_something_else_are_refused(self, tmp_path, content):
        path = tmp_path / "arena"
        path.write_bytes(content)
        with pytest.raises(
            ArenaError, match="not a cache of lightning_echo, or one of another version: give another path or name"
        ):
            Arena.open_file(str(path))
        assert path.read_bytes() == content

    def test_are_not_followed_through_links_nor_overwritten(self, tmp_path):
        path, link = tmp_path / "arena", tmp_path / "link"
        Arena.create_file(str(path), 10, MIB)
        link.symlink_to(path)
        with pytest.raises(OSError, match="symbolic links"):
            Arena.open_file(str(link))
        with pytest.raises(FileExistsError):
            Arena.create_file(str(path), 10, MIB)


def test_an_arena_in_memory_has_no_name_that_a_killed_process_could_leave_behind():
    # Its process is asked which named files it has open or mapped: /dev/shm itself changes as other tests run beside this one.
    program = (
        "import os, signal\n"
        "from lightning_echo.cache.arena import Arena\n"
        "def named():\n"
        "    opened = set()\n"
        "    for fd in os.listdir('/proc/self/fd'):\n"
        "        try:\n"
        "            opened.add(os.readlink('/proc/self/fd/' + fd))\n"
        "        except FileNotFoundError:\n"
        "            pass  # the folder's own descriptor\n"
        "    mapped = {line.split(maxsplit=5)[5].strip() for line in open('/proc/self/maps') if line.count('/')}\n"
        "    return opened | mapped\n"
        "before = named()\n"
        "arena = Arena.create(10, 2**20)\n"
        "arena.put(1, [bytes(1000)])\n"
        "print(*(named() - before), sep='\\n', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    paths = result.stdout.splitlines()
    assert paths
    assert all(path.startswith("/memfd:") and path.endswith(" (deleted)") for path in paths), paths


@pytest.mark.parametrize("in_memory", [True, False])
def test_lengths_tell_what_can_be_read_what_is_being_written_and_what_is_missing(tmp_path, in_memory):
    arena = Arena.create(20, MIB) if in_memory else Arena.create_file(str(tmp_path / "file"), 20, MIB)
    for key in (3, 7, 0):
        arena.put(key, [record_of(key)])
    arena.put(9, [b""])
    arena._file.set_word(11, arena_file.CLAIMED)
    keys = [7, 11, -1, 3, 9, 7, 19, 0]
    expected = [len(record_of(7)), -1, -2, len(record_of(3)), 0, len(record_of(7)), -2, len(record_of(0))]
    assert arena.lengths_of(np.array(keys)).tolist() == expected
    assert arena.lengths_of(np.array([], dtype=np.int64)).tolist() == []
