"""The cache reads an example once, keeps it while uses are left, and never makes a batch wrong.

`Worker` plays a run: it asks a cache for what a plan says. The model is the data set itself: what an index reads as, how often
it was read, and, for random numbers, a second cache that is asked for the same.
"""

import copy
import gc
import pickle
import random
import sys
import weakref
from itertools import count

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_echo.fetching.requests import ExampleRequests
from lightning_echo.planning.order import ShuffledOrder
from lightning_echo.planning.plan import EchoPlan
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting import seeding
from lightning_echo.splitting.splits import make_stages
from lightning_echo.splitting.staged import StagedDataset
from lightning_echo.splitting.stages import WholeDataset
from lightning_echo.workers import dataset as dataset_module
from lightning_echo.workers.dataset import EchoCollate, EchoDataset, ExampleCache, Request
from lightning_echo.workers.seconds import Report

LENGTH, BATCH_SIZE = 40, 6


def noise():
    """One draw from each of the three global generators."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


class Plain(Dataset):
    """Reads ``(index, noise)`` and keeps a log of it."""

    def __init__(self):
        self.log = []

    def __getitem__(self, index):
        self.log.append(index)
        return index, noise()

    def __len__(self):
        return LENGTH


class Whole(Plain):
    """Reads whole batches; ``calls`` is the log of that."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [(index, noise()) for index in indices]


class Staged(StagedDataset):
    def __init__(self):
        self.log = []

    def load(self, index):
        self.log.append(index)
        return [index]

    def augment(self, example):
        example.append(noise())
        return example

    def __len__(self):
        return LENGTH


def listed(examples):
    return list(examples)


def without_seconds(fetched):
    """What can be compared: examples and counts."""
    examples, report = fetched
    return examples, report[:3]


def make_cache(dataset, point="after_augmentation", key=7, collate_fn=listed):
    return ExampleCache(dataset, WholeDataset if point == "after_augmentation" else make_stages, key, collate_fn)


def make_requests(factor, whole_calls=False, state=None):
    shape = PlanShape(batch_size=BATCH_SIZE, last_batch_size=4, batches_per_pass=7, workers=0, buffer_size=2 * BATCH_SIZE, seed=1)
    order = ShuffledOrder(LENGTH, LENGTH, 1, 0, shape.distance, seed=2)
    if state is not None:
        order.load(state["order"])
    plan = EchoPlan(shape, factor) if state is None else EchoPlan.from_state(shape, state["plan"])
    return ExampleRequests(plan, order, whole_calls=whole_calls)


def request(positions, fresh, indices=None, kept="", number=0, **kwargs):
    """A request; ``kept`` as a string of 0 and 1, all 0 by default."""
    indices = positions if indices is None else indices
    kept = bytes(map(int, kept)) if kept else bytes(len(positions))
    return Request(number, list(positions), fresh, list(indices), kept, **kwargs)


class TestReading:
    @pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
    @pytest.mark.parametrize("factor", [1, 1.5, 4])
    def test_each_fresh_example_is_read_once_and_no_echo_is(self, point, factor):
        dataset, requests = Staged(), make_requests(factor)
        cache, expected = make_cache(dataset, point), []
        for _ in range(60):
            asked = next(requests)
            examples, counts = cache.fetch(asked)
            expected += asked.indices[: asked.fresh]
            assert [example[0] for example in examples] == asked.indices
            assert counts[:3] == (asked.fresh, len(asked.indices) - asked.fresh, 0)
        assert dataset.log == expected

    def test_the_same_example_is_handed_out_in_every_use_after_augmentation(self):
        cache, requests, first = make_cache(Plain()), make_requests(4), {}
        for _ in range(60):
            asked = next(requests)
            for position, example in zip(asked.positions, cache.fetch(asked)[0], strict=True):
                assert first.setdefault(position, example) == example
        assert len(set(first.values())) == len(first)

    def test_each_use_is_augmented_anew_before_augmentation(self):
        cache, requests = make_cache(Staged(), "before_augmentation"), make_requests(4)
        drawn = [noise for _ in range(60) for _, noise in cache.fetch(next(requests))[0]]
        assert len(set(drawn)) == len(drawn)

    def test_an_example_is_held_until_its_last_use_and_no_longer(self):
        held = weakref.WeakSet()

        class Example:
            def __init__(self):
                held.add(self)

            def __deepcopy__(self, memo):
                return Example()

        class Objects(Dataset):
            def __getitem__(self, index):
                return Example()

        cache, requests = make_cache(Objects(), collate_fn=default_collate), make_requests(4)
        live = set()
        for _ in range(80):
            asked = next(requests)
            cache.fetch(asked)
            for position, kept in zip(asked.positions, asked.kept, strict=True):
                (live.add if kept else live.discard)(position)
            assert len(held) == len(live) <= 2 * BATCH_SIZE

    @pytest.mark.parametrize("dataset", [Plain, Whole])
    def test_what_is_used_up_makes_room_before_what_is_fresh_is_held(self, dataset):
        most = []

        class Held(dict):
            def __setitem__(self, position, example):
                super().__setitem__(position, example)
                most.append(len(self))

        cache = make_cache(dataset())
        cache._held = Held()
        cache.fetch(request([0, 1, 2], fresh=3, kept="111"))
        cache.fetch(request([3, 4, 0, 1, 2], fresh=2, kept="11001"))
        assert max(most) == 3

    def test_what_is_to_be_forgotten_is_let_go(self):
        cache = make_cache(Plain())
        cache.fetch(request([0, 1, 2], fresh=3, kept="111"))
        (one, two), _ = cache.fetch(request([1, 2], fresh=0, kept="11", forget=(0,)))
        assert (one[0], two[0]) == (1, 2)
        _, counts = cache.fetch(request([0, 1], fresh=0))
        assert counts[:3] == (0, 2, 1)

    def test_a_miss_reads_again_and_is_counted(self):
        dataset = Plain()
        first, second = make_cache(dataset), make_cache(dataset)
        examples, _ = first.fetch(request([0, 1, 2], fresh=3, indices=[30, 31, 32], kept="111"))
        dataset.log.clear()
        again, counts = second.fetch(request([1, 3, 0], fresh=0, indices=[31, 33, 30], kept="100"))
        assert counts[:3] == (0, 3, 3)
        assert dataset.log == [31, 33, 30]
        assert [again[0], again[2]] == [examples[1], examples[0]], "under the seeds of the first time"
        _, counts = second.fetch(request([1], fresh=0, indices=[31]))
        assert counts[:3] == (0, 1, 0), "from then on it is held"

    @pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
    @pytest.mark.parametrize("factor", [1.5, 4])
    def test_a_run_whose_caches_are_lost_again_and_again_delivers_the_same(self, point, factor):
        """Random numbers included: reading again moves neither those of the batch nor those of the example."""

        class Both(Staged):
            def load(self, index):
                return [index, noise()]

        requests, same_requests = make_requests(factor), make_requests(factor)
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
    @pytest.mark.parametrize("factor", [1, 1.5, 4])
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

    @pytest.mark.parametrize("factor", [1.5, 4])
    def test_a_resumed_run_repeats_whole_calls_and_delivers_the_same(self, factor):
        """The draws of one call depend on all of its indices, so that nothing less than the call gives them again."""
        requests, cache = make_requests(factor, whole_calls=True), make_cache(Whole())
        delivered, states = [], []
        for number in range(60):
            requests.delivered = number
            states.append(copy.deepcopy(requests.state(requests.delivered)))
            delivered.append(cache.fetch(next(requests))[0])
        for start in (1, 2, 7, 23, 40):
            dataset, resumed = Whole(), make_requests(factor, whole_calls=True, state=states[start])
            cache, refetched = make_cache(dataset), 0
            for expected in delivered[start:]:
                asked = next(resumed)
                before = len(dataset.calls)
                examples, counts = cache.fetch(asked)
                assert examples == expected
                rebuilt = [indices for _, indices, _ in asked.rebuild]
                assert dataset.calls[before:] == rebuilt + ([asked.indices[: asked.fresh]] if asked.fresh else [])
                assert counts[2] == sum(map(len, rebuilt))
                refetched += counts[2]
            assert refetched > 0

    def test_a_call_that_returns_too_few_examples_is_an_error(self):
        class Short(Whole):
            def __getitems__(self, indices):
                return super().__getitems__(indices)[1:]

        with pytest.raises(ValueError, match="__getitems__ of the data set returned 2 examples for 3 indices"):
            make_cache(Short()).fetch(request([0, 1, 2], fresh=3))


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

    def test_before_augmentation_reading_is_the_source_and_augmenting_the_rest(self, monkeypatch):
        fetch = self.make(monkeypatch, "before_augmentation")
        assert fetch(request([0, 1, 2], fresh=3)) == Report(3, 0, 0, 3.0, 0.75, 0.125), "nothing used again"
        assert fetch(request([3, 4], fresh=2, kept="11", number=1)) == Report(2, 0, 0, 2.0, 0.5, 0.125)
        assert fetch(request([5, 3, 4], fresh=1, number=2)) == Report(1, 2, 0, 1.0, 0.75, 0.125), "echoes are not read"

    def test_after_augmentation_both_are_the_source(self, monkeypatch):
        fetch = self.make(monkeypatch, "after_augmentation")
        assert fetch(request([0, 1, 2], fresh=3)) == Report(3, 0, 0, 3.75, 0.0, 0.125)
        assert fetch(request([3, 4], fresh=2, kept="11", number=1)) == Report(2, 0, 0, 2.5, 0.0, 0.125)
        assert fetch(request([5, 3, 4], fresh=1, number=2)) == Report(1, 2, 0, 1.25, 0.0, 0.125)

    @pytest.mark.parametrize("kept", ["000", "111"])
    def test_a_call_that_reads_several_examples_is_the_source(self, monkeypatch, kept):
        fetch = self.make(monkeypatch, "after_augmentation", whole_calls=True)
        assert fetch(request([0, 1, 2], fresh=3, kept=kept)) == Report(3, 0, 0, 3.0, 0.0, 0.125)

    def test_what_is_read_again_after_a_resume_is_the_source_too(self, monkeypatch):
        fetch = self.make(monkeypatch, "before_augmentation")
        assert fetch(request([9, 1, 2], fresh=1)) == Report(1, 2, 2, 3.0, 0.75, 0.125)


class TestRandomNumbers:
    def test_the_same_request_reads_the_same_whatever_was_drawn_before(self):
        results = []
        for before in (1, 2):
            torch.manual_seed(before)
            np.random.seed(before)
            random.seed(before)
            cache, requests = make_cache(Staged(), "before_augmentation"), make_requests(2.37)
            results.append([without_seconds(cache.fetch(next(requests))) for _ in range(30)])
        assert results[0] == results[1]

    @pytest.mark.parametrize("kept", ["00", "11"])
    def test_ranks_do_not_share_their_noise(self, kept):
        asked = request([0, 1], fresh=2, kept=kept)
        for point in ("after_augmentation", "before_augmentation"):
            one, other = (make_cache(Staged(), point, key=key).fetch(asked)[0] for key in (1, 2))
            assert not {noise for _, noise in one} & {noise for _, noise in other}

    def test_all_three_global_generators_are_seeded(self):
        (example,), _ = make_cache(Plain()).fetch(request([0], fresh=1))
        (again,), _ = make_cache(Plain()).fetch(request([0], fresh=1))
        (later,), _ = make_cache(Plain()).fetch(request([0], fresh=1, number=1))
        assert example == again
        assert all(a != b for a, b in zip(example[1], later[1], strict=True))

    @pytest.mark.parametrize(("factor", "seeds"), [(1, 1), (4, None)])
    def test_where_nothing_is_used_again_there_is_one_seed_for_a_batch(self, monkeypatch, factor, seeds):
        calls = count()
        monkeypatch.setattr(seeding, "seed_all", lambda seed: next(calls))
        cache, requests = make_cache(Plain()), make_requests(factor)
        for _ in range(20):
            before, asked = next(calls), next(requests)
            cache.fetch(asked)
            made = next(calls) - before - 1
            assert made == (seeds or asked.fresh + 1)  # else one for each fresh example and one for the batch

    @pytest.mark.parametrize("nested", [False, True])
    def test_a_transform_with_a_generator_of_its_own_is_seeded_too(self, nested):
        class Own:
            """As Albumentations has it."""

            def __init__(self):
                self.generator = np.random.default_rng(1)

            def set_random_seed(self, seed):
                self.generator = np.random.default_rng(seed)

            def __call__(self):
                return self.generator.random()

        class Owning(Dataset):
            def __init__(self):
                self.transform = Own()

            def __getitem__(self, index):
                return index, self.transform()

            def __len__(self):
                return LENGTH

        def dataset():
            owning = Owning()
            return ConcatDataset([Subset(owning, range(20)), Subset(owning, range(20, 40))]) if nested else owning

        results = []
        for _ in range(2):
            cache, requests = make_cache(dataset()), make_requests(1)
            results.append([without_seconds(cache.fetch(next(requests))) for _ in range(5)])
        assert results[0] == results[1]
        drawn = [noise for examples, _ in results[0] for _, noise in examples]
        assert len(set(drawn)) == len(drawn)


class TestProtection:
    """Who is handed an example may edit it: no other use sees that. (test_protect.py knows all the types.)"""

    @pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
    def test_edits_do_not_reach_another_use(self, point):
        class Tensors(StagedDataset):
            def load(self, index):
                return torch.full((3,), float(index))

            def augment(self, example):
                return example.add_(0.5)  # in place

            def __len__(self):
                return LENGTH

        cache, requests = make_cache(Tensors(), point), make_requests(4)
        for _ in range(60):
            asked = next(requests)
            examples, _ = cache.fetch(asked)
            assert [example.tolist() for example in examples] == [[index + 0.5] * 3 for index in asked.indices]
            for example in examples:
                example.zero_()

    def test_echoes_are_not_copied_where_torchs_own_collate_does_it(self):
        original = torch.zeros(3)
        cache = make_cache([original], collate_fn=default_collate)
        (first,), _ = cache.fetch(request([0], fresh=1, kept="1"))
        (again,), _ = cache.fetch(request([0], fresh=0, kept="1"))
        (last,), _ = cache.fetch(request([0], fresh=0))
        assert first is original
        assert again is last is not original
        assert default_collate([again, last]).data_ptr() != again.data_ptr()

    def test_the_first_use_is_what_was_read_and_the_last_one_what_was_kept(self):
        copies = []

        class Example:
            def __deepcopy__(self, memo):
                copies.append(Example())
                return copies[-1]

        original = Example()
        cache = make_cache([original])
        uses = [cache.fetch(request([5], fresh=int(not i), indices=[0], kept="110"[i]))[0][0] for i in range(3)]
        assert uses == [original, copies[1], copies[0]]
        assert len(copies) == 2

    @pytest.mark.parametrize("collate_fn", [listed, default_collate])
    def test_a_data_set_may_use_its_memory_again(self, collate_fn):
        """Whole batches are read into the same memory."""

        class Preallocated(Plain):
            rows = torch.zeros(BATCH_SIZE, 2)

            def __getitems__(self, indices):
                self.rows[: len(indices)] = torch.tensor(indices)[:, None]
                return list(self.rows[: len(indices)])

        cache, requests = make_cache(Preallocated(), collate_fn=collate_fn), make_requests(4, whole_calls=True)
        for _ in range(60):
            asked = next(requests)
            examples, _ = cache.fetch(asked)
            assert [example.tolist() for example in examples] == [[index] * 2 for index in asked.indices]

    def test_a_small_part_of_something_large_does_not_keep_all_of_it(self):
        class Frames(Dataset):
            def __getitem__(self, index):
                return torch.zeros(100_000)[:10], np.zeros(100_000)[:10]

        cache = make_cache(Frames(), collate_fn=default_collate)
        cache.fetch(request([0, 1], fresh=2, kept="11"))
        held, _ = cache.fetch(request([0, 1], fresh=0, kept="11"))
        for tensor, array in held:
            assert tensor.untyped_storage().nbytes() == 40
            assert array.base is None


class Broken(StagedDataset):
    """Fails at index 31, in one of its stages."""

    class Error(RuntimeError):
        pass

    def __init__(self, stage):
        self.stage = stage

    def load(self, index):
        if self.stage == "load" and index == 31:
            raise self.Error("cannot decode")
        return index

    def augment(self, example):
        if self.stage == "augment" and example == 31:
            raise self.Error("cannot decode")
        return example

    def __len__(self):
        return LENGTH


class BrokenCalls(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def text_of(error):
    return " ".join([str(error), *getattr(error, "__notes__", [])])


class TestErrors:
    @pytest.mark.parametrize("kept", ["000", "111"])
    @pytest.mark.parametrize("stage", ["load", "augment"])
    @pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
    def test_an_exception_keeps_type_and_message_and_tells_the_index(self, point, stage, kept):
        cache = make_cache(Broken(stage), point)
        with pytest.raises(Broken.Error, match="cannot decode") as caught:
            cache.fetch(request([0, 1, 2], fresh=3, indices=[30, 31, 32], kept=kept))
        assert "example 31 of the data set" in text_of(caught.value)

    def test_an_exception_in_an_echo_tells_the_index_too(self):
        cache = make_cache(Broken("augment"), "before_augmentation")
        with pytest.raises(Broken.Error) as caught:
            cache.fetch(request([0, 1], fresh=1, indices=[30, 31]))
        assert "(augmenting example 31 of the data set)" in text_of(caught.value)

    @pytest.mark.parametrize("kept", ["000", "111"])
    def test_an_exception_in_a_call_for_a_whole_batch_tells_all_its_indices(self, kept):
        with pytest.raises(Broken.Error, match="cannot decode") as caught:
            make_cache(BrokenCalls("load")).fetch(request([0, 1, 2], fresh=3, indices=[30, 31, 32], kept=kept))
        assert "examples [30, 31, 32] of the data set" in text_of(caught.value)

    @pytest.mark.parametrize("kept", ["000", "111"])
    def test_an_exception_in_the_augmentation_of_a_whole_batch_tells_the_index(self, kept):
        dataset = StagedDataset.of(Whole(), augment=lambda example: 1 / (example[0] - 31))
        with pytest.raises(ZeroDivisionError) as caught:
            make_cache(dataset, "before_augmentation").fetch(request([0, 1], fresh=2, indices=[30, 31], kept=kept[:2]))
        assert "(augmenting example 31 of the data set)" in text_of(caught.value)

    def test_without_notes_the_index_is_added_to_the_message(self):
        class Old(Exception):
            """As exceptions are before Python 3.11."""

            @property
            def add_note(self):
                raise AttributeError

        class Failing:
            def __getitem__(self, index):
                raise Old("cannot decode", "two")

        with pytest.raises(Old) as caught:
            make_cache(Failing()).fetch(request([0], fresh=1, indices=[31]))
        assert caught.value.args == ("cannot decode (reading example 31 of the data set)", "two")

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="the message itself is changed there")
    def test_the_message_itself_is_left_alone(self):
        with pytest.raises(Broken.Error) as caught:
            make_cache(Broken("load")).fetch(request([0], fresh=1, indices=[31]))
        assert caught.value.args == ("cannot decode",)


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

    def test_a_missing_attribute_is_missing_under_the_users_name(self):
        with pytest.raises(AttributeError, match="'Plain' object has no attribute 'absent'"):
            _ = self.make().absent

    def test_stages_are_made_at_the_first_request_of_the_data_set_as_it_is_then(self):
        """A ``worker_init_fn`` has changed it before."""

        class Scaled(Staged):
            scale = 1

            def __init__(self):
                self.transform = None

            def load(self, index):
                return index * self.scale

            def augment(self, example):
                return self.transform(example)

        dataset = Scaled()
        stand_in = EchoDataset(make_cache(dataset, "before_augmentation"))
        stand_in.scale = 10
        stand_in.transform = lambda example: example + 1
        assert stand_in.__getitems__(request([0, 1], fresh=2, indices=[3, 4]))[0] == [31, 41]

    def test_survives_pickling_as_for_spawned_workers(self):
        stand_in = pickle.loads(pickle.dumps(self.make()))
        asked = request([0, 1], fresh=2, indices=[3, 4], kept="11")
        assert without_seconds(stand_in.__getitems__(asked)) == without_seconds(self.make().__getitems__(asked))
        assert stand_in.log == [3, 4]

    def test_fetches_in_a_data_loader(self):
        asked = [request([0, 1, 2], fresh=3, kept="110"), request([3, 0], fresh=1, number=1)]
        loader = DataLoader(self.make(), batch_sampler=asked, collate_fn=EchoCollate(listed))
        (first, first_counts), (second, second_counts) = loader
        assert [index for index, _ in first] == [0, 1, 2]
        assert [index for index, _ in second] == [3, 0]
        assert second[1] == first[0]
        assert (first_counts[:3], second_counts[:3]) == ((3, 0, 0), (1, 1, 0))

    def test_counts_travel_beside_what_the_users_collate_function_returns(self):
        batch, report = EchoCollate(sum)(([1, 2, 3], Report(2, 1, 0, 0.5, 0.25)))
        assert (batch, report[:5]) == (6, (2, 1, 0, 0.5, 0.25))

    def test_a_cache_that_is_dropped_lets_go_of_the_data_set(self):
        dataset = Plain()
        reference, stand_in = weakref.ref(dataset), self.make(dataset)
        stand_in.__getitems__(request([0], fresh=1, kept="1"))
        del dataset, stand_in
        gc.collect()
        assert reference() is None


class Registered:
    """A type that a user has registered with torch's collate function, which then hands it on uncopied."""

    def __init__(self, value):
        self.value = value


def test_torchs_collate_function_copies_no_types_that_were_registered_with_it(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Registered, lambda batch, *, collate_fn_map=None: batch)

    class Data(Dataset):
        def __getitem__(self, index):
            return Registered(torch.zeros(3))

        def __len__(self):
            return LENGTH

    cache, requests = make_cache(Data(), collate_fn=default_collate), make_requests(4)
    for _ in range(40):
        for example in default_collate(cache.fetch(next(requests))[0]):
            assert example.value.tolist() == [0, 0, 0]
            example.value += 1


def test_an_end_that_a_data_set_raises_is_an_error_and_not_the_end_of_the_epoch():
    class Data(Dataset):
        def __getitem__(self, index):
            return next(iter(()))

        def __len__(self):
            return LENGTH

    dataset = EchoDataset(make_cache(Data()))
    with pytest.raises(RuntimeError, match="the data set raised StopIteration while an example was read"):
        dataset.__getitems__(next(make_requests(2)))


def test_what_is_redone_never_shares_random_numbers_with_what_is_reused():
    """Batch 5 and the example at position 5 are different things."""

    class Both(StagedDataset):
        def load(self, index):
            return noise()

        def augment(self, example):
            return example, noise()

        def __len__(self):
            return LENGTH

    cache, requests = make_cache(Both(), "before_augmentation"), make_requests(2)
    loaded, drawn = set(), set()
    for _ in range(60):
        for example, augmented in cache.fetch(next(requests))[0]:
            loaded.add(example)
            drawn.add(augmented)
    assert not loaded & drawn
