"""Files opened by a process that ends, and pages dropped: asked of the kernel itself."""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from lightning_echo.analysis.parts import OpenedFiles, drop_pages, hold_data


def resident_pages(path):
    """How many of a file's pages are in the page cache, by mincore."""
    size = path.stat().st_size
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        flags = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), flags) == 0
        return sum(flag & 1 for flag in flags)


def open_some(folder, sender):
    for name in ("read", "by number", "both", "program.py"):
        (folder / name).write_text("")
    opened = OpenedFiles()
    for name, mode in (("read", "rb"), ("written", "w"), ("log", "a"), ("both", "r+"), ("program.py", "r"), ("read", "r")):
        open(folder / name, mode).close()
    os.close(os.open(folder / "by number", os.O_RDONLY))
    os.close(os.open(folder / "both", os.O_RDWR))
    Path("/proc/self/stat").read_bytes()
    with contextlib.suppress(FileNotFoundError):
        (folder / "missing").read_bytes()
    sender.send((opened.take(), opened.take()))


def test_files_that_are_read_are_named_once_but_for_programs_and_what_is_written(tmp_path):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=open_some, args=(tmp_path, sender))
    process.start()
    assert receiver.recv() == ([str(tmp_path / "read"), str(tmp_path / "by number")], [])
    process.join()


def test_data_lies_in_a_file_for_each_batch_or_in_large_ones(tmp_path):
    paths = [str(tmp_path / str(index)) for index in range(4)]
    for path in paths:
        Path(path).write_bytes(b"x")
    assert hold_data(paths, 4)
    assert not hold_data(paths, 5)
    with open(paths[0], "wb") as file:
        file.truncate(16 * 2**20)
    assert hold_data(paths[:1], 5)
    assert not hold_data([], 5)
    assert not hold_data([str(tmp_path / "gone")], 5)


def test_dropped_pages_are_read_from_the_storage_again(tmp_path):
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs", "overlayfs"):
        pytest.skip(f"{kind} is no storage whose pages could be dropped")
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    assert resident_pages(path) == 64
    assert drop_pages([str(path)]) == 1
    assert resident_pages(path) == 0
    assert path.stat().st_size == 64 * mmap.PAGESIZE


def test_files_that_are_gone_are_left_out_and_a_system_that_cannot_drops_none(tmp_path, monkeypatch):
    (tmp_path / "there").write_bytes(b"x")
    paths = [str(tmp_path / "gone"), str(tmp_path / "there")]
    assert drop_pages(paths) == 1
    monkeypatch.delattr(os, "posix_fadvise")
    assert drop_pages(paths) == 0
