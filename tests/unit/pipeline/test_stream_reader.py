"""Workers read a stream side by side: they share the memory in which the stream keeps the pass that one of them told it."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image
from torch.utils.data import IterableDataset

from lightning_echo.data.randomness import Seeding
from lightning_echo.pipeline.streams import StreamReader

MEETING_S = 0.2  # whoever must not meet waits so long for nothing
PATIENCE_S = 30.0


class Shared:
    """Memory of all workers, in which the epoch is set in two steps; meeting is what makes a race certain."""

    def __init__(self, meet_in, timeout_s=MEETING_S):
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


class Worker(IterableDataset):
    """Five examples, (epoch when the first was taken, index)."""

    def __init__(self, shared):
        self.shared = shared

    def set_epoch(self, epoch):
        before = self.shared.epoch
        self.shared.meet("telling")
        self.shared.epoch += epoch - before

    def __iter__(self):
        self.shared.meet("opening")
        epoch = self.shared.epoch
        yield from ((epoch, i) for i in range(5))


class Saving(Worker):
    """Ends at the end of a pass when its state is loaded, as a state of the end says."""

    done = 0

    def __iter__(self):
        for epoch, i in super().__iter__():
            if i < self.done:
                continue
            self.done = i + 1
            yield epoch, i
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def reader_of(dataset, turn):
    return StreamReader(dataset, Seeding(dataset, 1), turn)


def side_by_side(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(call) for call in calls]]


def test_passes_are_told_one_after_another():
    shared, turn = Shared("telling"), threading.Lock()
    first, second = (reader_of(Worker(shared), turn) for _ in range(2))
    assert side_by_side(lambda: first.pull(1, 0, 9), lambda: second.pull(1, 0, 9)) == [[(1, i) for i in range(5)]] * 2
    assert shared.met == []


def test_streams_open_at_the_same_time():
    shared, turn = Shared("opening", PATIENCE_S), threading.Lock()
    first, second = (reader_of(Worker(shared), turn) for _ in range(2))
    side_by_side(lambda: first.pull(0, 0, 1), lambda: second.pull(0, 0, 1))
    assert shared.met == ["opening"] * 2


def test_until_all_have_caught_up_each_reads_the_pass_that_it_means():
    shared, turn = Shared("opening"), threading.Lock()
    first, second = (reader_of(Saving(shared), turn) for _ in range(2))
    first.resume({"done": 2}, 0, goal=1)  # has live examples of pass 0
    second.resume({"done": 1}, 1, goal=2)
    pulled = side_by_side(lambda: first.pull(0, 0, 9), lambda: second.pull(1, 0, 9))
    assert pulled == [[(0, i) for i in range(2, 5)], [(1, i) for i in range(1, 5)]]
    assert first.pull(1, 1, 9) == [(1, i) for i in range(5)]


def test_nothing_is_waited_for_where_there_is_nothing_to_tell():
    turn = threading.Lock()
    turn.acquire()
    reader = reader_of([1, 2, 3], turn)
    assert side_by_side(lambda: reader.pull(0, 0, 2)) == [[1, 2]]


def test_another_worker_may_begin_when_one_has_failed():
    class Broken(Worker):
        def set_epoch(self, epoch):
            raise OSError("no such epoch")

    shared, turn = Shared(None), threading.Lock()
    with pytest.raises(OSError, match="no such epoch"):
        reader_of(Broken(shared), turn).pull(0, 0, 1)
    assert side_by_side(lambda: reader_of(Worker(shared), turn).pull(3, 0, 1)) == [[(3, 0)]]


@pytest.mark.parametrize("done", [5, 3])
def test_a_state_of_the_end_of_a_pass_is_gone_on_with_in_the_next(done):
    reader = reader_of(Saving(Shared(None)), threading.Lock())
    reader.resume({"done": done}, 0, goal=1)
    if done < 5:
        assert reader.pull(0, 0, 9) == [(0, 3), (0, 4)]
    assert reader.pull(1, 1, 3) == [(1, 0), (1, 1), (1, 2)]
    assert (reader.pass_number, reader.state) == (1, {"done": 3})


def test_one_that_has_ended_is_not_asked_again():
    reader = reader_of(Saving(Shared(None)), threading.Lock())
    assert [len(reader.pull(0, batch, 4)) for batch in range(3)] == [4, 1, 0]


def test_nor_does_a_pass_without_examples_go_on_with_another():
    class Rewinds:
        """Begins anew after its end."""

        def __init__(self):
            self.left = iter([])

        def __iter__(self):
            return self

        def __next__(self):
            left, self.left = self.left, iter([1, 2])
            return next(left)

    assert reader_of(Rewinds(), threading.Lock()).pull(0, 0, 2) == []


class Logging(Saving):
    """Remembers what it is asked, and has no example in passes that are named so."""

    def __init__(self, empty=()):
        super().__init__(Shared(None))
        self.log, self.empty = [], empty

    def set_epoch(self, epoch):
        self.log.append(epoch)
        super().set_epoch(epoch)

    def __iter__(self):
        self.log.append("iter")
        return iter(()) if self.shared.epoch in self.empty else super().__iter__()

    def load_state_dict(self, state):
        self.log.append("load")
        super().load_state_dict(state)


def test_a_state_is_loaded_when_its_pass_was_told_and_nothing_is_told_after_it():
    reader = reader_of(Logging(), threading.Lock())
    reader.resume({"done": 3}, 2, goal=3)
    assert reader.pull(2, 0, 9) == [(2, 3), (2, 4)]
    assert reader._dataset.log == [2, "load", "iter"]
    reader.pull(3, 1, 9)
    assert reader._dataset.log == [2, "load", "iter", 3, "iter"]


def test_of_a_worker_that_had_read_nothing_nothing_is_loaded():
    reader = reader_of(Logging(), threading.Lock())
    reader.resume(None, -1, goal=0)
    assert reader.pull(0, 0, 2) == [(0, 0), (0, 1)]
    assert reader._dataset.log == [0, "iter"]


@pytest.mark.parametrize("number", [-1, 0])
def test_only_after_a_state_of_the_end_of_a_pass_a_pass_without_examples_is_iterated_once_more(number):
    reader = reader_of(Logging(empty=[1]), threading.Lock())
    reader.resume({"done": 0}, number, goal=1)
    assert reader.pull(1, 0, 9) == []
    assert reader._dataset.log.count("iter") == (1 if number < 0 else 2)


def test_a_pass_after_a_state_of_the_end_of_one_draws_what_it_would_have_drawn():
    class Noisy(Saving):
        """Draws when it is iterated, as a shuffle buffer does."""

        def __iter__(self):
            self.drawn = random.random()
            return super().__iter__()

    plain, resumed = (reader_of(Noisy(Shared(None)), threading.Lock()) for _ in range(2))
    plain.pull(0, 0, 9)
    resumed.resume({"done": 5}, 0, goal=1)
    assert plain.pull(1, 1, 3) == resumed.pull(1, 1, 3)
    assert plain._dataset.drawn == resumed._dataset.drawn


def test_images_that_a_stream_only_opened_are_decoded_where_they_are_read(tmp_path):
    for number in range(3):
        Image.new("RGB", (100, 100), (number, 7, 9)).save(tmp_path / f"{number}.png")
    reader = reader_of([Image.open(tmp_path / f"{number}.png") for number in range(3)], threading.Lock())
    images = reader.pull(0, 0, 3)
    assert [image.fp for image in images] == [None] * 3, "Pillow closes the file when it has decoded it"
    assert [image.getpixel((0, 0)) for image in images] == [(number, 7, 9) for number in range(3)]
