"""How time and memory of processes are taken."""

import subprocess
import sys

import pytest
from timing import tree_memory


@pytest.mark.own_interpreter  # the memory of its process is measured
def test_memory_of_a_process_is_told_apart_from_shared_memory_and_its_children_count():
    script = """
import mmap, os, sys
own, window = bytearray(b"1") * 2**26, os.memfd_create("window")
os.ftruncate(window, 2**25)
shared = mmap.mmap(window, 2**25)
shared[:] = b"1" * 2**25
if os.fork():
    print("ready", flush=True)
    sys.stdin.read()
else:
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = tree_memory(process.pid)
        process.stdin.close()
    assert 2**26 <= found.own_bytes < 2**27
    assert found.shared_memory_bytes == 2**25  # though the child has it, too
