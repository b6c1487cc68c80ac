"""What a process may use of a machine, by the kernel's files."""

import pytest
from machines import GIB, machine

from lightning_echo.doctor.machine import Machine, cores_of, installed_version, memory_of

V2, V1 = "0::/job\n", "4:cpu,cpuacct:/job\n3:memory:/job\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": V2, "cgroups/job/cpu.max": "250000 100000"}, 2.5),
        ({"proc/self/cgroup": V2, "cgroups/job/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": V2, "cgroups/cpu.max": "300000 100000"}, 3),  # the tree's root is the container's own group
        ({"proc/self/cgroup": V2, "cgroups/cpu.max": "300000 100000", "cgroups/job/cpu.max": "400000 100000"}, 3),
        ({"proc/self/cgroup": V2, "cgroups/job/cpu.max": "9000000 100000"}, 8),  # more than there are
        (
            {"proc/self/cgroup": V1, "cgroups/cpu/job/cpu.cfs_quota_us": "50000", "cgroups/cpu/job/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ({"proc/self/cgroup": V1, "cgroups/cpu/job/cpu.cfs_quota_us": "-1", "cgroups/cpu/job/cpu.cfs_period_us": "100000"}, 8),
        ({"proc/self/cgroup": "4:pids:/job\n", "cgroups/cpu/job/cpu.cfs_quota_us": "50000"}, 8),
    ],
)
def test_cores_are_those_of_the_affinity_or_of_the_least_quota(files, cores, tmp_path):
    assert cores_of(machine(tmp_path, files=files)) == cores


@pytest.mark.parametrize(
    ("files", "limit", "free"),
    [
        ({}, 16 * GIB, 8 * GIB),
        (
            {"proc/self/cgroup": V2, "cgroups/job/memory.max": str(4 * GIB), "cgroups/job/memory.current": str(GIB)},
            4 * GIB,
            3 * GIB,
        ),
        ({"proc/self/cgroup": V2, "cgroups/job/memory.max": "max", "cgroups/job/memory.current": str(GIB)}, 16 * GIB, 8 * GIB),
        (
            {
                "proc/self/cgroup": V1,
                "cgroups/memory/job/memory.limit_in_bytes": str(2 * GIB),
                "cgroups/memory/job/memory.usage_in_bytes": str(GIB),
            },
            2 * GIB,
            GIB,
        ),
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_least_limit(files, limit, free, tmp_path):
    assert memory_of(machine(tmp_path, files=files)) == (limit, free)


def test_by_default_it_is_this_machine():
    own = Machine()
    assert 0 < cores_of(own) <= own.affinity
    assert own.space_of(own.proc / "no-such-folder") is None


def test_the_version_of_an_installed_package_is_found():
    assert installed_version("pytest") == pytest.__version__
