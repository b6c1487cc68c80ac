"""Examples that do not fit a split are read whole for each use; no example that draws hidden numbers is ever echoed."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_echo.data.copies import copy_example
from lightning_echo.split.check import WHOLE, SplitFails, WatchedStages
from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import check_deterministic, find_split, make_stages


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


@pytest.mark.parametrize("refusal", [None, SplitRefused])
@pytest.mark.parametrize("kind", [Partly, PartlyInCalls])
def test_an_error_that_does_not_come_again_is_not_the_splits_and_one_that_does_is_raised(kind, refusal):
    stages = watched(kind(flaky=[5], broken=[7]), refusal)
    assert loaded(stages, 4, 5) == [(4, "label"), (5, "label")]
    assert stages.note == ""
    with pytest.raises(OSError, match="broken file"):
        loaded(stages, 6, 7)


def test_a_refusal_after_reads_that_failed_now_and_then_has_their_error_as_its_cause():
    class NowAndThen(Partly):
        """Every other read of an example fails."""

        def __getitem__(self, index):
            self.flaky += [] if self.reads.count(index) % 2 else [index]
            return super().__getitem__(index)

    with pytest.raises(SplitRefused, match="example 5: loading it in stages raised OSError: a slow disk") as raised:
        watched(NowAndThen(), SplitRefused).load(5)
    assert isinstance(raised.value.__cause__, OSError)


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


def seldom(generator):
    return 1000 if generator.random() < 0.02 else 0


class Noisy(Dataset):
    """Adds, before its transform, what ``draw`` returns: seldom another number than 0."""

    def __init__(self, length=64):
        self.length, self.transform = length, float

    def draw(self, index):
        return 0

    def __getitem__(self, index):
        return self.transform(index + self.draw(index))

    def __len__(self):
        return self.length


GLOBAL_RNG, late_rng = np.random.default_rng(), None


def from_the_seed(self, index):
    return np.random.default_rng(torch.initial_seed() + index).random()


def made_late(self, index):
    self.rng = getattr(self, "rng", None) or np.random.default_rng()
    return seldom(self.rng)


def made_late_inside(self, index):
    return seldom(self.inside.setdefault("rng", random.Random()))


def helper():
    return seldom(GLOBAL_RNG)


def made_late_in_a_global(self, index):
    global late_rng
    if late_rng is None:
        late_rng = np.random.default_rng()
    return seldom(late_rng)


def in_a_default(self, index, rng=np.random.default_rng()):  # noqa: B008 - the point
    return seldom(rng)


def in_a_closure(rng):
    return lambda index: seldom(rng)


@pytest.mark.parametrize(
    ("draw", "attributes"),
    [
        (from_the_seed, {}),
        (made_late, {}),
        (made_late_inside, {"inside": {}}),
        (lambda self, index: helper(), {}),
        (made_late_in_a_global, {}),
        (in_a_default, {}),
        (None, {"draw": in_a_closure(np.random.default_rng())}),
    ],
    ids=["a seed", "made late", "made late inside", "a global of a function", "late in a global", "a default", "a closure"],
)
def test_what_depends_on_a_seed_or_draws_from_a_generator_wherever_it_is_is_neither_split_nor_held_whole(draw, attributes):
    dataset = type("Own", (Noisy,), {"draw": draw})()
    vars(dataset).update(attributes)
    with pytest.raises(SplitRefused, match=r"under|draws random numbers from a generator that the data set holds"):
        find_split(dataset)
    with pytest.raises(SplitRefused):
        check_deterministic(dataset, [0, 63])


class LateOf(Noisy):
    rng, reads = None, 0

    def __init__(self, first):
        super().__init__(1000)
        self.first = first

    def draw(self, index):
        self.reads += 1
        if self.reads < self.first:
            return 0
        self.rng = self.rng or np.random.default_rng()
        return self.rng.random()


@pytest.mark.parametrize(("first", "batch"), [(1, 0), (10, 1), (60, 12)])
def test_a_generator_that_is_made_in_a_worker_is_found_at_the_1st_10th_and_100th_read(first, batch):
    dataset = LateOf(first)
    stages, whole = WatchedStages(make_stages(dataset), dataset, refusal=None), []
    for number in range(14):
        for _ in range(2):
            stages.begin()
            loaded = [stages.load(8 * number + place) for place in range(8)]
            if not stages.must_repeat():
                break
        stages.end()
        whole.append(loaded == [WHOLE] * 8)
    assert whole == [number >= batch for number in range(14)]
