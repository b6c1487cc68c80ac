"""How many cores this process may use.

A container may have fewer cores than the machine. There are two ways: the process may only run on some of the cores (cpuset,
``taskset``), or the kernel limits the processor time of its control group (``docker run --cpus``). ``os.cpu_count()`` does not
show the second one.

Source: Linux kernel documentation, cgroup-v2.rst ("cpu.max") and scheduler/sched-bwc.rst ("cpu.cfs_quota_us").
"""

from __future__ import annotations

import os
from pathlib import Path

from lightning_echo.caching.free_memory import control_groups

__all__ = ["cores_within_quota", "usable_cores", "visible_cores"]

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def visible_cores() -> int:
    """Returns the number of cores that the process may run on. If the system does not tell, the number of the machine's cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_within_quota(visible: int, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float:
    """Returns the number of cores that the process may use. It may be a fraction, if the control group gets a part of a core.

    Args:
        visible: Number of cores that it may run on.
        proc: Where the kernel shows processes.
        cgroups: Where the kernel shows control groups.
    """
    quotas = [_quota_of(group, is_version_2) for group, is_version_2 in control_groups("cpu", proc, cgroups)]
    return min([float(visible), *(quota for quota in quotas if quota is not None)])


def usable_cores() -> int:
    """Returns the number of processes that the cores of this process can keep busy; at least one.

    >>> usable_cores() >= 1
    True
    """
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
