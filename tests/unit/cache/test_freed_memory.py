"""Copies that are let go leave their memory to the next ones: counted by the pages that the system has to clear."""

import os
import platform
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader
from lightning_echo.cache import reads

PROGRAM = """
import resource
from lightning_echo.cache.reads import keep_freed_memory

def pages_cleared():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
example = bytes(150_000)
before_first = pages_cleared()
[bytearray(example) for _ in range(32)]
first = pages_cleared() - before_first
for _ in range(20):
    [bytearray(example) for _ in range(32)]
print(first, (pages_cleared() - before_first - first) / 20)
"""


@pytest.mark.program
@pytest.mark.own_interpreter  # counts pages of memory
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory by rules of its own")
def test_a_batch_takes_over_the_memory_of_the_batch_before_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, later = map(float, done.stdout.split())
    assert first > 0
    assert later < first / 5


@pytest.mark.parametrize("workers", [0, 1])
def test_only_workers_keep_it(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(reads, "keep_freed_memory", (tmp_path / "kept").touch)
    loader = DataLoader([1.0, 2.0, 3.0, 4.0], 2, num_workers=workers, multiprocessing_context="fork" if workers else None)
    echoed = EchoLoader(loader, 1, seed=0, cache={"size": "1MiB", "hold": "whole"})
    assert len(list(echoed)) == 2
    echoed.close()
    assert os.listdir(tmp_path) == ["kept"] * workers
