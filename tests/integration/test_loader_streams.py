"""Streams, with real workers: exact counts in every pass, at factor 1 the plain loader, exact resuming or a clear refusal."""

import contextlib
import threading
from collections import Counter
from contextlib import closing
from fractions import Fraction
from itertools import chain, islice

import numpy as np
import pytest
import torch
import torch.multiprocessing
from loader_cases import epochs, nothing_left_behind, same, take
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_echo import EchoLoader, EchoStateError

LENGTH, BATCH = 50, 4
WORKERS = (0, 1, 2, 3)
RULES = ("each", "memory")


def share(length):
    """What this worker reads, as PyTorch's documentation shows it."""
    info = get_worker_info()
    return range(length) if info is None else range(info.id, length, info.num_workers)


class Stream(IterableDataset):
    """Dealt out by ``get_worker_info``. An example is [number, noise]: the noise tells one reading of it from every other."""

    def __init__(self, length=LENGTH):
        self.length = length

    def __iter__(self):
        for number in share(self.length):
            yield self.example(number)

    def example(self, number):
        return torch.tensor([number, float(torch.rand((), dtype=torch.float64)), np.random.rand()], dtype=torch.float64)


class Sized(Stream):
    def __len__(self):
        return self.length


class Ranged(IterableDataset):
    """Dealt out by attributes that a ``worker_init_fn`` sets."""

    def __init__(self):
        self.start, self.end = 0, LENGTH

    def __iter__(self):
        return iter(torch.arange(self.start, self.end)[:, None].double())


def set_range(worker):
    dataset = get_worker_info().dataset
    each = -(-LENGTH // get_worker_info().num_workers)
    dataset.start, dataset.end = each * worker, min(each * (worker + 1), LENGTH)


class Stateful(Stream):
    """Its state is its place in each worker's share, and the pass."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.at = self.number = 0

    def __iter__(self):
        for number in islice(share(self.length), self.at, None):
            self.at += 1
            yield self.example(1000 * self.number + number)
        self.at, self.number = 0, self.number + 1

    def state_dict(self):
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state):
        self.at, self.number = state["at"], state["number"]


class SizedStateful(Stateful):
    def __len__(self):
        return self.length


def echo(factor, dataset=None, workers=2, seed=0, epoch_length="full_pass", buffer_size=None, reuse="memory", **options):
    """By default two batches are live in each worker: these streams are short."""
    buffer_size = buffer_size or 2 * BATCH * max(workers, 1)
    plain = DataLoader(Stream() if dataset is None else dataset, BATCH, num_workers=workers, **options)
    return EchoLoader(plain, factor, seed=seed, epoch_length=epoch_length, buffer_size=buffer_size, reuse=reuse)


def numbers(batches):
    return [[int(number) for number in batch[:, 0].tolist()] for batch in batches]


@pytest.mark.grid
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("dataset", [Stream, Sized])
def test_at_factor_1_every_epoch_is_that_of_the_plain_loader(workers, drop_last, dataset):
    expected = numbers(DataLoader(dataset(), BATCH, num_workers=workers, drop_last=drop_last))
    loader = echo(1, dataset(), workers, drop_last=drop_last)
    with nothing_left_behind():
        assert [numbers(epoch) for epoch in epochs(loader, 3)] == [expected] * 3
        loader.close()
    assert loader.counts.fresh == 3 * sum(map(len, expected))
    assert loader.counts.echoed == 0


@pytest.mark.grid
@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize("factor", [1.5, 2.37, 4])
def test_every_example_is_fresh_once_in_each_pass_and_echoed_by_the_factor(workers, factor, persistent, reuse):
    loader = echo(factor, workers=workers, reuse=reuse, persistent_workers=persistent)
    readings, counted = Counter(), 0
    for _ in range(4):
        fresh, batches = [], 0
        for batch in loader:
            rows = [tuple(row) for row in batch.tolist()]
            assert len(set(rows)) == len(rows) <= BATCH
            new = [row for row in rows if row not in readings]
            assert loader.last_batch_counts.fresh == len(new)
            assert loader.last_batch_counts.echoed == len(rows) - len(new)
            fresh += new
            readings.update(rows)
            batches += 1
            counted += len(rows)
        assert sorted(int(row[0]) for row in fresh) == list(range(LENGTH))
        assert batches <= factor * LENGTH / BATCH + loader.buffer_size
    loader.close()
    assert loader.counts.delivered == counted == sum(readings.values())
    assert loader.counts.fresh == len(readings) == 4 * LENGTH
    assert loader.passes == 4
    if reuse == "each":
        # What is live has uses left, and what filled the buffer at the start had few: all others are used by the factor.
        assert set(readings.values()) <= set(range(1, int(-(-factor // 1)) + 1))
        assert factor * (4 * LENGTH - 2 * loader.buffer_size) <= counted <= factor * 4 * LENGTH
    else:
        # The first batch of each worker is all fresh. Of the d examples after it floor(d / e) are, which lets d be less than e
        # above the multiple of e.
        holders, exact = max(workers, 1), Fraction(str(factor))
        assert 0 <= counted - holders * BATCH - exact * (4 * LENGTH - holders * BATCH) < exact * holders
        assert max(readings.values()) > -(-factor // 1), "chance draws some of 200 more often"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_fixed_length_has_the_steps_of_the_plain_loader_and_the_pass_goes_on(workers):
    loader = echo(2, Sized(48), workers, epoch_length="fixed")
    assert len(loader) == 12
    found = epochs(loader, 8)
    loader.close()
    assert [len(epoch) for epoch in found] == [12] * 8
    readings = Counter(tuple(row) for epoch in found for batch in epoch for row in batch.tolist())
    passes = Counter(int(row[0]) for row in readings)
    assert max(passes.values()) - min(passes.values()) <= 1
    assert loader.passes == pytest.approx(4, abs=0.5)
    assert loader.counts.fresh == len(readings)


def test_attributes_that_a_worker_init_fn_sets_on_the_data_set_are_those_of_the_stream():
    loader = echo(2, Ranged(), 2, worker_init_fn=set_range)
    fresh = Counter(number for batch in numbers(loader) for number in batch)
    loader.close()
    assert sorted(fresh) == list(range(LENGTH))
    assert loader.counts.fresh == LENGTH


@pytest.mark.grid
@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_factor_reaches_the_workers_and_counts_from_the_same_batch_in_every_run(workers, persistent, reuse):
    def shares():
        loader = echo(1, Stream(400), workers, reuse=reuse, persistent_workers=persistent and workers > 0)
        found = []
        for _ in range(2):
            for _ in loader:
                found.append(loader.last_batch_counts.fresh)
                if len(found) == 20:
                    loader.factor = 4
                    since = loader.factor_since
        loader.close()
        return found, since

    found, since = shares()
    assert found[:since] == [BATCH] * since
    assert since == 20 + (6 if workers else 0)
    assert set(found[since + 2 * BATCH : 100]) == {1}
    assert shares() == (found, since)


def test_without_a_length_it_has_none_and_its_epochs_end_with_the_stream(caplog):
    loader = EchoLoader(DataLoader(Stream(), BATCH), 2, seed=0)
    assert loader.epoch_length == "full_pass"
    with pytest.raises(TypeError, match="no length: an epoch ends when a pass of its loader ends"):
        len(loader)
    with caplog.at_level("INFO", logger="lightning_echo"):
        epochs(loader, 2)
    _, reason, remarks = (record.getMessage() for record in caplog.records)
    assert reason == "auto chose after_augmentation: the data set is a stream, which has no index"
    assert remarks.endswith("; an epoch ends when the stream ends")
    assert remarks.startswith("a checkpoint from within a pass cannot be resumed, unless the data set has state_dict()")
    assert "cannot be resumed" not in "".join(EchoLoader(DataLoader(Stateful(), BATCH), 2)._setting.remarks())


def test_an_epoch_that_was_cut_short_goes_on_in_the_next():
    whole, cut = echo(2, seed=3), echo(2, seed=3)
    expected = list(whole)
    iterator = iter(cut)
    found = [next(iterator) for _ in range(5)]
    del iterator
    assert same([*found, *cut], expected)
    whole.close(), cut.close()


def test_two_runs_with_a_seed_are_the_same_and_with_another_are_not():
    def run(seed):
        loader = echo(2, seed=seed)
        found = take(loader, 40)
        loader.close()
        return found

    assert same(run(1), run(1))
    assert not same(run(1), run(2))


@pytest.mark.parametrize("workers", [0, 2])
def test_closed_within_a_pass_it_begins_the_next_one_and_says_so(workers):
    loader = echo(1, workers=workers)
    take(loader, 3)
    loader.close()
    with pytest.warns(
        UserWarning, match="the present pass cannot be continued, because its workers were ended: the next pass begins"
    ):
        epoch = list(loader)
    assert sorted(number for batch in numbers(epoch) for number in batch) == list(range(LENGTH))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_state_of_its_own_it_goes_on_where_it_was_closed(workers):
    def batches(cut):
        loader = echo(2, Stateful(), workers, seed=5)
        found = take(loader, 5)
        if cut:
            loader.close()
        found += take(loader, 9)
        loader.close()
        return found

    assert same(batches(True), batches(False))


class TestResuming:
    @pytest.mark.grid
    @pytest.mark.parametrize("reuse", RULES)
    @pytest.mark.parametrize("epoch_length", ["full_pass", "fixed"])
    @pytest.mark.parametrize(("workers", "factor"), [(0, 2.37), (1, 4), (2, 1), (2, 2), (3, 2.37)])
    def test_with_a_state_of_the_stream_it_is_exact_from_every_batch(self, workers, factor, epoch_length, reuse):
        def start():
            return echo(factor, SizedStateful(), workers, epoch_length=epoch_length, reuse=reuse)

        def play(loader, first, delivered):
            for epoch in range(first, 3):
                for batch in loader:
                    delivered += 1
                    if delivered == 17:
                        loader.factor = 3  # while the one before is still in flight
                    yield epoch, batch
            loader.close()

        loader, found, states = start(), [], []
        for item in play(loader, 0, 0):
            found.append(item)
            states.append(loader.state_dict())
        for at in range(0, len(found), 7):
            resumed = start()
            resumed.load_state_dict(states[at])
            assert resumed.state_dict() == states[at]
            is_over = at + 1 < len(found) and found[at + 1][0] > found[at][0] and epoch_length == "fixed"
            rest = list(play(resumed, found[at][0] + is_over, at + 1))
            assert same([batch for _, batch in rest], [batch for _, batch in found[at + 1 :]])
            assert [epoch for epoch, _ in rest] == [epoch for epoch, _ in found[at + 1 :]]
            assert resumed.counts.fresh == loader.counts.fresh
            assert resumed.factor_since == loader.factor_since

    @pytest.mark.parametrize("workers", [0, 2])
    def test_without_one_the_middle_of_a_pass_is_refused_with_the_reason(self, workers):
        loader = echo(2, workers=workers)
        take(loader, 5)
        state = loader.state_dict()
        loader.close()
        with pytest.raises(
            EchoStateError, match=r"Stream cannot continue there: without state_dict\(\) and load_state_dict\(state\)"
        ):
            echo(2, workers=workers).load_state_dict(state)

    def test_where_epochs_do_not_end_with_the_stream_it_says_how_they_would(self):
        loader = echo(2, Sized(), epoch_length="fixed")
        list(loader)
        state = loader.state_dict()
        loader.close()
        with pytest.raises(EchoStateError, match="let epochs end when the stream ends, by epoch_length='full_pass'"):
            echo(2, Sized(), epoch_length="fixed").load_state_dict(state)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_without_one_the_end_of_an_epoch_goes_on_with_the_next_and_repeats_nothing(self, workers):
        loader = echo(2, workers=workers)
        epochs(loader, 2)
        state, counts = loader.state_dict(), loader.counts
        loader.close()
        resumed = echo(2, workers=workers)
        resumed.load_state_dict(state)
        assert resumed.counts == counts
        fresh, seen = [], set()
        for batch in resumed:
            rows = [tuple(row) for row in batch.tolist()]
            fresh += [int(row[0]) for row in rows if row not in seen]
            seen.update(rows)
        assert sorted(fresh) == list(range(LENGTH))
        assert resumed.passes == 3
        assert resumed.counts.fresh == counts.fresh + LENGTH
        resumed.close()

    def test_at_factor_1_the_next_epoch_is_the_same_as_without_stopping(self):
        loader = echo(1)
        list(loader)
        state, expected = loader.state_dict(), list(loader)
        loader.close()
        resumed = echo(1)
        resumed.load_state_dict(state)
        assert same(list(resumed), expected)
        resumed.close()

    def test_with_other_workers_the_middle_of_a_pass_is_refused_and_its_end_is_not(self):
        loader = echo(2, Stateful(), 2)
        take(loader, 5)
        middle = loader.state_dict()
        rest = sum(1 for _ in loader)
        end = loader.state_dict()
        loader.close()
        with pytest.raises(EchoStateError, match=r"with workers=2 \(now 3\).*: the workers divide a stream among themselves"):
            echo(2, Stateful(), 3).load_state_dict(middle)
        assert rest
        resumed = echo(2, Stateful(), 3)
        resumed.load_state_dict(end)
        assert {number % 1000 for batch in numbers(resumed) for number in batch} == set(range(LENGTH))
        resumed.close()

    def test_a_state_taken_from_one_that_was_loaded_and_not_started_is_the_same(self):
        loader = echo(2, Stateful())
        take(loader, 9)
        state = loader.state_dict()
        loader.close()
        assert loader.state_dict() == state
        resumed = echo(2, Stateful())
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_the_collate_function_made_none_is_a_batch(workers):
    """For examples that are all broken, for one: Lightning leaves such a batch out by itself."""
    loader = echo(2, workers=workers, collate_fn=lambda examples: None)
    batches = list(loader)
    loader.close()
    assert set(batches) == {None}
    assert loader.delivered_batches == len(batches) >= LENGTH / BATCH
    assert loader.counts.fresh == LENGTH


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_yields_nothing_is_reported(workers):
    loader = echo(2, Empty(), workers)
    with pytest.raises(RuntimeError, match="the stream yielded no batch in pass 0"):
        list(loader)


def test_data_pipes_are_divided_among_the_workers_as_torch_divides_them():
    pipe = IterableWrapper([torch.tensor([number]) for number in range(48)]).shuffle().sharding_filter()
    loader = EchoLoader(DataLoader(pipe, BATCH, num_workers=2), 1, seed=0)
    passes = [[int(number) for batch in loader for number in batch] for _ in range(3)]
    loader.close()
    assert [sorted(each) for each in passes] == [list(range(48))] * 3


@pytest.mark.parametrize("point", ["after_augmentation", "after_batching"])
def test_where_each_worker_drops_its_own_rest_a_pass_ends_before_torchs_length(point):
    """22 examples make five batches of four, and three workers make four of them: 2 + 1 + 1."""
    plain = DataLoader(Sized(22), 4, num_workers=3, drop_last=True)
    kept = sorted(chain.from_iterable(numbers(plain)))
    with closing(EchoLoader(plain, 1, insertion_point=point, seed=0)) as loader:
        delivered = [number for _ in range(4) for batch in numbers(loader) for number in batch]
    assert (len(plain), len(kept)) == (5, 16)
    assert len(delivered) == 4 * 5 * 4
    assert [sorted(delivered[first : first + 16]) for first in range(0, 80, 16)] == [kept] * 5


class Failing(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(9, 1)
        raise LookupError("shard 3 is unreadable")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_stream_arrives_where_its_batch_would(workers):
    loader = echo(1, Failing(), workers)
    found = []
    with nothing_left_behind(), pytest.raises(LookupError, match="shard 3 is unreadable"):
        found.extend(loader)
    assert len(found) == 2 * max(workers, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_random_states_of_the_training_are_left_alone(workers):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    assert take(EchoLoader(DataLoader(Stream(), BATCH, num_workers=workers), 2, seed=0), 30)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before[1:]


class ToldInTwoSteps(Stream):
    """Its pass is told in memory of all workers, as Hugging Face's; whoever meets another one on the way says so."""

    def __init__(self):
        super().__init__()
        context = torch.multiprocessing.get_context()
        self.inside, self.met, self.told = context.Barrier(2), context.Event(), context.Value("i", -1)

    def set_epoch(self, epoch):
        before = self.told.value
        with contextlib.suppress(threading.BrokenBarrierError):
            self.inside.wait(0.3)
            self.met.set()
        self.told.value += epoch - before


def test_real_workers_tell_their_stream_the_pass_one_after_another():
    stream = ToldInTwoSteps()
    with closing(EchoLoader(DataLoader(stream, BATCH, num_workers=2), 2, seed=0)) as loader:
        for number in range(2):
            assert list(loader)
            assert stream.told.value == number
            stream.inside.reset()
    assert not stream.met.is_set()
