"""The clocks of the steps, on a simulated machine whose truth is known: a host, and a device that works off what it is given.

All durations are multiples of 1/1024 s, so that sums are exact and are compared exactly.
"""

import gc
import os
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_echo.measure.timing import DeviceEvents, StepTimer

MS = 1 / 1024


class Machine:
    """A host with a clock, and a device whose stream runs what it is given, in order, not before the host asks for it."""

    def __init__(self):
        self.now = 0.0
        self.free_at = 0.0  # when the device will have done all that it was given
        self.busy = []  # begin and end of each piece of work
        self.events = []
        self.synchronized = 0

    def clock(self):
        return self.now

    def host(self, seconds):
        self.now += seconds

    def launch(self, seconds):
        begin = max(self.now, self.free_at)
        self.free_at = begin + seconds
        self.busy.append((begin, self.free_at))

    def drain(self):
        """The host waits for the device, as ``.item()`` does."""
        self.now = max(self.now, self.free_at)

    def new_event(self):
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    """As strict as CUDA: an event that has not passed cannot be read."""

    def __init__(self, machine):
        self.machine, self.at = machine, None

    def record(self):
        self.at = max(self.machine.now, self.machine.free_at)

    def query(self):
        return self.at <= self.machine.now

    def synchronize(self):
        self.machine.synchronized += 1
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, end_event):
        assert self.query(), "read before it has passed"
        assert end_event.query(), "read before it has passed"
        return (end_event.at - self.at) * 1e3


@dataclass
class Step:
    """What a step of the simulation does, in this order; seconds."""

    fetch: float = 0.0
    copy: float = 0.0
    hooks: float = 0.0  # between copy and step: logging and the like
    launch: float = 0.0  # the host's share of the step
    work: float = 0.0  # the device's share of the step
    fetches_itself: bool = False  # as a training_step that takes a dataloader_iter
    after: float = 0.0  # logging and checkpoints after the step
    validation: float | None = None  # after all that
    resumes: bool = True  # False: validation has nothing to do, and nobody says that it is over


@dataclass
class Run:
    """Drives a timer through steps; remembers for each what the host waited, and when it ended."""

    on_device: bool
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self):
        self.timer = StepTimer(DeviceEvents(self.machine.new_event) if self.on_device else None, self.machine.clock)
        self.begin_epoch()

    def begin_epoch(self, *, goes_on=False):
        self.timer.begin_epoch(goes_on=goes_on)
        self.goes_on = goes_on
        self.waited, self.ends, self.paused, self.begun = [], [], [0.0], None

    def fetch(self, seconds):
        self.timer.begin_fetch()
        asked, free_at = self.machine.now, self.machine.free_at
        self.machine.host(seconds)
        self.timer.end_fetch()
        if self.begun is None:  # the epoch's time, on the host and on the stream
            self.begun, self.idle_from = asked if self.goes_on else self.machine.now, max(asked, free_at)

    def copy(self, seconds):
        self.timer.begin_copy()
        self.machine.host(seconds)
        self.timer.end_copy()

    def step(self, step):
        is_first, fetch = self.begun is None and not self.goes_on, (step.fetch + 0.0)
        if not step.fetches_itself:
            self.fetch(fetch)
            self.copy(step.copy)
            self.machine.host(step.hooks)
        self.timer.begin_step()
        if step.fetches_itself:
            self.machine.host(step.hooks)
            self.fetch(fetch)
        self.machine.host(step.launch)
        if self.on_device:
            self.machine.launch(step.work)
        else:
            self.machine.host(step.work)
        self.timer.end_step()
        self.waited.append((0.0 if is_first else fetch) + (0.0 if step.fetches_itself else step.copy))
        self.ends.append(self.machine.now)
        self.machine.host(step.after)
        if step.validation is not None:
            self.validate(step.validation, resumes=step.resumes)
        else:
            self.paused.append(0.0)

    def validate(self, seconds, *, resumes=True):
        self.machine.drain()  # what was logged in the step is read
        begun = self.machine.now
        self.timer.pause()
        if resumes:
            self.timer.pause()  # Lightning says it twice: before loaders are set up, and when validation begins
            self.copy(seconds / 2)
            self.machine.host(seconds / 2)
            self.timer.resume()
        else:
            self.machine.host(seconds)
        self.paused.append(self.machine.now - begun)


def run_of(*steps, on_device):
    run = Run(on_device)
    for step in steps:
        run.step(step)
    return run


def measured(run):
    run.timer.settle()
    return run.timer.take()


def host_truth(run):
    """Seconds from step to step, the first from where the epoch's time begins, without the validation between them."""
    begins = [run.begun, *run.ends]
    lasted = [end - begin - paused for begin, end, paused in zip(begins, run.ends, run.paused, strict=False)]
    return run.waited, lasted


def device_truth(run):
    """Of each gap on the stream without validation as much as the host waited; seconds from end to end on the stream."""
    (begin, end), *others = run.machine.busy
    waited = [min(begin - run.idle_from, run.waited[0]) if run.goes_on else run.waited[0]]
    lasted = [end - run.idle_from if run.goes_on else waited[0] + end - begin]
    for (begin, until), paused, waiting in zip(others, run.paused[1:], run.waited[1:], strict=False):
        gap = begin - end - paused
        waited.append(min(gap, waiting))
        lasted.append(until - end - paused)
        end = until
    return waited, lasted


@pytest.mark.parametrize("resumes", [True, False])
def test_a_validation_before_a_first_batch_that_is_waited_for_is_no_part_of_the_time(resumes):
    """As where a callback begins an epoch by validating."""
    for on_device in (False, True):
        run = run_of(Step(work=1), on_device=on_device)
        measured(run)
        run.begin_epoch(goes_on=True)
        run.validate(64, resumes=resumes)
        run.step(Step(fetch=9, work=1))
        assert measured(run) == ([9], [10])


def test_what_follows_the_last_step_of_an_epoch_does_not_count():
    run = run_of(Step(fetch=5, work=1), Step(fetch=1, work=1), on_device=False)
    run.timer.begin_fetch()  # a loader without a length: only this says that there is no more
    run.machine.host(7)
    run.timer.end_fetch()
    run.validate(64, resumes=False)
    assert measured(run) == ([0, 1], [1, 2])
    run.begin_epoch()
    run.machine.host(30)
    assert run.timer.first_batch_seconds is None
    run.step(Step(fetch=3, work=2))
    assert run.timer.first_batch_seconds == 3
    assert measured(run) == ([0], [2])
    assert (run.timer.waited_seconds, run.timer.seconds) == (0, 2)


durations = st.integers(0, 40).map(lambda n: n * MS)
steps = st.lists(
    st.builds(
        Step,
        fetch=durations,
        copy=durations,
        hooks=durations,
        launch=durations,
        work=durations,
        after=durations,
        validation=st.one_of(st.none(), st.none(), durations),
        resumes=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(steps, st.booleans(), st.booleans())
def test_host_times_are_those_of_the_definition(steps, fetches_itself, goes_on):
    run = Run(on_device=False)
    run.begin_epoch(goes_on=goes_on)
    for step in steps:
        step.fetches_itself = fetches_itself
        run.step(step)
    assert run.timer.first_batch_seconds == (None if goes_on else steps[0].fetch)
    waited, lasted = measured(run)
    assert (waited, lasted) == host_truth(run)
    assert all(0 <= wait <= seconds for wait, seconds in zip(waited, lasted, strict=True))
    assert (run.timer.waited_seconds, run.timer.seconds) == (sum(waited), sum(lasted))
    assert run.timer.seconds == run.ends[-1] - run.begun - sum(run.paused[:-1])


def test_a_step_that_was_not_said_to_begin_counts_from_its_end():
    """For a batch of None Lightning has a step's end, but no beginning."""
    run = run_of(Step(work=8 * MS), on_device=True)
    run.fetch(20 * MS)
    run.timer.end_step()
    run.step(Step(fetch=4 * MS, work=8 * MS))
    waited, lasted = measured(run)
    assert waited == pytest.approx([0, 12 * MS, 4 * MS])
    assert lasted == pytest.approx([8 * MS, 12 * MS, 12 * MS])


@example([Step(work=8 * MS), Step(fetch=4 * MS, launch=1 * MS, work=8 * MS), Step(fetch=4 * MS, work=8 * MS)], False, 1)
@given(steps, st.booleans(), st.integers(1, 4))
def test_device_times_are_those_of_the_stream(steps, fetches_itself, epochs):
    run = Run(on_device=True)
    for epoch in range(epochs):
        run.begin_epoch(goes_on=epoch % 2 == 1)
        run.machine.launch(3 * MS)  # what came between the epochs may still be at work
        run.machine.busy.clear()
        for step in steps:
            step.fetches_itself, step.launch = fetches_itself, 0.0  # the stream has the step's begin when the batch is there
            run.step(step)
        assert run.machine.synchronized == epoch, "no step waits for the device"
        waited, lasted = measured(run)
        assert run.machine.synchronized <= epoch + 1, "an epoch waits once"
        run.machine.synchronized = epoch + 1
        true_waited, true_lasted = device_truth(run)
        assert waited == pytest.approx(true_waited, abs=1e-9)
        assert lasted == pytest.approx(true_lasted, abs=1e-9)
        assert all(0 <= wait <= seconds for wait, seconds in zip(waited, lasted, strict=True))
        assert (run.timer.waited_seconds, run.timer.seconds) == (pytest.approx(sum(waited)), pytest.approx(sum(lasted)))


def test_a_step_is_known_once_the_device_has_passed_it_and_nothing_waits_for_it():
    run = Run(on_device=True)
    for known in (0, 0, 0, 0, 1):  # a step takes the device 10 ms, the host 3 ms: the first one has passed after 13
        run.step(Step(fetch=3 * MS, work=10 * MS))
        assert len(run.timer.take()[0]) == known
    run.machine.host(50 * MS)
    assert run.timer.take() == ([], [])  # nobody looks between steps
    run.step(Step(fetch=3 * MS, work=10 * MS))
    assert len(run.timer.take()[0]) == 4
    assert run.machine.synchronized == 0
    run.timer.settle()
    assert len(run.timer.take()[0]) == 1
    assert run.machine.synchronized == 1
    run.timer.settle()
    assert (run.timer.take(), run.machine.synchronized) == (([], []), 1)  # nothing is left to wait for


@pytest.mark.parametrize("ahead", [0, 5])
def test_events_are_used_again_so_that_their_number_does_not_grow_with_steps_and_epochs(ahead):
    run = run_of(*[Step(work=8 * MS)] * (1 + ahead), on_device=True)
    for _ in range(200):
        run.step(Step(fetch=8 * MS, work=8 * MS))
    assert len(run.machine.events) <= 2 * (ahead + 3)
    assert len(measured(run)[0]) == 201 + ahead
    made = len(run.machine.events)
    for _ in range(50):
        run.begin_epoch(goes_on=True)
        run.step(Step(fetch=8 * MS, work=8 * MS))
        assert len(measured(run)[0]) == 1
        run.begin_epoch()
        run.timer.begin_step()  # no batch was seen to come: it is not counted
        run.timer.end_step()
    assert len(run.machine.events) <= made + 4


def steps_of(timer, machine, count):
    timer.begin_epoch(goes_on=True)
    for _ in range(count):
        timer.begin_fetch()
        timer.end_fetch()
        timer.begin_step()
        machine.launch(1)
        timer.end_step()


class Told(Event):
    """Tells a pipe of the process in which it is freed."""

    def __init__(self, machine, pipe):
        super().__init__(machine)
        self.pipe = pipe

    def __del__(self):
        os.write(self.pipe, f"{os.getpid()} ".encode())


@pytest.mark.parametrize(("steps", "has_passed"), [(0, True), (3, True), (3, False)])
def test_a_fork_that_collects_a_timer_frees_no_event(steps, has_passed):
    """As a worker does, which inherits the timer of a training that is over: a CUDA event that is freed there aborts it."""
    read, write = os.pipe()
    machine = Machine()
    machine.new_event = lambda: Told(machine, write)
    events = DeviceEvents(machine.new_event)
    kept = gc.isenabled()
    gc.disable()
    try:
        timer = StepTimer(events, machine.clock)
        steps_of(timer, machine, steps)
        if has_passed:
            machine.drain()
            timer.settle()
        timer.begin_step()
        timer.myself = timer
        del timer
        if (child := os.fork()) == 0:
            gc.collect()
            os.write(write, b"collected ")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(read, 10_000).split() == [b"collected"]
        spare = 2 * steps if has_passed else 0  # all but the last step's end
        assert events.made == (1 + 2 * steps if steps else 0) + (0 if spare else 1)
    finally:
        gc.enable() if kept else None
        events = None
        gc.collect()
        os.close(read)
        os.close(write)
