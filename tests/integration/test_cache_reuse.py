"""Echoes of examples that the cache has in memory are taken from it: an example is in memory once, and a buffer may be large."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.loader import sizing

LENGTH = 64
EXAMPLE_BYTES = 4096


class Drawing:
    """An example of a class that only pickle knows, so that its objects can be counted."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pixels = torch.full((EXAMPLE_BYTES // 4,), index, dtype=torch.int32)


class Drawings(StagedDataset):
    """Examples that the augmentation edits in place."""

    def __len__(self) -> int:
        return LENGTH

    def load(self, index: int) -> Drawing:
        return Drawing(index)

    def augment(self, example: Drawing) -> tuple[int, int]:
        example.pixels += 1
        return example.index, int(example.pixels.sum()) + int(torch.randint(100, ()))


def echoed(cache: Any, *, workers: int = 0, **options: Any) -> EchoLoader:
    plain = DataLoader(Drawings(), batch_size=4, shuffle=True, num_workers=workers)
    given = {"insertion_point": "before_augmentation", "buffer_size": 24, "seed": 3, **options}
    return EchoLoader(plain, 4, cache=cache, **given)


def drawings() -> int:
    gc.collect()
    return sum(type(each) is Drawing for each in gc.get_objects())


@pytest.mark.parametrize("reuse", ["each", "memory"])
def test_an_example_that_the_cache_holds_is_in_memory_once(reuse: str) -> None:
    found = []
    for cache in (None, "1MiB"):
        loader = echoed(cache, reuse=reuse)
        for _ in islice(loader, 14):
            pass
        found.append(drawings())
        loader.close()
    assert found[0] >= 12
    assert found[1] == 0


def test_one_that_has_found_no_room_there_is_kept_beside_it() -> None:
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


def test_on_a_disk_it_is_not_in_memory_and_so_a_copy_is_kept(tmp_path: Any) -> None:
    loader = echoed({"size": "1MiB", "path": str(tmp_path)}, reuse="memory")
    for _ in islice(loader, 12):
        pass
    assert drawings() >= 12
    loader.close()


@pytest.mark.parametrize("reuse", ["each", "memory"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_and_without_it_also_resumed(reuse: str, workers: int) -> None:
    def batches(loader: EchoLoader, number: int) -> list[list[list[int]]]:
        found: list[list[list[int]]] = []
        while len(found) < number:
            found += [[part.tolist() for part in batch] for batch in islice(loader, number - len(found))]
        return found

    plain, cached = (echoed(cache, reuse=reuse, workers=workers) for cache in (None, "1MiB"))
    assert batches(cached, 30) == batches(plain, 30)
    resumed = echoed("1MiB", reuse=reuse, workers=workers)
    resumed.load_state_dict(cached.state_dict())
    expected = batches(plain, 60)
    assert batches(resumed, 60) == expected
    assert batches(cached, 60) == expected
    assert cached.counts == plain.counts  # what the cache returns for an echo is not read again
    for loader in (plain, cached, resumed):
        loader.close()


class Kibibytes(Dataset[torch.Tensor]):
    """Examples of 1 KiB."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index))

    def __len__(self) -> int:
        return 2000


@pytest.mark.parametrize(
    ("size", "options", "live"),
    [
        (None, {}, 64),  # a tenth of 1,000 KiB, as a power of two of batches
        ("1MiB", {}, 64),  # 1,000 examples find no room there, and there is none for them here
        ("3MiB", {}, (2000 - 8) // 2),  # all of them do: half of a pass
        ("3MiB", {"buffer_size": 0.2}, 2000 - 8),
        ("1900KiB", {}, 64),  # more are left than a tenth of what is free has room for
        ("1900KiB", {"buffer_size": 0.9}, 2000 - 8),  # there is room for those
        ("3MiB", {"buffer_size": 40}, 40),
        ("3MiB", {"buffer_size": 0.2, "reuse": "each"}, 200),  # which has to be filled first
    ],
)
def test_the_size_of_the_buffer_counts_what_the_cache_has(
    monkeypatch: pytest.MonkeyPatch, size: str | None, options: dict[str, Any], live: int
) -> None:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 1000 * 2**10 + (0 if size is None else 3 * 2**20))
    plain = DataLoader(Kibibytes(), batch_size=8, shuffle=True)
    cache = None if size is None else {"size": size, "hold": "whole"}
    monkeypatch.setattr("lightning_echo.cache.loader_cache.LoaderCache.memory_to_come", 3 * 2**20)
    loader = EchoLoader(plain, 4, insertion_point="after_augmentation", seed=3, cache=cache, **{"reuse": "memory", **options})
    next(iter(loader))
    assert loader.buffer_size == live
    loader.close()


def kibibytes(monkeypatch: pytest.MonkeyPatch, point: str, **options: Any) -> EchoLoader:
    """A loader that is settled, with 4,000 KiB that are free beside its cache."""
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 4000 * 2**10)
    monkeypatch.setattr("lightning_echo.cache.loader_cache.LoaderCache.memory_to_come", 0)
    plain = DataLoader(Kibibytes(), batch_size=8, shuffle=True)
    loader = EchoLoader(plain, 4, insertion_point=point, seed=3, reuse="memory", **options)
    loader.settle()
    return loader


def test_of_whole_batches_a_cache_of_examples_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = kibibytes(monkeypatch, "after_batching", buffer_size=0.2, cache={"size": "3MiB", "hold": "whole"})
    assert loader.buffer_size == 100


def test_the_line_about_a_loader_says_what_is_live_beside_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(size: str, live: int) -> str:
        cache = {"size": size, "hold": "whole"}
        return repr(kibibytes(monkeypatch, "after_augmentation", buffer_size=live, cache=cache)).partition(" live examples, ")[2]

    assert said("3MiB", 1992).startswith("0 MiB in addition to the cache;")
    left = 2000 - int(1.5 * 2**20) // (1024 + 128)  # a record has 128 bytes more
    assert said("1.5MiB", 1992).startswith(f"{left / 1024:.3g} MiB in addition to the cache;")
    assert said("1.5MiB", 40).startswith("0.0391 MiB;")


class Unlike(Dataset[torch.Tensor]):
    """Some of its examples have 64 KiB, the others 64 bytes."""

    def __init__(self, large: Callable[[int], bool]) -> None:
        self.large = large

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2**16 if self.large(index) else 64, dtype=torch.uint8)

    def __len__(self) -> int:
        return 400


@pytest.mark.parametrize("size", [None, "2MiB"], ids=["without a cache", "beside a cache"])
def test_memory_is_not_that_of_the_first_and_the_last_example(size: str | None) -> None:
    cache = None if size is None else {"size": size, "hold": "whole"}
    plain = DataLoader(Unlike(lambda index: 0 < index < 399), 8, shuffle=True, collate_fn=len)
    loader = EchoLoader(plain, 2, insertion_point="after_augmentation", seed=1, cache=cache, buffer_size=64)
    assert len(list(loader)) == 50
    assert " 64 live examples, 4 MiB;" in repr(loader)


def test_what_is_read_corrects_an_estimate_and_this_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_echo")
    plain = DataLoader(Unlike(lambda index: index % 57 != 0 and index != 399), 8, shuffle=True, collate_fn=len)
    options: dict[str, Any] = {"insertion_point": "after_augmentation", "reuse": "memory", "buffer_size": 196, "seed": 1}
    loader = EchoLoader(plain, 2, cache={"size": "16MiB", "hold": "whole"}, **options)
    for _ in range(3):
        assert len(list(loader)) == 50
    assert loader.cache_counts is not None
    held = loader.cache_counts.examples
    said = [message for message in caplog.messages if "more than was estimated" in message]
    assert len(said) == 1
    for line in (said[0], repr(loader)):
        mebibytes = float(re.search(r"196 live examples, ([\d.]+) MiB in addition to the cache", line)[1])  # type: ignore[index]
        assert mebibytes == pytest.approx(min(400 - held, 196) / 16, rel=0.1)
    assert "an example takes more than was estimated: 6" in said[0]
