"""The attack on sharing: readers, their workers and trainings are killed at random moments, with folds and with a cache.

What trainings get is compared with one plain run: without kills, cache, echoes or folds. Of the examples of that run, in their
order and with their noise, a training gets those of its part, each once. More kills, for minutes: ``make soak``.
"""

import os
import random
import signal
import time
from contextlib import contextmanager

import pytest
from sharing_cache_runs import CACHE, LENGTH, Shots, cached_loader
from sharing_runs import end_readers, epochs_of, examples, in_process, rows, status, together, wait_until
from soak import children_of
from torch.utils.data import Subset

from lightning_echo import CacheConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.filterwarnings("ignore:.*has waited"),  # on demand: another reader takes long to start on a busy machine
]

SHARE = {"workers": 2, "window": 2**14, "linger_seconds": 5, "wait_seconds": 500}
BETWEEN = 100  # examples of each training between two kills: more than the window holds, so another reader has read some of them
ALL = range(LENGTH)
FOLDS = [[index for index in ALL if index % 5 != fold] for fold in range(3)]
LASTING = {  # part, batch size, factor
    "all": [(ALL, 8, 1), (ALL, 5, 1), (ALL, 4, "demand")],
    "folds": [(FOLDS[0], 8, 1), (FOLDS[1], 5, 1), (FOLDS[2], 4, 2)],
}
CACHES = {
    "no cache": lambda folder: None,
    "in memory": lambda folder: CACHE,
    "in a file": lambda folder: CacheConfig(CACHE, path=str(folder), name="train"),
}
VICTIMS = ("training", "reader", "worker", "both", "reader", "worker", "training")


def loader_on(part, size, cache, factor=1, **share):
    data = Shots() if part is ALL else Subset(Shots(), part)
    options = {"buffer_size": 16} if factor == 2 else {}
    return cached_loader(data, size, cache, factor=factor, options=options, **SHARE, **share)


def comes(connection, part, cache, late):
    """A training in a process of its own, which says what it gets."""
    loader = loader_on(part, 8, cache, late=late)
    while True:
        for batch in loader:
            connection.send(rows(batch))


class Beside:
    """A training that will be killed, and what it has had."""

    def __init__(self, process, connection):
        self.had, self._process, self._connection = [], process, connection

    def hear(self, seconds=0.0):
        """Takes what it says, for a while. A full pipe would hold it up, and with it all others."""
        end = time.monotonic() + seconds
        try:
            while self._connection.poll(max(end - time.monotonic(), 0)):
                self.had += self._connection.recv()
        except (EOFError, OSError):  # it was killed, perhaps in the middle of a message
            pass

    def kill(self):
        assert self._process.is_alive(), "it has ended by itself"
        self._process.kill()
        self._process.join()
        self.hear()


@contextmanager
def beside(part, cache, late):
    with in_process(comes, part, cache, late) as (process, connection):
        yield Beside(process, connection)


def kill_reader_or_worker(victim, generator):
    pid = status()["pid"]
    os.kill(generator.choice(children_of(pid)) if victim == "worker" else pid, signal.SIGKILL)


def stream(passes):
    """The examples of so many passes, in the order in which a training gets them that is alone and takes all of them."""
    end_readers()
    loader = cached_loader(Shots(), 16, None, linger_seconds=0)
    try:
        return [example for epoch in epochs_of(loader, passes) for example in examples(epoch)]
    finally:
        loader.close()


def of_part(part, every):
    part = set(part)
    return [example for example in every if example[0] in part]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("parts", LASTING)
def test_whoever_is_killed_at_random_moments_each_training_gets_its_part_once_and_nothing_else(tmp_path, parts, cache):
    generator, lasting, cache = random.Random(f"{parts}, {cache}"), LASTING[parts], CACHES[cache](tmp_path)
    loaders = [loader_on(part, size, cache, factor, wait_for=len(lasting)) for part, size, factor in lasting]
    found, over, killed = [[] for _ in lasting], [], []  # batches of each; why it is over; part and examples of those beside

    def training(number):
        def run():
            try:
                while not over:
                    for batch in loaders[number]:
                        time.sleep(0.01)
                        found[number].append(rows(batch))
            finally:
                over.append("a training has ended")
                loaders[number].close()

        return run

    def go_on(*others):
        """Waits until all have had examples that they did not have before."""
        had = [*found, *(other.had for other in others)]
        before = [len(each) for each in had]
        least = [BETWEEN // size for _, size, _ in lasting] + [BETWEEN for _ in others]

        def is_so():
            for other in others:
                other.hear()
            return over or all(len(each) - was >= more for each, was, more in zip(had, before, least, strict=True))

        wait_until(is_so, "all have got more")
        assert not over

    def attack():
        try:
            go_on()
            for victim in VICTIMS:
                part = ALL if parts == "all" else sorted(generator.sample(ALL, generator.randrange(LENGTH // 4, LENGTH)))
                with beside(part, cache, generator.choice((0.1, 1.0))) as other:
                    other.hear(generator.random())  # before it has come, while it enters, within a batch, between two
                    if victim != "training":
                        kill_reader_or_worker(victim, generator)
                        if victim == "both":  # perhaps while it starts a reader
                            other.hear(0.5 * generator.random())
                        else:
                            go_on(other)
                    other.kill()
                killed.append((part, other.had))
                go_on()
        finally:
            over.append("the attack has ended")

    together(*map(training, range(len(lasting))), attack)
    assert over[0] == "the attack has ended"
    every = stream(3 + max(loader.counts.fresh // len(part) for loader, (part, *_) in zip(loaders, lasting, strict=True)))
    for loader, batches, (part, _, factor) in zip(loaders, found, lasting, strict=True):
        assert all(len({index for index, _ in batch}) == len(batch) for batch in batches), "an index twice in a batch"
        had = [example for batch in batches for example in batch]
        fresh = list(dict.fromkeys(had))
        expected = of_part(part, every)[: len(fresh)]
        assert fresh == expected if factor != 2 else set(fresh) == set(expected)
        assert fresh == had if factor == 1 else len(fresh) < len(had)
        assert (loader.counts.fresh, loader.counts.delivered) == (len(fresh), len(had))
        looked_up = loader.cache_counts
        assert looked_up is None or looked_up.hits + looked_up.misses == len(fresh)
    for part, had in killed:
        expected = of_part(part, every)
        first = expected.index(had[0]) if had else 0
        assert had == expected[first : first + len(had)]
    assert sum(len(had) for _, had in killed) > 2 * BETWEEN
