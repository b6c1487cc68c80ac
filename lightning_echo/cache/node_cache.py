"""`NodeCache`: the cache of a node, and which ranks of a job share it. It is made once, and outlives the workers.

**Which ranks share a cache.** Every rank tells the others where it runs and what its data set is: class, number of examples, and
the bytes of eight samples. If ranks of one node have the same data set, the first of them makes the cache and all of them share
it (`open_together`). A rank with another data set (``files[rank::4]``) has a cache of its own, because the same key would stand
for different examples.

Two ranks are on the same node if they have the same machine and the same node number from the launcher (``GROUP_RANK``,
``NODE_RANK``, ``SLURM_NODEID``), and different values of ``LOCAL_RANK``.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_echo.cache.arena import Arena, ArenaAddress, ArenaError, held_in_memory
from lightning_echo.cache.kept import HINT, CacheConfig, Contents, open_kept
from lightning_echo.cache.reads import BESIDE, ExampleStore
from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.fingerprint import Fingerprint
from lightning_echo.data.machine import free_memory_bytes

Value = TypeVar("Value")

_LARGEST_RESERVE_BYTES = 2**31
_RESERVED_SHARE = 0.2  # of the memory that is free when the cache is made
_NODE_NUMBERS = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class CacheCounts:
    """What the cache of a node holds, and how often it was of use.

    Attributes:
        examples: Number of examples that the cache holds.
        bytes: Number of bytes that these examples take.
        hits: Number of fresh examples, delivered on the ranks of this node, that the cache had.
        misses: Number of fresh examples, delivered on the ranks of this node, that the cache did not have. They were read.
        is_full: Whether the cache takes no more examples.
        hold: What is held of an example: ``"raw"``, ``"loaded"`` or ``"whole"``. Before the first batch it may be ``"auto"``.
        size: Number of bytes that the cache may hold.
        received: Number of hits that came from other nodes. It is 0 if the cache is not partitioned.
        waited_seconds: Seconds that the workers of this node have waited for examples of other nodes.
        exchange_seconds: Seconds in which this node has sent and received examples.
        nodes: Number of nodes that hold different examples and send them to each other. It is 1 if the cache is not partitioned.

    Example:
        >>> CacheCounts(examples=60, bytes=9_000_000, hits=30, misses=90, is_full=True, hold="raw", size=9_100_000).hit_fraction
        0.25
    """

    examples: int
    bytes: int
    hits: int
    misses: int
    is_full: bool
    hold: str
    size: int
    received: int = 0
    waited_seconds: float = 0.0
    exchange_seconds: float = 0.0
    nodes: int = 1

    @property
    def hit_fraction(self) -> float:
        """Share of the fresh examples that were hits, from 0 to 1; 0 before the first fresh example."""
        return self.hits / ((self.hits + self.misses) or 1)


class Address(NamedTuple):
    """Where the other ranks of a node find a cache: the addresses of its arenas, and the arguments of `NodeCache`."""

    hold: str
    arena: ArenaAddress
    tally: ArenaAddress
    name: str | None = None
    data: int = 0


class NodeCache:
    """The cache of a node. The `LoaderCache` of each rank, and the workers that it starts, have it open; nothing is evicted.

    A `LoaderCache` keeps it as long as its loader exists, over all epochs and fits, and drops it if the data has changed. Its
    memory is free when no process has it any more: the `Arena` closes the file when the last object of a process is gone.

    ``tally`` is where the hits and misses of this job are counted: another arena if the one with the examples is kept under a
    name. For ``data`` see `ExampleStore`. ``is_limited``: it is smaller than its options ask for, because this process may write
    no larger file.
    """

    def __init__(
        self, arena: Arena, tally: Arena, hold: str, name: str | None = None, data: int = 0, *, is_limited: bool = False
    ) -> None:
        self._arena, self.tally, self.hold, self._name, self._data = arena, tally, hold, name, data
        self.keys, self.is_limited = arena.keys - BESIDE, is_limited

    @staticmethod
    def check(config: CacheConfig, *, is_there: bool = False) -> None:
        """Raises ``ValueError`` if a cache with such options has no room. A file that is there already takes most of it."""
        size, path = config.bytes_of(), config.path
        if path is not None:
            if not os.path.isdir(path):
                what = "is a file" if os.path.exists(path) else "does not exist"
                raise ValueError(f"cache.path must be a folder on a local disk, but {path!r} {what}")
            free, size = shutil.disk_usage(path).free, 0 if is_there else size
            if size > free:
                raise ValueError(
                    f"cache.size is {bytes_in_words(size)}, but only {bytes_in_words(free)} are free in cache.path={path!r}"
                )
            if not os.access(path, os.W_OK):
                raise ValueError(f"cache.path={path!r} cannot be written by this user: give another folder")
            return
        of_memory = free_memory_bytes()
        # Memory that this process's caches hold already counts as free: a loader made again continues with the old cache.
        if of_memory is not None and size > of_memory + held_in_memory():
            raise ValueError(
                f"cache.size={config.size!r} is more than the {bytes_in_words(of_memory)} of memory that are free: give less, a "
                "share such as 0.5, or a cache.path on a local disk"
            )

    @classmethod
    def make(cls, config: CacheConfig, hold: str, keys: int, data: int = 0) -> NodeCache:
        """Makes the cache that a configuration asks for. It raises ``ValueError`` without room or a writable path."""
        cls.check(config)
        size, places = config.bytes_of(), keys + BESIDE
        try:
            if config.path is None:
                arena = Arena.create(places, size, reserve_bytes=_reserve())
            else:
                arena = Arena.create_nameless(config.path, places, size)
        except OSError as error:
            if config.path is not None:
                raise ValueError(f"cache.path={config.path!r} cannot be written: {error}") from error
            raise ValueError(
                f"cache: this process may not hold the index of {places:,} examples ({error}): raise its limits (ulimit), or "
                "leave the cache out"
            ) from error
        return cls(arena, arena, hold, data=data, is_limited=arena.budget_bytes < size)

    @classmethod
    def make_kept(
        cls, config: CacheConfig, path: str, keys: int, data: int, begin: Callable[[], tuple[Contents, dict[int, Any]]]
    ) -> tuple[NodeCache, Contents]:
        """Opens the cache that is kept under a name, or makes it; see `open_kept`. Also returns its contents for a comparison."""
        cls.check(config, is_there=os.path.lexists(path))
        arena, contents = open_kept(config, path, keys + BESIDE, data, begin)
        tally = Arena.create(1, 4096)  # hits and misses are those of this job, and so is what its workers agree on
        return cls(arena, tally, contents.hold, config.name, data), contents

    @property
    def arena(self) -> Arena:
        return self._arena

    def store(self) -> ExampleStore:
        return ExampleStore(self._arena, self._name, self._data)

    def add_lookups(self, hits: int, misses: int) -> None:
        """Counts fresh examples that were delivered. If that cannot be written any more, they are not counted."""
        with suppress(OSError):
            self.tally.add_lookups(hits, misses)

    @property
    def counts(self) -> CacheCounts:
        """The contents of the cache, and the lookups so far."""
        held, (hits, misses) = self._arena.counts, self.tally.lookups
        examples = held.records - sum(self.keys + place in self._arena for place in range(BESIDE))
        return CacheCounts(examples, held.bytes, hits, misses, held.is_frozen, self.hold, self._arena.budget_bytes)

    # ------------------------------------------------------------------ the other ranks of the node

    @property
    def address(self) -> Address:
        """Where the other ranks of this node find this cache, while this process lives."""
        return Address(self.hold, self._arena.address, self.tally.address, self._name, self._data)

    @classmethod
    def attach(cls, address: Address) -> NodeCache:
        """Opens the cache that another rank of this node has made. It raises like `Arena.attach`."""
        hold, arena, tally, name, data = address
        return cls(Arena.attach(arena, reserve_bytes=_reserve()), Arena.attach(tally), hold, name, data)


def _reserve() -> int:
    free = free_memory_bytes()
    return 0 if free is None else min(int(free * _RESERVED_SHARE), _LARGEST_RESERVE_BYTES)


# ---------------------------------------------------------------------- which ranks share a cache


class Place(NamedTuple):
    """Where a rank runs. ``machine`` includes the launcher's node number; ``local_rank`` is None if the launcher sets none."""

    machine: tuple[str, str, str]
    local_rank: str | None


class Identity(NamedTuple):
    """Identifies the data set of a rank."""

    kind: str
    keys: int  # number of its examples, see `Keys`
    samples: bytes | None  # digest of some examples. None if this process can read none: then it is like no other data set
    made_from: str = ""  # digest of the fingerprint of all that decides what its examples are
    why_no_samples: str = ""  # if there are none

    def is_like(self, other: Identity) -> bool:
        """Returns whether both are the same data set, as far as can be seen."""
        return self == other and self.samples is not None


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def place_of_process(environment: Mapping[str, str] = os.environ) -> Place:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    number = next((environment[name] for name in _NODE_NUMBERS if name in environment), "0")
    return Place((socket.gethostname(), boot, number), environment.get("LOCAL_RANK"))


def nodes_of(places: Sequence[Place]) -> list[int]:
    """Returns the number of each rank's node, in the order of the ranks.

    Example:
        >>> here = ("host", "boot", "0")
        >>> nodes_of([Place(here, "0"), Place(here, "1"), Place(here, "0"), Place(here, "1")])
        [0, 0, 1, 1]
    """
    told = {place.machine for place in places if place.local_rank is not None}
    met: dict[tuple[Any, str | None], int] = {}  # how many ranks of a machine had this local rank so far
    nodes: dict[tuple[Any, int], int] = {}
    result = []
    for place in places:
        # The first process of a job may have no LOCAL_RANK, although the processes that it has started have one. It is number 0.
        local = "0" if place.local_rank is None and place.machine in told else place.local_rank
        earlier = met.get((place.machine, local), 0) if local is not None else 0
        met[place.machine, local] = earlier + 1
        result.append(nodes.setdefault((place.machine, earlier), len(nodes)))
    return result


def open_together(
    identity: Identity, make: Callable[[], NodeCache], before: NodeCache | None = None, difference: str = ""
) -> tuple[NodeCache, str]:
    """Returns the cache of this node. In a job of several ranks, all of them must call this function together.

    Also returns a message for the user if this rank does not share it with others of its node; else an empty string. The first
    rank of the node that has this data set calls ``make``, or continues with the cache ``before``. It raises the error of
    ``make`` on the rank where that fails, and ``RuntimeError`` on the other ranks. ``difference`` is that of
    `difference_from_rank_0`.
    """
    if not is_distributed():
        return before or make(), ""
    rank = torch.distributed.get_rank()
    of_ranks: list[tuple[Place, Identity]] = gathered((place_of_process(), identity))
    nodes = nodes_of([place for place, _ in of_ranks])
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    leader = next((other for other in here if identity.is_like(of_ranks[other][1])), rank)
    cache, failure = None, None
    if leader == rank:
        try:
            cache = before or make()
        except Exception as error:  # the other ranks wait for this one
            failure = error
    opened = gathered((None if cache is None else cache.address, "" if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if failed := [(other, error) for other, (_, error) in enumerate(opened) if error]:
        raise RuntimeError(f"rank {failed[0][0]} could not make its cache: {failed[0][1]}")
    if cache is None:
        address, reason = opened[leader][0], ""
        assert address is not None  # its rank has not failed
        try:
            cache = NodeCache.attach(address)
        except (OSError, ArenaError) as error:
            cache, reason = make(), f"it cannot reach that of its node ({error})"
    else:
        where = f" ({difference})" if difference else ""
        reason = f"its data set is another one than that of the ranks before it{where}" if rank != here[0] else ""
    return cache, f"rank {rank} has a cache of its own: {reason}" if reason else ""


def difference_from_rank_0(made_from: Fingerprint) -> str:
    """Returns how the data of this rank differs from that of rank 0, in words, or empty. All ranks call it together."""
    if len(set(gathered(made_from.digest()))) == 1:
        return ""
    of_rank_0 = gathered(made_from if torch.distributed.get_rank() == 0 else None)[0]
    assert of_rank_0 is not None
    difference = of_rank_0.difference(made_from)
    return f"{difference}{HINT}" if difference else ""


def gathered(value: Value) -> list[Value]:
    """Returns the values of all ranks, in their order. In a job of several ranks, all of them must call it together."""
    if not is_distributed():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
