"""Echoes of examples that the cache has in memory are taken from it: an example is in memory once, and a buffer may be large."""

import gc
import re
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader, StagedDataset

LENGTH = 64
EXAMPLE_BYTES = 4096


class Drawing:
    """An example of a class that only pickle knows, so that its objects can be counted."""

    def __init__(self, index):
        self.index = index
        self.pixels = torch.full((EXAMPLE_BYTES // 4,), index, dtype=torch.int32)


class Drawings(StagedDataset):
    """Examples that the augmentation edits in place."""

    def __len__(self):
        return LENGTH

    def load(self, index):
        return Drawing(index)

    def augment(self, example):
        example.pixels += 1
        return example.index, int(example.pixels.sum()) + int(torch.randint(100, ()))


def echoed(cache, *, workers=0, **options):
    plain = DataLoader(Drawings(), batch_size=4, shuffle=True, num_workers=workers)
    given = {"insertion_point": "before_augmentation", "buffer_size": 24, "seed": 3, **options}
    return EchoLoader(plain, 4, cache=cache, **given)


def drawings():
    gc.collect()
    return sum(type(each) is Drawing for each in gc.get_objects())


@pytest.mark.parametrize("reuse", ["each", "memory"])
def test_an_example_that_the_cache_holds_is_in_memory_once(reuse):
    found = []
    for cache in (None, "1MiB"):
        loader = echoed(cache, reuse=reuse)
        for _ in islice(loader, 14):
            pass
        found.append(drawings())
        loader.close()
    assert found[0] >= 12
    assert found[1] == 0


def test_one_that_has_found_no_room_there_is_kept_beside_it():
    loader = echoed({"size": "1MiB", "hold": "loaded"}, reuse="memory", buffer_size=40)
    batches = iter(loader)
    next(batches)
    assert loader.cache_counts is not None
    before = loader.cache_counts.examples
    assert before == 4
    assert loader._run._setting.cache is not None
    loader._run._setting.cache.of_node.store().arena.freeze()
    for _ in islice(batches, 12):
        pass
    assert loader.cache_counts.examples == before
    assert drawings() == loader.counts.fresh - before
    loader.close()


class Unlike(Dataset):
    """Some of its examples have 64 KiB, the others 64 bytes."""

    def __init__(self, large):
        self.large = large

    def __getitem__(self, index):
        return torch.zeros(2**16 if self.large(index) else 64, dtype=torch.uint8)

    def __len__(self):
        return 400


def test_what_is_read_corrects_an_estimate_and_this_is_said_once(caplog):
    caplog.set_level("INFO", "lightning_echo")
    plain = DataLoader(Unlike(lambda index: index % 57 != 0 and index != 399), 8, shuffle=True, collate_fn=len)
    options = {"insertion_point": "after_augmentation", "reuse": "memory", "buffer_size": 196, "seed": 1}
    loader = EchoLoader(plain, 2, cache={"size": "16MiB", "hold": "whole"}, **options)
    for _ in range(3):
        assert len(list(loader)) == 50
    assert loader.cache_counts is not None
    held = loader.cache_counts.examples
    said = [message for message in caplog.messages if "more than was estimated" in message]
    assert len(said) == 1
    for line in (said[0], repr(loader)):
        mebibytes = float(re.search(r"196 live examples, ([\d.]+) MiB in addition to the cache", line)[1])
        assert mebibytes == pytest.approx(min(400 - held, 196) / 16, rel=0.1)
    assert "an example takes more than was estimated: 6" in said[0]
