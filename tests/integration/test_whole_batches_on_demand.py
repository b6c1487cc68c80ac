"""Whole batches on demand, with real workers: fresh in the plain loader's order, each once; echoes from memory, as they were."""

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import closing
from itertools import chain, cycle, islice

import pytest
import torch
from demand_runs import LENGTH, STEPS, on_demand, run_on_demand
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from trainer_runs import Killed, Recorder, SaveAt, fresh_stream

from lightning_echo.data.copies import copy_example
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.pipeline import demand, demand_batches

PATIENCE = 30  # seconds after which a test that hangs fails; no test waits for it to pass


class Slow(Dataset):
    """Examples are their indices. Each takes a time that depends on it: ``most_ms`` at most, mostly less."""

    def __init__(self, length, most_ms=0.0):
        self.length, self.most_ms = length, most_ms

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(random.Random(index).random() ** 3 * self.most_ms / 1000)
        return torch.tensor(index)


class Gated(Dataset):
    """Examples are their indices. From index ``first`` on, reading waits until a gate is opened."""

    def __init__(self, length, first):
        self.length, self.first, self.gate = length, first, multiprocessing.Event()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.first:
            assert self.gate.wait(PATIENCE)
        return torch.tensor(index)


def demanded(loader, **options):
    return EchoLoader(loader, "demand", **{"insertion_point": "after_batching", "seed": 5, **options})


class Run:
    """Batches of one run, over all loaders that continue it, each with whether it was fresh."""

    def __init__(self):
        self.batches = []
        self.began = []  # how many batches there were when a loader began to continue the run: it has an empty memory

    def take(self, loader, number, step_seconds=lambda: 0.0):
        self.began.append(len(self.batches))
        taken, iterator = 0, iter(loader)
        while taken < number:
            before = loader.counts
            batch = next(iterator, None)
            if batch is None:
                iterator = iter(loader)
                continue
            after = loader.counts
            values = batch.tolist()
            assert after.delivered - before.delivered == len(values)
            assert after.fresh - before.fresh in (0, len(values))
            self.batches.append((values, after.fresh > before.fresh))
            batch.fill_(-1)  # the training edits its batch in place
            taken += 1
            time.sleep(step_seconds())

    @property
    def fresh(self):
        return [values for values, is_fresh in self.batches if is_fresh]

    def check_echoes(self, max_factor):
        """Each echo is a batch that was fresh since the loader began, and no more are echoed than the fresh ones earned."""
        for first, end in zip(self.began, [*self.began[1:], len(self.batches)], strict=True):
            seen, account = [], 0.0
            for values, is_fresh in self.batches[first:end]:
                account += max_factor - 1 if is_fresh else -1
                assert is_fresh or values in seen
                assert account > -1e-6
                seen.append(values)


def plain_batches(length, batch_size, drop_last, count):
    """The first batches of a plain loader in the data set's own order, pass after pass."""
    batches = [list(range(length))[at : at + batch_size] for at in range(0, length, batch_size)]
    return list(islice(cycle(batch for batch in batches if len(batch) == batch_size or not drop_last), count))


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_deliver_each_batch_once_and_in_order_however_often_they_are_stopped(seed):
    draw = random.Random(seed)
    length, batch_size, drop_last = draw.randrange(8, 40), draw.randrange(1, 8), draw.random() < 0.5
    max_factor, most_ms, step_ms = draw.choice([1, 1.5, 2, 4, 16]), draw.choice([0.0, 1.0, 4.0]), draw.choice([0.0, 2.0, 6.0])
    shuffle = draw.random() < 0.5

    def plain():
        how = {"num_workers": draw.randrange(1, 3), "prefetch_factor": draw.randrange(1, 3)}
        return DataLoader(Slow(length, most_ms), batch_size, drop_last=drop_last, shuffle=shuffle, **how)

    run, state = Run(), None
    for _ in range(draw.randrange(1, 4)):
        with closing(demanded(plain(), max_factor=max_factor, buffer_size=draw.choice([1, 3, 100]))) as loader:
            if state is not None:
                loader.load_state_dict(state)
            run.take(loader, draw.randrange(1, 25), lambda: draw.random() * step_ms / 1000)
            if draw.random() < 0.3:
                loader.close()
                run.take(loader, draw.randrange(1, 10), lambda: draw.random() * step_ms / 1000)
            state = loader.state_dict()
    expected = plain_batches(length, batch_size, drop_last, len(run.fresh))
    if shuffle:  # the package's own order, as a loader has it that does not echo
        order = Run()
        with closing(EchoLoader(plain(), 1, seed=5)) as loader:
            order.take(loader, len(run.fresh))
        sizes, expected = list(map(len, expected)), order.fresh
        assert list(map(len, expected)) == sizes
        first_pass = list(chain.from_iterable(expected[: len(plain())]))
        assert len(set(first_pass)) == len(first_pass)
    assert run.fresh == expected
    run.check_echoes(max_factor)
    assert (state["demand"]["frontier"], state["delivered"]) == (len(run.fresh), len(run.batches))


def test_an_own_batch_sampler_of_torchs_classes_is_echoed_and_resumed():
    def plain():
        sampler = RandomSampler(range(30), generator=torch.Generator().manual_seed(3))
        return DataLoader(Slow(30, 3.0), batch_sampler=BatchSampler(sampler, 4, drop_last=False), num_workers=2)

    run = Run()
    with closing(demanded(plain(), insertion_point="auto")) as loader:
        run.take(loader, 21, lambda: 0.001)
        state = loader.state_dict()
    with closing(demanded(plain(), insertion_point="auto")) as loader:
        loader.load_state_dict(state)
        run.take(loader, 21, lambda: 0.03)
    batches = iter(plain().batch_sampler)
    assert run.fresh[:8] == list(batches)
    assert len(run.fresh) > 8
    run.check_echoes(8)


def test_the_training_waits_once_the_account_is_empty_and_says_for_which_batch(monkeypatch):
    monkeypatch.setattr(demand, "_DEAD_SECONDS", 0.2)
    data = Gated(40, first=8)
    plain = DataLoader(data, 4, num_workers=1)
    said = []
    with closing(demanded(plain, max_factor=3)) as loader:
        loader._run.says.warn_here = said.append
        run = Run()
        run.take(loader, 6)  # 2 are fresh, and earn 2 uses more for each
        assert [values for values, is_fresh in run.batches if is_fresh] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        threading.Timer(1.0, data.gate.set).start()
        run.take(loader, 4)
    run.began = [0]
    run.check_echoes(3)
    assert run.batches[6] == ([8, 9, 10, 11], True)
    (message,) = said
    assert message.endswith("batch 2 of pass 0 is not read yet. What memory holds bridges a stall for max_factor uses")


@pytest.mark.slow
def test_a_timeout_counts_only_while_the_training_waits():
    data = Gated(40, first=4)
    with closing(demanded(DataLoader(data, 4, num_workers=1, timeout=1), max_factor=3)) as loader:
        run = Run()
        run.take(loader, 3, lambda: 0.5)
        with pytest.raises(RuntimeError, match="timed out after 1 seconds: batch 1 of pass 0"):
            run.take(loader, 1)


def test_a_killed_worker_ends_the_training_with_an_error_though_memory_holds_batches():
    data = Gated(400, first=8)
    with closing(demanded(DataLoader(data, 4, num_workers=1), max_factor=1000)) as loader:
        Run().take(loader, 3)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="killed by signal: Killed"):
            Run().take(loader, 2000, lambda: 0.001)


def test_an_error_of_the_data_set_is_raised_in_its_place():
    class Broken(Slow):
        def __getitem__(self, index):
            if index == 9:
                raise LookupError("nine is broken")
            return super().__getitem__(index)

    run = Run()
    with closing(demanded(DataLoader(Broken(40), 4, num_workers=2))) as loader:
        with pytest.raises(LookupError, match="nine is broken"):
            run.take(loader, 100, lambda: 0.005)
        assert run.fresh == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.state_dict()["demand"]["frontier"] == 2


def test_a_closing_loader_waits_for_one_example_and_not_for_its_batch():
    class Steady(Slow):
        def __getitem__(self, index):
            time.sleep(0.0 if index < 100 else 0.1)
            return torch.tensor(index)

    loader = demanded(DataLoader(Steady(1000), 100, num_workers=1))
    Run().take(loader, 3, lambda: 0.1)
    started = time.perf_counter()
    loader.close()
    assert time.perf_counter() - started < 5  # the batch that is read takes 10 s
    assert not multiprocessing.active_children()


def copies_noted(monkeypatch):
    """Notes which threads copy."""
    threads = []

    def copy(batch):
        threads.append(threading.current_thread().name)
        return copy_example(batch)

    monkeypatch.setattr(demand_batches, "copy_example", copy)
    return threads


def test_no_copy_is_made_in_the_thread_of_the_training(monkeypatch):
    threads = copies_noted(monkeypatch)
    with closing(demanded(DataLoader(Slow(400, 8.0), 4, num_workers=1))) as loader:
        Run().take(loader, 60, lambda: 0.001)
        assert loader.counts.echoed > 0
    assert {name.partition("_0")[0] for name in threads} == {"lightning_echo-prefetch", "lightning_echo-copy"}


def test_while_the_source_keeps_up_each_batch_is_copied_once_and_no_echo_is_made_ready(monkeypatch):
    threads = copies_noted(monkeypatch)
    with closing(demanded(DataLoader(Slow(4000), 4, num_workers=2))) as loader:
        iterator = iter(loader)
        next(iterator)
        pipeline = loader._run._pipeline.started
        for _ in range(60):
            while not (pipeline._arriving.has_arrived and pipeline._arriving._results.qsize() == 2):
                time.sleep(0.001)
            next(iterator)
        assert loader.counts.echoed == 0
    assert threads.count("lightning_echo-copy_0") <= 1  # after the first batch


def test_max_factor_changes_with_the_next_batch_or_a_later_one_and_in_a_resumed_run():
    run, since = Run(), 20
    with closing(demanded(DataLoader(Slow(400), 4, num_workers=2), max_factor=1)) as loader:
        run.take(loader, 10)
        loader.set_factor(1.5)
        loader.set_factor(1, since=10)
        loader.set_factor(4, since=since)
        state = loader.state_dict()
    assert (state["demand"]["max_factor"], state["demand"]["pending"]) == (1, [[since, 4.0]])
    with closing(demanded(DataLoader(Slow(400, 30.0), 4, num_workers=1), max_factor=1)) as loader:
        loader.load_state_dict(state)
        run.take(loader, 60)
        assert loader.factor == 4
    assert all(is_fresh for _, is_fresh in run.batches[:since])
    assert not all(is_fresh for _, is_fresh in run.batches[since:])
    assert run.fresh == plain_batches(400, 4, False, len(run.fresh))


@pytest.mark.parametrize(
    ("point", "size", "factor"), [("after_augmentation", 4, "demand"), ("after_batching", 3, "demand"), ("after_batching", 4, 2)]
)
def test_a_state_of_another_kind_continues_at_its_place_and_leaves_nothing_out(point, size, factor):
    run, options = Run(), {} if factor == "demand" else {"max_factor": factor}
    with closing(EchoLoader(DataLoader(Slow(60, 2.0), size, num_workers=1), factor, insertion_point=point, seed=5)) as loader:
        assert len(list(islice(loader, 9))) == 9
        fresh, state = loader.counts.fresh, loader.state_dict()
    with closing(demanded(DataLoader(Slow(60, 2.0), 4, num_workers=1), **options)) as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="the state was saved with"):
            run.take(loader, 40)
    first = run.fresh[0][0]
    assert first <= fresh
    assert fresh - first < 4 or point == "after_augmentation"  # of examples, the first one that is missing decides
    following = plain_batches(60, 4, False, first // 4 + len(run.fresh))[first // 4 :]
    assert run.fresh == following


@pytest.mark.usefixtures("read_here", "one_thread")
@pytest.mark.parametrize(("step", "options"), [(5, {}), (11, {"val_check_interval": 3}), (8, {"limit_train_batches": 5})])
def test_a_fit_that_is_killed_and_resumed_has_each_pass_whole_and_one_after_the_other(tmp_path, step, options):
    def callback():
        return on_demand(insertion_point="after_batching")

    # 40 ms of reading for each batch: on a slow host a step takes 15 ms
    options, models = {"delay": 0.04, **options}, [Recorder(delay=0.004) for _ in range(2)]
    with pytest.raises(Killed):
        run_on_demand(callback(), SaveAt(tmp_path, [step], dies=True), model=models[0], **options)
    run = run_on_demand(callback(), model=models[1], ckpt_path=SaveAt(tmp_path, []).path(step), **options)
    batches = models[0].batches[:step] + models[1].batches
    assert len(batches) == 3 * options.get("limit_train_batches", STEPS)
    fresh, loader = fresh_stream(batches), run.trainer.train_dataloader
    assert len(fresh) == loader.counts.fresh < loader.counts.delivered
    passes = [fresh[first : first + LENGTH] for first in range(0, len(fresh), LENGTH)]
    assert [len(set(each)) for each in passes] == [len(each) for each in passes]
