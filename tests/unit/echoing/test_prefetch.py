"""The thread hands on what its source yields, in order, a known depth ahead, and leaves nothing behind.

Nothing waits for a time: events say when the thread has got somewhere.
"""

import gc
import threading
import weakref

import pytest

from lightning_echo.echoing import prefetch
from lightning_echo.echoing.prefetch import DEPTH, Prefetcher

PATIENCE = 30  # seconds after which a test that hangs fails; no test waits for it to pass


class Watched:
    """Counts what is read of it, and says when a number was reached."""

    def __init__(self, length, error=StopIteration):
        self.length, self.error = length, error
        self.read = 0
        self.changed = threading.Condition()

    def __iter__(self):
        return self

    def __next__(self):
        with self.changed:
            if self.read == self.length:
                raise self.error("that was all")
            self.read += 1
            self.changed.notify_all()
            return self.read

    def wait_for(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: self.read >= number, PATIENCE)


@pytest.fixture
def prefetcher():
    made = []

    def make(source, **kwargs):
        made.append(Prefetcher(source, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_items_come_in_the_order_of_the_source(prefetcher):
    assert list(prefetcher(iter(range(1000)))) == list(range(1000))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_source_is_read_ahead_by_the_depth_and_no_further(prefetcher, depth):
    source = Watched(100)
    items = prefetcher(source, depth=depth)
    for asked in range(95):
        source.wait_for(asked + depth)  # without being asked
        assert source.read == asked + depth
        assert next(items) == asked + 1


def test_the_usual_depth_is_the_one_that_a_change_of_factor_counts_with(prefetcher):
    source = Watched(100)
    prefetcher(source)
    source.wait_for(DEPTH)
    assert source.read == DEPTH


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_arrives_where_the_item_would_have(prefetcher, error):
    items = prefetcher(Watched(3, error))
    assert [next(items) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(error, match="that was all"):
        next(items)


@pytest.mark.parametrize("error", [StopIteration, ValueError])
def test_after_the_end_it_stays_at_the_end(prefetcher, error):
    items = prefetcher(Watched(1, error))
    next(items)
    with pytest.raises(error):
        next(items)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(items)


@pytest.mark.parametrize("taken", [0, 1, 50, 100])
def test_closing_ends_the_thread_and_lets_the_source_go(taken):
    source = Watched(100)
    reference = weakref.ref(source)
    items = Prefetcher(source)
    for _ in range(taken):
        next(items)
    items.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lightning_echo-prefetch"]
    del source
    gc.collect()
    assert reference() is None


def test_closing_twice_is_fine():
    items = Prefetcher(iter(range(10)))
    items.close()
    items.close()


def test_the_thread_holds_the_source_alone_so_that_the_owner_can_be_dropped():
    class Owner:
        def __init__(self):
            self.items = Prefetcher(Watched(100))

    owner = Owner()
    reference = weakref.ref(owner)
    weakref.finalize(owner, owner.items.close)
    next(owner.items)
    del owner
    gc.collect()
    assert reference() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "lightning_echo-prefetch"]


def test_after_an_error_nothing_of_the_source_is_kept():
    """The frames of the error hold neither the source nor what it was about to hand out."""

    class Failing:
        def __next__(self):
            example = Watched(1)
            held.append(weakref.ref(example))
            raise ValueError(f"no {type(example).__name__}")

        def __iter__(self):
            return self

    held = []
    source = Failing()
    reference, items = weakref.ref(source), Prefetcher(source)
    del source
    with pytest.raises(ValueError, match="no Watched") as caught:
        next(items)
    assert caught.value.args == ("no Watched",)
    items.close()
    del caught
    gc.collect()
    assert reference() is None
    assert held[0]() is None


def test_a_source_that_is_stuck_does_not_hold_up_closing(monkeypatch):
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 0.01)
    stuck, release = threading.Event(), threading.Event()

    def source():
        stuck.set()
        release.wait(PATIENCE)
        yield 1

    items = Prefetcher(source())
    assert stuck.wait(PATIENCE)
    items.close()
    assert items._thread.daemon, "it ends with the process at the latest"
    release.set()
    items._thread.join(PATIENCE)
    assert not items._thread.is_alive(), "and before, once the source goes on"
