"""Reads in flight: batches, counts and states are the same to the bit as with one read after the other, whatever the timing."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from loader_cases import nothing_left_behind, pairwise, same, take, through_a_file, workers
from reads_cases import ORDERS, ReadLog, Slow, SlowItems, delivered, digest, loader_of, take_and_close
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_echo import EchoLoader, StagedDataset

# ---------------------------------------------------------------------- the same batches


SETTINGS = pairwise(
    order=[*ORDERS, "batches"],
    workers=[0, 1, 2],
    factor=[1, 2.37, 6],
    reuse=["memory", "each"],
    point=["auto", "after_read", "before_augmentation", "after_augmentation", "after_batching"],
    reads=[2, 32],
)


@pytest.mark.grid
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_batches_counts_and_states_are_the_same(setting):
    setting = dict(setting)
    reads, point = setting.pop("reads"), setting.pop("point")
    if setting["order"] == "batches":
        point = "auto"
    if setting["order"] == "weighted" and point in ("auto", "after_read", "before_augmentation"):
        setting["factor"] = 1  # with replacement
    one, many = (delivered(loader_of(each, insertion_point=point, **setting), 60) for each in (1, reads))
    assert same(one, many)


@pytest.mark.slow
def test_the_hash_of_a_thousand_batches_is_the_same():
    options = {"factor": 1.7, "dataset": Slow(4001, most_seconds=0.001), "batch_size": 8}
    assert len({digest(loader_of(reads, **options), 1000) for reads in (1, 2, 32)}) == 1


@pytest.mark.parametrize("reads", [16])
def test_after_changes_of_the_factor_batches_are_the_same(reads):
    def batches(reads):
        loader, found = loader_of(reads, factor=1), []
        for factor in (3, 1, 6.5, 2, 1):
            found += [batch.clone() for batch in itertools.islice(loader, 23)]
            loader.factor = factor
        loader.close()
        return found, loader.counts

    assert same(*(batches(each)[0] for each in (1, reads)))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before_augmentation", "after_augmentation"])
def test_a_run_that_is_resumed_at_any_batch_goes_on_the_same(point):
    whole = [batch for batch, _ in delivered(loader_of(1, factor=2.5, insertion_point=point), 40)[0]]
    for stop in (1, 9, 22):
        first = loader_of(16, factor=2.5, insertion_point=point)
        seen, state = delivered(first, stop)
        second = loader_of(8, factor=2.5, insertion_point=point)
        second.load_state_dict(through_a_file(state))
        rest, _ = delivered(second, 40 - stop)
        assert same([batch for batch, _ in (*seen, *rest)], whole)


CACHES = [("raw", "before_augmentation"), ("loaded", "before_augmentation"), ("raw", "after_augmentation"), ("raw", "after_read")]


@pytest.mark.grid
@pytest.mark.parametrize(("hold", "point"), CACHES)
@pytest.mark.parametrize("workers", [0, 2])
def test_through_a_cache_batches_hits_and_misses_are_the_same_and_a_held_example_is_not_read(hold, point, workers, tmp_path):
    found = []
    for reads in (1, 16):
        log = ReadLog(str(tmp_path / f"{reads}"))
        loader = loader_of(
            reads, workers=workers, factor=1.5, insertion_point=point, dataset=Slow(log=log), cache={"size": "4MiB", "hold": hold}
        )
        before = len(log.entries())
        batches = [batch.clone() for batch in take(loader, 23 * 4)]
        counts = loader.cache_counts
        read = Counter(index for _, index in log.entries()[before:])
        loader.close()
        found.append((batches, counts.hits, counts.misses))
        assert max(read.values()) <= 1 + 2 * max(workers, 1)  # a worker may read what another one has just put, and audits hits
    assert same(*found)


class Misfit(Slow):
    """Some examples draw random numbers while they are loaded."""

    def decode(self, raw):
        example = super().decode(raw)
        return example + torch.rand(1) if int(raw) in (13, 57) else example


@pytest.mark.filterwarnings("ignore:.*does not fit the split:UserWarning")
def test_examples_that_do_not_fit_the_split_are_the_same():
    one, many = (delivered(loader_of(reads, factor=2, dataset=Misfit()), 60)[0] for reads in (1, 8))
    assert same(one, many)


NESTED = {
    "subset": lambda log: Subset(Slow(log=log), range(80, 20, -2)),
    "concat": lambda log: ConcatDataset([Slow(30, log), Slow(40, log)]),
    "named cut": lambda log: StagedDataset.of(SlowItems(log=log), augment=lambda example: example + torch.rand(3)),
    "items": lambda log: SlowItems(log=log),
}


@pytest.mark.parametrize("name", NESTED)
def test_data_sets_of_any_kind_give_the_same(name):
    one, many = (take_and_close(loader_of(reads, dataset=NESTED[name](None), factor=2), 60) for reads in (1, 16))
    assert same(one, many)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [1, 2])
def test_no_example_is_read_twice(factor, workers, tmp_path):
    log = ReadLog(tmp_path / "reads")
    loader = loader_of(16, dataset=Slow(2000, log), workers=workers, factor=factor, buffer_size=64)
    before = len(log.entries())
    take(loader, 60)
    fresh = loader.counts.fresh
    loader.close()
    read = Counter(index for _, index in log.entries()[before:])
    twice = [index for index, times in read.items() if times > 1]
    assert len(read) >= fresh
    assert max(read.values()) <= 2
    assert len(twice) <= 3 * max(workers, 1)  # the 1st, 10th and 100th read of each worker is compared with one without threads


def test_a_users_sampler_is_not_asked_earlier():
    asked = []
    for reads in (1, 32):
        loader, found = loader_of(reads, order="users", workers=2), []
        for _ in itertools.islice(loader, 12):
            time.sleep(0.05)  # the thread that fetches has asked for all that it may
            found.append(loader.loader.sampler.asked)
        loader.close()
        asked.append(found)
    assert asked[0] == asked[1]


# ---------------------------------------------------------------------- errors


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [17, 44, 88])
def test_an_error_is_raised_when_the_turn_of_its_example_comes(bad, workers):
    def until_error(reads):
        loader, seen = loader_of(reads, dataset=Slow(bad=bad), workers=workers, order="sequential"), []
        with pytest.raises(OSError, match=f"no answer for {bad}") as raised:
            seen.extend(batch.clone() for batch in loader)
        loader.close()
        return seen, str(raised.value).splitlines()[-1], getattr(raised.value, "__notes__", [])[:1]

    with nothing_left_behind():
        assert same(until_error(1), until_error(16))


@pytest.mark.parametrize("reads", [32])
def test_after_a_killed_worker_the_run_continues_with_the_same_batches(reads):
    whole = [batch for batch, _ in delivered(loader_of(1, factor=2), 40)[0]]
    with nothing_left_behind():
        loader, seen, before = loader_of(reads, factor=2), [], workers()
        iterator = iter(loader)
        for _ in range(9):
            seen.append(next(iterator).clone())
        for process in workers() - before:
            os.kill(process, signal.SIGKILL)
        with pytest.raises((RuntimeError, OSError, EOFError)):
            seen.extend(batch.clone() for batch in iterator)
        state = loader.state_dict()
        loader.close()
        again = loader_of(reads, factor=2)
        again.load_state_dict(state)
        seen += [batch for batch, _ in delivered(again, 40 - len(seen))[0]]
    assert same(seen, whole)


class Hanging(Slow):
    def __init__(self, log=None, at=60):
        super().__init__(log=log)
        self.at = at

    def read(self, index):
        if index == self.at:
            time.sleep(1000)
        return super().read(index)


@pytest.mark.slow
def test_a_read_that_hangs_is_named_when_torch_gives_up():
    loader = loader_of(8, dataset=Hanging(), order="sequential", timeout=3)
    started = time.monotonic()
    said = r"timed out after 3 seconds: example 60 of the data set is not read after (2|3)[.\d]* s"
    with pytest.raises(RuntimeError, match=said) as raised:
        take(loader, 23)
    assert isinstance(raised.value, TimeoutError)
    assert time.monotonic() - started < 10
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_close_returns_within_a_second_while_reads_hang(workers):
    loader = loader_of(8, dataset=Hanging(), order="sequential", workers=workers)
    batches = itertools.islice(loader, 12)
    assert len(list(batches)) == 12
    time.sleep(0.3)  # the read hangs, and a worker waits for it
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 1


def test_nothing_is_left_behind():
    with nothing_left_behind():
        for workers in (0, 2):
            loader = loader_of(16, workers=workers)
            take(loader, 5)
            loader.close()
            dropped = loader_of(16, workers=workers)
            take(dropped, 5)
            del dropped


class Offset(Slow):
    """Its examples follow an attribute."""

    offset = 0.0

    def read(self, index):
        return super().read(index) + str(self.offset).encode()[1:]

    def augment(self, example):
        return example


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_read_ahead_of_a_change_of_the_data_is_dropped(workers):
    found = []
    for reads_in_flight in (1, 16):
        dataset = Offset()
        loader, batches = loader_of(reads_in_flight, dataset=dataset, workers=workers, factor=2), []
        for epoch in range(3):
            dataset.offset = epoch / 10
            batches.append([batch.clone() for batch in loader])
        loader.close()
        found.append(batches)
    assert same(*found)
    for epoch, batches in enumerate(found[1]):
        assert {round(10 * (value % 1)) for value in torch.cat(batches)[:, 0].tolist()} == {epoch}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_after_an_interrupt_while_a_read_hangs_nothing_runs_on(workers):
    with nothing_left_behind(2.0) if workers else contextlib.nullcontext():  # without workers, the thread ends with the process
        loader = loader_of(8, dataset=Hanging(), order="sequential", workers=workers)
        threading.Timer(1.5, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            take(loader, 23)
        started = time.monotonic()
        loader.close()
        assert time.monotonic() - started < 1


def hang(path):
    """A training whose worker waits for a read that does not end."""
    loader = loader_of(8, dataset=Hanging(), order="sequential")
    Path(path).write_text(" ".join(map(str, workers() or {0})))
    for number, _ in enumerate(loader):
        if number == 12:
            Path(path).write_text(" ".join(map(str, workers())))


@pytest.mark.slow
def test_workers_end_with_a_killed_training_while_a_read_hangs(tmp_path):
    training = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path / "workers",))
    training.start()
    until(lambda: len((tmp_path / "workers").read_text().split()) == 2 if (tmp_path / "workers").exists() else False)
    of_training = [int(process) for process in (tmp_path / "workers").read_text().split()]
    time.sleep(0.5)  # a worker waits for the read
    training.kill()
    training.join()
    until(lambda: not any(map(lives, of_training)))


def lives(process):
    try:
        return psutil.Process(process).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_spawned_read_ahead_and_close_at_once(context):
    found = []
    for reads_in_flight in (1, 8):
        plain = DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context=context)
        loader = EchoLoader(plain, 2, seed=3, reads_in_flight=reads_in_flight)
        found.append(take_and_close(loader, 20))
    assert same(*found)
