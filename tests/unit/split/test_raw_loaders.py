"""Loaders that echo after reading: what their buffer holds and weighs, which point is chosen, what it took."""

import os
from collections import Counter

import pytest
from raw_cases import RANDOM, NotAugmented, Raws, Words, noisy
from torch.utils.data import DataLoader
from torchvision import datasets

from lightning_echo.data.copies import copy_example
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.pipeline.worker import ExampleCache, Request
from lightning_echo.split.prove import find_split, make_stages, weighed
from lightning_echo.split.staged import StagedDataset


def held_bytes(cache):
    """The bytes of all raw items in a cache, which have to be nothing but bytes and targets."""
    total = 0
    for data, target in cache._held.values():
        assert (type(data), type(target)) == (bytes, int)
        total += len(data)
    return total


class TestMemory:
    def test_what_is_held_are_the_bytes_of_the_files(self, images):
        dataset = datasets.ImageFolder(images, RANDOM)
        sizes = [os.path.getsize(path) for path, _ in dataset.samples]
        cache = ExampleCache(dataset, lambda dataset: make_stages(dataset, raw=True), 0, list)
        cache.fetch(Request(0, [0, 1, 2], 3, [4, 5, 6], b"\1\1\1"))
        assert held_bytes(cache) == sizes[4] + sizes[5] + sizes[6]
        cache.fetch(Request(1, [3, 0], 1, [7, 4], b"\1\0", forget=(1,)))
        assert held_bytes(cache) == sizes[6] + sizes[7]
        decoded = 160 * 120 * 4  # Pillow's RGB
        assert max(sizes) < decoded / 10, "or the test shows nothing"

    def test_an_echo_copies_no_bytes(self, images):
        raw = make_stages(datasets.ImageFolder(images), raw=True).load(0)
        assert copy_example(raw)[0] is raw[0]
        assert copy_example({"image": raw[0]})["image"] is raw[0]

    @pytest.mark.parametrize("options", [{"reuse": "each"}, {}])
    def test_the_loader_says_how_much_it_is_and_sizes_its_buffer_by_it(self, images, options):
        dataset = datasets.ImageFolder(images, RANDOM)
        sizes = [os.path.getsize(path) for path, _ in dataset.samples]
        loaders = {
            point: EchoLoader(DataLoader(dataset, batch_size=4), 2, insertion_point=point, **options)
            for point in ("after_read", "before_augmentation")
        }
        raw = weighed(dataset, find_split(dataset, raw=True)).example_bytes
        assert max(sizes[0], sizes[-1]) < raw < max(sizes) + 200  # of those that were looked at
        live = loaders["after_read"].buffer_size
        assert repr(loaders["after_read"]) == (
            "after_read, factor 2: reuse [read], redo [decode, Resize, RandomHorizontalFlip, PILToTensor]; "
            f"{live} live examples, {raw * live / 2**20:.3g} MiB; 0 workers"
        )
        resized = weighed(dataset, find_split(dataset)).example_bytes
        assert resized >= 12 * 16 * 4 > 0
        assert f"{resized * live / 2**20:.3g} MiB" in repr(loaders["before_augmentation"])

    def test_where_memory_is_short_for_what_is_decoded_the_bytes_fit(self, images, monkeypatch):
        dataset = datasets.ImageFolder(images)
        decoded = find_split(dataset).example_bytes
        monkeypatch.setattr("lightning_echo.loader.sizing.free_memory_bytes", lambda: 4 * decoded)
        with pytest.raises(ValueError, match="buffer_size=8 cannot fit"):
            EchoLoader(DataLoader(dataset, batch_size=4), 2, insertion_point="before_augmentation", buffer_size=8)
        loader = EchoLoader(DataLoader(dataset, batch_size=4), 2, insertion_point="after_read", buffer_size=8)
        assert loader.buffer_size == 8


class TestChoice:
    def test_auto_never_takes_it(self, images):
        for dataset, point in [
            (datasets.ImageFolder(images, RANDOM), InsertionPoint.before_augmentation),
            (StagedDataset.of(Raws(), decode=int, augment=noisy), InsertionPoint.before_augmentation),
            (Words(), InsertionPoint.after_augmentation),  # decoding draws
            (NotAugmented(), InsertionPoint.after_augmentation),
        ]:
            assert EchoLoader(DataLoader(dataset, batch_size=2), 2).insertion_point is point

    def test_each_use_runs_what_is_redone_and_reading_runs_once(self):
        calls = Counter()

        class Counted(StagedDataset):
            def read(self, index):
                calls["read"] += 1
                return b"%d" % index

            def decode(self, raw):
                calls["decode"] += 1
                return int(raw)

            def augment(self, example):
                calls["augment"] += 1
                return example

            def __len__(self):
                return 40

        loader = EchoLoader(DataLoader(Counted(), batch_size=8, shuffle=True), 4, insertion_point="after_read", seed=0)
        calls.clear()
        for _ in range(8):
            list(loader)
        assert loader.counts.delivered == calls["decode"] == calls["augment"] == 320
        assert calls["read"] == loader.counts.fresh <= 320 / 4 + loader.buffer_size

    def test_reading_is_the_source_and_decoding_the_rest_of_the_time(self, monkeypatch):
        """A clock of its own: reading takes 1, decoding 10, augmenting 100."""
        now = [0.0]

        class Clocked(StagedDataset):
            def read(self, index):
                now[0] += 1
                return b"%d" % index

            def decode(self, raw):
                now[0] += 10
                return int(raw)

            def augment(self, example):
                now[0] += 100
                return example

            def __len__(self):
                return 8

        loader = EchoLoader(DataLoader(Clocked(), batch_size=4), 2, insertion_point="after_read", seed=0)
        monkeypatch.setattr("lightning_echo.pipeline.worker.perf_counter", lambda: now[0])
        list(loader)
        assert loader.seconds.source == loader.counts.fresh
        assert loader.seconds.rest == 110 * loader.counts.delivered
