"""The machine as this process sees it: one value with everything that the checks read, so that a test can use another machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_echo.caching.free_memory import control_groups, free_memory_bytes
from lightning_echo.monitoring.cores import cores_within_quota, visible_cores

__all__ = ["Machine", "cores_of", "installed_version", "memory_of"]


def installed_version(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed.

    >>> installed_version("no-such-package") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _space(path: Path) -> tuple[int, int] | None:
    """Returns size and free bytes of a file system; None if there is none."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


def _import_operators() -> None:
    import_module("torchvision.ops")


@dataclass(frozen=True)
class Machine:
    """What the checks of a machine read. The defaults are those of this process.

    Attributes:
        python: Version of Python.
        platform: As ``sys.platform``.
        environ: Environment variables.
        version_of: Returns the version of an installed package, or None.
        import_operators: Imports torchvision's operators. This fails if torch and torchvision do not fit together.
        affinity: Number of cores that the process may run on.
        proc: Where the kernel shows processes.
        cgroups: Where the kernel shows control groups.
        space_of: Returns size and free bytes of the file system at a path, or None.
    """

    python: tuple[int, int, int] = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
    platform: str = sys.platform
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    version_of: Callable[[str], str | None] = installed_version
    import_operators: Callable[[], None] = _import_operators
    affinity: int = field(default_factory=visible_cores)
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    space_of: Callable[[Path], tuple[int, int] | None] = _space


def cores_of(machine: Machine) -> float:
    """Returns the number of processor cores that the process may use. It is a fraction if a control group limits the time."""
    return cores_within_quota(machine.affinity, machine.proc, machine.cgroups)


def memory_of(machine: Machine) -> tuple[int | None, int | None]:
    """Returns the largest memory that the process may have, and the free part of it, in bytes; None: the system does not tell."""
    limits = [_total_memory(machine.proc)]
    for group, is_version_2 in control_groups("memory", machine.proc, machine.cgroups):
        limits.append(_number(group / ("memory.max" if is_version_2 else "memory.limit_in_bytes")))
    found = min((limit for limit in limits if limit is not None), default=None)
    return found, free_memory_bytes(machine.proc, machine.cgroups)


def _total_memory(proc: Path) -> int | None:
    rows = (line.split() for line in _text(proc / "meminfo").splitlines() if line.startswith("MemTotal"))
    return next((int(row[1]) * 1024 for row in rows), None)


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
