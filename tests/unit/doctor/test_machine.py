"""A machine that a test makes up: what a process may use of it, its versions, and how findings are told."""

import json

import pytest
from machines import GIB, machine

from lightning_echo.data.machine import NOT_SEEN, CoreUse
from lightning_echo.doctor.machine import (
    Status,
    as_document,
    as_text,
    check_load,
    check_resources,
    check_versions,
    cores_of,
    error,
    memory_of,
    ok,
    warning,
    whole_cores,
)

V2, V1 = "0::/job\n", "4:cpu,cpuacct:/job\n3:memory:/job\n"
QUOTA = {"proc/self/cgroup": "0::/\n", "cgroups/cpu.max": "250000 100000"}
FINE, SLOW, WRONG = (
    ok("cores", "2 cores.", cores=2.0),
    warning("workers", "No worker.", "Add one."),
    error("loader", "Empty.", "Fill it."),
)


def finding(name, made):
    (found,) = (each for each in [*check_versions(made), *check_resources(made)] if each.name == name)
    return found


def test_a_good_machine_has_nothing_to_complain_about(tmp_path):
    versions, resources = check_versions(machine(tmp_path)), check_resources(machine(tmp_path))
    assert {each.status for each in [*versions, *resources]} == {Status.ok}
    assert [each.name for each in resources] == ["cores", "memory", "shared_memory", "openmp"]
    found = {each.name: each.figures["version"] for each in versions}
    expected = {"python": "3.12.4", "torch": "2.9.0", "torchvision": "0.24.0", "lightning": "2.6.6", "lightning_echo": "0.1.0"}
    assert found == expected


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": V2, "cgroups/cpu.max": "300000 100000", "cgroups/job/cpu.max": "400000 100000"}, 3),
        ({"proc/self/cgroup": V1, "cgroups/cpu/job/cpu.cfs_quota_us": "-1", "cgroups/cpu/job/cpu.cfs_period_us": "100000"}, 8),
        ({"proc/self/cgroup": V2, "cgroups/job/cpu.max": "50000 100000"}, 0.5),
    ],
)
def test_cores_are_those_of_the_affinity_or_of_the_least_quota(files, cores, tmp_path):
    made = machine(tmp_path, files=files)
    assert (cores_of(made), whole_cores(made)) == (cores, max(cores, 1))


@pytest.mark.parametrize(
    ("files", "limit", "free"),
    [
        ({}, 16 * GIB, 8 * GIB),
        ({"cgroups/job/memory.max": str(4 * GIB), "cgroups/job/memory.current": str(GIB)}, 4 * GIB, 3 * GIB),
        ({"cgroups/job/memory.max": "max", "cgroups/job/memory.current": str(GIB)}, 16 * GIB, 8 * GIB),
        (
            {
                "proc/self/cgroup": V1,
                "cgroups/memory/job/memory.limit_in_bytes": str(2 * GIB),
                "cgroups/memory/job/memory.usage_in_bytes": str(GIB),
            },
            *(2 * GIB, GIB),
        ),
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_least_limit(files, limit, free, tmp_path):
    assert memory_of(machine(tmp_path, files={"proc/self/cgroup": V2, **files})) == (limit, free)


def test_a_quota_is_told_with_the_number_to_count_with(tmp_path):
    found = finding("cores", machine(tmp_path, files=QUOTA))
    assert (found.status, found.figures) == (Status.warning, {"cores": 2.5, "visible_cores": 8})
    assert "2 for num_workers" in found.hint


LITTLE = "MemTotal: 16777216 kB\nMemAvailable: 500000 kB\n"


@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        ("cores", {"affinity": 1}, "warning"),
        ("memory", {"files": {"proc/meminfo": LITTLE}}, "warning"),
        ("memory", {"files": {"proc/meminfo": ""}}, "warning"),
        ("shared_memory", {"space_of": lambda path: (8 * GIB, 0)}, "warning"),
        ("shared_memory", {"space_of": lambda path: None if str(path) == "/dev/shm" else (8 * GIB, 8 * GIB)}, "error"),
        ("shared_memory", {"space_of": lambda path: None, "platform": "darwin"}, "ok"),
        ("openmp", {"environ": {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE"}}, "ok"),
        ("openmp", {"environ": {"OMP_NUM_THREADS": "9"}}, "warning"),
        ("openmp", {"environ": {"OMP_NUM_THREADS": "4,2"}}, "ok"),
        ("openmp", {"environ": {"OMP_WAIT_POLICY": "ACTIVE"}}, "warning"),
        ("openmp", {"files": QUOTA}, "warning"),
        ("openmp", {"files": QUOTA, "environ": {"OMP_NUM_THREADS": "2"}}, "ok"),
        ("python", {"python": (3, 9, 20)}, "error"),
        ("python", {"python": (3, 10, 14)}, "warning"),  # forked workers may hang
        ("python", {"python": (3, 10, 15)}, "ok"),
        ("python", {"python": (3, 13, 1)}, "ok"),
        ("torch", {"packages": {"torch": "2.4.0"}}, "ok"),
        ("torch", {"packages": {"torch": "3.0rc1"}}, "ok"),
        ("torchvision", {"packages": {"torchvision": None}}, "ok"),
        ("lightning_echo", {"packages": {"lightning-echo": None}}, "ok"),
    ],
)
def test_what_is_little_or_old_has_its_status_and_a_hint(name, options, status, tmp_path):
    found = finding(name, machine(tmp_path, **options))
    assert found.status is Status(status)
    assert bool(found.hint) == (status != "ok")


@pytest.mark.parametrize(
    ("name", "packages", "text"),
    [
        ("lightning", {"lightning": "2.6.2"}, "lightning 2.6.2 was a malicious release (GHSA-w37p-236h-pfx3)"),
        ("lightning", {"pytorch-lightning": "2.6.3"}, "pytorch-lightning 2.6.3 was a malicious release"),
        ("lightning", {"lightning": None}, "lightning is not installed"),
        ("lightning", {"lightning": None, "pytorch-lightning": "2.6.0"}, "pytorch-lightning 2.6.0 is installed"),
        ("lightning", {"lightning": "2.4.1"}, "lightning 2.4.1 is older than 2.5"),
        ("lightning", {"pytorch-lightning": "1.9.5"}, "pytorch-lightning 1.9.5 is older than 2.5"),
        ("torch", {"torch": None}, "torch is not installed"),
        ("torch", {"torch": "2.3.1+cpu"}, "torch 2.3.1+cpu is older than 2.4"),
    ],
)
def test_what_is_missing_too_old_or_malicious_is_an_error(name, packages, text, tmp_path):
    found = finding(name, machine(tmp_path, packages))
    assert (found.status, bool(found.hint)) == (Status.error, True)
    assert text in found.sentence


def test_a_torchvision_of_another_torch_is_an_error_with_its_message(tmp_path):
    def fails():
        raise RuntimeError("operator torchvision::nms does not exist")

    found = finding("torchvision", machine(tmp_path, import_operators=fails))
    assert found.status is Status.error
    assert found.sentence == "torchvision 0.24.0 does not fit torch 2.9.0: operator torchvision::nms does not exist."


def test_the_text_has_each_findings_status_and_hint_in_wrapped_lines():
    lines = ["machine", "  ok      2 cores.", "  warning No worker.", "          Add one.", "  error   Empty."]
    assert as_text([FINE, SLOW, WRONG]).splitlines() == [*lines, "          Fill it.", "", "1 error, 1 warning"]
    sentence = " ".join(f"word{number}" for number in range(60)) + "."
    text = as_text([ok("cores", sentence)])
    assert max(map(len, text.splitlines())) <= 110
    assert sentence in " ".join(text.split())


def test_the_document_has_a_version_the_worst_status_and_all_fields():
    document = json.loads(as_document([FINE, SLOW]))
    assert (document["lightning_echo_doctor"], document["status"]) == (1, "warning")
    fine, slow = document["findings"]
    assert fine.pop("figures") == {"cores": 2.0}
    assert fine == {"about": "machine", "name": "cores", "status": "ok", "sentence": "2 cores.", "hint": ""}
    assert (slow["hint"], slow["figures"]) == ("Add one.", {})


class Watch:
    """Has seen who had the cores after so many looks; None: it never sees that."""

    def __init__(self, use, after=1):
        self.seen, self.after, self.looks, self.is_blind = use, after, 0, after is None

    def look(self):
        self.looks += 1

    @property
    def use(self):
        return NOT_SEEN if self.after is None or self.looks < self.after else self.seen


def use(others, *, cores=8.0, own=1.0, stopped=0.0):
    return CoreUse(cores, own, own + others, 0.1, stopped)


@pytest.mark.parametrize(
    ("seen", "affinity", "status", "sentence"),
    [
        (use(0.04), 8, Status.ok, "Other programs use 0.0 of the 8 cores that this process may run on."),
        (use(1.9), 8, Status.ok, "Other programs use 1.9 of the 8 cores that this process may run on."),
        (use(2.1), 8, Status.warning, "Other programs use 2.1 of the 8 cores that this process may run on: a training is slower"),
        (use(30.0, cores=4.0), 64, Status.ok, "Other programs use 30.0 of the 64 cores"),  # a quota of 4 of them
        (use(62.0, cores=4.0), 64, Status.warning, "Other programs use 62.0 of the 64 cores"),
        (use(0.0, stopped=0.5), 8, Status.warning, "The quota of its container, 8 cores, stopped this program in 50% of all"),
    ],
)
def test_other_programs_on_its_cores_are_named_if_they_leave_less_than_three_fourths_of_them(
    tmp_path, seen, affinity, status, sentence
):
    quota = {"proc/self/cgroup": "0::/\n", "cgroups/cpu.max": f"{int(seen.cores * 100000)} 100000"}
    (found,) = check_load(machine(tmp_path, files=quota, affinity=affinity, watch=Watch(seen)))
    assert (found.name, found.status) == ("load", status)
    assert found.sentence.startswith(sentence)
    assert bool(found.hint) is (status is Status.warning)
    assert found.figures["others_cores"] == pytest.approx(seen.all - seen.own)


def test_the_doctor_waits_once_if_it_has_not_looked_for_long_and_says_nothing_where_nothing_is_shown(tmp_path):
    slept = []
    watch = Watch(use(0.0), after=2)
    assert [each.status for each in check_load(machine(tmp_path, watch=watch), slept.append)] == [Status.ok]
    assert (watch.looks, len(slept)) == (2, 1)
    assert 0.5 < slept.pop() < 1
    assert check_load(machine(tmp_path, watch=Watch(use(0.0), after=None)), slept.append) == []
    assert check_load(machine(tmp_path, watch=Watch(use(0.0), after=1)), slept.append) != []
    assert slept == []
