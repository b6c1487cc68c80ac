"""What is free is the least of the machine and of all control groups around the process."""

from pathlib import Path

import pytest

from lightning_echo.data.machine import free_memory_bytes

MIB = 2**20


@pytest.fixture
def system(tmp_path):
    """A machine with 1000 MiB free and no control groups; both versions' trees can be written."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {4000 * 1024} kB\nMemAvailable:  {1000 * 1024} kB\nBuffers: 7 kB\n")
    return proc, cgroups


def write_group(folder: Path, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def version_2(limit, used, inactive_file=0):
    stat = f"anon 5\nfile {inactive_file}\ninactive_file {inactive_file}\nactive_file 3"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def version_1(limit, used, inactive_file=0):
    stat = f"inactive_file 1\ntotal_inactive_file {inactive_file}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def test_without_groups_it_is_what_the_machine_has(system):
    assert free_memory_bytes(*system) == 1000 * MIB


def test_the_limit_of_a_container_counts_and_what_it_uses(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("0::/\n")
    write_group(cgroups, version_2(300 * MIB, 180 * MIB))
    assert free_memory_bytes(proc, cgroups) == 120 * MIB


def test_files_that_were_only_read_are_free(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("0::/\n")
    write_group(cgroups, version_2(300 * MIB, 300 * MIB, inactive_file=90 * MIB))
    assert free_memory_bytes(proc, cgroups) == 90 * MIB


def test_a_group_may_be_limited_by_one_around_it(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("0::/slurm/job_7/step_0\n")
    write_group(cgroups / "slurm" / "job_7" / "step_0", version_2("max", 10 * MIB))
    write_group(cgroups / "slurm" / "job_7", version_2(200 * MIB, 150 * MIB))
    write_group(cgroups / "slurm", version_2(900 * MIB, 300 * MIB))
    assert free_memory_bytes(proc, cgroups) == 50 * MIB


def test_a_path_that_is_not_to_be_seen_means_the_group_at_the_root(system):
    """Docker with a tree of its own: the path is that of the machine."""
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("0::/../../system.slice/docker-12ab.scope\n")
    write_group(cgroups, version_2(64 * MIB, 24 * MIB))
    assert free_memory_bytes(proc, cgroups) == 40 * MIB


def test_version_1_has_a_tree_for_memory_and_other_names(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("7:cpu,cpuacct:/a\n4:memory:/docker/12ab\n0::/\n")
    write_group(cgroups / "memory" / "docker" / "12ab", version_1(500 * MIB, 450 * MIB, inactive_file=20 * MIB))
    write_group(cgroups / "memory", version_1(2**63 - 4096, 2000 * MIB))
    assert free_memory_bytes(proc, cgroups) == 70 * MIB


def test_version_2_beside_version_1_is_a_folder_of_its_own(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("4:memory:/\n0::/user\n")
    write_group(cgroups / "memory", version_1(2**63 - 4096, 0))
    write_group(cgroups / "unified" / "user", version_2(100 * MIB, 70 * MIB))
    assert free_memory_bytes(proc, cgroups) == 30 * MIB


def test_no_limit_is_no_limit(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("0::/\n")
    write_group(cgroups, version_2("max", 5000 * MIB))
    assert free_memory_bytes(proc, cgroups) == 1000 * MIB


def test_a_group_over_its_limit_has_nothing_left(system):
    proc, cgroups = system
    (proc / "self" / "cgroup").write_text("0::/\n")
    write_group(cgroups, version_2(100 * MIB, 130 * MIB))
    assert free_memory_bytes(proc, cgroups) == 0


def test_this_machine_says_something_plausible():
    free = free_memory_bytes()
    assert free is None or 2**20 < free < 2**46
