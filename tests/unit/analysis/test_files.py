"""Files opened by a process that ends, and pages dropped: asked of the kernel itself."""

import ctypes
import mmap
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from lightning_echo.analysis.parts import OpenedFiles, drop_pages, hold_data


def open_some(paths, sender):
    opened = OpenedFiles()
    for path in paths:
        if path.exists():
            path.read_bytes()
    first = opened.take()
    sender.send((first, opened.take()))


def in_a_process(paths):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=open_some, args=(paths, sender))
    process.start()
    found = receiver.recv()
    process.join()
    return found


def resident_pages(path):
    """How many of a file's pages are in the page cache, by mincore."""
    size = path.stat().st_size
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        flags = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), flags) == 0
        return sum(flag & 1 for flag in flags)


def test_files_that_are_written_are_not_read(tmp_path):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=open_to_write, args=(tmp_path, sender))
    process.start()
    assert receiver.recv() == [str(tmp_path / "read"), str(tmp_path / "by number")]
    process.join()


def open_to_write(folder, sender):
    for name in ("read", "by number", "both"):
        (folder / name).write_text("")
    opened = OpenedFiles()
    for name, mode in (("read", "rb"), ("written", "w"), ("log", "a"), ("both", "r+")):
        open(folder / name, mode).close()
    os.close(os.open(folder / "by number", os.O_RDONLY))
    os.close(os.open(folder / "both", os.O_RDWR))
    sender.send(opened.take())


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


def test_files_that_were_opened_are_named_once_and_programs_are_not(tmp_path):
    data, program = tmp_path / "data.bin", tmp_path / "program.py"
    data.write_bytes(b"data")
    program.write_text("")
    assert in_a_process([data, program, data, tmp_path / "missing.bin", Path("/proc/self/stat")]) == ([str(data)], [])


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


def test_files_that_are_gone_are_left_out(tmp_path):
    (tmp_path / "there").write_bytes(b"x")
    assert drop_pages([str(tmp_path / "gone"), str(tmp_path / "there")]) == 1


def test_where_the_system_cannot_nothing_is_dropped(tmp_path, monkeypatch):
    (tmp_path / "there").write_bytes(b"x")
    monkeypatch.delattr(os, "posix_fadvise")
    assert drop_pages([str(tmp_path / "there")]) == 0
