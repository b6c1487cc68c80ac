"""Full disks and short memory: they do not reach trainings that share."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from sharing_runs import Numbers, epochs_of, indices, loader_of

from lightning_echo.share import process as starting

HERE = Path(__file__).parent
LENGTH = 300

PROGRAM = f"""
import json, os, sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from sharing_runs import *

def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == 28, error
    try:
        (folder / "one more").write_bytes(b"x" * 4096)
    except OSError:
        return
    raise AssertionError("there is room")

def main():
    options = {{"window": 2**14, "workers": 2, "linger_seconds": 0}}
    first = loader_of(Numbers({LENGTH}), 8, **options)
    epoch = iter(first)
    had = rows(next(epoch))
    for folder in (Path("/dev/shm"), Path(os.environ["LIGHTNING_ECHO_SHARED"])):
        fill(folder)
    rest = [rows(batch) for batch in epoch]
    second = loader_of(Numbers({LENGTH}), 5, join="pass", **options)
    def run(loader, count):
        found = [indices(epoch) for epoch in epochs_of(loader, count)]
        loader.close()
        return found
    found = together(lambda: run(first, 4), lambda: run(second, 2))
    print(json.dumps([indices([had, *rest]), *found[0], *found[1]]))

if __name__ == "__main__":
    main()
"""


def in_namespace(command, folder, tmp_path):
    """Runs a program that sees small file systems of its own, in ``/dev/shm`` and in a folder."""
    mounts = f"mount -t tmpfs -o size=256k,mode=0700 none {folder} && mount -t tmpfs -o size=256k none /dev/shm"
    environment = {**os.environ, "LIGHTNING_ECHO_SHARED": str(folder), "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=tmp_path,
        check=False,
    )


def can_mount(tmp_path):
    """Whether this system lets a program mount file systems of its own."""
    folder = tmp_path / "try"
    folder.mkdir()
    return shutil.which("unshare") is not None and in_namespace(["true"], folder, tmp_path).returncode == 0


@pytest.mark.program
def test_full_file_systems_have_no_effect_on_who_shares_and_who_comes(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("this system lets nobody mount a file system of its own")
    folder = tmp_path / "s"
    folder.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    done = in_namespace([sys.executable, "program.py"], folder, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    epochs = json.loads(done.stdout.splitlines()[-1])
    assert [sorted(epoch) for epoch in epochs] == [list(range(LENGTH))] * 7


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(("free", "window"), [(2**21, "1GiB"), (None, "1MiB")])
def test_where_memory_is_short_the_window_is_smaller_and_says_so_else_nothing_is_said(monkeypatch, free, window):
    monkeypatch.setattr(starting, "free_memory_bytes", lambda: free)
    loader = loader_of(Numbers(LENGTH), 8, window=window)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = epochs_of(loader, 1)
    assert sorted(indices(found[0])) == list(range(LENGTH))
    warned = [str(each.message) for each in said if "share.window" in str(each.message)]
    assert len(warned) == (free is not None)
    assert all("share.window='1GiB' is more than half of the free memory: the window has 1 MiB" in text for text in warned)
    loader.close()
