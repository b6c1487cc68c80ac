"""`EchoLoader` in one process: what it says, how long its epochs are, what it counts, and that its state is exact.

Without workers, so that hundreds of small runs take seconds; tests/integration runs the same with real workers.
"""

import copy
import logging
import math
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from echo_cases import BATCH_SIZE, LENGTH, POINTS, STEPS, Noisy, delivered_indices, echo, plain_loader, played, values
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

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.state import EchoCounts
from lightning_echo.pipeline.worker import StageSeconds
from lightning_echo.split.staged import StagedDataset


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
    # By default half of what a pass allows are (8 - 4) / 2, fewer than the 4 of a batch.
    @pytest.mark.parametrize(("options", "live"), [({"reuse": "each"}, 8), ({}, 4)])
    def test_the_split_the_live_examples_and_their_memory(self, options, live):
        dataset = StagedDataset.of(torch.zeros(8, 2**18), augment=lambda example: example)  # 1 MiB each
        loader = EchoLoader(DataLoader(dataset, batch_size=4), 2.5, insertion_point="before_augmentation", **options)
        assert repr(loader) == (
            f"before_augmentation, factor 2.5: reuse [load], redo [augment]; {live} live examples, {live} MiB; 0 workers"
        )

    @pytest.mark.parametrize(("options", "live"), [({"reuse": "each"}, 4), ({}, 2)])  # of a pass
    def test_live_batches_at_the_point_after_batching(self, options, live):
        plain = DataLoader(torch.zeros(8, 2**18), batch_size=4, num_workers=2)
        assert repr(EchoLoader(plain, 4, insertion_point="after_batching", **options)) == (
            "after_batching, factor 4: reuse [load, augment, collate], redo [transfer]; "
            f"{live} live batches, {4 * live} MiB; 2 workers"
        )

    @pytest.mark.parametrize(("options", "live"), [({"reuse": "each"}, 4), ({}, 3)])  # of a pass
    def test_no_memory_where_it_is_not_known(self, options, live):
        assert repr(EchoLoader([1, 2, 3], 2, **options)) == (
            f"after_batching, factor 2: reuse [load, augment, collate], redo [transfer]; {live} live batches; 0 workers"
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
        first, second = (record.getMessage() for record in caplog.records)
        assert first == repr(loader)
        assert second.startswith("auto chose after_augmentation: ")
        assert "TensorDataset" in second

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
