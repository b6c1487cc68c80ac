"""Echo on demand with real workers: each example is fresh once in a pass, whatever the speeds, stops and resumes."""

import os
import random
import re
import time
import warnings
from collections import deque
from itertools import islice

import pytest
import torch
from demand_cases import Ledger, ManySerials, ReadAndDecode, Recorder, Serials, Sleepy, batches_of, booked, on_demand
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_echo import CacheConfig, EchoLoader, StagedDataset

pytestmark = pytest.mark.timeout(120)


@pytest.mark.grid
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("length", "drop_last"), [(40, False), (38, False), (38, True), (3, False)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_without_echoes_the_batches_are_those_of_a_constant_factor_of_1(workers, length, drop_last, shuffle):
    options = {"workers": workers, "drop_last": drop_last, "shuffle": shuffle, "batch_size": 4}
    loader = on_demand(range(length), max_factor=1, **options)
    plain = EchoLoader(
        DataLoader(range(length), batch_size=4, shuffle=shuffle, num_workers=workers, drop_last=drop_last),
        1,
        insertion_point="after_augmentation",
        seed=0,
    )
    for _ in range(3):
        found = [batch.tolist() for batch in loader]
        assert found == [batch.tolist() for batch in plain]
        assert len(found) == len(loader)
    assert loader.counts == plain.counts
    assert loader.passes == plain.passes == 3
    loader.close()
    plain.close()


def random_parts(seed, dataset, options, enter, check):
    """Runs parts of a training at random speeds, each from the state of the one before."""
    rand, state = random.Random(seed), None
    for _ in range(4):
        loader = on_demand(dataset, **{"workers": rand.randint(1, 3), **options})
        if state is not None:
            loader.load_state_dict(state)
        for batch in islice(batches_of(loader), rand.randint(1, 25)):
            enter(batch)
            time.sleep(rand.choice([0, 0, 0.002]))
        check(loader)
        if rand.random() < 0.5:
            loader.close()  # and goes on: workers start again
            for batch in islice(batches_of(loader), rand.randint(1, 9)):
                enter(batch)
            check(loader)
        state = loader.state_dict()
        loader.close()
        assert loader.state_dict() == state


@pytest.mark.grid
@pytest.mark.parametrize("kind", [Serials, ManySerials])
@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_RUNS", "4"))))  # four parts each, with a resume between two
def test_each_example_is_fresh_once_in_a_pass_at_random_speeds_and_with_random_stops(kind, seed):
    rand = random.Random(f"{kind.__name__} {seed}")
    batch_size = rand.randint(1, 8)
    length = rand.randint(3 * batch_size + 1, 60)
    ledger = Ledger(length)
    dataset = kind(length, slowest=rand.choice([0.0, 0.004, 0.02]), seed=seed)
    random_parts(seed, dataset, {"batch_size": batch_size}, ledger.enter, ledger.check)


SPLIT = {
    "threads": {"reads_in_flight": 6},
    "threads if reads wait": {"reads_in_flight": "auto"},
    "a cache": {"cache": "64MiB"},
    "a cache and threads": {"cache": "64MiB", "reads_in_flight": 6},
    "no workers, threads": {"reads_in_flight": 4, "workers": 0},
    "raw": {"insertion_point": "after_read"},
}


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("seed", range(2))
def test_the_same_where_threads_read_or_a_cache_holds_examples(name, seed, monkeypatch):
    rand, recorder = random.Random(f"{name} {seed}"), Recorder(monkeypatch)
    options = {"batch_size": rand.randint(1, 8), "shuffle": True, "insertion_point": "before_augmentation", **SPLIT[name]}

    def enter(batch):
        indices = batch[:, 0].tolist()
        assert batch[:, 1].tolist() == [2 * index for index in indices]
        assert len(set(indices)) == len(indices)

    random_parts(seed, ReadAndDecode(rand.randint(30, 60), slowest=0.01, seed=seed), options, enter, recorder.check)


def test_the_source_decides_how_much_is_echoed():
    loader = on_demand(Serials(1000, slowest=0.0), max_factor=4)
    slow = on_demand(Serials(1000, slowest=0.05), max_factor=4, seed=1)
    for each in (loader, slow):
        for _ in islice(batches_of(each), 40):
            time.sleep(0.005)
        each.close()
    assert slow.counts.echoed > slow.counts.fresh
    assert slow.counts.delivered <= 4 * slow.counts.fresh
    assert loader.counts.factor < slow.counts.factor


def test_the_state_after_an_earlier_batch_is_that_batchs():
    loader = on_demand(Serials(30, slowest=0.004), batch_size=3)
    run, found = batches_of(loader), []
    for _ in range(25):
        next(run)
        states = [loader._run._pipeline.state(loader.delivered_batches - back) for back in range(min(3, len(found) + 1))]
        found.append(states[0])
        assert states == found[::-1][: len(states)]
    loader.close()


def test_an_edit_of_a_batch_never_reaches_an_echo():
    for point, dataset in (("after_augmentation", Serials(20)), ("before_augmentation", ReadAndDecode(20, slowest=0.01))):
        loader = on_demand(dataset, insertion_point=point, batch_size=4)
        for batch in islice(batches_of(loader), 40):
            assert batch.min() >= 0
            batch.fill_(-1)
            time.sleep(0.002)
        loader.close()


class OneBuffer(Dataset):
    """Returns the same tensor each time, with other values."""

    def __init__(self, length):
        self.length, self.memory = length, [torch.zeros(2, dtype=torch.int64) for _ in range(4)]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(0.002)
        memory = self.memory.pop(0)
        self.memory.append(memory)
        memory[0], memory[1] = index, 3 * index
        return memory


def test_a_data_set_that_reuses_the_memory_of_a_batch_is_echoed_right():
    loader = on_demand(OneBuffer(48), batch_size=4)
    for batch in islice(batches_of(loader), 60):
        assert len(set(batch[:, 0].tolist())) == 4
        assert (batch[:, 1] == 3 * batch[:, 0]).all()
        time.sleep(0.001)
    assert loader.counts.echoed
    loader.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_may_be_forked_or_spawned(context):
    loader, ledger = on_demand(Serials(12, slowest=0.01), context=context), Ledger(12)
    for batch in islice(batches_of(loader), 12):
        ledger.enter(batch)
    ledger.check(loader)
    loader.close()


# ---------------------------------------------------------------------- a source that does not deliver


def test_a_held_request_ends_at_once_when_the_loader_is_closed(tmp_path):
    options = {"workers": 1, "max_factor": 1, "reads_in_flight": 2, "batch_size": 8, "insertion_point": "before_augmentation"}
    loader = on_demand(Sleepy(100, 30, tmp_path / "go"), **options)
    run = batches_of(loader)
    for _ in range(2):
        next(run)
    time.sleep(0.3)  # the worker holds a request that it cannot fill
    started = time.perf_counter()
    loader.close()
    assert time.perf_counter() - started < 3


def test_a_dead_source_is_bridged_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_echo.pipeline.demand._DEAD_SECONDS", 0.5)
    go, said = tmp_path / "go", []
    options = {"workers": 1, "max_factor": 2, "reads_in_flight": 4, "batch_size": 4, "insertion_point": "before_augmentation"}
    loader = on_demand(Sleepy(1000, 20, go), **options)

    def warn(message, *args, **kwargs):
        said.append((str(message), loader.counts))
        go.touch()

    monkeypatch.setattr(warnings, "warn", warn)
    run, recorder = batches_of(loader), Recorder(monkeypatch)
    while not said:
        next(run)
    for _ in islice(run, 10):
        pass
    (message, counts), *others = said
    assert not others
    assert re.search(r"waited .* s for fresh examples: example 20 of the data set is not read yet", message)
    assert 2 * counts.fresh - 4 < counts.delivered <= 2 * counts.fresh  # all that was earned was used
    recorder.check(loader)
    loader.close()


@pytest.mark.slow
def test_the_time_out_counts_from_when_the_training_asks_and_names_the_example(tmp_path):
    loader = on_demand(Sleepy(100, 30, tmp_path / "go"), workers=1, max_factor=1, reads_in_flight=2, batch_size=8, timeout=1)
    run = batches_of(loader)
    next(run)
    time.sleep(2)  # a validation, say
    with pytest.raises(RuntimeError, match="timed out after 1 seconds: example 30 of the data set is not read"):
        deque(islice(run, 20), maxlen=0)
    loader.close()


def test_without_threads_the_example_that_a_worker_reads_is_named_and_the_loader_ends_soon(tmp_path):
    options = {"max_factor": 1, "insertion_point": "before_augmentation", "timeout": 1, "reads_in_flight": 1, "shuffle": True}
    loader = on_demand(Sleepy(100, 77, tmp_path / "go"), **options)
    run, started = batches_of(loader), time.perf_counter()
    with pytest.raises(RuntimeError, match="timed out after 1 seconds: example 77 of the data set is not read"):
        deque(run, maxlen=0)
    loader.close()
    assert time.perf_counter() - started < 8  # torch would wait for the read, and the thread for torch


class Large(StagedDataset):
    """A read gives 10,000 bytes, and takes a millisecond."""

    def __len__(self):
        return 400

    def read(self, index):
        time.sleep(0.001)
        return bytes([index % 256]) * 10_000

    def decode(self, raw):
        return torch.tensor(raw[0])

    def augment(self, example):
        return example


def test_what_a_cache_has_got_meanwhile_does_not_hold_the_memory_of_reads_in_flight(monkeypatch):
    monkeypatch.setattr("lightning_echo.pipeline.reads._MOST_BYTES", 400_000)  # 40 of these reads in all
    dataset = Large()
    sampler = RandomSampler(dataset, replacement=True, num_samples=2000)  # gives an index again while it is being read
    loader = EchoLoader(
        DataLoader(dataset, 4, num_workers=2, sampler=sampler), "demand", max_factor=2, seed=0, reads_in_flight=4, cache="64MiB"
    )
    assert sum(1 for _ in islice(batches_of(loader), 500)) == 500
    loader.close()


class HeavyAugment(ReadAndDecode):
    """Augmenting takes a hundred times as long as reading."""

    def augment(self, example):
        time.sleep(0.003)
        return super().augment(example)


@pytest.mark.alone  # on a busy machine, reading takes long
def test_nothing_is_echoed_where_reading_costs_little_beside_making_a_batch():
    loader = on_demand(HeavyAugment(1000), insertion_point="before_augmentation", batch_size=8)
    deque(islice(batches_of(loader), 60), maxlen=0)
    assert loader.counts.echoed < 0.2 * loader.counts.delivered
    loader.close()


class Broken(Serials):
    def __getitem__(self, index):
        if index == 13:
            raise ValueError("no such picture")
        return super().__getitem__(index)


def test_an_exception_of_the_data_set_arrives_and_the_run_continues_before_it():
    loader = on_demand(Broken(40), max_factor=1)
    with pytest.raises(ValueError, match=r"(?s)no such picture.*reading example 13"):
        deque(loader, maxlen=0)
    positions = booked(loader.state_dict())
    assert 13 not in positions
    assert set(range(8)) <= set(positions)
    loader.close()


# ---------------------------------------------------------------------- samplers, factors, what is refused


class Backwards(Sampler):
    def __init__(self, length, fails_in_pass=99):
        self.length, self.passes, self.fails_in_pass = length, 0, fails_in_pass

    def __iter__(self):
        self.passes += 1
        if self.passes > self.fails_in_pass:
            raise RuntimeError("no more passes")
        return iter(range(self.length)[::-1])

    def __len__(self):
        return self.length


def test_a_sampler_of_the_users_decides_the_order_and_its_error_arrives_after_its_batches():
    loader = EchoLoader(
        DataLoader(range(12), batch_size=4, sampler=Backwards(12, 2), num_workers=2),
        "demand",
        max_factor=1,
        insertion_point="after_augmentation",
    )
    run, found = batches_of(loader), []
    with pytest.raises(RuntimeError, match="no more passes"):
        found.extend(batch.tolist() for batch in run)
    assert found == [[11, 10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]] * 2


def test_a_sampler_that_repeats_indices_is_echoed():
    sampler = WeightedRandomSampler([1.0] * 3 + [20.0] * 3, 30, generator=torch.Generator().manual_seed(0))
    loader = EchoLoader(
        DataLoader(Serials(6, slowest=0.004), batch_size=5, sampler=sampler, num_workers=2),
        "demand",
        insertion_point="after_augmentation",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(islice(batches_of(loader), 30))
    assert all(len(batch) == 5 for batch in batches)
    assert loader.counts.delivered == 150
    loader.close()


def test_a_pass_shorter_than_a_batch_and_a_pass_of_one_batch_do_not_hang():
    for length, batch_size, workers in ((3, 8, 2), (1, 1, 3), (20, 16, 2), (5, 4, 3)):
        loader, ledger = on_demand(Serials(length, slowest=0.002), batch_size=batch_size, workers=workers), Ledger(length)
        for batch in islice(batches_of(loader), 25):
            ledger.enter(batch)
        ledger.check(loader)
        loader.close()


class SlowCalls(ManySerials):
    """A call takes as long as many steps."""

    def __getitems__(self, indices):
        time.sleep(0.2)
        return super().__getitems__(indices)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_within_a_call_that_reads_a_batch_the_training_has_what_that_earns(workers):
    """A worker cannot echo within a call. So it makes the echoes before it, and needs requests for them."""
    loader, ledger = on_demand(SlowCalls(200), workers=workers), Ledger(200)
    begun = loader.counts
    for batch in islice(batches_of(loader), 90 * workers):
        ledger.enter(batch)
        time.sleep(0.004)  # a step
        if loader.delivered_batches == 30 * workers:
            begun = loader.counts
    ledger.check(loader)
    now = loader.counts
    assert 5 < (now.delivered - begun.delivered) / (now.fresh - begun.fresh) < 9
    loader.close()


@pytest.mark.parametrize("data", [Serials, ManySerials])
def test_the_bound_may_be_changed_between_batches_and_is_part_of_the_state(data):
    loader = on_demand(data(200, slowest=0.03), max_factor=8)
    run = batches_of(loader)
    for _ in range(20):
        next(run)
    assert loader.counts.factor > 1.5
    loader.factor = 1
    assert loader.factor_since == loader.delivered_batches + loader.planned_ahead
    again = on_demand(data(200), max_factor=8)
    again.load_state_dict(loader.state_dict())
    assert (again.factor, again.factor_since) == (1, loader.factor_since)
    for each in (loader, again):
        run = batches_of(each)
        while each.delivered_batches < each.factor_since:
            next(run)
        before = each.counts
        for _ in range(5):
            next(run)
        assert each.counts.echoed == before.echoed
        each.close()


def test_examples_that_were_read_before_the_bound_was_raised_are_echoed_right():
    loader = on_demand(Serials(200, slowest=0.01), max_factor=1, batch_size=3)
    ledger, run = Ledger(200), batches_of(loader)
    for factor in (1, 8, 1, 8, 8, 8):
        loader.factor = factor
        for _ in range(12):
            ledger.enter(next(run))
            time.sleep(0.001)
    ledger.check(loader)
    assert loader.counts.echoed
    loader.close()


def test_a_state_of_a_constant_factor_continues_on_demand_and_not_the_other_way_around():
    constant = EchoLoader(DataLoader(range(40), batch_size=4), 2, insertion_point="after_augmentation", seed=0)
    found = [index for batch in islice(constant, 5) for index in batch.tolist()]
    state = constant.state_dict()
    loader = on_demand(range(40), max_factor=1)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="saved with a constant factor: the run continues on demand"):
        rest = [index for batch in islice(batches_of(loader), 7) for index in batch.tolist()]
    position = state["plan"]["position"]
    assert set(found) == set(range(position))
    assert rest[: 40 - position] == list(range(position, 40))
    with pytest.raises(ValueError, match="the state is of a run that echoed on demand"):
        constant.load_state_dict(loader.state_dict())
    loader.close()


def test_a_run_with_another_batch_size_leaves_nothing_out():
    loader, ledger = on_demand(Serials(50, slowest=0.004), batch_size=4), Ledger(50)
    for batch in islice(loader, 8):
        ledger.enter(batch)
    state = loader.state_dict()
    loader.close()
    other = on_demand(Serials(50), batch_size=7)
    other.load_state_dict(state)
    other.factor = 1
    with pytest.warns(UserWarning, match=r"batch_size=4 \(now 7\).*leaves nothing out"):
        ledger.fresh += [index for batch in islice(batches_of(other), 8) for index in batch[:, 0].tolist()]
    assert set(ledger.fresh) == set(range(50))
    other.close()


def test_without_workers_nothing_is_echoed_and_the_loader_says_so(caplog):
    loader = on_demand(range(20), workers=0)
    assert [batch.tolist() for batch in loader] == torch.arange(20).view(5, 4).tolist()
    assert loader.counts.echoed == 0
    assert "nothing is echoed: without workers" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reuse": "each"}, "reuse='each' fixes the uses"),
        ({"epoch_length": "full_pass"}, "epoch_length='full_pass' needs to know the factor"),
        ({"cache": CacheConfig("1MiB", partitioned=True)}, "a partitioned cache must know beforehand"),
        ({"buffer_size": 1}, "buffer_size=1 is too small for factor='demand': 2 workers hold examples"),
        ({"max_factor": 0.5}, "max_factor must be a finite number >= 1"),
        ({"max_factor": float("inf")}, "max_factor must be a finite number >= 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason_and_what_to_do(options, message):
    with pytest.raises(ValueError, match=message):
        on_demand(range(20), **options)
    with pytest.raises(ValueError, match="max_factor=4 is the bound of factor='demand' and of 'auto', got factor=2"):
        EchoLoader(DataLoader(range(20), batch_size=4), 2, max_factor=4)
