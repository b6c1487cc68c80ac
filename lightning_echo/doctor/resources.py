"""The checks of what the process may use: cores, memory, shared memory, and threads that wait."""

from __future__ import annotations

import math
from pathlib import Path

from lightning_echo.doctor.findings import Finding, error, ok, warning
from lightning_echo.doctor.machine import Machine, cores_of, memory_of
from lightning_echo.protecting.memory import bytes_in_words

__all__ = ["SHARED_MEMORY", "check_resources", "whole_cores"]

_LITTLE_MEMORY = 2**30
SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED_MEMORY = 256 * 2**20  # Docker gives a container 64 MiB


def whole_cores(machine: Machine) -> int:
    """Returns the number of workers that the cores can keep busy; at least one."""
    return max(math.floor(cores_of(machine)), 1)


def check_resources(machine: Machine) -> list[Finding]:
    """Returns the findings about cores, memory, shared memory and OpenMP."""
    return [_cores(machine), _memory(machine), _shared_memory(machine), _openmp(machine)]


def _cores(machine: Machine) -> Finding:
    cores = cores_of(machine)
    if cores < machine.affinity:
        return warning(
            "cores",
            f"This process may use the time of {cores:g} cores, though it sees {machine.affinity}: its container has a quota.",
            f"Count {whole_cores(machine)} for num_workers and OMP_NUM_THREADS, or raise the quota (docker run --cpus).",
            cores=cores,
            visible_cores=machine.affinity,
        )
    if cores < 2:
        way_out = "Workers and training take turns on it: give the container or the job more cores."
        return warning("cores", "This process has one core.", way_out, cores=cores, visible_cores=machine.affinity)
    return ok("cores", f"This process has {cores:g} cores.", cores=cores, visible_cores=machine.affinity)


def _memory(machine: Machine) -> Finding:
    limit, free = memory_of(machine)
    if limit is None or free is None:
        return warning(
            "memory",
            "The system does not tell how much memory is free.",
            "Give buffer_size as a number of examples, and the size of a cache in bytes.",
            limit_bytes=limit,
            free_bytes=free,
        )
    sentence = f"{bytes_in_words(free)} of {bytes_in_words(limit)} of memory are free."
    if free < _LITTLE_MEMORY:
        way_out = "Buffer and cache will be small: end other programs, or raise the limit of the container."
        return warning("memory", sentence, way_out, limit_bytes=limit, free_bytes=free)
    return ok("memory", sentence, limit_bytes=limit, free_bytes=free)


def _shared_memory(machine: Machine) -> Finding:
    if not machine.platform.startswith("linux"):
        return ok("shared_memory", "This system has no /dev/shm.", size_bytes=None, free_bytes=None)
    space = machine.space_of(SHARED_MEMORY)
    if space is None:
        return error(
            "shared_memory",
            "/dev/shm is missing: workers cannot hand their batches over.",
            "Mount it (docker run --shm-size=8g), or set num_workers=0.",
            size_bytes=None,
            free_bytes=None,
        )
    size, free = space
    sentence = f"{bytes_in_words(free)} of {bytes_in_words(size)} of /dev/shm are free."
    if free < _LITTLE_SHARED_MEMORY:
        way_out = (
            "Workers hand their batches over there, and die with 'Bus error' when it is full: enlarge it "
            "(docker run --shm-size=8g, or an emptyDir with medium: Memory in Kubernetes)."
        )
        return warning("shared_memory", sentence, way_out, size_bytes=size, free_bytes=free)
    return ok("shared_memory", sentence, size_bytes=size, free_bytes=free)


def _openmp(machine: Machine) -> Finding:
    policy, threads = machine.environ.get("OMP_WAIT_POLICY", ""), machine.environ.get("OMP_NUM_THREADS", "")
    cores, first = whole_cores(machine), threads.split(",")[0].strip()  # a list has a number for each nesting level
    if first.isdigit() and int(first) > cores:
        return warning(
            "openmp",
            f"OMP_NUM_THREADS={threads} is more than the {cores} cores of this process.",
            f"Set OMP_NUM_THREADS={cores} or less.",
            wait_policy=policy,
            threads=int(first),
        )
    if policy.lower() == "active":
        return warning(
            "openmp",
            "OMP_WAIT_POLICY=active: the training's threads keep their cores while they wait, and workers need these cores.",
            "Set OMP_WAIT_POLICY=passive.",
            wait_policy=policy,
            threads=int(first) if first.isdigit() else None,
        )
    number = int(first) if first.isdigit() else None
    # Without OMP_NUM_THREADS, torch uses the cores that it sees. If there is a quota, these are all cores of the machine.
    if number is None and cores < machine.affinity:
        way_out = f"Set OMP_NUM_THREADS={cores}."
        sentence = f"torch will use {machine.affinity} threads for the {cores} cores that the container's quota allows."
        return warning("openmp", sentence, way_out, wait_policy=policy, threads=None)
    said = f"OMP_NUM_THREADS={threads or '(not set)'}, OMP_WAIT_POLICY={policy or '(not set)'}."
    if policy.lower() != "passive":
        said += " If workers and training compete for cores, OMP_WAIT_POLICY=passive makes waiting threads leave theirs."
    return ok("openmp", said, wait_policy=policy, threads=number)
