"""The cache reads an example once, keeps it while uses are left, and never makes a batch wrong."""

import gc
import pickle
import weakref

import pytest
from cache_cases import (
    LENGTH,
    Plain,
    Staged,
    Whole,
    listed,
    make_cache,
    make_requests,
    noise,
    request,
)
from torch.utils.data import DataLoader, Subset

from lightning_echo.pipeline import worker as dataset_module
from lightning_echo.pipeline.worker import EchoCollate, EchoDataset, Report, StageSeconds
from lightning_echo.split.staged import StagedDataset


class TestReading:
    def test_a_miss_reads_again_under_the_seeds_of_the_first_time_and_is_counted(self):
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

    @pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
    def test_a_run_whose_caches_are_lost_again_and_again_delivers_the_same(self, point):
        """Random numbers included: reading again moves neither those of the batch nor those of the example."""

        class Both(Staged):
            def load(self, index):
                return [index, noise()]

        requests, same_requests = make_requests(4), make_requests(4)
        cache, refetched = make_cache(Both(), point), 0
        losing = make_cache(Both(), point)
        for number in range(60):
            if number % 5 == 0:
                losing = make_cache(Both(), point)
            expected, _ = cache.fetch(next(requests))
            examples, counts = losing.fetch(next(same_requests))
            assert examples == expected
            refetched += counts[2]
        assert refetched > 0


class TestReadingWholeBatches:
    @pytest.mark.parametrize("factor", [1, 4])
    @pytest.mark.parametrize("wrap", ["itself", "subset", "staged"])
    def test_the_fresh_examples_of_a_batch_go_in_one_call_and_echoes_in_none(self, factor, wrap):
        inner = Whole()
        dataset = {
            "itself": inner,
            "subset": Subset(inner, range(LENGTH)),
            "staged": StagedDataset.of(inner, augment=lambda example: example),
        }[wrap]
        cache = make_cache(dataset, "before_augmentation" if wrap == "staged" else "after_augmentation")
        requests, expected = make_requests(factor, whole_calls=True), []
        for _ in range(50):
            asked = next(requests)
            examples, _ = cache.fetch(asked)
            assert [index for index, _ in examples] == asked.indices
            expected += [asked.indices[: asked.fresh]] if asked.fresh else []
        assert inner.calls == expected
        assert inner.log == []

    def test_a_subset_that_only_loops_reads_one_by_one(self):
        inner = Plain()
        cache = make_cache(Subset(inner, range(LENGTH)))
        asked = next(make_requests(4))
        cache.fetch(asked)
        assert inner.log == asked.indices

    def test_a_call_that_returns_too_few_examples_is_an_error_where_one_is_used_again_and_else_reaches_collate_as_it_is(self):
        class Short(Whole):
            def __getitems__(self, indices):
                return super().__getitems__(indices)[1:]

        with pytest.raises(ValueError, match="__getitems__ of the data set returned 2 examples for 3 indices"):
            make_cache(Short()).fetch(request([0, 1, 2], fresh=3, stays_live="001"))
        examples, _ = make_cache(Short()).fetch(request([0, 1, 2], fresh=3))
        assert [index for index, _ in examples] == [1, 2]


class Clock:
    """Stands in for ``perf_counter``: time passes only where a data set says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(dataset_module, "perf_counter", lambda: self.now)

    def spend(self, seconds):
        self.now += seconds


class TestSeconds:
    """Reading takes 1 s per example, augmenting 0.25 s per use, collate 0.125 s per batch: exact in binary."""

    def make(self, monkeypatch, point, *, whole_calls=False):
        clock = Clock(monkeypatch)

        class Timed(StagedDataset):
            def load(self, index):
                clock.spend(1.0)
                return index

            def augment(self, example):
                clock.spend(0.25)
                return example

            def __len__(self):
                return LENGTH

        class TimedCalls(Plain):
            def __getitems__(self, indices):
                clock.spend(1.0 * len(indices))
                return list(indices)

        def collate(examples):
            clock.spend(0.125)
            return examples

        stand_in = EchoDataset(make_cache(TimedCalls() if whole_calls else Timed(), point))
        return lambda asked: EchoCollate(collate)(stand_in.__getitems__(asked))[1]

    @pytest.mark.parametrize(("point", "source", "rest"), [("before_augmentation", 1.0, 0.25), ("after_augmentation", 1.25, 0.0)])
    def test_what_comes_before_the_point_is_the_source_and_what_comes_after_it_the_rest(self, monkeypatch, point, source, rest):
        fetch = self.make(monkeypatch, point)
        assert fetch(request([0, 1, 2], fresh=3)) == Report(3, 0, 0, 3 * source, 3 * rest, 0.125), "nothing used again"
        assert fetch(request([3, 4], fresh=2, stays_live="11")) == Report(2, 0, 0, 2 * source, 2 * rest, 0.125)
        assert fetch(request([5, 3, 4], fresh=1)) == Report(1, 2, 0, source, 3 * rest, 0.125), "echoes are not read"
        assert fetch(request([9, 1, 2], fresh=1)) == Report(1, 2, 2, 3 * source, 3 * rest, 0.125), "read again after a resume"

    @pytest.mark.parametrize("kept", ["000", "111"])
    def test_a_call_that_reads_several_examples_is_the_source(self, monkeypatch, kept):
        fetch = self.make(monkeypatch, "after_augmentation", whole_calls=True)
        assert fetch(request([0, 1, 2], fresh=3, stays_live=kept)) == Report(3, 0, 0, 3.0, 0.0, 0.125)

    def test_what_an_epoch_took_is_a_difference(self):
        before, after = StageSeconds(1.0, 2.0, 3.0, 4, 5), StageSeconds(1.5, 4.0, 3.25, 10, 7)
        assert after - before == StageSeconds(0.5, 2.0, 0.25, 6, 2)


class TestTheDataSetInTheWorkers:
    def make(self, dataset=None):
        return EchoDataset(make_cache(Plain() if dataset is None else dataset))

    def test_reading_and_setting_attributes_reaches_the_users_data_set(self):
        dataset = Plain()
        dataset.classes = ["a", "b"]
        stand_in = self.make(dataset)
        assert stand_in.classes is dataset.classes
        stand_in.start = 5
        stand_in.classes = []
        assert dataset.start == 5
        assert dataset.classes == []
        assert len(stand_in) == LENGTH
        assert stand_in[3][0] == 3
        with pytest.raises(AttributeError, match="'Plain' object has no attribute 'absent'"):
            _ = stand_in.absent

    def test_fetches_in_a_data_loader(self):
        asked = [request([0, 1, 2], fresh=3, stays_live="110"), request([3, 0], fresh=1, number=1)]
        stand_in = pickle.loads(pickle.dumps(self.make()))  # as for spawned workers
        loader = DataLoader(stand_in, batch_sampler=asked, collate_fn=EchoCollate(listed))
        (first, first_counts), (second, second_counts) = loader
        assert [index for index, _ in first] == [0, 1, 2]
        assert [index for index, _ in second] == [3, 0]
        assert second[1] == first[0]
        assert (first_counts[:3], second_counts[:3]) == ((3, 0, 0), (1, 1, 0))

    def test_a_cache_that_is_dropped_lets_go_of_the_data_set(self):
        dataset = Plain()
        reference, stand_in = weakref.ref(dataset), self.make(dataset)
        stand_in.__getitems__(request([0], fresh=1, stays_live="1"))
        del dataset, stand_in
        gc.collect()
        assert reference() is None


class Failing:
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        raise self.error

    def __len__(self):
        return LENGTH


def test_without_notes_the_index_is_added_to_the_message():
    class Old(Exception):
        """As exceptions are before Python 3.11."""

        @property
        def add_note(self):
            raise AttributeError

    with pytest.raises(Old) as caught:
        make_cache(Failing(Old("cannot decode", "two"))).fetch(request([0], fresh=1, indices=[31]))
    assert caught.value.args == ("cannot decode (reading example 31 of the data set)", "two")


def test_an_end_that_a_data_set_raises_is_an_error_and_not_the_end_of_the_epoch():
    dataset = EchoDataset(make_cache(Failing(StopIteration())))
    with pytest.raises(RuntimeError, match="the data set raised StopIteration while an example was read"):
        dataset.__getitems__(next(make_requests(2)))
