"""Cores, memory, shared memory and OpenMP of machines that a test makes up."""

import pytest
from machines import GIB, machine

from lightning_echo.doctor.machine import Status, check_resources, whole_cores

QUOTA = {"proc/self/cgroup": "0::/\n", "cgroups/cpu.max": "250000 100000"}


def finding(name, made):
    (found,) = (each for each in check_resources(made) if each.name == name)
    return found


def test_a_good_machine_has_nothing_to_complain_about(tmp_path):
    found = check_resources(machine(tmp_path))
    assert {each.status for each in found} == {Status.ok}
    assert [each.name for each in found] == ["cores", "memory", "shared_memory", "openmp"]


def test_a_quota_is_told_with_the_number_to_count_with(tmp_path):
    found = finding("cores", machine(tmp_path, files=QUOTA))
    assert (found.status, found.figures) == (Status.warning, {"cores": 2.5, "visible_cores": 8})
    assert "2 for num_workers" in found.way_out
    assert whole_cores(machine(tmp_path, files=QUOTA)) == 2


def test_a_single_core_is_a_warning(tmp_path):
    assert finding("cores", machine(tmp_path, affinity=1)).status is Status.warning


def test_less_than_one_core_is_still_one_worker(tmp_path):
    assert whole_cores(machine(tmp_path, files={**QUOTA, "cgroups/cpu.max": "50000 100000"})) == 1


@pytest.mark.parametrize(
    ("meminfo", "status"),
    [
        ("MemTotal: 16777216 kB\nMemAvailable: 500000 kB\n", Status.warning),
        ("MemTotal: 16777216 kB\nMemAvailable: 2000000 kB\n", Status.ok),
        ("", Status.warning),
    ],
)
def test_little_or_unknown_memory_is_a_warning(meminfo, status, tmp_path):
    assert finding("memory", machine(tmp_path, files={"proc/meminfo": meminfo})).status is status


@pytest.mark.parametrize(
    ("space", "platform", "status"),
    [
        ((8 * GIB, 7 * GIB), "linux", Status.ok),
        ((64 * 2**20, 64 * 2**20), "linux", Status.warning),
        ((8 * GIB, 0), "linux", Status.warning),
        (None, "linux", Status.error),
        (None, "darwin", Status.ok),
    ],
)
def test_little_shared_memory_is_a_warning_and_none_an_error(space, platform, status, tmp_path):
    asked = []
    made = machine(tmp_path, platform=platform, space_of=lambda path: asked.append(str(path)) or space)
    assert finding("shared_memory", made).status is status
    assert asked == (["/dev/shm"] if platform == "linux" else [])


@pytest.mark.parametrize(
    ("environ", "files", "status"),
    [
        ({}, {}, Status.ok),
        ({"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE"}, {}, Status.ok),
        ({"OMP_NUM_THREADS": "9"}, {}, Status.warning),
        ({"OMP_NUM_THREADS": "4,2"}, {}, Status.ok),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}, Status.warning),
        ({}, QUOTA, Status.warning),
        ({"OMP_NUM_THREADS": "2"}, QUOTA, Status.ok),
        ({"OMP_NUM_THREADS": "3"}, QUOTA, Status.warning),
    ],
)
def test_threads_that_take_the_cores_of_the_workers_are_a_warning(environ, files, status, tmp_path):
    found = finding("openmp", machine(tmp_path, environ=environ, files=files))
    assert found.status is status
    assert bool(found.way_out) == (status is Status.warning)
