"""Findings, and the checks of this machine: cores, memory, shared memory, threads, and versions of packages."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.machine import (
    CoreWatch,
    control_groups,
    cores_within_quota,
    free_memory_bytes,
    load_of,
    visible_cores,
)

# ---------------------------------------------------------------------- findings
# Findings as values, and all of them as text for people or as a document for programs.
#
# The first field of the document is its version. ``name`` identifies the check, and stays the same. ``sentence`` and ``hint``
# are for people. ``figures`` are the measured values, with the units in their names.

_VERSION = 1
_COLUMNS = 110
_INDENT = " " * 10

Figure = int | float | str | bool | None


class Status(str, Enum):
    """How bad a finding is: nothing to do; it costs time, or may surprise; a training would fail. The worst is last."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``about`` is ``"machine"``, ``"data"``, or the name of one of several loaders."""

    name: str
    status: Status
    sentence: str
    hint: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    about: str = "machine"


def ok(name: str, sentence: str, **figures: Figure) -> Finding:
    return Finding(name, Status.ok, sentence, figures=figures)


def warning(name: str, sentence: str, hint: str, **figures: Figure) -> Finding:
    return Finding(name, Status.warning, sentence, hint, figures)


def error(name: str, sentence: str, hint: str, **figures: Figure) -> Finding:
    return Finding(name, Status.error, sentence, hint, figures)


def worst(findings: Sequence[Finding]) -> Status:
    """Returns the worst status; ``ok`` if there is no finding.

    >>> worst([ok("cores", "2 cores."), warning("workers", "No workers.", "Set num_workers=2.")]).value
    'warning'
    """
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.ok)


def as_text(findings: Sequence[Finding]) -> str:
    """Returns all findings for a terminal, each with its fix below it, and a line that counts them at the end.

    >>> print(as_text([warning("workers", "The loader has no workers.", "Set num_workers=2.")]))
    machine
      warning The loader has no workers.
              Set num_workers=2.
    <BLANKLINE>
    0 errors, 1 warning
    """
    blocks = []
    for about in dict.fromkeys(finding.about for finding in findings):
        lines = [about]
        for finding in findings:
            if finding.about == about:
                lines += _wrapped(f"  {finding.status.value:<7} ", finding.sentence)
                lines += _wrapped(_INDENT, finding.hint)
        blocks.append("\n".join(lines))
    counts = []
    for status in (Status.error, Status.warning):
        number = sum(finding.status is status for finding in findings)
        counts.append(f"{number} {status.value}{'' if number == 1 else 's'}")
    return "\n\n".join([*blocks, ", ".join(counts)])


def as_document(findings: Sequence[Finding]) -> str:
    """Returns all findings as JSON.

    >>> json.loads(as_document([]))
    {'lightning_echo_doctor': 1, 'status': 'ok', 'findings': []}
    """
    rows = [
        {
            "about": finding.about,
            "name": finding.name,
            "status": finding.status.value,
            "sentence": finding.sentence,
            "hint": finding.hint,
            "figures": dict(finding.figures),
        }
        for finding in findings
    ]
    return json.dumps({"lightning_echo_doctor": _VERSION, "status": worst(findings).value, "findings": rows}, indent=2)


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=start, subsequent_indent=_INDENT, break_long_words=False)


# ---------------------------------------------------------------------- machine
# The machine as this process sees it: one value with everything that the checks read, replaceable in a test.


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _space(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


@dataclass(frozen=True)
class Machine:
    """Everything that the checks of a machine read. The defaults are those of this process.

    ``affinity``: number of cores that the process may run on. ``import_operators`` fails if torch and torchvision do not fit
    together. ``space_of`` returns size and free bytes of the file system at a path, or None. ``watch`` looks for
    CPU contention.
    """

    python: tuple[int, int, int] = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
    platform: str = sys.platform
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    version_of: Callable[[str], str | None] = installed_version
    import_operators: Callable[[], object] = field(default=partial(import_module, "torchvision.ops"))
    affinity: int = field(default_factory=visible_cores)
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    space_of: Callable[[Path], tuple[int, int] | None] = _space
    watch: CoreWatch = field(default_factory=CoreWatch)


def cores_of(machine: Machine) -> float:
    """Returns the number of cores that the process may use: a fraction if a control group limits the time."""
    return cores_within_quota(machine.affinity, machine.proc, machine.cgroups)


def memory_of(machine: Machine) -> tuple[int | None, int | None]:
    """Returns the bytes of memory that the process may have, and those that are free; None: the system does not report it."""
    rows = [line.split() for line in _text(machine.proc / "meminfo").splitlines() if line.startswith("MemTotal")]
    limits = [int(row[1]) * 1024 for row in rows[:1]]
    for group, is_version_2 in control_groups("memory", machine.proc, machine.cgroups):
        limit = _text(group / ("memory.max" if is_version_2 else "memory.limit_in_bytes"))
        if limit.isdigit():
            limits.append(int(limit))
    return min(limits, default=None), free_memory_bytes(machine.proc, machine.cgroups)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


# ---------------------------------------------------------------------- resources

_LITTLE_MEMORY = 2**30
SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED_MEMORY = 256 * 2**20  # Docker gives a container 64 MiB


def whole_cores(machine: Machine) -> int:
    """Returns the number of workers that the cores can keep busy; at least one."""
    return max(math.floor(cores_of(machine)), 1)


def check_resources(machine: Machine) -> list[Finding]:
    return [_cores(machine), _memory(machine), _shared_memory(machine), _openmp(machine)]


def _cores(machine: Machine) -> Finding:
    cores = cores_of(machine)
    figures = {"cores": cores, "visible_cores": machine.affinity}
    if cores < machine.affinity:
        sentence = (
            f"This process may use the time of {cores:g} cores, though it sees {machine.affinity}: its container has a quota."
        )
        hint = f"Count {whole_cores(machine)} for num_workers and OMP_NUM_THREADS, or raise the quota (docker run --cpus)."
        return warning("cores", sentence, hint, **figures)
    if cores < 2:
        hint = "Workers and training take turns on it: give the container or the job more cores."
        return warning("cores", "This process has one core.", hint, **figures)
    return ok("cores", f"This process has {cores:g} cores.", **figures)


_WATCHED_SECONDS = 0.6  # at least, from the first look to the last
_FREE = 0.75  # of the cores: fewer are few


def check_load(machine: Machine, sleep: Callable[[float], None] = time.sleep) -> list[Finding]:
    """Returns what other programs have taken of the cores since the first look; nothing if the system does not tell."""
    machine.watch.look()
    load = load_of([machine.watch.use])
    if load is None and not machine.watch.is_blind:
        sleep(_WATCHED_SECONDS)
        machine.watch.look()
        load = load_of([machine.watch.use])
    if load is None:
        return []
    figures: dict[str, Figure] = {"others_cores": load.others, "own_cores": load.own, "stopped_fraction": load.stopped}
    if load.is_stopped:
        stopped, _, hint = load.sentence.partition(". ")
        return [warning("load", f"{stopped}.", f"{hint}.", **figures)]
    sentence = f"Other programs use {load.others:.1f} of the {machine.affinity} cores that this process may run on"
    if machine.affinity - load.others < _FREE * cores_of(machine):
        hint = "End them, or wait: what analyze and the summary of a run measure beside them is worth little."
        return [warning("load", f"{sentence}: a training is slower meanwhile.", hint, **figures)]
    return [ok("load", f"{sentence}.", **figures)]


def _memory(machine: Machine) -> Finding:
    limit, free = memory_of(machine)
    figures = {"limit_bytes": limit, "free_bytes": free}
    if limit is None or free is None:
        hint = "Give buffer_size as a number of examples, and the size of a cache in bytes."
        return warning("memory", "The system does not tell how much memory is free.", hint, **figures)
    sentence = f"{bytes_in_words(free)} of {bytes_in_words(limit)} of memory are free."
    if free < _LITTLE_MEMORY:
        hint = "Buffer and cache will be small: end other programs, or raise the limit of the container."
        return warning("memory", sentence, hint, **figures)
    return ok("memory", sentence, **figures)


def _shared_memory(machine: Machine) -> Finding:
    if not machine.platform.startswith("linux"):
        return ok("shared_memory", "This system has no /dev/shm.", size_bytes=None, free_bytes=None)
    space = machine.space_of(SHARED_MEMORY)
    if space is None:
        sentence = "/dev/shm is missing: workers cannot hand their batches over."
        hint = "Mount it (docker run --shm-size=8g), or set num_workers=0."
        return error("shared_memory", sentence, hint, size_bytes=None, free_bytes=None)
    size, free = space
    sentence = f"{bytes_in_words(free)} of {bytes_in_words(size)} of /dev/shm are free."
    if free < _LITTLE_SHARED_MEMORY:
        hint = (
            "Workers hand their batches over there, and die with 'Bus error' when it is full: enlarge it "
            "(docker run --shm-size=8g, or an emptyDir with medium: Memory in Kubernetes)."
        )
        return warning("shared_memory", sentence, hint, size_bytes=size, free_bytes=free)
    return ok("shared_memory", sentence, size_bytes=size, free_bytes=free)


def _openmp(machine: Machine) -> Finding:
    policy, threads = machine.environ.get("OMP_WAIT_POLICY", ""), machine.environ.get("OMP_NUM_THREADS", "")
    cores, first = whole_cores(machine), threads.split(",")[0].strip()  # a list has a number for each nesting level
    number = int(first) if first.isdigit() else None
    figures: dict[str, Figure] = {"wait_policy": policy, "threads": number}
    if number is not None and number > cores:
        sentence = f"OMP_NUM_THREADS={threads} is more than the {cores} cores of this process."
        return warning("openmp", sentence, f"Set OMP_NUM_THREADS={cores} or less.", **figures)
    if policy.lower() == "active":
        sentence = (
            "OMP_WAIT_POLICY=active: the training's threads keep their cores while they wait, and workers need these cores."
        )
        return warning("openmp", sentence, "Set OMP_WAIT_POLICY=passive.", **figures)
    # Without OMP_NUM_THREADS, torch uses the cores that it sees. If there is a quota, these are all cores of the machine.
    if number is None and cores < machine.affinity:
        sentence = f"torch will use {machine.affinity} threads for the {cores} cores that the container's quota allows."
        return warning("openmp", sentence, f"Set OMP_NUM_THREADS={cores}.", **figures)
    sentence = f"OMP_NUM_THREADS={threads or '(not set)'}, OMP_WAIT_POLICY={policy or '(not set)'}."
    if policy.lower() != "passive":
        sentence += " If workers and training compete for cores, OMP_WAIT_POLICY=passive makes waiting threads leave theirs."
    return ok("openmp", sentence, **figures)


# ---------------------------------------------------------------------- versions

_MALICIOUS = ("2.6.2", "2.6.3")  # GHSA-w37p-236h-pfx3
_OLDEST_LIGHTNING, _OLDEST_TORCH, _OLDEST_PYTHON = (2, 5), (2, 4), (3, 10)
# The first release of each Python whose fork() takes the interpreter's lock of threads first (CPython's issue 112275).
_FORK_MENDED = {10: 15, 11: 10}


def check_versions(machine: Machine) -> list[Finding]:
    own = machine.version_of("lightning-echo")
    sentence = f"lightning-echo {own}." if own is not None else "lightning-echo runs from a folder, and is not installed."
    return [
        _python(machine),
        _at_least(machine, "torch", _OLDEST_TORCH),
        _torchvision(machine),
        _lightning(machine),
        ok("lightning_echo", sentence, version=own),
    ]


def _python(machine: Machine) -> Finding:
    text = ".".join(map(str, machine.python))
    major, minor, micro = machine.python
    if machine.python < _OLDEST_PYTHON:
        return error("python", f"Python {text} is older than 3.10.", "Use Python 3.10 or later.", version=text)
    mended = _FORK_MENDED.get(minor) if major == 3 else None
    if mended is not None and micro < mended:
        sentence = (
            f"Python {text} has CPython's issue 112275: with several ranks on gloo, a forked worker now and then hangs for good."
        )
        hint = f"Use Python 3.{minor}.{mended} or later, or DataLoader(..., multiprocessing_context='forkserver')."
        return warning("python", sentence, hint, version=text)
    return ok("python", f"Python {text}.", version=text)


def _torchvision(machine: Machine) -> Finding:
    version = machine.version_of("torchvision")
    if version is None:
        return ok("torchvision", "torchvision is not installed, and is not needed.", version=None)
    try:
        machine.import_operators()
    except (RuntimeError, ImportError, AttributeError, OSError) as problem:  # operators of another torch, or missing libraries
        sentence = f"torchvision {version} does not fit torch {machine.version_of('torch')}: {problem}."
        hint = "Install torch and torchvision together, from the same source, in a fresh environment."
        return error("torchvision", sentence, hint, version=version)
    return ok("torchvision", f"torchvision {version} fits torch.", version=version)


def _lightning(machine: Machine) -> Finding:
    version = machine.version_of("lightning")
    for package in ("lightning", "pytorch-lightning"):
        if (found := machine.version_of(package)) in _MALICIOUS:
            sentence = f"{package} {found} was a malicious release (GHSA-w37p-236h-pfx3)."
            hint = (
                "Treat the secrets of this machine as stolen, and install another release in a fresh environment: "
                "pip install 'lightning!=2.6.2,!=2.6.3'."
            )
            return error("lightning", sentence, hint, version=found)
    if version is None and (other := machine.version_of("pytorch-lightning")) is not None:
        sentence = f"pytorch-lightning {other} is installed, and the package lightning is not."
        hint = "Install lightning as well: pip install lightning. A program may still import pytorch_lightning."
        return error("lightning", sentence, hint, version=None)
    of_both = [_at_least(machine, package, _OLDEST_LIGHTNING) for package in ("lightning", "pytorch-lightning")]
    if machine.version_of("pytorch-lightning") is not None and of_both[1].status is not Status.ok:  # their versions may differ
        return replace(of_both[1], name="lightning")
    return of_both[0]


def _at_least(machine: Machine, package: str, oldest: tuple[int, int]) -> Finding:
    version, needed = machine.version_of(package), ".".join(map(str, oldest))
    if version is None:
        return error(package, f"{package} is not installed.", f"Install it: pip install '{package}>={needed}'.", version=None)
    parts = version.split("+")[0].split(".")[:2]  # such as 2.15.0+cpu, or 2.5rc1
    numbers = ["".join(digit for digit in part.split("rc")[0] if digit.isdigit()) for part in parts]
    if tuple(int(number or 0) for number in numbers) < oldest:
        hint = f"Install a later one: pip install --upgrade '{package}>={needed}'."
        return error(package, f"{package} {version} is older than {needed}.", hint, version=version)
    return ok(package, f"{package} {version}.", version=version)
