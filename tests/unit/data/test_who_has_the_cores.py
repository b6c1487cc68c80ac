"""Who has the cores: from a machine that is made up, in files as Linux shows them."""

import math
import os
from types import SimpleNamespace

import pytest

from lightning_echo.data.machine import NOT_SEEN, CoreUse, CoreWatch, Load, load_of, visible_cores

TICKS = os.sysconf("SC_CLK_TCK")
MAIN = 10
QUOTA = "/job"


@pytest.fixture(autouse=True)
def nobody_looks_at_the_cores():
    """Here somebody does."""


class Process:
    """Rates are seconds of each second: of a processor for all threads, of the first thread, and of its waiting for one."""

    def __init__(self, cpu, queued=0.0, first=None, children=(), reaped=0.0):
        self.cpu, self.queued, self.first, self.children, self.reaped = cpu, queued, first, list(children), reaped


class Made:
    """A machine whose programs do the same in each second. ``cores``: of each, user, nice, system, idle, irq and softirq."""

    def __init__(self, folder, processes, cores, quotas=()):
        self.proc, self.cgroups, self.now = folder / "proc", folder / "cgroups", 0.0
        self.processes, self.cores, self.quotas = processes, cores, list(quotas)

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def show(self):
        lines = [f"cpu  {' '.join(['9' * 9] * 10)}"]  # of the whole machine: cores of others are in it
        for core, (user, nice, system, idle, irq, softirq) in self.cores.items():
            counts = (user, nice, system, idle, 0.3, irq, softirq, 0.2, 0.1, 0.1)
            lines.append(f"cpu{core} {' '.join(str(round(1000 + each * self.now * TICKS)) for each in counts)}")
        self.write(self.proc / "stat", "\n".join([*lines, "intr 12 0 0", "ctxt 7"]) + "\n")
        for pid, each in self.processes.items():
            user, reaped = round((5 + each.cpu * self.now) * TICKS), round(each.reaped * self.now * TICKS)
            self.write(self.proc / str(pid) / "stat", f"{pid} (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {user} 7 {reaped} 3 20 0\n")
            first = each.cpu if each.first is None else each.first
            ran, queued = (round(1e9 * (5 + rate * self.now)) for rate in (first, each.queued))
            self.write(self.proc / str(pid) / "schedstat", f"{ran} {queued} 99\n")
            self.write(self.proc / str(pid) / "task" / str(pid) / "children", "")
            self.write(self.proc / str(pid) / "task" / f"{pid}1" / "children", " ".join(map(str, each.children)))  # of a thread
        self.write(self.proc / "self" / "cgroup", f"0::{QUOTA}\n")
        for number, stopped in enumerate(self.quotas):
            group = self.cgroups / QUOTA[1:] if number == 0 else self.cgroups
            text = f"usage_usec 5\nnr_periods {round(100 + 10 * self.now)}\nnr_throttled {round(50 + 10 * stopped * self.now)}\n"
            self.write(group / "cpu.stat", text)
            self.write(group / "cpu.max", "200000 100000" if number == 0 else "max 100000")

    def watch(self, apart=()):
        return CoreWatch(apart, self.proc, self.cgroups, lambda: self.now, MAIN)

    def use(self, seconds=4, apart=()):
        watch = self.watch(apart)
        for second in range(seconds + 1):
            self.now = float(second)
            self.show()
            watch.look()
        return watch.use


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process_id: {2, 3}, raising=False)
    assert visible_cores() == 2


def workers(number, cpu, queued):
    """A process that does little, with workers."""
    pids = range(20, 20 + number)
    return {MAIN: Process(0.1, children=pids)} | {pid: Process(cpu, queued) for pid in pids}


BUSY, HALF, IDLE = (0.5, 0.2, 0.2, 0.0, 0.05, 0.05), (0.5, 0.0, 0.0, 0.5, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)


def test_it_adds_up_what_the_family_has_and_what_all_have_on_the_cores_of_this_process(tmp_path):
    """0.1 + 2 * 0.2 of this program; 1 + 0.5 of all on cores 2 and 3. Cores 1 and 12 are those of others."""
    made = Made(tmp_path, workers(2, 0.2, 0.6), {1: BUSY, 2: BUSY, 3: HALF, 12: BUSY})
    use = made.use()
    assert use == pytest.approx(CoreUse(cores=2, own=0.5, all=1.5, queued=1.2 / 1.7, stopped=0), abs=0.02)


def test_children_that_have_ended_and_threads_count_and_other_ranks_do_not(tmp_path):
    """A child of a child, 0.3; children that have ended, 0.4; threads beside the first, 0.15 of 0.2."""
    processes = {
        MAIN: Process(0.1, children=[20, 21, 22], reaped=0.4),
        20: Process(0.2, first=0.05, children=[30]),
        21: Process(0.9, children=[31]),  # another rank
        22: Process(0.0),
        30: Process(0.3),
        31: Process(0.9),
    }
    made = Made(tmp_path, processes, {2: BUSY, 3: BUSY})
    assert made.use(apart=[21]).own == pytest.approx(0.1 + 0.4 + 0.2 + 0.3, abs=0.02)
    assert made.use().own == pytest.approx(1.0 + 1.8, abs=0.02)


def test_a_process_that_comes_or_ends_meanwhile_is_no_error_and_only_looks_in_a_row_count(tmp_path):
    made = Made(tmp_path, workers(1, 0.5, 0.5), {2: BUSY, 3: BUSY})
    watch = made.watch()
    for second, there in enumerate([False, True, True, False, False]):
        made.now = float(second)
        made.processes[20] = Process(0.5, 0.5)
        made.show()
        if not there:
            (made.proc / "20" / "schedstat").unlink()
        watch.look()
    assert watch.use.queued == pytest.approx(0.5 / (0.5 + 0.5 + 4 * 0.1), abs=0.01)


def test_looks_that_follow_at_once_cost_nothing_and_too_short_a_time_says_nothing(tmp_path):
    made = Made(tmp_path, workers(1, 0.5, 0.5), {2: BUSY, 3: BUSY})
    made.show()
    watch, seen = made.watch(), []
    see, watch._see = watch._see, lambda: seen.append(made.now) or see()
    for number in range(64):
        made.now = number / 64
        watch.look()
        assert (watch.use is NOT_SEEN) == (number < 35), number
    assert seen == [number / 64 for number in range(0, 64, 7)]  # a tenth of a second, and half a second
    assert made.watch().use is NOT_SEEN


@pytest.mark.parametrize("missing", ["stat", f"{MAIN}/stat", f"{MAIN}/schedstat"])
def test_a_system_that_hides_something_is_looked_at_once_and_says_nothing(tmp_path, missing):
    made = Made(tmp_path, workers(1, 0.5, 0.5), {2: BUSY, 3: BUSY})
    made.show()
    (made.proc / missing).unlink()
    watch = made.watch()
    watch.look()
    made.show()
    made.now = 9.0
    watch.look()
    assert watch.use is NOT_SEEN
    assert load_of([watch.use]) is None


@pytest.mark.parametrize("text", ["", "cpu  1 2 3", "cpu2 1 x 3 4 5 6 7"])
def test_words_that_are_no_figures_say_nothing(tmp_path, text):
    made = Made(tmp_path, workers(1, 0.5, 0.5), {2: BUSY, 3: BUSY})
    made.show()
    made.write(made.proc / "stat", text)
    watch = made.watch()
    watch.look()
    assert watch.use is NOT_SEEN


@pytest.mark.parametrize(
    ("processes", "cores", "begins"),
    [
        (workers(2, 0.9, 0.05), (BUSY, BUSY), ""),  # alone
        (workers(8, 0.23, 0.74), (BUSY, BUSY), ""),  # more workers than cores
        (workers(2, 0.2, 0.75), (BUSY, BUSY), "Other programs took 1.5 of 2 cores: this one had 0.5, and waited 75% of"),
        (workers(8, 0.05, 0.9), (BUSY, BUSY), "Other programs took 1.5 of 2 cores: this one had 0.5, and waited 94% of"),
        (workers(2, 0.4, 0.0), (BUSY, BUSY), ""),  # others have the cores that this one leaves
        (workers(2, 0.1, 0.3), (HALF, IDLE), ""),  # its processes come in bursts, and nobody else is there
    ],
)
def test_what_other_programs_took_is_told_apart_from_a_queue_of_its_own(tmp_path, processes, cores, begins):
    made = Made(tmp_path, processes, dict(zip((2, 3), cores, strict=True)))
    if len(processes) < 4 and cores == (HALF, IDLE):
        made.cores = {2: (0.3, 0, 0, 0.7, 0, 0), 3: IDLE}
    load = load_of([made.use()])
    assert load.sentence.startswith(begins)
    assert bool(load.sentence) is load.is_notable is bool(begins)


@pytest.mark.parametrize(("quotas", "stopped"), [((0.6,), 0.6), ((0.6, 0.9), 0.9), ((0.0, 0.1), 0.1), ((), 0.0)])
def test_a_quota_that_stops_the_program_is_named(tmp_path, quotas, stopped):
    load = load_of([Made(tmp_path, workers(2, 0.9, 0.05), {2: BUSY, 3: BUSY}, quotas).use()])
    assert load.stopped == pytest.approx(stopped, abs=0.01)
    assert load.is_notable is (stopped > 0.2)
    named = f"The quota of its container, 2 cores, stopped this program in {stopped:.0%} of all periods"
    assert load.sentence.startswith(named if stopped > 0.2 else "")


def test_a_quota_bounds_the_cores(tmp_path):
    made = Made(tmp_path, workers(2, 0.2, 0.6), {2: BUSY, 3: BUSY}, [0.0])
    made.show()
    made.write(made.cgroups / QUOTA[1:] / "cpu.max", "50000 100000")
    watch = made.watch()
    watch.look()
    made.now = 1.0
    watch.look()
    assert watch.use.cores == 0.5


@pytest.mark.parametrize(
    ("load", "taken", "slowed"),
    [
        (Load(2, 1.0, 1.0, 0.5), 1.0, 0.5),  # alone 2
        (Load(2, 0.5, 1.5, 0.5), 0.5, 0.5),  # alone 1
        (Load(2, 0.5, 0.2, 0.5), 0.2, 0.2 / 0.7),  # nobody can take more than was taken
        (Load(2, 1.9, 0.1, 0.9), 0.1, 0.05),
        (Load(4, 1.0, 3.0, 0.9), 3.0, 0.75),  # alone 4, though it asks for 10
        (Load(2, 0.0, 2.0, 1.0), 2.0, 1.0),
        (Load(2, 0.0, 2.0, 0.0), 0.0, 0.0),  # it did nothing
        (Load(2, 2.1, 0.0, 0.0), 0.0, 0.0),  # the kernel counts in ticks
    ],
)
def test_what_was_taken_is_what_the_program_would_have_had_alone(load, taken, slowed):
    assert (load.taken, load.slowed_fraction) == (pytest.approx(taken), pytest.approx(slowed))


@pytest.mark.parametrize(
    ("load", "is_notable"),
    [
        (Load(2, 0.1, 0.3, 0.5), False),  # slowed by a half, but the others are hardly there: it wakes up often
        (Load(2, 0.1, 0.5, 0.5), True),
        (Load(2, 1.0, 1.0, 0.1), False),  # they are there, and it hardly waits
        (Load(16, 2.0, 4.0, 0.3), True),
        (Load(2, 1.9, 0.1, 0.9, stopped=0.25), True),
    ],
)
def test_figures_are_worth_little_if_others_are_there_and_it_was_slower(load, is_notable):
    assert load.is_notable is bool(load.sentence) is is_notable


def test_ranks_of_a_machine_are_one_program():
    """They have 0.5 and 1.0 of 4 cores, and would have 1 and 2."""
    ranks = [CoreUse(4, own, 3.9, 0.5, stopped) for own, stopped in ((0.5, 0.0), (1.0, 0.1))]
    load = load_of(ranks)
    assert vars(load) == pytest.approx(vars(Load(cores=4, own=1.5, others=2.4, queued=0.5, stopped=0.1)))
    assert load_of([*ranks, NOT_SEEN]) is None
    assert load_of([]) is None
    assert load_of([CoreUse(1, 0.0, 1.0, 1.0, 0.0)]).slowed_fraction == 1, "it was ready all the time"
    assert load_of([CoreUse(1, 0.0, 1.0, 0.0, 0.0)]).slowed_fraction == 0, "it did nothing"


def test_this_process_sees_itself_and_its_machine_if_the_system_shows_them(monkeypatch):
    monkeypatch.undo()
    watch, now = CoreWatch(), SimpleNamespace(seconds=0.0)
    watch._clock = lambda: now.seconds
    watch.look()
    if watch._is_blind:
        pytest.skip("this system does not show it")
    now.seconds = 0.5
    watch.look()
    use = watch.use
    assert not any(map(math.isnan, use))
    assert 0 < use.cores <= visible_cores()
    assert 0 <= use.queued <= 1
