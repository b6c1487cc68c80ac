"""Workers read a stream side by side: they share the memory in which the stream keeps the pass that one of them told it."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.utils.data import IterableDataset

from lightning_echo.data.randomness import Seeding
from lightning_echo.pipeline.streams import StreamReader

MEETING_S = 0.2  # whoever must not meet waits so long for nothing
PATIENCE_S = 30.0


class Shared:
    """Memory of all workers, in which the epoch is set in two steps; meeting is what makes a race certain."""

    def __init__(self, meet_in=None, timeout_s=MEETING_S):
        self.epoch = 0
        self._meet_in, self._barrier, self._timeout_s = meet_in, threading.Barrier(2), timeout_s
        self.met = []

    def meet(self, where):
        if where == self._meet_in:
            try:
                self._barrier.wait(self._timeout_s)
                self.met.append(where)
            except threading.BrokenBarrierError:
                pass


class Stream(IterableDataset):
    """Five examples, (epoch when the first was taken, index); a log of what it is asked. Draws when it is iterated.

    A state of the end of a pass is gone on with by nothing, and passes named so have no example.
    """

    done = 0

    def __init__(self, shared=None, empty=()):
        self.shared, self.empty, self.log = shared or Shared(), empty, []

    def set_epoch(self, epoch):
        self.log.append(epoch)
        before = self.shared.epoch
        self.shared.meet("telling")
        self.shared.epoch += epoch - before

    def __iter__(self):
        self.log.append("iter")
        self.drawn = random.random()
        return iter(()) if self.shared.epoch in self.empty else self.examples()

    def examples(self):
        self.shared.meet("opening")
        epoch = self.shared.epoch
        for i in range(self.done, 5):
            self.done = i + 1
            yield epoch, i
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.log.append("load")
        self.done = state["done"]


def reader_of(dataset, turn=None):
    return StreamReader(dataset, Seeding(dataset, 1), turn or threading.Lock())


def two_readers(shared):
    turn = threading.Lock()
    return [reader_of(Stream(shared), turn) for _ in range(2)]


def side_by_side(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(call) for call in calls]]


def test_passes_are_told_one_after_another_and_streams_open_at_the_same_time():
    shared = Shared("telling")
    first, second = two_readers(shared)
    assert side_by_side(lambda: first.pull(1, 0, 9), lambda: second.pull(1, 0, 9)) == [[(1, i) for i in range(5)]] * 2
    assert shared.met == []
    shared = Shared("opening", PATIENCE_S)
    first, second = two_readers(shared)
    side_by_side(lambda: first.pull(0, 0, 1), lambda: second.pull(0, 0, 1))
    assert shared.met == ["opening"] * 2


def test_until_all_have_caught_up_each_reads_the_pass_that_it_means():
    first, second = two_readers(Shared("opening"))
    first.resume({"done": 2}, 0, goal=1)  # has live examples of pass 0
    second.resume({"done": 1}, 1, goal=2)
    pulled = side_by_side(lambda: first.pull(0, 0, 9), lambda: second.pull(1, 0, 9))
    assert pulled == [[(0, i) for i in range(2, 5)], [(1, i) for i in range(1, 5)]]
    assert first.pull(1, 1, 9) == [(1, i) for i in range(5)]


def test_another_worker_may_begin_when_one_has_failed():
    class Broken(Stream):
        def set_epoch(self, epoch):
            raise OSError("no such epoch")

    shared, turn = Shared(), threading.Lock()
    with pytest.raises(OSError, match="no such epoch"):
        reader_of(Broken(shared), turn).pull(0, 0, 1)
    assert side_by_side(lambda: reader_of(Stream(shared), turn).pull(3, 0, 1)) == [[(3, 0)]]


@pytest.mark.parametrize("done", [5, 3])
def test_a_state_of_the_end_of_a_pass_is_gone_on_with_in_the_next(done):
    reader = reader_of(Stream())
    reader.resume({"done": done}, 0, goal=1)
    if done < 5:
        assert reader.pull(0, 0, 9) == [(0, 3), (0, 4)]
    assert reader.pull(1, 1, 3) == [(1, 0), (1, 1), (1, 2)]
    assert (reader.pass_number, reader.state) == (1, {"done": 3})


def test_a_state_is_loaded_when_its_pass_was_told_and_nothing_is_told_after_it():
    reader = reader_of(Stream())
    reader.resume({"done": 3}, 2, goal=3)
    assert reader.pull(2, 0, 9) == [(2, 3), (2, 4)]
    assert reader._dataset.log == [2, "load", "iter"]
    reader.pull(3, 1, 9)
    assert reader._dataset.log == [2, "load", "iter", 3, "iter"]


@pytest.mark.parametrize("number", [-1, 0])
def test_only_after_a_state_of_the_end_of_a_pass_a_pass_without_examples_is_iterated_once_more(number):
    reader = reader_of(Stream(empty=[1]))
    reader.resume({"done": 0}, number, goal=1)
    assert reader.pull(1, 0, 9) == []
    assert reader._dataset.log.count("iter") == (1 if number < 0 else 2)


def test_a_pass_after_a_state_of_the_end_of_one_draws_what_it_would_have_drawn():
    plain, resumed = reader_of(Stream()), reader_of(Stream())
    plain.pull(0, 0, 9)
    resumed.resume({"done": 5}, 0, goal=1)
    assert plain.pull(1, 1, 3) == resumed.pull(1, 1, 3)
    assert plain._dataset.drawn == resumed._dataset.drawn
