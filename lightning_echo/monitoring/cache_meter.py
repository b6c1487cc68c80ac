"""`CacheMeter`: what the caches of a training hold at an epoch's end, and how often they had an example in the epoch.

Hits and misses are counts of a node. All ranks of the node report the same counts, so that their sum over ranks would count them
several times. Therefore each rank reports its own fresh examples, multiplied by the share of them that its node had in the cache.
These numbers can be added up. Their sum over the ranks of a node is the node's hits. This is so for any number of ranks, and
whether they share a cache or have one each.

The counts must be read while no rank can deliver a batch. So all ranks read them between two exchanges: after all ranks have
delivered their last batch of the epoch, and before any of them continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from lightning_echo.loading.loader import EchoLoader

__all__ = ["CacheMeter", "CacheUse", "metrics_of_parts", "together"]

_NANOSECONDS = 1_000_000_000


class CacheUse(NamedTuple):
    """What a cache holds at an epoch's end, and how often it had an example in the epoch.

    Attributes:
        hits: Fresh examples of the epoch that the cache had, all ranks. It need not be a whole number, see above.
        fresh: Fresh examples of the epoch, all ranks.
        examples: Examples that are held on a node. If nodes differ, the mean over the ranks.
        bytes: Bytes that they take on a node. If nodes differ, the mean over the ranks.
        is_full: Whether nothing is added any more on any node.
        hold: What is held of an example, on the node of this rank.
        received: Number of hits that came from another node; None if the cache is not partitioned.
        exchange_seconds: Seconds of the epoch in which a node sent and received examples, for the node that took longest; None if
            the cache is not partitioned.
    """

    hits: float
    fresh: int
    examples: int
    bytes: int
    is_full: bool
    hold: str
    received: float | None = None
    exchange_seconds: float | None = None

    @property
    def received_fraction(self) -> float | None:
        """Share of the epoch's fresh examples that came from another node; None if there were none."""
        return self.received / self.fresh if self.fresh and self.received is not None else None

    @property
    def hit_fraction(self) -> float | None:
        """Share of the epoch's fresh examples that the cache had; None if there were none."""
        return self.hits / self.fresh if self.fresh else None

    def logged(self) -> dict[str, float]:
        """Returns the values to log by name, without those that are not known.

        >>> CacheUse(3.0, 12, 6, 600, True, "loaded").logged()
        {'cache_hit_fraction': 0.25, 'cached_examples': 6, 'cache_bytes': 600}
        """
        values = {"cache_hit_fraction": self.hit_fraction, "cached_examples": self.examples, "cache_bytes": self.bytes}
        values["cache_received_fraction"] = self.received_fraction
        return {name: value for name, value in values.items() if value is not None}


class _Lookups(NamedTuple):
    """Counts of a loader so far: the fresh examples of this rank, and the hits, misses and exchanges of its node."""

    fresh: int = 0
    hits: int = 0
    misses: int = 0
    received: int = 0
    exchange_nanoseconds: int = 0

    def since(self, before: _Lookups) -> _Lookups:
        """Returns what was counted since then. If a reload brought other data, the cache has begun anew and counts from 0."""
        began_anew = any(now < earlier for now, earlier in zip(self[1:], before[1:], strict=True))
        of_node = (0, 0, 0, 0) if began_anew else before[1:]
        since = (now - earlier for now, earlier in zip(self[1:], of_node, strict=True))
        return _Lookups(self.fresh - before.fresh, *since)


class CacheMeter:
    """Follows the caches of the loaders of a training."""

    def __init__(self) -> None:
        self._at_start: dict[str, _Lookups] = {}

    def begin_epoch(self, parts: Mapping[str, EchoLoader]) -> None:
        """Notes the counts when an epoch begins, or continues after a resume.

        Args:
            parts: The loaders by name; a reload may have made them anew.
        """
        self._at_start = {name: _lookups(part) for name, part in parts.items()}

    def end_epoch(self, parts: Mapping[str, EchoLoader], gather: Callable[[list[int]], Tensor]) -> dict[str, CacheUse]:
        """Returns what was measured in the epoch for each loader that has a cache, by the loader's name.

        All ranks must call this together, after an exchange that follows the epoch's last batch.

        Args:
            parts: The loaders by name.
            gather: Returns the values of every rank, shape (ranks, values). It is called only if there is a cache.
        """
        holds: dict[str, str] = {}
        row: list[int] = []
        for name, part in parts.items():
            if (counts := part.cache_counts) is not None:
                fresh, hits, misses, *exchanged = _lookups(part).since(self._at_start.get(name, _Lookups()))
                row += [fresh, hits, hits + misses, counts.examples, counts.bytes, counts.is_full, *exchanged, counts.nodes]
                holds[name] = counts.hold
        if not holds:
            return {}
        gathered = gather(row)
        of_parts = gathered.reshape(len(gathered), len(holds), -1).transpose(0, 1).tolist()
        return {name: _joined(of_ranks, hold) for (name, hold), of_ranks in zip(holds.items(), of_parts, strict=True)}


def together(caches: Iterable[CacheUse]) -> CacheUse | None:
    """Returns the figures of the caches of several loaders as those of one cache; None if there are none.

    >>> together([CacheUse(3.0, 12, 6, 600, True, "loaded"), CacheUse(3.0, 4, 1, 10, False, "raw")])[:6]
    (6.0, 16, 7, 610, False, 'loaded and raw')
    """
    each = list(caches)
    if not each:
        return None
    return CacheUse(
        hits=sum(cache.hits for cache in each),
        fresh=sum(cache.fresh for cache in each),
        examples=sum(cache.examples for cache in each),
        bytes=sum(cache.bytes for cache in each),
        is_full=all(cache.is_full for cache in each),
        hold=" and ".join(sorted({cache.hold for cache in each})),
        received=_sum_of_known(cache.received for cache in each),
        exchange_seconds=_sum_of_known(cache.exchange_seconds for cache in each),
    )


def metrics_of_parts(caches: Mapping[str, CacheUse]) -> dict[str, float]:
    """Returns the metrics of each loader's cache, if there are several loaders. For a single loader it returns none.

    >>> sorted(metrics_of_parts({"scans": CacheUse(3.0, 12, 6, 600, True, "loaded")}))
    ['echo/scans/cache_bytes', 'echo/scans/cache_hit_fraction', 'echo/scans/cached_examples']
    """
    return {f"echo/{name}/{key}": value for name, cache in caches.items() if name for key, value in cache.logged().items()}


def _lookups(part: EchoLoader) -> _Lookups:
    if (counts := part.cache_counts) is None:
        return _Lookups(part.counts.fresh)
    seconds = int(counts.exchange_seconds * _NANOSECONDS)
    return _Lookups(part.counts.fresh, counts.hits, counts.misses, counts.received, seconds)


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _joined(of_ranks: list[list[int]], hold: str) -> CacheUse:
    """Joins what the ranks have reported about a loader's cache: nine numbers for each rank, see `CacheMeter.end_epoch`."""
    hits = sum(fresh * hits / lookups for fresh, hits, lookups, *_ in of_ranks if lookups)
    received = sum(of_rank[0] * of_rank[6] / of_rank[2] for of_rank in of_ranks if of_rank[2])
    fresh, _, _, examples, size, full, *_ = (sum(column) for column in zip(*of_ranks, strict=True))
    ranks, seconds = len(of_ranks), max(of_rank[7] for of_rank in of_ranks) / _NANOSECONDS
    exchanged = (received, seconds) if of_ranks[0][8] > 1 else (None, None)
    return CacheUse(hits, fresh, round(examples / ranks), round(size / ranks), full == ranks, hold, *exchanged)
