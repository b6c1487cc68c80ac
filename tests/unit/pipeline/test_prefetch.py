"""What the source yields is handed on in order, a known depth ahead of a slow step, and nothing is left behind.

Nothing waits for a time: events say when the thread has got somewhere, and the clock that measures the steps is the test's.
"""

import gc
import threading
import weakref
from itertools import chain, cycle, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_echo.pipeline import prefetch
from lightning_echo.pipeline.prefetch import DEPTH, Prefetcher

PATIENCE = 30  # seconds after which a test that hangs fails; no test waits for it to pass
STEPS = {"short": [0.0], "mixed": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]}  # seconds from one item to asking for the next
THREAD = "lightning_echo-prefetch"


class Watched:
    """Counts what is read of it and by which threads, and says when a number was reached."""

    def __init__(self, length, error=StopIteration):
        self.length, self.error = length, error
        self.read, self.readers = 0, []
        self.changed = threading.Condition()

    def __iter__(self):
        return self

    def __next__(self):
        with self.changed:
            self.readers.append(threading.current_thread().name)
            if self.read == self.length:
                raise self.error("that was all")
            self.read += 1
            self.changed.notify_all()
            return self.read

    def wait_for(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: self.read >= number, PATIENCE)


class StepClock:
    """Stands for the module ``time``: looked at twice per item, when it is asked for and when it is handed out."""

    def __init__(self, steps):
        self.ticks = chain.from_iterable((step, 0.0) for step in chain([0.0], steps))
        self.now = 0.0

    def perf_counter(self):
        self.now += next(self.ticks)
        return self.now


@pytest.fixture(params=list(STEPS))
def steps(request, monkeypatch):
    monkeypatch.setattr(prefetch, "time", StepClock(cycle(STEPS[request.param])))


@pytest.fixture
def long_steps(monkeypatch):
    monkeypatch.setattr(prefetch, "time", StepClock(repeat(1.0)))


@pytest.fixture
def prefetcher():
    made = []

    def make(source, **kwargs):
        made.append(Prefetcher(source, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _named():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture(autouse=True)
def threads():
    """Those of the test: loaders that other tests of this process have not let go of yet have some, too."""
    others = _named()
    return lambda: [thread for thread in _named() if thread not in others]


@settings(max_examples=20)
@given(steps=st.lists(st.sampled_from([0.0, 1.0]), min_size=60, max_size=60), depth=st.integers(1, 4))
def test_whatever_the_steps_items_come_in_order_and_never_too_far_ahead(steps, depth):
    source = Watched(50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "time", StepClock(steps))
        items = Prefetcher(source, depth)
        for asked in range(50):
            assert next(items) == asked + 1
            assert source.read <= asked + 1 + depth
        with pytest.raises(StopIteration):
            next(items)
        items.close()


@pytest.mark.parametrize("long", [0, 1, 10])
def test_from_the_first_short_step_on_nothing_is_handed_from_thread_to_thread(prefetcher, monkeypatch, long):
    """What was fetched ahead by then comes first. How long the first step takes is not known, so it counts as long."""
    monkeypatch.setattr(prefetch, "time", StepClock([1.0] * long + [0.0] * 50))
    source = Watched(50)
    assert list(prefetcher(source)) == list(range(1, 51))
    by_thread = 1 + long + DEPTH
    assert source.readers == [THREAD] * by_thread + [threading.current_thread().name] * (51 - by_thread)


@pytest.mark.parametrize("error", [StopIteration, ValueError, KeyboardInterrupt])
def test_an_exception_arrives_where_the_item_would_have_and_then_it_stays_at_the_end(prefetcher, steps, error):
    items = prefetcher(Watched(3, error))
    assert [next(items) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(error, match="that was all"):
        next(items)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(items)


@pytest.mark.parametrize("taken", [0, 2, 100])
def test_closing_ends_the_thread_and_lets_the_source_go_and_may_be_done_twice(steps, threads, taken):
    source = Watched(100)
    reference = weakref.ref(source)
    items = Prefetcher(source)
    for _ in range(taken):
        next(items)
    for _ in range(2):
        items.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)
    del source
    gc.collect()
    assert reference() is None


class Stuck:
    """Yields one item and then waits until it is released; then it fails. torch's iterator waits so for a dead worker."""

    def __init__(self):
        self.left = 1
        self.is_stuck, self.release = threading.Event(), threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if self.left:
            self.left -= 1
            return self.left
        self.is_stuck.set()
        assert self.release.wait(PATIENCE)
        raise ConnectionResetError("broken off")


@pytest.fixture
def stuck(threads):
    source = Stuck()
    yield source
    source.release.set()
    for thread in threads():
        thread.join(PATIENCE)


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("while_waiting", [False, True])
def test_who_waits_for_a_source_that_cannot_go_on_is_told_why(stuck, prefetcher, long_steps, while_waiting):
    answers = chain([None] * 2 * while_waiting, repeat(RuntimeError("worker 7 is dead")))
    items = prefetcher(stuck, lost=lambda within: next(answers))
    assert next(items) == 0
    assert stuck.is_stuck.wait(PATIENCE)
    with pytest.raises(RuntimeError, match="worker 7 is dead"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("dies", [False, True], ids=["slow", "dead"])
def test_closing_does_not_wait_for_a_source_that_is_stuck(long_steps, threads, stuck, dies):
    is_dead = threading.Event()
    items = Prefetcher(stuck, lost=lambda within: RuntimeError("dead") if is_dead.is_set() else None)
    assert next(items) == 0
    assert stuck.is_stuck.wait(PATIENCE)
    if dies:
        threading.Timer(0.1, is_dead.set).start()
    assert items.close(1e6 if dies else 0.01) is dies
    (thread,) = threads()
    assert thread.daemon, "it ends with the process at the latest"
    stuck.release.set()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "and before, once the source goes on"


@pytest.mark.parametrize(("error", "waits"), [(ConnectionResetError, True), (EOFError, True), (ValueError, False)])
def test_where_a_connection_breaks_it_is_waited_for_who_is_dying(prefetcher, steps, error, waits):
    """What was lost is said in place of what broke by that."""
    items = prefetcher(Watched(0, error), lost=lambda within: RuntimeError("worker 7 is dead") if within else None)
    with pytest.raises(RuntimeError if waits else error, match="worker 7 is dead" if waits else "that was all") as raised:
        next(items)
    assert not waits or isinstance(raised.value.__cause__, error)


def test_an_item_is_taken_if_it_comes_in_time_and_always_fetched_by_the_thread():
    source, gate = Watched(4), threading.Event()

    def gated():
        yield from (next(source), next(source))
        assert gate.wait(PATIENCE)
        yield from source

    prefetcher = Prefetcher(gated())
    taken = [prefetcher.next_within(PATIENCE), prefetcher.next_within(PATIENCE)]
    assert prefetcher.next_within(0) is prefetch.NOTHING_YET
    assert not prefetcher.has_arrived
    assert prefetcher.next_within(0.01) is prefetch.NOTHING_YET
    gate.set()
    taken += [prefetcher.next_within(PATIENCE), prefetcher.next_within(PATIENCE)]
    assert taken == [1, 2, 3, 4]
    assert set(source.readers) == {THREAD}
    for _ in range(2):  # and it stays at its end
        with pytest.raises(StopIteration):
            prefetcher.next_within(PATIENCE)
    prefetcher.close()


def test_a_loss_is_raised_though_the_caller_waits_for_no_item():
    gate, lost = threading.Event(), []

    def stuck():
        yield 1
        assert gate.wait(PATIENCE)

    prefetcher = Prefetcher(stuck(), lost=lambda within: lost[0] if lost else None)
    assert prefetcher.next_within(PATIENCE) == 1
    assert prefetcher.next_within(0) is prefetch.NOTHING_YET
    lost.append(RuntimeError("a worker has died"))
    with pytest.raises(RuntimeError, match="a worker has died"):
        prefetcher.next_within(0)
    gate.set()
    prefetcher.close()
