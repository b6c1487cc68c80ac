"""A cache in a process with limits (``ulimit``): the training continues, the cache holds what it may, and this is said."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import CachedDataset, EchoLoader

COUNT, SIZE = 60, 100_000
MIB = 2**20


class Numbers(Dataset[torch.Tensor]):
    """Each value of an example tells whose it is."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIZE,), index % 251, dtype=torch.uint8)

    def __len__(self) -> int:
        return COUNT


def limit_address_space() -> None:
    most = psutil.Process().memory_info().vms + 500 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limit_files(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def epochs_of(cache: dict[str, Any], workers: int) -> tuple[Any, list[str]]:
    """Trains for three epochs. Returns the counts, and what was warned.

    The order is the same in each: in a shuffled one, a worker may need an example that another worker still reads.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plain = DataLoader(Numbers(), 4, num_workers=workers)
        loader = EchoLoader(plain, 1, insertion_point="after_augmentation", seed=1, cache={"hold": "whole", **cache})
        for _ in range(3):
            batches = list(loader)
            assert all((batch == batch[:, :1]).all() for batch in batches)
            assert sorted(torch.cat(batches)[:, 0].tolist()) == list(range(COUNT))
        counts = loader.cache_counts
        loader.close()
    return counts, [str(each.message) for each in said if "cache" in str(each.message)]


def under(limit: Callable[[], None], act: Callable[[], Any]) -> Any:
    """Acts in a process of its own, with a limit."""
    receives, sends = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        limit()
        try:
            sends.send(act())
        except Exception as error:
            sends.send(error)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sends.close()
    result = receives.recv()
    process.join(60)
    assert process.exitcode == 0
    if isinstance(result, Exception):
        raise result
    return result


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_larger_than_the_address_space_holds_all(workers: int) -> None:
    counts, said = under(limit_address_space, lambda: epochs_of({"size": "1GiB"}, workers))
    assert (counts.examples, counts.hits, counts.misses, counts.size) == (COUNT, 2 * COUNT, COUNT, 2**30)
    assert said == []


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["memory", "disk"])
def test_a_cache_larger_than_the_largest_file_holds_what_it_may_and_says_so_once(is_on_disk: bool, tmp_path: Path) -> None:
    where = {"path": str(tmp_path)} if is_on_disk else {}
    counts, said = under(lambda: limit_files(2 * MIB), lambda: epochs_of({"size": "8MiB", **where}, 2))
    assert counts.examples == (2 * MIB - 2 * 4096) // (SIZE + 200), "header, index and records take the file"
    assert counts.hits == 2 * counts.examples
    assert len(said) == 1
    assert "the cache has 1.99 MiB and not cache.size='8MiB'" in said[0]
    assert "ulimit -f" in said[0]


def test_a_kept_cache_is_made_as_large_as_a_file_may_be(tmp_path: Path) -> None:
    options = {"size": "8MiB", "path": str(tmp_path), "name": "kept"}
    counts, said = under(lambda: limit_files(2 * MIB), lambda: epochs_of(options, 0))
    assert counts.examples == (2 * MIB - 2 * 4096) // (SIZE + 200)
    assert len(said) == 1
    assert "cache.size='8MiB' is not used: the cache 'kept' was made with 1.99 MiB" in said[0]


@pytest.mark.parametrize(
    "make", [lambda: epochs_of({"size": "8MiB"}, 0), lambda: CachedDataset(Numbers(), {"size": "8MiB", "hold": "whole"})]
)
def test_where_not_even_the_index_may_be_written_the_error_says_what_to_do(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"the index of 62 examples .*File too large.*raise its limits \(ulimit\), or leave"):
        under(lambda: limit_files(100), make)


def lowered_in_between() -> tuple[Any, list[str]]:
    cached = CachedDataset(Numbers(), {"size": "8MiB", "hold": "whole"})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for index in range(10):
            assert cached[index][0] == index
        limit_files(0)
        for index in (*range(COUNT), *range(COUNT)):
            assert (cached[index] == index).all()
    return cached.cache_counts, [str(each.message) for each in said]


def test_a_limit_that_is_set_later_ends_nothing() -> None:
    counts, said = under(lambda: None, lowered_in_between)
    assert counts.examples == 10
    assert len(said) == 1
    assert "no more can be written: File too large" in said[0]
