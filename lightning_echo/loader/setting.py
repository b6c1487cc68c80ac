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
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from lightning_echo.cache.exchange import Part
from lightning_echo.cache.holding import WHOLE
from lightning_echo.cache.kept import CacheConfig
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.cache.node_cache import gathered, nodes_of, place_of_process
from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.randomness import preserved_random_states
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.loader.buffer import BufferSize, BufferSizing, Room, room_of_rank
from lightning_echo.loader.state import Conditions, EchoState
from lightning_echo.pipeline.choice import choose, choose_later
from lightning_echo.pipeline.journal import Replay
from lightning_echo.pipeline.kinds import Indexed, Kind, OwnBatches, Stream, kind_of
from lightning_echo.pipeline.pipelines import Launch, Layout, Opening, Pipeline, rank_key
from lightning_echo.pipeline.reads import USUAL_IN_FLIGHT, most_ahead_bytes
from lightning_echo.pipeline.requests import tell_pass
from lightning_echo.plan.plan import Reuse
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.parts import part_of
from lightning_echo.share.same_data import unit_of
from lightning_echo.share.sharing import LoaderSharing, SharedIndexed, SharedIndexedBatches, point_of_shared
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


# ---------------------------------------------------------------------- setting


def _check_on_demand(kind: Kind, cache: CacheConfig | None, share: ShareConfig | None, reuse: Reuse, epoch_length: str) -> None:
    """Raises a ValueError if a loader cannot echo on demand with these options."""
    why, instead = "", "give a number, or controller=TargetIdle()"
    if share is not None and not isinstance(kind, SharedIndexed):
        why = "of this loader, share= gives a training whole passes or whole batches, one after the other"
    elif share is not None and part_of(kind) is not None:
        why = "share= gives the training a part of what others read, whose examples may come again sooner than in a pass"
    elif share is None and type(kind) not in (Indexed, OwnBatches, Stream):
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
    elif kind.by_batches and isinstance(kind, SharedIndexedBatches):
        why, instead = "share= gives examples, and whole batches of them are made while the training waits", "an earlier point"
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
        self.epoch_length = epoch_length
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
        if kind.length is None and not self.may_keep_steps:
            self.epoch_length = "full_pass"
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
                f"factor={str(replay)!r} is impossible here: a run that shares its reading has no journal. Give a "
                "number, or 'demand'"
            )

    @property
    def has_journal(self) -> bool:
        """Whether a run on demand can be written down and repeated."""
        return self.on_demand and self.sharing is None

    def why_not_on_demand(self) -> str:
        """Returns why this loader cannot echo on demand, in words; empty if it can."""
        try:
            kind = kind_of(self.kind.loader) if self.sharing is None else self.kind
            _check_on_demand(kind, self._cache_options, self._share, self.reuse, self.epoch_length)
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
        planned = self.kind.lookahead(largest_factor)
        if not self.on_demand:
            return planned
        return 0 if self.kind.by_batches else planned + self.kind.prefetched_on_demand - self.kind.prefetched_batches

    @property
    def has_length(self) -> bool:
        """Whether the length of epochs is known. If not, an epoch ends when a pass ends, but see `may_keep_steps`."""
        return self.kind.has_length(self.epoch_length)

    @property
    def may_keep_steps(self) -> bool:
        """Whether epochs without a known length can keep their number of steps, because the rest of a pass can follow later.

        That is a stream with a state, echoed in its workers: a resumed run continues within a pass.
        """
        keeps_place = self.kind.plans_in_workers and self.kind.resumes and self.sharing is None
        return keeps_place and not self.has_length and self.epoch_length == "fixed"

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

    def introduction(self, factor: float, *, keeps_steps: bool = False) -> list[str]:
        """Returns what is told of the loader when its run begins, line by line. The arguments are those of `remarks`."""
        reason = self.choice.reason
        reason = f"{InsertionPoint.auto.option} chose {self.choice.point}: {reason}" if reason else ""
        remarks = "; ".join(self.remarks(factor, keeps_steps=keeps_steps))
        return [line for line in (self.describe(factor), reason, remarks) if line]

    def why_not_deterministic(self, folder: str | None) -> str:
        """Returns why a run is not deterministic although the user asks for that. ``folder``: of its journal.

        Empty if the user does not ask, or if it is.
        """
        if not self.on_demand or self.replay is not None or not torch.are_deterministic_algorithms_enabled():
            return ""
        how = "" if folder else ", if its journal is written: by a Trainer with a logger, or EchoLoader(..., journal=folder)"
        replay = f", or repeat this run by factor=Replay({folder or 'folder'!r}){how}" if self.has_journal else ""
        return (
            "deterministic algorithms are asked for, but on demand the examples of a batch depend on when they arrive. "
            f"Give a number as the factor{replay}"
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

    def remarks(self, factor: float, *, keeps_steps: bool = False) -> list[str]:
        """Returns what the user should know of this loader, for people.

        ``keeps_steps``: whether epochs without a known length keep their number of steps, from the second one on.
        """
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
        if self.on_demand and not self.kind.num_workers and self.choice.reading is None and self.sharing is None:
            remarks.append(
                "nothing is echoed: without workers, no example arrives while a step runs, and the training waits for each one. "
                "Give the loader num_workers=2 or more"
            )
        if self.on_demand and self.kind.num_workers and self.choice.reading is None and self.sharing is None:
            if self.kind.plans_in_workers:
                remarks.append("a worker does not echo while the stream lets it wait for an example")
            elif not self.kind.by_batches:
                remarks.append("a worker does not echo while a read lets it wait: a source that hangs is not bridged")
        if not self.has_length:
            remarks.append(self._epochs_in_words(factor, keeps_steps=keeps_steps))
        if self.kind.hearers():
            remarks.append(
                "set_epoch is told the number of the pass over the data, which only at factor 1 and in whole epochs is the epoch"
            )
        if self.kind.remark:
            remarks.append(self.kind.remark)
        return remarks

    def _epochs_in_words(self, factor: float, *, keeps_steps: bool) -> str:
        """Returns where an epoch without a known length ends, and how many steps it has."""
        times = f"{'up to' if self.on_demand else 'about'} {factor:g} times as many steps"
        if factor == 1:
            grows = "" if keeps_steps else ", with a larger factor after that many times the steps"
            return f"an epoch ends when {self.kind.pass_ends}{grows}"
        if keeps_steps:
            return (
                f"the first epoch ends when {self.kind.pass_ends}, after {times} as without echoing; later epochs have as many "
                "as without echoing, and the rest of a pass follows in the next one"
            )
        return (
            f"an epoch ends when {self.kind.pass_ends}, after {times} as without echoing; Trainer(limit_train_batches=...) sets "
            "another number"
        )

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
        if self.sharing is not None:
            raise ValueError(
                f"factor='demand' is impossible with share= on {ranks} ranks: the ranks of a training take the reader's examples "
                "together, and on demand each would take them at its own pace. Use a number, or controller=TargetIdle()"
            )
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
