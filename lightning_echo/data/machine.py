"""How much memory is free for this process, how many cores it may use, how busy a process is, who else has the cores, and which
other runs of its program there are: on the machine, and in its container.
"""

from __future__ import annotations

import math
import os
import platform
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
# time, and its requests come out of a pipe. A read of the user's that polls a socket for as long waits for something else.

_POLL = {"x86_64": "7"}  # its number by the machine; others call ppoll(2), whose time-out is not a number in a register
_MOST_POLLED_MS = 5000
_LEAST_POLLED_MS = _MOST_POLLED_MS - 5
_POLLED = struct.Struct("i")  # the descriptor, with which the kernel's ``struct pollfd`` begins


def has_no_request(process_id: int, proc: Path = _PROC, machine: str = platform.machine()) -> bool | None:
    """Returns whether a worker waits for a request, since it has done all that it was asked for. None if that is not known."""
    if machine not in _POLL:
        return None
    of_process = f"{proc}/{process_id}"
    try:
        words = Path(of_process, "syscall").read_text().split()  # "running", or the call's number and six arguments
        if len(words) < 4 or words[0] != _POLL[machine] or not _LEAST_POLLED_MS <= int(words[3], 16) <= _MOST_POLLED_MS:
            return False
        return int(words[2], 16) == 1 and _polls_pipe(of_process, int(words[1], 16))
    except (OSError, ValueError):
        return None


def _polls_pipe(of_process: str, address: int) -> bool:
    """Whether the descriptor at an address in the memory of a process is that of a pipe. Who may read its call may read that."""
    with open(f"{of_process}/mem", "rb", buffering=0) as memory:
        found = os.pread(memory.fileno(), _POLLED.size, address)
    try:
        return os.readlink(f"{of_process}/fd/{_POLLED.unpack(found)[0]}").startswith("pipe:")
    except (FileNotFoundError, struct.error):  # the process does something else by now
        return False


# ---------------------------------------------------------------------- load
# Other programs on the same cores make a measurement worth little: a stage takes longer, and which one is chance. A process that
# is ready and has no processor waits in a queue, and Linux counts that for each. But the processes of a program that are more
# than the cores queue, too. So the machine is looked at as well:
#
#     own        processor time of this program: its process, all that it has started, and those of them that have ended
#     others     what all programs took on the cores that this program may run on, less its own
#     queued     share of the time in which the processes of this program were ready, and had no processor
#
# Alone, the program would have had ``own / (1 - queued)``, or all of its cores if these are fewer. What it has had less than
# that, others have taken, but no more than ``others``. Measured on two cores: 8 workers alone (queued 76%) have 1.9, so that
# nobody has taken anything. 2 workers beside 4 busy programs (queued 68%) have 0.64.
#
# The load average does not tell that: in a container it is the whole machine's. Neither do the pressure figures, since they count
# the program's own queueing.
#
# Source: Linux kernel documentation, scheduler/sched-stats.rst ("/proc/<pid>/schedstat"), proc.rst ("/proc/stat"), and
# scheduler/sched-bwc.rst ("nr_periods", "nr_throttled").

_LEAST_BETWEEN = 0.1  # seconds between two looks: each takes a millisecond or less, more with hundreds of processes
_LEAST_SECONDS = 0.5  # from the first look to the last: the kernel counts in hundredths of a second
_SLOWED = 0.2  # a share of its processor time that a program notices
_STOPPED = 0.2  # share of the periods of a quota
_BUSY = (1, 2, 3, 6, 7)  # words of a line of ``/proc/stat``: user, nice, system, irq, softirq


class CoreUse(NamedTuple):
    """Who had the cores while one process, with all that it has started, did something. NaN in all fields: it is not known."""

    cores: float  # that it may use
    own: float  # cores' time that it took
    all: float  # cores' time that all programs took, on the cores that it may run on
    queued: float  # share of the time in which it was ready for a processor, and had none
    stopped: float  # share of the periods in which the quota of its container stopped it


NOT_SEEN = CoreUse(*[math.nan] * len(CoreUse._fields))


@dataclass(frozen=True)
class Load:
    """The load of the cores by other programs. Cores are means over the time that was looked at; shares are from 0 to 1.

    Attributes:
        cores: Cores that the program may use.
        own: Cores' time that it took, all of its processes together.
        others: Cores' time that other programs took, on the cores that it may run on.
        queued: Share of the time in which its processes were ready for a processor, and had none.
        stopped: Share of the periods in which the quota of its container stopped it.

    Example:
        >>> print(Load(cores=2, own=0.5, others=1.5, queued=0.6).sentence.partition(". ")[0])
        Other programs took 1.5 of 2 cores: this one had 0.5, and waited 60% of its time for a processor
        >>> Load(cores=2, own=1.9, others=0.1, queued=0.75).sentence  # more processes than cores, and nobody else
        ''
    """

    cores: float
    own: float
    others: float
    queued: float
    stopped: float = 0.0

    @property
    def taken(self) -> float:
        """Cores' time that the program would have had without other programs, and has not had."""
        alone = min(self.own / (1 - self.queued), self.cores) if self.queued < 1 else self.cores
        return max(0.0, min(alone - self.own, self.others))

    @property
    def slowed_fraction(self) -> float:
        """Share of the processor time that the program would have had alone which others took."""
        return self.taken / (self.own + self.taken) if self.taken else 0.0

    @property
    def is_notable(self) -> bool:
        """Whether the figures of what the program did meanwhile are worth little."""
        return self.is_stopped or self.is_crowded

    @property
    def sentence(self) -> str:
        """The load in words, without a full stop; empty if it is not notable."""
        if self.is_stopped:
            return (
                f"The quota of its container, {_cores_in_words(self.cores)}, stopped this program in {self.stopped:.0%} of all "
                "periods, and its times include the stops. So its figures are worth little: raise the quota (docker run --cpus), "
                "or use fewer processes and threads"
            )
        if self.is_crowded:
            return (
                f"Other programs took {self.others:.2g} of {_cores_in_words(self.cores)}: this one had {self.own:.2g}, and "
                f"waited {self.queued:.0%} of its time for a processor. So its figures are worth little: measure again on a "
                "quiet machine"
            )
        return ""

    @property
    def is_stopped(self) -> bool:
        """Whether the quota of its container has stopped the program often."""
        return self.stopped >= _STOPPED

    @property
    def is_crowded(self) -> bool:
        """Whether other programs have taken so much that this one was notably slower."""
        return self.others >= _SLOWED * self.cores and self.slowed_fraction >= _SLOWED


def _cores_in_words(cores: float) -> str:
    return f"{cores:.3g} core{'' if cores == 1 else 's'}"


def load_of(uses: Sequence[CoreUse]) -> Load | None:
    """Returns the load of a machine by programs other than those that have looked: the ranks of a job. None: it is not known.

    >>> rank = CoreUse(cores=4, own=1.0, all=3.0, queued=0.5, stopped=0.0)
    >>> load_of([rank, rank]).own, load_of([rank, rank]).others, load_of([NOT_SEEN])
    (2.0, 1.0, None)
    """
    known = [use for use in uses if not math.isnan(use.own)]
    if len(known) < len(uses) or not known:  # what the others took is not known, either
        return None
    own = sum(use.own for use in known)
    everything = sum(use.all for use in known) / len(known)
    ready = sum(use.own / (1 - use.queued) if use.queued < 1 else math.inf for use in known)
    return Load(
        cores=max(use.cores for use in known),
        own=own,
        others=max(0.0, everything - own),
        queued=1 - own / ready if ready else 0.0,
        stopped=max(use.stopped for use in known),
    )


class _Look(NamedTuple):
    now: float
    own: float  # seconds, as are those that follow
    all: float
    queues: Mapping[int, tuple[float, float]]  # of each process: on a processor, and waiting for one
    periods: Sequence[tuple[int, int]]  # of each quota: all of them, and those in which it stopped somebody


class CoreWatch:
    """Looks again and again at this process, at those that it has started, and at the machine. It never raises an error.

    ``apart`` are processes that do not belong to this one, though it may have started them: other ranks.
    """

    def __init__(
        self,
        apart: Collection[int] = (),
        proc: Path = _PROC,
        cgroups: Path = _CGROUPS,
        clock: Callable[[], float] = time.perf_counter,
        process_id: int | None = None,
    ) -> None:
        self._apart, self._proc, self._cgroups, self._clock = frozenset(apart), proc, cgroups, clock
        self._process_id = process_id
        self._first: _Look | None = None
        self._last: _Look | None = None
        self._ran = self._queued = 0.0
        self._is_blind = False

    def look(self) -> None:
        """Looks, unless the last look was a moment ago. The times between the first look and the last one count."""
        if self._is_blind or (self._last is not None and self._clock() - self._last.now < _LEAST_BETWEEN):
            return
        try:
            seen = self._see()
        except (OSError, ValueError, IndexError):  # not Linux, or a system that hides it
            self._is_blind = True
            return
        if self._last is None:
            self._first = seen
        else:
            before = self._last.queues
            for pid, (ran, queued) in seen.queues.items():
                if pid in before:
                    self._ran += max(0.0, ran - before[pid][0])
                    self._queued += max(0.0, queued - before[pid][1])
        self._last = seen

    @property
    def is_blind(self) -> bool:
        """Whether the system has not shown what a look needs: more looks are useless."""
        return self._is_blind

    @property
    def use(self) -> CoreUse:
        first, last = self._first, self._last
        if self._is_blind or first is None or last is None or last.now - first.now < _LEAST_SECONDS:
            return NOT_SEEN
        seconds, ready = last.now - first.now, self._ran + self._queued
        stops = [
            (stopped - stopped_before) / (periods - periods_before)
            for (periods_before, stopped_before), (periods, stopped) in zip(first.periods, last.periods, strict=False)
            if periods > periods_before
        ]
        return CoreUse(
            cores=cores_within_quota(visible_cores(), self._proc, self._cgroups),
            own=max(0.0, last.own - first.own) / seconds,
            all=max(0.0, last.all - first.all) / seconds,
            queued=self._queued / ready if ready else 0.0,
            stopped=max(stops, default=0.0),
        )

    def _see(self) -> _Look:
        own, queues = 0.0, dict[int, tuple[float, float]]()
        process_id = os.getpid() if self._process_id is None else self._process_id
        for pid in _family(process_id, self._proc, self._apart):
            try:
                spent = _processor_seconds(pid, self._proc)
                ran, queued = _schedstat(pid, self._proc)
            except (OSError, ValueError, IndexError):  # it has just ended
                if pid == process_id:
                    raise
                continue
            own += spent
            queues[pid] = ran, queued
        return _Look(self._clock(), own, _machine_seconds(self._proc), queues, _periods(self._proc, self._cgroups))


def _family(process_id: int, proc: Path, apart: Collection[int]) -> Iterator[int]:
    """Yields a process and all that it has started, and so on, which are running."""
    yield process_id
    try:
        tasks = list((proc / str(process_id) / "task").iterdir())
    except OSError:
        return
    for task in tasks:
        for child in _text(task / "children").split():
            if int(child) not in apart:
                yield from _family(int(child), proc, apart)


def _processor_seconds(process_id: int, proc: Path) -> float:
    """Returns the processor seconds of a process with all its threads, and of the children that it has seen end."""
    after_name = (proc / str(process_id) / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")


def _schedstat(process_id: int, proc: Path) -> tuple[float, float]:
    """Returns for how many seconds the first thread of a process was on a processor, and for how many it waited for one."""
    ran, queued = (int(text) / _NANOSECONDS for text in (proc / str(process_id) / "schedstat").read_text().split()[:2])
    return ran, queued


def _machine_seconds(proc: Path) -> float:
    """Returns the processor seconds of all programs on the cores that this process may run on, since the machine was started."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    rows = [line.split() for line in (proc / "stat").read_text().splitlines() if line.startswith("cpu")]
    of_cores = [row for row in rows if row[0][3:].isdigit() and (cores is None or int(row[0][3:]) in cores)]
    if not of_cores:
        raise ValueError(f"{proc / 'stat'} has no line of a core")
    return sum(int(row[word]) for row in of_cores for word in _BUSY) / os.sysconf("SC_CLK_TCK")


def _periods(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """Returns for each control group around this process: the periods of its quota, and those in which it stopped somebody."""
    found = []
    for group, _ in control_groups("cpu", proc, cgroups):
        rows = dict(line.split()[:2] for line in _text(group / "cpu.stat").splitlines() if len(line.split()) > 1)
        found.append((int(rows.get("nr_periods", 0)), int(rows.get("nr_throttled", 0))))
    return found


# ---------------------------------------------------------------------- other runs
# A sweep runs one program several times at once. Then each run reads and prepares what one of them could for all (`ShareConfig`).
# The system shows it: other processes of this user run the same file, or module, with the same interpreter.
#
# Workers and ranks of a run are no runs of their own. They descend from it, or a launcher has started them: it gives each process
# its rank, and mostly a port, which is the job's. A shell in a Slurm job has a rank, too, and hands it on to all that it starts.
# So processes with the same rank are different runs.

_RANKS = (b"RANK", b"LOCAL_RANK", b"SLURM_PROCID", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")
_PORT = b"MASTER_PORT"
_WITH_VALUE = (b"-W", b"-X", b"--check-hash-based-pycs")  # options of the interpreter


class OtherRuns(NamedTuple):
    """The file, or the module, that this process runs, and how many other runs of it this machine has; 0: none are known."""

    program: str
    number: int


NO_OTHER_RUNS = OtherRuns("", 0)


class _Program(NamedTuple):
    interpreter: str
    folder: str  # of the file; of a module the one in which it was started
    name: str
    is_module: bool


def other_runs(ranks: Collection[int] = (), proc: Path = _PROC, process_id: int | None = None) -> OtherRuns:
    """Looks once at all processes of this machine, and never raises an error. ``ranks`` are processes of this run."""
    this = os.getpid() if process_id is None else process_id
    try:
        program = _program_of(this, proc)
        if program is None or not _is_main(program):
            return NO_OTHER_RUNS
        pids = [int(name) for name in os.listdir(proc) if name.isdigit()]
        alike = {this, *(pid for pid in pids if _runs(program, pid, proc))}
        roots = {pid: _root(pid, alike, proc) for pid in alike}
        own = {roots[pid] for pid in alike.intersection(ranks)}
        found = Counter(_job_and_rank(pid, proc) for pid in {roots[this], *roots.values()} - (own - {roots[this]}))
    except (OSError, ValueError, IndexError):  # not Linux, or a system that hides it
        return NO_OTHER_RUNS
    jobs = dict[int | bytes, int]()
    for (job, _), number in found.items():
        jobs[job] = max(jobs.get(job, 0), number)
    return OtherRuns(program.name, sum(jobs.values()) - 1)


def _is_main(program: _Program) -> bool:
    """Whether this process runs its program itself. A notebook does not, nor does a fork that runs something else."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None:  # of a module
        return program.name in (spec.name, spec.name.removesuffix(".__main__"))
    return file is not None and os.path.realpath(file) == os.path.join(program.folder, program.name)


def _runs(program: _Program, process_id: int, proc: Path) -> bool:
    """Whether a process is one of this user's that runs the program."""
    of_process = f"{proc}/{process_id}"
    try:
        if os.stat(of_process).st_uid != os.getuid():
            return False
        with open(f"{of_process}/cmdline", "rb", buffering=0) as line:
            mentions = os.fsencode(program.name) in line.read()
        return mentions and _program_of(process_id, proc) == program
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False


def _program_of(process_id: int, proc: Path) -> _Program | None:
    """Returns what a process of Python runs; None if that is neither a file that is there nor a module."""
    of_process = proc / str(process_id)
    arguments = iter(_words(of_process / "cmdline")[1:])
    for argument in arguments:
        if argument in _WITH_VALUE:
            next(arguments, b"")
        elif argument == b"-m" or not argument.startswith(b"-"):
            break
        elif argument.startswith(b"-c"):
            return None
    else:
        return None
    interpreter, folder = os.readlink(of_process / "exe"), os.readlink(of_process / "cwd")
    if argument == b"-m":
        return _Program(interpreter, folder, os.fsdecode(next(arguments, b"")), is_module=True)
    file = os.path.realpath(os.path.join(folder, os.fsdecode(argument)))
    return _Program(interpreter, *os.path.split(file), is_module=False) if os.path.exists(file) else None


def _root(process_id: int, alike: Collection[int], proc: Path) -> int:
    """Returns the first of the processes that are alike from which this one descends, or this one."""
    root = process_id
    while process_id:
        if process_id in alike:
            root = process_id
        process_id = _parent(process_id, proc)
    return root


def _parent(process_id: int, proc: Path) -> int:
    """Returns the process that has started another one, or that was given it; 0 if that is not shown."""
    after_name = _text(proc / str(process_id) / "stat").rpartition(")")[2].split()
    return int(after_name[1]) if after_name else 0


def _job_and_rank(process_id: int, proc: Path) -> tuple[int | bytes, bytes]:
    """Returns what the processes of one job have in common, and what each of them has for itself."""
    given = {name: value for name, _, value in (word.partition(b"=") for word in _words(proc / str(process_id) / "environ"))}
    rank = next((given[name] for name in _RANKS if name in given), None)
    if rank is None:
        return process_id, b""
    return given.get(_PORT) or _parent(process_id, proc), rank


def _words(file: Path) -> list[bytes]:
    return file.read_bytes().removesuffix(b"\0").split(b"\0")
