"""Echo on demand over a cache that holds a part of the data: what it holds comes first, and does not hold up the rest."""

import os
import time
from bisect import bisect_right, insort
from collections import deque
from itertools import islice

import pytest
import torch
from demand_cases import Recorder, batches_of
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, StagedDataset

pytestmark = pytest.mark.timeout(120)

SIZE = 20_000  # bytes of an example


class Slow(StagedDataset):
    """A read waits for so many seconds."""

    def __init__(self, length, seconds):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def read(self, index):
        time.sleep(self.seconds)
        return bytes([index % 256]) * SIZE

    def decode(self, raw):
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def augment(self, example):
        return example[:8].clone()


class Stopped(Slow):
    """Reads of one index wait while a file exists."""

    def __init__(self, length, index, stop):
        super().__init__(length, 0.0)
        self.index, self.stop = index, stop

    def read(self, index):
        while index == self.index and os.path.exists(self.stop):
            time.sleep(0.002)
        return super().read(index)


def most_overtaken(fresh):
    """The largest number of later positions that were delivered before one, whether that has come since or not."""
    seen, most = [], 0
    for position in fresh:
        most = max(most, len(seen) - bisect_right(seen, position))
        insort(seen, position)
    missing = set(range(seen[-1])) - set(seen)
    return max([most, *(len(seen) - bisect_right(seen, position) for position in missing)])


def partly_cached(dataset, share, reads=2, **options):
    """A loader with one worker, so that positions are told in their order. The cache holds so large a part of the data."""
    options = {"insertion_point": "before_augmentation", "reads_in_flight": reads, "seed": 0, **options}
    loader = DataLoader(dataset, 8, num_workers=1, timeout=options.pop("timeout", 0))
    return EchoLoader(loader, "demand", cache=int(share * len(dataset) * SIZE), **options)


@pytest.mark.parametrize("share", [0.5, 0.98])
def test_what_a_cache_lacks_and_what_it_holds_overtake_each_other_within_the_bound(share, monkeypatch):
    length, reads, recorder = 500, 2, Recorder(monkeypatch)
    loader = partly_cached(Slow(length, 0.002), share, reads)
    for _ in islice(batches_of(loader), 3 * length // 8):
        time.sleep(0.01)  # on average the reads of a batch take 8 ms at most
    assert loader.cache_counts.hits > 0.8 * share * (loader.counts.fresh - length)
    assert most_overtaken(recorder.fresh) <= 32 * reads
    recorder.check(loader)
    loader.close()


@pytest.mark.slow
def test_a_slow_read_is_overtaken_within_the_bound_also_by_what_a_cache_holds(tmp_path, monkeypatch):
    length, reads, recorder = 500, 2, Recorder(monkeypatch)
    loader = partly_cached(Stopped(length, length - 1, tmp_path / "stop"), 0.5, reads, max_factor=1, timeout=4)
    run = batches_of(loader)
    deque(islice(run, length // 8), maxlen=0)
    assert loader.cache_counts.is_full
    (tmp_path / "stop").touch()
    with pytest.raises(RuntimeError, match=f"example {length - 1} of the data set is not read"):
        deque(run, maxlen=0)
    slow = 2 * length - 1 if length - 1 in recorder.fresh else length - 1
    assert slow not in recorder.fresh
    assert 8 <= sum(position > slow for position in recorder.fresh) <= 32 * reads
    loader.close()
