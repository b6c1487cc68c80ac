"""An arena in a pickle: it keeps nothing open, it is found again while its process lives, and it is never taken for another."""

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest

from lightning_echo.cache.arena import Arena, ArenaError

MIB = 2**20


@pytest.fixture(params=["memory", "file"])
def arena(request, tmp_path):
    made = Arena.create(10, MIB) if request.param == "memory" else Arena.create_file(str(tmp_path / "arena"), 10, MIB)
    assert made.put(3, [b"some bytes"])
    return made


def read_again(pickled):
    return pickle.loads(pickled)


def test_a_pickle_keeps_no_descriptor_and_starts_no_thread(arena):
    before = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    pickles = [pickle.dumps(arena) for _ in range(5)]
    assert (os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")) == before
    assert max(map(len, pickles)) < 400, "without what it holds"


def test_as_often_as_it_is_read_in_this_process_it_is_the_same_arena(arena):
    pickled = pickle.dumps(arena)
    again = [read_again(pickled) for _ in range(2)]
    assert all(each._file is arena._file for each in again)
    assert bytes(again[1].get(3)) == b"some bytes"


def test_another_process_reads_and_writes_the_same_arena_while_this_one_lives(arena):
    program = (
        "import pickle, sys; arena = pickle.load(sys.stdin.buffer); assert arena.get(3); assert arena.put(5, [b'from outside'])"
    )
    subprocess.run([sys.executable, "-c", program], input=pickle.dumps(arena), check=True, timeout=60)
    assert bytes(arena.get(5)) == b"from outside"


def make_and_pickle(connection):
    arena = Arena.create(10, MIB)
    assert arena.put(3, [b"some bytes"])
    connection.send_bytes(pickle.dumps(arena))


def test_after_the_end_of_its_process_it_holds_nothing_takes_nothing_and_says_why():
    receives, sends = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=make_and_pickle, args=(sends,))
    process.start()
    pickled = receives.recv_bytes()
    process.join(60)
    again = read_again(pickled)
    assert (again.keys, again.get(3), again.put(4, [b"x"]), again.counts.is_frozen) == (10, None, False, True)
    assert f"process {process.pid}, which has its examples, is gone" in again.shortage


def another_arena():
    other = Arena.create(10, MIB)
    assert other.put(3, [b"of another one"])
    return other


def a_terminal():
    return open("/dev/ptmx", "r+b", buffering=0)  # each time that it is opened there is one more


@pytest.mark.parametrize("make_other", [another_arena, a_terminal])
def test_what_has_the_number_of_its_descriptor_by_now_is_not_taken_for_it(make_other, monkeypatch):
    arena, other = Arena.create(10, MIB), make_other()
    assert arena.put(3, [b"some bytes"])
    pickled, address, fd = pickle.dumps(arena), arena.address, arena._file.fd
    del arena
    gc.collect()
    os.dup2(other._file.fd if make_other is another_arena else other.fileno(), fd)
    opened = []
    monkeypatch.setattr(os, "open", lambda path, *args, open=os.open: opened.append(str(path)) or open(path, *args))
    with pytest.raises(ArenaError):
        Arena.attach(address)
    again = read_again(pickled)
    assert (again.get(3), again.counts.is_frozen) == (None, True)
    assert again.shortage
    assert (f"/proc/{os.getpid()}/fd/{fd}" in opened) == (make_other is another_arena)
    os.close(fd)
    if make_other is a_terminal:
        other.close()


def send_back(arena, number):
    return os.getpid(), bytes(arena.get(3) or b""), arena.put(number, [b"by a task"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_tasks_of_a_pool_have_the_arena(arena, method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        results = pool.starmap(send_back, [(arena, number) for number in range(4, 10)], chunksize=1)
    assert {(held, is_added) for _, held, is_added in results} == {(b"some bytes", True)}
    assert os.getpid() not in {process for process, _, _ in results}
    assert arena.counts.records == 7
