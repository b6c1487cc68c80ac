"""`EchoLoader` in one process: what it says, how long its epochs are, what it counts, and that its state is exact.

Without workers, so that hundreds of small runs take seconds; tests/integration runs the same with real workers.
"""

import copy
import io
import json
import logging
import math
import pickle
import random
from collections import Counter
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_echo import insertion
from lightning_echo.fetching.index_pipeline import lookahead
from lightning_echo.fetching.prefetch import DEPTH
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.counts import EchoCounts
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.loading.state import EchoStateError
from lightning_echo.splitting.staged import StagedDataset
from lightning_echo.workers.seconds import StageSeconds

LENGTH, BATCH_SIZE = 43, 6
STEPS = 8  # batches of a pass, the last of one example
POINTS = tuple(point.value for point in insertion.POINTS if not point.on_device)  # that needs a Trainer


class Noisy(StagedDataset):
    """Examples are (index, noise of augment)."""

    def __init__(self, length=LENGTH):
        self.length, self.reads = length, Counter()

    def read(self, index):
        self.reads[index] += 1
        return str(index).encode()

    def decode(self, raw):
        return torch.tensor([float(raw), 0.0])

    def augment(self, example):
        example[1] = torch.rand(()) + float(np.random.rand()) + random.random()
        return example

    def __len__(self):
        return self.length


def plain_loader(dataset=None, **options):
    return DataLoader(Noisy() if dataset is None else dataset, **{"batch_size": BATCH_SIZE, "shuffle": True, **options})


def echo(factor=3, point="after_augmentation", loader=None, **options):
    return EchoLoader(plain_loader() if loader is None else loader, factor, insertion_point=point, **{"seed": 5, **options})


def values(batches):
    return [batch.tolist() for batch in batches]


def indices(batches):
    return [[int(index) for index, _ in batch.tolist()] for batch in batches]


def delivered_indices(loader):
    """The indices of one epoch, in one list."""
    return [index for batch in indices(loader) for index in batch]


def played(loader, epochs):
    return [batch.tolist() for _ in range(epochs) for batch in loader]


class TestFactor1IsThePlainLoader:
    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize(
        "make_sampler",
        [
            lambda: SequentialSampler(range(LENGTH)),
            lambda: RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(3)),
            lambda: SubsetRandomSampler(range(0, LENGTH, 2), generator=torch.Generator().manual_seed(3)),
            lambda: WeightedRandomSampler(list(range(1, LENGTH)), 31, generator=torch.Generator().manual_seed(3)),
        ],
        ids=["sequential", "random", "subset", "weighted"],
    )
    def test_the_same_values_in_the_same_batches(self, point, drop_last, make_sampler):
        def make():
            dataset = StagedDataset.of(torch.arange(LENGTH), decode=lambda raw: raw + 1, augment=lambda example: example * 10)
            return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=make_sampler(), drop_last=drop_last)

        plain, echoed = make(), echo(1, point, make())
        for _ in range(3):
            assert values(echoed) == values(plain)
        assert echoed.counts.echoed == 0

    def test_a_sampler_of_torchs_that_has_a_generator_of_its_own_decides_the_order(self):
        def make():
            dataset = torch.arange(LENGTH)
            sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
            return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)

        plain, echoed = make(), echo(1, loader=make())
        for _ in range(3):
            assert values(echoed) == values(plain)

    @pytest.mark.parametrize("point", POINTS)
    def test_shuffled_every_example_comes_once_per_pass_in_an_order_of_seed_and_pass_alone(self, point):
        loader = echo(1, point)
        passes = [delivered_indices(loader) for _ in range(3)]
        assert all(sorted(order) == list(range(LENGTH)) for order in passes)
        assert len(set(map(tuple, passes))) == 3
        torch.manual_seed(99)
        again, other = echo(1, point), echo(1, point, seed=6)
        assert [delivered_indices(again) for _ in range(3)] == passes
        assert delivered_indices(other) != passes[0]

    def test_a_batch_sampler_of_the_user_decides_the_batches(self):
        def make():
            sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(1))
            return DataLoader(range(20), batch_sampler=BatchSampler(sampler, 3, drop_last=False))

        plain, echoed = make(), EchoLoader(make(), 1, seed=0)
        assert echoed.insertion_point is InsertionPoint.after_batching
        for _ in range(3):
            assert values(echoed) == values(plain)

    def test_any_iterable_of_batches_is_passed_on(self):
        batches = [torch.tensor([i, i]) for i in range(4)]
        echoed = EchoLoader(batches, 1, seed=0)
        assert [values(echoed) for _ in range(2)] == [values(batches)] * 2


class TestEpochs:
    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("factor", [1, 2.37, 4])
    def test_fixed_keeps_the_plain_loaders_length_and_batch_sizes(self, point, drop_last, factor):
        plain = plain_loader(drop_last=drop_last)
        loader = echo(factor, point, plain)
        sizes = Counter(map(len, plain))
        for _ in range(4):
            batches = list(loader)
            assert len(batches) == len(loader) == len(plain)
            if point != "after_batching":
                assert [len(batch) for batch in batches] == [len(batch) for batch in plain]
            else:  # echoes of the short batch come when they come
                assert set(map(len, batches)) <= set(sizes)

    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize(("factor", "steps"), [(1, 8), (1.5, 12), (2, 16), (2.37, 19), (4, 32), (8, 64)])
    def test_a_full_pass_has_factor_times_as_many_steps(self, point, factor, steps):
        loader = echo(factor, point, epoch_length="full_pass")
        assert len(loader) == steps
        assert [len(list(loader)) for _ in range(2)] == [steps] * 2

    @pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
    def test_epochs_are_stretches_of_one_stream_that_does_not_depend_on_their_length(self, epoch_length):
        stream = played(echo(4, epoch_length="full_pass"), 2)
        loader = echo(4, epoch_length=epoch_length)
        batches = played(loader, 2)
        assert batches == stream[: len(batches)]

    def test_a_full_pass_follows_the_factor_from_epoch_to_epoch(self):
        loader = echo(2, epoch_length="full_pass", buffer_size=30)
        lengths = []
        for factor in (4, 1, 2.5):
            lengths.append(len(list(loader)))
            loader.factor = factor
        assert [*lengths, len(list(loader))] == [16, 32, 8, 20]

    @pytest.mark.parametrize("cut", [1, 3, 7])
    def test_an_epoch_cut_short_goes_on_where_it_stopped(self, cut):
        stream, loader = played(echo(), 6), echo()
        batches = []
        for _ in range(4):
            batches += values(islice(loader, cut))
        assert batches == stream[: 4 * cut]
        assert len(played(loader, 1)) == STEPS

    def test_iter_alone_does_nothing(self):
        """Lightning calls it as a check and again for real."""
        dataset = Noisy()
        loader = echo(3, loader=plain_loader(dataset))
        dataset.reads.clear()
        before = loader.state_dict()
        for _ in range(3):
            iter(loader)
        assert loader.state_dict() == before
        assert not dataset.reads
        assert len(list(loader)) == STEPS

    def test_an_epoch_that_is_over_stays_over(self):
        loader = echo()
        epoch = iter(loader)
        assert len(list(epoch)) == STEPS
        assert [next(epoch, None) for _ in range(3)] == [None] * 3
        assert loader.counts.delivered == LENGTH

    def test_a_whole_pass_is_gone_through_before_any_example_is_fresh_a_second_time(self):
        dataset = Noisy()
        loader = echo(4, "before_augmentation", plain_loader(dataset))
        dataset.reads.clear()
        for _ in range(12):
            for _ in loader:
                reads = [dataset.reads[index] for index in range(LENGTH)]
                assert max(reads) - min(reads) <= 1
        assert min(reads) >= 3


class TestASecondIteration:
    def test_while_the_first_is_under_way_is_refused_with_the_way_out_and_does_no_harm(self):
        stream, loader = played(echo(), 2), echo()
        first = iter(loader)
        batches = values(islice(first, 3))
        counts, state = loader.counts, loader.state_dict()
        with pytest.raises(RuntimeError, match=r"is being iterated already.*iterate the loader inside, EchoLoader\.loader"):
            next(iter(loader))
        assert (loader.counts, loader.state_dict()) == (counts, state)
        batches += values(first)
        assert batches == stream[:STEPS]

    def test_of_the_loader_inside_neither_moves_the_position_nor_the_counts(self):
        stream, loader = played(echo(), 2), echo()
        first = iter(loader)
        batches = values(islice(first, 3))
        counts = loader.counts
        assert len(list(loader.loader)) == STEPS
        assert loader.counts == counts
        assert batches + values(first) == stream[:STEPS]

    def test_after_the_first_was_dropped_is_the_next_epoch(self):
        stream, loader = played(echo(), 2), echo()
        first = iter(loader)
        batches = values(islice(first, 3))
        del first
        assert batches + values(loader) == stream[: 3 + STEPS]

    def test_is_refused_too_while_the_first_is_only_made(self):
        """Lightning makes its iterator before ``on_train_start``, where a callback may look at data."""
        loader = echo()
        first, second = iter(loader), iter(loader)
        with pytest.raises(RuntimeError, match=r"is over, drop its iterator"):
            next(second)
        assert values(first) == played(echo(), 1)

    def test_that_was_refused_stays_over(self):
        loader = echo()
        first, second = iter(loader), iter(loader)
        next(first)
        with pytest.raises(RuntimeError, match="being iterated already"):
            next(second)
        assert list(second) == []


class TestCounts:
    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("factor", [1, 1.5, 4])
    def test_add_up_batch_by_batch(self, point, factor):
        dataset = Noisy()
        loader = echo(factor, point, plain_loader(dataset))
        dataset.reads.clear()
        total = EchoCounts()
        for _ in range(5):
            for batch in loader:
                total += loader.last_batch_counts
                assert loader.last_batch_counts.delivered == len(batch)
                assert loader.counts == total
        assert total.fresh == sum(dataset.reads.values()), "without workers nothing is in flight"
        assert total.refetched == 0
        buffer = loader.buffer_size * (BATCH_SIZE if point == "after_batching" else 1)
        assert abs(total.fresh - total.delivered / factor) <= buffer

    def test_are_none_before_the_first_batch(self):
        assert echo().counts == echo().last_batch_counts == EchoCounts(0, 0, 0)
        assert EchoCounts().factor == 1
        assert EchoCounts(fresh=10, echoed=30) + EchoCounts(5, 5, 2) == EchoCounts(15, 35, 2)
        assert EchoCounts(fresh=10, echoed=30).factor == 4

    @pytest.mark.parametrize("point", POINTS)
    def test_uses_of_one_example_share_what_the_point_reuses(self, point):
        loader = echo(4, point)
        batches = [batch.tolist() for _ in range(10) for batch in loader]
        seen = [tuple(example) for batch in batches for example in batch]
        fresh = loader.counts.fresh
        if point in ("after_read", "before_augmentation"):
            assert len(set(seen)) == len(seen), "each use is augmented anew"
        else:
            assert len(set(seen)) == fresh, "uses are equal"
        if point == "after_batching":
            assert len({str(batch) for batch in batches}) < len(batches) / 2, "batches repeat"
        else:
            assert all(len({index for index, _ in batch}) == len(batch) for batch in batches)


class TestPassesAndSeconds:
    @pytest.mark.parametrize("point", POINTS)
    def test_passes_are_counted_by_what_was_read(self, point):
        loader = echo(2.5, point)
        assert loader.passes == 0
        loader.loader.dataset.reads.clear()  # of the proof
        for epoch in range(1, 12):
            played(loader, 1)
            whole, rest = divmod(sum(loader.loader.dataset.reads.values()), LENGTH)
            share = rest / BATCH_SIZE / STEPS if point == "after_batching" else rest / LENGTH
            assert loader.passes == pytest.approx(whole + share, abs=1e-9), epoch
        assert echo(1, point).passes == 0

    @pytest.mark.parametrize("point", POINTS)
    def test_passes_survive_a_state(self, point):
        loader = echo(2.5, point)
        played(loader, 4)
        resumed = echo(2.5, point)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.passes == loader.passes > 0

    @pytest.mark.parametrize("point", POINTS)
    def test_seconds_are_measured_for_every_example_and_batch_that_was_read(self, point):
        loader = echo(2.5, point)
        loader.loader.dataset.reads.clear()  # of the proof
        played(loader, 5)
        seconds, read = loader.seconds, sum(loader.loader.dataset.reads.values())
        assert seconds.examples == loader.counts.fresh == read
        assert seconds.batches == (round(loader.passes * STEPS) if point == "after_batching" else 5 * STEPS)
        assert min(seconds.source, seconds.rest, seconds.collate) > 0

    def test_seconds_are_a_copy(self):
        loader = echo()
        played(loader, 1)
        loader.seconds.source = -1
        assert loader.seconds.source > 0

    def test_an_opaque_loader_says_nothing_about_its_seconds(self):
        loader = echo(2, "auto", loader=[torch.zeros(4)] * 5)
        played(loader, 3)
        assert loader.seconds == StageSeconds()


class TestSettingTheFactor:
    def test_the_batch_from_which_it_counts_is_known(self):
        loader = echo(2)
        assert (loader.factor_since, loader.delivered) == (0, 0)
        played(loader, 3)
        loader.factor = 3
        assert (loader.factor_since, loader.delivered) == (3 * STEPS, 3 * STEPS), "nothing is in flight without workers"

    def test_a_state_says_it_until_it_counts(self):
        loader, resumed = (echo(4, "after_batching", loader=plain_loader(num_workers=2)) for _ in range(2))
        with closing(loader):
            played(loader, 1)
            loader.factor = 2
            since = loader.factor_since
            assert since > STEPS
            resumed.load_state_dict(loader.state_dict())
            assert resumed.factor_since == since

    def test_before_the_first_batch_it_counts_from_there(self):
        changed, plain = echo(2), echo(4, buffer_size=echo(2).buffer_size)
        changed.factor = 4
        assert played(changed, 3) == played(plain, 3)

    @pytest.mark.parametrize("point", POINTS)
    def test_without_workers_it_counts_from_the_next_batch(self, point):
        loader = echo(4, point)
        played(loader, 3)
        loader.factor = 1
        fresh = loader.counts.fresh
        list(loader)
        assert loader.last_batch_counts.echoed == 0
        assert loader.counts.fresh - fresh == sum(map(len, plain_loader()))
        loader.factor = 2
        played(loader, 20)
        share = (loader.counts.delivered - loader.counts.fresh) / loader.counts.delivered
        assert 0.35 < share < 0.6

    @pytest.mark.parametrize(("workers", "prefetch", "batches"), [(0, None, 0), (1, 2, 2 + DEPTH), (3, 4, 12 + DEPTH)])
    def test_with_workers_it_counts_from_the_first_batch_that_cannot_be_in_flight(self, workers, prefetch, batches):
        loader = plain_loader(num_workers=workers, **({"prefetch_factor": prefetch} if workers else {}))
        assert lookahead(Source(loader), by_batches=False, largest_factor=8) == batches

    @pytest.mark.parametrize("value", [0.5, 0, -1, math.nan, math.inf])
    def test_to_an_impossible_value_is_refused_and_changes_nothing(self, value):
        loader = echo(3)
        with pytest.raises(ValueError, match=r"factor must be a finite number >= 1"):
            loader.factor = value
        assert loader.factor == 3

    @pytest.mark.parametrize("begun", [False, True])
    def test_to_one_that_the_buffer_cannot_hold_is_refused_with_the_least_that_can(self, begun):
        loader = echo(1.5, buffer_size=3)
        if begun:
            played(loader, 1)
        with pytest.raises(ValueError, match=r"buffer_size=3 is too small for factor=8: .* Use at least 6"):
            loader.factor = 8
        assert loader.factor == 1.5
        assert len(played(loader, 1)) == STEPS

    def test_to_the_same_value_changes_nothing(self):
        loader, untouched = echo(3), echo(3)
        batches, expected = [], played(untouched, 4)
        for _ in range(4):
            batches += played(loader, 1)
            loader.factor = 3
        assert batches == expected

    def test_at_the_same_places_gives_the_same_batches(self):
        def run():
            loader, batches = echo(2, "before_augmentation", buffer_size=20), []
            for factor in (4, 1, 1.5, 8):
                batches += played(loader, 2)
                loader.factor = factor
            return batches + played(loader, 2)

        assert run() == run()


def through_a_checkpoint(state):
    """As Lightning saves and loads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class TestGoingOn:
    EPOCHS = 5

    def make(self, kind, factor=2.37):
        if kind in POINTS:
            return echo(factor, kind)
        if kind == "sampler":
            sampler = RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(3))
            return echo(factor, loader=plain_loader(shuffle=False, sampler=sampler))
        if kind == "full_pass":
            return echo(factor, epoch_length="full_pass")
        if kind == "factor 1, sampler":
            return self.make("sampler", 1)
        return EchoLoader([torch.tensor([[i, 0.0]]) for i in range(7)], factor, seed=3)

    @pytest.mark.parametrize("kind", [*POINTS, "sampler", "factor 1, sampler", "full_pass", "iterable"])
    def test_from_any_batch_of_any_epoch_in_a_new_process(self, kind):
        loader, epochs, states = self.make(kind), [], []
        for _ in range(3):
            epochs.append([])
            for batch in loader:
                epochs[-1].append((batch.tolist(), loader.counts.fresh, loader.counts.delivered))
                states.append((len(epochs) - 1, len(epochs[-1]), through_a_checkpoint(loader.state_dict())))
        after = [[batch.tolist() for batch in loader] for _ in range(2)]
        for epoch, in_epoch, state in states:
            resumed = self.make(kind)
            resumed.load_state_dict(state)
            rest = epochs[epoch][in_epoch:]  # an epoch that was at its end is not gone on with
            for expected in [rest, *epochs[epoch + 1 :]] if rest else epochs[epoch + 1 :]:
                assert [(batch.tolist(), resumed.counts.fresh, resumed.counts.delivered) for batch in resumed] == expected
            assert [[batch.tolist() for batch in resumed] for _ in range(2)] == after

    @pytest.mark.parametrize("point", POINTS)
    def test_on_a_loader_that_is_running(self, point):
        loader = echo(3, point)
        played(loader, 1)
        state = through_a_checkpoint(loader.state_dict())
        expected = played(loader, 3)
        loader.load_state_dict(state)
        assert played(loader, 3) == expected

    def test_the_state_is_the_same_when_asked_twice_and_asking_changes_nothing(self):
        quiet, asked = echo(3), echo(3)
        for expected, batch in zip(quiet, asked, strict=True):
            assert asked.state_dict() == asked.state_dict()
            assert torch.equal(batch, expected)

    def test_a_state_before_the_first_batch_is_one_too(self):
        state = through_a_checkpoint(echo().state_dict())
        assert state
        loader, fresh = echo(), echo()
        loader.load_state_dict(state)
        assert played(loader, 2) == played(fresh, 2)

    def test_a_state_has_the_same_keys_at_any_time(self):
        loader = echo()
        keys = set(loader.state_dict())
        for _ in range(2):
            for _ in loader:
                assert set(loader.state_dict()) == keys

    def test_a_state_is_made_of_plain_types_and_does_not_grow(self):
        loader = echo(4)
        played(loader, 3)
        short = len(json.dumps(loader.state_dict()))
        played(loader, 60)
        assert len(json.dumps(loader.state_dict())) < 1.5 * short

    def test_between_a_new_factor_and_its_first_batch(self):
        def make():
            loader = echo(2, buffer_size=20)
            played(loader, 2)
            loader.factor = 4
            return loader

        loader = make()
        state = through_a_checkpoint(loader.state_dict())
        resumed = echo(2, buffer_size=20)
        resumed.load_state_dict(state)
        assert resumed.factor == 4
        assert played(resumed, 3) == played(loader, 3)

    @pytest.mark.parametrize("sampler", ["shuffled", "with a generator", "without one"])
    @pytest.mark.parametrize("before", [1, 2])
    def test_a_new_factor_may_be_set_between_loading_and_the_first_batch(self, before, sampler):
        """Also where echoing begins just with a pass."""

        def make():
            options = {}
            if sampler != "shuffled":
                generator = torch.Generator().manual_seed(3) if sampler == "with a generator" else None
                draws = RandomSampler(range(LENGTH), replacement=True, generator=generator)
                options = {"shuffle": False, "sampler": draws}
            return echo(before, loader=plain_loader(drop_last=True, **options), buffer_size=20)

        loader = make()
        played(loader, 2)
        state = through_a_checkpoint(loader.state_dict())
        loader.factor = 4
        resumed = make()
        resumed.load_state_dict(state)
        resumed.factor = 4
        assert played(resumed, 12) == played(loader, 12)

    @pytest.mark.parametrize("limit", [3, 0.5])
    def test_the_end_of_a_limited_epoch_is_an_end(self, limit):
        batches = 3 if limit == 3 else 4
        loader = echo()
        loader.limit_train_batches = limit
        epochs = [values(islice(loader, batches)) for _ in range(2)]
        state = through_a_checkpoint(loader.state_dict())
        expected = [values(islice(loader, batches)) for _ in range(2)]
        resumed = echo()
        resumed.limit_train_batches = limit
        resumed.load_state_dict(state)
        assert len(resumed) == STEPS
        assert [values(islice(resumed, batches)) for _ in range(2)] == expected
        assert epochs[0] != expected[0]
        resumed.load_state_dict(state)
        assert len(list(resumed)) == STEPS, "a whole epoch, and not the rest of the limited one"

    @pytest.mark.parametrize("limit", [None, 5, 1.0])
    def test_before_its_end_an_epoch_has_the_batches_that_are_left(self, limit):
        loader = echo()
        loader.limit_train_batches = limit
        list(islice(loader, 3))
        resumed = echo()
        resumed.limit_train_batches = limit
        resumed.load_state_dict(loader.state_dict())
        assert [len(list(resumed)) for _ in range(2)] == [STEPS - 3, STEPS]

    def test_closing_in_between_changes_nothing(self):
        loader, expected = echo(3), played(echo(3), 3)
        batches = []
        for _ in range(3):
            batches += played(loader, 1)
            loader.close()
        assert batches == expected
        assert loader.counts.refetched > 0, "live examples were read again"

    def test_a_pickled_loader_goes_on_too(self):
        loader = echo(3)
        played(loader, 2)
        copied = pickle.loads(pickle.dumps(loader))
        assert copied.counts == loader.counts
        assert played(copied, 2) == played(loader, 2)

    def test_after_an_exception_in_the_data_set_the_batch_is_asked_for_again(self):
        class Failing(Noisy):
            broken = False

            def load(self, index):
                if self.broken:
                    raise OSError("disk is gone")
                return super().load(index)

        dataset, expected = Failing(), played(echo(3), 3)
        loader = echo(3, loader=plain_loader(dataset))
        epoch = iter(loader)
        batches = values(islice(epoch, 3))
        dataset.broken = True
        with pytest.raises(OSError, match="disk is gone"):
            next(epoch)
        assert list(epoch) == [], "an iteration is over after an exception"
        dataset.broken = False
        assert batches + played(loader, 2) == expected[: 3 + 2 * STEPS]


class TestAChangedRun:
    """A state of other workers, buffers or batches: a warning, and nothing of the pass is left out."""

    @staticmethod
    def fresh_of(loader, batches):
        fresh, left = [], batches
        while left:
            for batch in islice(loader, left):
                left -= 1
                fresh += [int(index) for index, _ in batch.tolist()][: loader.last_batch_counts.fresh]
        return fresh

    def check(self, first, second, match):
        """Loads the state of a run that was ended inside a pass; the fresh examples of both make up that pass."""
        fresh = self.fresh_of(first, 11)
        second.load_state_dict(through_a_checkpoint(first.state_dict()))
        with pytest.warns(UserWarning, match=match):
            again = self.fresh_of(second, 60)
        assert LENGTH > len(fresh) > 0
        batch_size = second.loader.batch_size
        taken = len(fresh) // batch_size * batch_size  # in whole batches
        passes = [*fresh[:taken], *again][: 2 * LENGTH]
        assert len(passes) == 2 * LENGTH
        assert set(fresh) | set(again[: LENGTH - taken]) == set(range(LENGTH))
        assert sorted(passes[LENGTH:]) == list(range(LENGTH)), "the next pass is whole"

    def test_with_another_buffer(self):
        self.check(echo(), echo(buffer_size=25), r"saved with buffer_size=12 \(now 25\)")

    def test_with_another_batch_size(self):
        self.check(echo(), echo(loader=plain_loader(batch_size=4)), r"batch_size=6 \(now 4\)")

    def test_with_another_point(self):
        self.check(echo(), echo(point="before_augmentation"), "insertion_point='after_augmentation'")

    @pytest.mark.parametrize("other", [{"num_workers": 2}, {"batch_size": 4}])
    def test_also_when_the_state_was_saved_again_before_the_first_batch(self, other):
        """A run that is resumed and ends at once, or whose loader is made anew, hands on a state that it never started from."""
        loader = echo()
        self.fresh_of(loader, 11)
        state = loader.state_dict()
        between = echo(loader=plain_loader(**other))
        between.load_state_dict(state)
        saved = through_a_checkpoint(between.state_dict())
        assert {name: saved[name] for name in ("layout", "workers", "buffer_size", "insertion_point")} == {
            name: state[name] for name in ("layout", "workers", "buffer_size", "insertion_point")
        }
        last, before = (echo(loader=plain_loader(**other)) for _ in range(2))
        before.load_state_dict(saved)
        last.follow(before)
        with pytest.warns(UserWarning, match=r"the state was saved with .* leaves nothing out"):
            next(iter(last))

    def test_the_next_epoch_is_a_whole_one(self):
        loader = echo()
        self.fresh_of(loader, 11)
        other = echo(loader=plain_loader(batch_size=4))
        other.load_state_dict(loader.state_dict())
        with pytest.warns(UserWarning, match=r"batch_size=6 \(now 4\)"):
            assert len(list(other)) == len(other) == 11

    def test_with_another_factor_the_states_counts(self):
        loader = echo(3)
        played(loader, 1)
        state, other = loader.state_dict(), echo(2)
        with pytest.warns(UserWarning, match=r"factor=2 is not used: .* factor 3\. Set \.factor after resuming"):
            other.load_state_dict(state)
        assert other.factor == 3
        assert played(other, 2) == played(loader, 2)


class TestStatesThatCannotBeGoneOnWith:
    @pytest.mark.parametrize("state", [None, {}, [], {"epoch": 3}, "state"])
    def test_something_else_is_refused(self, state):
        with pytest.raises(EchoStateError, match=r"state must be what EchoLoader\.state_dict\(\) returned, got"):
            echo().load_state_dict(state)

    def test_a_later_version_is_refused(self):
        state = {**echo().state_dict(), "version": 1000}
        with pytest.raises(EchoStateError, match=r"the state has version 1000.*upgrade lightning_echo"):
            echo().load_state_dict(state)

    @pytest.mark.parametrize("key", ["plan", "order", "seed", "layout", "counts", "delivered"])
    def test_a_damaged_one_is_refused_by_what_it_lacks(self, key):
        state = echo().state_dict()
        del state[key]
        with pytest.raises(EchoStateError, match=f"the state is damaged: it lacks {key}"):
            echo().load_state_dict(state)

    def test_that_of_another_data_set_is_refused_and_nothing_changes(self):
        other = echo(loader=plain_loader(Noisy(50)))
        played(other, 1)
        loader, expected = echo(), played(echo(), 2)
        batches = played(loader, 1)
        with pytest.raises(EchoStateError, match=r"of a pass of 50 items, this loader's has 43.* start anew"):
            loader.load_state_dict(other.state_dict())
        assert batches + played(loader, 1) == expected

    def test_a_state_from_before_the_first_batch_fits_any_data_set(self):
        loader = echo()
        loader.load_state_dict(echo(loader=plain_loader(Noisy(50)), seed=None).state_dict())
        assert loader.seed == 5, "a state without a seed leaves the loader's"
        assert played(loader, 2) == played(echo(), 2)

    def test_the_error_is_a_value_error(self):
        assert issubclass(EchoStateError, ValueError)


class TestSeedAndRandomness:
    def test_the_training_process_draws_as_if_no_data_were_read(self):
        """Without workers, loading and augmenting run in it."""

        def drawn(loader):
            torch.manual_seed(1)
            np.random.seed(1)
            random.seed(1)
            numbers = []
            for _ in loader:
                numbers.append((torch.rand(()).item(), np.random.rand(), random.random()))
            return numbers

        for point in POINTS:
            assert drawn(echo(3, point)) == drawn(range(STEPS))

    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("factor", [1, 3])
    def test_two_runs_of_a_seed_are_equal_and_two_seeds_are_not(self, point, factor):
        torch.manual_seed(1)
        first = played(echo(factor, point), 3)
        torch.manual_seed(2)
        assert played(echo(factor, point), 3) == first
        assert played(echo(factor, point, seed=6), 3) != first

    def test_it_is_that_of_seed_everything_if_there_was_one(self, monkeypatch):
        monkeypatch.setenv("PL_GLOBAL_SEED", "5")
        assert played(echo(seed=None), 2) == played(echo(seed=5), 2)
        assert played(echo(seed=6), 2) != played(echo(seed=None), 2)

    def test_else_it_is_that_of_the_loaders_generator(self, monkeypatch):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        loader = echo(seed=None, loader=plain_loader(generator=torch.Generator().manual_seed(5)))
        assert played(loader, 2) == played(echo(seed=5), 2)

    def test_else_it_is_drawn_once_and_kept_in_the_state(self, monkeypatch):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        loader, other = echo(seed=None), echo(seed=None)
        assert loader.seed is None
        first = played(loader, 1)
        assert isinstance(loader.seed, int)
        assert played(other, 1) != first
        resumed = echo(seed=None)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.seed == loader.seed
        assert played(resumed, 2) == played(loader, 2)

    def test_ranks_share_neither_examples_nor_noise(self):
        ranks = [echo(3, "before_augmentation", num_replicas=2, rank=rank) for rank in range(2)]
        batches = [played(loader, 1) for loader in ranks]
        assert len(batches[0]) == len(batches[1]) == len(ranks[0]) == math.ceil(22 / BATCH_SIZE)
        noises = [{noise for batch in each for _, noise in batch} for each in batches]
        assert not noises[0] & noises[1]
        seen = [{index for batch in played(loader, 12) for index, _ in batch} for loader in ranks]
        assert seen[0] | seen[1] == set(range(LENGTH))

    def test_fresh_examples_of_a_pass_are_dealt_out_to_the_ranks(self):
        passes = []
        for rank in range(3):
            loader = echo(1, num_replicas=3, rank=rank)
            passes.append(delivered_indices(loader))
        counts = Counter(index for each in passes for index in each)
        assert set(counts) == set(range(LENGTH))
        assert sorted(counts.values(), reverse=True)[:3] == [2, 2, 1], "45 places, two of them filled up"

    def test_a_sampler_that_shards_itself_is_not_sharded_again(self):
        sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=1, seed=1)
        loader = echo(1, loader=plain_loader(shuffle=False, sampler=sampler), num_replicas=2, rank=1)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected = list(sampler)
            assert delivered_indices(loader) == expected


class TestWhatItSays:
    def test_the_split_the_live_examples_and_their_memory(self):
        dataset = StagedDataset.of(torch.zeros(8, 2**18), augment=lambda example: example)  # 1 MiB each
        loader = EchoLoader(DataLoader(dataset, batch_size=4), 2.5, insertion_point="before_augmentation")
        assert repr(loader) == (
            "before_augmentation, factor 2.5: reuse [load], redo [augment]; 8 live examples, 8 MiB; 0 workers"
        )

    def test_live_batches_at_the_point_after_batching(self):
        loader = EchoLoader(DataLoader(torch.zeros(8, 2**18), batch_size=4, num_workers=2), 4, insertion_point="after_batching")
        assert repr(loader) == (
            "after_batching, factor 4: reuse [load, augment, collate], redo [transfer]; 4 live batches, 16 MiB; 2 workers"
        )

    def test_no_memory_where_it_is_not_known(self):
        assert repr(EchoLoader([1, 2, 3], 2)) == (
            "after_batching, factor 2: reuse [load, augment, collate], redo [transfer]; 4 live batches; 0 workers"
        )

    def test_the_present_factor(self):
        loader = echo(2)
        loader.factor = 1.5
        assert "factor 1.5:" in repr(loader)

    def test_what_was_chosen_is_logged_once_with_the_reason(self, caplog):
        loader = EchoLoader(DataLoader(TensorDataset(torch.arange(20)), batch_size=4), 2, seed=0)
        with caplog.at_level(logging.INFO, logger="lightning_echo"):
            for _ in range(3):
                list(loader)
            loader.close()
            list(loader)
        (record,) = caplog.records
        assert record.getMessage().startswith(f"{loader!r} (auto: ")
        assert "TensorDataset" in record.getMessage()

    def test_only_the_first_rank_says_it(self, caplog):
        with caplog.at_level(logging.INFO, logger="lightning_echo"):
            list(echo(num_replicas=2, rank=1))
            assert not caplog.records
            list(echo(num_replicas=2, rank=0))
            assert len(caplog.records) == 1

    def test_the_resolved_point(self):
        assert echo(point="auto").insertion_point is InsertionPoint.before_augmentation  # also where it could be after_read
        assert echo(point=InsertionPoint.after_batching).insertion_point is InsertionPoint.after_batching
        assert EchoLoader(DataLoader(torch.arange(8)), 2).insertion_point is InsertionPoint.after_augmentation
        assert [member.name for member in InsertionPoint] == [member.value for member in InsertionPoint]


class TestOptionsThatDoNotFitTheLoader:
    def test_a_loader_that_is_echoed_already(self):
        with pytest.raises(ValueError, match=r"loader is echoed already: pass the loader inside"):
            EchoLoader(echo(), 2)

    @pytest.mark.parametrize("factor", [1.5, 2, 4, 8])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_buffer_one_too_small_for_a_batch_is_refused_and_the_least_one_runs(self, factor, workers):
        least = (BATCH_SIZE - math.floor(BATCH_SIZE / factor)) * max(workers, 1)
        with pytest.raises(ValueError, match=rf"buffer_size={least - 1} is too small .* Use at least {least}, or leave it out"):
            echo(factor, loader=plain_loader(num_workers=workers), buffer_size=least - 1)
        loader = echo(factor, loader=plain_loader(num_workers=workers), buffer_size=least)
        assert loader.buffer_size == least
        if not workers:
            assert len(played(loader, 3)) == 3 * STEPS


def test_starting_over_is_the_run_from_its_start():
    loader = echo(2, buffer_size=20)
    first = played(loader, 2)
    loader.factor = 4
    played(loader, 1)
    loader.restart()
    assert loader.factor == 2
    assert loader.counts == EchoCounts()
    assert played(loader, 2) == first


class TestTakingThePlaceOfAnother:
    @pytest.mark.parametrize(("before", "passes"), [("after_batching", 2), ("after_augmentation", 2), ("before_augmentation", 2)])
    def test_of_another_point_goes_on_with_the_next_pass(self, before, passes):
        point = "after_augmentation" if before == "before_augmentation" else "before_augmentation"
        first, second = echo(1, before), echo(1, point)
        played(first, 1)
        next(iter(first))  # of the second pass
        second.follow(first)
        assert second.state_dict()["begin_at"] == [passes * LENGTH, passes * STEPS]
        assert second.counts == first.counts
        assert sorted(delivered_indices(second)) == list(range(LENGTH))

    def test_goes_on_with_its_factor_and_looks_ahead_by_that_alone(self):
        first, second = echo(8, "after_batching"), echo(4, "before_augmentation")
        next(iter(first))
        first.factor = 2
        second.follow(first)
        assert second.factor == 2
        assert second.state_dict()["largest_factor"] == 2


def test_a_larger_factor_by_batches_counts_from_what_can_be_in_flight_with_the_one_before():
    with closing(echo(1, "after_batching", plain_loader(num_workers=1))) as loader:
        next(iter(loader))
        loader.factor = 8
        assert loader.factor_since == 1 + (2 + 3) + DEPTH


def test_a_second_change_by_batches_looks_ahead_by_the_largest_factor_so_far():
    """Batches that are in flight were planned with it."""
    with closing(echo(8, "after_batching", plain_loader(num_workers=1))) as loader:
        next(iter(loader))
        loader.factor = 1
        loader.factor = 2
        number, factor = loader.state_dict()["plan"]["pending"][-1]
        assert (number, factor) == (1 + lookahead(Source(loader.loader), True, 8.0), 2)


def test_a_deep_copy_of_a_loader_is_independent():
    loader = echo()
    played(loader, 1)
    other, counts = copy.deepcopy(loader), loader.counts
    expected = played(other, 2)
    assert loader.counts == counts
    assert played(loader, 2) == expected


@pytest.mark.parametrize("point", POINTS)
def test_it_runs_from_its_first_batch_until_it_is_closed_or_goes_elsewhere(point):
    loader = echo(point=point)
    assert not loader.is_running
    batches = iter(loader)
    assert not loader.is_running, "nothing happens before the first batch"
    next(batches)
    state = loader.state_dict()
    assert loader.is_running
    list(batches)
    assert loader.is_running, "workers live on from epoch to epoch"
    loader.close()
    assert not loader.is_running
    list(loader)
    assert loader.is_running
    loader.load_state_dict(state)
    assert not loader.is_running
    list(loader)
    loader.restart()
    assert not loader.is_running


def test_a_data_set_that_has_grown_needs_other_workers_in_the_next_epoch():
    data = Noisy()
    loader = echo(loader=plain_loader(data))
    list(loader)
    data.length += BATCH_SIZE
    assert not loader.is_running
    with pytest.warns(UserWarning, match="a pass has 49 examples now"):
        list(loader)
    assert loader.is_running
