"""Nobody waits forever for an arena: not where one is collected, not where it is opened twice, not after an interrupt.

What would wait forever does so in a process of its own.
"""

import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import threading

import pytest

from lightning_echo.cache import arena as arena_module
from lightning_echo.cache.arena import Arena

MIB = 2**20
PATIENCE = 20  # seconds after which what hangs fails


def in_a_process(target, *args):
    """Runs it in a forked process; returns its exit code, None if it hangs."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join(PATIENCE)
    exitcode = process.exitcode
    process.kill()
    process.join()
    return exitcode


def collect_under_the_lock(arena):
    garbage = Arena.create(10, MIB)
    garbage.itself = garbage
    fd, again = os.open(f"/proc/self/fd/{arena._file.fd}", os.O_RDWR), []
    opens = threading.Thread(target=lambda: again.append(Arena(fd)))
    del garbage

    def collect():
        opens.start()
        gc.collect()

    before = len(arena_module._open)
    arena._file.locked(collect)
    opens.join(PATIENCE)
    assert again[0]._file is arena._file
    assert len(arena_module._open) == before - 1, "what was collected is closed"
    assert again[0].put(1, [b"x"])


def test_an_arena_may_be_collected_in_a_thread_for_whose_lock_another_one_waits_that_opens_a_file():
    gc.collect()  # what earlier tests have left
    gc.disable()  # the moment is chosen here
    try:
        assert in_a_process(collect_under_the_lock, Arena.create(10, MIB)) == 0
    finally:
        gc.enable()


def open_in_two_threads(path):
    lock_alone, first_is_alone = arena_module.lock_alone, threading.Event()

    def meeting(fd):
        is_alone = lock_alone(fd)
        if not first_is_alone.is_set():
            first_is_alone.set()
        return is_alone

    arena_module.lock_alone = meeting
    found = []

    def second():
        assert first_is_alone.wait(PATIENCE)
        found.append(Arena.open_file(path))

    opens = threading.Thread(target=second)
    opens.start()
    found.append(Arena.open_file(path))
    opens.join(PATIENCE)
    assert found[0]._file is found[1]._file
    assert found[0].put(0, [b"x"])


def test_two_threads_may_open_a_file_at_once(tmp_path):
    path = str(tmp_path / "arena")
    Arena.create_file(path, 10, MIB)
    assert in_a_process(open_in_two_threads, path) == 0


def put_one(arena):
    assert arena.put(1, [b"x"])


def test_an_interrupt_at_the_moment_of_locking_leaves_nothing_locked(monkeypatch):
    arena, lock = Arena.create(10, MIB), fcntl.fcntl

    def interrupted(fd, command, *rest):
        lock(fd, command, *rest)
        if command == fcntl.F_OFD_SETLKW:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "fcntl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            arena.add_lookups(1, 1)
    assert in_a_process(put_one, arena) == 0
    assert bytes(arena.get(1)) == b"x"
    assert arena.put(2, [b"y"])
    assert arena.lookups == (0, 0)


def test_a_closed_copy_of_the_descriptor_does_not_end_the_lock():
    """As when an arena goes to a process of a pool: the copy of its descriptor is closed while another thread may write."""
    arena, waits = Arena.create(10, MIB), []

    def hold():
        os.close(os.dup(arena._file.fd))
        writer = multiprocessing.get_context("fork").Process(target=put_one, args=(arena,))
        writer.start()
        writer.join(0.3)
        waits.append(writer.is_alive())
        return writer

    writer = arena._file.locked(hold)
    writer.join(PATIENCE)
    assert waits == [True], "the other process waits"
    assert writer.exitcode == 0
    assert bytes(arena.get(1)) == b"x"


def open_while_interrupted():
    """Interrupts itself at a new place each time, while arenas are made and left."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for number in range(1500):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 500 * 1e-6)
            for _ in range(3):
                Arena.create(10, 4096)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
    opened = threading.Thread(target=Arena.create, args=(10, 4096), daemon=True)
    opened.start()
    opened.join(PATIENCE / 2)
    os._exit(1 if opened.is_alive() else 0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="in Python 3.10 an interrupt may come into the middle of a with statement")
@pytest.mark.filterwarnings("ignore")
def test_interrupts_while_arenas_are_opened_leave_nothing_locked():
    assert in_a_process(open_while_interrupted) == 0
