"""Where a loader's data set is cut, the functions of each part, and the transforms in it by a clock that nothing else moves."""

import threading
from functools import partial

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision.transforms import v2

from lightning_echo import StagedDataset
from lightning_echo.analysis.parts import TimedTransforms, both_halves, cuts, first_half, in_threads, second_half, whole
from lightning_echo.split.prove import make_stages
from lightning_echo.split.reading import Part as ReadAhead
from lightning_echo.split.reading import ReadPart

LATE = ("after_augmentation", "after_batching", "after_transfer")
MAKE = partial(make_stages, conventions=None)


class Halved(StagedDataset):
    """Loading multiplies by ten, augmenting adds one."""

    def __len__(self):
        return 8

    def load(self, index):
        return torch.tensor([10 * index])

    def augment(self, example):
        return example + 1


class Staged(StagedDataset):
    """The same, and reading is apart from decoding."""

    __len__, augment = Halved.__len__, Halved.augment

    def read(self, index):
        return index

    def decode(self, raw):
        return torch.tensor([10 * raw])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "is_cut", "points"),
    [
        (Staged(), (True, True), ("after_read", "before_augmentation", *LATE)),
        (Halved(), (False, True), ("before_augmentation", *LATE)),
        (range(8), (False, False), LATE),
    ],
    ids=["read, decode and augment", "load and augment", "neither"],
)
def test_a_data_set_is_cut_where_it_can_be(dataset, is_cut, points):
    found = cuts(DataLoader(dataset, batch_size=2))
    assert (found.after_reading is not None, found.before_augmenting is not None) == is_cut
    assert found.points == points
    if is_cut == (True, True):
        assert found.after_reading(Staged()).load(3) == 3
        assert found.before_augmenting(Staged()).load(3).tolist() == [30]


@pytest.mark.slow
def test_what_threads_may_read_is_looked_at_if_that_is_asked():
    """`Staged` has a ``read`` of the user's; whoever gives a number lets threads run it."""

    class SaysSo(Staged):
        reads_concurrently = True

    assert cuts(DataLoader(Staged(), batch_size=2)).reading == ""
    assert "read of Staged is code of the user's" in cuts(DataLoader(Staged(), batch_size=2), "auto").reading
    for found in (cuts(DataLoader(Staged(), batch_size=2), 4), cuts(DataLoader(SaysSo(), batch_size=2), "auto")):
        assert (found.reading.part, found.until.raw) == (ReadAhead.raw, False)
    assert cuts(DataLoader(range(8), batch_size=2), "auto").reading.endswith("set num_workers")


@pytest.mark.slow
def test_threads_read_at_the_same_time_and_raise_the_data_set_s_errors():
    class Together(Staged):
        """A read ends as soon as four of them are under way."""

        def __init__(self):
            self.meeting = threading.Barrier(4)

        def read(self, index):
            if index == 99:
                raise OSError("the disk is gone")
            self.meeting.wait(timeout=20)
            return index

    part = ReadPart(ReadAhead.whole, False, 0)
    assert in_threads(part, None, 4, Together()).first(list(range(8))) == []
    with pytest.raises(OSError, match="the disk is gone"):
        in_threads(part, None, 4, Together()).first([99])


def values(examples):
    return [example.item() for example in examples]


def test_both_halves_together_make_the_whole_examples_and_one_alone_has_one_function():
    halves = both_halves(MAKE, Halved())
    items = halves.first([1, 4])
    assert (values(items), values(halves.second([1, 4], items))) == ([10, 40], [11, 41])
    assert values(whole(Halved()).first([1, 4])) == [11, 41]
    assert values(first_half(MAKE, Halved()).first([1, 4])) == [10, 40]
    assert [each.second for each in (first_half(MAKE, Halved()), whole(Halved()))] == [None, None]


def test_the_second_half_loads_what_is_not_in_memory_and_does_not_edit_what_is():
    class Edits(Halved):
        def augment(self, example):
            return example.add_(1)

    items = {1: torch.tensor([500])}
    second = second_half(MAKE, items, Edits())
    for _ in range(2):
        assert values(second.first([1, 4])) == [501, 41]
    assert items[1].item() == 500
    assert second.second is None


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)


class Takes:
    """A transform that takes a while."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, example):
        Clock.now += self.seconds
        return example + 1


def negative(example):
    Clock.now += 2.0
    return -example


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(torch.tensor(index))

    def __len__(self):
        return 10


def seconds_in(taken):
    return {name: spent.seconds for name, spent in taken.items()}


@pytest.mark.usefixtures("clock")
def test_each_transform_of_a_compose_is_timed_and_returns_what_it_did():
    dataset = Transformed(v2.Compose([Takes(0.25), v2.Compose([Takes(0.5), negative]), Takes(1.0)]))
    expected = [dataset[index] for index in (0, 3)]
    timed = TimedTransforms(dataset)
    assert [dataset[index] for index in (0, 3)] == expected
    assert seconds_in(timed.take()) == {"Takes": 0.5, "Takes (2)": 2.0, "Takes (3)": 1.0, "negative": 4.0}
    assert set(seconds_in(timed.take()).values()) == {0}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "around",
    [
        lambda dataset: Subset(dataset, [1, 2]),
        lambda dataset: ConcatDataset([dataset, Transformed(torch.neg)]),
        lambda dataset: StagedDataset.of(dataset, augment=torch.neg),
    ],
)
def test_data_sets_around_it_are_looked_into(around):
    dataset = around(Transformed(v2.Compose([Takes(0.25)])))
    timed = TimedTransforms(dataset)
    dataset[0]
    assert seconds_in(timed.take()) == {"Takes": 0.25}
