"""What memory is free in all control groups around a process, and what is let go for the next copies."""

import platform
import subprocess
import sys

import pytest

from lightning_echo.data.machine import free_memory_bytes

MIB = 2**20
NO_LIMIT_1 = 2**63 - 4096  # as version 1 says it


def version_2(limit, used, inactive_file=0):
    stat = f"anon 5\nfile {inactive_file}\ninactive_file {inactive_file}\nactive_file 3"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def version_1(limit, used, inactive_file=0):
    stat = f"inactive_file 1\ntotal_inactive_file {inactive_file}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("membership", "groups", "free"),
    [
        (None, {}, 1000),
        ("0::/\n", {".": version_2(300 * MIB, 180 * MIB)}, 120),
        ("0::/\n", {".": version_2(300 * MIB, 300 * MIB, inactive_file=90 * MIB)}, 90),
        (
            "0::/slurm/job_7/step_0\n",
            {
                "slurm/job_7/step_0": version_2("max", 10 * MIB),
                "slurm/job_7": version_2(200 * MIB, 150 * MIB),
                "slurm": version_2(900 * MIB, 300 * MIB),
            },
            50,
        ),
        ("0::/../../system.slice/docker-12ab.scope\n", {".": version_2(64 * MIB, 24 * MIB)}, 40),
        (
            "7:cpu,cpuacct:/a\n4:memory:/docker/12ab\n0::/\n",
            {"memory/docker/12ab": version_1(500 * MIB, 450 * MIB, 20 * MIB), "memory": version_1(NO_LIMIT_1, 2000 * MIB)},
            70,
        ),
        ("4:memory:/\n0::/user\n", {"memory": version_1(NO_LIMIT_1, 0), "unified/user": version_2(100 * MIB, 70 * MIB)}, 30),
        ("0::/\n", {".": version_2("max", 5000 * MIB)}, 1000),
        ("0::/\n", {".": version_2(100 * MIB, 130 * MIB)}, 0),
    ],
    ids=[
        *["no groups", "a container", "files that were only read are free", "limited by one around it"],
        *["a path that is not to be seen", "version 1", "version 2 beside version 1", "no limit", "over its limit"],
    ],
)
def test_the_smallest_limit_counts_and_what_is_used_of_it(membership, groups, free, tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {4000 * 1024} kB\nMemAvailable:  {1000 * 1024} kB\nBuffers: 7 kB\n")
    if membership is not None:
        (proc / "self" / "cgroup").write_text(membership)
    for folder, files in groups.items():
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (cgroups / folder / name).write_text(f"{text}\n")
    assert free_memory_bytes(proc, cgroups) == free * MIB


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
