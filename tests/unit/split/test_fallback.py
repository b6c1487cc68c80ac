"""Examples that do not fit a split are read whole for each use; too many of them, or an insertion point asked for, end it."""

import pytest
import torch
from torch.utils.data import Dataset

from lightning_echo.data.copies import copy_example
from lightning_echo.split.check import WHOLE, SplitFails, WatchedStages
from lightning_echo.split.describe import ReadRefused, SplitRefused
from lightning_echo.split.prove import make_stages


class Partly(Dataset):
    """Transforms all but those in ``left_out``; counts how often each example is read. Some may fail, for good or once."""

    def __init__(self, *left_out, broken=(), flaky=()):
        self.left_out, self.reads = set(left_out), []
        self.broken, self.flaky = broken, list(flaky)  # which copies share

    @staticmethod
    def transform(number):
        return number + 1000

    def __getitem__(self, index):
        self.reads.append(index)
        if index in self.flaky:
            self.flaky.remove(index)
            raise OSError("a slow disk")
        if index in self.broken:
            raise OSError("broken file")
        return (index if index in self.left_out else self.transform(index)), "label"

    def __len__(self):
        return 1000


class PartlyInCalls(Partly):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def watched(dataset, refusal=None, may_fail=False):
    return WatchedStages(make_stages(dataset), dataset, refusal=refusal, may_fail=may_fail)


def loaded(stages, *indices):
    return stages.load_many(list(indices)) if stages.load_many else [stages.load(index) for index in indices]


@pytest.mark.parametrize("kind", [Partly, PartlyInCalls])
def test_one_that_fits_is_loaded_once_and_one_that_does_not_is_read_whole_for_each_use(kind):
    dataset = kind(3, 5)
    stages = watched(dataset)
    assert loaded(stages, 2, 4) == [(2, "label"), (4, "label")]
    assert [stages.augment(2, (2, "label")) for _ in range(2)] == [(1002, "label")] * 2
    assert (dataset.reads, stages.note) == ([2, 4], "")
    assert loaded(stages, 2, 3, 4) == [(2, "label"), WHOLE, (4, "label")]
    dataset.reads.clear()
    assert [stages.augment(3, WHOLE) for _ in range(2)] == [(3, "label")] * 2
    assert dataset.reads == [3, 3]
    assert "example 3 does not fit the split of the data set: it calls its transform 0 times" in stages.note
    stages.note = ""
    assert loaded(stages, 5) == [WHOLE]
    assert stages.note == "", "it is said once"
    assert copy_example(WHOLE) is WHOLE


@pytest.mark.parametrize(("refusal", "where"), [(SplitRefused, "before its augmentation"), (ReadRefused, "after reading")])
def test_where_it_is_refused_the_first_one_ends_it(refusal, where):
    stages = watched(Partly(3), refusal)
    stages.load(2)
    with pytest.raises(refusal, match=f"cannot be split {where}: example 3: it calls its transform 0 times") as refused:
        stages.load(3)
    assert "insertion_point='" in str(refused.value)


def test_a_third_of_many_examples_ends_it_and_of_few_does_not():
    few = watched(Partly(*range(0, 127)), may_fail=True)
    assert [few.load(index) for index in range(127)] == [WHOLE] * 127
    with pytest.raises(SplitFails, match=r"128 of the 128 examples .* do not fit \(the last one, 1: it calls"):
        few.load(1)
    third = watched(Partly(*range(0, 600, 3)), may_fail=True)
    for index in range(1, 600):  # begins with one that fits, so that it is never more than a third
        third.load(index)
    third.load(300)
    with pytest.raises(SplitFails, match=r"201 of the 601 examples"):
        third.load(300)


def test_where_nothing_can_take_the_place_of_the_split_any_number_is_read_whole():
    stages = watched(Partly(*range(200)))
    assert [stages.load(index) for index in range(200)] == [WHOLE] * 200


def test_examples_that_were_read_in_calls_count_as_read():
    stages = watched(PartlyInCalls(*range(1000, 1200)), may_fail=True)
    stages.load_many(list(range(600)))
    assert stages.load_many(list(range(1000, 1200))) == [WHOLE] * 200  # of 800


@pytest.mark.parametrize("refusal", [None, SplitRefused])
@pytest.mark.parametrize("kind", [Partly, PartlyInCalls])
def test_an_error_that_does_not_come_again_is_not_the_splits_and_one_that_does_is_raised(kind, refusal):
    stages = watched(kind(flaky=[5], broken=[7]), refusal)
    assert loaded(stages, 4, 5) == [(4, "label"), (5, "label")]
    assert stages.note == ""
    with pytest.raises(OSError, match="broken file"):
        loaded(stages, 6, 7)


def test_a_call_that_fails_by_itself_as_well_raises_what_the_data_set_raises():
    class OneAtATime(PartlyInCalls):
        def __getitems__(self, indices):
            if len(indices) > 1:
                raise OSError("one at a time")
            return super().__getitems__(indices)

    stages = watched(OneAtATime())
    with pytest.raises(OSError, match="one at a time"):
        stages.load_many([1, 2])
    assert stages.load_many([1]) == [(1, "label")]


def test_draws_are_looked_for_only_in_examples_that_are_kept_and_from_the_first_on_one_by_one():
    class Drawing(Partly):
        def __getitem__(self, index):
            if index == 1:
                torch.rand(())
            return super().__getitem__(index)

    stages = watched(Drawing())
    stages.begin()
    assert loaded(stages, 0, 1) == [(0, "label"), (1, "label")]
    assert stages.must_repeat()
    assert loaded(stages, 0, 1) == [(0, "label"), WHOLE]
    stages.end()
    assert "loading it draws random numbers from torch" in stages.note
    assert stages.load(1) == (1, "label")  # for a single use: nothing is repeated
    stages.begin()
    assert loaded(stages, 0, 1) == [(0, "label"), WHOLE]
    assert not stages.must_repeat()


def test_what_reading_an_example_whole_draws_is_not_taken_for_a_draw_of_loading():
    class FailsInStages(Partly):
        @staticmethod
        def transform(number):
            return number + torch.rand(())

        def __getitem__(self, index):
            if "transform" in vars(self):
                raise RuntimeError("exchanged")
            return super().__getitem__(index)

    stages = watched(FailsInStages())
    stages.begin()
    assert stages.load(1) is WHOLE
    assert not stages.must_repeat()
    assert "loading it in stages raised RuntimeError: exchanged" in stages.note
