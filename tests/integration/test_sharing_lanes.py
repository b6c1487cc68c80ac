"""The workers of a reader: as many as its trainings ask for together; they come, go and die, and examples stay the same."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sharing_cache_runs import CACHE, Shots, cached_loader
from sharing_cache_runs import LENGTH as SHOTS
from sharing_runs import (
    Numbers,
    closing,
    end_readers,
    epochs_of,
    examples,
    indices,
    loader_of,
    reader_that_goes_on,
    sleeps,
    status,
    together,
    wait_until,
)
from torch.utils.data import DataLoader, Subset, get_worker_info

from lightning_echo import EchoLoader
from lightning_echo.share.config import new_socket, socket_of
from lightning_echo.share.process import ReaderError

LENGTH = 400

pytestmark = pytest.mark.usefixtures("own_folder")


class ByCalls(Numbers):
    """Reads many examples in one call, and draws for them together."""

    def __getitems__(self, wanted):
        noise = torch.rand(len(wanted))
        return [{**self[index], "noise": one} for index, one in zip(wanted, noise, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, ByCalls])
def test_examples_their_order_and_their_random_numbers_do_not_depend_on_the_number_of_workers(kind):
    found = []
    for workers in (1, 2, 5):
        loader = loader_of(kind(LENGTH), 16, workers=3, window=2**14, reader_workers=workers)
        found.append([examples(epoch) for epoch in closing(loader, 3)()])
        end_readers()
    assert found[0] == found[1] == found[2]
    for epoch in found[0]:
        assert sorted(index for index, _ in epoch) == list(range(LENGTH))


def workers_are(count):
    wait_until(lambda: status()["workers"] == count, f"the reader has {count} workers")


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "numbers"), [("sum", (3, 5, 3)), ("starter", (3, 3, 3)), (2, (2, 2, 2))])
def test_workers_come_and_go_with_the_trainings(wanted, numbers):
    own = {"reader_workers": wanted, "linger_seconds": 5, "window": 2**14, "late": 0}  # no workers read again for one of them
    first, second = (loader_of(Numbers(LENGTH), 8, workers=workers, **own) for workers in (3, 2))
    epoch = iter(first)
    had = [next(epoch)]
    workers_are(numbers[0])
    other = iter(second)
    together(lambda: next(other), lambda: had.extend(next(epoch) for _ in range(3)))
    workers_are(numbers[1])
    second.close()
    had += list(epoch)
    assert sorted(index for batch in had for index in batch["index"].tolist()) == list(range(LENGTH))
    had = list(first)
    workers_are(numbers[2])
    assert sorted(index for batch in had for index in batch["index"].tolist()) == list(range(LENGTH))
    first.close()


@pytest.mark.slow
def test_trainings_that_join_and_leave_while_examples_flow_get_each_example_of_a_pass_once():
    keeper = loader_of(Numbers(LENGTH, seconds=0.0005), 16, window=2**15, linger_seconds=10)
    over, generator = [], random.Random(0)

    def keep():
        epochs = []
        while not over:
            epochs += epochs_of(keeper, 1)
        keeper.close()
        return epochs

    def come_and_go():
        found = []
        try:
            for number in range(8):
                loader = loader_of(
                    *(Numbers(LENGTH, seconds=0.0005), generator.choice([7, 16, 40])),
                    **{"workers": 1 + number % 3, "window": 2**15, "linger_seconds": 10, "join": "pass"},
                )
                found.append(closing(loader, 1)())
        finally:
            over.append(True)
        return found

    kept, others = together(keep, come_and_go)
    passes = [examples(epoch) for epoch in kept]
    for epoch in passes:
        assert sorted(index for index, _ in epoch) == list(range(LENGTH))
    for (epoch,) in others:
        assert examples(epoch) in passes, "the same pass, to the bit"


def children_of(pid):
    """The processes that a reader has started; none if it is gone."""
    try:
        return [int(each) for thread in Path(f"/proc/{pid}/task").iterdir() for each in (thread / "children").read_text().split()]
    except OSError:
        return []


def killing(times, done):
    """Returns what kills so many workers at random moments, each of another reader, until a training is ``done``."""
    generator = random.Random(1)

    def kill():
        reader = None
        for number in range(times):
            reader = reader_that_goes_on(2, done, reader)
            time.sleep(generator.random() * 0.3)
            if done:
                return number
            os.kill(generator.choice(children_of(reader)), signal.SIGKILL)
        return times

    return kill


@pytest.mark.slow
def test_workers_that_are_killed_at_any_moment_cost_nothing():
    share, done = {"workers": 2, "window": 2**14, "wait_for": 2, "linger_seconds": 5}, []
    loaders = [loader_of(Numbers(LENGTH, seconds=0.0005), size, **share) for size in (8, 20)]
    first, second, kills = together(*(closing(each, 12, sleeps(0.002), done) for each in loaders), killing(3, done))
    assert kills
    assert [sorted(indices(epoch)) for epoch in first] == [list(range(LENGTH))] * 12
    assert [examples(epoch) for epoch in first] == [examples(epoch) for epoch in second]


@pytest.mark.slow
def test_folds_that_share_workers_and_a_cache_lose_nothing_and_get_nothing_else_when_workers_are_killed():
    parts = [[index for index in range(SHOTS) if index % 3 != number] for number in range(2)]

    def trainings(cache, done, before_batch):
        share = {"workers": 2, "window": 2**14, "wait_for": 2, "linger_seconds": 5}
        loaders = [cached_loader(Subset(Shots(), part), 8 + number, cache, **share) for number, part in enumerate(parts)]
        return [closing(loader, 10, before_batch, done) for loader in loaders]

    done = []
    *found, kills = together(*trainings(CACHE, done, sleeps(0.004)), killing(3, done))
    assert kills
    end_readers()
    assert found == together(*trainings(None, [], sleeps(0.0)))
    for part, epochs in zip(parts, found, strict=True):
        assert [sorted(indices(epoch)) for epoch in epochs] == [part] * 10


TWO = {"wait_for": 2}


def test_a_connection_that_a_reader_had_when_it_began_and_has_no_more_keeps_no_worker_out():
    own = {"linger_seconds": 5, "window": 2**14, "late": 0}  # no workers read again for the third, which takes no more
    loaders = [loader_of(Numbers(LENGTH), 8, workers=workers, **own, **more) for workers, more in ((1, TWO), (1, TWO), (3, {}))]
    epochs = [iter(loader) for loader in loaders]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(next, epochs[0])
        wait_until(lambda: Path(socket_of("data")).exists(), "there is a reader, which waits for the second training")
        with new_socket() as connection:
            connection.connect(socket_of("data"))
            next(epochs[1])
        first.result()
    next(epochs[2])
    workers_are(5)
    for loader in loaders:
        loader.close()


class OfWorker(Numbers):
    """An example has the worker that has read it, as the user's code sees it."""

    def __getitem__(self, index):
        time.sleep(0.002)
        info = get_worker_info()
        return {"index": index, "at": torch.tensor([info.id, info.num_workers, self.told])}


def tells(worker):
    get_worker_info().dataset.told = worker


def test_the_users_code_sees_another_number_in_each_worker():
    plain = DataLoader(OfWorker(LENGTH), 8, num_workers=3, worker_init_fn=tells)
    loader = EchoLoader(plain, 1, share={"name": "data", "linger_seconds": 0.5, "window": "1MiB"}, seed=0)
    seen = {tuple(row) for batch in loader for row in batch["at"].tolist()}
    loader.close()
    assert seen == {(number, 3, number) for number in range(3)}


class Large(Numbers):
    """One example is nearly as large as the window."""

    def __getitem__(self, index):
        size = 60_000 if index % 50 == 7 else 64
        return {"index": index, "noise": torch.rand(()), "data": torch.full((size,), index % 251, dtype=torch.uint8)}


def test_an_example_that_is_nearly_as_large_as_the_window_is_handed_over_by_any_number_of_workers():
    loaders = [
        EchoLoader(
            DataLoader(Large(200), 1, num_workers=workers),
            *(1,),
            share={"name": "data", "linger_seconds": 0.5, "window": "64KiB", "wait_for": 2},
            seed=0,
        )
        for workers in (3, 2)
    ]

    def take(loader):
        found = [(int(batch["index"]), batch["data"]) for batch in loader]
        loader.close()
        return found

    for found in together(*(lambda loader=loader: take(loader) for loader in loaders)):
        assert [index for index, _ in found] == list(range(200))
        for index, data in found:
            assert torch.equal(data[0], Large(200)[index]["data"])


def dies(worker):
    if worker == 1 and get_worker_info().num_workers > 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_workers_that_die_whenever_they_begin_are_an_error_and_no_endless_row():
    plain = DataLoader(Numbers(64), 8, num_workers=2, worker_init_fn=dies)
    loader = EchoLoader(plain, 1, share={"name": "data", "linger_seconds": 0.5, "window": "1MiB"}, seed=0)
    with pytest.raises(ReaderError, match=r"has died twice"):
        epochs_of(loader, 100)
    loader.close()
