"""A cache in a process with limits (``ulimit``): the training continues, the cache holds what it may, and this is said."""

import multiprocessing
import resource
import warnings

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import CachedDataset, EchoLoader

COUNT, SIZE = 60, 100_000
MIB = 2**20


class Numbers(Dataset):
    """Each value of an example tells whose it is."""

    def __getitem__(self, index):
        return torch.full((SIZE,), index % 251, dtype=torch.uint8)

    def __len__(self):
        return COUNT


def limit_address_space():
    most = psutil.Process().memory_info().vms + 500 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limit_files(most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def epochs_of(cache, workers):
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


def under(limit, act):
    """Acts in a process of its own, with a limit."""
    receives, sends = multiprocessing.Pipe(duplex=False)

    def run():
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


def test_a_cache_larger_than_the_address_space_holds_all():
    counts, said = under(limit_address_space, lambda: epochs_of({"size": "1GiB"}, 1))
    assert (counts.examples, counts.hits, counts.misses, counts.size) == (COUNT, 2 * COUNT, COUNT, 2**30)
    assert said == []


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("memory", "the cache has 1.99 MiB and not cache.size='8MiB'"),
        ("disk", "ulimit -f"),
        ("kept", "cache.size='8MiB' is not used: the cache 'kept' was made with 1.99 MiB"),
    ],
)
def test_a_cache_larger_than_the_largest_file_holds_what_it_may_and_says_so_once(where, expected, tmp_path):
    cache = {"size": "8MiB", "path": str(tmp_path), "name": "kept"}
    for option in {"memory": ["path", "name"], "disk": ["name"], "kept": []}[where]:
        del cache[option]
    counts, said = under(lambda: limit_files(2 * MIB), lambda: epochs_of(cache, 1))
    assert counts.examples == (2 * MIB - 2 * 4096) // (SIZE + 200), "header, index and records take the file"
    assert where == "kept" or counts.hits == 2 * counts.examples
    assert len(said) == 1
    assert expected in said[0]


@pytest.mark.parametrize(
    "make", [lambda: epochs_of({"size": "8MiB"}, 0), lambda: CachedDataset(Numbers(), {"size": "8MiB", "hold": "whole"})]
)
def test_where_not_even_the_index_may_be_written_the_error_says_what_to_do(make):
    with pytest.raises(ValueError, match=r"the index of 62 examples .*File too large.*raise its limits \(ulimit\), or leave"):
        under(lambda: limit_files(100), make)
