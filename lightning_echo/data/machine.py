"""How much memory is free for this process, how many cores it may use, and how busy a process is: on the machine, and in its
container.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# ---------------------------------------------------------------------- free memory
# If the processes of a container take more than its limit, the kernel kills one of them, without an error. So the limit must be
# known before. The kernel puts processes into a tree of control groups (cgroups), and each group may have a limit. The free
# memory is the smallest amount that any group around the process leaves. File pages that a group has only read can be dropped at
# any time. They count as free, as in ``MemAvailable`` of the machine.
#
# Source: Linux kernel documentation, cgroup-v2.rst ("memory.max", "memory.current", "memory.stat") and cgroup-v1/memory.rst.

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # version 1 writes a number near 2**63 where there is no limit


class _Names(NamedTuple):
    """The file names of a version of control groups, and the entry of ``memory.stat`` for memory that can be dropped."""

    limit: str
    used: str
    droppable: str


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def free_memory_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Returns the memory that this process and its children can still take, in bytes; None if the system does not report it."""
    groups = control_groups("memory", proc, cgroups)
    limited = (_free_of_group(group, _VERSION_2 if is_version_2 else _VERSION_1) for group, is_version_2 in groups)
    found = [free for free in (_free_of_machine(proc), *limited) if free is not None]
    return min(found, default=None)


def _free_of_machine(proc: Path) -> int | None:
    try:
        with open(proc / "meminfo") as info:
            return next((int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable")), None)
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def control_groups(controller: str, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Iterator[tuple[Path, bool]]:
    """Yields each control group's folder around the process that may limit ``"memory"`` or ``"cpu"``, and if it is version 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: all controllers in one tree; next to version 1 it is often in a folder of its own
            trees = [cgroups, cgroups / "unified"]
        elif controller in controllers.split(","):
            trees = [cgroups / controller]
        else:
            continue
        # In a container the path may be one of the machine, which does not exist there. Then the root of the tree is its group.
        inside = Path(path.lstrip("/"))
        for tree in trees:
            yield from ((tree / group, not controllers) for group in (inside, *inside.parents))


def _free_of_group(group: Path, names: _Names) -> int | None:
    limit, used = _text(group / names.limit), _text(group / names.used)
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= _NO_LIMIT:  # "max": no limit
        return None
    lines = _text(group / "memory.stat").splitlines()
    droppable = next((int(line.split()[1]) for line in lines if line.split()[:1] == [names.droppable]), 0)
    return max(int(limit) - int(used) + droppable, 0)


# ---------------------------------------------------------------------- cores
# A process may run only on some of the cores (cpuset, ``taskset``), or the kernel limits the processor time of its control group
# (``docker run --cpus``). ``os.cpu_count()`` does not show the second limit.
#
# Source: Linux kernel documentation, cgroup-v2.rst ("cpu.max") and scheduler/sched-bwc.rst ("cpu.cfs_quota_us").


def visible_cores() -> int:
    """Returns the number of cores that the process may run on, or else the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_within_quota(visible: int, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float:
    """Returns how many of the visible cores the process may use; a fraction, if its control group gets a part of a core."""
    quotas = [_quota_of(group, is_version_2) for group, is_version_2 in control_groups("cpu", proc, cgroups)]
    return min([float(visible), *(quota for quota in quotas if quota is not None)])


def usable_cores() -> int:
    """Returns the number of processes that the cores of this process can keep busy; at least one."""
    return max(int(cores_within_quota(visible_cores())), 1)


def _quota_of(group: Path, is_version_2: bool) -> float | None:
    """Returns the cores that a control group may use; None: no limit."""
    if is_version_2:
        words = _text(group / "cpu.max").split()
        quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "0")
    else:
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None  # "max" or -1: no limit


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------- busy
# A process that neither computes nor waits for a processor waits for something else, such as a read. Linux counts both. The time
# without a processor is known for the first thread only, which is the one that loads.

_NANOSECONDS = 1_000_000_000


def busy_seconds(process_id: int, proc: Path = _PROC) -> float | None:
    """Returns the seconds in which a process has computed, or was ready to. None if the system does not tell, or it has ended."""
    try:
        on_processor, ready = (int(text) for text in (proc / str(process_id) / "schedstat").read_text().split()[:2])
        after_name = (proc / str(process_id) / "stat").read_text().rpartition(")")[2].split()
        of_all_threads = (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return max((on_processor + ready) / _NANOSECONDS, of_all_threads)


# A worker process of torch's ``DataLoader`` that has nothing to do waits for its next request in poll(2), for five seconds at a
# time. A read of the user's that polls a socket with exactly this time-out would look the same.

_POLL = {"x86_64": "7"}  # its number by the machine; others call ppoll(2), whose time-out is not a number in a register
_MOST_POLLED_MS = 5000
_LEAST_POLLED_MS = _MOST_POLLED_MS - 5


def has_no_request(process_id: int, proc: Path = _PROC, machine: str = platform.machine()) -> bool | None:
    """Returns whether a worker waits for a request, since it has done all that it was asked for. None if that is not known."""
    if machine not in _POLL:
        return None
    try:
        words = (proc / str(process_id) / "syscall").read_text().split()  # "running", or the call's number and six arguments
        return len(words) > 3 and words[0] == _POLL[machine] and _LEAST_POLLED_MS <= int(words[3], 16) <= _MOST_POLLED_MS
    except (OSError, ValueError):
        return None
