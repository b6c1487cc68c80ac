"""Streams on demand, with real workers: each example fresh once per pass, at any speed, over stops and resumes."""

import itertools
import os
import random
import signal
import time
from contextlib import closing

import pytest
import torch
from loader_cases import nothing_left_behind, through_a_file, workers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_echo import EchoLoader, EchoStateError
from lightning_echo.loader import setting as loader_setting
from lightning_echo.pipeline.reads import ReadTimeoutError

PASSES = 3


class Stream(IterableDataset):
    """Has a length for each worker and pass. An example is [worker, pass, place], and takes its time."""

    def __init__(self, lengths, seconds=lambda place: 0.0):
        self.lengths, self.seconds, self.at, self.number = lengths, seconds, 0, 0

    def __iter__(self):
        info = get_worker_info()
        worker = 0 if info is None else info.id
        lengths = self.lengths[worker]
        while self.at < lengths[self.number % len(lengths)]:
            time.sleep(self.seconds(self.at))
            example = torch.tensor([worker, self.number, self.at])
            self.at += 1
            yield example
        self.at, self.number = 0, self.number + 1


class Stateful(Stream):
    def state_dict(self):
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state):
        self.at, self.number = state["at"], state["number"]


class Sized(Stream):
    def __len__(self):
        return sum(lengths[0] for lengths in self.lengths)


class Uneven:
    """Mostly no time; sometimes some milliseconds."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, place):
        draw = random.Random(1000 * self.seed + place)
        return draw.uniform(0.001, 0.008) if draw.random() < 0.3 else 0.0


class Always:
    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, place):
        return self.seconds


def on_demand(dataset, batch_size=4, max_factor=8.0, buffer_size=None, seed=0, epoch_length="full_pass", **options):
    options = {"num_workers": len(dataset.lengths), **options}
    return EchoLoader(
        DataLoader(dataset, batch_size, **options),
        "demand",
        max_factor=max_factor,
        buffer_size=buffer_size,
        epoch_length=epoch_length,
        seed=seed,
    )


def rows(batch):
    return [tuple(row) for row in batch.tolist()]


def all_of(lengths, number):
    return {(worker, number, place) for worker, each in enumerate(lengths) for place in range(each[number % len(each)])}


def play(seed):
    """Trains for some passes, with random stops. Checks each batch, and that each pass had each of its examples fresh once."""
    draw = random.Random(seed)
    lengths = [[draw.randint(1, 20) for _ in range(PASSES)] for _ in range(draw.randint(1, 3))]
    size = draw.randint(1, 6)
    options = {"prefetch_factor": draw.randint(1, 3), "max_factor": draw.choice([1.0, 2.0, 8.0]), "buffer_size": 30}

    def make():
        return on_demand(Stateful(lengths, Uneven(seed)), size, seed=seed, **options)

    loader, seen, held = make(), set(), set()
    for number in range(PASSES):
        iterator = iter(loader)
        while (batch := next(iterator, None)) is not None:
            found = rows(batch)
            new = {row for row in found if row not in seen}
            assert len(set(found)) == len(found) <= size
            assert len(new) == loader.last_batch_counts.fresh
            assert set(found) - new <= held, "an echo is from the memory of running workers"
            seen |= new
            held |= new
            time.sleep(draw.choice([0.0, 0.0, 0.001, 0.004]))
            stop = draw.random()
            if stop < 0.03:
                loader.close()
                held.clear()
            elif stop < 0.06:
                state = through_a_file(loader.state_dict())
                loader.close()
                loader, held = make(), set()
                loader.load_state_dict(state)
                iterator = iter(loader)
            elif stop < 0.08:
                worker = draw.choice(sorted(workers()))
                os.kill(worker, signal.SIGSTOP)
                time.sleep(0.03)
                os.kill(worker, signal.SIGCONT)
        assert seen == {row for each in range(number + 1) for row in all_of(lengths, each)}
    loader.close()
    return loader.counts.echoed


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(10, 50, 10))])
def test_at_any_speed_and_over_stops_and_resumes_each_example_is_fresh_once_per_pass(first):
    with nothing_left_behind():
        assert sum(play(seed) for seed in range(first, first + 10)), "no example was echoed"


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("lengths", [[[13]], [[13], [4], [22]]])
def test_with_a_bound_of_1_it_is_the_plain_loader(lengths, drop_last):
    plain = DataLoader(Stream(lengths), 4, num_workers=len(lengths), drop_last=drop_last)
    with closing(on_demand(Stream(lengths), max_factor=1.0, drop_last=drop_last)) as loader:
        epochs = [[rows(batch) for batch in loader] for _ in range(2)]
    expected = [rows(batch) for batch in plain]
    assert epochs == [expected, [[(worker, 1, place) for worker, _, place in batch] for batch in expected]]


def test_a_length_that_is_known_is_that_of_epochs_and_passes_follow_each_other(caplog):
    lengths = [[30], [21]]
    loader = on_demand(Sized(lengths, Always(0.001)), epoch_length="fixed")
    found = []
    with closing(loader), caplog.at_level("INFO", logger="lightning_echo"):
        assert len(loader) == 13
        for _ in range(4):
            epoch = [rows(batch) for batch in loader]
            assert len(epoch) == 13
            found += itertools.chain.from_iterable(epoch)
    assert "a worker does not echo while the stream lets it wait for an example" in caplog.text
    new = list(dict.fromkeys(found))
    assert len(new) == loader.counts.fresh
    for worker, (length,) in enumerate(lengths):
        mine = [row[1:] for row in new if row[0] == worker]
        assert mine == [divmod(at, length) for at in range(len(mine))]


def test_a_worker_whose_stream_goes_on_when_the_others_have_ended_echoes_when_its_batches_are_due():
    """Its source needs 40 ms for a batch, and a step takes 5."""
    loader = on_demand(Stream([[4], [4], [400], [4]], Always(0.01)), prefetch_factor=2, max_factor=32.0)
    came, fresh = [], []
    with closing(loader):
        for batch in itertools.islice(loader, 70):
            assert len(came) < 4 or batch[0, 0] == 2
            came.append(time.perf_counter())
            fresh.append(loader.last_batch_counts.fresh)
            time.sleep(0.005)
    between = sorted(after - before for before, after in itertools.pairwise(came[20:]))
    assert sum(fresh[20:]) < 2.5 * len(fresh[20:])
    assert between[len(between) // 2] < 0.02, "a batch of fresh examples takes twice as long"


def test_a_bound_of_1_that_is_set_later_ends_the_echoes_from_its_batch_on():
    loader = on_demand(Stream([[400]] * 2, Always(0.004)))
    counts = []
    with closing(loader):
        for _ in itertools.islice(loader, 60):
            counts.append(loader.last_batch_counts)
            if len(counts) == 20:
                loader.factor = 1
                since = loader.factor_since
    assert 20 < since < 40
    assert sum(each.echoed for each in counts[:20]) > 0
    assert sum(each.echoed for each in counts[since:]) == 0


def test_a_closed_loader_ends_its_workers_at_once_though_they_hold_requests():
    with nothing_left_behind():
        loader = on_demand(Stream([[10**6]] * 2, Always(0.02)), batch_size=8, max_factor=1.0)
        next(iter(loader))
        time.sleep(0.1)  # both are in the midst of a batch
        began = time.perf_counter()
        loader.close()
        assert time.perf_counter() - began < 2.0


class Slower:
    """Seconds of an example in each batch of 65."""

    def __init__(self, *seconds):
        self.seconds = seconds

    def __call__(self, place):
        return self.seconds[place // 65]


NOT_READ = "timed out after 1 seconds: the next example of the stream is not read"


def test_a_time_out_counts_from_when_the_training_asks():
    """The second batch takes 1.3 s, the third one 3.3."""
    loader = on_demand(Stream([[195]], Slower(0.0, 0.02, 0.05)), batch_size=65, max_factor=1.0, timeout=1.0)
    with nothing_left_behind():
        iterator = iter(loader)
        next(iterator)
        time.sleep(0.9)
        next(iterator)
        began = time.perf_counter()
        with pytest.raises(ReadTimeoutError, match=NOT_READ):
            next(iterator)
        assert time.perf_counter() - began < 3.0


def test_a_time_out_comes_also_if_steps_take_no_time():
    loader = on_demand(Stream([[325]], Slower(0.0, 0.0, 0.0, 0.0, 0.05)), batch_size=65, max_factor=1.0, timeout=1.0)
    with nothing_left_behind():
        batches = iter(loader)
        assert len(list(itertools.islice(batches, 4))) == 4
        with pytest.raises(ReadTimeoutError, match=NOT_READ):
            next(batches)


def test_without_workers_nothing_is_echoed_which_is_said(caplog):
    loader = on_demand(Stream([[13]], Always(0.002)), num_workers=0)
    with caplog.at_level("INFO", logger="lightning_echo"):
        epoch = [rows(batch) for batch in loader]
    assert epoch == [rows(batch) for batch in DataLoader(Stream([[13]]), 4)]
    assert loader.counts.echoed == 0
    assert "nothing is echoed: without workers, no example arrives while a step runs" in caplog.text


class Failing(Stream):
    def __iter__(self):
        yield from super().__iter__()
        raise LookupError("shard 3 is unreadable")


def test_an_error_of_the_stream_arrives_after_the_batches_before_it():
    loader, found = on_demand(Failing([[9], [9]])), set()

    def train():
        for batch in loader:
            found.update(rows(batch))

    with nothing_left_behind(), pytest.raises(LookupError, match="shard 3 is unreadable"):
        train()
    assert len([row for row in found if row[0] == 0]) >= 6, "all but those of the batch that failed"


def state_within(make, batches=3):
    with closing(make()) as loader:
        for _ in itertools.islice(loader, batches):
            pass
        return through_a_file(loader.state_dict())


def constant(dataset, factor=2):
    return EchoLoader(DataLoader(dataset, 4, num_workers=len(dataset.lengths)), factor, seed=0, buffer_size=16)


LONG = [[40], [40]]


def test_within_a_pass_a_run_on_demand_and_one_of_a_constant_factor_cannot_continue_each_other():
    with pytest.raises(EchoStateError, match=r"with a constant factor \(now factor='demand'\): the workers divide"):
        on_demand(Stateful(LONG), buffer_size=16).load_state_dict(state_within(lambda: constant(Stateful(LONG))))
    with pytest.raises(EchoStateError, match=r"over a stream that echoed on demand, and this loader has a constant factor"):
        constant(Stateful(LONG)).load_state_dict(state_within(lambda: on_demand(Stateful(LONG), buffer_size=16)))


def test_a_stream_without_a_state_resumes_between_passes_and_is_refused_within_one():
    def make():
        return on_demand(Stream(LONG), buffer_size=16)

    with pytest.raises(EchoStateError, match="was saved within a pass, and Stream cannot continue there"):
        make().load_state_dict(state_within(make))
    with closing(make()) as loader:
        first = {row for batch in loader for row in rows(batch)}
        state = through_a_file(loader.state_dict())
    with closing(make()) as loader:
        loader.load_state_dict(state)
        second = {row for batch in loader for row in rows(batch)}
        assert loader.counts.fresh == 160
    assert first == second == all_of(LONG, 0), "a new process iterates it for the first time"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("number", 99, r"stream\.workers\[1\]\.number must be \d+, as in stream\.batches, got 99"),
        ("in_pass", None, r"stream\.workers\[1\]\.in_pass must be an integer, got None"),
        ("pulled", [[0, 4, 0, 0]], r"stream\.workers\[1\]\.pulled must be empty on demand"),
    ],
)
def test_a_damaged_state_of_a_worker_is_refused_by_the_name_of_its_field(field, value, said):
    state = state_within(lambda: on_demand(Stateful(LONG), buffer_size=16))
    state["stream"]["workers"][1][field] = value
    with pytest.raises(EchoStateError, match=said):
        on_demand(Stateful(LONG), buffer_size=16).load_state_dict(state)


def test_what_is_impossible_over_a_stream_is_refused_with_the_reason(monkeypatch):
    plain = DataLoader(Stream(LONG), 4, num_workers=2)
    with pytest.raises(ValueError, match=r"factor='demand' is impossible at insertion_point='after_batching'"):
        EchoLoader(plain, "demand", insertion_point="after_batching")
    with pytest.raises(ValueError, match=r"reuse='each' fixes the uses of each example. Instead, leave reuse out"):
        EchoLoader(plain, "demand", reuse="each")
    loader = EchoLoader(plain, "demand", seed=0, num_replicas=2, rank=0)
    monkeypatch.setattr(loader_setting, "world", lambda: (2, 0))
    with pytest.raises(ValueError, match="impossible over a stream on 2 ranks: each rank would pull other examples"):
        next(iter(loader))
