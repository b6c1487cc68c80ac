"""Readers with a cache, and their workers, that are killed while trainings take examples: nothing is lost, twice or other."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from sharing_cache_runs import CACHE, LENGTH, Shots, cached_loader
from sharing_runs import closing, epochs_of, examples, indices, kill_reader, reader_that_goes_on, sleeps, together

from lightning_echo import CacheConfig

pytestmark = pytest.mark.usefixtures("own_folder")

PACE = sleeps(0.004)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_reader_that_is_killed_is_followed_by_one_whose_cache_begins_empty_and_that_is_said(caplog):
    loader = cached_loader(Shots(), 8, window=2**14)
    had = epochs_of(loader, 2, PACE)
    assert loader.cache_counts.examples == 127
    kill_reader()
    had += epochs_of(loader, 2, PACE)
    assert [sorted(indices(epoch)) for epoch in had] == [list(range(LENGTH))] * 4
    assert "the cache of the reader that has died had 127 examples, and that of the next one begins with 0" in caplog.text
    loader.close()
    plain = closing(cached_loader(Shots(), 8, None, window=2**14), 4)()
    assert [examples(epoch) for epoch in had] == [examples(epoch) for epoch in plain]


def train_until(loader, over):
    """Trains whole epochs until that is over."""
    epochs = []
    try:
        while not over:
            epochs += epochs_of(loader, 1, PACE)
    finally:
        loader.close()
        over.append("a training has ended")
    return epochs


def check_kills(kills, cache, seed):
    """Kills readers and workers at random moments, under two trainings; they have what trainings have without kills and cache."""
    generator, over = random.Random(seed), []
    options = {"workers": 2, "window": 2**14, "linger_seconds": 5, "wait_for": 2}
    loaders = [cached_loader(Shots(), size, cache, **options) for size in (8, 5)]

    def kill():
        reader = None
        for number in range(kills):
            reader = reader_that_goes_on(2, over, reader)
            time.sleep(generator.random() * 0.5)  # while it fills the cache, or while it has a full one
            assert not over
            os.kill(generator.choice(children_of(reader)) if number % 2 else reader, signal.SIGKILL)
        over.append("all kills")

    first, second, _ = together(*(lambda loader=loader: train_until(loader, over) for loader in loaders), kill)
    assert over[0] == "all kills"
    most = max(first, second, key=len)
    plain = closing(cached_loader(Shots(), 8, None), len(most))()
    for epochs in (first, second):
        assert [sorted(indices(epoch)) for epoch in epochs] == [list(range(LENGTH))] * len(epochs)
        assert [examples(epoch) for epoch in epochs] == [examples(epoch) for epoch in plain[: len(epochs)]]


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True], ids=["in memory", "in a file"])
def test_readers_and_workers_that_are_killed_at_random_moments_lose_nothing(tmp_path, is_kept):
    check_kills(4, CacheConfig(CACHE, path=str(tmp_path), name="train") if is_kept else CACHE, seed=is_kept)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_kills_at_random_moments_lose_nothing():
    check_kills(20, CACHE, seed=7)
