"""Which ranks of a job share a cache: those of one node that read the same data set.

Every rank says where it runs and what its data set is: class, number of examples, and the bytes of eight samples. Ranks of one
node whose data sets are the same share the cache that the first of them makes. A rank with another data set (``files[rank::4]``)
has a cache of its own: under one key the two would have different examples.

A node is found by the machine and by what the launcher says: its number of the node (``GROUP_RANK``, ``NODE_RANK``,
``SLURM_NODEID``), and ``LOCAL_RANK``, which a node has once each.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_echo.caching.node_cache import Address, NodeCache
from lightning_echo.caching.record import encode

__all__ = ["Identity", "Place", "digest_of", "is_distributed", "nodes_of", "open_together", "place_of_process", "sample_places"]

_SAMPLES = 8
_NODE_NUMBERS = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Place(NamedTuple):
    """Where a rank runs.

    Attributes:
        machine: The machine, and the node's number that the launcher gave.
        local_rank: Number of the rank on its node; None if the launcher does not say.
    """

    machine: tuple[str, str, str]
    local_rank: str | None


class Identity(NamedTuple):
    """What data set a rank has.

    Attributes:
        kind: Its class.
        keys: Number of its examples, see `Keys`.
        samples: Digest of some of its examples; None if none can be read in this process: then it is like no other.
    """

    kind: str
    keys: int
    samples: bytes | None

    def is_like(self, other: Identity) -> bool:
        """Returns whether both are the same data set, as far as can be seen."""
        return self == other and self.samples is not None


def is_distributed() -> bool:
    """Returns whether this process is one of several ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def place_of_process(environment: Mapping[str, str] = os.environ) -> Place:
    """Returns where this process runs."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    number = next((environment[name] for name in _NODE_NUMBERS if name in environment), "0")
    return Place((socket.gethostname(), boot, number), environment.get("LOCAL_RANK"))


def nodes_of(places: Sequence[Place]) -> list[int]:
    """Returns the number of each rank's node.

    Args:
        places: Where each rank runs, in the order of the ranks.

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
        # The first process of a job may have no LOCAL_RANK where the others that it has started do: it is number 0.
        local = "0" if place.local_rank is None and place.machine in told else place.local_rank
        earlier = met.get((place.machine, local), 0) if local is not None else 0
        met[place.machine, local] = earlier + 1
        result.append(nodes.setdefault((place.machine, earlier), len(nodes)))
    return result


def sample_places(count: int) -> list[int]:
    """Returns the places of up to eight samples among so many examples, from the first to the last one.

    Example:
        >>> sample_places(15), sample_places(3)
        ([0, 2, 4, 6, 8, 10, 12, 14], [0, 1, 2])
    """
    if count <= _SAMPLES:
        return list(range(count))
    return [place * (count - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)]


def digest_of(examples: Iterable[Any]) -> bytes:
    """Returns a digest of the bytes of examples, as a cache would hold them."""
    digest = hashlib.blake2b(digest_size=16)
    for example in examples:
        for part in encode(example).parts:
            digest.update(part)
    return digest.digest()


class _Opened(NamedTuple):
    address: Address | None
    error: str


def open_together(identity: Identity, make: Callable[[], NodeCache], before: NodeCache | None = None) -> tuple[NodeCache, str]:
    """Returns the cache of this node. In a job of several ranks, all of them must call this function together.

    Args:
        identity: What data set this rank has.
        make: Makes the cache, on the first rank of the node that has this data set.
        before: The cache that this rank had until now, if it still fits.

    Returns:
        The cache, and a message for the user if this rank does not share it with others of its node; else an empty string.

    Raises:
        Exception: What ``make`` raises on this rank.
        RuntimeError: ``make`` has failed on another rank.
    """
    if not is_distributed():
        return before or make(), ""
    rank = torch.distributed.get_rank()
    said: list[tuple[Place, Identity]] = _gathered((place_of_process(), identity))
    nodes = nodes_of([place for place, _ in said])
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    leader = next((other for other in here if identity.is_like(said[other][1])), rank)
    cache, failure = None, None
    if leader == rank:
        try:
            cache = before or make()
        except Exception as error:  # the other ranks wait for this one
            failure = error
    opened = _gathered(_Opened(None if cache is None else cache.address, "" if failure is None else str(failure)))
    if failure is not None:
        raise failure
    if failed := [other for other, each in enumerate(opened) if each.error]:
        raise RuntimeError(f"rank {failed[0]} could not make its cache: {opened[failed[0]].error}")
    if cache is None:
        cache, reason = _attached(opened[leader].address, make)
    else:
        reason = "its data set is another one than that of the ranks before it" if rank != here[0] else ""
    return cache, f"rank {rank} has a cache of its own: {reason}" if reason else ""


def _attached(address: Address | None, make: Callable[[], NodeCache]) -> tuple[NodeCache, str]:
    assert address is not None  # its rank has not failed
    try:
        return NodeCache.attach(address), ""
    except OSError as error:
        return make(), f"it cannot reach that of its node ({error})"


def _gathered(value: Any) -> list[Any]:
    """Returns what each rank has given, in the order of the ranks."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
