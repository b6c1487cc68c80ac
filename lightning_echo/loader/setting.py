"""`Setting`: the parts and options of an `EchoLoader`: the user's loader, the insertion point, the buffer size, the ranks.

Two things can change later. The buffer size is an estimate until a run starts, if it depends on the free memory (`BufferSize`).
The insertion point that ``auto`` chose gives way to a later one, if the split of the data set does not hold
(`Setting.leave_split`). The number of ranks and the length of the data set are looked up each time that they are needed, because
a loader is made before a job starts its other processes, and because a data set may grow.
"""

from __future__ import annotations

import gc
import os
import secrets
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DistributedSampler

from lightning_echo.cache.exchange import Part
from lightning_echo.cache.holding import WHOLE
from lightning_echo.cache.kept import CacheConfig
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.cache.node_cache import gathered, nodes_of, place_of_process
from lightning_echo.data.copies import bytes_from_words, bytes_in_words
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.data.randomness import preserved_random_states
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.loader.state import Conditions, EchoState
from lightning_echo.pipeline.choice import choose, choose_later
from lightning_echo.pipeline.journal import Replay
from lightning_echo.pipeline.kinds import Indexed, Kind, OwnBatches, Stream, kind_of
from lightning_echo.pipeline.pipelines import Launch, Layout, Opening, Pipeline, rank_key
from lightning_echo.pipeline.reads import USUAL_IN_FLIGHT, most_ahead_bytes
from lightning_echo.pipeline.requests import tell_pass
from lightning_echo.plan.plan import Reuse, smallest_buffer
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.same_data import unit_of
from lightning_echo.share.sharing import LoaderSharing, point_of_shared
from lightning_echo.split.reading import AUTO_IN_FLIGHT

# ---------------------------------------------------------------------- ranks
# Facts on which the ranks of a job must agree before the first batch: their number, in the job and on a node, and the seed.

_DATA_PARALLEL = "data_parallel"  # the dimension of Lightning's ModelParallelStrategy


def world() -> tuple[int, int]:
    """Returns the number of ranks and the number of this rank in ``torch.distributed``; (1, 0) without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def ranks_of_launcher() -> int:
    """Returns how many ranks this node has, if the launcher reports it (torchrun does); otherwise 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) else 1


def ranks_on_node() -> int:
    """Returns how many ranks this node has. All ranks must call this function together."""
    nodes = nodes_of(gathered(place_of_process()))
    return nodes.count(nodes[world()[1]]) if len(nodes) > 1 else ranks_of_launcher()


def data_parallel() -> tuple[int, int]:
    """Returns how many ranks (or groups of ranks) need data of their own, and the number of this one.

    These are the ranks of `world`, unless a device mesh with a dimension ``"data_parallel"`` covers the job. Along the other
    dimensions of such a mesh, ranks share the work on the same data.

    The mesh belongs to a strategy, and torch keeps no list of meshes. So if the job has more than one group of processes, this
    function searches all objects. That takes 0.2 s: call it once in a run. If earlier trainings of this process have left other
    meshes, the mesh with the fewest groups is taken, to be on the safe side.
    """
    size, rank = world()
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if size == 1 or meshes is None or torch.distributed.get_pg_count() == 1:
        return size, rank
    groups = []
    for mesh in [each for each in gc.get_objects() if type(each) is meshes.DeviceMesh]:
        if _DATA_PARALLEL in (mesh.mesh_dim_names or ()) and mesh.size() == size:
            dimension = mesh.mesh_dim_names.index(_DATA_PARALLEL)
            groups.append((mesh.size(dimension), mesh.get_local_rank(dimension)))
    return min(groups, default=(size, rank))


def default_seed(loader: Any) -> int:
    """Returns the seed of ``seed_everything``, or that of the loader's generator, or a random one. It is equal on all ranks.

    All ranks must call this function together.
    """
    if seed := os.environ.get("PL_GLOBAL_SEED"):
        return int(seed)
    generator = getattr(loader, "generator", None)
    drawn = [secrets.randbits(32) if generator is None else generator.initial_seed()]
    if world()[0] > 1:
        torch.distributed.broadcast_object_list(drawn, src=0)
    return int(drawn[0])


# ---------------------------------------------------------------------- size of the buffer
# How many items may be live. The default depends on the rule of reuse. It can fill a batch, and it fits into memory.
#
# If n batches are live, two uses of an example are about n batches apart. With 16 live batches instead of two, a language model
# needed 0.69 times the fresh examples to reach its target, and image classification 0.86 times (docs/evidence.md, e = 4).
#
# **Each fresh item is used** ``e`` **times** (``reuse="each"``): 16 batches are live, or 4 in device memory, because that is
# scarce; at most a quarter of a pass, because more fresh examples are needed to fill the buffer; and at most a tenth of the free
# memory.
#
# **Echoes are drawn from all that memory holds** (``reuse="memory"``):
#
# * A tenth of the free memory is filled. This needs no more fresh examples.
# * The number of batches is rounded down to a power of two. The free memory differs a little from run to run, and two runs with
#   the same seed should have the same batches.
# * If it is not known how much memory an item takes, 64 batches are live.
# * There is always room for a batch per worker, so any factor that is set later fits.
#
# *Room* is the free memory that a rank may count on: the free memory of the node, without the future part of the node's cache,
# divided among the ranks of the node. For items on a device, it is at most the free memory of that device. A live example that
# the node's cache has in memory takes nothing of the room. So if there is room for all that the cache will not hold, only the
# pass limits the number of live items.
#
# A pass limits how many items can be held, because no index may be held twice. If all of a pass but one batch is live, the next
# pass must have the same order. So a default takes half of that. Then the orders of two passes have a correlation of 0.2. With
# three quarters it would be 0.6.
#
# Free memory differs from rank to rank and from moment to moment, but the plan must be the same on all ranks. So the size is an
# estimate until a run starts. Then all ranks take the smallest size of any rank. A resumed run keeps the size of its state.

Asked: TypeAlias = int | float | str | None
"""What a user asks for: items, a share of the free memory, bytes with a unit; None: the default."""

_LEAST_BATCHES_PER_WORKER = 2
_LEAST_BATCHES = 4  # if whole batches are reused
_MOST_OF_A_PASS = 4  # the default takes at most a fourth of a pass, if each fresh item is used e times
_DEFAULT_SHARE = 10  # the default takes at most a tenth of the free memory
_BATCHES_OF_UNKNOWN_SIZE = 64
_MIB, _GIB = 2**20, 2**30


class Room(NamedTuple):
    """The free memory that a rank may count on, in bytes, if ``ranks`` ranks divide that of the node.

    ``not_cached`` is the number of examples of the data set that the node's cache will not hold in the form of a live example.
    None: the cache holds no live examples.
    """

    bytes: int
    ranks: int = 1
    not_cached: int | None = None

    def __str__(self) -> str:
        shared = f" that each of the node's {self.ranks} ranks has" if self.ranks > 1 else ""
        return f"{self.bytes / _GIB:.3g} GiB of free memory{shared}"


def room_of_rank(ranks: int, set_aside: int, not_cached: int | None = None, *, on_device: bool) -> Room | None:
    """Returns the room of a rank; None if the system does not report how much memory is free.

    ``set_aside``: bytes of the node's memory that are free now and will be taken by something else. ``on_device``: whether the
    items are held on the device, and as many on the host.
    """
    host, device = free_memory_bytes(), free_device_bytes() if on_device else None
    found = [] if host is None else [max(host - set_aside, 0) // max(ranks, 1)]
    found += [] if device is None else [device]
    return Room(min(found), ranks, not_cached) if found else None


def free_device_bytes() -> int | None:
    """Returns the free memory of this rank's device, in bytes; None if this process does not use CUDA (yet).

    The question itself would start CUDA in this process. Then a process that is forked later could not use CUDA.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


@dataclass(frozen=True, kw_only=True)
class BufferSizing:
    """The sizes by which the buffer size of a loader is chosen and checked.

    Attributes:
        batch_size: Items in a batch; 1 if whole batches are the items.
        workers: Number of workers with a buffer each; 1 if the main process holds the items.
        item_bytes: Estimated memory of a live item; 0 if it is not known.
        usual: Live items by default, if each fresh item is used ``e`` times and memory is not short.
        unknown: Live items by default, if echoes are drawn from memory and ``item_bytes`` is not known.
        most: The largest number of items that a pass allows; None if its length is not known.
        most_by_default: The largest number of them that a default takes.
    """

    batch_size: int
    workers: int
    item_bytes: int
    by_batches: bool
    usual: int
    unknown: int
    most: int | None
    most_by_default: int | None
    reuse: Reuse

    @classmethod
    def of(
        cls, loader: Any, item_bytes: int, point: InsertionPoint, items_per_pass: int | None, reuse: Reuse, *, distinct: bool
    ) -> BufferSizing:
        """Makes one for a ``DataLoader``, or for any loader whose batches are the items. ``items_per_pass``: on this rank."""
        by_batches = point.by_batches
        batch_size, workers = (1, 1) if by_batches else (loader.batch_size, max(loader.num_workers, 1))
        least = _LEAST_BATCHES if by_batches else _LEAST_BATCHES_PER_WORKER * workers * batch_size
        usual = point.properties.live_batches * batch_size
        most = by_default = items_per_pass
        if items_per_pass is not None:
            usual = min(usual, items_per_pass // _MOST_OF_A_PASS)
            if distinct:
                most = max(items_per_pass - batch_size, 0)
                by_default = most // 2
        return cls(
            batch_size=batch_size,
            workers=workers,
            item_bytes=item_bytes,
            by_batches=by_batches,
            usual=max(least, usual),
            unknown=_BATCHES_OF_UNKNOWN_SIZE * batch_size,
            most=most,
            most_by_default=by_default,
            reuse=reuse,
        )

    @property
    def what(self) -> str:
        return "batches" if self.by_batches else "examples"

    def _least(self, factor: float) -> int:
        return max(smallest_buffer(self.batch_size, max(factor, 2.0), self.workers), 1)

    def size(self, asked: Asked, factor: float, room: Room | None) -> tuple[int, str]:
        """Returns the number of items, and a warning if there is too little memory for a default (otherwise ``""``)."""
        if isinstance(asked, int):  # if a pass is shorter, about half of it is live: see `PlanShape.buffer_in_pass`
            return asked, ""
        if asked is None:
            return self._default_of_each(factor, room) if self.reuse is Reuse.each else (self._from_memory(factor, room), "")
        if isinstance(asked, str):
            asked_bytes = bytes_from_words(asked) or 0
        elif room is not None:
            asked_bytes = int(room.bytes * asked)
        else:
            raise ValueError(
                f"buffer_size={asked!r} is a share of the free memory, which this system does not tell: give a size such as "
                f'"4GiB", or a number of {self.what}'
            )
        if not self.item_bytes:
            raise ValueError(
                f"buffer_size={asked!r} is memory, and how much of it live {self.what} of this loader take is not known: give a "
                f"number of {self.what}"
            )
        fitting = self._fitting(asked_bytes // self.item_bytes, room)
        return fitting if self.most is None else min(fitting, max(self.most, self._least(factor))), ""

    def _default_of_each(self, factor: float, room: Room | None) -> tuple[int, str]:
        size = self.usual
        if room is None or size * self.item_bytes <= room.bytes / _DEFAULT_SHARE:
            return size, ""
        fitting = min(max(int(room.bytes / _DEFAULT_SHARE // self.item_bytes), self._least(factor)), size)
        if fitting == size:
            return size, ""
        return fitting, (
            f"buffer_size is {fitting} instead of {size}: {size} live {self.what} of {self.item_bytes / _MIB:.3g} MiB would "
            f"take more than a tenth of the {room}. Set buffer_size to choose another"
        )

    def _from_memory(self, factor: float, room: Room | None) -> int:
        fitting = self.unknown
        if room is not None and self.item_bytes:
            batches = self._fitting(room.bytes // _DEFAULT_SHARE // self.item_bytes, room) // self.batch_size
            fitting = (1 << batches.bit_length() >> 1) * self.batch_size
        if self.most_by_default is not None:
            fitting = min(fitting, self.most_by_default)
        # A factor may be raised later. Even with the largest one, a batch needs no more echoes than it has items.
        return max(fitting, self._least(factor), self.batch_size * self.workers)

    def _fitting(self, own: int, room: Room | None) -> int:
        """Returns how many items may be live, if a rank has memory for ``own`` of them besides those that its node's cache has.

        Chance decides which items the cache has. So the cache counts only if there is memory for all other items. And a buffer
        that has to be filled first should not be as large as a pass.
        """
        if self.reuse is Reuse.each or room is None or room.not_cached is None or room.not_cached > own:
            return own
        return max(own, self.most or 0)

    def fits(self, size: int, room: Room | None) -> bool:
        not_cached = size if room is None or room.not_cached is None else min(size, room.not_cached)
        return room is None or not_cached * self.item_bytes <= room.bytes


class BufferSize:
    """The buffer size of one loader: an estimate at first, settled when a run starts.

    ``value`` is final if `is_settled`: a number that the user asks for always is. ``warning`` and ``remark`` are messages for the
    user about the estimate, or about a default that could not be chosen by memory; otherwise empty.
    """

    def __init__(self, asked: Asked, sizing: BufferSizing, factor: float, room: Room | None) -> None:
        self._asked, self._sizing = asked, sizing
        self._kept: int | None = None  # the size of a saved run that continues here
        self.is_settled = isinstance(asked, int)
        self.value, self.warning = sizing.size(asked, factor, room)
        self.remark = ""
        if asked is None:
            if sizing.reuse is Reuse.memory and (room is None or not sizing.item_bytes):
                unknown = "how much memory is free" if sizing.item_bytes else f"how much memory live {sizing.what} take"
                self.remark = f"buffer_size is a default that does not follow the memory: {unknown} is not known"
            return
        self.check(factor)
        if isinstance(asked, float):
            return
        free = free_memory_bytes()
        if free is not None and self.value * sizing.item_bytes > free:
            raise ValueError(
                f"buffer_size={asked!r} cannot fit: {self.value} live {sizing.what} of {sizing.item_bytes / _MIB:.3g} MiB need "
                f"more than the {free / _GIB:.3g} GiB of free memory. Use a smaller one, or a later insertion point"
            )

    def check(self, factor: float) -> None:
        """Raises a ValueError if the size cannot fill a batch at this factor."""
        asked, sizing = self._asked, self._sizing
        needed = smallest_buffer(sizing.batch_size, factor, sizing.workers)
        if self.value < needed:
            is_memory = isinstance(asked, float | str)
            in_words = f"{asked!r} ({self.value} live {sizing.what})" if is_memory else str(self.value)
            takes = f" ({bytes_in_words(needed * sizing.item_bytes)})" if is_memory else ""
            raise ValueError(
                f"buffer_size={in_words} is too small for factor={factor:g}: a batch of {sizing.batch_size} needs "
                f"{needed // sizing.workers} live {sizing.what} in each of {sizing.workers} workers. Use at least {needed}"
                f"{takes}, or leave it out"
            )

    def keep(self, size: int | None) -> None:
        """Keeps the size of a saved run, unless the user asks for a number. None: the run need not keep a size any more."""
        if isinstance(self._asked, int):
            return
        self._kept = size
        if size is not None and size != self.value:
            self.value, self.is_settled = size, False

    def settle(self, factor: float, room: Room | None, gathered: Callable[[tuple[int, bool]], list[tuple[int, bool]]]) -> str:
        """Agrees with all other ranks on one size. Returns a message if memory is short and the user does not know it, or "".

        It is the size of the saved run, if all ranks have room for it. Otherwise it is the smallest size that any rank has.
        ``gathered`` returns the values of all ranks.
        """
        before, kept = self.value, self._kept
        mine, warning = (before, "") if room is None else self._sizing.size(self._asked, factor, room)
        told = gathered((mine, kept is not None and self._sizing.fits(kept, room)))
        if kept is not None and all(fits for _, fits in told):
            self.value = kept
        else:
            self.value = min(size for size, _ in told)
            if self._asked is not None:
                self.check(factor)
        self.is_settled = True
        if kept is not None or self._asked is not None or self._sizing.reuse is Reuse.memory or self.value >= before:
            return ""
        less = f"buffer_size is {self.value} instead of {before}: another rank has less free memory"
        return warning if self.value == mine else less


# ---------------------------------------------------------------------- setting


def _check_on_demand(kind: Kind, cache: CacheConfig | None, share: ShareConfig | None, reuse: Reuse, epoch_length: str) -> None:
    """Raises a ValueError if a loader cannot echo on demand with these options."""
    why, instead = "", "give a number, or controller=TargetIdle()"
    if share is not None:
        why = "share= gives the training the reader's examples in one order"
    elif type(kind) not in (Indexed, OwnBatches, Stream):
        why = f"{kind.why_later}, so that its batches are made while the training waits"
    elif reuse is Reuse.each:
        why, instead = "reuse='each' fixes the uses of each example", "leave reuse out"
    elif epoch_length == "full_pass" and not kind.plans_in_workers:
        why = "epoch_length='full_pass' needs to know the factor beforehand"
        instead = "leave epoch_length out, or give a number as the factor"
    elif cache is not None and cache.partitioned:
        why = "a partitioned cache must know beforehand which examples each rank needs"
        instead = "leave cache.partitioned out, or give a number as the factor"
    elif kind.hearers():
        names = ", ".join(sorted({type(each).__name__ for each in kind.hearers()}))
        hears = "passes overlap on demand" if type(kind) is Indexed else "no thread may call it while the training runs"
        why = f"the order of {names} follows set_epoch, and {hears}"
    if why:
        raise ValueError(f"factor='demand' is impossible here: {why}. Instead, {instead}")


def _check_point(kind: Kind, point: InsertionPoint) -> None:
    """Raises a ValueError if whole batches cannot be echoed on demand."""
    why, instead = "", ""
    if point.on_device:
        why = "a batch is transferred where it is used, and not ahead of time"
        instead = f"{earliest(Needs.batches)} or an earlier point"
    elif kind.by_batches and not isinstance(kind, Indexed):
        why, instead = "whole batches of a stream are made while the training waits", "an earlier point"
    elif kind.by_batches and not kind.num_workers:
        why, instead = "without workers, no batch arrives while a step runs", "a loader with num_workers=2 or more"
    elif kind.by_batches and not kind.may_run_in_thread:
        why = f"{type(kind.sampler).__name__} may draw from the global random states, so that no thread may fetch batches ahead"
        instead = "a sampler of torch's with a generator, or shuffle=True"
    if why:
        raise ValueError(
            f"factor='demand' is impossible at {point.option}: {why}. Give {instead}, or a number as the factor, or "
            "controller=TargetIdle()"
        )


class Setting:
    """The user's loader, where and how it is echoed, and the consequences of that.

    ``ranks``: the number of ranks and that of this rank; None: ask ``torch.distributed``. The other arguments are those of
    `EchoLoader`.

    Attributes:
        kind: The kind of the user's loader at the insertion point, or, if that shares, of the one that it trains on.
        choice: The insertion point that was chosen, never ``auto``.
        sharing, cache: None if the loader does not share, or has no cache. If it shares, the cache is that of the reader.
        replay: The run on demand that is repeated; None if none is.
    """

    def __init__(
        self,
        loader: Any,
        point: InsertionPoint,
        buffer_size: int | float | str | None,
        factor: float,
        ranks: tuple[int, int] | None,
        epoch_length: str = "fixed",
        cache: CacheConfig | None = None,
        reuse: Reuse = Reuse.each,
        share: ShareConfig | None = None,
        in_flight: int | str | None = 1,
        *,
        on_demand: bool = False,
        replay: Replay | None = None,
    ) -> None:
        says_why, in_flight = in_flight is not None, AUTO_IN_FLIGHT if in_flight is None else in_flight
        self._ranks, self.reuse, self.in_flight, self._says_why = ranks, reuse, in_flight, says_why
        self._layout_of_pass: Layout | None = None
        self.on_demand, self._cache_options, self._share = on_demand, cache, share
        self.replay = replay
        kind, self.sharing = kind_of(loader), None
        if share is not None:
            point = point_of_shared(point, unit_of(kind))
            self.sharing = LoaderSharing(share, kind, cache, in_flight=in_flight)
            kind, cache = self.sharing.kind(), None  # the cache is the reader's
        self.epoch_length = epoch_length if kind.length is not None else "full_pass"
        if cache is not None and cache.hold == WHOLE and point is InsertionPoint.auto:
            point = earliest(Needs.examples)  # a data set that is held whole does not augment: there is nothing to redo
        if cache is not None:
            kind.check_cache()
        if on_demand:
            _check_on_demand(kind, cache, share, reuse, self.epoch_length)
        if cache is not None and cache.partitioned and in_flight not in (1, AUTO_IN_FLIGHT):
            raise ValueError(
                f"reads_in_flight={in_flight} and cache.partitioned=True are impossible together: threads would read from the "
                f"storage what another node is about to send. Leave one of the two out"
            )
        self.choice = choose(kind, point, cache, 1 if share else in_flight, says_why=says_why)
        self._is_auto = point is InsertionPoint.auto
        self.kind = kind.at(self.choice.point)
        self.cache = None
        if cache is not None:
            assert isinstance(kind, Indexed)
            self.cache = LoaderCache(
                cache,
                loader.dataset,
                kind.readable_indices,
                self.choice.split,
                self.choice.make_stages,
                differs_in_workers=kind.prepared_in_workers,
                loader=loader,
                holds=self.choice.holds,
            )
        items = self.kind.expected_items(self.layout())
        sizing = BufferSizing.of(loader, self.choice.item_bytes, self.choice.point, items, reuse, distinct=self.kind.distinct)
        self.buffer = BufferSize(buffer_size, sizing, self._planned(factor), self.room(ranks_of_launcher()))
        if on_demand:
            _check_point(self.kind, self.choice.point)
            self._check_memory()
        if replay is not None and not self.has_journal:
            raise ValueError(
                f"factor={str(replay)!r} is impossible here: only a run that gets its examples one by one, over a data set with "
                "indices, has a journal. Give a number, or 'demand'"
            )

    @property
    def has_journal(self) -> bool:
        """Whether a run on demand can be written down and repeated."""
        return self.on_demand and isinstance(self.kind, Indexed) and not self.kind.by_batches

    def why_not_on_demand(self) -> str:
        """Returns why this loader cannot echo on demand, in words; empty if it can."""
        try:
            _check_on_demand(kind_of(self.kind.loader), self._cache_options, self._share, self.reuse, self.epoch_length)
            _check_point(self.kind, self.choice.point)
            self._check_memory()
            self.check_ranks_on_demand()
        except ValueError as error:  # "factor='demand' is impossible ...: why. What to do instead"
            return str(error).partition(": ")[2].partition(". ")[0]
        return ""

    def leave_split(self, reason: str) -> bool:
        """Continues at a later point, at which the data set is not split, if that is possible. Returns whether it is."""
        may_leave = self._is_auto and self.choice.split is not None and self.cache is None and self.sharing is None
        if may_leave:
            self.choice = choose_later(reason)
        return may_leave

    def _check_memory(self) -> None:
        """Raises a ValueError if a worker could hold nothing, and would never echo."""
        workers = 1 if self.kind.by_batches else max(self.kind.num_workers, 1)
        if self.buffer.value < workers:
            raise ValueError(
                f"buffer_size={self.buffer.value} is too small for factor='demand': {workers} workers hold examples, each its "
                f"share. Use at least {workers}, or leave it out"
            )

    def _planned(self, factor: float) -> float:
        """Returns the factor for which the buffer must be large enough. On demand, a batch is never planned."""
        return 1.0 if self.on_demand else factor

    def check_factor(self, factor: float) -> None:
        """Raises a ValueError if the buffer cannot fill a batch at this factor."""
        self.buffer.check(self._planned(factor))

    def lookahead(self, largest_factor: float) -> int:
        """Returns how many batches may be planned after the delivered one. On demand, whole batches are never planned."""
        return 0 if self.on_demand and self.kind.by_batches else self.kind.lookahead(largest_factor)

    @property
    def has_length(self) -> bool:
        """Whether the length of epochs is known. If not, an epoch ends when a pass ends."""
        return self.kind.has_length(self.epoch_length)

    @property
    def buffer_size(self) -> int:
        return self.buffer.value

    def room(self, ranks: int) -> Room | None:
        """Returns the free memory that this rank, one of ``ranks`` on this node, may count on; None if it is not known."""
        if self.cache is None:
            return room_of_rank(ranks, 0, on_device=self.choice.point.on_device)
        not_cached = None if self.kind.by_batches else self.cache.not_held
        return room_of_rank(ranks, self.cache.memory_to_come, not_cached, on_device=self.choice.point.on_device)

    def keep_buffer_of(self, state: EchoState) -> None:
        """Keeps the buffer size of a state, if the run can then continue exactly and the user asks for no other number."""
        is_alike = not state.conditions._replace(buffer_size=self.buffer_size).differences(self.conditions())
        self.buffer.keep(state.buffer_size if is_alike and state.delivered else None)

    def describe(self, factor: float) -> str:
        """Returns one line about the loader, for people."""
        workers = self.kind.num_workers
        choice, what = self.choice, "batches" if self.kind.by_batches else "examples"
        cached = None if self.cache is None or self.kind.by_batches else self.cache.not_held
        held = self.buffer_size if cached is None else min(cached, self.buffer_size)
        item_bytes = choice.item_bytes
        if self.cache is not None and cached is not None:  # a live example is one that the cache holds
            item_bytes = max(item_bytes, self.cache.more_bytes)
        memory = f", {item_bytes * held / 2**20:.3g} MiB" if item_bytes else ""
        if memory and held < self.buffer_size:
            memory += " in addition to the cache"
        if memory and choice.point.on_device:
            memory += " of device memory"
        return (
            f"{choice.point}, {self._factor_in_words(factor)}: "
            f"reuse [{', '.join(choice.reused)}], redo [{', '.join(choice.redone)}]; "
            f"{self.buffer_size:,} live {what}{memory}; {workers} worker{'' if workers == 1 else 's'}{self._reads_in_words()}"
        )

    def _factor_in_words(self, factor: float) -> str:
        if self.replay is not None:
            return f"on demand, as in {self.replay.path}"
        return f"on demand, max_factor {factor:g}" if self.on_demand else f"factor {factor:g}"

    def _reads_in_words(self) -> str:
        """Returns what is read ahead, and the memory that this may take; empty if nothing is."""
        if self.choice.reading is None:
            return ""
        reads = f"up to {USUAL_IN_FLIGHT} while reads wait" if self.in_flight == AUTO_IN_FLIGHT else f"up to {self.in_flight}"
        most = f", at most {bytes_in_words(self.most_ahead_bytes())} ahead" if self.choice.reading.takes_memory else ""
        return f"; reads in flight: {reads} ({self.choice.reading.part.value}{most})"

    def remarks(self) -> list[str]:
        """Returns what the user should know of this loader, for people."""
        remarks = []
        if not self.kind.resumes:
            remarks.append(
                "a checkpoint from within a pass cannot be resumed, unless the "
                f"{'loader' if self.kind.stateful is self.kind.loader else 'data set'} has state_dict() and "
                "load_state_dict(state), or the loader is torchdata's StatefulDataLoader"
            )
        if self.choice.caution:
            remarks.append(self.choice.caution)
        if self._says_why and self.in_flight == AUTO_IN_FLIGHT and self.sharing is None and self.choice.reading is None:
            why = self.choice.no_reading or "there are no workers; a number lets threads of this process read"
            remarks.append(f"reads_in_flight={AUTO_IN_FLIGHT!r} reads one example after the other: {why}")
        if self.buffer.remark:
            remarks.append(self.buffer.remark)
        if self.on_demand and not self.kind.num_workers and self.choice.reading is None:
            remarks.append(
                "nothing is echoed: without workers, no example arrives while a step runs, and the training waits for each one. "
                "Give the loader num_workers=2 or more"
            )
        if self.on_demand and self.kind.plans_in_workers and self.kind.num_workers:
            remarks.append("a worker does not echo while the stream lets it wait for an example")
        if not self.has_length:
            remarks.append(f"an epoch ends when {self.kind.pass_ends}")
        if self.kind.hearers():
            remarks.append(
                "set_epoch is told the number of the pass over the data, which only at factor 1 and in whole epochs is the epoch"
            )
        if self.kind.remark:
            remarks.append(self.kind.remark)
        return remarks

    # ------------------------------------------------------------------ ranks, and a pass on this rank

    def rank_of_process(self) -> int:
        """Returns the number of this process, also if all processes get the same data."""
        return world()[1] if world()[0] > 1 or self._ranks is None else self._ranks[1]

    def _noise_rank(self) -> int:
        """Returns a number that is equal for ranks that share the work on the same data: they draw the same random numbers."""
        replicas, rank = data_parallel()
        if (replicas, rank) == world():
            return self.rank_of_process()
        if self._ranks is None and self.kind.deals_out:
            raise RuntimeError(
                f"this EchoLoader would divide its data among {world()[0]} ranks, but the data-parallel dimension of the job's "
                f"device mesh has {replicas}: the other ranks share the work on the same data (tensor parallelism). Use "
                "EchoDataModule or EchoCallback, which ask the Trainer, or "
                f"EchoLoader(..., num_replicas={replicas}, rank={rank}) on this rank"
            )
        return rank

    def layout(self) -> Layout:
        """Returns how a pass is cut into batches and divided among the ranks.

        If its length may follow the number of the pass, this is the pass of the last `tell_pass`.
        """
        return self._layout_of_pass or self.kind.layout(self._shards()[0])

    def tell_pass(self, state: EchoState, *, is_next: bool = False) -> None:
        """Gives the pass of a state (``is_next``: the one after it, if that has begun) to a sampler of the user's.

        The length of that pass may follow its number. Call it while nothing is read.
        """
        items = state.layout.items_per_pass(state.insertion_point.by_batches)
        if items and (hearers := self.kind.hearers()):
            number = -(-state.position // items) if is_next else state.position // items
            with preserved_random_states():  # it may draw or seed; when the pass begins, it is set again in states of its own
                tell_pass(number, *hearers)
            self._layout_of_pass = None
            self._layout_of_pass = self.layout()

    def _shards(self) -> tuple[int, int]:
        return (self._ranks or world()) if self.kind.deals_out else (1, 0)

    def epoch_batches(self, factor: float) -> int:
        """Returns the number of batches in an epoch on this rank. Call it only if `has_length` is true."""
        batches = self.layout().batches_per_pass
        return batches if self.epoch_length == "fixed" else round(factor * batches)

    def items_per_pass(self) -> int:
        return self.kind.items_per_pass(self.layout())

    def conditions(self) -> Conditions:
        """Returns the conditions that must be the same for a run to continue exactly."""
        kind = self.kind
        return Conditions(self.choice.point, self.layout(), kind.state_workers, self.buffer_size, self.reuse, kind.order_by)

    def place_of_rank(self) -> tuple[int, int]:
        """Returns the number of ranks that a state on demand has places of, and the number of this one."""
        return self._ranks or world()

    @property
    def is_job(self) -> bool:
        """Whether the ranks are a job of ``torch.distributed``, and not processes that the user has numbered."""
        return world()[0] > 1

    @property
    def has_several_places(self) -> bool:
        return self.on_demand and self.place_of_rank()[0] > 1

    def check_ranks_on_demand(self) -> None:
        """Raises a ValueError if ranks cannot echo on demand, each as its own source delivers."""
        ranks = world()[0]
        if ranks == 1:
            return
        own = (self._ranks or data_parallel())[0]
        sampler = self.kind.sampler if isinstance(self.kind, Indexed) else None
        if isinstance(sampler, DistributedSampler):
            own = min(own, sampler.num_replicas) if self._ranks is None else sampler.num_replicas
        if own != ranks:
            raise ValueError(
                f"factor='demand' is impossible here: the job has {ranks} ranks and divides its data among {own}. Ranks that "
                "share the same data must train on the same batch, and on demand each would get a batch of its own. Use a "
                "number, or controller=TargetIdle()"
            )
        if self.kind.plans_in_workers:
            raise ValueError(
                f"factor='demand' is impossible over a stream on {ranks} ranks: each rank would pull other examples by the same "
                "step, and end a pass at another one. Use a number, or controller=TargetIdle()"
            )
        if type(self.kind) is not Indexed:
            raise ValueError(
                f"factor='demand' is impossible on {ranks} ranks here: only data that is read by index can continue on each rank "
                "from a checkpoint of rank 0. Use a number, or controller=TargetIdle()"
            )

    # ------------------------------------------------------------------ running

    def start(self, launch: Launch, say: Callable[[str], None] = warnings.warn) -> Pipeline:
        """Opens a pipeline, which may warn the user with ``say``."""
        layout = self.layout()
        opening = Opening(
            launch=launch,
            choice=self.choice,
            layout=layout,
            shape=self.kind.shape(layout, self.buffer_size, launch.seed, self.reuse),
            rank=self._shards()[1],
            key=rank_key(launch.seed, self._noise_rank()),
            cache=self.cache,
            on_demand=self.on_demand,
            say=say,
            in_flight=self.in_flight,
            most_ahead_bytes=self.most_ahead_bytes(),
        )
        return self.kind.open(opening)

    def most_ahead_bytes(self) -> int:
        """Returns the memory that reads in flight may take on this rank."""
        room = self.room(ranks_of_launcher())
        return most_ahead_bytes(None if room is None else room.bytes)

    def part_in_cache(self) -> Part:
        """Returns the facts about this rank that the other ranks of a partitioned cache need."""
        assert isinstance(self.kind, Indexed)
        return self.kind.part_in_cache(self.layout(), self._shards())
