"""Loaders that echo after reading: what their buffer holds and weighs, and what reading took."""

import os

import pytest
from raw_cases import RANDOM, Letters
from torch.utils.data import DataLoader
from torchvision import datasets

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.pipeline.worker import LiveExamples, Request
from lightning_echo.split.prove import find_split, make_stages, weighed


def held_bytes(cache):
    """The bytes of all raw items in a cache, which have to be nothing but bytes and targets."""
    assert {(type(data), type(target)) for data, target in cache._held.values()} == {(bytes, int)}
    return sum(len(data) for data, _ in cache._held.values())


def test_what_is_held_are_the_bytes_of_the_files(images):
    dataset = datasets.ImageFolder(images, RANDOM)
    sizes = [os.path.getsize(path) for path, _ in dataset.samples]
    cache = LiveExamples(dataset, lambda dataset: make_stages(dataset, raw=True), 0, list)
    cache.fetch(Request(0, [0, 1, 2], 3, [4, 5, 6], b"\1\1\1"))
    assert held_bytes(cache) == sizes[4] + sizes[5] + sizes[6]
    cache.fetch(Request(1, [3, 0], 1, [7, 4], b"\1\0", forget=(1,)))
    assert held_bytes(cache) == sizes[6] + sizes[7]
    decoded = 160 * 120 * 4  # Pillow's RGB
    assert max(sizes) < decoded / 10, "or the test shows nothing"


def test_the_loader_says_how_much_it_is_and_sizes_its_buffer_by_it(images):
    dataset = datasets.ImageFolder(images, RANDOM)
    sizes = [os.path.getsize(path) for path, _ in dataset.samples]
    loader, earlier = (
        EchoLoader(DataLoader(dataset, batch_size=4), 2, insertion_point=point) for point in ("after_read", "before_augmentation")
    )
    raw = weighed(dataset, find_split(dataset, raw=True)).example_bytes
    assert max(sizes[0], sizes[-1]) < raw < max(sizes) + 200  # of those that were looked at
    live = loader.buffer_size
    assert repr(loader) == (
        "after_read, factor 2: reuse [read], redo [decode, Resize, RandomHorizontalFlip, PILToTensor]; "
        f"{live} live examples, {raw * live / 2**20:.3g} MiB; 0 workers"
    )
    resized = weighed(dataset, find_split(dataset)).example_bytes
    assert resized >= 12 * 16 * 4 > 0
    assert f"{resized * live / 2**20:.3g} MiB" in repr(earlier)


def test_where_memory_is_short_for_what_is_decoded_the_bytes_fit(images, monkeypatch):
    plain = DataLoader(datasets.ImageFolder(images), batch_size=4)
    decoded = find_split(plain.dataset).example_bytes
    monkeypatch.setattr("lightning_echo.loader.sizing.free_memory_bytes", lambda: 4 * decoded)
    with pytest.raises(ValueError, match="buffer_size=8 cannot fit"):
        EchoLoader(plain, 2, insertion_point="before_augmentation", buffer_size=8)
    assert EchoLoader(plain, 2, insertion_point="after_read", buffer_size=8).buffer_size == 8


def test_reading_is_the_source_and_decoding_the_rest_of_the_time(monkeypatch):
    """A clock of its own: reading takes 1, decoding 10, augmenting 100."""
    now = [0.0]

    class Clocked(Letters):
        def read(self, index):
            now[0] += 1
            return b"%d" % index

        def decode(self, raw):
            now[0] += 10
            return int(raw)

        def augment(self, example):
            now[0] += 100
            return example

    loader = EchoLoader(DataLoader(Clocked(), batch_size=4), 2, insertion_point="after_read", seed=0)
    monkeypatch.setattr("lightning_echo.pipeline.worker.perf_counter", lambda: now[0])
    list(loader)
    assert loader.seconds.source == loader.counts.fresh
    assert loader.seconds.rest == 110 * loader.counts.delivered
