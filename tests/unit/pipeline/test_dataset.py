"""The cache reads an example once, keeps it while uses are left, and never makes a batch wrong."""

import pytest
import torch
from cache_cases import LENGTH, Plain, Staged, Tensors, Whole, make_cache, make_requests, noise, request
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_echo.pipeline import worker as dataset_module
from lightning_echo.pipeline.worker import EchoCollate, EchoDataset, Report
from lightning_echo.split.staged import StagedDataset


def test_a_miss_reads_again_under_the_seeds_of_the_first_time_and_is_counted():
    dataset = Plain()
    first, second = make_cache(dataset), make_cache(dataset)
    examples, _ = first.fetch(request([0, 1, 2], fresh=3, indices=[30, 31, 32], stays_live="111"))
    dataset.log.clear()
    again, counts = second.fetch(request([1, 3, 0], fresh=0, indices=[31, 33, 30], stays_live="100"))
    assert counts[:3] == (0, 3, 3)
    assert dataset.log == [31, 33, 30]
    assert [again[0], again[2]] == [examples[1], examples[0]]
    _, counts = second.fetch(request([1], fresh=0, indices=[31], stays_live="1"))
    assert counts[:3] == (0, 1, 0), "from then on it is held"
    second.fetch(request([4], fresh=1, forget=(1,)))
    _, counts = second.fetch(request([1], fresh=0, indices=[31]))
    assert counts[:3] == (0, 1, 1), "until it is to be forgotten"


def test_a_call_that_returns_too_few_examples_is_an_error_where_one_is_used_again_and_else_reaches_collate_as_it_is():
    class Short(Whole):
        def __getitems__(self, indices):
            return super().__getitems__(indices)[1:]

    with pytest.raises(ValueError, match="__getitems__ of the data set returned 2 examples for 3 indices"):
        make_cache(Short()).fetch(request([0, 1, 2], fresh=3, stays_live="001"))
    examples, _ = make_cache(Short()).fetch(request([0, 1, 2], fresh=3))
    assert [index for index, _ in examples] == [1, 2]


@pytest.mark.parametrize(("point", "source", "rest"), [("before_augmentation", 1.0, 0.25), ("after_augmentation", 1.25, 0.0)])
def test_what_comes_before_the_point_is_the_source_and_what_comes_after_it_the_rest(monkeypatch, point, source, rest):
    """Reading takes 1 s per example, augmenting 0.25 s per use, collate 0.125 s per batch: exact in binary."""
    clock = [0.0]
    monkeypatch.setattr(dataset_module, "perf_counter", lambda: clock[0])

    class Timed(StagedDataset):
        def load(self, index):
            clock[0] += 1.0
            return index

        def augment(self, example):
            clock[0] += 0.25
            return example

        def __len__(self):
            return LENGTH

    def collate(examples):
        clock[0] += 0.125
        return examples

    stand_in = EchoDataset(make_cache(Timed(), point))

    def fetch(asked):
        return EchoCollate(collate)(stand_in.__getitems__(asked))[1]

    assert fetch(request([0, 1, 2], fresh=3)) == Report(3, 0, 0, 3 * source, 3 * rest, 0.125), "nothing used again"
    assert fetch(request([3, 4], fresh=2, stays_live="11")) == Report(2, 0, 0, 2 * source, 2 * rest, 0.125)
    assert fetch(request([5, 3, 4], fresh=1)) == Report(1, 2, 0, source, 3 * rest, 0.125), "echoes are not read"
    assert fetch(request([9, 1, 2], fresh=1)) == Report(1, 2, 2, 3 * source, 3 * rest, 0.125), "read again after a resume"


def test_reading_and_setting_attributes_reaches_the_users_data_set():
    dataset = Plain()
    dataset.classes = ["a", "b"]
    stand_in = EchoDataset(make_cache(dataset))
    assert stand_in.classes is dataset.classes
    stand_in.start = 5
    stand_in.classes = []
    assert dataset.start == 5
    assert dataset.classes == []
    assert len(stand_in) == LENGTH
    assert stand_in[3][0] == 3
    with pytest.raises(AttributeError, match="'Plain' object has no attribute 'absent'"):
        _ = stand_in.absent


class Failing:
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        raise self.error

    def __len__(self):
        return LENGTH


def test_an_end_that_a_data_set_raises_is_an_error_and_not_the_end_of_the_epoch():
    dataset = EchoDataset(make_cache(Failing(StopIteration())))
    with pytest.raises(RuntimeError, match="the data set raised StopIteration while an example was read"):
        dataset.__getitems__(next(make_requests(2)))


def test_augmentation_gets_copies_although_torchs_own_collate_makes_some_later():
    cache = make_cache(Tensors(), "before_augmentation", collate_fn=default_collate)
    uses = [cache.fetch(request([7], fresh=int(not i), stays_live="110"[i]))[0][0].tolist() for i in range(3)]
    assert uses == [[7.5] * 3] * 3


def test_torchs_collate_function_copies_no_types_that_were_registered_with_it(monkeypatch):
    class Registered:
        """A type that a user has registered with torch's collate function, which then hands it on uncopied."""

        def __init__(self):
            self.value = torch.zeros(3)

    class Data(Plain):
        def __getitem__(self, index):
            return Registered()

    monkeypatch.setitem(default_collate_fn_map, Registered, lambda batch, *, collate_fn_map=None: batch)
    cache, requests = make_cache(Data(), collate_fn=default_collate), make_requests(4)
    for _ in range(40):
        for example in default_collate(cache.fetch(next(requests))[0]):
            assert example.value.tolist() == [0, 0, 0]
            example.value += 1


def test_what_is_redone_never_shares_random_numbers_with_what_is_reused():
    class Both(Staged):
        def load(self, index):
            return noise()

        def augment(self, example):
            return example, noise()

    cache, requests = make_cache(Both(), "before_augmentation"), make_requests(2)
    loaded, drawn = set(), set()
    for _ in range(60):
        for example, augmented in cache.fetch(next(requests))[0]:
            loaded.add(example)
            drawn.add(augmented)
    assert not loaded & drawn
