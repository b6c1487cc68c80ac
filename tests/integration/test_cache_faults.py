"""A cache and what goes wrong: killed workers, a killed main process, memory that runs short. No byte is ever wrong."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import cache_fault_runs
import psutil
import pytest
from cache_fault_runs import MIB
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.cache import arena

KILLS = 12


class Sizes(StagedDataset):
    """Examples of very different sizes, whose every byte is known."""

    length = 600

    def load(self, index):
        return index, bytes([index % 251]) * (1 + index * index % 60_000)

    def augment(self, example):
        return example

    def __len__(self):
        return self.length


def digests(examples):
    """Of each example its index, and size and checksum of its bytes.

    A worker sends that in one piece. In the middle of a message with all bytes it may be killed, and torch then waits for the
    rest for good, with or without a cache.
    """
    return [(index, len(content), zlib.crc32(content)) for index, content in examples]


def check(batch):
    for index, size, checksum in batch:
        expected = bytes([index % 251]) * (1 + index * index % 60_000)
        assert (size, checksum) == (len(expected), zlib.crc32(expected))


def kill_one_worker(before):
    workers = {child.pid for child in psutil.Process().children()} - before
    for pid in sorted(workers)[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_workers_killed_at_any_moment_of_filling_cost_no_byte_of_what_is_read():
    moments = random.Random(7)
    echoed = EchoLoader(
        DataLoader(Sizes(), batch_size=8, num_workers=2, shuffle=True, collate_fn=digests), 1, seed=0, cache="64MiB"
    )
    killed = 0
    for _ in range(KILLS):
        before = {child.pid for child in psutil.Process().children()}
        # No event: torch raises in the main thread, at any moment, and one that is interrupted in `set` may stay locked for good.
        runs = []
        delay = moments.uniform(0, 0.1)

        def kill(before=before, runs=runs, delay=delay):
            while not runs:  # the main thread must not be starting threads when torch raises: Python does not stand that
                time.sleep(0.001)
            time.sleep(delay)
            kill_one_worker(before)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            while killer.is_alive():
                for batch in echoed:
                    runs.append(True)
                    check(batch)
        except RuntimeError as error:
            if "is killed by signal: Killed" not in str(error):
                raise
            killed += 1
        finally:
            runs.append(True)  # a worker that was killed before may have ended this run at its beginning
            killer.join(60)
        assert not killer.is_alive()
    assert killed >= KILLS // 2, "else the moments were none of filling"
    seen = set()
    for _ in range(2):
        for batch in echoed:
            check(batch)
            seen |= {index for index, *_ in batch}
    assert seen == set(range(Sizes.length))
    counts = echoed.cache_counts
    assert counts is not None
    assert counts.examples > Sizes.length // 2, "a killed worker costs what it was writing, and nothing else"
    echoed.close()


def test_memory_that_runs_short_freezes_the_cache_and_the_run_goes_on(monkeypatch):
    class Large(cache_fault_runs.Blocks):
        reads = 0

        def load(self, index):
            self.reads += 1
            return super().load(index)

    dataset = Large(200, MIB)
    echoed = EchoLoader(DataLoader(dataset, batch_size=2), 1, cache="400MiB")
    answers = iter([2**33, 2**33, 0])
    monkeypatch.setattr(arena, "free_memory_bytes", lambda: next(answers, 0))
    with pytest.warns(UserWarning, match=r"the cache is full with \d+ examples.*: memory is running short") as said:
        batches = [*echoed, *echoed]
    assert len(said) == 1
    for batch in batches:
        cache_fault_runs.check(batch)
    counts = echoed.cache_counts
    assert counts is not None
    assert counts.is_full
    assert 64 <= counts.examples < 200, "one step of 64 MiB or two, and then no more"
    assert counts.hits == counts.examples, "the second pass"
    assert counts.misses == 400 - counts.hits


def in_group(name, limit_bytes):
    """A new control group for memory, and the command that begins in it; None if none may be made here."""
    for tree, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(tree) / name
        try:
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group, ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    return None


@pytest.mark.program
def test_in_a_container_that_runs_short_of_memory_the_kernel_kills_nobody(tmp_path):
    limited = in_group(f"lightning_echo_{os.getpid()}", 1100 * MIB)
    if limited is None:
        pytest.skip("no control group may be made here")
    group, begin = limited
    try:
        command = [*begin, sys.executable, cache_fault_runs.__file__, "limited_memory", str(tmp_path)]
        # Memory that is given back goes back to the system at once: what the C library keeps of it is no part of this.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().split(), 20)
        group.rmdir()
    assert done.returncode == 0, done.stderr[-3000:]
    is_full, held_bytes, hits, _ = done.stdout.split()[-4:]
    assert is_full == "True"
    assert 0 < int(held_bytes) < 500 * MIB
    assert int(hits) > 0


@pytest.mark.program
def test_the_file_system_for_shared_memory_may_be_as_small_as_dockers(tmp_path):
    begin = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no name space of mounts may be made here")
    command = [*begin, sys.executable, cache_fault_runs.__file__, "small_shared_memory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shared, held, hits = map(int, done.stdout.split()[-3:])
    assert shared == 64 * MIB
    assert held > 120 * MIB
    assert hits == 120


def users_of(device, inode):
    """Processes that have a file open or mapped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            paths = list((process / "fd").iterdir())
            opened = [(status.st_dev, status.st_ino) for path in paths if path.exists() for status in [path.stat()]]
        except OSError:
            continue
        if (device, inode) in opened:
            found.append(int(process.name))
    return found


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


@pytest.mark.own_interpreter  # its process is looked for
@pytest.mark.program
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_killed_main_process_leaves_nothing_behind(tmp_path, where):
    if where == "disk":
        (tmp_path / "disk").mkdir()
    process = subprocess.Popen([sys.executable, cache_fault_runs.__file__, "main_killed", str(tmp_path)])
    told = tmp_path / "told"
    try:
        until(told.exists, 60)
        device, inode = map(int, told.read_text().split())
        assert process.pid in users_of(device, inode)
    finally:
        process.kill()
        process.wait()
    until(lambda: not users_of(device, inode), 30)  # its workers notice within seconds that it is gone
    assert not (tmp_path / "disk").exists() or not list((tmp_path / "disk").iterdir())
