"""What caches were good for in an epoch: fake loaders on the ranks of several nodes, which deliver example by example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_echo.cache.node_cache import CacheCounts
from lightning_echo.loader.state import EchoCounts
from lightning_echo.training.counts import CacheMeter, CacheUse, metrics_of_parts, together


class Cache:
    """Counts what is delivered on all ranks that share it."""

    def __init__(self, examples: int = 50, size: int = 5000, *, is_full: bool = True, hold: str = "loaded") -> None:
        self.examples, self.size, self.is_full, self.hold = examples, size, is_full, hold
        self.hits = self.misses = 0

    @property
    def counts(self) -> CacheCounts:
        return CacheCounts(self.examples, self.size, self.hits, self.misses, self.is_full, self.hold, 2**20)


class PartOfACache(Cache):
    """One of a node that exchanges examples with another node."""

    received, seconds = 0, 0.0

    @property
    def counts(self) -> CacheCounts:
        return replace(super().counts, received=self.received, exchange_seconds=self.seconds, nodes=2)


class Loader:
    """In the place of an `EchoLoader` on one rank."""

    def __init__(self, cache: Cache | None = None) -> None:
        self.cache, self.counts = cache, EchoCounts()

    @property
    def cache_counts(self) -> CacheCounts | None:
        return None if self.cache is None else self.cache.counts

    def deliver(self, hits: int, misses: int, echoed: int = 3) -> None:
        self.counts += EchoCounts(hits + misses, echoed)
        if self.cache is not None:
            self.cache.hits, self.cache.misses = self.cache.hits + hits, self.cache.misses + misses


class Job:
    """A meter on each rank; what the ranks report is gathered in their order.

    Args:
        ranks: Of each rank its loaders by name.
    """

    def __init__(self, *ranks: dict[str, Loader]) -> None:
        self.ranks: list[Any] = list(ranks)
        self.meters = [CacheMeter() for _ in ranks]
        self.begin()

    def begin(self) -> None:
        for meter, parts in zip(self.meters, self.ranks, strict=True):
            meter.begin_epoch(parts)

    def end(self) -> dict[str, CacheUse]:
        """Ends the epoch on all ranks, which must all come to the same, and begins the next."""
        rows: list[list[int]] = []

        def report(row: list[int]) -> torch.Tensor:
            rows.append(row)
            return torch.tensor([row])

        for meter, parts in zip(self.meters, self.ranks, strict=True):
            meter.end_epoch(parts, report)
        found = [
            meter.end_epoch(parts, lambda row: torch.tensor(rows)) for meter, parts in zip(self.meters, self.ranks, strict=True)
        ]
        self.begin()
        assert all(each == found[0] for each in found)
        return found[0]


def nodes(*sizes: int) -> tuple[Job, list[Loader], list[Cache]]:
    """A job with so many ranks on each node, and a cache on each."""
    caches = [Cache() for _ in sizes]
    loaders = [Loader(cache) for cache, size in zip(caches, sizes, strict=True) for _ in range(size)]
    return Job(*({"": loader} for loader in loaders)), loaders, caches


def test_what_came_from_other_nodes_is_added_up_and_the_longest_exchange_counts() -> None:
    """Two nodes of two ranks; hits and what was received are counts of a node."""
    caches = [PartOfACache(), PartOfACache()]
    loaders = [Loader(cache) for cache in caches for _ in range(2)]
    job = Job(*({"": loader} for loader in loaders))
    for _ in range(2):
        for loader in loaders:
            loader.deliver(3, 1)
        caches[0].received, caches[0].seconds = caches[0].received + 2, caches[0].seconds + 0.5
        caches[1].received, caches[1].seconds = caches[1].received + 4, caches[1].seconds + 0.25
        found = job.end()[""]
        assert (found.hits, found.received, found.exchange_seconds) == (12, 6, 0.5)
        assert found.received_fraction == 6 / 16
    assert together([found, CacheUse(1.0, 4, 50, 5000, True, "loaded")]).received == 6  # type: ignore[union-attr]


# Hits and misses of each rank in an epoch, node by node.
JOBS = {
    "two ranks on a node": [[(10, 30), (20, 20)]],
    "two nodes": [[(10, 30)], [(40, 0)]],
    "two nodes with two ranks": [[(10, 30), (20, 20)], [(40, 0), (0, 40)]],
    "nodes with different numbers of ranks": [[(10, 30), (20, 20), (33, 7)], [(40, 0)]],
    "ranks with different numbers of examples": [[(10, 30), (1, 1)], [(0, 7), (5, 0), (1, 2)]],
    "a rank without fresh examples": [[(10, 30), (0, 0)], [(0, 0)]],
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("earlier", [0, 17])
def test_over_ranks_and_nodes_each_fresh_example_counts_once(job: str, earlier: int) -> None:
    """The truth is what was delivered, rank by rank. An epoch before has counts of its own."""
    delivered = [each for node in JOBS[job] for each in node]
    ranks, loaders, _ = nodes(*map(len, JOBS[job]))
    for loader in loaders:
        loader.deliver(earlier, 2 * earlier)
    ranks.begin()
    for loader, (hits, misses) in zip(loaders, delivered, strict=True):
        loader.deliver(hits, misses)
    use = ranks.end()[""]
    assert use.fresh == sum(map(sum, delivered))
    assert use.hits == pytest.approx(sum(hits for hits, _ in delivered))


def test_what_is_held_is_that_of_a_node_and_full_is_what_is_full_everywhere() -> None:
    job, _, caches = nodes(2, 2)
    assert job.end()[""][2:5] == (50, 5000, True)
    caches[1].examples, caches[1].size, caches[1].is_full = 70, 9000, False
    assert job.end()[""][2:5] == (60, 7000, False)


def test_without_a_cache_nothing_is_gathered() -> None:
    meter, parts = CacheMeter(), {"": Loader()}
    meter.begin_epoch(parts)  # type: ignore[arg-type]

    def gather(row: list[int]) -> torch.Tensor:
        raise AssertionError("the ranks exchange something for nothing")

    assert meter.end_epoch(parts, gather) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(("hits", "misses"), [(0, 12), (3, 9), (3, 400), (40, 5)])
def test_a_cache_that_begins_again_within_an_epoch_counts_from_0(hits: int, misses: int) -> None:
    """A reload has brought other data, which is found out when the first batch is fetched."""
    job, (loader,), _ = nodes(1)
    loader.deliver(30, 20)
    job.end()
    loader.cache = Cache()
    loader.deliver(hits, misses)
    assert job.end()[""].hit_fraction == pytest.approx(hits / (hits + misses))


def test_of_several_loaders_each_has_its_own_metrics_and_those_without_a_cache_have_none() -> None:
    loaders = {"scans": Loader(Cache(10, 2000)), "text": Loader(), "sounds": Loader(Cache(5, 100, is_full=False, hold="raw"))}
    job = Job(loaders, loaders)  # a second rank that delivers the same
    for hits, misses in ((0, 4), (3, 1), (0, 1)):
        for loader in loaders.values():
            loader.deliver(hits, misses)
    caches = job.end()
    assert metrics_of_parts(caches) == {
        "echo/scans/cache_hit_fraction": pytest.approx(3 / 9),
        "echo/scans/cached_examples": 10,
        "echo/scans/cache_bytes": 2000,
        "echo/sounds/cache_hit_fraction": pytest.approx(3 / 9),
        "echo/sounds/cached_examples": 5,
        "echo/sounds/cache_bytes": 100,
    }
    both = together(caches.values())
    assert both is not None
    assert both[2:6] == (15, 2100, False, "loaded and raw")
    assert both.hit_fraction == pytest.approx(3 / 9)
